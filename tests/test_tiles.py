"""The matrix unit: where it may be used, and that whoever else uses it on the same thread is no trouble."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import softlookup as sl
from agreement import compare, on
from cases import Shape, arrays
from softlookup import _core

AMX = "x86_64_v4_amx"


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="reads /proc/cpuinfo")
def test_usable_where_cpu_and_system_say_so() -> None:
    flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split()
    # Linux lists the tiles only where it saves them.
    has_tiles = {"amx_tile", "amx_bf16", "avx512_bf16", "avx512_vnni"} <= set(flags)
    assert (AMX in _core.isas()) == (has_tiles and AMX in _core.compiled_isas())


def test_best_where_usable() -> None:
    if AMX not in _core.isas():
        pytest.skip("this CPU, system or build has no tiles")
    assert _core.isas()[-1] == AMX


def product_of_torch() -> None:
    torch = pytest.importorskip("torch")
    torch.ones((64, 64), dtype=torch.bfloat16) @ torch.ones((64, 64), dtype=torch.bfloat16)


def lookup_of_another_shape() -> None:
    q, k, v = arrays(Shape(3, 5, key_width=7, value_width=9), "bfloat16")
    sl.attention(q, k, v, threads=1)


@pytest.mark.parametrize("other", [lookup_of_another_shape, product_of_torch])
def test_a_predicate_may_use_tiles_of_its_own(other: Any, isa: str) -> None:
    q, k, v = arrays(Shape(100, 1100, heads=2, key_heads=1, key_width=40, value_width=72), "bfloat16")

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        other()
        return j <= i

    with on(isa):
        expected = sl.attention(q, k, v, mask=sl.Causal(), q_start=1000, threads=1)
        found = sl.attention(q, k, v, mask=sl.Predicate(causal), q_start=1000, threads=1)
    np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("scale", [1.0, 0.125, 2.0**-16, 2.0**-17, 2.0, 0.3, -0.125, 0.0])
def test_scales(scale: float, type_name: str, isa: str) -> None:
    """A power of two may multiply the queries instead of the scores."""
    compare(*arrays(Shape(37, 200, key_width=40, value_width=33), type_name), isa=isa, scale=scale)
