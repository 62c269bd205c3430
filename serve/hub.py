"""Checkpoint folders, wherever they are: on this machine, or on the Hugging Face hub.

build and eval open checkpoints, both by these rules; serving never does, so `huggingface_hub` is
imported only where something is downloaded.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from serve.errors import CheckpointError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
PROCESSOR_CONFIGS = ("preprocessor_config.json", "processor_config.json")  # older; newer
# Everything but the weights.
SMALL_FILES = (
    *(CONFIG, GENERATION_CONFIG, "tokenizer.json"),
    # What else transformers' WhisperProcessor reads: not build, but runtimes that run checkpoints.
    *PROCESSOR_CONFIGS,
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "normalizer.json"),
)
# Files that say where the weights are, best first; some repositories hold several copies.
WEIGHTS_OR_INDEX = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
_WEIGHT_PATTERNS = (
    ("model.safetensors", "model.safetensors.index.json", "model-?????-of-?????.safetensors"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-?????-of-?????.bin"),
)
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w.-]+))?")
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def checkpoint_folder(name: str, with_weights: bool = True) -> tuple[Path, str]:
    """A checkpoint's folder on this machine.

    Args:
        name: a folder, or a hub id with or without @revision, whose files are downloaded into the
            hub's cache unless they are there.
        with_weights: whether to download weights, of which only the best copy is.

    Returns:
        The folder, and the name to remember it by: a hub id gets the revision that was found.

    Raises:
        CheckpointError: `name` is neither, or the hub does not give it; the message says why.
    """
    path = Path(name)
    if path.is_dir():
        return path, name
    match = _HUB_ID.fullmatch(name)
    if match is None:
        raise CheckpointError(
            f"no checkpoint at {name}: expected a Hugging Face folder, an OpenAI .pt file, or a "
            "hub id such as openai/whisper-tiny"
        )
    hub_id, revision = match[1], match[2]
    folder = _download(hub_id, revision, SMALL_FILES)
    for patterns in _WEIGHT_PATTERNS if with_weights else ():
        if not any((folder / file).exists() for file in WEIGHTS_OR_INDEX):
            folder = _download(hub_id, revision, patterns)
    return folder, f"{hub_id}@{folder.name}"  # the hub's cache names folders by revision


def _download(hub_id: str, revision: str | None, patterns: Iterable[str]) -> Path:
    from huggingface_hub import errors, snapshot_download  # noqa: PLC0415 - serving does without

    # A proxy's refusal or a torn connection comes as the HTTP client's own error, whichever
    # client this release of huggingface_hub uses; everything else is an OSError or ValueError.
    http_error: type[Exception] = vars(errors)["HTTPError"]
    try:
        folder = snapshot_download(hub_id, revision=revision, allow_patterns=list(patterns))
    except (http_error, OSError, ValueError) as error:
        raise CheckpointError(
            f"{hub_id} is no folder here, and {_reason(hub_id, revision, error)}"
        ) from error
    return Path(folder)


def _reason(hub_id: str, revision: str | None, error: Exception) -> str:
    """Why the hub did not give a repository, and what to do."""
    from huggingface_hub import errors  # noqa: PLC0415 - as above

    page = f"https://huggingface.co/{hub_id}"
    if isinstance(error, errors.GatedRepoError):  # first, for it derives from the next
        return f"its terms on the hub must be accepted: do it on {page}, then {_LOG_IN}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"the Hugging Face hub has none of that name; if it is private, {_LOG_IN}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the Hugging Face hub has no revision {revision} of it; {page}/commits lists them"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            "the Hugging Face hub cannot be reached, nor does its cache here hold every file; "
            "without a network, give a folder"
        )
    first_line = str(error).partition("\n")[0]
    return f"it cannot be had from the Hugging Face hub: {first_line}; try again, or give a folder"
