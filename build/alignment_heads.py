"""Measure which cross-attention heads of a decoder follow the speech, if the checkpoint lists none.

A head that follows speech attends to few frames at a time, and each token attends to later frames
than the token before. The z-scores along the best monotonic path through its weights are therefore
high. Other heads have no such path.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from build.decoding import decode_windows, first_windows
from build.recordings import VerificationAudio
from serve.contract.config import RuntimeConfig
from serve.contract.engine import Engine
from serve.native.alignment import Aligner, EndedWindow
from serve.native.network import Whisper
from serve.native.runtime import NativeRuntime
from serve.native.slots import SlotAllocation
from serve.runtime.protocol import Job, JobEvent
from serve.speech.features import SAMPLE_RATE, WINDOW_SAMPLES
from serve.speech.words import FRAMES_PER_S, monotonic_path

MAX_HEADS = 10  # the number of heads of OpenAI's largest checkpoint
_MIN_RELATIVE_SCORE = 0.9  # of the best head's score; worse heads make times less exact

Heads = tuple[tuple[int, int], ...]


@torch.inference_mode()
def measure_heads(engine: Engine, recordings: Sequence[VerificationAudio]) -> Heads:
    """Return the heads that give the best word timestamps, in order; none if there is no speech.

    Args:
        engine: a native engine, which decodes the recordings' first windows greedily on the CPU.
        recordings: recordings of speech.
    """
    config = RuntimeConfig(
        slots=1, encoder_batch=1, threads=torch.get_num_threads(), compute_type="float32"
    )
    runtime, windows = NativeRuntime(engine, config), first_windows(recordings, engine)
    decoded = decode_windows(runtime, windows)
    runtime.close()
    lengths = [min(len(recording.samples), WINDOW_SAMPLES) for recording in recordings]
    frames = [max(1, length * FRAMES_PER_S // SAMPLE_RATE) for length in lengths]
    dims, facts, cpu = engine.manifest.dims, engine.manifest.tokenizer, torch.device("cpu")
    network = Whisper(dims, engine.load_weights(), cpu)
    cache = network.new_cache(len(windows), len(windows))
    for i, window in enumerate(windows):
        network.fill_cross(network.encode(window.features), cache, torch.tensor([i]))
    ended = [
        EndedWindow(
            Job(i, window.features, window.prompt, align_frames=frames[i]),
            SlotAllocation(i, i, 1),
            JobEvent(i, decoded[i], "eot"),
        )
        for i, window in enumerate(windows)
    ]
    scores = np.zeros((dims.n_text_layer, dims.n_text_head))
    for layer in range(dims.n_text_layer):  # weights of all layers may exceed the memory
        heads = tuple((layer, head) for head in range(dims.n_text_head))
        layer_facts = dataclasses.replace(facts, alignment_heads=heads)
        for by_head in Aligner(network, cache, layer_facts, len(windows)).by_head(ended):
            scores[layer] += [_score(weights.numpy()) for weights in by_head] or 0.0
    best = scores.max()
    order = scores.ravel().argsort()[::-1][:MAX_HEADS]
    candidates = [divmod(int(i), dims.n_text_head) for i in order if best > 0]
    return tuple(sorted(head for head in candidates if scores[head] >= _MIN_RELATIVE_SCORE * best))


def _score(weights: npt.NDArray[np.float32]) -> float:
    """Average each token's largest z-score on the best monotonic path through (n, frames)."""
    begins = [*monotonic_path(weights), weights.shape[1]]
    spans = zip(weights, begins, begins[1:], strict=False)
    return float(np.mean([row[a : max(a + 1, b)].max() for row, a, b in spans]))
