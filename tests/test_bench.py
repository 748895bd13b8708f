"""The bench: what a workload counts, who takes part, and that every answer is checked.

Nothing here asserts a time. Peers that are not installed are rows that say so, and are tested as such.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import numpy as np
import pytest

import softlookup as sl
from bench_cases import COMPILED, CPUS, SMALL, WORDS, limits_of_decoding, run, short_samples
from softlookup.bench.answers import difference, difference_from_float64
from softlookup.bench.limit import LEAST_SECONDS, MOST_SECONDS, LimitSampler
from softlookup.bench.peers import OURS, PEERS, SOFTLOOKUP, Peer, Prepared
from softlookup.bench.rows import LIMIT
from softlookup.bench.table import remarks, wrong_answers
from softlookup.bench.workloads import WORKLOADS, Inputs, Workload, names, select

__all__ = ["short_samples"]

pytestmark = pytest.mark.usefixtures("short_samples")


class TestWorkloads:
    def test_table(self) -> None:
        labels = [workload.label for workload in WORKLOADS]
        assert len(labels) == len(set(labels))
        for name in ("prefill-64", "prefill-128", "prefill-long", "decode-8b", "decode-small", "decode-mha"):
            assert name in names()
        for name in ("decode-batch", "window-256", "train-64", "train-128", "tiny", "model-8k"):
            assert name in names()

    @pytest.mark.parametrize("word", WORDS)
    def test_pairs_are_what_the_mask_shows(self, word: str) -> None:
        workload = SMALL[word]
        dense = workload.dense_mask()
        shape = (workload.batch, workload.heads, workload.queries, workload.keys)
        shown = math.prod(shape) if dense is None else int(np.broadcast_to(dense, shape).sum())
        assert workload.pairs == shown
        factor = 3.5 if workload.kind == "train" else 1
        assert workload.operations == 4 * workload.width * shown * factor

    def test_figures_of_known_workloads(self) -> None:
        (decode,) = select(["decode-8b/32768/float32"])
        assert decode.cache_bytes == 2 * 8 * 32768 * 128 * 4
        (half,) = select(["decode-8b/32768/bfloat16"])
        assert half.cache_bytes * 2 == decode.cache_bytes
        full, causal = select(["prefill-64/full/float32", "prefill-64/causal/float32"])
        assert full.operations == 4 * 64 * 8 * 2048**2
        assert causal.operations == 4 * 64 * 8 * 2048 * 2049 / 2
        assert select(["window-256"])[0].pairs == 8 * (256 * 257 // 2 + (4096 - 256) * 256)

    def test_inputs(self) -> None:
        first, second = (Inputs.of(SMALL["bfloat16"]) for _ in range(2))
        assert first.q.dtype.name == "bfloat16"
        assert np.array_equal(first.k.view(np.uint16), second.k.view(np.uint16))
        assert first.dout is None
        assert Inputs.of(SMALL["train"]).dout is not None

    def test_select(self) -> None:
        assert select([]) == list(WORKLOADS)
        with pytest.raises(ValueError, match=r"no workload is called nothing; there are prefill-64, "):
            select(["tiny", "nothing"])


class TestAnswers:
    def test_difference_is_a_share_of_the_largest_number(self) -> None:
        right = {"out": np.array([[1.0, -4.0]], np.float32)}
        assert difference(right, right) == 0
        assert difference({"out": np.array([[1.0, -3.0]], np.float32)}, right) == 0.25
        assert difference({"out": np.array([[1.0, np.nan]], np.float32)}, right) == math.inf
        assert difference({"out": np.ones((1, 3), np.float32)}, right) == math.inf

    @pytest.mark.parametrize("word", WORDS)
    def test_float64_rows_find_a_fault(self, word: str) -> None:
        inputs = Inputs.of(SMALL[word])
        out = sl.attention(inputs.q, inputs.k, inputs.v, mask=inputs.workload.mask).astype(np.float64)
        assert difference_from_float64(inputs, {"out": out}) < 2e-2
        out[-1, -1, -1] += 1
        assert difference_from_float64(inputs, {"out": out}) > 0.1


class TestRun:
    @pytest.mark.parametrize("word", WORDS)
    def test_every_contender(self, word: str) -> None:
        """Whoever is installed answers right; whoever cannot says why."""
        workload = SMALL[word]
        peers = [name for name in PEERS if name != "torch-flex" or word in COMPILED]
        rows = run(workload, *peers, threads=CPUS)
        expected = [OURS, *(name for name in peers if PEERS[name].is_for(workload))]
        if workload.kind != "call":
            expected.insert(0, LIMIT)
        assert [row.contender for row in rows] == expected
        for row in rows:
            if row.missing is not None:
                assert row.contender not in (OURS, LIMIT, "softlookup-stats")
                assert row.seconds is None
            elif row.contender != LIMIT:
                assert row.agrees, row
                assert row.seconds is not None
                assert row.seconds > 0

    def test_limits(self) -> None:
        limit = run(SMALL["decode"])[0]
        assert limit.limits is not None
        assert set(limit.limits) == limits_of_decoding()
        limit = run(SMALL["full"])[0]
        assert limit.limits is not None
        assert set(limit.limits) == {"fma_float32_gflops"}

    def test_a_sample_of_the_limit_lasts_as_long_as_our_call(self) -> None:
        limit = LimitSampler(SMALL["full"], (), str(sl.info()["isa"]), 1)
        for asked, given in ((0.0, LEAST_SECONDS), (0.03, 0.03), (7.0, MOST_SECONDS)):
            limit.last(asked)
            assert limit.seconds == given
        assert limit() > 0

    def test_ratios(self) -> None:
        rows = {row.contender: row for row in run(SMALL["full"], "softlookup-stats")}
        ours, limit = rows[OURS], rows[LIMIT]
        assert ours.ours_is_faster == 1
        assert ours.share_of_limit == pytest.approx(limit.samples_seconds[0] / ours.samples_seconds[0])
        stats = rows["softlookup-stats"]
        assert stats.ours_is_faster == pytest.approx(stats.samples_seconds[0] / ours.samples_seconds[0])
        assert len(limit.samples_seconds) == 2  # once more after the last round

    def test_a_peer_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
        monkeypatch.delitem(sys.modules, "softlookup.bench.peers.onnxruntime_gqa", raising=False)
        row = run(SMALL["decode"], "onnxruntime")[-1]
        assert row.missing == "onnxruntime is not installed: pip install 'softlookup[bench]'"

    def test_a_peer_that_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def prepare(self: Peer, inputs: Inputs, threads: int) -> Prepared:
            if self is SOFTLOOKUP:
                return original(self, inputs, threads)
            raise OSError("no such thing\nsecond line")

        original = Peer.prepare
        monkeypatch.setattr(Peer, "prepare", prepare)
        assert run(SMALL["full"], "jax")[-1].missing == "fails: OSError: no such thing"

    def test_a_wrong_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def prepare(self: Peer, inputs: Inputs, threads: int) -> Prepared:
            prepared = original(SOFTLOOKUP, inputs, threads)
            if self is SOFTLOOKUP:
                return prepared
            return dataclasses.replace(prepared, answers=lambda out: {"out": out + np.float32(0.01)})

        original = Peer.prepare
        monkeypatch.setattr(Peer, "prepare", prepare)
        rows = run(SMALL["full"], "jax")
        assert rows[-1].agrees is False
        plain = [dataclasses.asdict(row) for row in rows]
        assert wrong_answers(plain) == ["jax in small/full/float32"]
        assert any("WRONG ANSWER" in line for line in remarks(plain))

    def test_our_own_faults_are_not_hidden(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(sl, "attention", broken)
        with pytest.raises(ZeroDivisionError):
            run(SMALL["full"])

    def test_training_needs_gradients(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(sl, "attention_vjp", raising=False)
        ours = next(row for row in run(SMALL["train"]) if row.contender == OURS)
        assert ours.missing == "this version has no attention_vjp"
        assert ours.seconds is None

    def test_what_was_changed_is_put_back(self) -> None:
        torch = pytest.importorskip("torch")
        before = torch.get_num_threads()
        run(SMALL["full"], "torch-sdpa", threads=before + 1)
        assert torch.get_num_threads() == before

    def test_quantised_caches_are_checked_in_their_own_codes(self) -> None:
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnx")
        rows = {row.contender: row for row in run(SMALL["ragged"], "onnxruntime-int8", "onnxruntime-int4")}
        for name, bits in (("onnxruntime-int8", 8), ("onnxruntime-int4", 4)):
            row = rows[name]
            assert row.agrees, row
            assert row.difference_from_ours is not None
            assert row.difference is not None
            assert row.difference < 1e-5 < row.difference_from_ours
            assert row.rate is not None
            assert row.seconds is not None
            assert row.rate * row.seconds * 1e9 == pytest.approx(SMALL["ragged"].cache_bytes * bits / 32)

    def test_memory(self) -> None:
        (row,) = run(Workload("memory", "forward-512", "float32", "memory", 1, 1, 512, 512, 16))
        assert row.extra_bytes is not None
        assert 0 <= row.extra_bytes < 64 * 2**20
