"""What the images run, beside `serve` and `build`: `python3 earshot.py engine|serve`.

`engine` builds the config's engine unless it is there; `serve` serves it. The config is that of
the product, the file CONFIG, over which lies that of the deployment, the file SETTINGS, if there is
one.
"""

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import tomli_w

from serve.contract.codec import read_toml
from serve.contract.config import load_config
from serve.contract.errors import EarshotError, EngineError

LOCK = Path("engines/.lock")


def main(arguments: list[str]) -> int:
    """Run one of the two; returns the exit status."""
    if arguments not in (["engine"], ["serve"]):
        print(f"error: expected engine or serve, found {' '.join(arguments)!r}", file=sys.stderr)
        return 2
    try:
        config = write_config(Path(os.environ["CONFIG"]), os.environ.get("SETTINGS", ""))
        engine = Path(load_config(config).engine)
        if arguments == ["engine"]:
            return build(config, engine)
        require_engine(engine)
        os.execv(sys.executable, [sys.executable, "-m", "serve", "start", "--config", str(config)])
    except EarshotError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def write_config(product: Path, settings: str) -> Path:
    """Write what both files say, key by key; what the second says counts."""
    table = read_toml(product)
    for name, value in (read_toml(Path(settings)) if settings else {}).items():
        table[name] = {**table.get(name, {}), **value} if isinstance(value, dict) else value
    path = Path(tempfile.gettempdir()) / f"{product.stem}.toml"
    path.write_text(tomli_w.dumps(table), encoding="utf-8")
    return path


def build(config: Path, engine: Path) -> int:
    """Build the engine unless it is there.

    Where several do so on a volume that they share, one builds and the others wait for it. An
    engine appears whole or not at all, and the server checks every byte of it when it opens it.
    """
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_there(engine):
            print(f"{engine} is there; to have it built again, remove the folder")
            return 0
        command = [sys.executable, "-m", "build", "engine", "--config", str(config)]
        return subprocess.run(command, check=False).returncode


def require_engine(engine: Path) -> None:
    """Refuse to serve an engine that is not there: nobody has built it into the volume yet.

    Raises:
        EngineError: it is not.
    """
    if not is_there(engine):
        raise EngineError(
            f"no engine at {engine} in this container; `docker run … earshot python3 earshot.py "
            "engine`, with the same CONFIG, SETTINGS and volume at /earshot/engines, builds it"
        )


def is_there(engine: Path) -> bool:
    """Tell whether an engine has been built: it appears whole or not at all."""
    return (engine / "engine.json").exists()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
