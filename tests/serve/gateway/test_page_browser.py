"""The page in a real browser, before a gateway with models that answer with the page's prompt.

Each word of it is a segment of a second, of which the word takes the first half.
"""

import base64
import contextlib
import io
import json
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.gateways import WAIT_S, Running, until
from tests.jobs import keys_of
from tests.programs import open_browser
from tests.serve.gateway.test_page import metrics

pytestmark = pytest.mark.needs_program("chromium")

CLIPS = Path(__file__).parents[2] / "data"
CLIP = CLIPS / "en_question.wav"  # of 2.6 s
MICROPHONE = [  # it hears the clip, once
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
    f"--use-file-for-fake-audio-capture={CLIP}%noloop",
]
DROP = """
([files, target]) => {
  const transfer = new DataTransfer();
  for (const [name, data] of files) {
    const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
    transfer.items.add(new File([bytes], name));
  }
  document.querySelector(target).dispatchEvent(
    new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true }));
}
"""
# Keeps in `lit` the words that light up, in order: each is lit for half a second alone.
LIT = """
() => {
  window.lit = [];
  new MutationObserver(() => {
    const word = document.querySelector(".lit")?.textContent;
    if (word && window.lit.at(-1) !== word) window.lit.push(word);
  }).observe(document.body, { subtree: true, attributeFilter: ["class"] });
}
"""
# A transaction without end, until `busy` is told to be false; resolves once it has begun.
BUSY = """
() => new Promise((resolve) => {
  window.busy = true;
  indexedDB.open("earshot").onsuccess = ({ target }) => {
    const jobs = target.result.transaction(["jobs", "audio"], "readwrite").objectStore("jobs");
    const again = () => {
      resolve();
      if (window.busy) jobs.get("none").onsuccess = again;
    };
    jobs.get("none").onsuccess = again;
  };
})
"""
# The contrasts of controls' borders to what is behind them, as WCAG 2 counts it, smallest first.
# Contrasts of texts are axe's.
BORDERS = """
() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (text) => {
    const [r, g, b] = rgb(text).map((v) => v / 255).map((v) =>
      v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if ((rgb(colour)[3] ?? 1) > 0) return colour;
    }
  };
  const found = [];
  for (const element of document.querySelectorAll("button, select, input, #intake, article")) {
    const style = getComputedStyle(element);
    const drawn = parseFloat(style.borderTopWidth) && style.borderTopStyle !== "none";
    if (!drawn || !element.checkVisibility() || element.disabled) continue;
    const [a, b] = [light(style.borderTopColor), light(behind(element.parentElement))];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), element.outerHTML.slice(0, 90)]);
  }
  return found.sort((a, b) => a[0] - b[0]);
}
"""
WCAG = {
    "runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}
}


@pytest.fixture(scope="module")
def browser():
    expect.set_options(timeout=WAIT_S * 1000)
    with open_browser(*MICROPHONE) as browser:
        yield browser


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    running = Running(
        tmp_path_factory.mktemp("run"), 600.0, triton_metrics=metrics(), max_request_mb=4
    )
    running.run(running.gateway.state.read())
    with contextlib.closing(running):
        yield running
        running.triton.release()
        until(lambda: running.services.admission.requests == 0)
        assert running.services.admission.bytes == 0


@pytest.fixture
def visit(browser, gateway):
    """Open the page as a new visitor does; it must not ask for anything elsewhere, or fail."""
    contexts, faults = [], []

    def visit(running=gateway, status="demo, ready", **options):
        options = {"viewport": {"width": 1000, "height": 900}, **options}
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(WAIT_S * 1000)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        own = (f"http://{running.http}/", "blob:")
        page.on("request", lambda sent: sent.url.startswith(own) or faults.append(sent.url))
        page.goto(own[0])
        expect(page.locator("#status")).to_have_text(status)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert faults == []


@pytest.fixture
def page(visit):
    return visit()


def say(page, text):
    """What the models are to hear in what is sent from here on."""
    page.locator("#settings").evaluate("element => { element.open = true; }")
    page.fill("#prompt", text)
    page.locator("#prompt").blur()


def drop(page, *paths):
    files = [(path.name, base64.b64encode(path.read_bytes()).decode()) for path in paths]
    page.evaluate(DROP, [files, "#intake"])


def card(page, name=CLIP.name):
    return page.get_by_role("article", name=name)


def done(page, text, name=CLIP.name):
    """The card of a file, once it says this."""
    expect(card(page, name).locator(".text")).to_contain_text(text)
    expect(card(page, name)).to_have_attribute("data-state", "done")
    return card(page, name)


def transcribed(page, text):
    """The card of the clip, in which this is heard."""
    say(page, text)
    drop(page, CLIP)
    return done(page, text)


def reload(page):
    """Load the page anew, once all that it keeps is written."""
    expect(page.locator("#cards")).to_have_attribute("data-writes", "0")
    page.reload()


def remove(page, found):
    """Remove a card, and say yes to the question."""
    page.once("dialog", lambda dialog: dialog.accept())
    found.get_by_role("button", name="Remove").click()


def downloaded(page, found, format):
    """What a card's button for a format saves."""
    name = found.get_attribute("aria-label")
    with page.expect_download() as download:
        found.get_by_role("button", name=f"Download {name} as {format}").click()
    assert download.value.suggested_filename == f"{name.removesuffix('.wav')}.{format}"
    return Path(download.value.path()).read_text(encoding="utf-8")


def saved_words(page, found):
    segments = json.loads(downloaded(page, found, "json"))["segments"]
    return [word for segment in segments for word in segment["words"]]


def test_a_dropped_clip_becomes_text_whose_words_light_up_as_they_are_played(page, gateway):
    found = transcribed(page, "one two three")
    assert gateway.triton.inputs[-1]["AUDIO"] == CLIP.read_bytes()
    expect(found.locator(".facts")).to_contain_text("Spanish")
    assert found.locator(".lit").count() == 0
    page.evaluate(LIT)
    found.get_by_role("button", name=f"Play {CLIP.name}").click()
    until(lambda: page.evaluate("window.lit") == ["one", "two", "three"])
    expect(found.get_by_role("button", name=f"Play {CLIP.name}")).to_be_visible()  # it has ended
    found.get_by_text("two", exact=True).click()
    expect(found.locator(".lit")).to_have_text("two")
    expect(found.get_by_role("slider")).to_have_attribute("aria-valuetext", re.compile("0:0[12]"))


@pytest.mark.nightly
def test_without_a_mouse(page):
    page.on("filechooser", lambda chooser: None)  # from here on there is none on a screen
    say(page, "one two three")
    for _ in range(12):
        page.keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement.id") == "choose":
            break
    assert page.evaluate("document.activeElement.id") == "choose"
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Enter")
    chooser.value.set_files(CLIP)
    found = done(page, "one two three")
    found.locator(".text").focus()
    page.keyboard.press("End")
    expect(found.locator(".lit")).to_have_text("three")
    page.keyboard.press("ArrowLeft")
    expect(found.locator(".lit")).to_have_text("two")
    page.keyboard.press("Home")
    page.keyboard.press(" ")
    expect(found.get_by_role("button", name=f"Pause {CLIP.name}")).to_be_visible()
    page.keyboard.press(" ")
    expect(found.get_by_role("button", name=f"Play {CLIP.name}")).to_be_visible()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Copy"


@pytest.mark.nightly
def test_a_reload_loses_nothing(page, gateway):
    transcribed(page, "one two")
    say(page, "wait for it")
    drop(page, CLIPS / "en_two.wav")
    expect(card(page, "en_two.wav").locator(".word")).to_have_text(["wait"])
    page.wait_for_timeout(3000)  # what comes is kept once a second
    reload(page)
    found = done(page, "one two")
    found.get_by_role("button", name=f"Play {CLIP.name}").click()
    expect(found.locator(".lit")).to_have_text("one")
    half = card(page, "en_two.wav")
    expect(half).to_have_attribute("data-state", "interrupted")
    expect(half.locator(".problem")).to_contain_text("stopped when you left")
    assert page.input_value("#prompt") == "wait for it"
    until(lambda: not gateway.triton.waiting)  # the page's going has ended it
    half.get_by_role("button", name="Try again").click()
    until(lambda: gateway.triton.waiting)
    gateway.triton.release()
    done(page, "wait", "en_two.wav")
    assert gateway.triton.inputs[-1]["AUDIO"] == (CLIPS / "en_two.wav").read_bytes()
    page.once("dialog", lambda dialog: dialog.dismiss())
    half.get_by_role("button", name="Remove").click()
    expect(half).to_be_visible()  # it was asked for, and not wanted
    remove(page, half)
    expect(half).to_have_count(0)
    reload(page)
    done(page, "one two")
    assert card(page, "en_two.wav").count() == 0


@pytest.mark.nightly
def test_it_is_not_left_unasked_before_a_correction_is_written(page):
    found = transcribed(page, "one two")
    other = page.context.new_page()  # its own use of the database has all others wait
    other.goto(page.url)
    other.evaluate(BUSY)
    found.get_by_text("two", exact=True).dblclick()
    page.keyboard.type("three")
    page.keyboard.press("Enter")
    done(page, "one three")
    with page.expect_event("dialog") as asked:
        page.evaluate("() => void setTimeout(() => location.reload())")
    assert asked.value.type == "beforeunload"
    asked.value.dismiss()
    other.evaluate("() => { window.busy = false; }")
    reload(page)
    done(page, "one three")


def test_what_is_said_is_written_while_it_is_said(page, gateway):
    say(page, "wait for it")
    page.evaluate(
        """() => {
            window.open_texts = [];
            const note = () => document.querySelectorAll(".text .open").forEach(
                (part) => window.open_texts.push(part.textContent));
            const all = {subtree: true, childList: true, characterData: true, attributes: true};
            new MutationObserver(note).observe(document.body, all);
        }"""
    )
    page.get_by_role("button", name="Speak").click()
    found = page.get_by_role("article", name="Recording")
    # Until it is heard again, text may change: the page marks it, if only for a moment.
    until(lambda: gateway.triton.release() or "wait" in page.evaluate("window.open_texts.join()"))
    first = found.locator(".text span").first
    until(lambda: gateway.triton.release() or first.get_attribute("class") != "open")
    expect(first).to_contain_text("wait")
    page.wait_for_timeout(2000)
    page.get_by_role("button", name="Stop").click()
    until(lambda: gateway.triton.release() or found.get_attribute("data-state") == "done")

    expect(found.locator(".open")).to_have_count(0)
    text = found.locator(".text").inner_text()

    say(page, "one two")
    reload(page)
    expect(found.locator(".text")).to_contain_text("wait")
    cue = re.fullmatch(
        r"1\n00:00:0(\d),\d{3} --> 00:00:0(\d),\d{3}\n(.*)\n", downloaded(page, found, "srt")
    )
    assert (cue[1], cue[3]) == ("0", text) and int(cue[2]) > 0
    assert json.loads(downloaded(page, found, "json"))["text"] == text
    assert downloaded(page, found, "vtt").startswith("WEBVTT\n\n00:00:0")
    found.get_by_role("button", name="Transcribe the recording").click()
    expect(found.locator(".word")).to_have_text(["one", "two"])
    heard, rate = soundfile.read(io.BytesIO(gateway.triton.inputs[-1]["AUDIO"]))
    clip, _ = soundfile.read(CLIP)
    assert rate == 24_000
    heard = soxr.resample(heard, rate, 16_000)
    # A browser on a busy machine drops samples here and there, so not the whole is compared.
    assert max(likeness(heard, clip[i : i + 1600]) for i in range(6_400, 16_000, 1600)) > 0.95


def likeness(heard, said):
    """The correlation of sound with the stretch of another that it is most like."""
    products = np.correlate(heard, said, "valid")
    powers = np.convolve(heard**2, np.ones(len(said)), "valid")
    return np.max(products / np.sqrt(np.maximum(powers, 1e-9) * np.sum(said**2)))


@pytest.mark.nightly
def test_what_goes_wrong_is_said_in_words(page, gateway, tmp_path):
    say(page, "error:AudioError: audio cannot be decoded")
    drop(page, CLIP)
    problem = card(page).locator(".problem")
    expect(problem).to_contain_text("cannot use the audio in this file")
    assert card(page).get_by_role("button", name="Try again").count() == 0
    remove(page, card(page))
    expect(card(page)).to_have_count(0)

    say(page, "error:OverloadedError: too much to do")
    drop(page, CLIP)
    expect(problem).to_contain_text("Trying again in")
    expect(problem).to_contain_text("The server is busy.")
    card(page).get_by_role("button", name="Stop").click()
    expect(card(page)).to_have_attribute("data-state", "interrupted")
    expect(problem).to_have_text("You stopped this.")

    say(page, "late:DeviceError: it failed")
    card(page).get_by_role("button", name="Try again").click()
    expect(problem).to_contain_text("could not finish")
    expect(problem).to_contain_text("The text up to there is below.")
    expect(card(page).locator(".word")).to_have_text(["late:DeviceError:"])

    large = tmp_path / "large.wav"
    large.write_bytes(bytes(5 * 2**20))
    drop(page, large)
    expect(page.get_by_role("alert")).to_contain_text("large.wav is too large: 5.0 MB")
    page.route("**/transcriptions", lambda route: route.abort())  # the rest of the server answers
    card(page).get_by_role("button", name="Try again").click()
    expect(problem).to_contain_text("broke off during the upload. Try again.")
    page.unroute("**/transcriptions")
    page.context.set_offline(True)
    card(page).get_by_role("button", name="Try again").click()
    expect(problem).to_contain_text("cannot be reached")
    expect(problem).to_contain_text("The text below is from before.")
    expect(page.locator("#status")).to_have_text("does not answer")
    page.context.set_offline(False)
    say(page, "at last")
    card(page).get_by_role("button", name="Try again").click()
    done(page, "at last")


@pytest.mark.nightly
def test_of_a_cut_file_what_is_there_is_transcribed_if_asked_for(page, gateway):
    say(page, "error:CutShortError: audio is cut short; ask with partial = true")
    drop(page, CLIP)
    expect(card(page).locator(".problem")).to_have_text(
        "The end of this file is missing. Send the whole file if you have it."
    )
    assert card(page).get_by_role("button", name="again").count() == 0
    say(page, "one two")
    card(page).get_by_role("button", name="Transcribe what is there").click()
    found = done(page, "one two")
    assert gateway.triton.inputs[-1]["PARTIAL"] is True
    expect(found.locator(".problem")).to_be_hidden()
    expect(found.get_by_role("listitem")).to_have_text(["Audio is cut short: 1.50 s"])
    assert json.loads(downloaded(page, found, "json"))["warnings"]
    say(page, "silence")
    found.get_by_role("button", name="Transcribe again").click()
    expect(found.locator(".text")).to_have_text("No speech was found in the part that is there.")
    expect(found.locator(".facts")).not_to_contain_text("nknown")


def test_a_server_that_wants_a_key_is_given_one(visit, start, tmp_path):
    page = visit(start(keys_file=keys_of(tmp_path)), "needs an API key")
    expect(page.get_by_label("API key")).to_be_focused()
    page.keyboard.type("secret-c")
    drop(page, CLIP)
    expect(card(page).locator(".problem")).to_contain_text("needs a valid API key")
    page.get_by_label("API key").fill("secret-a")
    page.get_by_label("API key").blur()
    expect(page.locator("#status")).to_have_text("demo, ready")
    reload(page)  # the tab keeps it
    expect(page.locator("#status")).to_have_text("demo, ready")
    card(page).get_by_role("button", name="Try again").click()
    done(page, "hello")


@pytest.mark.nightly
def test_a_folder_and_everything_as_one_archive(page, tmp_path):
    say(page, "one")
    folder = tmp_path / "talks"
    folder.mkdir()
    for name in ("a.wav", "b.WAV"):
        (folder / name).write_bytes(CLIP.read_bytes())
    (folder / "notes.txt").write_text("no audio")
    page.set_input_files("#folder", folder)
    expect(page.get_by_role("alert")).to_have_text(
        "1 file was skipped: it does not look like audio."
    )
    expect(page.locator("#count")).to_have_text("2 recordings")
    for name in ("a.wav", "b.WAV"):
        done(page, "one", name)
    with page.expect_download() as download:
        page.get_by_role("button", name="Download all as srt").click()
    archive = zipfile.ZipFile(io.BytesIO(Path(download.value.path()).read_bytes()))
    assert archive.testzip() is None
    assert sorted(archive.namelist()) == ["a.srt", "b.srt"]
    assert archive.read("a.srt") == b"1\n00:00:00,000 --> 00:00:00,833\none\n"


@pytest.mark.nightly
def test_words_are_corrected_where_they_stand_and_stay_so(page):
    found = transcribed(page, "one two three four")
    found.get_by_role("button", name="Correct").click()
    found.get_by_text("two", exact=True).click()
    expect(found.get_by_role("textbox", name="Correct: two")).to_be_focused()
    page.keyboard.type("to <i>")
    page.keyboard.press("Tab")
    expect(found.get_by_role("textbox", name="Correct: three")).to_be_focused()
    page.keyboard.type("no")
    page.keyboard.press("Escape")
    expect(found.locator(".word")).to_have_text(["one", "to <i>", "three", "four"])
    expect(found.locator(".text")).to_be_focused()
    found.get_by_text("four", exact=True).click()
    page.keyboard.type("for")
    found.get_by_role("button", name="Done").click()  # keeps the word
    expect(found.locator(".word")).to_have_text(["one", "to <i>", "three", "for"])
    expect(found.get_by_role("button", name="Correct")).to_be_focused()
    expect(found.get_by_role("button", name="Done")).to_have_count(0)
    found.get_by_text("three", exact=True).click()  # plays it again
    expect(found.get_by_role("textbox")).to_have_count(0)

    reload(page)
    found = done(page, "one to <i> three for")
    expect(found.locator(".facts")).to_contain_text("corrected")
    found.get_by_text("three", exact=True).dblclick()
    page.keyboard.press("Delete")
    page.keyboard.press("Enter")
    expect(found.locator(".word")).to_have_text(["one", "to <i>", "for"])
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    expect(found.get_by_role("textbox", name="Correct: one")).to_be_focused()
    page.keyboard.type("1")
    found.locator("h3").click()  # a click elsewhere keeps it
    expect(found.locator(".word")).to_have_text(["1", "to <i>", "for"])

    table = json.loads(downloaded(page, found, "json"))
    assert table["text"] == "1 to <i> for"
    assert [one["text"] for one in table["segments"]] == [" 1", " to <i>", " for"]
    assert [word["word"] for word in saved_words(page, found)] == ["1", "to <i>", "for"]
    assert "00:00:00.000 --> 00:00:01.500\n1 to &lt;i>\n" in downloaded(page, found, "vtt")

    page.once("dialog", lambda dialog: dialog.dismiss())
    found.get_by_role("button", name="Again").click()
    expect(found.locator(".word")).to_have_text(["1", "to <i>", "for"])
    page.once("dialog", lambda dialog: dialog.accept())
    found.get_by_role("button", name="Again").click()
    expect(found.locator(".word")).to_have_text(["one", "two", "three", "four"])
    expect(found.locator(".facts")).not_to_contain_text("corrected")


@pytest.mark.nightly
def test_doubtful_words_are_marked_for_those_who_want_it(page):
    found = transcribed(page, "one clear mumbled")
    doubtful = found.locator(".doubtful")
    expect(doubtful).to_have_text(["mumbled"])
    expect(doubtful).to_have_attribute("title", "25 % sure")
    expect(doubtful).to_have_css("text-decoration-line", "none")
    page.check("#doubts")
    expect(doubtful).to_have_css("text-decoration-line", "underline")
    expect(doubtful).to_have_css("text-decoration-style", "dotted")
    expect(page.locator("#chosen")).to_contain_text("doubts marked")

    reload(page)
    found = done(page, "one clear mumbled")
    expect(found.locator(".doubtful")).to_have_css("text-decoration-line", "underline")
    saved = [word.get("confidence") for word in saved_words(page, found)]
    assert saved == [None, 0.9, 0.254]
    found.get_by_text("mumbled", exact=True).dblclick()
    page.keyboard.type("meant")
    page.keyboard.press("Enter")
    done(page, "one clear meant")
    expect(found.locator(".doubtful")).to_have_count(0)


@pytest.mark.nightly
def test_a_text_without_times_of_words_is_corrected_as_a_whole(page):
    page.locator("#settings").evaluate("element => { element.open = true; }")
    page.uncheck("#words")
    found = transcribed(page, "one two")
    found.get_by_text("two", exact=True).dblclick()
    page.keyboard.type("two and a half")
    page.keyboard.press("Enter")
    done(page, "one two and a half")
    reload(page)
    assert downloaded(page, done(page, "one two and a half"), "txt") == "one\ntwo and a half\n"


@pytest.mark.nightly
@pytest.mark.parametrize("touch", [False, True])
def test_a_long_text_shows_that_it_goes_on_and_is_shown_whole(visit, touch):
    page = visit(viewport={"width": 380, "height": 700}, has_touch=touch)
    whole = io.BytesIO()
    soundfile.write(whole, np.zeros(8_000 * 80, np.int16), 8_000, format="WAV")
    say(page, " ".join(f"Versicherungsgesellschaft{i}" for i in range(80)))
    file = {"name": "long.wav", "mimeType": "audio/wav", "buffer": whole.getvalue()}
    page.set_input_files("#files", file)
    words = done(page, "gesellschaft79", "long.wav").locator(".word")
    found, last = card(page, "long.wav"), words.last
    expect(last).not_to_be_in_viewport()
    fade = "(element, side) => getComputedStyle(element, side).opacity"
    box = found.locator(".reading > div")
    until(lambda: box.evaluate(fade, "::after") == "1")
    assert box.evaluate(fade, "::before") == "0"

    found.locator(".text").focus()
    page.keyboard.press("End")  # the keyboard gets to the end in the box
    expect(last).to_be_in_viewport()
    until(lambda: (box.evaluate(fade, "::before"), box.evaluate(fade, "::after")) == ("1", "0"))
    page.keyboard.press("Home")
    expect(words.first).to_be_in_viewport()
    page.evaluate("document.querySelector('.text').scrollTop = 1e6")
    expect(last).to_be_in_viewport()
    page.keyboard.press(" ")
    expect(words.nth(2)).to_be_in_viewport()  # read along
    page.keyboard.press(" ")

    more = found.get_by_role("button", name="Show all")
    if touch:
        more.tap()
    else:
        more.focus()
        page.keyboard.press("Enter")
    assert found.locator(".text").evaluate("text => text.scrollHeight - text.clientHeight") <= 1
    until(lambda: box.evaluate(fade, "::after") == "0")
    accessible(page)
    found.get_by_role("button", name="Show less").click()
    expect(more).to_be_in_viewport()
    expect(last).not_to_be_in_viewport()


@pytest.mark.nightly
def test_languages_have_names_even_if_browsers_do_not_know_them(visit, start):
    offers = metrics().replace(b'"en,es"', b'"ba,bo,ht,jw"')
    running = start(triton_metrics=offers)
    running.run(running.gateway.state.read())
    page = visit(running)
    names = page.locator("#language option").evaluate_all("all => all.map(one => one.text)")
    assert names[1:] == ["Bashkir", "Haitian Creole", "Javanese", "Tibetan"]
    say(page, "one")
    page.select_option("#language", "bo")
    expect(page.locator("#chosen")).to_contain_text("Tibetan")
    drop(page, CLIP)
    expect(done(page, "one").locator(".facts")).to_contain_text("Tibetan")


def test_settings_are_what_the_engine_offers_and_what_is_sent(page, gateway):
    say(page, "one")
    choices = page.locator("#language option").evaluate_all("all => all.map(one => one.text)")
    assert choices == ["Detect automatically", "English", "Spanish"]
    choices = page.locator("#beam_size option").evaluate_all("all => all.map(one => one.text)")
    assert choices == ["Standard: fast", "Fast", "Careful", "Most careful"]
    page.select_option("#language", "en")
    page.select_option("#beam_size", label="Careful")
    page.select_option("#vad", "false")
    page.uncheck("#words")
    reload(page)
    expect(page.locator("#chosen")).to_have_text("English, careful, everything heard, with hints")
    drop(page, CLIP)
    found = done(page, "one")
    inputs = gateway.triton.inputs[-1]
    assert (inputs["LANGUAGE"], inputs["BEAM_SIZE"], inputs["VAD"]) == ("en", 3, "off")
    assert "WORD_TIMESTAMPS" not in inputs
    found.get_by_text("one", exact=True).click()  # without words segments are played
    expect(found.locator(".lit")).to_have_text("one")


@pytest.mark.nightly
def test_the_servers_state_is_shown_to_whoever_wants_it(page):
    expect(page.get_by_text("Slots")).to_be_hidden()
    page.get_by_text("For the people who run this server").click()
    expect(page.get_by_text("Slots")).to_be_visible()
    terms = page.locator("#figures dt").all_text_contents()
    values = page.locator("#figures dd:not(.about)").all_text_contents()
    found = dict(zip(terms, values, strict=True))
    assert found == {"Queue": "1", "Slots": "2 / 4"}


@pytest.mark.parametrize(
    ("width", "scheme"), [(360, "dark"), pytest.param(1200, "light", marks=pytest.mark.nightly)]
)
def test_everything_fits_and_can_be_used_by_all(visit, width, scheme):
    page = visit(viewport={"width": width, "height": 800}, color_scheme=scheme)
    accessible(page)
    say(
        page, "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft two"
    )
    drop(page, CLIP)
    found = done(page, "two")
    say(page, "error:AudioError: audio cannot be decoded")
    drop(page, CLIPS / "en_two.wav")
    expect(card(page, "en_two.wav").locator(".problem")).to_contain_text("cannot use the audio")
    found.get_by_text("two", exact=True).click()
    page.get_by_text("For the people who run this server").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    accessible(page)
    found.get_by_role("button", name="Correct").click()
    found.get_by_text("two", exact=True).click()
    expect(found.get_by_role("textbox")).to_be_focused()
    accessible(page)
    paper = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper))) > 3 * 128) == (scheme == "light")


def accessible(page):
    """What axe can check of WCAG 2.2 AA, and the contrast of borders, which it does not."""
    results = Axe().run(page, options=WCAG)
    assert results.violations_count == 0, results.generate_report()
    assert len(results.response["passes"]) > 10
    borders = page.evaluate(BORDERS)
    assert len(borders) > 2 and borders[0][0] >= 3.0, borders[0]


@pytest.mark.nightly
def test_speakers_have_names_that_can_be_written_anew_and_are_saved(page, gateway):
    say(page, "one two three")
    assert page.locator("#num_speakers").is_disabled()
    page.select_option("#speakers", label="Tell speakers apart by voice")
    page.fill("#num_speakers", "2")
    drop(page, CLIP)
    found = done(page, "three")
    asked = gateway.triton.inputs[-1]
    assert (asked["DIARIZE"], asked["NUM_SPEAKERS"]) == (True, 2)
    names = found.locator(".speaker")
    expect(names).to_have_text(["A", "B", "A"])
    colours = [names.nth(i).evaluate("e => getComputedStyle(e).color") for i in range(3)]
    assert colours[0] == colours[2] != colours[1]

    hint = found.get_by_text("Choose a speaker's name to change it")
    expect(hint).to_be_visible()
    pencil = "e => getComputedStyle(e, '::after').maskImage"
    assert "pencil.svg" in names.first.evaluate(pencil)
    names.nth(1).click()
    page.keyboard.type("Zoë")
    page.keyboard.press("Enter")
    expect(hint).to_be_hidden()
    for key in ("Enter", " "):  # again and again
        names.first.focus()
        page.keyboard.press(key)
        expect(names.first).to_have_role("textbox")
        page.keyboard.type("Ann")
        page.keyboard.press("Escape")  # not kept
        expect(names.first).to_be_focused()
    expect(names).to_have_text(["A", "Zoë", "A"])
    reload(page)
    expect(names).to_have_text(["A", "Zoë", "A"])
    assert page.input_value("#speakers") == "voice"
    assert Axe().run(page, options=WCAG).violations_count == 0
    assert downloaded(page, found, "txt") == "A: one\nZoë: two\nA: three\n"
    assert "\nZoë: two\n" in downloaded(page, found, "srt")
    assert "\n<v Zoë>two\n" in downloaded(page, found, "vtt")
    segments = json.loads(downloaded(page, found, "json"))["segments"]
    assert [segment["speaker"] for segment in segments] == ["A", "Zoë", "A"]

    say(page, "one two")
    page.select_option("#speakers", label="Each speaker has a microphone of their own (channel)")
    page.once("dialog", lambda dialog: dialog.accept())  # the names are lost
    found.get_by_role("button", name="Again").click()
    until(lambda: gateway.triton.inputs[-1].get("CHANNELS") == "split")


@pytest.mark.nightly
def test_jobs_are_listed_cancelled_and_their_results_saved(page, visit, start, config):
    assert page.locator("#jobs").is_hidden()  # that server has none
    with_jobs = start(triton_metrics=metrics(), jobs=config)
    with_jobs.run(with_jobs.gateway.state.read())
    page = visit(with_jobs)
    say(page, "wait for it")
    page.locator("#jobs summary").click()
    expect(page.locator("#no-jobs")).to_be_visible()

    name = "<b>talk</b>.wav"
    audio = {"mimeType": "audio/wav", "buffer": CLIP.read_bytes()}
    page.set_input_files("#job-files", [{"name": one, **audio} for one in (name, "other.wav")])
    rows = page.locator("#job-rows tr")
    expect(rows).to_have_count(2)
    expect(page.get_by_role("rowheader", name=name)).to_be_visible()
    page.get_by_role("button", name="Cancel other.wav").click()
    expect(rows.filter(has_text="other.wav")).to_contain_text("Cancelled")
    until(lambda: with_jobs.triton.waiting)
    with_jobs.triton.release()
    expect(rows.filter(has_text="talk")).to_contain_text("Done")
    assert Axe().run(page, options=WCAG).violations_count == 0
    with page.expect_download() as download:
        page.get_by_role("button", name=f"Download {name} as txt").click()
    assert Path(download.value.path()).read_text(encoding="utf-8").strip() == "wait for it"
