"""Open a Whisper checkpoint: a Hugging Face or CTranslate2 folder, or an OpenAI `.pt` file.

Tensors are renamed to those of `serve.contract.engine` by the table in `build.tensor_names`. A
missing or unknown tensor, or one of another shape, is an error. No code of a checkpoint runs:
pickles are read with `weights_only`. `build.draft` opens the checkpoint of a draft.
"""

import dataclasses
import hashlib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from build.ct2 import read_ct2
from build.hub import (
    CONFIG,
    CT2_WEIGHTS,
    GENERATION_CONFIG,
    SMALL_FILES,
    WEIGHTS_OR_INDEX,
    CheckpointLocation,
    checkpoint_folder,
)
from build.known_checkpoints import ORIGINALS
from build.tensor_names import Naming, source_tensor_name
from build.tokenizer_facts import read_json, read_tokenizer_files, tokenizer_facts
from serve.contract.codec import from_table
from serve.contract.engine import tensor_kinds
from serve.contract.errors import CheckpointError, MissingCheckpointError, shown
from serve.contract.manifest import (
    TOKENIZER_FILE,
    CheckpointSource,
    Dims,
    TokenizerFacts,
    dims_problems,
)
from serve.speech.features import N_FRAMES

HF_DIMS = {  # our field: Hugging Face's key in config.json
    "n_mels": "num_mel_bins",
    "n_audio_ctx": "max_source_positions",
    "n_audio_state": "d_model",
    "n_audio_head": "encoder_attention_heads",
    "n_audio_layer": "encoder_layers",
    "n_audio_ffn": "encoder_ffn_dim",
    "n_vocab": "vocab_size",
    "n_text_ctx": "max_target_positions",
    "n_text_state": "d_model",
    "n_text_head": "decoder_attention_heads",
    "n_text_layer": "decoder_layers",
    "n_text_ffn": "decoder_ffn_dim",
}
_HF_FIXED = {  # the only supported values in config.json
    "model_type": "whisper",
    "activation_function": "gelu",
    "scale_embedding": False,
    "tie_word_embeddings": True,
}
_TIED = {  # the tied output projection, which some checkpoints store too
    "hf": "proj_out.weight",
    "ct2": "decoder/projection/weight",
}


@dataclasses.dataclass(frozen=True)
class Network:
    """The checked weights of a checkpoint.

    Attributes:
        path: the local folder, or the file of an OpenAI checkpoint.
        naming: the format.
        dims: the network's sizes.
        tensors: the tensors by our names, in the stored dtype (float16, bfloat16 or float32), and
            mapped from disk if the format allows it.
        source: the id that the user gave (a hub id with its revision), and the SHA-256 of the
            weight files, concatenated in order of file names.
        weight_bytes: the size of the weight files.
    """

    path: Path
    naming: Naming
    dims: Dims
    tensors: Mapping[str, torch.Tensor]
    source: CheckpointSource
    weight_bytes: int


@dataclasses.dataclass(frozen=True)
class Checkpoint(Network):
    """A checked checkpoint: weights and tokenizer.

    Attributes:
        facts, tokenizer_json: the tokenizer.
        notes: a sentence on a tokenizer from elsewhere, and one on its repair.
        draft: a second network with the same encoder; its decoder proposes tokens.
    """

    facts: TokenizerFacts
    tokenizer_json: bytes
    notes: tuple[str, ...]
    draft: Network | None = None


def open_checkpoint(checkpoint: str, tokenizer: str = "") -> Checkpoint:
    """Open and check a checkpoint.

    Args:
        checkpoint: the name of a published checkpoint, a hub id with or without @revision, a
            Hugging Face or CTranslate2 folder, or an OpenAI `.pt` file.
        tokenizer: a folder or hub id with tokenizer.json and generation_config.json. By default
            the files of the checkpoint's folder. For a `.pt` file the default is the tokenizer of
            OpenAI's checkpoint of the same size on the hub; other sizes need this argument.

    Raises:
        CheckpointError: the checkpoint cannot be found or read, is not Whisper, or has a wrong
            tensor or token; the message names it.
    """
    network = open_network(checkpoint)
    notes: list[str] = []
    if tokenizer:
        folder = checkpoint_folder(tokenizer, with_weights=False).path
    elif network.naming == "openai":
        location = _original_tokenizer(network)
        folder = location.path
        notes.append(f"the .pt has no tokenizer; using that of {location.id}")
    else:
        folder = network.path
    files = read_tokenizer_files(folder)
    if files.repair:
        notes.append(files.repair)
    return Checkpoint(
        **vars(network),
        facts=tokenizer_facts(files, network.dims, exact_vocab=folder != network.path),
        tokenizer_json=files.tokenizer_json,
        notes=tuple(notes),
    )


def _original_tokenizer(network: Network) -> CheckpointLocation:
    """Find the tokenizer of OpenAI's checkpoint with the network's sizes."""
    advice = (
        f"{network.path} has only weights; set --tokenizer, or `tokenizer` under [build], to a "
        f"folder that has {TOKENIZER_FILE} and {GENERATION_CONFIG}"
    )
    dims = network.dims
    hub_id = ORIGINALS.get((dims.n_text_state, dims.n_text_layer, dims.n_mels, dims.n_vocab))
    if hub_id is None:
        raise CheckpointError(advice)
    try:
        return checkpoint_folder(hub_id, with_weights=False)
    except MissingCheckpointError as error:
        raise MissingCheckpointError(f"{advice} ({error})") from error


def open_network(checkpoint: str, decoder_alone: bool = False) -> Network:
    """Open a checkpoint's weights, without its tokenizer.

    Args:
        checkpoint: see `open_checkpoint`.
        decoder_alone: whether to accept a checkpoint without an encoder.

    Raises:
        CheckpointError: see `open_checkpoint`.
    """
    if Path(checkpoint).is_file():
        location = CheckpointLocation(Path(checkpoint), checkpoint)
        files = [location.path]
    else:
        location = checkpoint_folder(checkpoint)
        files = _weight_files(location.path)
    naming, dims, stored = _read(location.path, files)
    source = CheckpointSource(location.id, _sha256(files))
    if location.sha256 not in (None, source.sha256):
        raise CheckpointError(
            f"{files[0]} is not the published {checkpoint}: its SHA-256 is {source.sha256}, "
            f"expected {location.sha256}; remove {location.path} and try again"
        )
    return Network(
        path=location.path,
        naming=naming,
        dims=dims,
        tensors=_rename(stored, dims, naming, str(location.path), decoder_alone),
        source=source,
        weight_bytes=sum(file.stat().st_size for file in files),
    )


def _read(path: Path, files: list[Path]) -> tuple[Naming, Dims, dict[str, Any]]:
    """Return a checkpoint's format, its sizes, and its tensors by the format's names."""
    if files == [path]:
        return "openai", *_read_openai(path)
    if files == [path / CT2_WEIGHTS]:
        sizes, stored = read_ct2(files[0])
        return "ct2", _dims(sizes, str(files[0])), stored
    return "hf", _hf_dims(path), _read_all(files)


def _read_openai(path: Path) -> tuple[Dims, dict[str, Any]]:
    """Return an OpenAI checkpoint's sizes, and its tensors by OpenAI's names."""
    content = _load_pickle(path)
    try:
        sizes, tensors = dict(content["dims"]), content["model_state_dict"]
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not an OpenAI Whisper checkpoint: expected `dims` and `model_state_dict`; "
            "name the folder of a checkpoint in another format"
        ) from error
    for side in ("audio", "text"):  # a constant in OpenAI's `whisper/model.py`
        state = sizes.get(f"n_{side}_state")
        if isinstance(state, int):  # otherwise `_dims` rejects it
            sizes[f"n_{side}_ffn"] = 4 * state
    return _dims(sizes, str(path)), tensors


def folder_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint's folder, with one copy of the weights.

    Raises:
        CheckpointError: the folder has no weights, or not all files of the index.
    """
    facts = (folder / name for name in SMALL_FILES)
    weights = {_weights_or_index(folder), *_weight_files(folder)}
    return sorted(weights.union(path for path in facts if path.is_file()))


def _weights_or_index(folder: Path) -> Path:
    path = next((folder / name for name in WEIGHTS_OR_INDEX if (folder / name).is_file()), None)
    if path is None:
        raise CheckpointError(
            f"{folder} has no weights: expected {' or '.join(WEIGHTS_OR_INDEX)}; name the folder "
            "of a checkpoint, or an OpenAI .pt file"
        )
    return path


def _weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder, whole or sharded, in order of name."""
    path = _weights_or_index(folder)
    if path.suffix != ".json":
        return [path]
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is missing or empty")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise CheckpointError(f"{path} names the file {shown(name)}, which is not in {folder}")
    return [folder / name for name in names]


def _read_all(files: list[Path]) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for file in files:
        part = _load_safetensors(file) if file.suffix == ".safetensors" else _load_pickle(file)
        if not isinstance(part, dict):
            raise CheckpointError(f"{file} holds a {type(part).__name__}; expected tensors by name")
        duplicates = sorted(tensors.keys() & part.keys())
        if duplicates:
            raise CheckpointError(f"{file}: tensor {duplicates[0]} is in another file too")
        tensors |= part
    return tensors


def _load_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read {path}: {error}; it may be damaged or truncated; fetch it again"
        ) from error


def _load_pickle(path: Path) -> Any:
    try:
        # Only the zip format can be mapped from disk; others are read into memory.
        mapped = zipfile.is_zipfile(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    # Arbitrary bytes may raise any exception in the unpickler. Torch's message is left out, because
    # it recommends to read the file without `weights_only`, which may run the file's code.
    except Exception as error:
        raise CheckpointError(
            f"cannot read {path} as PyTorch weights ({type(error).__name__}): expected an OpenAI "
            ".pt or a pytorch_model.bin with only tensors; it may be damaged or truncated; fetch "
            "it again"
        ) from error


def _sha256(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)  # continues the same digest
    return digest.hexdigest()


def _hf_dims(folder: Path) -> Dims:
    path = folder / CONFIG
    config = read_json(path)
    for key, expected in _HF_FIXED.items():
        if config.get(key, expected) != expected:
            raise CheckpointError(f"{path}: {key} = {shown(config[key])}; expected {expected!r}")
    return _dims({field: config.get(key) for field, key in HF_DIMS.items()}, str(path))


def _dims(values: dict[str, Any], where: str) -> Dims:
    """Check the sizes that a file states."""
    sizes = {field.name: values.get(field.name) for field in dataclasses.fields(Dims)}
    dims = from_table(Dims, sizes, where, error=CheckpointError)
    for problem in dims_problems(dims):
        raise CheckpointError(f"{where}: {problem}")
    if dims.n_audio_ctx != N_FRAMES // 2:
        raise CheckpointError(
            f"{where}: n_audio_ctx = {dims.n_audio_ctx}; expected {N_FRAMES // 2}, a window of 30 s"
        )
    return dims


def _rename(
    stored: Mapping[str, Any], dims: Dims, naming: Naming, where: str, decoder_alone: bool
) -> dict[str, torch.Tensor]:
    """Rename the tensors to our names.

    Raises:
        CheckpointError: a tensor is missing, unknown, or has a wrong shape or type.
    """
    expected = {
        source_tensor_name(name, naming): (name, shape) for name, shape, _ in tensor_kinds(dims)
    }
    encoder = {source for source, (name, _) in expected.items() if name.startswith("encoder.")}
    if decoder_alone and not encoder & stored.keys():
        expected = {source: expected[source] for source in expected.keys() - encoder}
    stored = dict(stored)
    _drop_tied(stored, naming, where)
    missing, unknown = expected.keys() - stored.keys(), stored.keys() - expected.keys()
    if missing or unknown:
        raise CheckpointError(
            f"{where}: missing tensors: {_join_names(missing)}; "
            f"unknown tensors: {_join_names(unknown)}"
        )
    tensors = {}
    for source, (name, shape) in expected.items():
        tensor = stored[source]
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            kind = getattr(tensor, "dtype", type(tensor).__name__)
            raise CheckpointError(f"{where}: {source} is {kind}; expected floating point")
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{where}: {source} has shape {list(tensor.shape)}; expected {list(shape)}"
            )
        tensors[name] = tensor
    return tensors


def _drop_tied(stored: dict[str, Any], naming: Naming, where: str) -> None:
    """Remove a stored vocabulary projection, which must equal the token embedding."""
    embedding, tied = source_tensor_name("decoder.tokens", naming), _TIED.get(naming)
    if tied not in stored or embedding not in stored:
        return
    if not torch.equal(stored.pop(tied), stored[embedding]):
        raise CheckpointError(
            f"{where}: {tied} differs from {embedding}; expected equal matrices, which Whisper ties"
        )


def _join_names(names: Iterable[str], limit: int = 8) -> str:
    """Return the first few names as text."""
    ordered = sorted(str(name)[:100] for name in names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return (", ".join(ordered[:limit]) or "none") + more
