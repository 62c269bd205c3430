"""What a real browser records: whole as it is, and slice by slice; cut anywhere else."""

import base64
from itertools import accumulate
from pathlib import Path

import pytest

from serve.contract.errors import AudioError
from serve.speech.containers import is_cut_off
from tests.programs import open_browser
from tests.serve.speech.sounds import decode

pytestmark = [pytest.mark.needs_program("chromium"), pytest.mark.nightly]

CLIP = Path(__file__).parents[2] / "data" / "en_question.wav"
MICROPHONE = [
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
    f"--use-file-for-fake-audio-capture={CLIP}%noloop",
]
SECONDS = 2.0
RECORD = """
async ([type, sliceMs, ms]) => {
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  const recorder = new MediaRecorder(stream, { mimeType: type });
  const parts = [];
  recorder.ondataavailable = (event) => parts.push(event.data);
  const stopped = new Promise((resolve) => (recorder.onstop = resolve));
  recorder.start(sliceMs);
  await new Promise((resolve) => setTimeout(resolve, ms));
  recorder.stop();
  await stopped;
  const bytes = new Uint8Array(await new Blob(parts).arrayBuffer());
  const text = Array.from(bytes, (one) => String.fromCharCode(one)).join("");
  return [btoa(text), parts.map((part) => part.size)];
}
"""


@pytest.fixture(scope="module", params=["audio/webm;codecs=opus", "audio/mp4"])
def recorded(request, tmp_path_factory):
    """A recording, and where each slice of it ends."""
    page_file = tmp_path_factory.mktemp("page") / "page.html"  # an origin that may hear
    page_file.write_text("<title>recorder</title>")
    with open_browser(*MICROPHONE) as browser:
        page = browser.new_page()
        page.goto(page_file.as_uri())
        data, sizes = page.evaluate(RECORD, [request.param, 250, SECONDS * 1000])
    return base64.b64decode(data), list(accumulate(sizes))


def test_it_is_whole_and_so_is_each_slice_with_those_before_it(recorded):
    data, ends = recorded
    assert len(ends) > 3 and ends[-1] == len(data)
    lengths = []
    for end in ends[1:]:
        assert not is_cut_off(data[:end])
        lengths.append(len(decode(data[:end])[0]) / 16_000)
    assert lengths == sorted(lengths)
    assert SECONDS / 2 < lengths[-1] < 2 * SECONDS


def test_it_is_known_to_be_cut_nearly_anywhere_else(recorded):
    data, _ = recorded
    places = range(len(data) // 2, len(data) - 1, 37)
    known = [is_cut_off(data[:end]) for end in places]
    assert sum(known) > 0.9 * len(known)
    cut = data[: places[known.index(True)]]
    with pytest.raises(AudioError, match="audio is cut short"):
        decode(cut)
    samples, warnings = decode(cut, partial=True)
    assert len(samples) and warnings
