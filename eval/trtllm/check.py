"""First check on a machine that has TensorRT-LLM: does it do what this project was told it does?

python -m eval trtllm-check

Makes a checkpoint of Whisper tiny's geometry with random weights and the demo's tokenizer, builds
it, and compares with transformers in FP32: greedy tokens, the same windows alone and together, and,
of engines made by `trtllm-build`, logits after given tokens. Then it runs the runtime contract
tests on the real library. Stops at the first difference; `eval.trtllm.report` shows what ran. The
installed release decides the way: 1.2 compiles engines, 1.3 and later have the LLM API.
"""

import json
import shutil
import sys
import time
import xml.etree.ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from build.config import BuildConfig, Config
from eval.processes import run_tool
from eval.random_whisper.checkpoint import hugging_face_config
from eval.random_whisper.shapes import PUBLISHED
from eval.trtllm.report import DifferenceError, Report
from serve.contract.config import Precision, RuntimeConfig
from serve.contract.engine import Engine, TokenizerFacts, mel_filters, open_engine
from serve.contract.errors import CheckpointError, EarshotError
from serve.contract.runtimes import RuntimeName
from serve.contract.tensorrt_llm import TrtllmConfig
from serve.runtime.protocol import DecodingOptions, Job
from serve.speech.features import N_FRAMES, WINDOW_SAMPLES, log_mel
from serve.supervisor.server import config_to_toml
from serve.trtllm import limits, release
from serve.trtllm.executor import CppExecutor
from serve.trtllm.llm_api import LlmApiExecutor
from serve.trtllm.runtime import Executor, ExecutorRequest, TensorRTLLMRuntime

Compile = Callable[[Path], None]
Tokens = list[list[int]]
"""Of each window, in the order of the jobs."""

DONOR = Path("tests/fixture/checkpoint")  # gives the tokenizer
_CONTRACT = "tests/serve/runtime/test_contract.py"
# Arguments of pytest: files, and what of them is about this runtime.
CONTRACT_TESTS: dict[RuntimeName, tuple[str, ...]] = {
    "tensorrt_llm": (_CONTRACT, "tests/serve/trtllm/test_executor_parity.py", "-k", "executor"),
    "tensorrt_llm_api": (_CONTRACT, "tests/serve/trtllm/test_llm_api_parity.py", "-k", "llm_api"),
}
# Only our own warnings fail a test here: importing the library warns in NVIDIA's image.
_WARNINGS = "default\nerror:::(serve|build|eval|tests)[.]"
TINY = PUBLISHED["tiny"]
PYTHON_VARIABLE = "EARSHOT_TRTLLM_PYTHON"  # for the contract tests: the library is over there
TOOL_TIMEOUT_S = 3600.0  # for a build, and for the contract tests
WINDOWS = 6
MAX_TOKENS = 24
LOGITS_BOUND: dict[Precision, float] = {"fp16": 0.01, "int8": 0.1}  # ||a - b|| / ||b||
TIE: dict[Precision, float] = {"fp16": 0.05, "int8": 1.0}  # logits this near may swap places
_BANDS, _BANDS_SPREAD = 80, 4.0  # of the noise in a window
_SPREAD = 0.06  # of the random weights: larger than usual, so that logits lie apart
WAIT_S = 60.0
_hf: Any = transformers  # its annotations are too incomplete for strict checking


def run(work: Path, report: Report, compile_engine: Compile, python: str = "") -> None:
    """Run every check.

    Args:
        work: an empty folder for checkpoint and engines.
        report: gets every check; complete up to the first difference.
        compile_engine: builds what a TOML file says; `build_by_command_line` does it.
        python: of another environment that has the library; its LLM API is checked.

    Raises:
        DifferenceError: the first difference.
        EarshotError: the library, the GPU or the builder is missing or fails.
    """
    with report.check("library and GPU") as check:
        runtime, check.found = _find(python)
    with report.check("random checkpoint"):
        network = make_checkpoint(work / "checkpoint")
    for precision in _precisions(runtime):
        config = write_config(work, precision, runtime, python)
        with report.check(f"{precision}: build"):
            compile_engine(work / f"{precision}.toml")
            engine = open_engine(config.engine)
            if runtime == "tensorrt_llm":
                here = release.library_version(), limits.find_gpu("cuda")
                limits.check_build(engine, limits.limits_of(engine), *here)
        check_engine(engine, config.runtime, network, report)
    with report.check("runtime contract tests") as check:
        check.found = run_contract_tests(CONTRACT_TESTS[runtime], work / "tests.xml", python)


def _find(python: str) -> tuple[RuntimeName, str]:
    """Find the runtime to check, and where."""
    if python:
        return "tensorrt_llm_api", f"those of {python}, which says more once it is loaded"
    api = release.installed_release() >= release.API_RELEASE
    version = release.api_version() if api else release.library_version()
    gpu = limits.find_gpu("cuda")
    where = f"TensorRT-LLM {version} on {gpu.name}, compute capability {gpu.capability}"
    return "tensorrt_llm_api" if api else "tensorrt_llm", where


def _precisions(runtime: RuntimeName) -> tuple[Precision, ...]:
    """Return those that the runtime has on this GPU."""
    if runtime == "tensorrt_llm_api":
        return ("fp16",)
    blackwell = 10 <= limits.find_gpu("cuda").compute_capability[0] < 12
    return ("fp16",) if blackwell else ("fp16", "int8")


def make_checkpoint(folder: Path, donor: Path = DONOR) -> Any:
    """Write a random checkpoint of tiny's geometry; returns transformers' network, FP32.

    Raises:
        CheckpointError: the donor of the tokenizer is not there.
    """
    try:
        sizes = json.loads((donor / "config.json").read_text(encoding="utf-8"))
        folder.mkdir()
        for path in (*donor.glob("*.json"), donor / "merges.txt"):
            shutil.copy(path, folder / path.name)
    except OSError as error:
        raise CheckpointError(f"cannot take the tokenizer from {donor}: {error}") from error
    tokens = (f"{name}_token_id" for name in ("pad", "bos", "eos", "decoder_start"))
    config = hugging_face_config(TINY)
    config.update({name: sizes[name] for name in ("vocab_size", "num_mel_bins", *tokens)})
    config.init_std = _SPREAD
    torch.manual_seed(0)
    network = _hf.WhisperForConditionalGeneration(config).half().eval()
    state = {name: tensor.contiguous() for name, tensor in network.state_dict().items()}
    path = folder / "generation_config.json"
    generation = {**json.loads(path.read_text(encoding="utf-8")), "alignment_heads": [[0, 0]]}
    network.save_pretrained(folder, state_dict=state)
    path.write_text(json.dumps(generation), encoding="utf-8")  # the donor's, not the default
    return network.float()


def write_config(
    work: Path, precision: Precision, runtime: RuntimeName, python: str = ""
) -> Config:
    """Write `<work>/<precision>.toml` and return what it says."""
    config = Config(
        name=f"trtllm-check-{precision}",
        engine=str(work / precision),
        build=BuildConfig(str(work / "checkpoint"), precision=precision, runtime=runtime),
        runtime=RuntimeConfig(
            device="cuda", slots=4, encoder_batch=2, tensorrt_llm=TrtllmConfig(python=python)
        ),
    )
    (work / f"{precision}.toml").write_text(config_to_toml(config), encoding="utf-8")
    return config


def build_by_command_line(config: Path) -> None:
    """Build as a user does; the builder's log goes to this process's stderr.

    Raises:
        EarshotError: the build failed; its own message came before.
    """
    command = [sys.executable, "-m", "build", "engine", "--config", str(config)]
    run_tool(command, "the build", TOOL_TIMEOUT_S)


def run_contract_tests(arguments: Sequence[str], results: Path, python: str = "") -> str:
    """Run the contract tests of a runtime, which choose the real library where it is.

    Args:
        arguments: of pytest.
        results: gets what became of each test, as JUnit's XML.
        python: of the environment that has the library, where it is not this one.

    Returns:
        How many tests ran.

    Raises:
        DifferenceError: a test failed; the message is of the first, the whole report came before.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-o", f"filterwarnings={_WARNINGS}"]
    command += [f"--junitxml={results}", *arguments]
    if python:
        command = ["env", f"{PYTHON_VARIABLE}={python}", *command]
    try:
        run_tool(command, "running the runtime contract tests", TOOL_TIMEOUT_S)
    except EarshotError as error:
        raise DifferenceError(_first_failure(results) or str(error)) from error
    (suite,) = xml.etree.ElementTree.parse(results).getroot().iter("testsuite")
    return f"{suite.get('tests')} ran, {suite.get('skipped')} of them skipped"


def _first_failure(results: Path) -> str:
    """Find the first test that failed, by name and message; empty where pytest got none."""
    if not results.is_file():
        return ""
    for test in xml.etree.ElementTree.parse(results).getroot().iter("testcase"):
        for end in (*test.iter("failure"), *test.iter("error")):
            return f"{test.get('name')}: {end.get('message')}"
    return ""


def check_engine(engine: Engine, config: RuntimeConfig, network: Any, report: Report) -> None:
    """Compare one engine with transformers.

    Raises:
        DifferenceError: the first difference.
    """
    precision = engine.manifest.precision
    reference = Reference(network)
    api = engine.manifest.runtime == "tensorrt_llm_api"
    executor: Executor
    with report.check(f"{precision}: load") as check:
        if api:
            executor = process = LlmApiExecutor(engine, config)
            check.found = f"TensorRT-LLM {process.version}, in a process of its own"
        else:
            executor = CppExecutor(engine, limits.limits_of(engine), config)
    runtime = TensorRTLLMRuntime(engine, executor)
    try:
        jobs = make_jobs(engine, samples=api)
        expected = [reference.greedy(engine.manifest.tokenizer, job) for job in jobs]
        if not api:
            with report.check(f"{precision}: logits") as check:
                worst = compare_logits(executor, reference, jobs, expected, LOGITS_BOUND[precision])
                check.found = f"within {worst:.2g} of transformers'"
        with report.check(f"{precision}: greedy tokens") as check:
            alone = [decode(runtime, [job])[0] for job in jobs]
            ties = compare_tokens(reference, jobs, alone, expected, TIE[precision])
            check.found = f"transformers'; {ties} of {len(jobs)} windows part at a tie"
        with report.check(f"{precision}: windows together") as check:
            ties = compare_tokens(reference, jobs, decode(runtime, jobs), alone, TIE[precision])
            check.found = f"as alone; {ties} of {len(jobs)} part at a tie"
    finally:
        runtime.close()


def make_jobs(engine: Engine, samples: bool = False) -> list[Job]:
    """Make windows, as log-mel or samples, decoded greedily without timestamps.

    Each has a spectrum of its own: white noise would have the same mean in all.
    """
    facts, dims = engine.manifest.tokenizer, engine.manifest.dims
    head = [facts.sot]
    if facts.transcribe is not None:
        head += [next(iter(facts.languages.values())), facts.transcribe]
    prompt = (*head, facts.no_timestamps)
    options = DecodingOptions(timestamps=False, max_tokens=MAX_TOKENS)
    noise = torch.Generator().manual_seed(0)

    def features() -> torch.Tensor:
        colour = torch.randn(dims.n_mels, 1, generator=noise)
        return colour + 0.5 * torch.randn(dims.n_mels, N_FRAMES, generator=noise)

    windows = (_coloured_noise(noise) if samples else features() for _ in range(WINDOWS))
    return [Job(id, window, prompt, options) for id, window in enumerate(windows)]


def _coloured_noise(generator: torch.Generator) -> torch.Tensor:
    """Make 30 s with a loudness of its own in each band: float32 (480000,)."""
    spectrum = torch.fft.rfft(torch.randn(WINDOW_SAMPLES, generator=generator))
    bands = (_BANDS_SPREAD * torch.randn(_BANDS, generator=generator)).exp()
    bands = bands.repeat_interleave(len(spectrum) // _BANDS + 1)[: len(spectrum)]
    samples: torch.Tensor = torch.fft.irfft(spectrum * bands, WINDOW_SAMPLES)
    return samples.mul(0.1 / samples.abs().amax())


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
            features = features.half().float()  # what an engine gets
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


def compare_logits(
    executor: Executor, reference: Reference, jobs: list[Job], expected: Tokens, bound: float
) -> float:
    """Compare logits after prefixes of the reference's tokens; returns the largest relative gap."""
    worst = 0.0
    for job, tokens in zip(jobs, expected, strict=True):
        logits = reference.logits(job, tokens)
        for count in {0, len(tokens) // 2, len(tokens)}:
            features = job.features.half().T.contiguous()
            prefix = (*job.prompt, *tokens[:count])
            request = ExecutorRequest(prefix, features, max_tokens=1, probe=True)
            ours = _logits_of(executor, request)
            theirs = logits[count]
            relative = float((ours - theirs).norm() / theirs.norm())
            worst = max(worst, relative)
            if not relative <= bound:
                raise DifferenceError(
                    f"window {job.id}, logits after {len(prefix)} tokens: off by {relative:.3g} of "
                    f"their size, expected at most {bound}; first values {ours[:4].tolist()}, "
                    f"transformers {theirs[:4].tolist()}"
                )
    return worst


def _logits_of(executor: Executor, request: ExecutorRequest) -> torch.Tensor:
    request_id = executor.enqueue(request)
    answers = executor.await_responses(WAIT_S)
    responses = [response for response in answers if response.id == request_id]
    if not responses or responses[0].logits is None:
        raise DifferenceError(f"a request for logits was answered with {responses or 'nothing'}")
    return responses[0].logits


def decode(runtime: TensorRTLLMRuntime, jobs: list[Job]) -> Tokens:
    """Run jobs together; returns the tokens of each."""
    for job in jobs:
        runtime.submit(job)
    tokens: dict[int, list[int]] = {job.id: [] for job in jobs}
    unfinished = set(tokens)
    end = time.monotonic() + WAIT_S
    while unfinished:
        if time.monotonic() > end:
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
    """Demand equal tokens up to the first near-tie; returns how many windows part at one."""
    ties = 0
    for job, ours, theirs in zip(jobs, decoded, expected, strict=True):
        if ours != theirs:
            _check_tie(reference, job, ours, theirs, tie)
            ties += 1
    return ties


def _check_tie(
    reference: Reference, job: Job, ours: list[int], theirs: list[int], tie: float
) -> None:
    """Accept two token lists that part where transformers finds both tokens nearly equal."""
    pairs = zip(ours, theirs, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    if at < len(ours) and at < len(theirs):
        logits = reference.logits(job, theirs[:at])[-1]
        if abs(float(logits[ours[at]] - logits[theirs[at]])) <= tie:
            return
    raise DifferenceError(
        f"window {job.id}: token {at} is {ours[at : at + 1] or 'missing'}, expected "
        f"{theirs[at : at + 1] or 'the end'}; whole: {ours}, expected {theirs}"
    )
