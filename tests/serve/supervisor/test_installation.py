"""What is looked for before a server starts, and what is said when it is not there."""

import os
import sys
from pathlib import Path

import pytest

from serve.contract.errors import UnavailableError
from serve.supervisor import installation as installation_module
from serve.supervisor.installation import find_installation


@pytest.fixture
def image(tmp_path, monkeypatch):
    """A folder that stands for /opt/tritonserver; empty, so there is no image."""
    monkeypatch.setattr(installation_module, "IMAGE", tmp_path / "opt")
    return tmp_path / "opt"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel that has everything."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    package = tmp_path / "site-packages" / "pytriton"
    server = package / "tritonserver"
    for name in (
        "bin/tritonserver",
        "backends/python/libtriton_python.so",
        "backends/python/triton_python_backend_utils.py",
        f"python_backend_stubs/{version}/triton_python_backend_stub",
    ):
        path = server / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "pytriton", raising=False)
    return server


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def library(tmp_path, monkeypatch):
    """The place of libpython as Python was built; it is not there, and the loader knows none."""
    folder = str(tmp_path / "lib")
    monkeypatch.setattr(installation_module.sysconfig, "get_config_var", lambda name: folder)
    monkeypatch.setattr(installation_module.ctypes.util, "find_library", lambda name: None)
    (tmp_path / "lib").mkdir()
    return tmp_path / "lib" / f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"


def test_the_wheels_server_gets_a_backend_folder_of_the_run_s_own(image, wheel, folder):
    found = find_installation(folder)
    assert found.binary == wheel / "bin" / "tritonserver"
    assert found.backends == folder / "backends"
    backend = found.backends / "python"
    assert {path.name for path in backend.iterdir()} == {
        "libtriton_python.so",
        "triton_python_backend_utils.py",
        "triton_python_backend_stub",
    }
    assert all(wheel in path.resolve().parents for path in backend.iterdir())


def test_its_libraries_and_this_python_come_first(image, wheel, library, folder, monkeypatch):
    library.touch()
    own = folder / "libpython"
    monkeypatch.setenv("LD_LIBRARY_PATH", "/some/libraries")
    monkeypatch.setenv("PATH", "/some/bin")
    monkeypatch.setenv("EARSHOT_TEST", "kept")
    environment = find_installation(folder).environment()
    libraries = str(wheel.parent.parent / "nvidia_pytriton.libs")
    assert environment["LD_LIBRARY_PATH"].split(":") == [libraries, str(own), "/some/libraries"]
    assert [path.resolve() for path in own.iterdir()] == [library]  # no other system library
    assert environment["PATH"].split(":") == [str(Path(sys.executable).parent), "/some/bin"]
    assert environment["EARSHOT_TEST"] == "kept"
    assert environment["EARSHOT_LD_LIBRARY_PATH"] == "/some/libraries"
    monkeypatch.delenv("LD_LIBRARY_PATH")
    environment = find_installation(folder / "another").environment()
    assert environment["LD_LIBRARY_PATH"].split(":") == [
        libraries,
        str(folder / "another" / "libpython"),
    ]


def test_an_image_needs_nothing(image, folder):
    (image / "bin").mkdir(parents=True)
    (image / "bin" / "tritonserver").touch()
    found = find_installation(folder)
    assert (found.binary, found.backends) == (image / "bin" / "tritonserver", image / "backends")
    assert found.environment()["LD_LIBRARY_PATH"] == os.environ.get("LD_LIBRARY_PATH", "")
    assert not folder.exists()


def test_a_missing_wheel_is_said_with_what_to_do(image, folder, monkeypatch):
    monkeypatch.setattr(installation_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"nvidia-pytriton is missing; .*requirements\.txt"):
        find_installation(folder)


def test_a_wheel_without_a_stub_for_this_python_is_refused(image, wheel, folder):
    (stub,) = wheel.glob("python_backend_stubs/*/triton_python_backend_stub")
    stub.unlink()
    with pytest.raises(
        UnavailableError, match=rf"{stub} is missing; .*for Python {stub.parent.name}"
    ):
        find_installation(folder)


def test_libpython_is_left_to_the_loader_where_that_knows_it(
    image, wheel, library, folder, monkeypatch
):
    monkeypatch.setattr(installation_module.ctypes.util, "find_library", lambda name: f"{name}.so")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    libraries = str(wheel.parent.parent / "nvidia_pytriton.libs")
    assert find_installation(folder).environment()["LD_LIBRARY_PATH"] == libraries


def test_a_python_without_its_library_is_refused(image, wheel, library, folder):
    with pytest.raises(UnavailableError, match=rf"{library.name} was not found"):
        find_installation(folder)
