"""Decides which layout a place has, checks what it lists, and draws clips from it.

One pass over the entries, however many there are: kept are their names and those drawn, never
their audio. Of entries with groups each group gives its share to a draw.
"""

import collections
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import av
import soundfile
from tqdm import tqdm

from build.clips import Clip
from eval.corpora.layout import EXPECTED, TRANSCRIPTS, Entry, Layout, LibriSpeech, Recordings
from eval.corpora.parquet import PREFIX, Parquet, open_hub
from eval.corpora.tables import CLIPS, Table, open_table
from serve.contract.errors import ConfigError, EarshotError, FileError

TABLES = (".csv", ".tsv", ".jsonl", ".ndjson")  # what is taken for references in a folder
COMMON_VOICE = ("test.tsv", "validated.tsv")  # of its tables, the one that is taken
_NAMED = 3  # examples in an error


@dataclasses.dataclass(frozen=True)
class Found:
    """Clips of a place, and a sentence on what it holds."""

    clips: list[Clip]
    summary: str
    unreadable: dict[str, str] = dataclasses.field(default_factory=dict)  # why, by file
    references: bool = True  # False: no text of a clip says anything


def find_clips(
    place: str,
    *,
    limit: int = 0,
    seed: int = 0,
    language: str = "",
    half: str = "",
    read: Callable[[Path], object] | None = None,
    need_references: bool = True,
) -> Found:
    """Find the clips of a place, or draw from them.

    Args:
        place: a file, a folder, or a name of the Hugging Face hub: see `EXPECTED`.
        limit: how many clips to draw, each equally likely; 0 is all. Where clips have groups, each
            group gives its share, and a larger draw with the same seed holds the smaller ones.
        seed: of the draw.
        language: code, of clips whose layout does not say it; "" leaves it unknown.
        half: of a manifest's two, whose clips alone are taken; "" is both.
        read: decodes an audio file, or raises an EarshotError; then clips that cannot be read
            stand apart. None: nothing is read but headers.
        need_references: False takes a folder without any, too: its clips have empty texts.

    Raises:
        FileError: a file cannot be read.
        ConfigError: the layout is not known, or clips do not fit: no audio, no text, listed twice,
            none that can be read.
        UnavailableError: a hub or a package that the place needs is not there.
    """
    layout = _layout(place, need_references)
    chosen, total = _draw(layout, place, limit, seed, half)
    layout.fetch(chosen)
    if read is None:
        clips = [_clip(entry, language) for entry in chosen]
        return Found(clips, _summary(layout, clips, 0, total, seed), {}, layout.references)
    clips, unreadable = [], dict[str, str]()
    for entry in tqdm(chosen, desc=f"reading {place}", unit="clip", leave=False):
        try:
            read(entry.audio)
            clips.append(_clip(entry, language))
        except EarshotError as error:
            unreadable[entry.file] = str(error)
    if not clips:
        raise ConfigError(f"{place}: no clip can be read; {next(iter(unreadable.values()))}")
    summary = _summary(layout, clips, len(unreadable), total, seed)
    return Found(clips, summary, unreadable, layout.references)


def _clip(entry: Entry, language: str) -> Clip:
    return Clip(
        file=entry.file,
        path=entry.audio,
        text=entry.text,
        language=(entry.language or language or None) if entry.text else None,
        duration_s=entry.duration_s or duration_s(entry.audio),
        group=entry.group,
        speaker=entry.speaker,
        half=entry.half,
    )


def _layout(place: str, need_references: bool) -> Layout:
    if place.startswith(PREFIX):
        return open_hub(place)
    path = Path(place)
    if path.is_dir():
        return _folder(path, need_references)
    if not path.is_file():
        raise FileError(f"cannot read {place}: No such file or directory; {EXPECTED}")
    if path.suffix == ".parquet":
        return _parquet(path, [path])
    if (path.parent / CLIPS).is_dir() and path.suffix == ".tsv":
        return _common_voice(path)
    return open_table(path)


def _folder(path: Path, need_references: bool) -> Layout:
    if (path / CLIPS).is_dir() and (tables := sorted(path.glob("*.tsv"))):
        named = [path / name for name in COMMON_VOICE if (path / name).is_file()]
        if not named:
            names = ", ".join(table.name for table in tables)
            raise ConfigError(f"{path} has {CLIPS}/ and {names}; name one of these tables")
        return _common_voice(named[0])
    tables = [file for file in sorted(path.iterdir()) if file.suffix in TABLES]
    metadata = [file for file in tables if file.stem in ("metadata", "manifest")]
    if len(tables) == 1 or len(metadata) == 1:
        return open_table((metadata or tables)[0])
    if tables:
        names = ", ".join(table.name for table in tables)
        raise ConfigError(f"{path} has several tables: {names}; name one of them")
    if next(path.rglob(TRANSCRIPTS), None):
        return LibriSpeech(path)
    if files := sorted(path.rglob("*.parquet")):
        return _parquet(path, files)
    if need_references:
        raise ConfigError(f"{path} holds no references; {EXPECTED}")
    return Recordings(path)


def _common_voice(table: Path) -> Layout:
    return Table(table, f"Common Voice's {table.name}", table.parent / CLIPS)


def _parquet(place: Path, files: Sequence[Path]) -> Layout:
    from fsspec.implementations.local import LocalFileSystem  # noqa: PLC0415 - Parquet alone

    # Rewritten files are other data: the cache goes by their times, too.
    key = " ".join(f"{file.resolve()} {file.stat().st_mtime_ns}" for file in files)
    names = [str(file) for file in files]
    return Parquet(names, LocalFileSystem(), f"{len(files)} Parquet files of {place.name}", key)


def _draw(layout: Layout, place: str, limit: int, seed: int, half: str) -> tuple[list[Entry], int]:
    """Draw entries, in the layout's order; returns how many there are, too."""
    problems: dict[str, list[str]] = collections.defaultdict(list)
    entries = (e for e in _checked(layout, problems) if not half or e.half in ("", half))
    first = next(entries, None)
    if first is None:
        of_half = f" of the half {half!r}" if half else ""
        raise ConfigError(f"{place} lists no clips{of_half}")
    every = itertools.chain([first], entries)
    draw = _by_share if first.group and limit else _by_reservoir
    chosen, total = draw(every, limit, seed)
    if problems:
        raise ConfigError(f"{place}: {_told(problems)}; correct these lines or take them out")
    return chosen, total


def _checked(layout: Layout, problems: dict[str, list[str]]) -> Iterator[Entry]:
    """Yield every entry; what is wrong with one is added to `problems`."""
    seen: set[str] = set()
    for entry in layout.entries():
        if problem := _problem(layout, entry, seen):
            problems[problem].append(f"{entry.where} ({entry.file or 'no name'})")
        seen.add(entry.file)
        yield entry


def _by_reservoir(entries: Iterable[Entry], limit: int, seed: int) -> tuple[list[Entry], int]:
    """Draw uniformly, holding no more entries than are drawn (Algorithm R); 0 is all."""
    random_row = random.Random(seed)
    chosen: list[tuple[int, Entry]] = []
    total = 0
    for entry in entries:
        if limit == 0 or total < limit:
            chosen.append((total, entry))
        elif (place_in := random_row.randrange(total + 1)) < limit:
            chosen[place_in] = (total, entry)
        total += 1
    return [entry for _, entry in sorted(chosen, key=lambda pair: pair[0])], total


def _by_share(entries: Iterable[Entry], limit: int, seed: int) -> tuple[list[Entry], int]:
    """Draw so that every group has its share, whatever the limit.

    The members of a group, shuffled, are spread evenly over 0 to 1; the draw is whoever is first.
    """
    every = list(entries)
    groups: dict[str, list[int]] = collections.defaultdict(list)
    for number, entry in enumerate(every):
        groups[entry.group].append(number)
    places: list[tuple[float, int]] = []
    for group, members in groups.items():
        draw = random.Random(f"{seed} {group}")
        draw.shuffle(members)
        places += [
            ((rank + draw.random()) / len(members), number) for rank, number in enumerate(members)
        ]
    chosen = sorted(number for _, number in sorted(places)[:limit])
    return [every[number] for number in chosen], len(every)


def _problem(layout: Layout, entry: Entry, seen: set[str]) -> str | None:
    if entry.file in seen:
        return "listed twice"
    if not entry.text and layout.references and not layout.may_be_silent():
        return "without a reference text"
    return None if layout.has_audio(entry) else "without audio"


def _told(problems: dict[str, list[str]]) -> str:
    parts = []
    for problem, names in problems.items():
        more = ", …" if len(names) > _NAMED else ""
        parts.append(f"{len(names)} {problem}: {', '.join(names[:_NAMED])}{more}")
    return "; ".join(parts)


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


def _summary(layout: Layout, clips: Sequence[Clip], unreadable: int, total: int, seed: int) -> str:
    hours = sum(clip.duration_s for clip in clips) / 3600
    silent = "no speech" if layout.references else "unknown language"
    languages = collections.Counter(
        clip.language or ("unknown language" if clip.text else silent) for clip in clips
    )
    chosen = len(clips) + unreadable
    drawn = "" if chosen == total else f", {chosen:,} of them drawn with seed {seed}"
    drawn += f", {unreadable:,} cannot be read" if unreadable else ""
    spread = ", ".join(f"{name} {count:,}" for name, count in languages.most_common())
    return f"{layout.title}: {total:,} clips{drawn}; {hours:.2f} h; {spread}"
