"""Which thresholds a day's replay speaks for."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from eval.measurement import Say
from eval.plan.measured import Measured
from eval.plan.policy import Policy
from eval.plan.replay import Array, Day, replay

SHARES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of the windows that a GPU decodes at most
QUEUES_S = (0.03, 0.1, 0.3, 1.0)
MOST_REFUSED = 1e-4  # share of a day's requests
ALIKE = 0.01  # GPU hours that differ by no more than this share do not decide


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a policy on some days."""

    policy: Policy
    days: tuple[Day, ...]

    @property
    def p99_s(self) -> float:
        """Return that of the worst day."""
        return max(day.p99_s for day in self.days)

    @property
    def refused(self) -> float:
        """Return the share of requests on the worst day."""
        return max(day.refused for day in self.days)

    @property
    def gpu_hours(self) -> float:
        """Return those of a day, on average."""
        return sum(day.gpu_hours for day in self.days) / len(self.days)

    @property
    def audio_hours(self) -> float:
        """Return those answered in a day, on average."""
        return sum(day.audio_hours for day in self.days) / len(self.days)

    def holds(self, p99_s: float) -> bool:
        """Return whether p99 was this or less on each day, and next to nothing refused."""
        return self.p99_s <= p99_s and self.refused <= MOST_REFUSED


def with_share(policy: Policy, measured: Measured, share: float) -> Policy:
    """Return the same with another target of windows: so much of what a GPU decodes at most."""
    return dataclasses.replace(policy, windows_per_s=round(share * measured.saturated_per_s))


def candidates(policy: Policy, measured: Measured) -> Iterator[Policy]:
    """Yield the policy with other targets, and by each of the two alone."""
    for share in SHARES:
        yield with_share(policy, measured, share)
    for queue_s in QUEUES_S:
        if queue_s != policy.queue_s:
            yield dataclasses.replace(policy, queue_s=queue_s)
    yield dataclasses.replace(policy, queue_s=None)
    yield dataclasses.replace(policy, windows_per_s=None)


def fixed(policy: Policy, gpus: int) -> Policy:
    """Keep so many GPUs at all times."""
    return dataclasses.replace(policy, least=gpus, most=gpus, queue_s=None, windows_per_s=None)


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Days, and what is the same for all policies."""

    measured: Measured  # one GPU
    days: Sequence[Array]  # arrivals of each (requests a second), by minute
    start_s: float  # from the call for a replica to its first request
    most_pending: int  # requests that a replica takes in
    p99_s: float  # what is wanted

    def outcome(self, policy: Policy) -> Outcome:
        """Replay the days under a policy."""
        limits = (self.start_s, self.most_pending, self.p99_s)
        days = (replay(self.measured, policy, day, *limits) for day in self.days)
        return Outcome(policy, tuple(days))

    def outcomes(self, policies: Iterable[Policy], progress: Say) -> list[Outcome]:
        """Replay them under several, each once."""
        outcomes = []
        for policy in dict.fromkeys(policies):
            progress(f"replaying {len(self.days)} days: {policy.name}")
            outcomes.append(self.outcome(policy))
        return outcomes

    def least_fixed(self, policy: Policy, progress: Say) -> Outcome:
        """Find the fewest GPUs that hold p99 on each day without autoscaling."""
        peak = max(float(day.max()) for day in self.days) / self.measured.saturated_per_s
        gpus = max(1, round(peak / 2))
        while True:
            progress(f"replaying {len(self.days)} days: {gpus} GPUs all day")
            outcome = self.outcome(fixed(policy, gpus))
            if outcome.holds(self.p99_s):
                return outcome
            gpus += 1


def choose(outcomes: Sequence[Outcome], deployed: Policy, p99_s: float) -> Outcome | None:
    """Choose what holds p99 for the fewest GPU hours, or the deployed one if it is as good.

    None: none holds it.
    """
    good = [outcome for outcome in outcomes if outcome.holds(p99_s)]
    if not good:
        return None
    most = (1 + ALIKE) * min(outcome.gpu_hours for outcome in good)
    alike = [outcome for outcome in good if outcome.gpu_hours <= most]
    return min(alike, key=lambda outcome: (outcome.policy != deployed, outcome.gpu_hours))
