"""`python -m eval trtllm-check`: compare TensorRT-LLM, where it is installed, with transformers.

It makes a checkpoint of Whisper tiny's geometry with random weights, builds it, and compares with
transformers in FP32: greedy tokens of windows alone and together. It stops at the first difference.
The installed release decides the way: 1.2 compiles engines, 1.3 and later have the LLM API.
"""

import contextlib
import dataclasses
import functools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from build import builders
from build.checkpoint import open_checkpoint
from build.config import BuildConfig, BuildProduct
from eval.random_whisper import PUBLISHED, random_weights, write_checkpoint, write_processor
from eval.record import Check, ReportSection, Result, Run, Say, facts, versions
from serve.contract.config import Precision, RuntimeConfig
from serve.contract.engine import Engine, mel_filters
from serve.contract.errors import EarshotError
from serve.contract.manifest import TokenizerFacts
from serve.contract.runtimes import RuntimeName, TrtllmConfig
from serve.runtime.protocol import DecodingOptions, Job
from serve.speech.features import WINDOW_SAMPLES, log_mel
from serve.trtllm import limits, release
from serve.trtllm.executor import open_tensorrt_llm
from serve.trtllm.llm_api import LlmApiExecutor
from serve.trtllm.runtime import TensorRTLLMRuntime

Tokens = list[list[int]]
"""The tokens of each window, in the order of the jobs."""

TINY = PUBLISHED["tiny"]
WINDOWS = 6
MAX_TOKENS = 24
TIE: dict[Precision, float] = {"fp16": 0.05, "int8": 1.0}  # logits this near may swap places
_SPREAD = 2.0 * TINY.width**-0.5  # the random weights': large, so that logits lie apart
WAIT_S = 60.0
_PACKAGES = ("tensorrt_llm", "tensorrt", "torch", "transformers", "numpy", "pydantic")
_hf: Any = transformers  # its annotations are too incomplete for strict checking


class DifferenceError(EarshotError):
    """A check failed; the message says how."""


@dataclasses.dataclass
class Checks:
    """The checks that ran, and how they ended; `say` receives a line for each that passes."""

    say: Say
    ended: list[Check] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[Callable[[str], None]]:
        """Run a check, which passes unless its block raises; the block may report details.

        Raises:
            DifferenceError: the block raised something.
        """
        details: list[str] = []
        try:
            yield details.append
        except Exception as error:
            known = isinstance(error, EarshotError)
            detail = str(error) if known else f"{type(error).__name__}: {error}"
            self.ended.append(Check(name, False, detail))
            raise DifferenceError(f"{name}: {detail}") from error
        self.ended.append(Check(name, True, "; ".join(details)))
        self.say(str(self.ended[-1]))


def trtllm_check(run: Run, *, python: str) -> Result:
    """Run every check up to the first difference.

    Args:
        run: says how far it is.
        python: the Python of another environment that has the library; "": this one.
    """
    checks = Checks(run.say)
    with (
        tempfile.TemporaryDirectory(prefix="earshot-trtllm-check-") as folder,
        contextlib.suppress(DifferenceError),  # it is in the checks
    ):
        run_checks(Path(folder), checks, python)
    known = versions(*_PACKAGES)
    environment = known | {name: run.machine[name] for name in ("Python", "GPU", "OS")}
    return Result(
        checks=tuple(checks.ended),
        sections=(ReportSection("Environment", [facts("", environment)]),),
        title="TensorRT-LLM",
    )


def run_checks(work: Path, checks: Checks, python: str = "") -> None:
    """Run every check.

    Args:
        work: an empty folder for checkpoint and engines.
        checks: gets every check, up to the first difference.
        python: the Python of another environment that has the library; its LLM API is checked.

    Raises:
        DifferenceError: the first difference; the library, the GPU or the builder is missing or
            fails.
    """
    with checks.check("library and GPU") as report:
        runtime, place = _find(python)
        report(place)
    with checks.check("random checkpoint"):
        network = make_checkpoint(work / "checkpoint")
    precisions: tuple[Precision, ...] = ("fp16",)
    if runtime == "tensorrt_llm" and not 10 <= limits.find_gpu("cuda").major < 12:
        precisions = ("fp16", "int8")  # which Blackwell lacks
    for precision in precisions:
        with checks.check(f"{precision}: build"):
            config = config_of(work, precision, runtime, python)
            engine = engine_of(config)
        check_engine(engine, config.runtime, network, checks)


def _find(python: str) -> tuple[RuntimeName, str]:
    """Find the runtime to check, and describe it."""
    if python:
        return "tensorrt_llm_api", f"TensorRT-LLM of {python}"
    uses_llm_api = release.installed_release() >= release.API_RELEASE
    version = release.api_version() if uses_llm_api else release.library_version()
    gpu = limits.find_gpu("cuda")
    place = f"TensorRT-LLM {version} on {gpu.name}, compute capability {gpu.major}.{gpu.minor}"
    return "tensorrt_llm_api" if uses_llm_api else "tensorrt_llm", place


def make_checkpoint(folder: Path) -> Any:
    """Write a random checkpoint of tiny's geometry; returns transformers' network, FP32."""
    write_checkpoint(folder, TINY, random_weights(TINY, spread=_SPREAD))
    write_processor(folder, TINY)
    return _hf.WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


def config_of(
    work: Path, precision: Precision, runtime: RuntimeName, python: str = ""
) -> BuildProduct:
    """Return the config of an engine of `<work>/checkpoint`."""
    return BuildProduct(
        name=f"trtllm-check-{precision}",
        engine=str(work / precision),
        build=BuildConfig(str(work / "checkpoint"), precision=precision, runtime=runtime),
        runtime=RuntimeConfig(
            device="cuda", slots=4, encoder_batch=2, tensorrt_llm=TrtllmConfig(python=python)
        ),
    )


def engine_of(config: BuildProduct) -> Engine:
    """Build the engine of a config; the builder's log goes to this process's stderr.

    Raises:
        EarshotError: the build failed.
    """
    builders.check(config)
    log = functools.partial(print, file=sys.stderr)
    return builders.build_engine(open_checkpoint(config.build.checkpoint), config, log)


def check_engine(engine: Engine, config: RuntimeConfig, network: Any, checks: Checks) -> None:
    """Compare an engine's tokens with those of transformers.

    Raises:
        DifferenceError: the first difference.
    """
    precision, reference = engine.manifest.precision, Reference(network)
    with checks.check(f"{precision}: load") as report:
        if engine.manifest.runtime == "tensorrt_llm_api":
            executor = LlmApiExecutor(engine, config)
            report(f"TensorRT-LLM {executor.version}, in a separate process")
            runtime = TensorRTLLMRuntime(engine, executor)
        else:
            runtime = open_tensorrt_llm(engine, config)
    try:
        jobs = make_jobs(engine, samples=runtime.capabilities.input_kind == "samples")
        expected = [reference.greedy(engine.manifest.tokenizer, job) for job in jobs]
        with checks.check(f"{precision}: greedy tokens") as report:
            decoded_alone = [decode(runtime, [job])[0] for job in jobs]
            ties = compare_tokens(reference, jobs, decoded_alone, expected, TIE[precision])
            report(f"transformers'; {ties} of {len(jobs)} windows part at a tie")
        with checks.check(f"{precision}: windows together") as report:
            ties = compare_tokens(
                reference, jobs, decode(runtime, jobs), decoded_alone, TIE[precision]
            )
            report(f"as alone; {ties} of {len(jobs)} part at a tie")
    finally:
        runtime.close()


def make_jobs(engine: Engine, samples: bool = False) -> list[Job]:
    """Make windows, as log-mel or samples, decoded greedily without timestamps."""
    facts, filters = engine.manifest.tokenizer, engine.load_mel_filters()
    assert facts.transcribe is not None
    prompt = (facts.sot, facts.languages["en"], facts.transcribe, facts.no_timestamps)
    options = DecodingOptions(timestamps=False, max_tokens=MAX_TOKENS)
    jobs = []
    for job_id in range(WINDOWS):
        # A sweep up to another pitch in each window: noise would have the same mean in all.
        radians = torch.linspace(0.0, 100.0 * (job_id + 1), WINDOW_SAMPLES).square()
        window = 0.1 * radians.sin()
        features = window if samples else log_mel(window[None], filters)[0]
        jobs.append(Job(job_id, features, prompt, options))
    return jobs


class Reference:
    """transformers' network in FP32, each window encoded once."""

    def __init__(self, network: Any) -> None:
        self._network = network
        self._mel_filters = mel_filters(network.config.num_mel_bins)
        self._encoded: dict[int, Any] = {}  # by job id

    @torch.inference_mode()
    def logits(self, job: Job, tokens: Sequence[int]) -> torch.Tensor:
        """Compute logits after the prompt and each token: float32 (1 + len(tokens), n_vocab)."""
        if job.id not in self._encoded:
            features = job.features[None]
            if features.ndim == 2:  # samples
                features = log_mel(features, self._mel_filters)
            features = features.half().float()  # as an engine gets them
            self._encoded[job.id] = self._network.model.encoder(features)
        ids = torch.tensor([[*job.prompt, *tokens]])
        outputs = self._network(encoder_outputs=self._encoded[job.id], decoder_input_ids=ids)
        logits: torch.Tensor = outputs.logits[0, len(job.prompt) - 1 :].float()
        return logits

    @torch.inference_mode()
    def greedy(self, facts: TokenizerFacts, job: Job) -> list[int]:
        """Decode tokens under the suppress lists, up to end of text."""
        tokens: list[int] = []
        for _ in range(job.options.max_tokens):
            logits = self.logits(job, tokens)[-1]
            logits[list(facts.suppress_tokens)] = -torch.inf
            if not tokens:
                logits[list(facts.begin_suppress_tokens)] = -torch.inf
            token = int(logits.argmax())
            if token == facts.eot:
                break
            tokens.append(token)
        return tokens


def decode(runtime: TensorRTLLMRuntime, jobs: list[Job]) -> Tokens:
    """Run jobs together; returns the tokens of each."""
    for job in jobs:
        runtime.submit(job)
    tokens: dict[int, list[int]] = {job.id: [] for job in jobs}
    unfinished, deadline_s = set(tokens), time.monotonic() + WAIT_S
    while unfinished:
        if time.monotonic() > deadline_s:
            raise DifferenceError(f"no end of windows {sorted(unfinished)} in {WAIT_S:g} s")
        for event in runtime.poll(1.0):
            tokens[event.job_id] += event.tokens
            if event.error is not None:
                raise DifferenceError(f"window {event.job_id}: {event.error}")
            if event.finished is not None:
                unfinished.discard(event.job_id)
    return list(tokens.values())


def compare_tokens(
    reference: Reference, jobs: list[Job], decoded: Tokens, expected: Tokens, tie: float
) -> int:
    """Demand equal tokens up to the first near-tie; returns the number of windows with one.

    A near-tie is a place where transformers finds the tokens of both sides nearly equal.
    """
    ties = 0
    for job, ours, theirs in zip(jobs, decoded, expected, strict=True):
        if ours == theirs:
            continue
        pairs, shorter = zip(ours, theirs, strict=False), min(len(ours), len(theirs))
        index = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
        if index < shorter:
            logits = reference.logits(job, theirs[:index])[-1]
            if abs(float(logits[ours[index]] - logits[theirs[index]])) <= tie:
                ties += 1
                continue
        raise DifferenceError(
            f"window {job.id}: token {index} is {ours[index : index + 1] or 'missing'}, expected "
            f"{theirs[index : index + 1] or 'the end'}; whole: {ours}, expected {theirs}"
        )
    return ties
