import collections

import pytest

from eval.corpora.find import duration_s, find_clips
from serve.contract.errors import ConfigError, FileError
from serve.speech.audio import decode
from serve.speech.meter import AudioLimits


def texts(found):
    return {clip.file: (clip.text, clip.language) for clip in found.clips}


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_a_csv_of_any_delimiter(tmp_path, record, delimiter):
    record(tmp_path / "a.wav")
    record(tmp_path / "deep" / "b.flac", 2.5)
    rows = [("id", "Path", "Sentence", "locale"), ("1", "a.wav", "Hi, you; there", "en-GB")]
    rows.append(("2", "deep/b.flac", "Hola", "es"))
    lines = [delimiter.join(f'"{c}"' if delimiter in c else c for c in row) for row in rows]
    (tmp_path / "refs.csv").write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    found = find_clips(str(tmp_path))
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
def test_tables_with_the_usual_keys(tmp_path, record, name, table):
    record(tmp_path / "a.wav")
    (tmp_path / name).write_text(table)
    (tmp_path / "dataset_infos.json").write_text("{\n}\n")
    assert texts(find_clips(str(tmp_path))) == {"a.wav": ("Hi", None)}
    assert texts(find_clips(str(tmp_path / name), language="en")) == {"a.wav": ("Hi", "en")}


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


def test_common_voice_as_it_unpacks(tmp_path, record):
    for name in ("a.mp3", "b.mp3"):
        record(tmp_path / "clips" / name)
    head = "client_id\tpath\tsentence\tlocale\n"
    # An unpaired quote, which a reader of quoted cells takes for the start of a long one.
    lines = 'x\ta.mp3\t"Nein, sagte er\tde\nx\tb.mp3\t"Er sagte ""Ja"""\tde\n'
    (tmp_path / "validated.tsv").write_text(head + lines)
    (tmp_path / "test.tsv").write_text(head)
    found = find_clips(str(tmp_path / "validated.tsv"))
    assert texts(found) == {"a.mp3": ('"Nein, sagte er', "de"), "b.mp3": ('Er sagte "Ja"', "de")}
    assert found.summary.startswith("Common Voice's validated.tsv, audio from `path`")


def test_our_own_manifest_may_hold_silence():
    found = find_clips("tests/data/manifest.jsonl")
    assert "a manifest of clips: 16 clips; " in found.summary
    assert [clip.text for clip in found.clips].count("") == 2


def table_of(folder, record, count):
    for number in range(count):
        record(folder / f"{number}.wav", 0.1)
    rows = "".join(f"{number}.wav,word\n" for number in range(count))
    (folder / "refs.csv").write_text("file,text\n" + rows)


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


def test_a_clip_that_cannot_be_read_stands_apart(tmp_path, record):
    table_of(tmp_path, record, 3)
    (tmp_path / "1.wav").write_bytes(b"no audio at all")

    def read(path):
        list(decode(path.read_bytes(), AudioLimits(30.0)))

    found = find_clips(str(tmp_path), read=read)
    assert [clip.file for clip in found.clips] == ["0.wav", "2.wav"]
    assert list(found.unreadable) == ["1.wav"] and "is text, not" in found.unreadable["1.wav"]
    for name in ("0.wav", "2.wav"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ConfigError, match="no clip can be read; "):
        find_clips(str(tmp_path), read=read)


def test_only_what_was_drawn_is_opened(tmp_path, record):
    table_of(tmp_path, record, 4)
    drawn = find_clips(str(tmp_path), limit=1).clips[0].file
    for path in tmp_path.glob("*.wav"):
        if path.name != drawn:
            path.write_bytes(b"no audio at all")
    assert find_clips(str(tmp_path), limit=1).clips[0].duration_s == pytest.approx(0.1)
    with pytest.raises(FileError, match=r"cannot read .*\.wav: no audio that is known here"):
        find_clips(str(tmp_path))


def test_what_does_not_fit_is_named(tmp_path, record):
    record(tmp_path / "a.wav")
    lines = ("a.wav,Hi", "gone.wav,Hi", "a.wav,Again", ",Hi", "b.wav,", "c.wav,  ", "d.wav", "e,")
    (tmp_path / "refs.csv").write_text("\n".join(["file,text", *lines]))
    with pytest.raises(ConfigError) as caught:
        find_clips(str(tmp_path), limit=1)  # whatever is drawn
    assert str(caught.value) == (
        f"{tmp_path}: refs.csv:3 has no audio gone.wav; refs.csv:4 lists a.wav again; "
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
def test_what_is_no_layout_is_refused(tmp_path, files, message):
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode()
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        find_clips(str(tmp_path))


def test_a_folder_without_references_is_taken_where_none_are_needed(tmp_path, record):
    record(tmp_path / "b.wav")
    record(tmp_path / "deep" / "a.flac", 2.5)
    (tmp_path / "broken.mp3").write_text("no audio")
    (tmp_path / "notes.txt").write_text("no audio")
    found = find_clips(str(tmp_path), read=duration_s, need_references=False)
    assert not found.references and list(found.unreadable) == ["broken.mp3"]
    assert texts(found) == {"b.wav": ("", None), "deep/a.flac": ("", None)}
    assert found.summary == ("audio without references: 3 clips, 1 cannot be read; 0.00 h")
    (tmp_path / "refs.csv").write_text("file,text\nb.wav,Hi\n")
    assert find_clips(str(tmp_path), need_references=False).references


def test_audio_with_a_text_file_beside_each(tmp_path, record):
    record(tmp_path / "a.wav")
    record(tmp_path / "deep" / "b.mp3", 2.0)
    (tmp_path / "a.txt").write_text("Hello\n there\n", encoding="utf-8")
    (tmp_path / "deep" / "b.txt").write_text("Olá", encoding="utf-8")
    found = find_clips(str(tmp_path), language="pt")
    assert texts(found) == {"a.wav": ("Hello there", "pt"), "deep/b.mp3": ("Olá", "pt")}
    assert found.summary.startswith("audio with a .txt beside each file: 2 clips; ")
    record(tmp_path / "without.wav")
    (tmp_path / "a.txt").write_text(" \n")
    (tmp_path / "gone.txt").write_text("Hi")
    with pytest.raises(ConfigError) as caught:
        find_clips(str(tmp_path))
    assert str(caught.value) == (
        f"{tmp_path}: a.txt has no text for a.wav; without.txt has no text for without.wav; "
        "gone.txt has no audio gone.txt; 3 lines in all to correct or remove"
    )
