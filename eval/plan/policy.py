"""A KEDA ScaledObject as what it makes of metrics: how many replicas, by the autoscaler's rules.

The rules are those of Kubernetes's HorizontalPodAutoscaler for external metrics, which KEDA makes
of a ScaledObject: https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/
"""

import dataclasses
import math
from collections import deque
from pathlib import Path
from typing import Any

import yaml

from serve.contract.errors import ConfigError
from serve.contract.files import read_text

SYNC_S = 15  # between two looks at the metrics
_TOLERANCE = 0.1  # a metric that is so near to its target changes nothing
QUEUE, WINDOWS = "queue", "windows"  # names of triggers


@dataclasses.dataclass(frozen=True)
class Step:
    """The most that replicas change in a period."""

    pods: int
    percent: float
    period_s: int


@dataclasses.dataclass(frozen=True)
class Policy:
    """The content of a ScaledObject."""

    least: int
    most: int
    queue_s: float | None  # target of the mean wait; None: not gone by
    windows_per_s: float | None  # target of each replica
    up: tuple[Step, ...]
    down: tuple[Step, ...]
    up_window_s: int  # the least that was wanted in it counts
    down_window_s: int  # the most

    @property
    def name(self) -> str:
        """Name it as a row of a table does."""
        parts = []
        if self.windows_per_s is not None:
            parts.append(f"{self.windows_per_s:.0f} windows/s a GPU")
        if self.queue_s is not None:
            parts.append(f"queue {self.queue_s:g} s")
        return ", ".join(parts) or f"{self.least} GPUs all day"


def read_policy(path: Path) -> Policy:
    """Read a ScaledObject's file.

    Raises:
        FileError, ConfigError: it cannot be read, or is not one of two triggers with these names.
    """
    try:
        spec = yaml.safe_load(read_text(path, "expected a ScaledObject"))["spec"]
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        targets = {
            trigger["name"]: float(trigger["metadata"]["threshold"]) for trigger in spec["triggers"]
        }
        if targets.keys() != {QUEUE, WINDOWS}:
            raise ConfigError(
                f"{path} has the triggers {', '.join(targets)}; expected {QUEUE} and {WINDOWS}"
            )
        if spec["minReplicaCount"] < 1:
            raise ConfigError(
                f"{path} has minReplicaCount = {spec['minReplicaCount']}; expected at least 1: "
                "what a start from none costs its first requests is not replayed"
            )
        return Policy(
            spec["minReplicaCount"],
            spec["maxReplicaCount"],
            targets[QUEUE],
            targets[WINDOWS],
            _steps(behavior["scaleUp"]["policies"]),
            _steps(behavior["scaleDown"]["policies"]),
            behavior["scaleUp"]["stabilizationWindowSeconds"],
            behavior["scaleDown"]["stabilizationWindowSeconds"],
        )
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is no ScaledObject as deploy/kubernetes/components/keda/scale.yaml is one: "
            f"{type(error).__name__}: {error}"
        ) from error


def _steps(policies: list[dict[str, Any]]) -> tuple[Step, ...]:
    return tuple(
        Step(
            step["value"] if step["type"] == "Pods" else 0,
            step["value"] if step["type"] == "Percent" else 0.0,
            step["periodSeconds"],
        )
        for step in policies
    )


class Autoscaler:
    """Says every `SYNC_S` how many replicas there shall be.

    Args:
        policy: by what it goes.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        longest_s = max(policy.up_window_s, policy.down_window_s, SYNC_S)
        self._wanted: deque[int] = deque(maxlen=longest_s // SYNC_S + 1)
        self._had: deque[int] = deque([policy.least], maxlen=longest_s // SYNC_S + 1)

    def look(self, replicas: int, ready: int, queue_s: float, windows_per_s: float) -> int:
        """Decide how many there shall be.

        Args:
            replicas: that there are, ready or not.
            ready: of these.
            queue_s: the mean wait of requests, of the last minute.
            windows_per_s: of all replicas together.
        """
        policy = self._policy
        wanted = [policy.least]
        if policy.queue_s is not None:
            wanted.append(_near(queue_s / policy.queue_s, replicas, ready))
        if policy.windows_per_s is not None:
            share = windows_per_s / policy.windows_per_s
            wanted.append(replicas if abs(share / replicas - 1) <= _TOLERANCE else math.ceil(share))
        self._wanted.append(max(wanted))
        size = min(max(self._stable(replicas), policy.least), policy.most)
        size = min(size, self._limit(policy.up, replicas, +1))
        size = max(size, self._limit(policy.down, replicas, -1))
        self._had.append(size)
        return size

    def _stable(self, replicas: int) -> int:
        up = min(self._last(self._policy.up_window_s))
        down = max(self._last(self._policy.down_window_s))
        return min(max(replicas, up), down)

    def _last(self, seconds: int) -> list[int]:
        return list(self._wanted)[-(seconds // SYNC_S + 1) :]

    def _limit(self, steps: tuple[Step, ...], replicas: int, sign: int) -> int:
        """Find the furthest that the steps allow, of which the widest counts."""
        furthest = replicas
        for step in steps:
            periods = step.period_s // SYNC_S
            had = list(self._had)[-periods:]
            begin = min(had) if sign > 0 else max(had)
            most = begin + sign * max(step.pods, math.ceil(begin * step.percent / 100))
            furthest = max(furthest, most) if sign > 0 else min(furthest, most)
        return furthest


def _near(ratio: float, replicas: int, ready: int) -> int:
    return replicas if abs(ratio - 1) <= _TOLERANCE else math.ceil(ratio * ready)
