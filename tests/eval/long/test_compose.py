"""Scripts and the sound that is made of them."""

import itertools
import json

import numpy as np
import pytest
import soundfile

from build.clips import load_clips
from eval.config import load_config
from eval.long import compose as compose_module
from eval.long.compose import (
    KINDS,
    Deck,
    Event,
    Sentence,
    Stretch,
    compose,
    level_db,
    read_sentences,
    render,
    write_script,
)
from eval.long.plan import PEOPLE_PLAN, PLAN, Planned, minutes_of, plan
from serve.contract.errors import FileError
from serve.speech.features import WINDOW_S

RATE = 16_000


def decks(count=40, spoken_s=2.0):
    return {
        code: Deck([Sentence("f", 0.0, spoken_s, f"{code} {n}", code) for n in range(count)])
        for code in ("en", "es")
    }


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "passage"])
def test_scripts_have_what_their_kind_says(kind):
    languages = ("es", "en") if kind == "languages" else ("es",)
    events = write_script(kind, languages, decks(), 600.0, seed=3)
    stretches = [event.stretch for event in events]
    assert all(a.end_s == b.start_s for a, b in itertools.pairwise(stretches))
    assert 600.0 <= stretches[-1].end_s < 720.0
    alone = {s.what for s in stretches if s.snr_db is None}
    assert alone == {"speech", "silence"} | ({kind} & {"noise", "tones"} or alone - {"pauses"})
    assert any(s.snr_db for s in stretches) == (kind in ("noise", "languages"))
    assert all(10.0 <= s.snr_db <= 25.0 for s in stretches if s.snr_db)
    said = [s for s in stretches if s.what == "speech"]
    assert {s.language for s in said} == set(languages)
    assert said[0].language == "es"
    if kind == "pauses":
        assert max(s.end_s - s.start_s for s in stretches) > 20.0


def test_sentences_come_again_only_after_half_of_the_others():
    deck, rng = decks()["en"], np.random.default_rng(0)
    drawn = [deck.draw(rng).text for _ in range(500)]
    last = {}
    for number, text in enumerate(drawn):
        assert number - last.get(text, -100) > 20
        last[text] = number
    assert len(last) == 40


def test_scripts_depend_on_their_seed_alone():
    texts = [
        [e.stretch for e in write_script("languages", ("en", "es"), decks(), 200.0, seed)]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_the_sound_is_where_the_script_says():
    """Levels: speech, the noise under it, tones, noise alone, the room."""
    spans = (
        ("silence", 2.0, None),
        ("speech", 2.0, 15.0),
        ("noise", 1.0, 15.0),
        ("silence", 1.0, None),
        ("tones", 6.0, None),
        ("noise", 4.0, None),
        ("silence", 2.0, None),
    )
    events, at_s = [], 0.0
    for what, seconds, snr_db in spans:
        sentence = Sentence("f", 0.0, seconds, "a", "en") if what == "speech" else None
        events.append(Event(Stretch(what, at_s, at_s + seconds, snr_db=snr_db), sentence))
        at_s += seconds
    tone = np.sin(np.arange(2 * RATE) * 0.2).astype(np.float32)
    samples = render(events, lambda _: tone, np.random.default_rng(5))
    again = render(events, lambda _: tone, np.random.default_rng(5))
    assert np.array_equal(samples, again)
    assert samples.dtype == np.float32 and len(samples) == 18 * RATE
    room, speech, under, _, tones, noise, end = (
        level_db(samples[int(e.stretch.start_s * RATE) : int(e.stretch.end_s * RATE)])
        for e in events
    )
    assert -76 < room < -54 and abs(room - end) < 2
    assert -28 < speech < -19 and -31 < tones < -19
    assert -40.5 < under < -36  # 15 dB below what speech usually has
    assert -50 < noise < -32


def test_recordings_are_made_once_and_tell_what_is_in_them(tmp_path, monkeypatch):
    monkeypatch.setattr(compose_module, "CACHE", tmp_path)
    clip = np.sin(np.arange(RATE) * 0.2).astype(np.float32) * 0.1
    soundfile.write(tmp_path / "a.wav", clip, RATE)
    spans = [{"start": 0.0, "end": 0.4, "text": "One."}, {"start": 0.5, "end": 1.0, "text": "Two."}]
    line = {"file": "a.wav", "text": "One. Two.", "language": "en", "duration": 1.0}
    other = line | {"text": "Three.", "voice": "somebody"}
    manifest = tmp_path / "speech.jsonl"
    manifest.write_text("\n".join(map(json.dumps, (line | {"segments": spans}, other))))
    planned = [Planned("tones", ("en",), 0.2), Planned("pauses", ("en",), 0.1)]
    told = []
    sentences = list(read_sentences(manifest))
    made = compose(planned, 7, sentences, told.append)
    assert compose(planned, 7, sentences, told.append) == made
    assert len(told) == 2 and "composing 00-tones-en.flac: " in told[0]
    assert {s.text for one in made.recordings for s in one.sentences} == {"One.", "Two.", "Three."}
    # Any system can be given them.
    clips = load_clips(made.folder / "manifest.jsonl")
    for clip, one in zip(clips, made.recordings, strict=True):
        assert clip == one.clip(made.folder)
        assert soundfile.info(clip.path).duration == pytest.approx(one.duration, abs=1e-3)
    assert compose(planned, 8, sentences, told.append).folder != made.folder
    with pytest.raises(FileError, match=r"cannot read none\.jsonl"):
        list(read_sentences("none.jsonl"))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("composing-")]


def test_of_people_one_speaker_reads_and_long_passages_stay_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(compose_module, "CACHE", tmp_path)
    clip = np.sin(np.arange(40 * RATE) * 0.2).astype(np.float32) * 0.1
    soundfile.write(tmp_path / "long.wav", clip, RATE)
    soundfile.write(tmp_path / "short.wav", clip[: 2 * RATE], RATE)
    line = {"file": "short.wav", "language": "en", "duration": 2.0, "group": "g", "half": "report"}
    lines = [
        *(line | {"text": f"Ann {n}.", "speaker": "ann"} for n in range(9)),
        *(line | {"text": f"Bob {n}.", "speaker": "bob"} for n in range(5)),
        line | {"text": "Chosen.", "speaker": "ann", "half": "choose"},
        *(line | {"text": f"Who {n}?", "speaker": None} for n in range(20)),
        line | {"file": "long.wav", "text": "A tale.", "duration": 40.0, "speaker": None},
    ]
    manifest = tmp_path / "people.jsonl"
    manifest.write_text("\n".join(map(json.dumps, lines)))
    planned = [Planned("reading", ("en",), 1.0)]
    made = compose(planned, 0, list(read_sentences(manifest, "report")), lambda _: None)
    reading, passage = made.recordings
    said = {sentence.text for sentence in reading.sentences}
    assert said and all(text.startswith("Ann ") for text in said)
    pauses = [s.end_s - s.start_s for s in reading.stretches if s.what == "silence"]
    assert max(pauses[1:-1]) <= 1.5
    assert (passage.kind, passage.text, passage.duration) == ("passage", "A tale.", 40.0)
    whole = soundfile.info(made.folder / passage.file)
    assert whole.duration == pytest.approx(40.0, abs=1e-3)


def test_people_who_ship_are_who_the_plan_names():
    config = load_config("configs/base.toml").eval
    places = dict.fromkeys([config.manifest, config.heldout, config.passages])
    sentences = [one for place in places for one in read_sentences(place, config.half)]
    assert {code for row in PEOPLE_PLAN for code in row.languages} <= {
        one.language for one in sentences if one.speaker
    }
    assert any(one.end_s - one.start_s > WINDOW_S for one in sentences)


def test_the_speech_that_ships_is_enough():
    """Half of a language's sentences have to be said before one comes again."""
    config = load_config("configs/demo.toml").eval
    places = config.manifest, config.heldout
    sentences = [one for manifest in places for one in read_sentences(manifest)]
    for code in ("en", "es"):
        texts = {one.text for one in sentences if one.language == code}
        assert len(texts) > 150
    assert minutes_of(PLAN) >= 60 and all(5 <= one.minutes <= 20 for one in PLAN)
    assert plan(PEOPLE_PLAN) == list(PEOPLE_PLAN)
    hours = minutes_of(plan(PLAN, 150))
    assert hours == pytest.approx(150, abs=20)
    assert len(plan(PLAN, 1)) == 1
