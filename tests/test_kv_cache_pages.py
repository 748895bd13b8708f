"""Rolling back, sharing and forgetting: pages of a cache against plain arrays."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import softlookup as sl
from cache_cases import ALL, CacheShape, empty, filled, make, same_bits


@pytest.mark.parametrize("name", ALL)
def test_rollback_is_exact(name: str) -> None:
    q, k, v = make(CacheShape(4, 2, 32, 24, 1200, 1, batch=2), name)
    cache = filled(k[:, :, :1000], v[:, :, :1000], name, (100,))
    cache.append(10 * k[:, :, 1000:], 10 * v[:, :, 1000:])
    cache.truncate([1000, 520])
    assert cache.lengths.tolist() == [1000, 520]
    cache.append(k[:, :, 1000:1003], v[:, :, 1000:1003], lengths=[1, 3])  # case 45: refused slots vanish per row
    for row, parts in enumerate((slice(0, 1001), np.r_[0:520, 1000:1003])):
        kept = (k[row : row + 1, :, parts], v[row : row + 1, :, parts])
        expected = filled(*kept, name, (100,))
        assert same_bits(cache.select([row]).attention(q[row : row + 1]), expected.attention(q[row : row + 1]))
    cache.truncate(0)
    assert not cache.attention(q).any()
    cache.append(k[:, :, :90], v[:, :, :90])
    assert same_bits(cache.attention(q), filled(k[:, :, :90], v[:, :, :90], name).attention(q))


def test_what_was_rolled_back_never_shows() -> None:
    q, k, v = make(CacheShape(4, 2, 32, 24, 300, 1), "float32")
    for name in ("float32", "bfloat16", "float16"):
        q, k, v = make(CacheShape(4, 2, 32, 24, 300, 1), name)
        cache = filled(k, v, name)
        poison = np.full_like(k[:, :, :250], np.nan), np.full_like(v[:, :, :250], np.inf)
        cache.append(*poison)
        cache.truncate(300)
        expected = filled(k, v, name).attention(q)
        assert same_bits(cache.attention(q), expected)
        assert same_bits(cache.attention(q, mask=sl.Full()), expected)


@pytest.mark.parametrize("name", ALL)
def test_forks_share_until_one_writes(name: str) -> None:
    q, k, v = make(CacheShape(4, 2, 32, 24, 700, 1, batch=2), name)
    cache = filled(k[:, :, :600], v[:, :, :600], name)
    before = cache.attention(q)
    forks = [cache.fork(), copy.deepcopy(cache), copy.copy(cache), cache.select([0, 1])]
    for number, fork in enumerate(forks):
        fork.truncate(590)
        fork.append((number + 1) * k[:, :, 600:], (number + 1) * v[:, :, 600:])
    assert same_bits(cache.attention(q), before)
    kept = filled(k[:, :, :600], v[:, :, :600], name)
    kept.truncate(590)
    kept.append(3 * k[:, :, 600:], 3 * v[:, :, 600:])
    assert same_bits(forks[2].attention(q), kept.attention(q))
    del forks
    cache.append(k[:, :, 600:], v[:, :, 600:])
    assert same_bits(cache.attention(q), filled(k, v, name, (600,)).attention(q))


def test_forks_cost_no_pages_but_those_they_write() -> None:
    _, k, v = make(CacheShape(2, 2, 64, 64, 2048 + 10, 1), "float32")
    cache = filled(k, v, "float32")
    pool = cache._table.pool
    taken = len(pool._free)
    forks = [cache.fork() for _ in range(5)]
    forks[0].append(k[:, :, :1], v[:, :, :1])
    assert taken - len(pool._free) <= 1 or len(pool._slabs) > 1
    del forks
    assert not pool._more


@pytest.mark.parametrize("name", ALL)
def test_beams(name: str) -> None:
    q, k, v = make(CacheShape(4, 2, 32, 24, 600, 1, batch=3), name)
    beams = filled(k, v, name).select([2, 0, 0, -1])
    assert beams.batch == 4
    new_k, new_v = k[[0, 1, 2, 0], :, :2], v[[0, 1, 2, 0], :, :2]
    beams.append(new_k, new_v)
    for place, row in enumerate((2, 0, 0, 2)):
        alone = filled(k[row : row + 1], v[row : row + 1], name)
        alone.append(new_k[place : place + 1], new_v[place : place + 1])
        asked = q[row : row + 1]
        assert same_bits(beams.attention(q[[2, 0, 0, 2]])[place : place + 1], alone.attention(asked))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("ragged", [False, True])
def test_pickles(name: str, ragged: bool) -> None:
    q, k, v = make(CacheShape(4, 2, 32, 24, 700, 1, batch=2), name)
    cache = empty(k, v, name, capacity=1000)
    cache.append(k, v, lengths=[700, 30] if ragged else None)
    again = pickle.loads(pickle.dumps(cache))
    assert repr(again) == repr(cache)
    assert same_bits(again.attention(q), cache.attention(q))
    for each in (cache, again):
        each.append(k[:, :, :5], v[:, :, :5])
    assert same_bits(again.attention(q), cache.attention(q))


def rule_of(window: int, first: int) -> sl.Mask:
    """What a window shows, written as a mask over all keys."""
    kept: sl.Mask = sl.Window(window - 1, None)
    return sl.Causal() & (kept | sl.Predicate(lambda b, h, i, j: (j < first) & (i >= 0)))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("window", "first"), [(1, 0), (40, 4), (600, 0), (1000, 513)])
def test_windows(name: str, window: int, first: int) -> None:
    q, k, v = make(CacheShape(4, 2, 16, 16, 4000, 7), name)
    cache = empty(k, v, name, window=window, keep_first=first)
    whole = empty(k, v, name)
    for begin, end in ((0, 7), (7, 900), (900, 901), (901, 3000), (3000, 3993), (3993, 4000)):
        for each in (cache, whole):
            each.append(k[:, :, begin:end], v[:, :, begin:end])
        found = cache.attention(q)
        assert same_bits(found, whole.attention(q, mask=rule_of(window, first))), end
    assert cache.keys().shape == whole.keys().shape
    cache.truncate(3993)
    whole.truncate(3993)
    asked = q[:, :, :1]
    assert same_bits(cache.attention(asked), whole.attention(asked, mask=rule_of(window, first)))


def test_a_window_keeps_memory_bounded() -> None:
    _, k, v = make(CacheShape(2, 1, 8, 8, 500, 1), "float32")
    cache = empty(k, v, "float32", window=700, keep_first=4)
    most = 0
    for _ in range(40):
        cache.append(k, v)
        most = max(most, cache._table.page_count)
    assert cache.lengths.tolist() == [20000]
    assert most <= 5
    assert sum(len(slab) for slab in cache._table.pool._slabs) < 4 << 20
    with pytest.raises(ValueError, match="given back"):
        cache.truncate(15000)
    with pytest.raises(ValueError, match="given back"):
        cache.attention(np.zeros((1, 2, 3000, 8), np.float32))
    assert cache.lengths.tolist() == [20000]
    cache.truncate(0)
    assert cache.nbytes < 1000


def test_capacity() -> None:
    _, k, v = make(CacheShape(2, 1, 8, 8, 500, 1), "float32")
    cache = empty(k, v, "float32", capacity=600)
    cache.append(k, v)
    before = cache.keys().copy()
    with pytest.raises(ValueError, match="capacity = 600"):
        cache.append(k, v)
    assert cache.lengths.tolist() == [500]
    assert same_bits(cache.keys(), before)
    cache.append(k, v, lengths=100)
    assert cache.lengths.tolist() == [600]


def test_memory_that_runs_out_leaves_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make(CacheShape(2, 1, 8, 8, 500, 1, batch=3), "float32")
    cache = filled(k, v, "float32")
    before, pages = cache.attention(q), cache.nbytes
    given = iter(range(2))

    def take(self: Any) -> int:
        if next(given, None) is None:
            raise MemoryError("no more")
        return original(self)

    pool = type(cache._table.pool)
    original = pool.take
    monkeypatch.setattr(pool, "take", take)
    with pytest.raises(MemoryError):
        cache.append(k, v)
    monkeypatch.undo()
    assert cache.nbytes == pages
    assert same_bits(cache.attention(q), before)


class CacheMachine(RuleBasedStateMachine):
    """A cache, and what it should hold as plain arrays, through appends, rollbacks, forks and selections."""

    @initialize(name=st.sampled_from(["float32", "int8"]), batch=st.integers(1, 3))
    def start(self, name: str, batch: int) -> None:
        self.name = name
        self.random = np.random.default_rng(batch)
        self.pairs = [(sl.KVCache(batch=batch, kv_heads=1, width=4, dtype=name), [np.zeros((1, 0, 4), "f4")] * batch)]

    @rule(tokens=st.integers(0, 600), seed=st.integers(0, 9))
    def append(self, tokens: int, seed: int) -> None:
        cache, rows = self.pairs[-1]
        counts = self.random.integers(0, tokens + 1, cache.batch)
        new = np.random.default_rng(seed).integers(-127, 128, (cache.batch, 1, tokens, 4)).astype(np.float32)
        new[..., 0] = 127.0  # with a scale of one every integer is a code
        cache.append(new, new, lengths=counts)
        self.pairs[-1] = cache, [np.concatenate([row, new[i, :, : counts[i]]], axis=1) for i, row in enumerate(rows)]

    @rule(share=st.floats(0, 1))
    def truncate(self, share: float) -> None:
        cache, rows = self.pairs[-1]
        lengths = [int(share * row.shape[1]) for row in rows]
        cache.truncate(lengths)
        self.pairs[-1] = cache, [row[:, :length] for row, length in zip(rows, lengths, strict=True)]

    @rule(seed=st.integers(0, 9))
    def select(self, seed: int) -> None:
        cache, rows = self.pairs[-1]
        chosen = np.random.default_rng(seed).integers(0, cache.batch, 3)
        self.pairs = [*self.pairs[-2:], (cache.select(chosen), [rows[i] for i in chosen])]

    @invariant()
    def holds_what_it_was_given(self) -> None:
        for cache, rows in getattr(self, "pairs", []):
            assert cache.lengths.tolist() == [row.shape[1] for row in rows]
            for found in (cache.keys(), cache.values()):
                for row, expected in enumerate(rows):
                    np.testing.assert_allclose(found[row, :, : expected.shape[1]], expected, atol=1.0)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)
