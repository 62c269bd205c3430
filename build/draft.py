"""Open a draft: a second checkpoint with the same encoder; the engine also stores its decoder.

The draft must have a vocabulary of the same size. Tokens with another meaning would only make worse
drafts, since every draft token is verified.

For example, distil-large-v3 is a draft for large-v3: its encoder is a frozen copy of the larger
model's.
"""

import dataclasses
from collections.abc import Mapping

import torch

from build.checkpoint import Checkpoint, Network, open_network
from serve.contract.errors import CheckpointError
from serve.contract.manifest import Dims, Draft

_DRAFT_SIZES = ("n_text_layer", "n_text_ffn")  # all other sizes must equal the checkpoint's


def with_draft(checkpoint: Checkpoint, draft: str) -> Checkpoint:
    """Return the checkpoint with a draft opened beside it.

    Args:
        checkpoint: the main checkpoint.
        draft: a name as for `open_checkpoint`. The draft may have no encoder; otherwise its encoder
            must equal the checkpoint's.

    Raises:
        CheckpointError: the draft cannot be opened, or does not fit the checkpoint; the message
            names the first difference.
    """
    network = open_network(draft, decoder_alone=True)
    if difference := _difference(network, checkpoint):
        raise CheckpointError(
            f"{network.path} is not a draft for this checkpoint: {difference}; name a matching "
            "draft, or leave `draft` out of [build]"
        )
    return dataclasses.replace(checkpoint, draft=network)


def draft_facts(checkpoint: Checkpoint) -> Draft | None:
    """Describe the checkpoint's draft for an engine's manifest; return None without a draft."""
    if checkpoint.draft is None:
        return None
    dims = checkpoint.draft.dims
    return Draft(checkpoint.draft.source, dims.n_text_layer, dims.n_text_ffn)


def engine_tensors(checkpoint: Checkpoint) -> Mapping[str, torch.Tensor]:
    """Return the tensors of the checkpoint and the draft by their names in an engine."""
    if checkpoint.draft is None:
        return checkpoint.tensors
    decoder = {
        name.replace("decoder.", "draft.", 1): tensor
        for name, tensor in checkpoint.draft.tensors.items()
        if name.startswith("decoder.")
    }
    return {**checkpoint.tensors, **decoder}


def _difference(draft: Network, checkpoint: Checkpoint) -> str | None:
    """Return the first difference of sizes and encoders, which are compared in float16."""
    for field in dataclasses.fields(Dims):
        actual, expected = getattr(draft.dims, field.name), getattr(checkpoint.dims, field.name)
        if actual != expected and field.name not in _DRAFT_SIZES:
            return f"its {field.name} is {actual}, the checkpoint's {expected}"
    for name, tensor in draft.tensors.items():
        in_encoder = name.startswith("encoder.")
        if in_encoder and not torch.equal(tensor.half(), checkpoint.tensors[name].half()):
            return f"its encoder has another {name}"
    return None
