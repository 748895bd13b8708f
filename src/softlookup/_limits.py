"""One limit of the machine at a time: runs of the core's limit loops, and reads of memory.

Two questions, two measures. What can this machine do at its best? A run is kept short, so that one of many falls
between two interruptions, and the best of them is the limit (`loop_rate`, `read_rate`). What could a call have done
that lasted as long as this, interruptions included? All runs of that time count together (`lasting_loop_rate`,
`lasting_read_rate`). A loop's end is checked in every run: one that the compiler had dropped or shortened would raise
an error here.
"""

from __future__ import annotations

import math
import mmap
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softlookup import _core

SMALL_PAGE_BYTES = mmap.PAGESIZE
HUGE_PAGE_BYTES = 2 * 2**20

RUN_SECONDS = 5e-4  # as long as a run of a loop is made
LATE_RUNS = 5  # runs without all threads at once before they are given up

Words = NDArray[np.uint32]


class MeasurementProblem(RuntimeError):
    """Nothing could be measured, or what was measured is wrong."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A limit loop of one instruction set; `operations` of one round of `unroll` chains."""

    isa: str
    index: int
    kind: str
    unroll: int
    operations: int


def loops_of(isa: str) -> dict[str, tuple[Loop, Loop]]:
    """The two unrolls of every kind of loop that an instruction set has."""
    found: dict[str, list[Loop]] = {}
    for index, (kind, unroll, operations) in enumerate(_core.limit_loops(isa)):
        found.setdefault(kind, []).append(Loop(isa, index, kind, unroll, operations))
    return {kind: (first, second) for kind, (first, second) in found.items()}


def loop_rate(loop: Loop, threads: int, seconds: float) -> float:
    """Operations per second of all threads together: the best of the short runs that fit into the time given."""
    rounds = _rounds_of_a_run(loop)
    taken = _best_seconds(lambda: _run(loop, rounds, threads), threads, seconds)
    return loop.operations * rounds * threads / taken


def lasting_loop_rate(loop: Loop, threads: int, seconds: float) -> float:
    """Operations per second of all threads together over the time given, with whatever interrupts them."""
    short = _rounds_of_a_run(loop)
    rounds = max(short, min(_core.MOST_LIMIT_ROUNDS, int(short * seconds / RUN_SECONDS)))
    return loop.operations * rounds * threads / _mean_seconds(lambda: _run(loop, rounds, threads), threads, seconds)


def read_rate(words: NDArray[Any], threads: int, seconds: float, *, isa: str, which: int, total: int) -> float:
    """Bytes per second at which a contiguous array is read from end to end; `which` of the two unrolls."""
    return words.nbytes / _best_seconds(lambda: _read(words, threads, isa, which, total), threads, seconds)


def lasting_read_rate(
    streams: Sequence[tuple[NDArray[Any], int]], threads: int, seconds: float, *, isa: str, which: int
) -> float:
    """The same over the time given (one pass at least), with whatever interrupts it; caches are filled before.

    A pass reads arrays, each given with its total, one after the other: what one of them would keep in the caches if it
    were read alone, the others drive out.
    """

    def run() -> float:
        return sum(_read(words, threads, isa, which, total) for words, total in streams)

    run()
    return sum(words.nbytes for words, _ in streams) / _mean_seconds(run, threads, seconds)


def total_of(array: NDArray[Any]) -> int:
    """What the read loops make of a contiguous array: the sum of its 32-bit words, modulo 2^32."""
    return int(np.add.reduce(array.reshape(-1).view(np.uint32), dtype=np.uint32))


def paged_words(size_bytes: int, page_bytes: int) -> Words:
    """Fresh memory, written once, on pages of one size as far as the system grants it."""
    # Private: shared anonymous memory has a huge-page policy of its own, mostly "never".
    memory = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        memory.madvise(mmap.MADV_HUGEPAGE if page_bytes > SMALL_PAGE_BYTES else mmap.MADV_NOHUGEPAGE)
    everything = np.frombuffer(memory, np.uint32)
    first = -everything.ctypes.data % HUGE_PAGE_BYTES // 4
    words = everything[first : first + size_bytes // 4]
    words[:] = np.arange(words.size, dtype=np.uint32)
    return words


def huge_share(array: NDArray[Any]) -> float:
    """The share of an array's mapping that stands on huge pages (Linux; 0 where the system does not tell)."""
    try:
        listing = Path("/proc/self/smaps").read_text()
    except OSError:
        return 0.0
    address = array.ctypes.data
    pattern = r"^([0-9a-f]+)-([0-9a-f]+) .*?^Rss: +(\d+) kB.*?^AnonHugePages: +(\d+) kB"
    for start, end, resident, huge in re.findall(pattern, listing, re.MULTILINE | re.DOTALL):
        if int(start, 16) <= address < int(end, 16):
            return int(huge) / max(1, int(resident))
    return 0.0


def _rounds_of_a_run(loop: Loop) -> int:
    rounds = 64
    while rounds < _core.MOST_LIMIT_ROUNDS and _run(loop, rounds, 1) < RUN_SECONDS:
        rounds *= 2
    return rounds


def _run(loop: Loop, rounds: int, threads: int) -> float:
    taken, as_expected = _core.run_limit_loop(loop.isa, loop.index, rounds, threads)
    if math.isfinite(taken) and not as_expected:
        raise MeasurementProblem(
            f"softlookup: the loop {loop.kind} x {loop.unroll} of {loop.isa} ended at wrong numbers"
        )
    return taken


def _read(words: NDArray[Any], threads: int, isa: str, which: int, total: int) -> float:
    taken, found = _core.run_read_loop(isa, which, words, threads)
    if math.isfinite(taken) and found != total:
        raise MeasurementProblem(f"softlookup: the read loop of {isa} added up {found} instead of {total}")
    return taken


def _best_seconds(run: Callable[[], float], threads: int, seconds: float) -> float:
    return min(_runs(run, threads, seconds))


def _mean_seconds(run: Callable[[], float], threads: int, seconds: float) -> float:
    return statistics.fmean(_runs(run, threads, seconds))


def _runs(run: Callable[[], float], threads: int, seconds: float) -> list[float]:
    """Seconds of every run that fits into the time given, one at least."""
    taken: list[float] = []
    late = 0
    deadline = time.perf_counter() + seconds
    while not taken or time.perf_counter() < deadline:
        once = run()
        if math.isfinite(once):
            taken.append(once)
        else:
            late += 1
        if late == LATE_RUNS:
            raise MeasurementProblem(
                f"softlookup: {threads} threads never ran at the same time; fix: ask for fewer threads, or let other "
                f"work on this machine end first"
            )
    return taken
