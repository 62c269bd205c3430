"""Read the audio for the verification and the calibration of engines."""

import collections
import dataclasses
from pathlib import Path

from build.clips import load_clips
from serve.contract.errors import AudioError, ConfigError
from serve.contract.files import read_bytes, read_text
from serve.contract.manifest import TokenizerFacts
from serve.contract.messages import Samples
from serve.speech.audio import decode, join_blocks
from serve.speech.features import WINDOW_S
from serve.speech.meter import AudioLimits

_MAX_AUDIO_S = 3600.0
_MAX_CLIPS = 4  # transformers needs seconds of a CPU for each
_ADVICE = "name recordings of speech with --audio, or build with --no-verify"


@dataclasses.dataclass(frozen=True)
class VerificationAudio:
    """Audio that an engine is verified on; only its first 30 s are used."""

    name: str
    samples: Samples  # 16 kHz mono
    language: str = "en"


def read_recording(path: str | Path, language: str | None = None) -> VerificationAudio:
    """Read an audio file, by default in English.

    Raises:
        FileError: the file cannot be read.
        AudioError: the file cannot be decoded; the message names it.
    """
    content = read_bytes(path)
    try:
        samples = join_blocks(decode(content, AudioLimits(_MAX_AUDIO_S)))
    except AudioError as error:
        raise AudioError(f"{path}: {error}") from error
    return VerificationAudio(str(path), samples, language or "en")


def recordings_of(manifest: str | Path, facts: TokenizerFacts) -> list[VerificationAudio]:
    """Read at most four clips of a manifest, in as many languages as possible.

    Only clips with text, in a language of the checkpoint, that fit into one window are used. The
    longest clip of each language comes first, then the second longest of each, and so on.

    Args:
        manifest: the manifest of clips.
        facts: the checkpoint's tokenizer facts.

    Raises:
        ConfigError: the manifest is malformed, or has no such clip.
        FileError: the manifest or a file cannot be read.
        AudioError: a file cannot be decoded.
    """
    read_text(manifest, f"expected a manifest of clips to verify on; {_ADVICE}")
    languages = facts.languages if facts.multilingual else ("en",)
    counts: collections.Counter[str] = collections.Counter()  # number of clips by language
    ranked = []
    for clip in sorted(load_clips(manifest), key=lambda clip: -clip.duration_s):
        fits = clip.text and clip.duration_s <= WINDOW_S
        if fits and clip.language is not None and clip.language in languages:
            ranked.append((counts[clip.language], clip.language, str(clip.path), clip))
            counts[clip.language] += 1
    if not ranked:
        raise ConfigError(
            f"{manifest} has no clip to verify on; expected one with text, of at most {WINDOW_S} s "
            f"and in a language of the checkpoint; {_ADVICE}"
        )
    chosen = [clip for *_, clip in sorted(ranked, key=lambda rank: rank[:3])[:_MAX_CLIPS]]
    return [read_recording(clip.path, clip.language) for clip in chosen]
