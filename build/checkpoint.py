"""Open a Whisper checkpoint: a folder of Hugging Face's or CTranslate2's, or an OpenAI `.pt`.

Every tensor gets its name in `serve.contract.engine`, through the table in `build.tensor_names`. A
missing or unknown tensor, or one of another shape, is an error that names it. No code of a
checkpoint runs: pickles are read with `weights_only`. `build.draft` opens a draft's checkpoint.
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
from serve.contract.engine import (
    HEAD_DIM,
    TOKENIZER_FILE,
    CheckpointSource,
    Dims,
    TokenizerFacts,
    tensor_kinds,
)
from serve.contract.errors import CheckpointError, MissingCheckpointError, shown
from serve.contract.manifest import MAX_LAYERS, MAX_SIZE
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
_HF_FIXED = {  # what the architecture that we run requires of config.json, where it is stated
    "model_type": "whisper",
    "activation_function": "gelu",
    "scale_embedding": False,
    "tie_word_embeddings": True,
}
_TIED = {  # the tied projection, where a checkpoint stores it too
    "hf": "proj_out.weight",
    "ct2": "decoder/projection/weight",
}


@dataclasses.dataclass(frozen=True)
class Network:
    """A checkpoint's weights, which have passed every check.

    Attributes:
        path: the local folder, or file (OpenAI).
        naming: whose format it is.
        dims: the network's sizes.
        tensors: by our name, dtype as stored (float16, bfloat16 or float32), mapped from disk
            where the format allows.
        source: id as the user gave it (a hub id with its revision), and the SHA-256 of the weight
            files, concatenated in order of name.
        weight_bytes: size of the weight files.
        origin: says where it was found, if it was asked for by name.
    """

    path: Path
    naming: Naming
    dims: Dims
    tensors: Mapping[str, torch.Tensor]
    source: CheckpointSource
    weight_bytes: int
    origin: str


@dataclasses.dataclass(frozen=True)
class Checkpoint(Network):
    """An opened checkpoint that has passed every check.

    Attributes:
        facts, tokenizer_json: what token ids mean.
        notes: a sentence for each fact that the checkpoint does not state.
        draft: a second network on the same encoder, whose decoder guesses what this one's verifies.
    """

    facts: TokenizerFacts
    tokenizer_json: bytes
    notes: tuple[str, ...]
    draft: Network | None = None


def open_checkpoint(checkpoint: str, tokenizer: str = "") -> Checkpoint:
    """Open a checkpoint and check everything about it.

    Args:
        checkpoint: name of a published one, hub id with or without @revision, folder of Hugging
            Face's or CTranslate2's format, or OpenAI `.pt` file.
        tokenizer: folder or hub id with tokenizer.json and generation_config.json. Where it is
            empty a folder's own files are used. For a `.pt` of a size that OpenAI published these
            are the files of OpenAI's checkpoint on the hub; other `.pt` files need it.

    Raises:
        CheckpointError: it cannot be found or read, is not Whisper, or a tensor or token is not
            as expected; the message names it.
    """
    network = open_network(checkpoint)
    found: tuple[str, ...] = ()
    if tokenizer:
        folder = checkpoint_folder(tokenizer, with_weights=False).path
    elif network.naming == "openai":
        place = _original_tokenizer(network)
        folder, found = place.path, (f"the .pt holds no tokenizer: it has that of {place.id}",)
    else:
        folder = network.path
    tokens = read_tokenizer_files(folder)
    facts, notes = tokenizer_facts(tokens, network.dims, exact_vocab=folder != network.path)
    return Checkpoint(
        **vars(network), facts=facts, tokenizer_json=tokens.tokenizer_json, notes=found + notes
    )


def _original_tokenizer(network: Network) -> CheckpointLocation:
    """Find the tokenizer of OpenAI's checkpoint that has the network's sizes."""
    advice = (
        f"{network.path} holds weights only; name a folder with {TOKENIZER_FILE} and "
        f"{GENERATION_CONFIG} with `tokenizer` under [build] or --tokenizer"
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
    """Open a checkpoint's weights, whatever its tokens mean.

    Args:
        checkpoint: as in `open_checkpoint`.
        decoder_alone: accept one that holds no tensor of an encoder.

    Raises:
        CheckpointError: as in `open_checkpoint`.
    """
    if Path(checkpoint).is_file():
        place = CheckpointLocation(Path(checkpoint), checkpoint)
        files = [place.path]
    else:
        place = checkpoint_folder(checkpoint)
        files = _weight_files(place.path)
    naming, dims, stored = _read(place.path, files)
    source = CheckpointSource(place.id, _sha256(files))
    if place.sha256 not in (None, source.sha256):
        raise CheckpointError(
            f"{files[0]} is not {checkpoint} as it was published: its SHA-256 is {source.sha256}, "
            f"expected {place.sha256}; remove {place.path} and try again"
        )
    return Network(
        path=place.path,
        naming=naming,
        dims=dims,
        tensors=_renamed(stored, dims, naming, str(place.path), decoder_alone),
        source=source,
        weight_bytes=sum(file.stat().st_size for file in files),
        origin=place.where,
    )


def _read(path: Path, files: list[Path]) -> tuple[Naming, Dims, dict[str, Any]]:
    """Return a checkpoint's naming, its sizes, and its tensors by its own names."""
    if files == [path]:
        return "openai", *_read_openai(path)
    if files == [path / CT2_WEIGHTS]:
        sizes, stored = read_ct2(files[0])
        return "ct2", _dims(sizes, str(files[0]), {field: field for field in sizes}), stored
    return "hf", _hf_dims(path), _read_all(files)


def _read_openai(path: Path) -> tuple[Dims, dict[str, Any]]:
    """Return an OpenAI checkpoint's sizes, and its tensors by OpenAI's names."""
    content = _load_pickle(path)
    if not isinstance(content, dict) or not {"dims", "model_state_dict"} <= set(content):
        raise CheckpointError(
            f"{path} is not an OpenAI Whisper checkpoint: expected `dims` and `model_state_dict`; "
            "of a checkpoint of another format name the folder"
        )
    return _openai_dims(content["dims"], str(path)), content["model_state_dict"]


def folder_files(folder: Path) -> list[Path]:
    """Return the files of a folder that make the checkpoint, with one copy of the weights.

    Raises:
        CheckpointError: it holds no weights, or not all that its index names.
    """
    facts = (folder / name for name in SMALL_FILES)
    weights = {_weights_or_index(folder), *_weight_files(folder)}
    return sorted(weights.union(path for path in facts if path.is_file()))


def _weights_or_index(folder: Path) -> Path:
    path = next((folder / name for name in WEIGHTS_OR_INDEX if (folder / name).is_file()), None)
    if path is None:
        raise CheckpointError(
            f"{folder} holds no weights: expected {' or '.join(WEIGHTS_OR_INDEX)}; name the "
            "folder of a checkpoint, or an OpenAI .pt file itself"
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
        twice = sorted(tensors.keys() & part.keys())
        if twice:
            raise CheckpointError(f"{file}: tensor {twice[0]} is in another file too")
        tensors |= part
    return tensors


def _load_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read {path}: {error}; is it damaged or cut off? fetch it again"
        ) from error


def _load_pickle(path: Path) -> Any:
    try:
        # Only the zip format can be mapped from disk instead of being read into memory.
        mapped = zipfile.is_zipfile(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    # Whatever the bytes of another file lead the unpickler to. What torch says of it is left out:
    # it recommends to read the file without `weights_only`, which may run code in it.
    except Exception as error:
        raise CheckpointError(
            f"cannot read {path} as PyTorch weights ({type(error).__name__}): expected an OpenAI "
            ".pt or a pytorch_model.bin that holds tensors alone; is it another file, damaged or "
            "cut off?"
        ) from error


def _sha256(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)  # goes on with what is there
    return digest.hexdigest()


def _hf_dims(folder: Path) -> Dims:
    path = folder / CONFIG
    config = read_json(path)
    for key, expected in _HF_FIXED.items():
        if config.get(key, expected) != expected:
            raise CheckpointError(f"{path}: {key} = {shown(config[key])}; expected {expected!r}")
    return _dims({field: config.get(key) for field, key in HF_DIMS.items()}, str(path), HF_DIMS)


def _openai_dims(stated: Any, where: str) -> Dims:
    if not isinstance(stated, dict):
        raise CheckpointError(f"{where}: dims is a {type(stated).__name__}; expected a dictionary")
    values = dict(stated)
    for side in ("audio", "text"):  # fixed in OpenAI's `whisper/model.py`, hence not stated
        state = values.get(f"n_{side}_state")
        values[f"n_{side}_ffn"] = state * 4 if isinstance(state, int) else None
    names = {field.name: field.name for field in dataclasses.fields(Dims)}
    return _dims({name: values.get(name) for name in names}, where, names)


def _dims(values: dict[str, Any], where: str, names: Mapping[str, str]) -> Dims:
    """Check sizes that come from outside; `names` are what the file calls them."""
    for field, value in values.items():
        limit = MAX_LAYERS if field.endswith("_layer") else MAX_SIZE
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= limit:
            raise CheckpointError(
                f"{where}: {names[field]} = {shown(value)}; expected 1 to {limit:,}"
            )
    dims = Dims(**values)
    for side in ("audio", "text"):
        state, heads = values[f"n_{side}_state"], values[f"n_{side}_head"]
        if state != heads * HEAD_DIM:
            raise CheckpointError(
                f"{where}: {names[f'n_{side}_state']} = {state} with {heads} heads; expected "
                f"heads of {HEAD_DIM}, as in every Whisper"
            )
    if dims.n_audio_state != dims.n_text_state:
        raise CheckpointError(
            f"{where}: widths of encoder ({dims.n_audio_state}) and decoder "
            f"({dims.n_text_state}) differ; expected them equal"
        )
    if dims.n_audio_ctx != N_FRAMES // 2:
        raise CheckpointError(
            f"{where}: {names['n_audio_ctx']} = {dims.n_audio_ctx}; expected {N_FRAMES // 2}, "
            "a window of 30 s"
        )
    return dims


def _renamed(
    stored: Mapping[str, Any], dims: Dims, naming: Naming, where: str, decoder_alone: bool
) -> dict[str, torch.Tensor]:
    """Give every tensor our name, refusing what is missing, unknown or of the wrong shape."""
    expected = {
        source_tensor_name(name, naming): (name, shape) for name, shape, _ in tensor_kinds(dims)
    }
    encoder = {foreign for foreign, (name, _) in expected.items() if name.startswith("encoder.")}
    if decoder_alone and not encoder & stored.keys():
        expected = {foreign: expected[foreign] for foreign in expected.keys() - encoder}
    stored = dict(stored)
    _drop_tied(stored, naming, where)
    missing, unknown = expected.keys() - stored.keys(), stored.keys() - expected.keys()
    if missing or unknown:
        raise CheckpointError(
            f"{where}: missing tensors: {_some(missing)}; unknown tensors: {_some(unknown)}"
        )
    tensors = {}
    for foreign, (name, shape) in expected.items():
        tensor = stored[foreign]
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            kind = getattr(tensor, "dtype", type(tensor).__name__)
            raise CheckpointError(f"{where}: {foreign} is {kind}; expected floating point")
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{where}: {foreign} has shape {list(tensor.shape)}; expected {list(shape)}"
            )
        tensors[name] = tensor
    return tensors


def _drop_tied(stored: dict[str, Any], naming: Naming, where: str) -> None:
    """Accept a stored vocabulary projection only where it is the embedding itself."""
    embedding, tied = source_tensor_name("decoder.tokens", naming), _TIED.get(naming)
    if tied not in stored or embedding not in stored:
        return
    if not torch.equal(stored.pop(tied), stored[embedding]):
        raise CheckpointError(
            f"{where}: {tied} differs from {embedding}; Whisper ties them, and an engine holds "
            "one matrix only"
        )


def _some(names: Iterable[str], most: int = 8) -> str:
    """Return the first few of many names."""
    ordered = sorted(str(name)[:100] for name in names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return (", ".join(ordered[:most]) or "none") + more
