"""build.hub: which files are downloaded, for build and for eval, and what is said when none are."""

import shutil

import pytest
from huggingface_hub import errors

from build.config import BuildConfig
from build.hub import CheckpointLocation, checkpoint_folder
from eval.accuracy import systems
from eval.config import EvaluationProduct
from serve.contract.errors import MissingCheckpointError
from tests.fake_hub import HUB_ID, REVISION, FakeHub

PINNED = f"{HUB_ID}@{REVISION}"
FILES = ("config.json", "generation_config.json", "tokenizer.json", "vocab.json")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    for name in FILES:
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    for surplus in (
        "model.fp32-00001-of-00002.safetensors",
        "model.safetensors.index.fp32.json",
        "pytorch_model.bin",
        "flax_model.msgpack",
        "README.md",
    ):
        (folder / surplus).write_bytes(b"gigabytes")
    return folder


def for_build(name):
    return checkpoint_folder(name).path


def for_eval(name):
    return systems.checkpoint_folder(EvaluationProduct(build=BuildConfig(checkpoint=name)))


@pytest.mark.parametrize("download", [for_build, for_eval])
def test_a_pinned_id_is_split_and_one_copy_of_the_weights_comes(hub, download):
    assert download(PINNED) == hub.cache
    assert set(hub.asked) == {(HUB_ID, REVISION)}
    assert sorted(hub.downloaded) == sorted([*FILES, "model.safetensors"])


def test_the_revision_found_is_remembered(hub):
    assert checkpoint_folder(HUB_ID) == CheckpointLocation(hub.cache, PINNED)
    assert hub.asked[0] == (HUB_ID, None)


@pytest.mark.parametrize(
    "weights",
    [
        {"pytorch_model.bin"},
        {"pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"},
        {"model.bin", "vocabulary.txt"},  # of faster-whisper
    ],
)
def test_other_weights_are_downloaded_if_there_is_nothing_better(hub, folder, weights):
    for name in ("model.safetensors", "pytorch_model.bin"):
        (folder / name).unlink()
    for name in weights:
        (folder / name).write_bytes(b"")
    checkpoint_folder(HUB_ID)
    assert {*hub.downloaded} == {*FILES} | weights


def test_a_folder_here_needs_no_hub(hub, folder, monkeypatch):
    monkeypatch.chdir(folder.parent.parent)
    name = f"{folder.parent.name}/{folder.name}"  # which a hub id may look like
    assert checkpoint_folder(name) == CheckpointLocation(
        folder.relative_to(folder.parent.parent), name
    )
    assert hub.asked == []


def test_what_is_neither_folder_nor_id(tmp_path):
    for name in ("whisper", "a/b/c", "someone/whisper@", "../x/y", ""):
        with pytest.raises(MissingCheckpointError, match="expected a Hugging Face or"):
            checkpoint_folder(name or str(tmp_path / "nothing"))


def http(kind, status=404):
    client = pytest.importorskip("httpx2")
    response = client.Response(status, request=client.Request("GET", "https://huggingface.co"))
    return kind(f"{status} Client Error. (Request ID: x)\n\nFor url", response=response)


FAILURES = {
    "gated": (
        lambda: http(errors.GatedRepoError, 403),
        "refused it (GatedRepoError); see https://huggingface.co/someone/whisper; if it is private",
    ),
    "unknown": (
        lambda: http(errors.RepositoryNotFoundError),
        "refused it (RepositoryNotFoundError); see",
    ),
    "revision": (
        lambda: http(errors.RevisionNotFoundError),
        "refused it (RevisionNotFoundError); see",
    ),
    "offline": (
        lambda: errors.OfflineModeIsEnabled("Cannot reach it:\noffline mode"),
        "failed (Cannot reach it:), and its cache here is incomplete; without a",
    ),
    "disk": (lambda: OSError(28, "No space left on device"), "No space left on device"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_why_the_hub_gives_nothing_is_one_sentence(hub, failure):
    make, words = FAILURES[failure]
    hub.failure = make()
    with pytest.raises(MissingCheckpointError) as caught:
        for_build(PINNED)
    assert str(caught.value).startswith("someone/whisper is not a folder here, and ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_in_the_cache_serves_where_the_hub_cannot_be_reached(hub):
    found = checkpoint_folder(HUB_ID)
    hub.failure = OSError("no route")
    assert checkpoint_folder(HUB_ID) == found
    (hub.cache / "model.safetensors").unlink()
    assert checkpoint_folder(HUB_ID, with_weights=False) == found
    with pytest.raises(MissingCheckpointError, match="its cache here is incomplete"):
        checkpoint_folder(HUB_ID)


def test_a_repository_that_was_withdrawn_is_not_taken_from_the_cache(hub):
    checkpoint_folder(HUB_ID)
    hub.failure = http(errors.RepositoryNotFoundError)
    with pytest.raises(MissingCheckpointError, match="RepositoryNotFoundError"):
        checkpoint_folder(HUB_ID)


def test_a_commit_in_the_cache_is_not_asked_for(folder, tmp_path, monkeypatch):
    commit = "0123456789" * 4
    hub = FakeHub(folder, tmp_path / "cache")
    hub.cache = tmp_path / "cache" / commit
    shutil.copytree(folder, hub.cache)
    hub.install(monkeypatch)
    assert checkpoint_folder(f"{HUB_ID}@{commit}").path == hub.cache
    assert not hub.asked
