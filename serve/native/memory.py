"""Compute the GPU memory that an engine needs before allocating it.

The runtime allocates everything when it starts. If it does not fit, the start fails with an error
that names the number of slots that would fit. A running server never runs out of memory.
"""

from collections.abc import Sequence

import torch

from serve.contract.config import RuntimeConfig
from serve.contract.errors import UnavailableError
from serve.native.decoder import Decoder
from serve.native.rules.phrases import Phrasebook

_FIXED = 3 << 29  # the CUDA context, graphs, workspaces, projections of cross-attention


def plan_memory(
    decoders: Sequence[Decoder], config: RuntimeConfig, rows: int, words: int = 0
) -> str:
    """Return a description of the memory that the runtime will take.

    Args:
        decoders: the main decoder and the draft decoder; their weights are loaded already.
        config: the slots, the batch size, and the share of the GPU's memory that may be taken.
        rows: the number of rows of all slots together.
        words: bytes of the activations of the largest alignment pass.

    Raises:
        UnavailableError: the slots do not fit into the memory that `runtime.memory_share` allows.
    """
    device, dims, slots = decoders[0].device, decoders[0].dims, config.slots
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    allowed = round(config.memory_share * total) - others
    # FP16 values per position: residual, norm, query, key, value, attention output and the wide
    # layer; the convolutions have twice as many positions.
    position = 6 * dims.n_audio_state + dims.n_audio_ffn + 2 * (dims.n_audio_state + dims.n_mels)
    caches = slots * sum(decoder.slot_bytes(config.cross_kv) for decoder in decoders)
    caches += rows * sum(decoder.row_bytes() for decoder in decoders)
    phrases = slots * Phrasebook.bytes_of_slot()
    parts = {
        "weights": torch.cuda.memory_allocated(device),
        f"caches of {slots} slots with {rows} rows": caches,
        "phrases": phrases,
        "encoder": config.encoder_batch * dims.n_audio_ctx * position * 2,
        "words": words,
        "other": _FIXED,
    }
    needed = sum(parts.values())
    plan = f"memory {_gib(needed)} of {_gib(allowed)} allowed: "
    plan += ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())
    if needed > allowed:
        # Keep the number of rows per slot.
        of_slots = caches + phrases
        fit = max(0, int((allowed - (needed - of_slots)) / (of_slots / slots)))
        advice = "use a larger GPU or a smaller model"
        if fit:
            advice = f"set runtime.slots = {fit}"
            advice += f" and runtime.rows = {fit * rows // slots}" if rows > slots else ""
        raise UnavailableError(
            f"{device} has too little memory for runtime.slots = {slots}: {plan} "
            f"(runtime.memory_share = {config.memory_share}); {advice}"
        )
    return plan


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
