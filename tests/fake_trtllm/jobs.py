"""Jobs for the stand-ins' small engine, and what becomes of them."""

import torch

from serve.contract.engine import DETECT_LANGUAGE
from serve.runtime.protocol import DecodingOptions, Job
from tests.fake_trtllm.install import FACTS

EN = FACTS.languages["en"]
TIMED = (FACTS.sot, EN, FACTS.transcribe)
PLAIN = (*TIMED, FACTS.no_timestamps)
DETECT = (FACTS.sot, DETECT_LANGUAGE, FACTS.transcribe)


def make_job(id=1, prompt=TIMED, **options):
    features = torch.randn(80, 3000, generator=torch.Generator().manual_seed(id))
    options = {"max_tokens": 12, "timestamps": prompt[-1] != FACTS.no_timestamps, **options}
    return Job(id, features, prompt, DecodingOptions(**options))


def run(runtime, *jobs):
    """What became of each job: (tokens, last event), by id."""
    for job in jobs:
        runtime.submit(job)
    tokens, last = {job.id: () for job in jobs}, {}
    for _ in range(6000):  # a minute, lest it hang
        for event in runtime.poll(0.01):
            tokens[event.job_id] += event.tokens
            if event.finished:
                last[event.job_id] = event
        if len(last) == len(jobs):
            return {id: (tokens[id], last[id]) for id in tokens}
    raise AssertionError(f"only {sorted(last)} of {sorted(tokens)} ended")
