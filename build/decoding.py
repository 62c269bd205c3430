"""Decode windows greedily with an engine's own runtime, to compare engines in a build."""

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


def first_windows(recordings: Sequence[VerificationAudio], engine: Engine) -> list[WindowInput]:
    """Make the first window of each recording, with its language in the prompt."""
    filters, facts = engine.load_mel_filters(), engine.manifest.tokenizer
    return [
        WindowInput(features_of(recording, filters), prompt_of(facts, recording.language))
        for recording in recordings
    ]


def decode_windows(
    runtime: Runtime,
    windows: Sequence[WindowInput],
    max_tokens: int = DecodingOptions.max_tokens,
    on_window: Callable[[], object] = lambda: None,
    end: Tokens = (),
) -> list[Tokens]:
    """Return the texts of windows; the runtime decodes as many at a time as it has slots.

    Args:
        runtime: a runtime without other jobs.
        windows: the windows, in the order of the results.
        max_tokens: the maximum number of tokens of each window, end of text included.
        on_window: called after each window.
        end: what to add to a text whose end of text was sampled.

    Raises:
        EarshotError: a window cannot be decoded.
    """
    for i, window in enumerate(windows):
        options = DecodingOptions(max_tokens=max_tokens)
        runtime.submit(Job(i, window.features[0], window.prompt, options))
    sampled: dict[int, Tokens] = {}
    decoded: dict[int, Tokens] = {}
    while len(decoded) < len(windows):
        for event in runtime.poll(timeout_s=1.0):
            sampled[event.job_id] = sampled.get(event.job_id, ()) + event.tokens
            if event.error is not None:
                raise event.error
            if event.finished:
                ended = end if event.finished == "eot" else ()
                decoded[event.job_id] = sampled[event.job_id] + ended
                on_window()
    return [decoded[i] for i in range(len(windows))]


def agreement(expected: Sequence[Tokens], decoded: Sequence[Tokens]) -> float:
    """Return the share of equal tokens (difflib's ratio), averaged over windows; 1: all."""
    ratios = [
        difflib.SequenceMatcher(None, *pair, autojunk=False).ratio()
        for pair in zip(expected, decoded, strict=True)
    ]
    return sum(ratios) / len(ratios)
