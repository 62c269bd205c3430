"""The clips with the most errors: their audio for a player, and every text with its mistakes.

Audio is embedded as it lies on the disk, up to a total size; otherwise the page says why not.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jiwer

from eval.accuracy.normalize import Normalize
from eval.accuracy.predictions import ClipSet, TimedCall
from eval.accuracy.score import TITLES, SystemScore, compared_texts
from eval.record import AlignedText, ReportClip, SharedTranscript
from serve.contract.errors import FileError
from serve.contract.files import read_bytes

MAX_CLIPS = 10
MAX_BYTES = 6_000_000  # of all embedded audio, before base64
MAX_BYTES_PER_CLIP = 1_500_000
_MIME = {
    ".wav": "audio/wav",
    ".flac": "audio/flac",
    ".mp3": "audio/mpeg",
    ".ogg": "audio/ogg",
    ".opus": "audio/ogg",
    ".m4a": "audio/mp4",
    ".mp4": "audio/mp4",
    ".webm": "audio/webm",
}
_WITHOUT_SPACES = frozenset(("zh", "yue", "ja", "th", "lo", "my", "km", "bo"))


def worst_clips(
    score: SystemScore, calls: Mapping[str, Sequence[TimedCall]], normalize: Normalize
) -> list[ReportClip]:
    """Return the clips with the most character errors of one system, worst first.

    Args:
        score: that system's score.
        calls: each system's calls, by name.
        normalize: the normaliser that texts are compared under.
    """
    name = score.facts.name
    ranked = sorted(
        (-counts.errors, clip_set, file, counts)
        for clip_set, of_set in score.sets.items()
        for file, counts in of_set.by_clip.items()
        if counts.errors
    )
    all_calls = _by_clip(calls)
    clips, left = [], MAX_BYTES
    for _, clip_set, file, counts in ranked[:MAX_CLIPS]:
        answers = all_calls[clip_set, file]
        first = next(iter(answers.values()))
        audio, size, why = _audio(first.path, left)
        left -= size
        rate = f", CER {100 * counts.errors / counts.length:.0f} %" if counts.length else ""
        about = (
            f"{TITLES[clip_set]}; {first.language or 'language unknown'}; "
            f"{first.duration_s:.1f} s; "
            f"{counts.errors} character errors{rate}"
        )
        # The system that chose the clip first, systems without a mistake last.
        transcripts = sorted(
            _alike(answers, normalize), key=lambda same: (name not in same.systems, same.right)
        )
        clips.append(ReportClip(file, about, first.reference, tuple(transcripts), audio, why))
    return clips


def _by_clip(
    calls: Mapping[str, Sequence[TimedCall]],
) -> dict[tuple[ClipSet, str], dict[str, TimedCall]]:
    """Return the scored call of each system, by clip."""
    by_clip: dict[tuple[ClipSet, str], dict[str, TimedCall]] = {}
    for name, made in calls.items():
        for call in made:
            if call.phase == "accuracy":
                by_clip.setdefault((call.clip_set, call.file), {})[name] = call
    return by_clip


def _alike(calls: Mapping[str, TimedCall], normalize: Normalize) -> Iterator[SharedTranscript]:
    """Yield systems with equal texts together, in their order."""
    alike: dict[tuple[str, str, str | None], list[str]] = {}
    for name, call in calls.items():
        alike.setdefault((*compared_texts(call, normalize), call.error), []).append(name)
    language = next(iter(calls.values())).language
    for (reference, text, error), names in alike.items():
        yield SharedTranscript(tuple(names), tuple(differences(reference, text, language)), error)


def differences(reference: str, hypothesis: str, language: str | None) -> list[AlignedText]:
    """Align two texts by words, or by characters where a language writes no spaces."""
    by_character = language in _WITHOUT_SPACES
    align = jiwer.process_characters if by_character else jiwer.process_words
    out, joint = align([reference], [hypothesis]), "" if by_character else " "
    reference_parts, hypothesis_parts = out.references[0], out.hypotheses[0]
    return [
        AlignedText(
            joint.join(reference_parts[part.ref_start_idx : part.ref_end_idx]),
            joint.join(hypothesis_parts[part.hyp_start_idx : part.hyp_end_idx]),
        )
        for part in out.alignments[0]
    ]


def _audio(path: str | None, left: int) -> tuple[str | None, int, str | None]:
    """Return a data: address, its bytes of audio, and the reason why there is none."""
    if path is None:
        return None, 0, "these predictions do not say where the audio lies"
    kind = _MIME.get(Path(path).suffix.casefold())
    if kind is None:
        return None, 0, f"browsers do not play {Path(path).suffix or 'this'} files: {path}"
    try:
        size = Path(path).stat().st_size
        if size > min(left, MAX_BYTES_PER_CLIP):
            return None, 0, f"not embedded, for it has {size / 1e6:.1f} MB: {path}"
        data = read_bytes(path)
    except (OSError, FileError):
        return None, 0, f"the audio is not there any more: {path}"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}", size, None
