"""What stands between Triton's model `whisper` and the runtimes that have one decode for them."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Infer = Callable[[Mapping[str, Any], list[str]], Mapping[str, Any]]
"""Calls the model with arrays and the names of the outputs wanted; raises an EarshotError."""


@dataclasses.dataclass(frozen=True)
class TritonModel:
    """A model of Triton's that decodes, beside those that clients call."""

    name: str
    template: Path  # its config.pbtxt with $-names
    values: Mapping[str, Any]  # of these names
