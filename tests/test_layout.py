"""The rules of the layout: who imports whom, how long files are, what an import may do."""

import ast
import dataclasses
import fnmatch
import functools
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from build.builders import BUILDERS
from serve.contract.config import RuntimeConfig
from serve.contract.engine import Engine
from serve.contract.runtimes import RUNTIMES, SECTIONS, RuntimeName
from serve.runtime.protocol import Runtime

ROOT = Path(__file__).parents[1]
TOPS = ("build", "serve", "eval")
SOURCES = sorted(p for top in TOPS for p in (ROOT / top).rglob("*.py"))
MODULES = [p for p in SOURCES if "model_repository" not in str(p)]

# What each package may import from this project besides itself: one rule a package. A name stands
# for everything below it.
CONTRACT = ("serve.contract",)
RUNTIME = (*CONTRACT, "serve.speech", "serve.runtime.protocol", "serve.runtime.child")
HARNESS = (
    *("serve", "build.clips", "build.hub", "eval.config", "eval.record"),
    *("eval.clients", "eval.load", "eval.processes", "eval.server"),
)
RULES = {
    "serve.contract": (),
    # In the environment of a library that lacks most of what the rest needs.
    "serve.contract.errors": (),
    "serve.wire": CONTRACT,
    "serve.speech": CONTRACT,
    "serve.speech.rate": (),
    "serve.speakers": (*CONTRACT, "serve.speech.rate", "serve.speech.text"),
    "serve.runtime": CONTRACT,
    "serve.native.kernels": CONTRACT,
    "serve.native.rules": (*CONTRACT, "serve.native.kernels.gpu", "serve.native.kernels.launch"),
    "serve.native": RUNTIME,
    "serve.trtllm.release": ("serve.contract.errors",),
    "serve.trtllm.worker": ("serve.contract.errors", "serve.trtllm.release"),
    "serve.trtllm": (*RUNTIME, "serve.native.rules.reference_rules", "serve.native.rules.state"),
    "serve.transcriber": (*RUNTIME, "serve.runtime.loader", "serve.speakers"),
    # What runs inside Triton.
    "serve.triton": (*CONTRACT, "serve.wire", "serve.transcriber"),
    "serve.gateway": (
        *CONTRACT,
        "serve.wire",
        # What does not load torch: the gateway's process is small.
        "serve.speech.vad",
        "serve.speech.containers",
        "serve.speech.text",
        "serve.speech.languages",
        "serve.speech.cues",
        "serve.speech.formats",
        "serve.speech.file_types",
        "serve.speech.raw",
        "serve.speech.rate",
    ),
    # Starts Triton and the gateway; knows them by their command lines and their repository alone.
    "serve.supervisor": (*CONTRACT, "serve.wire"),
    "serve.wyoming": (*CONTRACT, "serve.speech.languages", "serve.speech.raw"),
    "serve.bulk": (
        *CONTRACT,
        "serve.speech.cues",
        "serve.speech.formats",
        "serve.speech.file_types",
        "serve.transcriber",
    ),
    "serve.cli": ("serve",),
    "serve.__main__": ("serve.cli.main",),
    "build.clips": CONTRACT,
    "build.known_checkpoints": (),
    "build.wheels": (*CONTRACT, "build.known_checkpoints"),
    "build.hub": (*CONTRACT, "build.known_checkpoints", "build.wheels"),
    "build.config": CONTRACT,
    "build.trtllm": ("serve", "build.hub", "build.checkpoint", "build.config", "build.writer"),
    "build": ("serve",),
    "eval.processes": CONTRACT,
    "eval.server": ("serve", "eval.config", "eval.processes"),
    "eval.clients": ("serve", "eval.record", "eval.server"),
    "eval.load": (*CONTRACT, "eval.processes"),
    "eval.record": (*CONTRACT, "eval.config"),
    "eval.figures": ("eval.accuracy.score",),
    "eval.report": ("eval.record",),
    "eval.random_whisper": (
        *(*CONTRACT, "serve.speech.languages", "eval.record"),
        *("build.builders", "build.checkpoint", "build.config", "build.writer"),
    ),
    "eval.config": (*CONTRACT, "build.config"),
    "eval.corpora": (*CONTRACT, *("build.clips", "eval.record", "serve.speech.file_types")),
    "eval.accuracy": (*HARNESS, "eval.corpora", "eval.figures"),
    "eval.bench": (*HARNESS, "eval.random_whisper"),
    "eval.live": (*HARNESS, "eval.accuracy", "eval.corpora"),
    "eval.long": (*HARNESS, "eval.accuracy", "eval.corpora", "eval.figures"),
    "eval.plan": (*HARNESS, "eval.bench.table"),
    "eval.profile": (*HARNESS, "eval.corpora", "eval.random_whisper"),
    "eval.soak": HARNESS,
    "eval.speakers": (*HARNESS, "eval.accuracy", "eval.long.compose"),
    "eval.trust": (*HARNESS, "eval.accuracy", "eval.corpora"),
    "eval.trtllm": (
        *HARNESS,
        *("build.builders", "build.checkpoint", "build.config", "eval.random_whisper"),
    ),
    "eval": ("serve", "build.clips", "build.config", "build.hub"),
}
# Code lines that a top folder may have; a change that needs more raises the number on purpose.
BUDGETS = {"build": 2_500, "eval": 7_720, "serve": 28_050}
# Packages that an interpreter without them must never be asked for, and who may.
ONLY_IN = {
    "onnxruntime": ("serve.speech.vad",),
    "opentelemetry": ("serve.gateway.observe",),
    "ray": ("serve.bulk",),
    "triton": ("serve.native.kernels", "serve.native.rules"),
    "tensorrt_llm": ("serve.trtllm",),
    "transformers": ("serve.contract.engine", "build", "eval"),
}
# A runtime that is not ours, by the words that give it away: its folders, and the tables that know
# every runtime, every builder, every command of eval. Nothing else imports or names it.
RUNTIMES_OF_OTHERS = {"trtllm": re.compile("trt_?llm|tensor_?rt", re.IGNORECASE)}
TEXTS = {".py", ".md", ".pbtxt", ".js", ".html", ".css", ""}
TABLES = ("serve/contract/runtimes.py", "build/builders.py", "eval/commands.py")
NEEDS_TRITON = [  # the GPU's language has to be installed to import these
    "serve.native.rules.kernel",
    "serve.native.rules.phrases_kernel",
    "serve.native.rules.search_kernel",
    *(
        f"serve.native.kernels.{name}"
        for name in ("attention", "cross", "decoder", "encoder", "launch", "linear")
    ),
]


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imports(path):
    """Full names of what a file imports; `from a import b` gives a.b."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def within(name, packages):
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def rule_of(name):
    """The package that sets a module's rule: the longest that holds it."""
    holding = [package for package in RULES if within(name, [package])]
    assert holding, f"{name}: add its package to RULES"
    return max(holding, key=len)


def forbidden_imports(path):
    """Yield what a file imports against its package's rule, or from a library of others."""
    name = name_of(path)
    package = rule_of(name) if name not in ("serve", "serve.runtime") else name
    for imported in imports(path):
        ours = imported.split(".")[0] in ("build", "serve", "eval", "tests")
        if ours and not within(imported, (package, *RULES[package])):
            yield f"{name} imports {imported}"
        for library, homes in ONLY_IN.items():
            if within(imported, [library]) and not within(name, homes):
                yield f"{name} imports {library}"


def test_packages_import_only_what_their_rule_allows():
    assert [found for path in SOURCES for found in forbidden_imports(path)] == []


def test_no_module_can_be_reached_from_itself():
    names = {name_of(path) for path in SOURCES}
    edges = {
        name_of(path): {
            found if found in names else found.rpartition(".")[0]
            for found in imports(path)
            if found.split(".")[0] in ("build", "serve", "eval")
        }
        for path in SOURCES
    }
    assert circle(edges) == []


def circle(edges):
    """What is left where no name stands at a beginning: names that need each other."""
    while free := [name for name, needed in edges.items() if not needed & edges.keys() - {name}]:
        edges = {name: needed for name, needed in edges.items() if name not in free}
    return sorted(edges)


def package_of(name):
    """The folder that a module stands in: serve.native for serve.native.runtime."""
    return ".".join(name.split(".")[:2])


def imports_of_packages():
    """What the folders of serve import of serve besides themselves."""
    edges = {}
    for path in SOURCES:
        if (name := name_of(path)).startswith("serve.") and path.parent != ROOT / "serve":
            needed = {package_of(found) for found in imports(path) if found.startswith("serve.")}
            edges.setdefault(package_of(name), set()).update(needed - {package_of(name)})
    return edges


def test_packages_of_serve_import_each_other_in_one_direction():
    """A circle of packages, even where no two modules make one."""
    assert circle(imports_of_packages()) == []


def test_the_page_on_design_says_who_imports_whom():
    edges = imports_of_packages()
    expected = {
        name.removeprefix("serve."): {one.removeprefix("serve.") for one in needed & edges.keys()}
        for name, needed in edges.items()
    }
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| folder .*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    rows = (row.strip("|").split("|") for row in table.splitlines())
    said = {row[0].strip(" `/"): set(re.findall(r"`([\w.]+)`", row[2])) for row in rows}
    assert said == expected


def test_the_root_of_serve_holds_only_packages():
    assert {path.name for path in (ROOT / "serve").glob("*.py")} == {"__init__.py", "__main__.py"}


def test_every_runtime_can_be_opened():
    """The table names what a runtime's folder holds by text, which no type checker follows."""
    assert RUNTIMES.keys() == set(get_args(RuntimeName))
    methods = [name for name, member in vars(Runtime).items() if inspect.isfunction(member)]
    for row in RUNTIMES.values():
        start = pkgutil.resolve_name(row.open)
        signature = inspect.signature(start)
        taken = [parameter.annotation for parameter in signature.parameters.values()]
        assert taken == [Engine, RuntimeConfig]
        made = start if inspect.isclass(start) else signature.return_annotation
        assert [method for method in methods if not hasattr(made, method)] == []
        keys = {field.name for field in dataclasses.fields(RuntimeConfig)}
        assert set(row.reads or SECTIONS) <= keys
    assert BUILDERS.keys() == RUNTIMES.keys()


@pytest.mark.parametrize("folder", RUNTIMES_OF_OTHERS)
def test_only_its_folders_and_the_tables_name_a_runtime_of_others(folder):
    words, homes = RUNTIMES_OF_OTHERS[folder], [f"{top}/{folder}/" for top in TOPS]
    assert all((ROOT / home).is_dir() for home in homes)
    for path in (path for top in TOPS for path in (ROOT / top).rglob("*") if path.is_file()):
        name = path.relative_to(ROOT).as_posix()
        if name in TABLES or name.startswith(tuple(homes)) or path.suffix not in TEXTS:
            continue
        assert not words.search(name), name
        found = words.search(path.read_text(encoding="utf-8"))
        assert not found, f"{name} says {found[0]}"


def test_files_stay_readable():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {name_of(path): length for path, length in lengths.items() if length > 600} == {}


def code_lines(path):
    """Count lines that hold code: no docstrings, comments or blank lines."""
    text = path.read_text(encoding="utf-8")
    lines = {
        i for i, line in enumerate(text.splitlines(), 1) if line.strip() and line.strip()[0] != "#"
    }
    for node in ast.walk(ast.parse(text)):
        constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if constant and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


@pytest.mark.parametrize("top", BUDGETS)
def test_a_folder_stays_within_its_budget_of_code(top):
    found = sum(code_lines(path) for path in (ROOT / top).rglob("*.py"))
    assert found <= BUDGETS[top], f"{top} has {found:,} code lines; its budget is {BUDGETS[top]:,}"


def test_an_evaluation_sees_the_gateway_from_outside():
    """But for live text: its sessions run under a simulated clock in `eval.live`."""
    seen = {
        name_of(path): found
        for path in (ROOT / "eval").rglob("*.py")
        for found in imports(path)
        if within(found, ["serve.gateway"])
    }
    assert seen.keys() <= {"eval.live"}


@pytest.mark.nightly
def test_importing_does_no_work():
    names = [name_of(p) for p in MODULES if p.stem != "__main__" and name_of(p) not in NEEDS_TRITON]
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


def test_no_test_tells_everybody_the_time():
    """`module.time.monotonic` is the whole process's clock, and of servers that tests share."""
    patched = re.compile(r"""setattr\(\s*["'][\w.]+\.time\.(monotonic|time)["']""")
    tests = (ROOT / "tests").rglob("test_*.py")
    assert [path.name for path in tests if patched.search(path.read_text("utf-8"))] == []


def test_no_folder_of_tests_is_left_out(pytestconfig):
    left_out = pytestconfig.getini("norecursedirs")
    tests = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")]
    folders = {part for path in tests for part in path.parts[:-1]}
    assert not [one for one in folders for pattern in left_out if fnmatch.fnmatch(one, pattern)]
