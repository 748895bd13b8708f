"""The measured limits: what is there, what is plausible on a busy machine too, saving, and every refusal.

That two unrolls agree is a property of a quiet machine, so it is asserted nowhere; that a loop runs all its rounds, and
keeps its chains in registers, is (test_limit_loops.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import softlookup as sl
from softlookup import _core, _limits
from softlookup.machine import ExpCost, Machine, Peak, ReadRate, matrix_units, measure

ISAS = _core.isas()
READ_BYTES = 2**20


@pytest.fixture(scope="module")
def machine() -> Machine:
    return measure(seconds=0.2, threads=[1], read_bytes=READ_BYTES)


def peak(**changes: Any) -> Peak:
    plain = Peak("fma_float32", "x86_64_v3", 1, (12, 14), (100.0, 99.0), 2.0)
    return dataclasses.replace(plain, **changes)


def made_of(*peaks: Peak, reads: tuple[ReadRate, ...] = (), exponentials: tuple[ExpCost, ...] = ()) -> Machine:
    return Machine("a CPU", (), "2026-01-01T00:00:00+00:00", "0.1.0", "gcc", (3.0, 3.0), peaks, exponentials, reads)


class TestMeasure:
    def test_every_set_and_kind(self, machine: Machine) -> None:
        assert {entry.isa for entry in machine.peaks} == set(ISAS)
        for isa in ISAS:
            kinds = [entry.kind for entry in machine.peaks if entry.isa == isa]
            assert kinds[:2] == ["fma_float32", "fma_float64"]
            assert {entry.type for entry in machine.exponentials if entry.isa == isa} == {"float32", "float64"}
            assert ("dot_bfloat16" in kinds) == ("dot_int8" in kinds) == isa.endswith(("bf16", "amx"))
            assert ("tile_bfloat16" in kinds) == isa.endswith("amx")

    def test_two_unrolls_of_everything(self, machine: Machine) -> None:
        for entry in (*machine.peaks, *machine.exponentials, *machine.reads):
            assert entry.unrolls[0] < entry.unrolls[1]
            assert 0 <= entry.spread < 1

    def test_speeds_are_possible(self, machine: Machine) -> None:
        """Wide bounds that a busy machine keeps: nothing was optimised away."""
        assert 0.1 < machine.clock_ghz < 8
        for entry in machine.peaks:
            assert 0 < entry.per_cycle < 8, entry
        for cost in machine.exponentials:
            assert cost.ns > 0.005, cost
        for read in machine.reads:
            assert read.buffer_bytes == READ_BYTES
            assert 0 < read.gbs < 2000, read

    def test_pages(self, machine: Machine) -> None:
        sizes = [read.page_bytes for read in machine.reads]
        assert sizes[0] == os.sysconf("SC_PAGESIZE")
        assert machine.reads[0].huge_share == 0
        if sys.platform == "linux":
            assert sizes[-1] == 2**21

    def test_threads(self) -> None:
        measured = measure(seconds=0.05, threads=[2], isas=ISAS[-1:], read_bytes=READ_BYTES)
        assert {entry.threads for entry in (*measured.peaks, *measured.exponentials, *measured.reads)} == {2}

    def test_default_thread_counts(self) -> None:
        from softlookup.machine import _thread_counts

        assert _thread_counts(1) == [1]
        assert _thread_counts(6) == [1, 2, 3, 4, 5, 6]
        assert _thread_counts(64) == [1, 2, 4, 8, 16, 32, 64]
        assert _thread_counts(48) == [1, 2, 4, 8, 16, 32, 48]

    def test_matrix_units(self) -> None:
        assert all(unit.startswith("amx") for unit in matrix_units())

    @pytest.mark.parametrize(
        ("arguments", "error", "words"),
        [
            ({"seconds": 0}, ValueError, "seconds"),
            ({"seconds": "1"}, TypeError, "seconds"),
            ({"seconds": math.nan}, ValueError, "seconds"),
            ({"threads": []}, ValueError, "threads"),
            ({"threads": [0]}, ValueError, "threads"),
            ({"threads": [1.5]}, TypeError, "threads"),
            ({"isas": ["z80"]}, ValueError, "isas"),
            ({"isas": []}, ValueError, "isas"),
            ({"read_bytes": 5000}, ValueError, "read_bytes"),
            ({"read_bytes": 0}, ValueError, "read_bytes"),
            ({"read_bytes": 1e6}, TypeError, "read_bytes"),
        ],
    )
    def test_refusals(self, arguments: dict[str, Any], error: type[Exception], words: str) -> None:
        with pytest.raises(error, match=rf"softlookup\.machine\.measure: {words}.*found.*expected.*fix"):
            measure(**arguments)


class TestMachine:
    def test_json(self, machine: Machine, tmp_path: Path) -> None:
        assert Machine.from_json(machine.to_json()) == machine
        machine.save(tmp_path / "machine.json")
        assert Machine.load(tmp_path / "machine.json") == machine

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"cpu": 1, "peaks": [3]}'])
    def test_something_else(self, text: str) -> None:
        with pytest.raises(ValueError, match="saved Machine"):
            Machine.from_json(text)

    def test_immutable(self, machine: Machine) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            machine.cpu = "another"  # type: ignore[misc]

    def test_defaults_are_the_best_set_and_most_threads(self) -> None:
        machine = made_of(
            peak(), peak(threads=2, rates_gflops=(150.0, 200.0)), peak(isa="x86_64_v4", rates_gflops=(300.0, 290.0))
        )
        assert machine.peak_gflops() == 300
        assert machine.peak_gflops(isa="x86_64_v3") == 200
        assert machine.peak_gflops(isa="x86_64_v3", threads=1) == 100

    def test_what_was_not_measured(self, machine: Machine) -> None:
        with pytest.raises(ValueError, match=r"kind='dot_int2'.*one of .*kind='fma_float32'"):
            machine.peak_gflops("dot_int2")
        with pytest.raises(ValueError, match="threads=1"):
            machine.read_gbs(threads=99)
        with pytest.raises(ValueError, match="type='float32'"):
            machine.exp_ns("float16")

    def test_nothing_doubtful(self) -> None:
        assert made_of(peak(), peak(threads=2, rates_gflops=(199.0, 198.0))).doubts() == ()

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"rates_gflops": (47.0, 117.0)}, "two unrolls differ by 60%"),
            ({"per_cycle": 9.0}, "9.00 instructions per cycle"),
            ({"per_cycle": 0.1}, "0.10 instructions per cycle"),
        ],
    )
    def test_doubtful_peaks(self, changes: dict[str, Any], words: str) -> None:
        (doubt,) = made_of(peak(**changes)).doubts()
        assert words in doubt

    def test_doubtful_threads(self) -> None:
        (doubt,) = made_of(peak(), peak(threads=2)).doubts()
        assert "0.50 of 2 times one thread" in doubt

    def test_doubtful_pages_and_exponentials(self) -> None:
        read = ReadRate(2**21, 0.25, 2**28, 1, (4, 8), (10.0, 10.0))
        cost = ExpCost("float32", "x86_64_v3", 1, (1, 2), (0.2, 0.3))
        doubts = made_of(reads=(read,), exponentials=(cost,)).doubts()
        assert ["33%" in doubts[0], "25% of the buffer" in doubts[1]] == [True, True]


class TestLoops:
    @pytest.mark.parametrize("isa", ISAS)
    def test_every_loop_ends_where_it_must(self, isa: str) -> None:
        for index, (kind, unroll, _) in enumerate(_core.limit_loops(isa)):
            for rounds in (0, 1, 2, 1001):
                _, as_expected = _core.run_limit_loop(isa, index, rounds, 1)
                assert as_expected, (kind, unroll, rounds)

    @pytest.mark.parametrize("isa", ISAS)
    @pytest.mark.parametrize("words", [0, 1, 15, 511, 512, 4099, 65536 + 3])
    def test_reads_touch_every_word(self, isa: str, words: int) -> None:
        numbers = np.random.default_rng(words).integers(0, 2**32, words, np.uint32)
        for which in (0, 1):
            for threads in (1, 2, 3):
                seconds, total = _core.run_read_loop(isa, which, numbers, threads)
                assert math.isnan(seconds) or total == _limits.total_of(numbers)

    def test_a_wrong_sum_is_an_error(self) -> None:
        with pytest.raises(RuntimeError, match="added up"):
            _limits.read_rate(np.ones(64, np.uint32), 1, 0.0, isa=ISAS[0], which=0, total=65)

    def test_a_wrong_end_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_core, "run_limit_loop", lambda *_: (1.0, False))
        with pytest.raises(RuntimeError, match="ended at wrong numbers"):
            _limits.loop_rate(_limits.loops_of(ISAS[0])["clock"][0], 1, 0.0)

    def test_threads_that_never_meet(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = _core.run_limit_loop
        late = lambda isa, index, rounds, threads: run(isa, index, rounds, 1) if threads == 1 else (math.nan, True)  # noqa: E731
        monkeypatch.setattr(_core, "run_limit_loop", late)
        with pytest.raises(RuntimeError, match="2 threads never ran at the same time"):
            _limits.loop_rate(_limits.loops_of(ISAS[0])["clock"][0], 2, 60.0)

    @pytest.mark.parametrize(("measure", "expected"), [("_best_seconds", 1.0), ("_mean_seconds", 2.0)])
    def test_interruptions_count_where_they_are_asked_for(
        self, measure: str, expected: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = itertools.count()
        monkeypatch.setattr(_limits, "time", types.SimpleNamespace(perf_counter=lambda: float(next(clock))))
        taken = iter([1.0, 3.0, 2.0])
        assert getattr(_limits, measure)(lambda: next(taken), 1, 2.5) == expected

    @pytest.mark.parametrize("isa", ISAS)
    def test_lasting_rates_are_possible(self, isa: str) -> None:
        words = np.arange(2**14, dtype=np.uint32)
        total = _limits.total_of(words)
        assert 0 < _limits.lasting_read_rate([(words, total)] * 2, 1, 0.01, isa=isa, which=0) < 2e12
        for kind, pair in _limits.loops_of(isa).items():
            most = 2e13 if kind.startswith("tile_") else 2e12
            assert 0 < _limits.lasting_loop_rate(pair[0], 1, 0.01) < most

    def test_unusable_set(self) -> None:
        with pytest.raises(ValueError, match="z80"):
            _core.limit_loops("z80")

    @pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
    def test_huge_pages_are_seen(self) -> None:
        policy = Path("/sys/kernel/mm/transparent_hugepage/enabled")
        if not policy.exists() or "[never]" in policy.read_text():
            pytest.skip("this system gives no huge pages")
        assert _limits.huge_share(_limits.paged_words(2**23, _limits.SMALL_PAGE_BYTES)) == 0
        assert _limits.huge_share(_limits.paged_words(2**23, _limits.HUGE_PAGE_BYTES)) > 0


def test_importing_softlookup_does_not_measure() -> None:
    program = "import sys, softlookup; sys.exit('softlookup.machine' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    assert not hasattr(sl, "measure")
