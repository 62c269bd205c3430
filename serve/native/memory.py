"""Compute the GPU memory that an engine needs before allocating it.

The runtime allocates everything when it starts. If it does not fit, the start fails with an error
that names the number of slots that would fit. A running server never runs out of memory.
"""

import dataclasses
from collections.abc import Sequence

import torch

from serve.contract.config import RuntimeConfig
from serve.contract.errors import UnavailableError
from serve.native.decoder import Decoder
from serve.native.rules.phrases import Phrasebook

_FIXED = 3 << 29  # the CUDA context, graphs, workspaces, projections of cross-attention


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device."""

    weights: int
    slots: int
    per_slot: int  # cross-attention cache
    rows: int
    per_row: int  # self-attention cache
    phrases: int  # one list per slot
    encoder: int  # activations of the largest encoder batch
    words: int  # activations of the largest alignment pass
    fixed: int
    allowed: int

    @property
    def total(self) -> int:
        """Bytes that the runtime may take."""
        return self.weights + self.of_slots + self.encoder + self.words + self.fixed

    @property
    def of_slots(self) -> int:
        """Bytes that grow with the number of slots."""
        return self.caches + self.phrases

    @property
    def caches(self) -> int:
        """Bytes of all caches."""
        return self.slots * self.per_slot + self.rows * self.per_row

    def __str__(self) -> str:
        return (
            f"memory {_gib(self.total)} of {_gib(self.allowed)} allowed: weights "
            f"{_gib(self.weights)}, caches of {self.slots} slots with {self.rows} rows "
            f"{_gib(self.caches)}, phrases {_gib(self.phrases)}, encoder "
            f"{_gib(self.encoder)}, words {_gib(self.words)}, other {_gib(self.fixed)}"
        )


def plan_memory(
    decoders: Sequence[Decoder], config: RuntimeConfig, rows: int, words: int = 0
) -> MemoryPlan:
    """Plan the memory of the main decoder and the draft decoder; their weights are loaded already.

    Raises:
        UnavailableError: the slots do not fit into the memory that `runtime.memory_share` allows.
    """
    device, dims = decoders[0].device, decoders[0].dims
    free, total = torch.cuda.mem_get_info(device)
    weights = torch.cuda.memory_allocated(device)
    others = total - free - torch.cuda.memory_reserved(device)
    # FP16 values per position: residual, norm, query, key, value, attention output and the wide
    # layer; the convolutions have twice as many positions.
    row = 6 * dims.n_audio_state + dims.n_audio_ffn + 2 * (dims.n_audio_state + dims.n_mels)
    plan = MemoryPlan(
        weights=weights,
        slots=config.slots,
        per_slot=sum(decoder.slot_bytes(config.cross_kv) for decoder in decoders),
        rows=rows,
        per_row=sum(decoder.row_bytes() for decoder in decoders),
        phrases=config.slots * Phrasebook.bytes_of_slot(),
        encoder=config.encoder_batch * dims.n_audio_ctx * row * 2,
        words=words,
        fixed=_FIXED,
        allowed=round(config.memory_share * total) - others,
    )
    if plan.total > plan.allowed:
        # Keep the number of rows per slot.
        each = plan.of_slots / plan.slots
        fit = max(0, int((plan.allowed - (plan.total - plan.of_slots)) / each))
        mend = "use a larger GPU or a smaller model"
        if fit:
            mend = f"set runtime.slots = {fit}"
            mend += f" and runtime.rows = {fit * rows // plan.slots}" if rows > plan.slots else ""
        raise UnavailableError(
            f"{device} has too little memory for runtime.slots = {config.slots}: {plan} "
            f"(runtime.memory_share = {config.memory_share}); {mend}"
        )
    return plan


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
