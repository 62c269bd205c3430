import collections

import pytest

from eval.corpora.find import duration_s, find_clips
from serve.contract.errors import ConfigError, FileError
from serve.speech.audio import decode
from serve.speech.meter import AudioLimits


def texts(found):
    return {clip.file: (clip.text, clip.language) for clip in found.clips}


@pytest.fixture
def corpus(tmp_path, record):
    """Makes files in a folder, audio of so many seconds or text; gives the folder's path."""

    def make(files):
        for name, content in files.items():
            if isinstance(content, float):
                record(tmp_path / name, content)
            else:
                data = content if isinstance(content, bytes) else content.encode()
                (tmp_path / name).write_bytes(data)
        return str(tmp_path)

    return make


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_a_csv_of_any_delimiter(corpus, delimiter):
    rows = [("id", "Path", "Sentence", "locale"), ("1", "a.wav", "Hi, you; there", "en-GB")]
    rows.append(("2", "deep/b.flac", "Hola", "es"))
    lines = [delimiter.join(f'"{c}"' if delimiter in c else c for c in row) for row in rows]
    table = "\ufeff" + "\n".join(lines)
    found = find_clips(corpus({"a.wav": 1.0, "deep/b.flac": 2.5, "refs.csv": table}))
    assert texts(found) == {"a.wav": ("Hi, you; there", "en"), "deep/b.flac": ("Hola", "es")}
    assert [clip.duration_s for clip in found.clips] == [1.0, 2.5]
    assert found.summary == (
        "the table refs.csv, audio from `Path`, text from `Sentence`, language from `locale`: "
        "2 clips; 0.00 h"
    )


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("metadata.jsonl", '{"file_name": "a.wav", "transcription": "Hi", "speaker": 3}'),
        ("x.ndjson", '\n{"audio_filepath": "a.wav", "text": "Hi"}\n'),
        ("metadata.csv", "file_name,transcription\ra.wav,Hi\r"),
    ],
)
def test_tables_with_the_usual_keys(corpus, name, table):
    place = corpus({"a.wav": 1.0, name: table, "dataset_infos.json": "{\n}\n"})
    assert texts(find_clips(place)) == {"a.wav": ("Hi", None)}
    assert texts(find_clips(f"{place}/{name}", language="en")) == {"a.wav": ("Hi", "en")}


def test_librispeech_as_it_unpacks(tmp_path, record):
    folder = tmp_path / "1089" / "134686"
    for name in ("0", "1"):
        record(folder / f"{name}.flac")
    (folder / "1089-134686.trans.txt").write_text("0 HE HOPED\n1 STUFF IT\n")
    assert texts(find_clips(str(tmp_path))) == {
        "1089/134686/0.flac": ("HE HOPED", "en"),
        "1089/134686/1.flac": ("STUFF IT", "en"),
    }
    (folder / "1.flac").unlink()
    with pytest.raises(
        ConfigError, match=r"1089/134686/.*txt:2 has no audio 1089/134686/1.flac; 1 lines"
    ):
        find_clips(str(tmp_path))


def test_common_voice_as_it_unpacks(corpus):
    audio = {"clips/a.mp3": 1.0, "clips/b.mp3": 1.0}
    head = "client_id\tpath\tsentence\tlocale\n"
    # An unpaired quote, which a reader of quoted cells takes for the start of a long one.
    lines = 'x\ta.mp3\t"Nein, sagte er\tde\nx\tb.mp3\t"Er sagte ""Ja"""\tde\n'
    place = corpus({**audio, "validated.tsv": head + lines, "test.tsv": head})
    found = find_clips(f"{place}/validated.tsv")
    assert texts(found) == {"a.mp3": ('"Nein, sagte er', "de"), "b.mp3": ('Er sagte "Ja"', "de")}
    assert found.summary.startswith("Common Voice's validated.tsv, audio from `path`")


def test_our_own_manifest_may_hold_silence():
    found = find_clips("tests/data/manifest.jsonl")
    assert "a manifest of clips: 16 clips; " in found.summary
    assert [clip.text for clip in found.clips].count("") == 2


def table_of(count):
    """A table without durations, and its clips."""
    names = [f"{number}.wav" for number in range(count)]
    rows = [f"{name},word\n" for name in names]
    return {**dict.fromkeys(names, 0.1), "refs.csv": "file,text\n" + "".join(rows)}


def test_each_group_gives_its_share_to_a_draw_and_larger_draws_hold_smaller_ones(manifest):
    groups = ["many"] * 20 + ["few"] * 10 + ["one"]
    place = manifest(*({"group": group, "duration": 0.1} for group in groups))
    listed, draws = find_clips(place).clips, {}
    for limit in (3, 6, 12, 24, 99):
        found = find_clips(place, limit=limit, seed=5)
        assert found == find_clips(place, limit=limit, seed=5)
        draws[limit] = {clip.file for clip in found.clips}
        assert found.clips == [clip for clip in listed if clip.file in draws[limit]], "in order"
        many, few = (sum(clip.group == group for clip in found.clips) for group in ("many", "few"))
        assert abs(many - min(limit, 31) * 20 / 31) <= 1.5
        assert abs(few - min(limit, 31) * 10 / 31) <= 1.5
    assert draws[3] < draws[6] < draws[12] < draws[24] < draws[99] and len(draws[99]) == 31
    assert "31 clips, 3 of them drawn with seed 5" in find_clips(place, limit=3, seed=5).summary
    others = [{c.file for c in find_clips(place, limit=3, seed=s).clips} for s in range(9)]
    assert len(set(map(frozenset, others))) > 5


def test_every_clip_of_a_group_is_drawn_about_as_often(manifest):
    place = manifest(*[{"duration": 0.1}] * 10)
    draws = [find_clips(place, limit=3, seed=seed).clips for seed in range(60)]
    counts = collections.Counter(clip.file for draw in draws for clip in draw)
    assert len(counts) == 10 and min(counts.values()) >= 8 and max(counts.values()) <= 30


def test_one_half_alone_may_be_taken(manifest):
    place = manifest({"half": "choose"}, {"half": "report"}, {"half": None})
    clips = find_clips(place, half="report").clips
    assert [clip.file for clip in clips] == ["1.wav", "2.wav"], "a clip of no half is of both"
    with pytest.raises(ConfigError, match=r"lists no clips of the half 'report'"):
        find_clips(manifest({"half": "choose"}), half="report")


def test_a_clip_that_cannot_be_read_stands_apart(corpus):
    place = corpus(table_of(3) | {"1.wav": "no audio at all"})

    def read(path):
        list(decode(path.read_bytes(), AudioLimits(30.0)))

    found = find_clips(place, read=read)
    assert [clip.file for clip in found.clips] == ["0.wav", "2.wav"]
    assert list(found.unreadable) == ["1.wav"] and "is text, not" in found.unreadable["1.wav"]
    corpus({"0.wav": "", "2.wav": ""})
    with pytest.raises(ConfigError, match="no clip can be read; "):
        find_clips(place, read=read)


def test_only_what_was_drawn_is_opened(corpus):
    files = table_of(4)
    place = corpus(files)
    drawn = find_clips(place, limit=1).clips[0].file
    corpus(dict.fromkeys(files.keys() - {drawn, "refs.csv"}, "no audio at all"))
    assert find_clips(place, limit=1).clips[0].duration_s == pytest.approx(0.1)
    with pytest.raises(FileError, match=r"cannot read .*\.wav: no audio that is known here"):
        find_clips(place)


def test_what_does_not_fit_is_named(corpus):
    lines = ("a.wav,Hi", "gone.wav,Hi", "a.wav,Again", ",Hi", "b.wav,", "c.wav,  ", "d.wav", "e,")
    place = corpus({"a.wav": 1.0, "refs.csv": "\n".join(["file,text", *lines])})
    with pytest.raises(ConfigError) as caught:
        find_clips(place, limit=1)  # whatever is drawn
    assert str(caught.value) == (
        f"{place}: refs.csv:3 has no audio gone.wav; refs.csv:4 lists a.wav again; "
        "refs.csv:5 has no audio ; refs.csv:6 has no text for b.wav; "
        "refs.csv:7 has no text for c.wav; refs.csv:8 has no text for d.wav; "
        "refs.csv:9 has no text for e; 7 lines in all to correct or remove"
    )


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no references; expected audio files with a .txt"),
        ({"a.csv": "", "b.csv": ""}, "has several tables: a.csv, b.csv; name one"),
        ({"a.csv": "a.wav|Hi|Hi\n"}, "a.csv has no lines; expected audio as file_name, file, path"),
        ({"a.csv": "id,text\n1,Hi\n"}, "a.csv has id, text; expected audio as"),
        ({"a.jsonl": "[1]\n"}, r"a.jsonl:1 holds \[1\]; expected .*; expected an object a line"),
        ({"a.jsonl": '{"file": 3, "text": "x"}'}, "a.jsonl:1: `file` is 3; expected text"),
        ({"a.csv": b"file,text\na,\xff\n"}, "a.csv: byte 12 is not UTF-8"),
    ],
)
def test_what_is_no_layout_is_refused(corpus, files, message):
    with pytest.raises(ConfigError, match=message):
        find_clips(corpus(files))


def test_a_folder_without_references_is_taken_where_none_are_needed(corpus):
    others = {"broken.mp3": "no audio", "notes.txt": "no audio"}
    place = corpus({"b.wav": 1.0, "deep/a.flac": 2.5, **others})
    found = find_clips(place, read=duration_s, need_references=False)
    assert not found.references and list(found.unreadable) == ["broken.mp3"]
    assert texts(found) == {"b.wav": ("", None), "deep/a.flac": ("", None)}
    assert found.summary == ("audio without references: 3 clips, 1 cannot be read; 0.00 h")
    corpus({"refs.csv": "file,text\nb.wav,Hi\n"})
    assert find_clips(place, need_references=False).references


def test_audio_with_a_text_file_beside_each(corpus):
    said = {"a.txt": "Hello\n there\n", "deep/b.txt": "Olá"}
    place = corpus({"a.wav": 1.0, "deep/b.mp3": 2.0, **said})
    found = find_clips(place, language="pt")
    assert texts(found) == {"a.wav": ("Hello there", "pt"), "deep/b.mp3": ("Olá", "pt")}
    assert found.summary.startswith("audio with a .txt beside each file: 2 clips; ")
    corpus({"without.wav": 1.0, "a.txt": " \n", "gone.txt": "Hi"})
    with pytest.raises(ConfigError) as caught:
        find_clips(place)
    assert str(caught.value) == (
        f"{place}: a.txt has no text for a.wav; without.txt has no text for without.wav; "
        "gone.txt has no audio gone.txt; 3 lines in all to correct or remove"
    )
