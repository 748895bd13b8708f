"""What `softlookup.machine` measures, one class a kind of limit, and what is doubtful about a measurement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from softlookup._limits import HUGE_PAGE_BYTES

AGREEMENT = 0.05  # how far two unrolls may differ
MOST_PER_CYCLE = 4.2  # no CPU starts more than four vector multiply-adds in a cycle
LEAST_PER_CYCLE = 0.2
LEAST_TILES_PER_CYCLE = 0.02  # a product of tiles keeps its unit busy for 16 cycles
LEAST_GAIN = 0.8  # of a second core


def spread(first: float, second: float) -> float:
    """By how much two positive numbers differ, as a share of the larger one."""
    return abs(first - second) / max(first, second)


@dataclass(frozen=True, slots=True)
class Peak:
    """The most multiply-adds that an instruction set does.

    Attributes
    ----------
    kind
        "fma_float32" and "fma_float64" (a product and a sum where the set has no fused multiply-add), "dot_bfloat16"
        (vdpbf16ps), "dot_int8" (vpdpbusd), "dot_int16" (vpdpwssd), "tile_bfloat16" (tdpbf16ps, 16 rows at a time).
    isa, threads
        Instruction set, and the number of threads that ran at once.
    unrolls
        Independent chains in each of the two loops.
    rates_gflops
        Speed of each loop, 10^9 operations per second, integer ones too.
    per_cycle
        Instructions per cycle and thread, by the faster loop and the measured clock.
    """

    kind: str
    isa: str
    threads: int
    unrolls: tuple[int, int]
    rates_gflops: tuple[float, float]
    per_cycle: float

    @property
    def gflops(self) -> float:
        """The faster of the two loops."""
        return max(self.rates_gflops)

    @property
    def spread(self) -> float:
        """By how much the two loops differ, as a share of the faster one."""
        return spread(*self.rates_gflops)


@dataclass(frozen=True, slots=True)
class ExpCost:
    """What one score costs in the exponential of the softmax (`exp_nonpositive` in core/elementary.h).

    Attributes
    ----------
    type, isa, threads
        "float32" or "float64"; instruction set; threads that ran at once.
    unrolls
        Vectors in flight in each of the two loops.
    costs_ns
        Nanoseconds per score of all threads together, by each loop.
    """

    type: str
    isa: str
    threads: int
    unrolls: tuple[int, int]
    costs_ns: tuple[float, float]

    @property
    def ns(self) -> float:
        """The cheaper of the two loops."""
        return min(self.costs_ns)

    @property
    def spread(self) -> float:
        """By how much the two loops differ, as a share of the dearer one."""
        return spread(*self.costs_ns)


@dataclass(frozen=True, slots=True)
class ReadRate:
    """How fast memory is read from end to end, each thread its own part.

    Attributes
    ----------
    page_bytes
        Size of the pages asked for.
    huge_share
        Share of the buffer that the system did put on huge pages.
    buffer_bytes
        Size of the buffer. One that fits into a cache shows the cache.
    threads, unrolls
        Threads that read at once, and vectors in flight in each of the two loops.
    rates_gbs
        10^9 bytes per second, by each loop.
    """

    page_bytes: int
    huge_share: float
    buffer_bytes: int
    threads: int
    unrolls: tuple[int, int]
    rates_gbs: tuple[float, float]

    @property
    def gbs(self) -> float:
        """The faster of the two loops."""
        return max(self.rates_gbs)

    @property
    def spread(self) -> float:
        """By how much the two loops differ, as a share of the faster one."""
        return spread(*self.rates_gbs)


def doubts_of(
    clocks_ghz: tuple[float, float],
    peaks: Sequence[Peak],
    exponentials: Sequence[ExpCost],
    reads: Sequence[ReadRate],
) -> Iterator[str]:
    """One line for everything that does not fit together."""
    yield from _disagreement("clock", "GHz", clocks_ghz)
    for peak in peaks:
        name = f"{peak.kind} {peak.isa} x {peak.threads}"
        yield from _disagreement(name, "GFLOP/s", peak.rates_gflops)
        least = LEAST_TILES_PER_CYCLE if peak.kind.startswith("tile_") else LEAST_PER_CYCLE
        if not least <= peak.per_cycle <= MOST_PER_CYCLE:
            yield f"{name}: {peak.per_cycle:.2f} instructions per cycle and thread are not plausible"
        alone = next((p for p in peaks if (p.kind, p.isa, p.threads) == (peak.kind, peak.isa, 1)), peak)
        gain = peak.gflops / alone.gflops / peak.threads
        if gain < LEAST_GAIN:
            yield f"{name}: {gain:.2f} of {peak.threads} times one thread: shared cores, or other work on them"
    for cost in exponentials:
        yield from _disagreement(f"exp_{cost.type} {cost.isa} x {cost.threads}", "ns", cost.costs_ns)
    for read in reads:
        name = f"read {read.page_bytes} B pages x {read.threads}"
        yield from _disagreement(name, "GB/s", read.rates_gbs)
        if read.page_bytes >= HUGE_PAGE_BYTES and read.huge_share < 0.9:
            yield f"{name}: only {read.huge_share:.0%} of the buffer stands on huge pages"


def _disagreement(name: str, unit: str, values: tuple[float, float]) -> Iterator[str]:
    difference = spread(*values)
    if difference > AGREEMENT:
        yield f"{name}: two unrolls differ by {difference:.0%} ({values[0]:.4g} and {values[1]:.4g} {unit})"
