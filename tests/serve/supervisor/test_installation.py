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
    monkeypatch.setattr(installation_module, "_IMAGE", tmp_path / "opt")
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


def test_its_libraries_and_this_python_come_first(image, wheel, folder, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/some/libraries")
    monkeypatch.setenv("PATH", "/some/bin")
    monkeypatch.setenv("EARSHOT_TEST", "kept")
    monkeypatch.setattr(installation_module, "_libpython_folder", lambda: "/libpython")
    environment = find_installation(folder).environment()
    libraries = str(wheel.parent.parent / "nvidia_pytriton.libs")
    assert environment["LD_LIBRARY_PATH"].split(":") == [libraries, "/libpython", "/some/libraries"]
    assert environment["PATH"].split(":") == [str(Path(sys.executable).parent), "/some/bin"]
    assert environment["EARSHOT_TEST"] == "kept"
    assert environment["EARSHOT_LD_LIBRARY_PATH"] == "/some/libraries"
    monkeypatch.delenv("LD_LIBRARY_PATH")
    environment = find_installation(folder / "another").environment()
    assert environment["LD_LIBRARY_PATH"].split(":") == [libraries, "/libpython"]


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


class TestLibpython:
    NAME = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"

    @pytest.fixture
    def library_folder(self, tmp_path, monkeypatch):
        sysconfig = installation_module.sysconfig
        monkeypatch.setattr(sysconfig, "get_config_var", lambda name: str(tmp_path))
        return tmp_path

    @pytest.fixture
    def loader(self, monkeypatch):
        """What the dynamic loader finds by itself: at first nothing."""
        found = {}
        monkeypatch.setattr(installation_module.ctypes.util, "find_library", found.get)
        return found

    def test_it_is_named_where_python_was_installed(self, library_folder, loader):
        (library_folder / self.NAME).touch()
        assert installation_module._libpython_folder() == str(library_folder)

    def test_the_loader_may_know_it(self, library_folder, loader):
        loader[self.NAME.removeprefix("lib").removesuffix(".so.1.0")] = "libpython.so"
        assert installation_module._libpython_folder() == ""

    def test_a_python_without_it_is_refused(self, library_folder, loader):
        with pytest.raises(UnavailableError, match=rf"{self.NAME} was not found"):
            installation_module._libpython_folder()
