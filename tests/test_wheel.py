"""The wheel holds all that is needed: it installs and runs where there is no compiler and nothing to build with."""

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest

from wheel_build import build_wheel

WORKED_LOOKUP = """
import sys
import numpy as np
import softlookup as sl
assert sl.__file__.startswith(sys.prefix), sl.__file__
q = np.array([[2, 1]], np.float32)
k = np.array([[1, 0], [0, 2], [2, 2], [-1, 1]], np.float32)
v = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]], np.float32)
print(*(f"{number:.5f}" for number in sl.attention(q, k, v)[0]))
"""
BUILD_TOOLS = ["c++", "cc", "clang", "clang++", "cmake", "g++", "gcc", "ld", "make", "ninja"]


def numpy_entries() -> list[Path]:
    """What makes up the installed NumPy: its package, its libraries and its metadata."""
    site_packages = Path(np.__file__).parents[1]
    return [
        path for path in site_packages.iterdir() if path.name == "numpy" or path.name.startswith(("numpy-", "numpy."))
    ]


@pytest.fixture(scope="module")
def bare_environment(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A fresh environment with pip and NumPy (linked, not downloaded): its Python, and variables with no other PATH."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=True, symlinks=True)
    (site_packages,) = folder.glob("lib/python3*/site-packages")
    for entry in numpy_entries():
        (site_packages / entry.name).symlink_to(entry)
    return folder / "bin" / "python", {"PATH": str(folder / "bin"), "HOME": str(folder)}


def run(command: list[str], environment: dict[str, str], cwd: Path) -> str:
    result = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_wheel_runs_without_a_compiler(bare_environment: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    python, environment = bare_environment
    assert [tool for tool in BUILD_TOOLS if shutil.which(tool, path=environment["PATH"])] == []

    run([str(python), "-m", "pip", "install", "--no-index", str(build_wheel())], environment, tmp_path)
    run([str(python), "-m", "pip", "check"], environment, tmp_path)

    assert run([str(python), "-c", WORKED_LOOKUP], environment, tmp_path) == "0.05882 0.05882 0.89495\n"


def test_wheel_holds_the_module_its_types_and_its_licence() -> None:
    names = set(zipfile.ZipFile(build_wheel()).namelist())

    assert {"softlookup/__init__.py", "softlookup/_core.pyi", "softlookup/py.typed"} <= names
    assert any(name.startswith("softlookup/_core.") and name.endswith((".so", ".pyd")) for name in names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert [name for name in names if name.endswith((".cpp", ".h", ".o", ".a"))] == []


def test_tests_see_the_installed_wheel() -> None:
    import softlookup

    assert Path(sys.prefix) in Path(softlookup.__file__).parents
