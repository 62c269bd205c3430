"""Our tokens beside CTranslate2's, for any beam; and where they differ, which are likelier.

Both decode the same log-mel features under the same prompt in FP32: our FP16 engine on the CPU, and
the checkpoint that it was built from as `prepare` converts it. Where the tokens differ, both
sequences are scored in one way: teacher-forced by our network, under our rules, added up in FP64.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from eval.accuracy.prepare import converted_folder, engine_of, prepare_converted, prepare_engine
from eval.corpora.find import find_clips
from eval.measurement import Check, Result, Run
from serve.contract.config import RuntimeConfig
from serve.contract.devices import usable_cores
from serve.contract.engine import Engine, TokenizerFacts, mel_filters, open_engine
from serve.native.rules.definition import Rules
from serve.native.rules.state import new_state
from serve.native.runtime import NativeRuntime
from serve.runtime.protocol import DecodingOptions, Job
from serve.speech.audio import decode
from serve.speech.cutting import cut
from serve.speech.features import WINDOW_SAMPLES, log_mel
from serve.speech.meter import Limits
from serve.speech.tokenizer import Tokenizer

BEAMS = (1, 2, 5)  # what is compared unless told otherwise
LEAST_EQUAL = 0.99  # of the windows, for each beam
MAX_TOKENS = 224  # CTranslate2 never samples more than half of its max_length of 448
SLOTS = 4
MAX_AUDIO_S = 3600.0


@dataclasses.dataclass(frozen=True)
class Window:
    """A window that both decode."""

    name: str
    features: torch.Tensor  # float32 (n_mels, 3000)
    prompt: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Difference:
    """A window whose tokens differ; scores are mean log-probabilities, end of text included."""

    window: str
    beam: int
    ours: tuple[int, ...]
    theirs: tuple[int, ...]
    ours_score: float
    theirs_score: float
    reported: float  # their sequence's score as CTranslate2 gives it: what FP32 can tell apart

    def __str__(self) -> str:
        pairs = zip(self.ours, self.theirs, strict=False)
        same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        gap = self.ours_score - self.theirs_score
        return (
            f"{self.window}, beam {self.beam}: equal up to token {same}; ours scores "
            f"{self.ours_score:.6f}, theirs {self.theirs_score:.6f} (ours - theirs {gap:+.1e}; "
            f"CTranslate2 gives theirs {self.reported:.6f})"
        )


def compare_tokens(run: Run, *, beams: tuple[int, ...] | None) -> Result:
    """Decode every window of `eval.manifest` both ways; show what differs, and by how much.

    The figures are the share of windows with equal tokens, by beam.

    Args:
        run: of a config whose checkpoint and clips are used.
        beams: their sizes; None is `BEAMS`.

    Raises:
        EarshotError: the engine, the conversion or a clip is not to be had.
    """
    config, beams = run.config, beams or BEAMS
    prepare_engine(config, run.config_path, "fp16")
    prepare_converted(config)
    engine = open_engine(engine_of(config, "fp16"))
    windows = list(_windows(engine, config.eval.manifest))
    threads = config.runtime.threads or usable_cores()
    ours = _Ours(engine, max(beams), threads)
    theirs = _Theirs(engine.manifest.tokenizer, converted_folder(config), threads)
    shares = dict[str, float]()
    for beam in beams:
        all_tokens, equal = ours.decode(windows, beam), 0
        for window, mine in zip(windows, all_tokens, strict=True):
            other, reported = theirs.decode(window, beam)
            if mine == other:
                equal += 1
                continue
            scores = [ours.score(window, tokens) for tokens in (mine, other)]
            run.show(
                str(Difference(window.name, beam, mine, other, scores[0], scores[1], reported))
            )
        share = shares[f"beam {beam}"] = equal / len(windows)
        run.show(f"beam {beam}: {equal} of {len(windows)} windows equal, {share:.2%}")
    least = min(shares.values())
    name = f"{LEAST_EQUAL:.0%} of the windows are equal with each beam"
    return Result(shares, (Check(name, least >= LEAST_EQUAL, f"{least:.2%} with the worst"),))


def _windows(engine: Engine, manifest: str) -> Iterator[Window]:
    tokenizer = Tokenizer.open(engine)
    filters = mel_filters(engine.manifest.dims.n_mels)
    for clip in find_clips(manifest).clips:
        prompt = tokenizer.prompt_ids(clip.language or "en", "transcribe", True, "")
        blocks = decode(clip.path.read_bytes(), Limits(MAX_AUDIO_S))
        for number, window in enumerate(cut(blocks)):
            padded = np.zeros(WINDOW_SAMPLES, np.float32)
            padded[: len(window.samples)] = window.samples
            features = log_mel(torch.from_numpy(padded)[None], filters)[0]
            yield Window(f"{clip.file}#{number}", features, prompt)


class _Ours:
    """Our runtime on the CPU, in FP32, and the judge of both."""

    def __init__(self, engine: Engine, widest: int, threads: int) -> None:
        config = RuntimeConfig(
            device="cpu",
            compute_type="float32",
            slots=SLOTS,
            rows=SLOTS * widest,
            encoder_batch=SLOTS,
            threads=threads,
        )
        self._runtime = NativeRuntime(engine, config)
        self._manifest = engine.manifest
        device = torch.device("cpu")
        self._rules = Rules(self._manifest.tokenizer, self._manifest.dims, device)

    def decode(self, windows: Sequence[Window], beam: int) -> list[tuple[int, ...]]:
        """Decode windows; returns the sampled tokens of each, without end of text."""
        options = DecodingOptions(beam_size=beam, max_tokens=MAX_TOKENS)
        for id, window in enumerate(windows):
            self._runtime.submit(Job(id, window.features, window.prompt, options))
        tokens: dict[int, tuple[int, ...]] = {}
        while len(tokens) < len(windows):
            for event in self._runtime.poll(1.0):
                if event.error is not None:
                    raise event.error
                if event.finished:
                    tokens[event.job_id] = event.tokens
        return [tokens[id] for id in range(len(windows))]

    @torch.inference_mode()
    def score(self, window: Window, tokens: tuple[int, ...]) -> float:
        """Sum log-probabilities / number of tokens, as a search with length_penalty 1 does."""
        facts, begin = self._manifest.tokenizer, len(window.prompt)
        ended = len(tokens) < MAX_TOKENS
        sampled = [*tokens, facts.eot] if ended else list(tokens)
        fed = torch.tensor([[*window.prompt, *sampled[:-1]]])
        logits = self._runtime.teacher_forced_logits(window.features[None], fed)[0, begin - 1 :]
        state = new_state(len(sampled), self._manifest.dims.n_text_ctx, logits.device)
        state.tokens[:, : fed.shape[1]] = fed
        state.position.copy_(begin - 1 + torch.arange(len(sampled)))
        state.text_begin.fill_(begin)
        state.timestamps.fill_(True)
        stamps = [token * (token >= facts.timestamp_begin) for token in sampled]
        highest = torch.tensor([0, *stamps[:-1]]).cummax(0).values
        state.last_timestamp.copy_(highest)
        allowed = logits.clone()
        self._rules.apply(state, torch.arange(len(sampled)), allowed)
        logprobs = allowed.double().log_softmax(dim=-1)
        return float(logprobs[torch.arange(len(sampled)), sampled].sum()) / max(1, len(tokens))


class _Theirs:
    """CTranslate2's Whisper in FP32, asked as faster-whisper asks it."""

    def __init__(self, facts: TokenizerFacts, folder: Path, threads: int) -> None:
        import ctranslate2  # noqa: PLC0415 - only its own evaluation needs it

        self._array = ctranslate2.StorageView.from_array
        self._facts = facts
        self._model = ctranslate2.models.Whisper(
            str(folder), device="cpu", compute_type="float32", intra_threads=threads
        )

    def decode(self, window: Window, beam: int) -> tuple[tuple[int, ...], float]:
        """Decode a window; returns the sampled tokens without end of text, and their score."""
        result = self._model.generate(
            self._array(np.ascontiguousarray(window.features[None].numpy())),
            [list(window.prompt)],
            beam_size=beam,
            max_length=2 * MAX_TOKENS,
            suppress_blank=True,
            suppress_tokens=list(self._facts.suppress_tokens),
            max_initial_timestamp_index=self._facts.max_initial_timestamp_index,
            return_scores=True,
        )[0]
        return tuple(result.sequences_ids[0]), float(result.scores[0])
