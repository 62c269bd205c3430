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
    decoders: Sequence[Decoder], config: RuntimeConfig, rows: int, alignment_bytes: int = 0
) -> str:
    """Return a description of the memory that the runtime will take.

    Args:
        decoders: the main decoder and the draft decoder; their weights are loaded already.
        config: the slots, the batch size, and the share of the GPU's memory that may be taken.
        rows: the number of rows of all slots together.
        alignment_bytes: bytes of the activations of the largest alignment pass.

    Raises:
        UnavailableError: the slots do not fit into the memory that `runtime.memory_share` allows.
    """
    device, dims, slots = decoders[0].device, decoders[0].dims, config.slots
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    other_processes_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved(device)
    allowed_bytes = round(config.memory_share * total_bytes) - other_processes_bytes
    # FP16 values per position: residual, norm, query, key, value, attention output and the wide
    # layer; the convolutions have twice as many positions.
    values_per_position = (
        6 * dims.n_audio_state + dims.n_audio_ffn + 2 * (dims.n_audio_state + dims.n_mels)
    )
    cache_bytes = sum(decoder.cache_bytes(slots, rows, config.cross_kv) for decoder in decoders)
    phrase_bytes = slots * Phrasebook.bytes_of_slot()
    sizes = {
        "weights": torch.cuda.memory_allocated(device),
        f"caches of {slots} slots with {rows} rows": cache_bytes,
        "phrases": phrase_bytes,
        "encoder": config.encoder_batch * dims.n_audio_ctx * values_per_position * 2,
        "words": alignment_bytes,
        "other": _FIXED,
    }
    needed_bytes = sum(sizes.values())
    plan = f"memory {_gib(needed_bytes)} of {_gib(allowed_bytes)} allowed: "
    plan += ", ".join(f"{name} {_gib(size)}" for name, size in sizes.items())
    if needed_bytes > allowed_bytes:
        # Keep the number of rows per slot.
        slots_bytes = cache_bytes + phrase_bytes
        other_bytes = needed_bytes - slots_bytes
        fitting_slots = max(0, int((allowed_bytes - other_bytes) / (slots_bytes / slots)))
        advice = "use a larger GPU or a smaller model"
        if fitting_slots:
            advice = f"set runtime.slots = {fitting_slots}"
            advice += f" and runtime.rows = {fitting_slots * rows // slots}" if rows > slots else ""
        raise UnavailableError(
            f"{device} has too little memory for runtime.slots = {slots}: {plan} "
            f"(runtime.memory_share = {config.memory_share}); {advice}"
        )
    return plan


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
