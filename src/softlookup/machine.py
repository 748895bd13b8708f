"""The limits of this machine, measured: what no attention kernel on it can beat.

`measure` runs loops of the compiled core that do one thing as fast as the machine can: chains of fused multiply-adds
and of bfloat16 and integer dot products in registers, the exponential of the softmax, and reads of memory. A measured
limit lies easily (a spilled loop is too slow, one that is optimised away too fast), so every loop comes in two unrolls,
both are kept, each has its end checked in every run, and `Machine.doubts` names what does not fit together: unrolls
that differ by more than 5 %, and speeds beyond clock x width.

A multiply-add counts as two operations. Rates are those of all threads together.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from softlookup import _core, _limits
from softlookup._checks import as_threads
from softlookup._machine_parts import ExpCost, Peak, ReadRate, doubts_of
from softlookup._problems import Problems, integer, real
from softlookup._threads import get_threads, info

__all__ = ["ExpCost", "Machine", "Peak", "ReadRate", "matrix_units", "measure"]

MOST_THREAD_COUNTS = 8  # more counts than these are not all measured
DEFAULT_READ_BYTES = 2**28
PAGE_MULTIPLE = 4096

PEAKS = ("fma_float32", "fma_float64", "dot_bfloat16", "dot_int8", "dot_int16", "tile_bfloat16")
EXPONENTIALS = ("float32", "float64")

Pair = tuple[_limits.Loop, _limits.Loop]
Loops = Mapping[str, Mapping[str, Pair]]


@dataclass(frozen=True, slots=True)
class Machine:
    """The measured limits of a machine; made by `measure` or `load`.

    Attributes
    ----------
    cpu, matrix_units
        Name of the CPU, and its units for products of matrices (amx_*).
    measured
        When, as ISO 8601 in UTC.
    softlookup, compiler
        Version and compiler of the core that measured.
    clocks_ghz
        Clock of one thread, by two unrolls of a chain of additions that wait for each other.
    peaks, exponentials, reads
        The limits, one entry for each kind, instruction set and number of threads.

    Examples
    --------
    >>> from softlookup.machine import measure
    >>> machine = measure(seconds=0.2, threads=[1], read_bytes=2**20)
    >>> machine.peak_gflops("fma_float32") > machine.peak_gflops("fma_float64") > 0
    True
    >>> 0 < machine.exp_ns("float32") < machine.exp_ns("float64")
    True
    >>> Machine.from_json(machine.to_json()) == machine
    True
    """

    cpu: str
    matrix_units: tuple[str, ...]
    measured: str
    softlookup: str
    compiler: str
    clocks_ghz: tuple[float, float]
    peaks: tuple[Peak, ...]
    exponentials: tuple[ExpCost, ...]
    reads: tuple[ReadRate, ...]

    @property
    def clock_ghz(self) -> float:
        """The faster of the two unrolls."""
        return max(self.clocks_ghz)

    def peak_gflops(self, kind: str = "fma_float32", *, isa: str | None = None, threads: int | None = None) -> float:
        """The peak of a kind; by default of the best instruction set that has it and the most threads.

        Raises
        ------
        ValueError
            If it was not measured; the message lists what was.
        """
        return _chosen(self.peaks, kind=kind, isa=isa, threads=threads).gflops

    def exp_ns(self, type: str = "float32", *, isa: str | None = None, threads: int | None = None) -> float:
        """Nanoseconds per exponential; defaults and errors as in `peak_gflops`."""
        return _chosen(self.exponentials, type=type, isa=isa, threads=threads).ns

    def read_gbs(self, page_bytes: int | None = None, *, threads: int | None = None) -> float:
        """Read bandwidth; by default of the largest pages and the most threads. Errors as in `peak_gflops`."""
        return _chosen(self.reads, page_bytes=page_bytes, threads=threads).gbs

    def doubts(self) -> tuple[str, ...]:
        """What does not fit together, one line each; nothing on a quiet machine. A busy one gives many."""
        return tuple(doubts_of(self.clocks_ghz, self.peaks, self.exponentials, self.reads))

    def to_json(self) -> str:
        """As JSON text, with the units in the names."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """From the text that `to_json` made.

        Raises
        ------
        ValueError
            If the text is something else.
        """
        try:
            return _machine_of(json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError) as problem:
            raise ValueError(
                f"softlookup.machine: found text that is not a saved Machine ({problem}); expected what "
                f"Machine.save wrote with this version; fix: measure again"
            ) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json` to a file."""
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Machine:
        """Read what `save` wrote. Raises OSError, and ValueError as `from_json` does."""
        return cls.from_json(Path(path).read_text())


def measure(
    *,
    seconds: float = 10.0,
    threads: Sequence[int] | None = None,
    isas: Sequence[str] | None = None,
    read_bytes: int = DEFAULT_READ_BYTES,
) -> Machine:
    """Measure the limits of this machine.

    Parameters
    ----------
    seconds
        Time to measure for, shared out among all loops; a little more passes, for the memory has to be filled.
    threads
        Numbers of threads; None is 1, 2, 3, ... up to `softlookup.get_threads()` (the powers of two and the last where
        these would be more than 8).
    isas
        Instruction sets; None is every one that this CPU can run.
    read_bytes
        Size of the buffers that are read, a multiple of 4096; two are held at a time.

    Returns
    -------
    Machine

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, before anything is measured.
    RuntimeError
        If the threads never ran at the same time because other work holds the CPUs.

    Examples
    --------
    >>> import softlookup as sl
    >>> from softlookup.machine import measure
    >>> machine = measure(seconds=0.05, threads=[1], isas=sl.info()["isas"][-1:], read_bytes=2**20)
    >>> [peak.kind for peak in machine.peaks][:2]
    ['fma_float32', 'fma_float64']
    """
    counts, sets = _checked(seconds, threads, isas, read_bytes)
    pages = _page_sizes()
    loops = {isa: _limits.loops_of(isa) for isa in sets}
    runs = 2 * len(counts) * (sum(len(kinds) - 1 for kinds in loops.values()) + len(pages)) + 2
    share = seconds / runs
    clocks = _clocks(loops[sets[0]]["clock"], share)
    return Machine(
        cpu=str(info()["cpu"]),
        matrix_units=matrix_units(),
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
        softlookup=version("softlookup"),
        compiler=_core.compiler(),
        clocks_ghz=clocks,
        peaks=tuple(_peaks(loops, counts, share, max(clocks))),
        exponentials=tuple(_exponentials(loops, counts, share)),
        reads=tuple(read for page in pages for read in _reads(page, read_bytes, sets[-1], counts, share)),
    )


def _clocks(pair: Pair, seconds: float) -> tuple[float, float]:
    return _limits.loop_rate(pair[0], 1, seconds) / 1e9, _limits.loop_rate(pair[1], 1, seconds) / 1e9


def _peaks(loops: Loops, counts: Sequence[int], seconds: float, clock_ghz: float) -> Iterator[Peak]:
    for kinds in loops.values():
        for kind in PEAKS:
            if kind in kinds:
                yield from (_peak(kinds[kind], count, seconds, clock_ghz) for count in counts)


def _exponentials(loops: Loops, counts: Sequence[int], seconds: float) -> Iterator[ExpCost]:
    for kinds in loops.values():
        for type in EXPONENTIALS:
            yield from (_exponential(kinds[f"exp_{type}"], type, count, seconds) for count in counts)


def _peak(pair: Pair, threads: int, seconds: float, clock_ghz: float) -> Peak:
    rates = tuple(_limits.loop_rate(loop, threads, seconds) / 1e9 for loop in pair)
    instruction = pair[0].operations // pair[0].unroll
    return Peak(
        kind=pair[0].kind,
        isa=pair[0].isa,
        threads=threads,
        unrolls=(pair[0].unroll, pair[1].unroll),
        rates_gflops=(rates[0], rates[1]),
        per_cycle=max(rates) / (instruction * threads * clock_ghz),
    )


def _exponential(pair: Pair, type: str, threads: int, seconds: float) -> ExpCost:
    costs = tuple(1e9 / _limits.loop_rate(loop, threads, seconds) for loop in pair)
    unrolls = (pair[0].unroll, pair[1].unroll)
    return ExpCost(type=type, isa=pair[0].isa, threads=threads, unrolls=unrolls, costs_ns=(costs[0], costs[1]))


def _reads(page_bytes: int, read_bytes: int, isa: str, counts: Sequence[int], seconds: float) -> Iterator[ReadRate]:
    words = _limits.paged_words(read_bytes, page_bytes)
    total = _limits.total_of(words)
    share = _limits.huge_share(words)
    for count in counts:
        rates = tuple(
            _limits.read_rate(words, count, seconds, isa=isa, which=which, total=total) / 1e9 for which in (0, 1)
        )
        yield ReadRate(
            page_bytes=page_bytes,
            huge_share=share,
            buffer_bytes=read_bytes,
            threads=count,
            unrolls=_core.read_unrolls(isa),
            rates_gbs=(rates[0], rates[1]),
        )


def _page_sizes() -> list[int]:
    """The system's own page size, and huge pages where it gives them on request."""
    return [_limits.SMALL_PAGE_BYTES] + ([_limits.HUGE_PAGE_BYTES] if sys.platform == "linux" else [])


def _thread_counts(most: int) -> list[int]:
    if most <= MOST_THREAD_COUNTS:
        return list(range(1, most + 1))
    return [2**power for power in range(most.bit_length()) if 2**power < most] + [most]


def _checked(
    seconds: object, threads: Sequence[int] | None, isas: Sequence[str] | None, read_bytes: object
) -> tuple[list[int], list[str]]:
    problems = Problems("machine.measure")
    time = real(problems, "seconds", seconds, expected="a positive number", fix="seconds=10.0")
    if time is not None and time <= 0:
        problems.value("seconds", f"{time}", "a positive number", "seconds=10.0")
    counts = _thread_counts(get_threads()) if threads is None else [as_threads(problems, count) for count in threads]
    if not counts:
        problems.value("threads", "no number", "at least one", "threads=[1], or None for 1 up to all")
    usable = _core.isas()
    sets = usable if isas is None else list(isas)
    if not sets or not set(sets) <= set(usable):
        problems.value("isas", f"{sets}", f"some of {usable}", "isas=None takes all that this CPU can run")
    expected, fix = f"a positive multiple of {PAGE_MULTIPLE}", f"read_bytes={DEFAULT_READ_BYTES}"
    size = integer(problems, "read_bytes", read_bytes, least=PAGE_MULTIPLE, expected=expected, fix=fix)
    if size is not None and size % PAGE_MULTIPLE:
        problems.value("read_bytes", f"{size}", expected, fix)
    problems.raise_any()
    return counts, sets


def matrix_units() -> tuple[str, ...]:
    """Matrix units that the system reports (Linux on x86-64); softlookup uses amx_bf16 where the process may.

    Examples
    --------
    >>> from softlookup.machine import matrix_units
    >>> all(name.startswith("amx") for name in matrix_units())
    True
    """
    try:
        flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return ()
    return tuple(sorted(name for name in (flags[1].split() if flags else ()) if name.startswith("amx")))


Limit = TypeVar("Limit", Peak, ExpCost, ReadRate)


def _chosen(limits: Sequence[Limit], **wanted: object) -> Limit:
    """The last entry that fits: of the best instruction set, or the largest pages, with the most threads."""
    fits = [limit for limit in limits if all(getattr(limit, n) == v for n, v in wanted.items() if v is not None)]
    if fits:
        return fits[-1]
    measured = sorted({", ".join(f"{name}={getattr(limit, name)!r}" for name in wanted) for limit in limits})
    given = ", ".join(f"{name}={value!r}" for name, value in wanted.items() if value is not None)
    raise ValueError(
        f"softlookup.machine: found {given}; expected what was measured; fix: one of {'; '.join(measured)}"
    )


def _machine_of(data: dict[str, Any]) -> Machine:
    """Tuples instead of JSON's lists, and the classes of the entries."""
    classes = {"peaks": Peak, "exponentials": ExpCost, "reads": ReadRate}
    plain: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    for name, kind in classes.items():
        plain[name] = tuple(
            kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()})
            for entry in data[name]
        )
    return Machine(**plain)
