"""Bad input to a cache: every reason in one error, and the cache as it was."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import softlookup as sl
from cache_cases import CacheShape, filled, make, same_bits

WRONG_CACHES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no heads": ({"kv_heads": 0}, ValueError, "kv_heads: found 0"),
    "half a head": ({"kv_heads": 1.5}, TypeError, "kv_heads: found 1.5"),
    "no width": ({"width": 0}, ValueError, "width: found 0"),
    "a bool": ({"batch": True}, TypeError, "batch: found True"),
    "float64": ({"dtype": "float64"}, ValueError, "dtype: found 'float64'"),
    "a type": ({"dtype": np.float64}, TypeError, "dtype"),
    "no type": ({"dtype": 7}, TypeError, "dtype"),
    "an empty window": ({"window": 0}, ValueError, "window: found 0"),
    "first keys alone": ({"keep_first": 4}, ValueError, "4 without a window"),
    "a negative capacity": ({"capacity": -1}, ValueError, "capacity: found -1"),
    "a word": ({"shared_values": "yes"}, TypeError, "shared_values: found 'yes'"),
    "wider values": ({"shared_values": True, "value_width": 9}, ValueError, "at most width = 8"),
    "rotated floats": ({"rotate": True}, ValueError, "an int8 or int4 cache"),
    "odd rotation": ({"rotate": True, "dtype": "int8", "width": 7}, ValueError, "even widths"),
}


@pytest.mark.parametrize(("options", "error", "words"), WRONG_CACHES.values(), ids=WRONG_CACHES)
def test_no_such_cache(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        sl.KVCache(**{"kv_heads": 1, "width": 8, **options})
    assert "softlookup.KVCache: " in str(caught.value)
    assert "fix: " in str(caught.value)


def test_all_reasons_at_once() -> None:
    with pytest.raises(TypeError) as caught:
        sl.KVCache(batch=-1, kv_heads="2", width=0, window=-3)
    assert "4 problems" in str(caught.value)


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


WRONG_APPENDS: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "a wider key": ((ones(2, 2, 3, 9), ones(2, 2, 3, 4)), {}, ValueError, r"\[2, 2, T, 8\]"),
    "more heads": ((ones(2, 4, 3, 8), ones(2, 4, 3, 4)), {}, ValueError, "k: found shape"),
    "another batch": ((ones(3, 2, 3, 8), ones(3, 2, 3, 4)), {}, ValueError, "v: found shape"),
    "heads last": ((ones(2, 3, 2, 8), ones(2, 3, 2, 4)), {}, ValueError, "swapaxes"),
    "three axes": ((ones(2, 3, 8), ones(2, 3, 4)), {}, ValueError, "k: found shape"),
    "fewer values": ((ones(2, 2, 3, 8), ones(2, 2, 2, 4)), {}, ValueError, "3 keys and 2 values"),
    "no values": ((ones(2, 2, 3, 8),), {}, TypeError, "v: found None"),
    "float64": ((ones(2, 2, 3, 8, dtype=np.float64), ones(2, 2, 3, 4)), {}, TypeError, "k: found float64"),
    "halves": ((ones(2, 2, 3, 8, dtype=np.float16), ones(2, 2, 3, 4)), {}, TypeError, "astype"),
    "bfloat16": ((ones(2, 2, 3, 8), ones(2, 2, 3, 4, dtype=ml_dtypes.bfloat16)), {}, TypeError, "v: found bfloat16"),
    "ints": ((ones(2, 2, 3, 8, dtype=int), ones(2, 2, 3, 4)), {}, TypeError, "k: found int64"),
    "a list": (([[1.0]], ones(2, 2, 3, 4)), {}, TypeError, "k: found a list"),
    "tensors": ((torch.ones(2, 2, 3, 8), torch.ones(2, 2, 3, 4)), {}, TypeError, "torch"),
    "too many lengths": ((ones(2, 2, 3, 8), ones(2, 2, 3, 4)), {"lengths": [1, 2, 3]}, ValueError, r"\[B\] = \[2\]"),
    "a length beyond": ((ones(2, 2, 3, 8), ones(2, 2, 3, 4)), {"lengths": [1, 4]}, ValueError, "4 in row 1"),
    "a negative length": ((ones(2, 2, 3, 8), ones(2, 2, 3, 4)), {"lengths": -1}, ValueError, "-1 in row 0"),
    "half a length": ((ones(2, 2, 3, 8), ones(2, 2, 3, 4)), {"lengths": 1.5}, TypeError, "lengths: found 1.5"),
    "a full cache": ((ones(2, 2, 40, 8), ones(2, 2, 40, 4)), {}, ValueError, "capacity = 60"),
}


@pytest.fixture
def cache() -> sl.KVCache:
    _, k, v = make(CacheShape(2, 2, 8, 4, 30, 1, batch=2), "float32")
    return filled(k, v, "float32", capacity=60)


def state(cache: sl.KVCache) -> tuple[Any, ...]:
    return cache.keys().tobytes(), cache.values().tobytes(), cache.lengths.tolist(), cache.nbytes


@pytest.mark.parametrize(("arrays", "options", "error", "words"), WRONG_APPENDS.values(), ids=WRONG_APPENDS)
def test_append(
    cache: sl.KVCache, arrays: tuple[Any, ...], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    before = state(cache)
    with pytest.raises(error, match=words) as caught:
        cache.append(*arrays, **options)
    assert "softlookup.KVCache.append: " in str(caught.value)
    assert state(cache) == before


def test_append_names_all_reasons(cache: sl.KVCache) -> None:
    with pytest.raises(TypeError, match="4 problems"):
        cache.append(ones(2, 2, 3, 9, dtype=np.float64), ones(1, 2, 3, 4))


def test_shared_values_take_keys_alone() -> None:
    cache = sl.KVCache(kv_heads=1, width=8, value_width=4, shared_values=True)
    with pytest.raises(TypeError, match="the values are the first columns of k"):
        cache.append(ones(1, 1, 2, 8), ones(1, 1, 2, 4))
    cache.append(ones(1, 1, 2, 8))


WRONG_CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "rollback beyond": ("truncate", (31,), {}, ValueError, "31 in row 0"),
    "negative rollback": ("truncate", ([0, -1],), {}, ValueError, "-1 in row 1"),
    "rollback of more rows": ("truncate", ([1, 2, 3],), {}, ValueError, "lengths"),
    "rollback by a word": ("truncate", ("all",), {}, TypeError, "lengths"),
    "no such row": ("select", ([0, 2],), {}, ValueError, "-2 to 1"),
    "no rows": ("select", ([],), {}, ValueError, "at least one"),
    "rows of rows": ("select", ([[0]],), {}, ValueError, "one axis"),
    "a mask of rows": ("select", ([True, False],), {}, TypeError, "rows"),
    "a wider query": ("attention", (ones(2, 2, 1, 9),), {}, ValueError, "q: found shape"),
    "an odd group": ("attention", (ones(2, 3, 1, 8),), {}, ValueError, "a multiple of 2"),
    "one sequence": ("attention", (ones(1, 2, 1, 8),), {}, ValueError, "q: found shape"),
    "a query of halves": ("attention", (ones(2, 2, 1, 8, dtype=np.float16),), {}, TypeError, "for a cache of float32"),
    "a tensor": ("attention", (torch.ones(2, 2, 1, 8),), {}, TypeError, "torch"),
    "a wide bias": ("attention", (ones(2, 2, 1, 8),), {"bias": ones(1, 31)}, ValueError, r"\[1, 30\]"),
    "a float mask": ("attention", (ones(2, 2, 1, 8),), {"mask": ones(1, 30)}, TypeError, "mask"),
    "sinks of others": ("attention", (ones(2, 2, 1, 8),), {"sinks": ones(3)}, ValueError, "sinks"),
    "a small output": ("attention", (ones(2, 2, 1, 8),), {"out": ones(2, 2, 1, 5)}, ValueError, "out"),
    "no threads": ("attention", (ones(2, 2, 1, 8),), {"threads": 0}, ValueError, "threads"),
    "no softcap": ("attention", (ones(2, 2, 1, 8),), {"softcap": -1.0}, ValueError, "softcap"),
}


@pytest.mark.parametrize(("method", "arguments", "options", "error", "words"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_calls(
    cache: sl.KVCache,
    method: str,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    before = state(cache)
    with pytest.raises(error, match=words):
        getattr(cache, method)(*arguments, **options)
    assert state(cache) == before


def test_a_mask_leaves_room_for_what_the_cache_hides() -> None:
    q, k, v = make(CacheShape(2, 2, 8, 4, 30, 3, batch=2), "float32")
    cache = sl.KVCache(batch=2, kv_heads=2, width=8, value_width=4)
    cache.append(k, v, lengths=[30, 20])
    mask: sl.Mask = sl.Window(3)
    for _ in range(127):
        mask = mask | sl.Window(3)
    with pytest.raises(ValueError, match="257 steps"):
        cache.attention(q, mask=mask)
    assert same_bits(cache.attention(q, mask=mask.left), cache.attention(q, mask=sl.Window(3)))  # type: ignore[attr-defined]


def test_repr_and_lengths_are_copies(cache: sl.KVCache) -> None:
    cache.lengths[0] = 99
    assert cache.lengths.tolist() == [30, 30]
    assert repr(cache).startswith("KVCache(batch=2, kv_heads=2, width=8, value_width=4, dtype='float32', lengths=30")
