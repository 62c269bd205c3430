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
from serve.contract.engine import Dims, Draft
from serve.contract.errors import CheckpointError

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
    _same_sizes(network, checkpoint)
    _same_encoder(network, checkpoint)
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


def _mismatch_error(draft: Network, difference: str) -> CheckpointError:
    return CheckpointError(
        f"{draft.path} is not a draft for this checkpoint: {difference}; name a matching draft, or "
        "leave `draft` out of [build]"
    )


def _same_sizes(draft: Network, checkpoint: Checkpoint) -> None:
    for field in dataclasses.fields(Dims):
        actual, expected = getattr(draft.dims, field.name), getattr(checkpoint.dims, field.name)
        if actual != expected and field.name not in _DRAFT_SIZES:
            raise _mismatch_error(
                draft, f"its {field.name} is {actual}, the checkpoint's {expected}"
            )


def _same_encoder(draft: Network, checkpoint: Checkpoint) -> None:
    """Compare the encoders as an engine would store them, in float16."""
    for name, tensor in draft.tensors.items():
        if not name.startswith("encoder."):
            continue
        if not torch.equal(tensor.half(), checkpoint.tensors[name].half()):
            raise _mismatch_error(draft, f"its encoder has another {name}")
