"""The share of a GPU's memory that an engine takes, known before it is taken.

Everything is allocated when the runtime starts. So what does not fit is an error then, which says
how many slots would, and never in service.
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
    per_slot: int  # caches of cross-attention
    rows: int
    per_row: int  # caches of self-attention
    phrases: int  # a list for each slot
    encoder: int  # activations of the largest batch
    words: int  # activations of the largest pass that aligns text
    fixed: int
    allowed: int

    @property
    def total(self) -> int:
        """Bytes that the runtime may take."""
        return self.weights + self.of_slots + self.encoder + self.words + self.fixed

    @property
    def of_slots(self) -> int:
        """Bytes that there are more of with more slots."""
        return self.caches + self.phrases

    @property
    def caches(self) -> int:
        """Bytes of all caches."""
        return self.slots * self.per_slot + self.rows * self.per_row

    def __str__(self) -> str:
        """One line."""
        return (
            f"memory {_gib(self.total)} of {_gib(self.allowed)} allowed: weights "
            f"{_gib(self.weights)}, caches of {self.slots} slots with {self.rows} rows "
            f"{_gib(self.caches)}, phrases {_gib(self.phrases)}, encoder "
            f"{_gib(self.encoder)}, words {_gib(self.words)}, other {_gib(self.fixed)}"
        )


def plan_memory(
    decoders: Sequence[Decoder], config: RuntimeConfig, rows: int, words: int = 0
) -> MemoryPlan:
    """The plan for the network's decoder, and for its draft's, whose weights are on their device.

    Raises:
        UnavailableError: the slots do not fit into what `runtime.memory_share` allows.
    """
    device, dims = decoders[0].device, decoders[0].dims
    free, total = torch.cuda.mem_get_info(device)
    weights = torch.cuda.memory_allocated(device)
    others = total - free - torch.cuda.memory_reserved(device)
    # Per position: stream, norm, query, key, value, attention and the wide layer, in FP16; twice as
    # many positions in the convolutions.
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
        # As many rows a slot as now.
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
