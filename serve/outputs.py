"""Where transcripts go: to standard output, or to files of a folder."""

import sys
from pathlib import Path

from tqdm import tqdm

from serve.errors import ConfigError, FileError
from serve.speech.formats import Format


def targets_of(files: list[str], folder: Path | None, format: Format) -> list[Path | None]:
    """The file that each transcript goes to; None is standard output.

    Raises:
        ConfigError: two would go to the same, or the folder cannot be made.
    """
    if folder is None:
        return [None] * len(files)
    suffix = "txt" if format == "text" else format
    targets = [folder / f"{Path(file).name}.{suffix}" for file in files]
    shared = {target for target in targets if targets.count(target) > 1}
    if shared:
        raise ConfigError(f"two files would be written to {min(shared)}; use two --output folders")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from error
    return list(targets)


def write(text: str, file: str, target: Path | None, titled: bool) -> None:
    """Write a transcript; on standard output with its file's name above it, if it is `titled`.

    Raises:
        FileError: it cannot be written.
    """
    if target is not None:
        try:
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            reason = f"cannot write {target}: {error.strerror}"
            raise FileError(f"{reason}; name another --output folder") from error
        return
    title = f"==> {file} <==\n" if titled else ""
    tqdm.write(f"{title}{text}", file=sys.stdout, end="")
    sys.stdout.flush()
