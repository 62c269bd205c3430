"""A draft: a second checkpoint on the same encoder, whose decoder goes into the engine too.

distil-large-v3 fits large-v3 so: its encoder is a copy that was frozen when the decoder was made.
"""

import dataclasses
import reprlib
from collections.abc import Mapping
from pathlib import Path

import torch

from build.checkpoint import Checkpoint, Network, open_network
from build.hub import CONFIG
from build.tokenizer_facts import read_json, read_tokenizer_files, tokenizer_facts
from serve.contract.engine import TOKENIZER_FILE, Dims, Draft, TokenizerFacts
from serve.contract.errors import CheckpointError

_OWN_SIZES = ("n_text_layer", "n_text_ffn")  # all others must be the checkpoint's
_OWN_FACTS = (  # not about special tokens, and never read of a draft
    "alignment_heads",
    "suppress_tokens",
    "begin_suppress_tokens",
    "max_initial_timestamp_index",
)
_STATED = {"eos_token_id": "eot", "decoder_start_token_id": "sot"}  # in config.json: in our facts


def with_draft(checkpoint: Checkpoint, draft: str) -> Checkpoint:
    """Return the checkpoint with a draft opened beside it.

    Args:
        checkpoint: what verifies.
        draft: as `open_checkpoint` takes one. It may hold a decoder alone; otherwise its encoder
            must be the checkpoint's.

    Raises:
        CheckpointError: the draft cannot be opened, or does not belong to this checkpoint; the
            message names the first difference.
    """
    network = open_network(draft, decoder_alone=True)
    _same_sizes(network, checkpoint)
    _same_tokens(network, checkpoint)
    _same_encoder(network, checkpoint)
    return dataclasses.replace(checkpoint, draft=network)


def draft_facts(checkpoint: Checkpoint) -> Draft | None:
    """Describe the checkpoint's draft for an engine's manifest; None where there is none."""
    if checkpoint.draft is None:
        return None
    dims = checkpoint.draft.dims
    return Draft(checkpoint.draft.source, dims.n_text_layer, dims.n_text_ffn)


def engine_tensors(checkpoint: Checkpoint) -> Mapping[str, torch.Tensor]:
    """Return the checkpoint's tensors, and its draft's by the names that an engine gives them."""
    if checkpoint.draft is None:
        return checkpoint.tensors
    decoder = {
        name.replace("decoder.", "draft.", 1): tensor
        for name, tensor in checkpoint.draft.tensors.items()
        if name.startswith("decoder.")
    }
    return {**checkpoint.tensors, **decoder}


def _refuse(draft: Network, difference: str) -> CheckpointError:
    return CheckpointError(
        f"{draft.path} cannot draft for this checkpoint: {difference}; give one that was made for "
        "it, or leave `draft` out of [build]"
    )


def _same_sizes(draft: Network, checkpoint: Checkpoint) -> None:
    for field in dataclasses.fields(Dims):
        own, expected = getattr(draft.dims, field.name), getattr(checkpoint.dims, field.name)
        if own != expected and field.name not in _OWN_SIZES:
            raise _refuse(draft, f"its {field.name} is {own}, the checkpoint's {expected}")


def _same_tokens(draft: Network, checkpoint: Checkpoint) -> None:
    """Compare what the draft's own files say of tokens, where it has such files."""
    if draft.naming == "openai":
        return  # weights alone: nothing says what its tokens mean
    facts = dataclasses.asdict(checkpoint.facts)
    if (draft.path / TOKENIZER_FILE).is_file():
        own = dataclasses.asdict(_own_facts(draft.path, checkpoint.dims))
    else:
        config = read_json(draft.path / CONFIG)
        own = {fact: config[key] for key, fact in _STATED.items() if config.get(key) is not None}
    for name, value in own.items():
        if value != facts[name] and name not in _OWN_FACTS:
            shown, expected = (reprlib.repr(each) for each in (value, facts[name]))
            raise _refuse(draft, f"its tokens differ: {name} is {shown}, not {expected}")


def _own_facts(folder: Path, dims: Dims) -> TokenizerFacts:
    # Sizes of the checkpoint: some published drafts kept the list of its alignment heads.
    return tokenizer_facts(read_tokenizer_files(folder), dims, exact_vocab=False)[0]


def _same_encoder(draft: Network, checkpoint: Checkpoint) -> None:
    """Compare the encoders as an engine would store them, in float16."""
    for name, tensor in draft.tensors.items():
        if not name.startswith("encoder."):
            continue
        if not torch.equal(tensor.half(), checkpoint.tensors[name].half()):
            raise _refuse(draft, f"its encoder is another one, {name} differs")
