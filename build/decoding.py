"""Windows decoded greedily by an engine's own runtime, for builds to compare what comes out."""

import dataclasses
import difflib
from collections.abc import Callable, Sequence

import torch

from build.recordings import VerificationAudio
from build.reference import features_of, prompt_of
from serve.contract.engine import Engine
from serve.runtime.protocol import DecodingOptions, Job, Runtime

Tokens = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class WindowInput:
    """A window to decode."""

    features: torch.Tensor  # float32 (1, n_mels, 3000)
    prompt: Tokens


@dataclasses.dataclass(frozen=True)
class GreedyResult:
    """What was sampled, and whether the text came to its end, whose token is not among them."""

    tokens: Tokens
    ended: bool


def first_windows(recordings: Sequence[VerificationAudio], engine: Engine) -> list[WindowInput]:
    """Make the first window of each recording, its language told."""
    filters, facts = engine.load_mel_filters(), engine.manifest.tokenizer
    return [
        WindowInput(features_of(one, filters), prompt_of(facts, one.language)) for one in recordings
    ]


def decode_windows(
    runtime: Runtime,
    windows: Sequence[WindowInput],
    max_tokens: int = DecodingOptions.max_tokens,
    done: Callable[[], object] = lambda: None,
) -> list[GreedyResult]:
    """Decode windows, as many at a time as the runtime takes.

    Args:
        runtime: with nothing else to do.
        windows: in the order of the answers.
        max_tokens: of each, end of text included.
        done: called when one is decoded.

    Raises:
        EarshotError: a window cannot be decoded.
    """
    for i, window in enumerate(windows):
        options = DecodingOptions(max_tokens=max_tokens)
        runtime.submit(Job(i, window.features[0], window.prompt, options))
    sampled: dict[int, Tokens] = {}
    decoded: dict[int, GreedyResult] = {}
    while len(decoded) < len(windows):
        for event in runtime.poll(timeout_s=1.0):
            sampled[event.job_id] = sampled.get(event.job_id, ()) + event.tokens
            if event.error is not None:
                raise event.error
            if event.finished:
                decoded[event.job_id] = GreedyResult(sampled[event.job_id], event.finished == "eot")
                done()
    return [decoded[i] for i in range(len(windows))]


def agreement(expected: Sequence[Tokens], decoded: Sequence[Tokens]) -> float:
    """Return how much of what was decoded is as expected, the mean over windows; 1: all."""
    ratios = [
        difflib.SequenceMatcher(None, *pair, autojunk=False).ratio()
        for pair in zip(expected, decoded, strict=True)
    ]
    return sum(ratios) / len(ratios)
