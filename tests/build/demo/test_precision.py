"""The comparison of precisions on held-out speech, with bundled clips in the place of new ones."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from build.demo.maker.precision import VARIANTS, main, score
from build.demo.maker.synth import write_wav

DATA = Path(__file__).parents[2] / "data"
KEY = {
    "file": "en_question.wav",
    "language": "en",
    "text": "Where is the key to the garden gate?",
    "duration": 2.57,
}
LLAVE = {
    "file": "es_question.wav",
    "language": "es",
    "text": "¿Dónde está la llave del jardín?",
    "duration": 2.37,
}


def folder_of(path, *entries):
    path.mkdir()
    lines = "".join(json.dumps(entry) + "\n" for entry in entries)
    (path / "manifest.jsonl").write_text(lines, encoding="utf-8")
    for entry in entries:
        if (DATA / entry["file"]).exists():
            shutil.copy(DATA / entry["file"], path)
    return str(path)


def test_scores_are_those_of_normalised_text_and_their_differences_to_fp16():
    truth = ["Good day.", "ten keys"]
    got = score("int8", "some", truth, ["good day", "tan key"], ["good day", "ten key"])
    assert got.cer == pytest.approx(100 * 2 / 16) and got.cer_points == pytest.approx(100 / 16)
    assert got.wer == pytest.approx(50) and got.wer_points == pytest.approx(25)
    assert (got.utterances, got.other_texts) == (2, 1)


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_variant_on_every_set_or_why_not(tmp_path, capsys, one_thread):
    wrong = {**LLAVE, "text": "¿Dónde está la llave del jabón?"}
    sets = [folder_of(tmp_path / "a", KEY), folder_of(tmp_path / "b", wrong)]
    assert main(["--clips", *sets]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    figures = {(row["variant"], row["clips"]): row for row in json.loads(last)["figures"]}
    assert len(figures) == 6 and len(table) == 8
    for variant in list(VARIANTS)[:2]:
        assert figures[variant, sets[0]]["cer"] == 0
        assert figures[variant, sets[1]]["cer"] == pytest.approx(100 * 3 / 29)
        assert figures[variant, "all"]["utterances"] == 2
        assert 0 < figures[variant, "all"]["cer"] < figures[variant, sets[1]]["cer"]
    assert 'refused: runtime.encoder_precision = "fp8" needs' in table[-1]


def test_what_cannot_be_measured_is_an_error(tmp_path, capsys):
    write_wav(tmp_path / "long.wav", np.zeros(31 * 16000, np.int16))
    long = folder_of(tmp_path / "long", {**KEY, "file": "../long.wav"})
    for folder, code, complaint in (
        (tmp_path / "nowhere", 2, "manifest.jsonl: No such file or directory; expected a"),
        (folder_of(tmp_path / "empty"), 2, "lists no clips"),
        (folder_of(tmp_path / "gone", {**KEY, "file": "gone.wav"}), 2, "gone.wav does not exist"),
        (long, 1, "lasts 31.0 s; expected at most 30 s"),
    ):
        assert main(["--clips", str(folder)]) == code
        assert complaint in capsys.readouterr().err
    clips = folder_of(tmp_path / "clips", KEY)
    if not torch.cuda.is_available():
        assert main(["--clips", clips, "--device", "cuda"]) == 1
        assert "this machine has 0 CUDA devices" in capsys.readouterr().err
