"""Code of one instruction set must never run where another was chosen.

The linker keeps one copy of an inline function that several objects share. Compiled for AVX-512 and kept for all, such
a copy stops an older CPU with an illegal instruction. So everything in an object of an instruction set is local, in an
anonymous namespace inside the set's own, but for one table of function pointers; and in the finished module the
functions of each set hold nothing above it, and everything else holds nothing above the platform's baseline.
"""

import functools
import platform
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from softlookup import _core
from wheel_build import instruction_set_objects

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("nm") is None or shutil.which("objdump") is None,
    reason="reads ELF files with nm and objdump",
)
x86_only = pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86-64 instructions")

ISAS = _core.compiled_isas()
OUTSIDE = "outside"

VECTOR = re.compile(r"%[xyz]mm")
YMM = re.compile(r"%ymm")
ZMM = re.compile(r"%zmm")
# AVX-512's mask registers, and the sixteen vector registers that only it can name.
AVX512 = re.compile(r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01])")
BIT_MANIPULATION = re.compile(
    r"(andn|bextr|blsi|blsmsk|blsr|bzhi|lzcnt|movbe|mulx|pdep|pext|popcnt|rorx|sarx|shlx|shrx)[lq]?$"
)
SSE3_AND_4 = re.compile(
    r"p?blend|dpp[ds]|extractps|h(add|sub)p[sd]|insertps|pabs|palignr|pcmp(eq|gt)q|pextr[bdq]|phadd|pinsr[bdq]|"
    r"pm(ax|in)(s[bd]|u[dw])|pmov[sz]x|pmulld|pshufb|ptest|round[ps][sd]"
)
AMX = re.compile(r"(ldtilecfg|sttilecfg|tile\w+|tdp\w+)$")
BF16_AND_VNNI = re.compile(r"(vdpbf16ps|vcvtne2ps2bf16|vcvtneps2bf16|vpdpbusds?|vpdpwssds?)")


def above_baseline(mnemonic: str, operands: str) -> bool:
    is_vex = mnemonic.startswith("v") and (VECTOR.search(operands) or mnemonic.startswith("vzero"))
    newer = BIT_MANIPULATION.match(mnemonic) or SSE3_AND_4.match(mnemonic)
    return bool(is_vex or newer or AVX512.search(operands) or AMX.match(mnemonic))


def above_v3(mnemonic: str, operands: str) -> bool:
    return bool(AVX512.search(operands) or AMX.match(mnemonic))


def above_v4(mnemonic: str, operands: str) -> bool:
    return bool(BF16_AND_VNNI.match(mnemonic)) or above_v4_bf16(mnemonic, operands)


def above_v4_bf16(mnemonic: str, operands: str) -> bool:
    return bool(AMX.match(mnemonic))


ABOVE = {
    OUTSIDE: above_baseline,
    "x86_64": above_baseline,
    "x86_64_v3": above_v3,
    "x86_64_v4": above_v4,
    "x86_64_v4_bf16": above_v4_bf16,
}


def local_name(isa: str) -> str:
    """What the mangled name of everything in `softlookup::isa::(anonymous namespace)` contains."""
    return f"10softlookup{len(isa)}{isa}12_GLOBAL__N_1"


def set_of(symbol: str) -> str:
    """The instruction set that a function of the module was compiled for."""
    return next((isa for isa in ISAS if local_name(isa) in symbol), OUTSIDE)


def defined_symbols(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the kind letter and the mangled name of each symbol that a file defines."""
    listing = subprocess.run(["nm", "--defined-only", str(path)], capture_output=True, text=True, check=True).stdout
    for line in listing.splitlines():
        _, kind, name = line.split(maxsplit=2)
        yield kind, name


@functools.cache
def instructions() -> dict[str, list[tuple[str, str, str]]]:
    """Function, mnemonic and operands of every instruction of the installed module, by instruction set."""
    command = ["objdump", "--disassemble", "--no-show-raw-insn", _core.__file__]
    found = defaultdict(list)
    function = ""
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if header := re.match(r"[0-9a-f]+ <(.+)>:$", line):
            function = header[1]
        elif code := re.match(r"\s+[0-9a-f]+:\t(\S+)\s*(.*)", line):
            found[set_of(function)].append((function, code[1], code[2]))
    return found


@pytest.mark.parametrize("isa", ISAS)
def test_each_object_shares_only_its_table(isa: str) -> None:
    for path in instruction_set_objects()[isa]:
        symbols = list(defined_symbols(path))

        shared = [name for kind, name in symbols if kind.isupper() or kind in "uvw"]
        assert len(shared) == 1, (path.name, shared)
        assert shared[0].startswith(f"_ZN10softlookup{len(isa)}{isa}"), (path.name, shared)

        functions = [name for kind, name in symbols if kind == "t"]
        assert functions, path.name
        assert [name for name in functions if local_name(isa) not in name] == [], path.name


def test_every_compiled_set_has_the_same_objects() -> None:
    objects = instruction_set_objects()
    assert sorted(objects) == sorted(ISAS)

    names = {isa: [path.name for path in paths] for isa, paths in objects.items()}
    assert all(names[isa] == names[ISAS[0]] != [] for isa in ISAS), names


@pytest.mark.parametrize("isa", ISAS)
def test_functions_of_every_set_can_be_told_apart(isa: str) -> None:
    functions = {name for kind, name in defined_symbols(Path(_core.__file__)) if kind in "tT"}

    assert [name for name in functions if set_of(name) == isa]


@x86_only
@pytest.mark.parametrize("isa", ABOVE)
def test_functions_hold_nothing_above_their_set(isa: str) -> None:
    found = instructions()[isa]
    assert len(found) > 100

    leaks = [code for code in found if ABOVE[isa](code[1], code[2])]
    assert leaks[:10] == []


@x86_only
def test_each_set_uses_what_it_is_for() -> None:
    """Shows that the patterns above find what they look for."""
    found = instructions()

    assert any(YMM.search(operands) for _, _, operands in found["x86_64_v3"])
    assert any(ZMM.search(operands) for _, _, operands in found["x86_64_v4"])
    assert any(BF16_AND_VNNI.match(mnemonic) for _, mnemonic, _ in found["x86_64_v4_bf16"])
    if "x86_64_v4_amx" in ISAS:
        assert any(AMX.match(mnemonic) for _, mnemonic, _ in found["x86_64_v4_amx"])
