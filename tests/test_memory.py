"""Peak memory, measured in processes of their own: O(N) beside inputs and outputs, whatever N x M is."""

from __future__ import annotations

import sys

import pytest

import softlookup as sl
from softlookup.bench.memory import extra_bytes

pytestmark = pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="reads the peak of a process")

MIB = 2**20
ROWS = 32768  # N x M float32 weights would be 4 GiB
SLACK = 4 * MIB  # what the allocator and the threads keep, whatever N


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_extra_memory_is_small_and_flat_per_row(backward: bool) -> None:
    if backward and not hasattr(sl, "attention_vjp"):
        pytest.skip("this version has no attention_vjp")
    isa = str(sl.info()["isa"])
    half, whole = (
        extra_bytes(rows, 64, threads=sl.get_threads(), isa=isa, backward=backward) for rows in (ROWS // 2, ROWS)
    )
    assert whole < 64 * MIB, (half, whole)
    assert whole <= 2 * half + SLACK, (half, whole)


def test_a_failing_run_says_why() -> None:
    with pytest.raises(RuntimeError, match="z80"):
        extra_bytes(64, 8, threads=1, isa="z80")
