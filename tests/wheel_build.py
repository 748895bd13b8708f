"""Builds the wheel of this checkout, once in a test run, for the tests of what is in it.

The build requirements are those of the environment that the tests run in, and nothing is downloaded. The objects that
it leaves in the build folder are kept from run to run, so that an unchanged checkout is built in seconds.
"""

import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def build_wheel() -> Path:
    """Return the path of the wheel of this checkout."""
    pytest.importorskip("scikit_build_core", reason="the build requirements come with softlookup[test]")
    folder = ROOT / "build" / "test-wheel"
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--wheel-dir", str(folder)]
    command += ["--no-deps", "--no-build-isolation", "--no-index"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    (wheel,) = folder.glob("softlookup-*.whl")
    return wheel


def instruction_set_objects() -> dict[str, list[Path]]:
    """Return the object files of each instruction set that was compiled, by the set's name."""
    wheel_tag = build_wheel().stem.split("-", 2)[2]
    prefix = "softlookup_isa_"
    folders = (ROOT / "build" / wheel_tag / "CMakeFiles").glob(f"{prefix}*.dir")
    return {folder.stem.removeprefix(prefix): sorted(folder.rglob("*.cpp.o")) for folder in folders}
