"""Find the clips of a corpus: choose its layout, check its list of clips, and draw from them."""

import collections
import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import av
import soundfile
from tqdm import tqdm

from build.clips import Clip
from eval.corpora.layout import EXPECTED, TRANSCRIPTS, Layout, librispeech, recordings, table
from serve.contract.errors import ConfigError, EarshotError, FileError

TABLES = (".csv", ".tsv", ".jsonl", ".ndjson")  # files of references in a folder
_NAMED = 8  # problems in an error


@dataclasses.dataclass(frozen=True)
class FoundCorpus:
    """The clips of a corpus, and a sentence on its content."""

    clips: list[Clip]
    summary: str
    unreadable: dict[str, str] = dataclasses.field(default_factory=dict)  # reason by file
    references: bool = True  # whether the clips have texts


def find_clips(
    source: str,
    *,
    limit: int = 0,
    seed: int = 0,
    language: str = "",
    half: str = "",
    read: Callable[[Path], object] | None = None,
    need_references: bool = True,
) -> FoundCorpus:
    """Find the clips of a corpus, all or a random sample.

    Args:
        source: a file or a folder: see `EXPECTED`.
        limit: the maximum number of clips; 0 returns all. The sample is stratified by `Clip.group`.
            With the same seed, a smaller sample is a subset of a larger one.
        seed: the seed of the sample.
        language: the language code of clips whose layout names none; "": unknown.
        half: the half to draw from, as the manifest names it; "": both.
        read: a function that decodes an audio file. If it raises an EarshotError, the clip goes to
            `unreadable` instead of `clips`. None: only headers are read.
        need_references: False accepts a folder of audio without texts.

    Raises:
        FileError: a file cannot be read.
        ConfigError: the layout is unknown, a clip has no audio or no text or is listed twice, or no
            clip can be read.
    """
    layout = _layout(source, need_references)
    listed = _check_clips(layout, source, half)
    chosen = _draw(listed, limit, seed)
    clips, unreadable = [], dict[str, str]()
    for clip in tqdm(chosen, desc=f"reading {source}", unit="clip", leave=False):
        try:
            if read:
                read(clip.path)
            clip_language = (clip.language or language or None) if clip.text else None
            seconds = clip.duration_s or duration_s(clip.path)
            clips.append(dataclasses.replace(clip, language=clip_language, duration_s=seconds))
        except EarshotError as error:
            if read is None:
                raise
            unreadable[clip.file] = str(error)
    if not clips:
        raise ConfigError(f"{source}: no clip can be read; {next(iter(unreadable.values()))}")
    summary = f"{layout.title}: {len(listed):,} clips"
    if len(chosen) < len(listed):
        summary += f", {len(chosen):,} of them drawn with seed {seed}"
    if unreadable:
        summary += f", {len(unreadable):,} cannot be read"
    summary += f"; {sum(clip.duration_s for clip in clips) / 3600:.2f} h"
    return FoundCorpus(clips, summary, unreadable, layout.references)


def _layout(source: str, need_references: bool) -> Layout:
    path = Path(source)
    if path.is_file():
        return table(path)
    if not path.is_dir():
        raise FileError(f"cannot read {source}: No such file or directory; {EXPECTED}")
    tables = [file for file in sorted(path.iterdir()) if file.suffix in TABLES]
    if len(tables) == 1:
        return table(tables[0])
    if tables:
        names = ", ".join(table.name for table in tables)
        raise ConfigError(f"{path} has several tables: {names}; name one of them")
    if next(path.rglob(TRANSCRIPTS), None):
        return librispeech(path)
    layout = recordings(path)
    if need_references and not layout.references:
        raise ConfigError(f"{path} holds no references; {EXPECTED}")
    return layout


def _check_clips(layout: Layout, source: str, half: str) -> list[Clip]:
    """Return the clips of a half, if every clip of the layout is as it should be."""
    problems, files = list[str](), set[str]()
    for where, clip in layout.clips:
        if clip.file in files:
            problems.append(f"{where} lists {clip.file} again")
        elif not clip.text and layout.references and not layout.may_be_silent:
            problems.append(f"{where} has no text for {clip.file}")
        elif not clip.path.is_file():
            problems.append(f"{where} has no audio {clip.file}")
        files.add(clip.file)
    if problems:
        named = "; ".join(problems[:_NAMED])
        raise ConfigError(f"{source}: {named}; {len(problems)} lines in all to correct or remove")
    clips = [clip for _, clip in layout.clips if not half or clip.half in ("", half)]
    if not clips:
        of_half = f" of the half {half!r}" if half else ""
        raise ConfigError(f"{source} lists no clips{of_half}")
    return clips


def _draw(clips: Sequence[Clip], limit: int, seed: int) -> Sequence[Clip]:
    """Draw clips, in their order; every group has its share at any limit.

    The members of a group, shuffled, are spread evenly over 0 to 1; the lowest are drawn.
    """
    if not limit:
        return clips
    groups: dict[str, list[int]] = collections.defaultdict(list)
    for number, clip in enumerate(clips):
        groups[clip.group].append(number)
    ranked: list[tuple[float, int]] = []
    for group, members in groups.items():
        draw = random.Random(f"{seed} {group}")
        draw.shuffle(members)
        ranked += [
            ((rank + draw.random()) / len(members), number) for rank, number in enumerate(members)
        ]
    return [clips[number] for number in sorted(number for _, number in sorted(ranked)[:limit])]


def duration_s(path: Path) -> float:
    """Read how long an audio file is, by its header.

    Raises:
        FileError: it is no audio, or does not say.
    """
    try:
        return float(soundfile.info(path).duration)
    except soundfile.LibsndfileError:
        pass
    try:
        with av.open(str(path)) as container:
            length = container.duration
    except (av.FFmpegError, OSError) as error:
        raise FileError(f"cannot read {path}: no audio that is known here ({error})") from error
    if not length:
        raise FileError(f"{path} does not say how long it is; convert it to WAV or FLAC, say")
    return float(length / av.time_base)
