"""What lower precision costs in accuracy, on held-out speech, through the runtime itself.

    python -m build.demo.maker.heldout --n 1000 --voices unseen --out runs/unseen
    python -m build.demo.maker.precision --clips runs/unseen --device cuda

Builds the engines into a temporary folder and transcribes every clip with each variant: alone in a
window, its language told, with timestamps, greedily and without a second try. Error rates are in
percent, of normalised text (`scoring.py`); "points" is the difference to fp16, "other texts" counts
the clips that read differently there. The last line is JSON.
"""

import argparse
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from tqdm import tqdm

from build.builders import build_engine
from build.checkpoint import Checkpoint, open_checkpoint
from build.config import BuildConfig, Config
from build.demo.maker.scoring import error_rate, normalise
from build.verify import Recording, read_recordings
from serve.clips import load_clips
from serve.config import CrossPrecision, EncoderPrecision, Precision, RuntimeConfig
from serve.engine import Engine
from serve.errors import AudioError, EarshotError, UnavailableError
from serve.runtime.open import open_runtime
from serve.runtime.protocol import Job
from serve.speech.features import SAMPLE_RATE, WINDOW_S, WINDOW_SAMPLES, log_mel
from serve.speech.tokenizer import Tokenizer

Spoken = tuple[Recording, str]  # and what is said in it
VARIANTS: dict[str, tuple[Precision, CrossPrecision, EncoderPrecision]] = {
    "fp16": ("fp16", "full", "full"),
    "int8, int8 cross_kv": ("int8", "int8", "full"),
    "int8, int8 cross_kv, fp8 encoder": ("int8", "int8", "fp8"),
}
_HEADING = f"{'variant':32} {'CER':>7} {'points':>7} {'WER':>7} {'points':>7}  other texts"


@dataclass(frozen=True)
class Figures:
    """One variant on one set of clips; rates in percent."""

    variant: str
    clips: str
    utterances: int
    cer: float
    cer_points: float
    wer: float
    wer_points: float
    other_texts: int

    def __str__(self) -> str:
        """A line of the table."""
        rates = f"{self.cer:7.3f} {self.cer_points:+7.3f} {self.wer:7.3f} {self.wer_points:+7.3f}"
        return f"{self.variant:32} {rates}  {self.other_texts} of {self.utterances}, {self.clips}"


def load(folder: Path) -> list[Spoken]:
    """The clips of a folder that `build.demo.maker.heldout` wrote.

    Raises:
        ConfigError: the manifest or a file cannot be read, or a line is malformed.
        AudioError: a file cannot be decoded, or does not fit a window.
    """
    clips = load_clips(folder / "manifest.jsonl")
    recordings = read_recordings(str(clip.path) for clip in clips)
    for recording in recordings:
        if recording.samples.size > WINDOW_SAMPLES:
            duration_s = recording.samples.size / SAMPLE_RATE
            raise AudioError(
                f"{recording.name} lasts {duration_s:.1f} s; expected at most {WINDOW_S} s"
            )
    return [
        (replace(recording, language=clip.language or "en"), clip.text)
        for recording, clip in zip(recordings, clips, strict=True)
    ]


def transcribe(engine: Engine, config: RuntimeConfig, clips: Sequence[Recording]) -> list[str]:
    """The text of each clip.

    Raises:
        UnavailableError: this machine cannot run the engine so.
        OptionError: the engine does not know a clip's language.
    """
    runtime, tokenizer = open_runtime(engine, config), Tokenizer.open(engine)
    filters = engine.load_mel_filters().to(config.device)
    tokens: list[tuple[int, ...]] = [()] * len(clips)
    handed = ended = 0
    with tqdm(total=len(clips), unit=" clips", leave=False, disable=None) as bar:
        while ended < len(clips):
            while handed < len(clips) and handed - ended < 2 * config.slots:
                batch = clips[handed : handed + config.encoder_batch]
                for job in _jobs(filters, tokenizer, batch, handed):
                    runtime.submit(job)
                handed += len(batch)
            for event in runtime.poll(timeout_s=1.0):
                if event.error is not None:
                    raise event.error
                tokens[event.job_id] += event.tokens
                ended += event.finished is not None
            bar.update(ended - bar.n)
    runtime.close()
    return [tokenizer.decode(ids).strip() for ids in tokens]


def _jobs(
    filters: torch.Tensor, tokenizer: Tokenizer, clips: Sequence[Recording], first: int
) -> Iterator[Job]:
    """A job for each clip, numbered from `first`; their log-mels are a batch on filters' device."""
    samples = torch.zeros(len(clips), WINDOW_SAMPLES)
    for row, clip in zip(samples, clips, strict=True):
        row[: clip.samples.size] = torch.from_numpy(clip.samples)
    features = log_mel(samples.to(filters.device), filters)
    for id, (row, clip) in enumerate(zip(features, clips, strict=True), first):
        yield Job(id, row, tokenizer.prompt_ids(clip.language, "transcribe", True, ""))


def score(
    variant: str, clips: str, truth: Sequence[str], said: Sequence[str], fp16: Sequence[str]
) -> Figures:
    """Compare what a variant said, and what fp16 said, with the truth: a text for each clip."""
    plain, mine, first = ([normalise(text) for text in texts] for texts in (truth, said, fp16))
    cer, wer, cer_fp16, wer_fp16 = (
        100 * error_rate(list(zip(plain, heard, strict=True)), words)
        for heard in (mine, first)
        for words in (False, True)
    )
    others = sum(a != b for a, b in zip(said, fp16, strict=True))
    return Figures(variant, clips, len(truth), cer, cer - cer_fp16, wer, wer - wer_fp16, others)


def compare(
    checkpoint: Checkpoint, sets: dict[str, list[Spoken]], device: str
) -> Iterator[Figures | str]:
    """Figures of each variant on every set and, of several, on all; or why it is refused.

    Raises:
        EarshotError: fp16 cannot run here, or a variant that is not refused fails.
    """
    config = RuntimeConfig(device=device, threads=torch.get_num_threads())
    if device.startswith("cuda"):
        config = replace(config, slots=64, encoder_batch=8, cuda_graph=True)
    ends = list(accumulate(len(pairs) for pairs in sets.values()))
    parts = dict(zip(sets, map(slice, [0, *ends], ends), strict=True))
    parts |= {"all": slice(None)} if len(sets) > 1 else {}
    clips, truth = zip(*(pair for pairs in sets.values() for pair in pairs), strict=True)
    fp16: list[str] = []
    for name, (precision, cross_kv, encoder) in VARIANTS.items():
        turned = replace(config, cross_kv=cross_kv, encoder_precision=encoder)
        try:
            with _engine(checkpoint, precision) as engine:
                said = transcribe(engine, turned, clips)
        except UnavailableError as error:
            if not fp16:
                raise
            yield f"{name:32} refused: {error}"
            continue
        fp16 = fp16 or said
        for part, at in parts.items():
            yield score(name, part, truth[at], said[at], fp16[at])


@contextlib.contextmanager
def _engine(checkpoint: Checkpoint, precision: Precision) -> Iterator[Engine]:
    with tempfile.TemporaryDirectory(prefix="earshot-precision-") as name:
        config = Config(engine=name, build=BuildConfig(precision=precision))
        yield build_engine(checkpoint, config, tqdm.write)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m build.demo.maker.precision",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--clips",
        type=Path,
        nargs="+",
        required=True,
        metavar="DIR",
        help="folders that build.demo.maker.heldout wrote",
    )
    parser.add_argument(
        "--checkpoint", default="build/demo/checkpoint", help="default: %(default)s"
    )
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    args = parser.parse_args(arguments)
    rows: list[Figures | str] = []
    try:
        sets = {str(folder): load(folder) for folder in args.clips}
        checkpoint = open_checkpoint(args.checkpoint)
        print(_HEADING)  # noqa: T201
        for row in compare(checkpoint, sets, args.device):
            print(row, flush=True)  # noqa: T201
            rows.append(row)
    except EarshotError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)  # noqa: T201
        return 128 + signal.SIGINT
    figures = [asdict(row) for row in rows if isinstance(row, Figures)]
    heading = {
        "device": args.device,
        "torch": torch.__version__,
        "source": checkpoint.source.sha256,
    }
    print(json.dumps(heading | {"figures": figures}))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
