"""Attention over a cache of floats: the bits of `attention` over the same keys and values, whatever the options.

`attention` is held to the oracle elsewhere; here a few calls are too, so that the two cannot err together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import softlookup as sl
from agreement import INDICES, STATISTICS, on
from cache_cases import ALL, CLOSE, CODES, FLOATS, SHAPES, CacheShape, empty, filled, make, same_bits
from softlookup import reference

RAGGED = np.array([700, 0, 3, 513])


def both(q: Any, k: Any, v: Any, cache: sl.KVCache, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """The cache's answer, and that of the arrays."""
    plain = {"mask": sl.Causal(), "q_start": k.shape[2] - q.shape[2], **options}
    return cache.attention(q, **options), sl.attention(q, k, v, **plain)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", FLOATS)
def test_bits_of_the_prefill(shape: CacheShape, name: str, isa: str) -> None:
    q, k, v = make(shape, name)
    with on(isa):
        found, expected = both(q, k, v, filled(k, v, name, (shape.tokens // 2,)))
    assert same_bits(found, expected)


@pytest.mark.parametrize("name", ALL)
def test_chunks_threads_batch_and_queries_leave_the_bits(name: str, isa: str) -> None:
    q, k, v = make(CacheShape(6, 2, 48, 40, 1100, 9, batch=3), name)
    with on(isa):
        whole = filled(k, v, name, (40,)).attention(q, threads=1)
        pieces = filled(k, v, name, (40, 41, 500, 513, 1099))
        assert same_bits(pieces.attention(q, threads=2), whole)
        assert same_bits(pieces.attention(q, threads=3, stats=True)[0], whole)
        alone = filled(k[1:2], v[1:2], name, (40,))
        assert same_bits(alone.attention(q[1:2]), whole[1:2])
        for row in (0, 5, 8):
            alone.truncate(1100 - 8 + row)
            assert same_bits(alone.attention(q[1:2, :, row : row + 1]), whole[1:2, :, row : row + 1])
            alone.append(k[1:2, :, 1100 - 8 + row :], v[1:2, :, 1100 - 8 + row :])


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
@pytest.mark.parametrize("name", FLOATS)
def test_groups(group: int, name: str) -> None:
    q, k, v = make(CacheShape(2 * group, 2, 64, 64, 650, 1), name)
    found, expected = both(q, k, v, filled(k, v, name))
    assert same_bits(found, expected)


@pytest.mark.parametrize("queries", [2, 3, 4, 8, 13, 31, 32, 33])
def test_many_queries(queries: int) -> None:
    q, k, v = make(CacheShape(4, 2, 64, 64, 650, queries), "float32")
    found, expected = both(q, k, v, filled(k, v, "float32"))
    assert same_bits(found, expected)


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {"mask": sl.Full()},
    "window": {"mask": sl.Window(100, 5)},
    "lengths": {"mask": sl.Causal() & sl.Lengths([600, 20])},
    "predicate": {"mask": sl.Predicate(lambda b, h, i, j: (i + j + b + h) % 3 != 0)},
    "array": {"mask": np.random.default_rng(1).random((2, 4, 6, 700)) < 0.4},
    "softcap": {"softcap": 2.0, "scale": 0.4},
    "sinks": {"sinks": np.array([0.0, 1.0, -np.inf, 3.0], np.float32)},
    "bias": {"bias": np.random.default_rng(2).standard_normal((6, 700)).astype(np.float32)},
    "negative_scale": {"scale": -0.4},
    "positions": {"q_start": np.array([100, 650])},
    "out_dtype": {"out_dtype": "float64"},
}


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options: dict[str, Any], name: str) -> None:
    q, k, v = make(CacheShape(4, 2, 48, 32, 700, 6, batch=2), name)
    found, expected = both(q, k, v, filled(k, v, name, (512,)), **options)
    assert same_bits(found, expected)


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_of_codes(options: dict[str, Any], name: str) -> None:
    q, k, v = make(CacheShape(4, 2, 48, 32, 700, 6, batch=2), name)
    cache = filled(k, v, name, (512,))
    found, expected = both(q, cache.keys(), cache.values(), cache, **options)
    sharpness = max(1.0, abs(options.get("scale", 0.0)) * 48**0.5)  # scores are off by so much more
    assert np.abs(found.astype(np.float64) - expected).max() < sharpness * CLOSE[name]


@pytest.mark.parametrize("name", ALL)
def test_statistics(name: str) -> None:
    q, k, v = make(CacheShape(4, 2, 48, 32, 700, 3), name)
    cache = filled(k, v, name)
    out, found = cache.attention(q, stats=True)
    assert same_bits(out, cache.attention(q))
    _, expected = sl.attention(q.astype(np.float32), cache.keys().astype(np.float32), cache.values().astype(np.float32),
                               mask=sl.Causal(), q_start=697, stats=True)  # fmt: skip
    near = CLOSE.get(name, 2e-3)
    for field in STATISTICS:
        left, right = getattr(found, field), getattr(expected, field)
        np.testing.assert_allclose(left, right, rtol=near, atol=near / 10, err_msg=field)
    for field in INDICES:
        assert np.array_equal(getattr(found, field), getattr(expected, field)), field
    assert found.conventions.dtype == name


@pytest.mark.parametrize("name", ALL)
def test_ragged_rows(name: str) -> None:
    q, k, v = make(CacheShape(4, 2, 32, 32, 700, 5, batch=4), name)
    cache = empty(k, v, name)
    poisoned_k, poisoned_v = k.copy(), v.copy()
    for row, length in enumerate(RAGGED):  # what lies past a row's length is never read
        poisoned_k[row, :, length:], poisoned_v[row, :, length:] = np.nan, np.inf
    cache.append(poisoned_k, poisoned_v, lengths=RAGGED)
    assert np.array_equal(cache.lengths, RAGGED)
    for mask in (None, sl.Full(), sl.Window(60, 0)):
        found = cache.attention(q, mask=mask)
        assert np.isfinite(found.astype(np.float32)).all()
        for row, length in enumerate(RAGGED):
            alone = filled(k[row : row + 1, :, :length], v[row : row + 1, :, :length], name)
            assert same_bits(found[row : row + 1], alone.attention(q[row : row + 1], mask=mask)), (row, mask)
    assert not found[1].any()  # a row without keys is empty


@pytest.mark.parametrize("name", FLOATS)
def test_the_oracle(name: str) -> None:
    q, k, v = make(CacheShape(4, 2, 24, 40, 600, 3), name)
    expected, _ = reference.attention(q, k, v, mask=sl.Causal().dense(1, 4, 3, 600, 597))
    found = filled(k, v, name).attention(q, out_dtype="float32")
    np.testing.assert_allclose(found, expected, atol=1e-2 if name == "bfloat16" else 1e-5)


@pytest.mark.parametrize("name", ALL)
def test_shared_values(name: str, isa: str) -> None:
    q, k, _ = make(CacheShape(32, 1, 192, 128, 560, 2), name)
    with on(isa):
        cache = sl.KVCache(kv_heads=1, width=192, value_width=128, dtype=name, shared_values=True)
        cache.append(k[:, :, :500])
        cache.append(k[:, :, 500:])
        keys = cache.keys()
        assert same_bits(cache.values(), np.ascontiguousarray(keys[..., :128]))
        expected = sl.attention(q, keys, keys[..., :128], mask=sl.Causal(), q_start=558)
        found = cache.attention(q)
    if name in FLOATS:
        assert same_bits(found, expected)
    else:
        assert np.abs(found - expected).max() < CLOSE[name]
    twice = filled(k, k[..., :128], name)
    assert cache.nbytes < 0.65 * twice.nbytes or name in CODES


def test_empty_caches() -> None:
    q, k, v = make(CacheShape(4, 2, 16, 24, 4, 3), "float32")
    cache = empty(k, v, "float32")
    assert not cache.attention(q).any()
    out, stats = cache.attention(q, stats=True, sinks=np.ones(4, np.float32))
    assert not out.any()
    assert (stats.lse == 1.0).all()
    cache.append(k[:, :, :0], v[:, :, :0])
    assert cache.lengths.tolist() == [0]
    cache.append(k[:, :, :2], v[:, :, :2])
    found = cache.attention(q)  # more queries than keys: the first stands before key 0
    assert not found[:, :, 0].any()
    assert same_bits(found, sl.attention(q, k[:, :, :2], v[:, :, :2], mask=sl.Causal(), q_start=-1))
    assert cache.attention(q[:, :, :0]).shape == (1, 4, 0, 24)


def test_what_is_not_finite_shows_only_where_it_is_seen() -> None:
    q, k, v = make(CacheShape(4, 2, 16, 16, 600, 4), "float32")
    k[0, 0, 599], v[0, 1, 598] = np.nan, np.inf
    found, expected = both(q, k, v, filled(k, v, "float32"))
    assert same_bits(found, expected)
    assert np.isfinite(found[:, :, 0]).all()
    assert not np.isfinite(found[:, :, 3]).all()


def test_output_arrays() -> None:
    q, k, v = make(CacheShape(4, 2, 16, 24, 40, 3), "float32")
    for name, options in (("float32", {}), ("int8", {"rotate": True})):
        cache = filled(k, v, name, **options)
        out = np.full((1, 3, 4, 24), np.nan, np.float32).swapaxes(1, 2)
        assert cache.attention(q, out=out) is out
        assert same_bits(out, cache.attention(q))

    def stop(*_: Any) -> np.ndarray:
        raise ValueError("stopped")

    with pytest.raises(ValueError, match="stopped"):
        cache.attention(q, mask=sl.Predicate(stop), out=out)
    assert np.isfinite(out).all()


def test_a_query_that_is_not_finite_makes_its_row_of_codes_nan() -> None:
    q, k, v = make(CacheShape(4, 2, 16, 24, 40, 3), "int8")
    q[0, 1, 2, 3], q[0, 2, 0, 0] = np.nan, np.inf
    found = np.isnan(filled(k, v, "int8").attention(q)).all(axis=-1)
    assert found[0].nonzero()[0].tolist() == [1, 2]
    assert found[0, 1, 2]
    assert found[0, 2, 0]
