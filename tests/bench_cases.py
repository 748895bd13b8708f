"""Small workloads for the tests of the bench, and how to run them."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("ml_dtypes")
pytest.importorskip("rich")

import softlookup as sl
from softlookup._limits import loops_of
from softlookup.bench import timing
from softlookup.bench.rows import Row
from softlookup.bench.run import Options, run_workload
from softlookup.bench.workloads import Workload

TINY = "tiny/full/float32"
SMALL = {
    "full": Workload("small", "full", "float32", "prefill", 4, 2, 40, 40, 16),
    "causal": Workload("small", "causal", "float32", "prefill", 4, 2, 40, 40, 16, causal=True),
    "window": Workload("small", "window", "float32", "prefill", 2, 2, 60, 60, 16, causal=True, window=7),
    "bfloat16": Workload("small", "full", "bfloat16", "prefill", 2, 2, 40, 40, 16),
    "float64": Workload("small", "full", "float64", "prefill", 2, 2, 40, 40, 16),
    "decode": Workload("small", "40", "float32", "decode", 8, 2, 1, 40, 16),
    "decode half": Workload("small", "40", "float16", "decode", 8, 2, 1, 40, 16),
    "ragged": Workload("small", "5-40", "float32", "decode", 4, 2, 1, 40, 16, batch=3, lengths=(5, 17, 40)),
    "train": Workload("small", "causal", "float32", "train", 2, 2, 40, 40, 16, causal=True),
    "call": Workload("small", "call", "float32", "call", 1, 1, 8, 8, 16),
}
WORDS = list(SMALL)
COMPILED = ("window", "ragged", "train")  # compiling takes seconds: enough for every branch
CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # what XLA uses


def options(*peers: str, threads: int = 1) -> Options:
    return Options(peers, rounds=1, seconds=0.01, threads=threads, isa=str(sl.info()["isa"]))


def run(workload: Workload, *peers: str, threads: int = 1) -> list[Row]:
    return run_workload(workload, options(*peers, threads=threads), lambda _: None)


def limits_of_decoding() -> set[str]:
    """What the limit of decoding float32 measures here: integer products only where the set has a loop for them."""
    kinds = loops_of(str(sl.info()["isa"]))
    dots = {f"{kind}_gflops" for kind in ("dot_int16", "dot_int8") if kind in kinds}
    return {"fma_float32_gflops", "exp_gscores", "read_gbs"} | dots


@pytest.fixture
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call a sample, and hardly a rest before it."""
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(timing, "MOST_RESTS", 1)
