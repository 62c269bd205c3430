"""The rules of the layout: who imports whom, how long files are, what an import may do."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(p for top in ("build", "serve", "eval") for p in (ROOT / top).rglob("*.py"))
MODULES = [p for p in SOURCES if "model_repository" not in str(p)]

# What a module of serve may import from serve: only what stands on an earlier line.
SERVE_LEVELS = [
    {"errors"},
    {"config", "features", "messages", "slots", "stats"},
    {"engine", "metrics", "wire"},
    {"relay", "runtime"},
    {"audio", "decoding", "tokenizer", "windows"},
    {"kernels"},
    {"inflight", "trtllm_limits", "whisper"},
    {"graphs", "memory"},
    {"dispatch", "intake", "ledger", "native", "trtllm_runtime"},
    {"trtllm", "trtllm_api", "trtllm_backend"},
    {"repository", "transcriber"},
    {"client", "formats", "server"},
    {"__main__", "model"},
]
ONLY_IN = {  # beginnings
    "triton": ("serve/kernels/triton_",),
    "tensorrt_llm": ("serve/trtllm.py", "serve/trtllm_api.py"),
}


def name_of(path):
    return str(path.relative_to(ROOT))


def imports(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_packages_import_only_downwards(path):
    tops = {name.split(".")[0] for name in imports(path)}
    top = path.relative_to(ROOT).parts[0]
    assert not (tops & {"build", "serve", "eval", "tests"}) - {"serve", top}
    for library, home in ONLY_IN.items():
        assert library not in tops or name_of(path).startswith(home)


def level_of(module):
    found = [i for i, level in enumerate(SERVE_LEVELS) if module in level]
    assert found, f"serve/{module}: add it to SERVE_LEVELS"
    return found[0]


@pytest.mark.parametrize("path", [p for p in SOURCES if "serve" in p.parts], ids=name_of)
def test_serve_imports_only_downwards(path):
    relative = path.relative_to(ROOT / "serve")
    own = "kernels" if relative.parts[0] == "kernels" else relative.stem
    if own == "__init__":
        return
    for name in imports(path):
        parts = name.split(".")
        lazy_factory = own == "runtime" and parts[1:2] in (["native"], ["trtllm"], ["trtllm_api"])
        if parts[0] == "serve" and len(parts) > 1 and parts[1] != own and not lazy_factory:
            assert level_of(parts[1]) < level_of(own), f"serve/{own} imports serve/{parts[1]}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_stay_readable(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def test_importing_does_no_work():
    names = [
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for p in MODULES
        if p.stem != "__main__" and not name_of(p).startswith(ONLY_IN["triton"])
    ]
    code = (
        "import sys, importlib, threading\n"
        f"for name in {names!r}:\n    importlib.import_module(name)\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "import torch\nassert not torch.cuda.is_initialized()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
