"""`python -m eval trust`: transcribe clips by two searches, once each.

transcripts.jsonl   the first transcripts, the most alike first: a manifest, once it is filtered
failed.jsonl        clips without a transcript, and why
fit.json            the fit of confidence that `build.confidence` may name
"""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from build.clips import Clip
from eval.accuracy.systems import greedy
from eval.config import EvaluationProduct
from eval.corpora.find import FoundCorpus, duration_s, find_clips
from eval.record import Check, Result, Run, write_json, write_jsonl
from eval.trust import agreement, calibration
from eval.trust.agreement import TranscriptPair, pair_of
from eval.trust.calibration import HeardWord, judge_words
from serve.contract.engine import open_engine
from serve.contract.errors import ConfigError, EarshotError
from serve.contract.files import read_bytes
from serve.contract.messages import Request, Transcript
from serve.transcriber.open import open_transcriber

Answer = Transcript | EarshotError


def trust(run: Run, *, other: str, threshold: float) -> Result:
    """Select transcripts that two passes agree on; calibrate confidence if there are references.

    The second pass is greedy, or of another engine; with another engine there is no calibration.

    Args:
        run: the run; its config's engine is built.
        other: folder of the engine of the second pass; "" is the same engine.
        threshold: % in which two texts may differ that are trusted.

    Raises:
        ConfigError: both passes would be the same.
        EarshotError: the clips or an engine cannot be read, or every clip failed.
    """
    settings, passes = run.config.eval, passes_of(run.config, other)
    # Both are opened here, so that a wrong --other ends the command before the first pass.
    source, _ = [open_engine(config.engine).manifest.source.id for config in passes]
    drawn = find_clips(
        settings.manifest,
        limit=settings.limit,
        seed=settings.seed,
        read=duration_s,
        need_references=False,
    )
    run.say(drawn.summary)
    first, second = (_transcribed(config, drawn.clips) for config in passes)
    answers = [
        (clip, one, two)
        for clip, one, two in zip(drawn.clips, first, second, strict=True)
        if not settings.half or clip.half in ("", settings.half)
    ]
    pairs, failed = _paired(answers, drawn)
    seconds = sum(clip.duration_s for clip, *_ in answers)
    figures = agreement.figures_of(pairs, len(failed), seconds, threshold)
    lines = [vars(pair) | {"trusted": pair.is_trusted(threshold)} for pair in pairs]
    for line in lines:
        del line["edits"]
    write_jsonl(run.folder / "transcripts.jsonl", lines)
    reasons = [{"file": file, "error": error} for file, error in failed.items()]
    write_jsonl(run.folder / "failed.jsonl", reasons)
    checks = agreement.checks_of(pairs, threshold)
    sections = [agreement.section_of(figures, threshold)]
    words, judged = None, dict[int, list[HeardWord]]()
    if drawn.references and not other:
        searches = {run.config.transcriber.beam_size: first, 1: second}
        judged = {beam: judge_words(drawn.clips, heard) for beam, heard in searches.items()}
    if any(judged.values()):  # some engines do not know the times of words
        try:
            words = calibration.figures_of(judged, source)
        except EarshotError as error:
            checks += (Check("confidence is fitted", None, str(error)),)
        else:
            write_json(run.folder / "fit.json", words.fit)
            checks += calibration.checks_of(words)
            sections.append(calibration.section_of(words))
    kept = {"transcripts": figures, "words": words}
    return Result(kept, checks, tuple(sections), about=drawn.summary)


def passes_of(config: EvaluationProduct, other: str) -> tuple[EvaluationProduct, EvaluationProduct]:
    """Return the configs of both passes.

    Raises:
        ConfigError: these are the same.
    """
    if not other and config.transcriber.beam_size == 1:
        raise ConfigError(
            "transcriber.beam_size is 1, so a greedy pass would say the same again; expected more, "
            "or another engine as --other"
        )
    if other and Path(other).resolve() == Path(config.engine).resolve():
        raise ConfigError(f"--other {other} is the config's own engine; expected another one")
    return config, dataclasses.replace(config, engine=other) if other else greedy(config)


def _transcribed(config: EvaluationProduct, clips: Sequence[Clip]) -> list[Answer]:
    """Return the engine's transcript of each clip, or the reason why there is none."""

    def transcribe(clip: Clip) -> Answer:
        language = clip.language if config.eval.tell_language else None
        try:
            audio = read_bytes(clip.path)
            return transcriber.transcribe(
                Request(audio, language=language, try_word_timestamps=True)
            )
        except EarshotError as error:
            return error

    title = f"{config.engine}, a beam of {config.transcriber.beam_size}"
    with (
        open_transcriber(config) as transcriber,
        ThreadPoolExecutor(config.eval.concurrency) as pool,
    ):
        return list(tqdm(pool.map(transcribe, clips), title, len(clips), unit="clip"))


def _paired(
    answers: Sequence[tuple[Clip, Answer, Answer]], drawn: FoundCorpus
) -> tuple[list[TranscriptPair], dict[str, str]]:
    """Pair the transcripts of clips, the most alike first.

    Returns:
        The pairs, and the reasons of clips without one, by file.

    Raises:
        EarshotError: no clip has two transcripts.
    """
    pairs, failed = list[TranscriptPair](), dict(drawn.unreadable)
    for clip, first, second in answers:
        if isinstance(first, EarshotError) or isinstance(second, EarshotError):
            failed[clip.file] = str(first if isinstance(first, EarshotError) else second)
        else:
            pairs.append(pair_of(clip, first, second, references=drawn.references))
    if not pairs:
        file, error = next(iter(failed.items()))
        raise EarshotError(f"no clip has transcripts of both passes; {file}: {error}")
    return sorted(pairs, key=lambda pair: (pair.difference, pair.silence)), failed
