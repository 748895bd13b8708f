"""Interleaved timing: every contender has one turn in every round, so that what the machine does meanwhile meets all.

Before a turn all threads come to rest (pools of several libraries spin for a while after their work, and would slow
whoever comes next); then one call is made that is not timed, which wakes the contender's own threads and fills caches.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REST_SECONDS = 0.01
RESTS = 2  # in a row without work before the next turn
MOST_RESTS = 50
SAMPLE_SECONDS = 0.02  # short calls are timed in bunches as long as this
MOST_CALLS = 10_000

Sampler = Callable[[], float]


@dataclass
class CallSampler:
    """Seconds of one call: the mean of as many calls in a row as fill a sample."""

    call: Callable[[], Any]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    calls: int = 0

    def __call__(self) -> float:
        with self.around():
            start = time.perf_counter()
            self.call()
            if self.calls == 0:
                taken = time.perf_counter() - start
                self.calls = max(1, min(MOST_CALLS, int(SAMPLE_SECONDS / max(taken, 1e-7))))
            start = time.perf_counter()
            for _ in range(self.calls):
                self.call()
            return (time.perf_counter() - start) / self.calls

    def bunch_seconds(self) -> float:
        """How long the timed part of a sample lasts, by one sample that does not count."""
        return self() * self.calls


def interleave(samplers: Mapping[str, Sampler], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Samples of each, one a round: A B C, A B C, ...; no further round starts when the time is over."""
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    deadline = time.perf_counter() + seconds
    collecting = gc.isenabled()
    gc.disable()
    try:
        for done in range(rounds):
            if done and time.perf_counter() > deadline:
                break
            for name, sampler in samplers.items():
                rest()
                samples[name].append(sampler())
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    return samples


class OtherWork:
    """CPUs that anything but this process and its children takes, by the system's own count (Linux)."""

    def __init__(self) -> None:
        self._wall, self._busy, self._own = time.perf_counter(), _busy_seconds(), _own_seconds()

    def cpus(self) -> float | None:
        """On average since this was made; None where the system does not tell."""
        if self._busy is None:
            return None
        wall, busy, own = time.perf_counter(), _busy_seconds() or self._busy, _own_seconds()
        return max(0.0, ((busy - self._busy) - (own - self._own)) / max(wall - self._wall, 1e-9))


def _busy_seconds() -> float | None:
    """Seconds of all CPUs that were neither idle nor waiting, the host's part included."""
    try:
        counts = [int(count) for count in Path("/proc/stat").read_text().partition("\n")[0].split()[1:]]
    except (OSError, ValueError):
        return None
    user, nice, system, _, _, interrupts, soft_interrupts, stolen, *_ = counts
    return (user + nice + system + interrupts + soft_interrupts + stolen) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def rest() -> None:
    """Sleep until no thread of this process works any more (or one never stops)."""
    quiet = 0
    for _ in range(MOST_RESTS):
        before = time.process_time()
        time.sleep(REST_SECONDS)
        quiet = quiet + 1 if time.process_time() - before < REST_SECONDS / 10 else 0
        if quiet == RESTS:
            return
