"""The loops that measure peaks, as machine code: nothing but the operation that they measure, and nothing spilled."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from softlookup import _core

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or shutil.which("objdump") is None,
    reason="reads x86-64 instructions with objdump",
)

Code = list[tuple[int, str, str]]

NAMES = {
    "MultiplyAddIf": r"vfmadd\d+ps|mulps",
    "MultiplyAddId": r"vfmadd\d+pd|mulpd",
    "DotBfloat16": r"vdpbf16ps",
    "DotInt8": r"vpdpbusd",
    "DotInt16": r"vpdpwssd",
}


def functions(part: str) -> dict[str, Code]:
    """Address, mnemonic and operands of every instruction, for the functions whose mangled name contains `part`."""
    command = ["objdump", "--disassemble", "--no-show-raw-insn", str(Path(_core.__file__))]
    found: dict[str, Code] = {}
    name = ""
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if header := re.match(r"[0-9a-f]+ <(.+)>:$", line):
            name = header[1]
        elif part in name and (code := re.match(r"\s+([0-9a-f]+):\t(\S+)\s*(.*)", line)):
            found.setdefault(name, []).append((int(code[1], 16), code[2], code[3]))
    return found


def loop_of(code: Code, pattern: str) -> Code:
    """The shortest stretch, from the target of a backward jump to the jump, that holds the operation."""
    loops = []
    for address, mnemonic, operands in code:
        target = re.match(r"([0-9a-f]+)", operands)
        if mnemonic.startswith("j") and target and int(target[1], 16) <= address:
            body = [line for line in code if int(target[1], 16) <= line[0] <= address]
            if any(re.fullmatch(pattern, line[1]) for line in body):
                loops.append(body)
    return min(loops, key=len)


def test_peaks_stay_in_tiles() -> None:
    found = functions("multiply_in_tiles")
    assert len(found) == 2 * ("x86_64_v4_amx" in _core.compiled_isas())
    for name, code in found.items():
        body = loop_of(code, "tdpbf16ps")
        chains = int(re.search(r"multiply_in_tilesILi(\d+)E", name)[1])  # type: ignore[index]
        assert [mnemonic for _, mnemonic, _ in body].count("tdpbf16ps") in (chains, 2 * chains), name
        assert [line for line in body if "(" in line[2]] == [], name


def test_peaks_stay_in_registers() -> None:
    found = functions("multiply_and_add")
    assert len(found) >= 4 * len(_core.compiled_isas())
    for name, code in found.items():
        pattern = next(operation for kind, operation in NAMES.items() if kind in name)
        body = loop_of(code, pattern)
        chains = int(re.search(r"Li(\d+)EEE", name)[1])  # type: ignore[index]
        counts = Counter(bool(re.fullmatch(pattern, mnemonic)) for _, mnemonic, _ in body)
        assert counts[True] in (chains, 2 * chains), (name, counts)
        assert [line for line in body if "(" in line[2]] == [], name
        operation = f"({pattern})|add[ps][sd]"
        vectors = [line for line in body if "mm" in line[2] and not re.fullmatch(operation, line[1])]
        assert vectors == [], name
