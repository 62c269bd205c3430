"""The devices that `runtime.device` names: one, or several, each with an engine and a process.

    cpu, cuda, cuda:1   one
    cuda:0,1   cuda:*   several GPUs; the star is all that this process may see
    cpu,cpu             as many engines on the processor, which is for trying out

An engine of several has its GPU to itself: its process is started with `CUDA_VISIBLE_DEVICES` of
that GPU alone, so that nothing in it, tritonserver included, takes memory on the others.
"""

import dataclasses
import logging
import os

from serve.contract.config import RuntimeConfig
from serve.contract.errors import UnavailableError

logger = logging.getLogger("earshot")

_VISIBLE = "CUDA_VISIBLE_DEVICES"


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
class Place:
    """The device that one of the engines runs on."""

    name: str
    runtime: RuntimeConfig  # of one device
    environment: dict[str, str]  # what its processes have beside this one's


def places_of(config: RuntimeConfig) -> tuple[Place, ...]:
    """Place each engine; `config` is `counted`."""
    names = names_of(config.device)
    if len(names) == 1:
        return (Place(names[0], config, {}),)
    if not config.device.startswith("cuda"):
        threads = config.threads or max(1, (os.cpu_count() or 1) // len(names))
        own = dataclasses.replace(config, device="cpu", threads=threads)
        return tuple(Place(name, own, {}) for name in names)
    own = dataclasses.replace(config, device="cuda")
    return tuple(Place(name, own, {_VISIBLE: _visible(_number(name))}) for name in names)


def _number(name: str) -> int:
    number = name.partition(":")[2]
    return int(number) if number else -1


def _visible(number: int) -> str:
    """Name the GPU of this number, among those that this process may see."""
    seen = [device.strip() for device in os.environ.get(_VISIBLE, "").split(",") if device.strip()]
    return seen[number] if seen else str(number)
