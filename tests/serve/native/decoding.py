"""Windows of the bundled clips, and decoding them to the end."""

import numpy as np
import torch

from serve.contract.engine import mel_filters
from serve.speech.features import WINDOW_SAMPLES, log_mel


def features_of(samples):
    padded = np.zeros(WINDOW_SAMPLES, np.float32)
    padded[: len(samples)] = samples
    return log_mel(torch.from_numpy(padded)[None], mel_filters(80))[0]


def beginnings(windows):
    """The first 5 s of windows (clip, language, features), of which an encoder sees no more."""
    return [(clip, language, features[:, :500]) for clip, language, features in windows]


def prompt_of(facts, language):
    return (facts.sot, facts.languages[language], facts.transcribe)


def ends(runtime, timeout_s=0.0):
    """Poll; returns the last events of jobs, of those that there are."""
    return [event for event in runtime.poll(timeout_s) if event.finished]


def run(runtime, jobs):
    """Decode all jobs together: job id -> its last event."""
    for job in jobs:
        runtime.submit(job)
    ended = {}
    while len(ended) < len(jobs):
        for event in ends(runtime, 1.0):
            assert event.job_id not in ended
            assert event.error is None
            ended[event.job_id] = event
    assert runtime.gauges().busy_slots == runtime.gauges().queued == 0
    return ended
