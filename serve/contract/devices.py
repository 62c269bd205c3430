"""The devices that `runtime.device` names: one, or several, each with an engine and a process.

    cpu, cuda, cuda:1   one
    cuda:0,1   cuda:*   several GPUs; the star is all that this process may see
    cpu,cpu             as many engines on the processor, each on cores of its own

An engine of several has its GPU to itself: its process is started with `CUDA_VISIBLE_DEVICES` of
that GPU alone, so that nothing in it, tritonserver included, takes memory on the others. One of
several on the processor is started with `EARSHOT_CORES`, and all of it stays there: cores beside
each other, a socket's before another's, so that its weights lie in the memory that is near.
"""

import dataclasses
import itertools
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from serve.contract.config import RuntimeConfig
from serve.contract.errors import UnavailableError

logger = logging.getLogger("earshot")

CORES = "EARSHOT_CORES"
"""Numbers of the cores that a process is kept to, with commas between; empty: as its parent."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
TOPOLOGY = Path("/sys/devices/system/cpu")
# The files with a container's own quota and period, of the second version of cgroups and the first.
QUOTAS = (
    (Path("/sys/fs/cgroup/cpu.max"),),
    (Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")),
)


def names_of(device: str) -> tuple[str, ...]:
    """Name each engine, as metrics and messages do; of a star, itself."""
    kind, _, rest = device.partition(":")
    if kind == "cuda":
        return tuple(f"cuda:{number}" for number in rest.split(",")) if rest else (kind,)
    count = len(device.split(","))
    return (device,) if count == 1 else tuple(f"cpu-{number}" for number in range(count))


def first_of(config: RuntimeConfig) -> RuntimeConfig:
    """Choose the first of the devices, for the one engine of a process, and log it."""
    first = config.device.split(",", maxsplit=1)[0].removesuffix(":*")
    if first == config.device:
        return config
    logger.warning(
        "runtime.device = %r: one engine runs here, on %s; a server has one on each",
        config.device,
        first,
    )
    return dataclasses.replace(config, device=first)


def counted(config: RuntimeConfig) -> RuntimeConfig:
    """Replace a star by its GPUs' numbers.

    Raises:
        UnavailableError: there are not so many.
    """
    if len(names_of(config.device)) == 1 and not config.device.endswith("*"):
        return config  # the runtime says whether it is there
    if not config.device.startswith("cuda"):
        return config
    import torch  # noqa: PLC0415 - which takes seconds and is needed for this alone

    count = torch.cuda.device_count()
    device = config.device
    if device.endswith("*"):
        device = f"cuda:{','.join(map(str, range(count)))}"
    missing = [name for name in names_of(device) if not 0 <= _number(name) < count]
    if missing:
        raise UnavailableError(
            f"runtime.device = {config.device!r}, but {count} GPUs can be seen here; expected "
            f'numbers below {count}, or another device such as "cpu"'
        )
    return dataclasses.replace(config, device=device)


@dataclasses.dataclass(frozen=True)
class DevicePlacement:
    """The device that one of the engines runs on."""

    name: str
    runtime: RuntimeConfig  # of one device
    environment: dict[str, str]  # what its processes have beside this one's


def placements(config: RuntimeConfig) -> tuple[DevicePlacement, ...]:
    """Place each engine; `config` is `counted`."""
    names = names_of(config.device)
    if len(names) == 1:
        return (DevicePlacement(names[0], config, {}),)
    if not config.device.startswith("cuda"):
        shares = _shares(len(names))
        return tuple(
            _on_cores(config, name, cores, len(names))
            for name, cores in zip(names, shares, strict=True)
        )
    own = dataclasses.replace(config, device="cuda")
    return tuple(DevicePlacement(name, own, {_VISIBLE: _visible(_number(name))}) for name in names)


def usable_cores() -> int:
    """Count the cores that this process may use at a time; a container may have a quota."""
    cores = len(os.sched_getaffinity(0))
    for files in QUOTAS:
        try:
            quota, period = map(int, " ".join(file.read_text() for file in files).split())
        except (OSError, ValueError):  # no cgroup of this version, or "max"
            continue
        if quota > 0:
            return max(1, min(cores, quota // period))
    return cores


def _on_cores(
    config: RuntimeConfig, name: str, cores: Sequence[int], count: int
) -> DevicePlacement:
    threads = config.threads or max(1, min(len(cores), usable_cores() // count))
    own = dataclasses.replace(config, device="cpu", threads=threads)
    return DevicePlacement(name, own, {CORES: ",".join(map(str, cores))})


def _shares(count: int) -> list[list[int]]:
    """Share out the cores that this process may use; to more engines than cores, none."""
    cores = sorted(os.sched_getaffinity(0), key=_where)
    ends = [len(cores) * i // count for i in range(count + 1)]
    if len(cores) < count:
        return [[]] * count
    return [cores[begin:end] for begin, end in itertools.pairwise(ends)]


def _where(core: int) -> tuple[int, int, int]:
    """Return the socket and physical core of a core, which may be one of two threads there."""
    folder = TOPOLOGY / f"cpu{core}/topology"
    try:
        socket, physical = (
            int((folder / name).read_text()) for name in ("physical_package_id", "core_id")
        )
    except (OSError, ValueError):  # no such folder in some containers
        return 0, core, core
    return socket, physical, core


def _number(name: str) -> int:
    number = name.partition(":")[2]
    return int(number) if number else -1


def _visible(number: int) -> str:
    """Name the GPU of this number, among those that this process may see."""
    seen = [device.strip() for device in os.environ.get(_VISIBLE, "").split(",") if device.strip()]
    return seen[number] if seen else str(number)
