"""Read the devices of `runtime.device`; each device has an engine in its own process.

    cpu, cuda, cuda:1   one device
    cuda:0,1   cuda:*   several GPUs; the star means all GPUs that this process sees
    cpu,cpu             several engines on the CPU, each on its own cores

If there are several GPUs, each process gets `CUDA_VISIBLE_DEVICES` with its GPU only, so nothing in
it, not even tritonserver, takes memory on the others. If there are several engines on the CPU,
`EARSHOT_CORES` pins each process to neighbouring cores, socket by socket, so its weights are in
local memory.
"""

import dataclasses
import logging
import os
import re
from pathlib import Path

from serve.contract.config import RuntimeConfig
from serve.contract.errors import UnavailableError

logger = logging.getLogger("earshot")

CORES = "EARSHOT_CORES"
"""Comma-separated numbers of the cores that a process is pinned to; empty: as its parent."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
TOPOLOGY = Path("/sys/devices/system/cpu")
# The files with a container's CPU quota and period: cgroups version 2, then version 1.
QUOTAS = (
    (Path("/sys/fs/cgroup/cpu.max"),),
    (Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")),
)


def names_of(device: str) -> tuple[str, ...]:
    """Return the name of each engine in metrics and messages; a star is not expanded."""
    kind, _, numbers = device.partition(":")
    if kind == "cuda":
        return tuple(f"cuda:{number}" for number in numbers.split(",")) if numbers else (kind,)
    count = len(device.split(","))
    return (device,) if count == 1 else tuple(f"cpu-{number}" for number in range(count))


def first_of(config: RuntimeConfig) -> RuntimeConfig:
    """Choose the first device, for a process with one engine, and log the choice."""
    device = config.device.split(",", maxsplit=1)[0].removesuffix(":*")
    if device == config.device:
        return config
    logger.warning(
        "runtime.device = %r: this process runs one engine, on %s; a server runs one on each",
        config.device,
        device,
    )
    return dataclasses.replace(config, device=device)


def with_gpu_numbers(config: RuntimeConfig) -> RuntimeConfig:
    """Replace a star by the numbers of the GPUs.

    Raises:
        UnavailableError: a GPU does not exist.
    """
    if len(names_of(config.device)) == 1 and not config.device.endswith("*"):
        return config  # the runtime checks a single device
    if not config.device.startswith("cuda"):
        return config
    import torch  # noqa: PLC0415 - the import takes seconds

    count = torch.cuda.device_count()
    numbers = [int(number) for number in re.findall(r"[0-9]+", config.device)] or [*range(count)]
    if not numbers or max(numbers) >= count:
        raise UnavailableError(
            f"runtime.device = {config.device!r}, but this process sees {count} GPUs; expected "
            f'numbers below {count}, or another device such as "cpu"'
        )
    return dataclasses.replace(config, device=f"cuda:{','.join(map(str, numbers))}")


@dataclasses.dataclass(frozen=True)
class DevicePlacement:
    """The device of one engine."""

    name: str
    runtime: RuntimeConfig  # with a single device
    environment: dict[str, str]  # additional variables for its processes


def placements(config: RuntimeConfig) -> tuple[DevicePlacement, ...]:
    """Return the placement of each engine; `config` must be a result of `with_gpu_numbers`."""
    names = names_of(config.device)
    count = len(names)
    if count == 1:
        return (DevicePlacement(names[0], config, {}),)
    placements = []
    if config.device.startswith("cuda"):
        runtime = dataclasses.replace(config, device="cuda")
        visible_variable = os.environ.get(_VISIBLE, "").split(",")
        visible = [device.strip() for device in visible_variable if device.strip()]
        for name in names:
            number = name.removeprefix("cuda:")
            device = visible[int(number)] if visible else number
            placements.append(DevicePlacement(name, runtime, {_VISIBLE: device}))
        return tuple(placements)
    cores = sorted(os.sched_getaffinity(0), key=_core_location)
    if len(cores) < count:
        cores = []
    for i, name in enumerate(names):
        engine_cores = cores[len(cores) * i // count : len(cores) * (i + 1) // count]
        threads = config.threads or max(1, min(len(engine_cores), usable_cores() // count))
        runtime = dataclasses.replace(config, device="cpu", threads=threads)
        placements.append(DevicePlacement(name, runtime, {CORES: ",".join(map(str, engine_cores))}))
    return tuple(placements)


def usable_cores() -> int:
    """Count the cores that this process may use, within the container's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    for files in QUOTAS:
        try:
            quota, period = map(int, " ".join(file.read_text() for file in files).split())
        except (OSError, ValueError):  # no cgroup of this version, or "max"
            continue
        if quota > 0:
            return max(1, min(cores, quota // period))
    return cores


def _core_location(core: int) -> tuple[int, int, int]:
    """Return the socket and physical core of a logical core."""
    folder = TOPOLOGY / f"cpu{core}/topology"
    try:
        socket, physical = (
            int((folder / name).read_text()) for name in ("physical_package_id", "core_id")
        )
    except (OSError, ValueError):  # no such folder in some containers
        return 0, core, core
    return socket, physical, core
