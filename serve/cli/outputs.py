"""Write transcripts to standard output, or to files of a folder."""

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tqdm import tqdm

from serve.cli.inputs import InputFile
from serve.contract.errors import ConfigError
from serve.contract.files import write_text
from serve.speech.formats import Format, output_paths, suffix_of

_ADVICE = "choose another --output folder"


def targets_of(
    recordings: Sequence[InputFile], folder: Path | None, format: Format
) -> list[Path | None]:
    """Return the output file of each transcript, and make the folders; None is standard output.

    Raises:
        ConfigError: a file cannot be written, or it would replace a recording.
    """
    if folder is None:
        return [None] * len(recordings)
    places = output_paths([recording.path for recording in recordings])
    targets = [folder / f"{place}{suffix_of(format)}" for place in places]
    for parent in sorted({target.parent for target in targets}):
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"cannot make the folder {parent}: {error.strerror}"
            raise ConfigError(f"{reason}; {_ADVICE}") from error
        if not os.access(parent, os.W_OK):
            raise ConfigError(f"cannot write to the folder {parent}; {_ADVICE}")
    sources = {os.path.realpath(recording.name) for recording in recordings}
    for target in targets:
        if target.is_dir():
            raise ConfigError(f"cannot write {target}: it is a folder; {_ADVICE}")
        if os.path.realpath(target) in sources:
            raise ConfigError(f"cannot write {target}: it is one of the recordings; {_ADVICE}")
    return list(targets)


def write(text: str, file: str, target: Path | None, titled: bool) -> None:
    """Write a transcript to a file or to standard output.

    Args:
        text: the transcript.
        file: the recording's name.
        target: the file, which is written atomically; None is standard output.
        titled: whether standard output gets a line with the recording's name.

    Raises:
        FileError: the file cannot be written.
        OSError: standard output cannot be written.
    """
    if target is not None:
        write_text(target, text, _ADVICE)
        return
    title = f"==> {file} <==\n" if titled else ""
    tqdm.write(f"{title}{text}", file=sys.stdout, end="")
    sys.stdout.flush()


def print_table(rows: Iterable[tuple[str, ...]]) -> None:
    """Print rows of cells on standard output, in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        )
