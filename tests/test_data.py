"""What the tests are given: the small checkpoint and its draft, and clips that are as listed."""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from build.checkpoint import open_checkpoint
from build.clips import load_clips
from build.draft import with_draft
from serve.speech import sources
from serve.speech.audio import join_blocks
from serve.speech.languages import LANGUAGE_NAMES
from serve.speech.meter import AudioLimits

ROOT = Path(__file__).parent
CHECKPOINT = ROOT / "fixture" / "checkpoint"
DATA = ROOT / "data"
HUMAN, SHARE_ALIKE = DATA / "human", DATA / "human-sharealike"
HUMAN_TABLES = (HUMAN / "manifest.jsonl", HUMAN / "long.jsonl", SHARE_ALIKE / "manifest.jsonl")
# What may stand beside Apache-2.0 code, and, in a separate folder, what is passed on as it came.
LICENCES = {
    HUMAN: {"CC0-1.0", "public domain", "Apache-2.0", "CC-BY-3.0", "CC-BY-4.0", "AN4"},
    SHARE_ALIKE: {"CC-BY-SA-3.0"},
}
RATE = 16_000


def entries_of(manifest):
    return [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]


# ---------------------------------------------------------------- the checkpoint


def test_special_tokens_have_whispers_order():
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    tasks = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
    times = (f"{index * 0.02:.2f}" for index in range(1501))
    words = ("endoftext", "startoftranscript", *LANGUAGE_NAMES, *tasks, *times)
    ids = [tokenizer.token_to_id(f"<|{word}|>") for word in words]
    assert ids == list(range(ids[0], tokenizer.get_vocab_size()))


def test_the_draft_fits_it():
    both = with_draft(open_checkpoint(CHECKPOINT), str(ROOT / "fixture" / "draft"))
    assert both.draft.dims.n_text_layer == 1
    assert not any(name.startswith("encoder.") for name in both.draft.tensors)


# ---------------------------------------------------------------- clips


@pytest.mark.nightly
@pytest.mark.parametrize(
    "table",
    [DATA / "manifest.jsonl", DATA / "heldout" / "manifest.jsonl", *HUMAN_TABLES],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_every_clip_is_as_long_as_its_manifest_says(table):
    for clip in load_clips(table):  # all in this process, which is faster
        samples = join_blocks(sources.decode(clip.path.read_bytes(), AudioLimits(400.0)))
        assert len(samples) / RATE == pytest.approx(clip.duration_s, abs=0.1), clip.file
        assert not clip.text or np.abs(samples).max() > 0.02, clip.file


def test_held_out_clips_are_all_listed_and_each_says_something_else():
    clips = load_clips(DATA / "heldout" / "manifest.jsonl")
    assert {clip.file for clip in clips} == {path.name for path in DATA.glob("heldout/*.opus")}
    assert len({clip.text for clip in clips}) == len(clips)
    assert min([clip.language for clip in clips].count(code) for code in ("en", "es")) >= 140


# ---------------------------------------------------------------- people


@pytest.mark.parametrize("folder", LICENCES, ids=lambda path: path.name)
def test_every_voice_has_a_licence_that_may_stand_here_and_is_attributed(folder):
    entries = [
        entry for table in HUMAN_TABLES if table.parent == folder for entry in entries_of(table)
    ]
    assert {entry["file"] for entry in entries} == {path.name for path in folder.glob("*.ogg")}
    assert {entry["licence"] for entry in entries} == LICENCES[folder]
    assert all(entry["source"] for entry in entries)
    attributed = re.findall(r"^\| `(.+?)` \|", (folder / "ATTRIBUTION.md").read_text("utf-8"), re.M)
    assert sorted(attributed) == sorted({entry["group"] for entry in entries})


def test_who_serves_to_choose_settings_serves_no_report():
    """By speaker, or by clip where a group has one."""
    entries = [entry for table in HUMAN_TABLES for entry in entries_of(table)]
    speakers = {}
    for entry in entries:
        speakers.setdefault(entry["group"], set()).add(entry["speaker"])
    for entry in entries:
        alone = len(speakers[entry["group"]]) == 1
        who = entry["file"] if alone else f"{entry['group']}/{entry['speaker']}"
        odd = int(hashlib.sha256(who.encode()).hexdigest(), 16) % 2
        assert entry["half"] == ("choose", "report")[odd], entry["file"]


def test_the_demo_has_people_of_many_languages_and_a_long_passage():
    listed = {f"{t.parent.name}/{e['file']}": e for t in HUMAN_TABLES for e in entries_of(t)}
    shown = entries_of(DATA / "demo.jsonl")
    assert all(entry == {**listed[entry["file"]], "file": entry["file"]} for entry in shown)
    assert len({entry["language"] for entry in shown}) >= 6 and len(shown) > 12
    assert [entry["duration"] > 60 for entry in shown].count(True) == 1
