"""Scripts and the sound that is made of them."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import soundfile

from build.clips import Clip, load_clips
from eval.config import load_config
from eval.long import compose as compose_module
from eval.long.compose import KINDS, Stretch, compose, read_manifest, render, write_script
from eval.long.run import PASSAGES
from serve.contract.errors import ConfigError
from serve.speech.features import WINDOW_S

RATE = 16_000


def clip_of(text, language, seconds):
    return Clip("f", Path("f"), text, language, seconds)


SENTENCES = {
    code: [clip_of(f"{code} {number}", code, 2.0) for number in range(40)] for code in ("en", "es")
}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "passage"])
def test_scripts_have_what_their_kind_says(kind):
    languages = ("es", "en") if kind == "languages" else ("es",)
    items = write_script(kind, languages, SENTENCES, 600.0, np.random.default_rng(3))
    stretches = [stretch for stretch, _ in items]
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
    items, at_s = [], 0.0
    for what, seconds, snr_db in spans:
        clip = clip_of("a", "en", seconds) if what == "speech" else None
        items.append((Stretch(what, at_s, at_s + seconds, snr_db=snr_db), clip))
        at_s += seconds
    tone = np.sin(np.arange(2 * RATE) * 0.2).astype(np.float32)
    samples = render(items, lambda _: tone, np.random.default_rng(5))
    again = render(items, lambda _: tone, np.random.default_rng(5))
    assert np.array_equal(samples, again)
    assert samples.dtype == np.float32 and len(samples) == 18 * RATE
    room, speech, under, _, tones, noise, end = (
        10 * np.log10(np.square(samples[int(s.start_s * RATE) : int(s.end_s * RATE)]).mean())
        for s, _ in items
    )
    assert -76 < room < -54 and abs(room - end) < 2
    assert -28 < speech < -19 and -31 < tones < -19
    assert -40.5 < under < -36  # 15 dB below what speech usually has
    assert -50 < noise < -32


@pytest.fixture
def clips_of(manifest, tmp_path, monkeypatch):
    """Makes clips with these fields."""
    monkeypatch.setattr(compose_module, "CACHE", tmp_path / "cache")
    return lambda *fields: load_clips(manifest(*fields))


def test_recordings_are_made_once_and_tell_what_is_in_them(clips_of, tmp_path):
    clips = clips_of(*({"text": text} for text in ("One.", "Two.", "Three.")))
    folder = compose(clips, 0.1, 7)
    assert compose(clips, 0.1, 7) == folder
    recordings = read_manifest(folder / "manifest.jsonl")
    assert [one.file for one in recordings] == ["00-reading-en.flac"]
    assert {s.text for one in recordings for s in one.sentences} == {"One.", "Two.", "Three."}
    (clip,) = load_clips(folder / "manifest.jsonl")  # any system can be given it
    assert (clip.text, clip.duration_s) == (recordings[0].text, recordings[0].duration)
    assert soundfile.info(clip.path).duration == pytest.approx(clip.duration_s, abs=1e-3)
    other = compose(clips, 0.1, 8)
    assert {*(tmp_path / "cache").iterdir()} == {folder, other}


def test_of_people_one_speaker_reads_and_long_passages_stay_whole(clips_of):
    clips = clips_of(
        *({"text": f"Ann {n}.", "speaker": "ann"} for n in range(9)),
        *({"text": f"Bob {n}.", "speaker": "bob"} for n in range(5)),
        *({"text": f"Who {n}?"} for n in range(20)),
        # The scores count words, so languages without spaces are left out.
        *({"text": f"我{n}", "language": "zh", "speaker": "li"} for n in range(30)),
        {"text": "A tale.", "duration": 40.0},
    )
    folder = compose(clips, 1.0, 0)
    reading, passage = read_manifest(folder / "manifest.jsonl")
    said = {sentence.text for sentence in reading.sentences}
    assert said and all(text.startswith("Ann ") for text in said)
    pauses = [s.end_s - s.start_s for s in reading.stretches if s.what == "silence"]
    assert max(pauses[1:-1]) <= 1.5
    assert (passage.kind, passage.text, passage.duration) == ("passage", "A tale.", 40.0)
    whole = soundfile.info(folder / passage.file)
    assert whole.duration == pytest.approx(40.0, abs=1e-3)


def test_the_speech_that_ships_is_enough():
    people = load_config("configs/base.toml").eval
    places = dict.fromkeys([people.manifest, people.heldout, PASSAGES])
    clips = [clip for place in places for clip in load_clips(place) if clip.half == people.half]
    assert {"en", "de", "nl"} <= {clip.language for clip in clips if clip.speaker}
    assert any(clip.duration_s > WINDOW_S for clip in clips)


def test_without_a_sentence_there_is_nothing_to_make():
    with pytest.raises(ConfigError, match="no clip of less than 30 s has a text"):
        compose([clip_of("", None, 1.0)], None, 0)
