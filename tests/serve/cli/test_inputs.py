"""Which recordings names stand for, and where their transcripts go."""

import os

import pytest

from serve.cli.inputs import STDIN, InputFile, find_recordings
from serve.cli.outputs import output_paths, targets_of
from serve.contract.errors import ConfigError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with audio in two folders, and other files."""
    names = ("talk.wav", "in/b.flac", "in/a/c.MP3", "in/notes.txt", "in/.b.wav", "in/.git/d.wav")
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(*names):
    """Pairs of names and paths."""
    return [(one.name, one.path) for one in find_recordings(names)[0]]


def test_a_file_is_itself_whatever_it_is_called(folder):
    assert find_recordings(["in/notes.txt"]) == ([InputFile("in/notes.txt", "notes.txt")], 0)


def test_a_folder_is_its_audio_in_order_of_names(folder):
    recordings, others = find_recordings(["in"])
    assert [one.path for one in recordings] == ["a/c.MP3", "b.flac"]
    assert others == 1
    assert recordings[0].name == os.path.join("in", "a", "c.MP3")


def test_several_keep_their_places_below_what_they_have_in_common(folder):
    assert found("talk.wav", "in/b.flac") == [("talk.wav", "talk.wav"), ("in/b.flac", "in/b.flac")]
    assert found("in/a", "talk.wav") == [("in/a/c.MP3", "in/a/c.MP3"), ("talk.wav", "talk.wav")]


def test_what_is_named_twice_is_done_once(folder):
    assert found("in/b.flac", "in", "./in/b.flac", f"{folder}/in/a/c.MP3") == [
        *(("in/b.flac", "b.flac"), ("in/a/c.MP3", "a/c.MP3"))
    ]


def test_standard_input_has_a_name_of_its_own(folder):
    assert found(STDIN, "talk.wav") == [("-", "stdin"), ("talk.wav", "talk.wav")]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["gone.wav", "in"], "not found: gone.wav; expected files, folders"),
        (["texts"], "texts: no audio files, 1 other files"),
    ],
)
def test_what_is_not_there_is_refused(folder, names, told):
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").touch()
    with pytest.raises(ConfigError, match=told):
        find_recordings(names)


@pytest.mark.parametrize(
    ("paths", "places"),
    [
        (["a/talk.mp3", "b/talk.mp3"], ["a/talk", "b/talk"]),
        (["talk.mp3", "talk.wav", "other.wav"], ["talk.mp3", "talk.wav", "other"]),
        (["talk.wav", "talk.flac", "talk.wav.mp3"], ["talk.wav", "talk.flac", "talk.wav.mp3"]),
        (["talk", "talk.mp3"], ["talk", "talk.mp3"]),
    ],
)
def test_a_place_is_a_name_without_suffix_unless_two_would_have_it(paths, places):
    assert output_paths(paths) == places


def test_no_transcript_replaces_a_recording(folder):
    (folder / "talk.txt").touch()
    recordings, _ = find_recordings(["talk.txt"])
    with pytest.raises(ConfigError, match=r"talk.txt: it is one of the recordings; choose another"):
        targets_of(recordings, folder, "text")
    assert targets_of(recordings, folder, "srt") == [folder / "talk.srt"]
