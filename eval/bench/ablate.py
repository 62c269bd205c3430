"""The worth of each option of the runtime, and its cost in accuracy.

From the full configuration one option at a time is turned to its other value. Speed is that of
the workloads throughput and latency. The error is that of the logits, on random windows with random
tokens fed, against plain torch operations in FP32 on the same engine. So what INT8 weights
themselves lose is not in it: an engine's manifest holds that, and `python -m build verify` measures
it. And random weights are not trained ones: the errors compare options, they do not foretell a word
error rate.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from eval.bench.floor import Ceilings
from eval.bench.plan import Plan, with_slots
from eval.bench.runtime_load import NoiseWindows
from eval.bench.table import Measurement, refused
from eval.bench.workloads import Session, release_memory
from eval.config import Config
from eval.record import Say
from serve.contract.config import Precision, RuntimeConfig
from serve.contract.engine import Engine
from serve.contract.errors import UnavailableError
from serve.native.network import Whisper

WINDOWS = 4  # asked at most
TOKENS = 64  # fed to each after the prompt
FULL = "earshot, full configuration"


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to run one engine."""

    name: str
    runtime: RuntimeConfig
    precision: Precision


def variants(config: Config, slots: int) -> Iterator[Variant]:
    """Yield the full configuration, then each option turned."""
    full = with_slots(config, slots)
    precision = config.build.precision
    yield Variant(FULL, full, precision)
    turns: list[dict[str, Any]] = [
        {"cuda_graph": not full.cuda_graph},
        # plain torch asks the host between steps, which a graph cannot
        {"kernels": "auto"}
        if full.kernels == "torch"
        else {"kernels": "torch", "cuda_graph": False},
        {"cross_kv": "full" if full.cross_kv == "int8" else "int8"},
        {"encoder_precision": "full" if full.encoder_precision == "fp8" else "fp8"},
    ]
    for turn in turns:
        name = ", ".join(f"{key} {str(value).lower()}" for key, value in turn.items())
        yield Variant(name, dataclasses.replace(full, **turn), precision)
    other: Precision = "fp16" if precision == "int8" else "int8"
    yield Variant(f"weights {other}", full, other)


@dataclasses.dataclass(frozen=True)
class Probe:
    """A question to a network, and the answer in FP32."""

    features: torch.Tensor  # float32 (windows, n_mels, 3000), on the device
    tokens: torch.Tensor  # int64 (windows, prompt + TOKENS)
    logits: torch.Tensor  # float32 (windows, TOKENS, n_vocab), on the host

    def error(self, session: Session) -> Measurement:
        """Measure how far a runtime's own network is from that answer."""
        logits = session.runtime.teacher_forced_logits(self.features, self.tokens)
        logits = logits[:, -TOKENS:].cpu()
        relative = float((logits - self.logits).norm() / self.logits.norm())
        same = logits.argmax(dim=-1) == self.logits.argmax(dim=-1)
        equal = float(same.float().mean())
        return Measurement(
            "logit error",
            "",
            100 * relative,
            "%",
            None,
            f"||logits - FP32|| / ||FP32||; {100 * equal:.2f} % of {same.numel()} greedy tokens "
            "as in FP32",
            {"relative_error": relative, "equal_tokens": equal, "tokens": same.numel()},
        )


def probe(engine: Engine, device: torch.device, windows: int) -> Probe:
    """Ask plain torch operations in FP32."""
    noise, generator = NoiseWindows(engine, device, windows), torch.Generator().manual_seed(1)
    eot = engine.manifest.tokenizer.eot
    fed = torch.randint(0, eot, (windows, TOKENS), generator=generator)
    tokens = torch.cat([torch.tensor([noise.prompt] * windows), fed], dim=1)
    features = noise.features(windows)
    # torch lets convolutions round to TF32, unless told otherwise
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        weights = engine.load_weights(device)
        network = Whisper(engine.manifest.dims, weights, device)
        logits = network.teacher_forced_logits(features, tokens)
    return Probe(features, tokens, logits[:, -TOKENS:].cpu())


def run_ablation(
    engine: Engine, config: Config, plan: Plan, ceilings: Ceilings, progress: Say
) -> Iterator[Measurement]:
    """Yield the lines of every variant: throughput, one request, error; or that it is refused."""
    slots, probes = plan.slots[0], dict[Precision, Probe]()
    device = torch.device(config.runtime.device)
    for variant in variants(config, slots):
        progress(f"ablation: {variant.name}")
        manifest = dataclasses.replace(engine.manifest, precision=variant.precision)
        turned = dataclasses.replace(engine, manifest=manifest)
        if variant.precision not in probes:
            release_memory(config.runtime.device)
            probes[variant.precision] = probe(turned, device, min(WINDOWS, slots))
        probed = probes[variant.precision]
        for measured in _measure(turned, variant, plan, ceilings, probed, progress):
            workload = f"ablation, {measured.workload}"
            yield dataclasses.replace(measured, workload=workload, system=variant.name)


def _measure(
    engine: Engine,
    variant: Variant,
    plan: Plan,
    ceilings: Ceilings,
    probed: Probe,
    progress: Say,
) -> Iterator[Measurement]:
    """Measure a variant, whose memory goes with the function before the next one is opened."""
    try:
        session = Session(engine, variant.runtime, ceilings, progress)
    except UnavailableError as error:
        yield refused("throughput", variant.name, "RTFx", error)
        return
    yield session.throughput(plan.seconds)
    yield session.latency(plan)
    yield probed.error(session)
    session.runtime.close()
