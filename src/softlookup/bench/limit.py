"""The least time that a workload can take on this machine, measured beside the contenders in the same run.

    max(bytes / bandwidth, operations / peak + scores x cost of one exponential)    decoding
    operations / peak                                                               everything else

The bandwidth is that of reading the workload's own keys and values, on the pages where they stand, in the part of the
memory that the caches hold or do not hold. The peak is that of the instruction set in use: the better of the fused
multiply-add and, for bfloat16, the bfloat16 dot product and the product of matrix tiles; for a cache of codes the dot
product of integers that its kernel uses. Each of these is measured in two unrolls, which must agree.

A limit is measured as a contender is. Its sample in a round lasts about as long as our call beside it (at most
MOST_SECONDS in each loop) and counts all of that time, so that a machine whose neighbours take cycles takes them from
both alike; the figure is the median over the rounds. The most that the machine does between two interruptions, which
no call of that length can reach, is what `softlookup.machine` tells.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softlookup import _limits
from softlookup._limits import Loop
from softlookup._machine_parts import AGREEMENT, spread
from softlookup.bench.workloads import Workload

LEAST_SECONDS = 5e-3
MOST_SECONDS = 0.1
PRODUCTS_OF_CODES = {"int8": "dot_int16", "int4": "dot_int8"}
"""By the type of a cache, the loop that its kernel's products are limited by."""

Pair = tuple[float, float]


def _words(array: NDArray[Any]) -> NDArray[np.uint32]:
    """A contiguous array as 32-bit words; what is left over at its end is left out."""
    octets = array.reshape(-1).view(np.uint8)
    return octets[: octets.size // 4 * 4].view(np.uint32)


class LimitSampler:
    """Seconds that a lookup takes at the limits, measured anew by every call; `arrays` are the keys and values read."""

    def __init__(self, workload: Workload, arrays: Sequence[NDArray[Any]], isa: str, threads: int) -> None:
        self.seconds = LEAST_SECONDS
        self._workload = workload
        self._isa = isa
        self._threads = threads
        self._measured: dict[str, list[Pair]] = {}
        loops = _limits.loops_of(isa)
        wide = "float64" if workload.dtype == "float64" else "float32"
        self._peaks = {f"fma_{wide}_gflops": loops[f"fma_{wide}"]}
        if workload.dtype == "bfloat16":
            kinds = ("dot_bfloat16", "tile_bfloat16")
            self._peaks |= {f"{kind}_gflops": loops[kind] for kind in kinds if kind in loops}
        self._exponential = loops[f"exp_{wide}"]
        self._dots: dict[str, tuple[Loop, Loop]] = {}
        if workload.kind == "decode" and workload.dtype == "float32":
            self._dots = {kind: loops[kind] for kind in PRODUCTS_OF_CODES.values() if kind in loops}
        self._streams: list[tuple[NDArray[np.uint32], int]] = []
        if workload.kind == "decode":
            self._streams = [(words, _limits.total_of(words)) for words in map(_words, arrays)]

    def last(self, seconds: float) -> None:
        """Make a sample as long as the call that it is set beside."""
        self.seconds = min(max(seconds, LEAST_SECONDS), MOST_SECONDS)

    def __call__(self) -> float:
        peak = max(self._rate(name, pair) for name, pair in self._peaks.items())
        if self._workload.kind != "decode":
            return self._workload.operations / (peak * 1e9)
        exponentials = self._rate("exp_gscores", self._exponential)
        for kind, pair in self._dots.items():
            self._rate(f"{kind}_gflops", pair)
        return self._decoding(self._workload.cache_bytes, peak, exponentials, self._bandwidth())

    def seconds_of_codes(self, dtype: str, cache_bytes: int) -> float | None:
        """The same limit for a cache of int8 or int4; None where the instruction set has no loop of its products."""
        rates = self.medians()
        peak = f"{PRODUCTS_OF_CODES[dtype]}_gflops"
        if peak not in rates:
            return None
        return self._decoding(cache_bytes, rates[peak], rates["exp_gscores"], rates["read_gbs"])

    def _decoding(self, cache_bytes: int, peak: float, exponentials: float, bandwidth: float) -> float:
        """Seconds of decoding at rates in GFLOP/s, Gscores/s and GB/s."""
        arithmetic = self._workload.operations / peak + self._workload.pairs / exponentials
        return max(cache_bytes / bandwidth, arithmetic) / 1e9

    def medians(self) -> dict[str, float]:
        """What was measured, by names with units; the median of the calls."""
        return {name: statistics.median(map(max, pairs)) for name, pairs in self._measured.items()}

    def doubts(self) -> list[str]:
        """Where the two unrolls differ by more than 5 %, each by the best of all calls."""
        best = {name: tuple(map(max, zip(*pairs, strict=True))) for name, pairs in self._measured.items()}
        gaps = {name: spread(first, second) for name, (first, second) in best.items()}
        return [f"{name}: two unrolls differ by {gap:.0%}" for name, gap in gaps.items() if gap > AGREEMENT]

    def _rate(self, name: str, loops: tuple[Loop, Loop]) -> float:
        first, second = (_limits.lasting_loop_rate(loop, self._threads, self.seconds) / 1e9 for loop in loops)
        return self._kept(name, (first, second))

    def _bandwidth(self) -> float:
        """K and V in turn, as a decoding step reads them."""
        first, second = (
            _limits.lasting_read_rate(self._streams, self._threads, self.seconds, isa=self._isa, which=which) / 1e9
            for which in (0, 1)
        )
        return self._kept("read_gbs", (first, second))

    def _kept(self, name: str, pair: Pair) -> float:
        self._measured.setdefault(name, []).append(pair)
        return max(pair)
