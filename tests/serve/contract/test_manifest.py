"""Manifests that contradict themselves or the files are refused by name."""

import json
import math
import shutil

import hypothesis
import pytest
from hypothesis import strategies

from serve.contract.engine import open_engine
from serve.contract.errors import EngineError
from serve.contract.manifest import MANIFEST_FILE, TOKENIZER_FILE, WEIGHTS_FILE
from serve.speech.tokenizer import Tokenizer

SHA = "ab" * 32
DROP = object()


@pytest.fixture
def folder(nano_engine, tmp_path):
    """A copy of an engine, of which a test may change the manifest."""
    return shutil.copytree(nano_engine, tmp_path, dirs_exist_ok=True)


def change(folder, value, *path):
    """Set one field of a folder's manifest, or drop it."""
    file = folder / MANIFEST_FILE
    fields = json.loads(file.read_text())
    inner = fields
    for key in path[:-1]:
        inner = inner[key]
    if value is DROP:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    file.write_text(json.dumps(fields))


REFUSED = [
    ({}, ("files",), f"files lacks {TOKENIZER_FILE}; expected it in a native engine"),
    ("cpu", ("runtime",), "runtime = 'cpu'; expected 'native', 'tensorrt_llm' "),
    (3, ("beams",), "unknown key 'beams'; known: format_version, runtime, "),
    ("x", ("files", WEIGHTS_FILE, "sha256"), "sha256 = 'x'; expected 64 hexadecimal digits"),
    (10**9, ("dims", "n_audio_layer"), "dims.n_audio_layer = 1000000000; expected at most 1000"),
    (2, ("dims", "n_audio_head"), "n_audio_head = 2; expected n_audio_state = 64 divided by"),
    (5000, ("tokenizer", "sot"), "tokenizer.sot = 5000; expected less than dims.n_vocab"),
    ([1, 5000], ("tokenizer", "suppress_tokens"), "tokenizer.suppress_tokens[1] = 5000"),
    (1800, ("tokenizer", "max_initial_timestamp_index"), "max_initial_timestamp_index + timestamp"),
    ([[0, 1]], ("tokenizer", "alignment_heads"), "alignment_heads[0] = [0, 1]; expected a layer"),
    ({"x": math.nan}, ("verification",), "verification.x = nan; expected a finite number"),
]


@pytest.mark.parametrize(
    ("value", "path", "message"), REFUSED, ids=[".".join(path) for _, path, _ in REFUSED]
)
def test_nonsense_is_refused_by_its_name(folder, value, path, message):
    change(folder, value, *path)
    with pytest.raises(EngineError, match=r"engine\.json: .*; build the engine again") as refused:
        open_engine(folder)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", r"\[\]"),
        ("{}", "format_version is missing"),
        ('{"format_version": 1}', "format_version = 1; expected 2"),
    ],
)
def test_what_is_no_manifest_is_refused(folder, text, message):
    (folder / MANIFEST_FILE).write_text(text)
    with pytest.raises(EngineError, match=f"{message}.*; build the engine again"):
        open_engine(folder)


def test_encoder_and_decoder_must_have_one_width(folder):
    change(folder, 128, "dims", "n_text_state")
    change(folder, 2, "dims", "n_text_head")
    with pytest.raises(EngineError, match="n_text_state = 128; expected n_audio_state = 64"):
        open_engine(folder)


@pytest.mark.parametrize(
    "name", ["/etc/hostname", "../engine.json", "a/../b", "", "a\0b", "x" * 300]
)
def test_a_file_that_is_not_in_the_folder_is_refused_unread(folder, name, monkeypatch):
    monkeypatch.setattr(
        "serve.contract.engine.sha256_of", lambda path: pytest.fail(f"{path} was read")
    )
    change(folder, {"sha256": SHA, "bytes": 1}, "files", name)
    with pytest.raises(EngineError, match=r"files has .*; expected names of files in the engine"):
        open_engine(folder)


def test_files_of_compiled_engines_lie_in_folders(folder):
    (folder / "decoder").mkdir()
    (folder / "decoder" / "rank0.engine").write_bytes(b"")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    change(folder, {"sha256": empty, "bytes": 0}, "files", "decoder/rank0.engine")
    assert "decoder/rank0.engine" in open_engine(folder).manifest.files


def test_a_link_out_of_the_folder_is_refused_and_one_to_the_folder_is_not(folder, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "link").symlink_to(folder)
    assert open_engine(outside / "link").manifest
    (folder / TOKENIZER_FILE).rename(outside / TOKENIZER_FILE)
    (folder / TOKENIZER_FILE).symlink_to(outside / TOKENIZER_FILE)
    with pytest.raises(EngineError, match=rf"{TOKENIZER_FILE} links to .*, outside the engine"):
        open_engine(folder)


def paths(value, before=()):
    """The place of everything in a manifest; of long lists and tables the first few."""
    yield from [before] if before else []
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in list(inner)[:4]:
        if isinstance(child, dict | list):
            yield from paths(child, (*before, key))
        else:
            yield (*before, key)


@pytest.fixture(scope="module")
def one_folder(nano_engine, tmp_path_factory):
    return shutil.copytree(nano_engine, tmp_path_factory.mktemp("fuzz"), dirs_exist_ok=True)


@pytest.fixture(scope="module")
def sound(one_folder):
    """The text of the manifest, and the place of every field."""
    text = (one_folder / MANIFEST_FILE).read_text()
    return text, list(paths(json.loads(text)))


NUMBERS = [-1, 0, 1, 64, 2**31, 10**30, 0.5, -0.0, math.nan, math.inf]
LISTS = [[], [0], [[0]], [[0, 0]], [0] * 1000]
TABLES = [{}, {"x": 1}, {"x": {}}]
VALUES = strategies.sampled_from(
    [DROP, None, True, "", "..", "x", "x" * 100_000, *NUMBERS, *LISTS, *TABLES]
)


@hypothesis.settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(data=strategies.data())
def test_whatever_a_manifest_says_it_opens_or_is_refused(one_folder, sound, data):
    """And what opens can be read: no field leads to an unexpected error."""
    text, places = sound
    (one_folder / MANIFEST_FILE).write_text(text)
    change(one_folder, data.draw(VALUES), *data.draw(strategies.sampled_from(places)))
    try:
        engine = open_engine(one_folder)
        Tokenizer(engine)
        engine.load_weights()
        engine.load_mel_filters()
    except EngineError as error:
        assert len(str(error)) < 4000
