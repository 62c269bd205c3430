"""The clips with the most errors: their audio for a player, and every text with its mistakes.

Audio is embedded as it lies on the disk, up to a size; otherwise the page says why not.
"""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path

import jiwer

from eval.accuracy.normalize import Normalize
from eval.accuracy.predictions import TimedCall
from eval.accuracy.score import TITLES, SystemScore, compared_texts
from eval.record import AlignedText, ReportClip, SharedTranscript
from serve.contract.errors import FileError
from serve.contract.files import read_bytes

MAX_CLIPS = 10
MAX_BYTES_PER_CLIP = 1_000_000  # of embedded audio, before base64
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
    ranked = sorted(
        (-counts.errors, clip_set, file, counts)
        for clip_set, of_set in score.sets.items()
        for file, counts in of_set.by_clip.items()
        if counts.errors
    )
    clips = []
    for _, clip_set, file, counts in ranked[:MAX_CLIPS]:
        answers = {
            name: call
            for name, made in calls.items()
            for call in made
            if (call.phase, call.clip_set, call.file) == ("accuracy", clip_set, file)
        }
        first = next(iter(answers.values()))
        rate = f", CER {100 * counts.errors / counts.length:.0f} %" if counts.length else ""
        about = (
            f"{TITLES[clip_set]}; {first.language or 'language unknown'}; "
            f"{first.duration_s:.1f} s; {counts.errors} character errors{rate}"
        )
        transcripts = _transcripts(answers, score.facts.name, normalize)
        audio, no_audio = _player(first.path)
        clips.append(ReportClip(file, about, first.reference, transcripts, audio, no_audio))
    return clips


def _transcripts(
    calls: Mapping[str, TimedCall], chooser: str, normalize: Normalize
) -> tuple[SharedTranscript, ...]:
    """Return each text once; that of the system that chose the clip first, right ones last."""
    alike: dict[tuple[str, str, str | None, str | None], list[str]] = {}
    for name, call in calls.items():
        texts = compared_texts(call, normalize)
        alike.setdefault((*texts, call.language, call.error), []).append(name)
    transcripts = [
        SharedTranscript(tuple(names), tuple(differences(reference, text, language)), error)
        for (reference, text, language, error), names in alike.items()
    ]
    return tuple(sorted(transcripts, key=lambda same: (chooser not in same.systems, same.right)))


def differences(reference: str, hypothesis: str, language: str | None) -> list[AlignedText]:
    """Align two texts by words, or by characters where a language writes no spaces."""
    by_character = language in _WITHOUT_SPACES
    align = jiwer.process_characters if by_character else jiwer.process_words
    out, joint = align([reference], [hypothesis]), "" if by_character else " "
    return [
        AlignedText(
            joint.join(out.references[0][part.ref_start_idx : part.ref_end_idx]),
            joint.join(out.hypotheses[0][part.hyp_start_idx : part.hyp_end_idx]),
        )
        for part in out.alignments[0]
    ]


def _player(path: str | None) -> tuple[str | None, str | None]:
    """Return a data: address of the audio, or the reason why there is none."""
    kind = _MIME.get(Path(path or "").suffix.casefold())
    if path is None or kind is None:
        return None, f"browsers do not play this file: {path}"
    try:
        data = read_bytes(path)
    except FileError as error:
        return None, str(error)
    if len(data) > MAX_BYTES_PER_CLIP:
        return None, f"not embedded, for it has {len(data) / 1e6:.1f} MB: {path}"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}", None
