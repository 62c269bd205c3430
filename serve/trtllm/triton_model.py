"""Triton's C++ `tensorrt_llm` model: when it decodes, and what its config.pbtxt says."""

from pathlib import Path

from serve.contract.config import RuntimeConfig
from serve.contract.runtimes import TritonModel

NAME = "tensorrt_llm"

_TEMPLATE = Path(__file__).with_name("config.pbtxt")


def triton_model(engine_path: Path, config: RuntimeConfig) -> TritonModel | None:
    """Return the model over the engines that were compiled; None where the config wants none.

    Raises:
        EngineError: the engine cannot be opened, or is another runtime's.
        ConfigError: the configuration goes beyond what the engine was built for.
    """
    own = config.tensorrt_llm
    if not own.triton_backend:
        return None
    # These load torch, which only this configuration needs in the launcher's process.
    from serve.contract.engine import open_engine  # noqa: PLC0415
    from serve.trtllm.limits import ENGINES_FOLDER, check_config, limits_of  # noqa: PLC0415

    limits = limits_of(open_engine(engine_path))
    check_config(limits, config)
    engines = engine_path.resolve() / ENGINES_FOLDER
    _, _, gpu = config.device.partition(":")  # cuda or cuda:N
    values = {
        "max_batch_size": min(config.slots, limits.max_batch_size),
        "decoder": engines / "decoder",
        "encoder": engines / "encoder",
        "max_beam_width": own.beam_width,
        "kv_cache_fraction": own.kv_cache_fraction,
        "cross_kv_fraction": own.cross_kv_fraction,
        "gpu_device_ids": gpu or 0,
    }
    return TritonModel(NAME, _TEMPLATE, values)
