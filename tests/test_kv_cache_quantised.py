"""The contract of codes: what a cache of int8 or int4 holds, and how far its attention may be from exact attention.

A stored number is off by at most half a step of its token: factor times scale / 2, where the scale is at most the
token's largest remainder over the largest code; keys of int4 have one for every 32 columns. Attention over what is
stored is off by the codes of queries and weights, half a step each: a query's step is its largest number over 32767
(int4: 127), a weight's its tile's largest over 32767 (int4: 255).
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import softlookup as sl
from agreement import on
from cache_cases import CLOSE, CODES, CacheShape, filled, make, same_bits
from softlookup import reference
from softlookup._cache_content import content_of
from softlookup._quantize import scales_of_columns

LARGEST = {"int8": 127, "int4": 7}
HALF_QUERY = {"int8": 0.5 / 32767, "int4": 0.5 / 127}
HALF_WEIGHT = {"int8": 0.5 / 32767, "int4": 0.5 / 255}
FLOAT32 = 2.0**-20  # sums of float32 around the codes


def bounds(cache: sl.KVCache) -> tuple[np.ndarray, np.ndarray]:
    """Half a step of every stored key and value, without what rotation mixes."""
    arrays = content_of(cache).arrays
    factors = arrays["key_factors"][0, :, None, : cache.width]
    return (
        factors * np.abs(scales_of_columns(arrays["key_scales"], cache.width)) / 2,
        arrays["value_scales"][..., None] / 2 * np.ones(cache.value_width),
    )


@pytest.mark.parametrize("name", CODES)
@given(
    seed=st.integers(0, 2**31),
    width=st.sampled_from([1, 3, 24, 80, 96]),
    first=st.sampled_from([1, 15, 16, 100]),
    spread=st.sampled_from([1e-3, 1.0, 1e4]),
    kind=st.sampled_from(["noise", "constant channel", "outlier token", "zero token", "loud channel"]),
)
def test_stored_numbers_are_off_by_half_a_step(
    name: str, seed: int, width: int, first: int, spread: float, kind: str
) -> None:
    rng = np.random.default_rng(seed)
    k, v = (spread * rng.standard_normal((2, 1, 2, 130, width))).astype(np.float32)
    if kind == "constant channel":
        k[..., 0] = v[..., 0] = 3.0 * spread
    elif kind == "outlier token":
        k[:, :, 7], v[:, :, 7] = 1e4 * k[:, :, 7], 1e4 * v[:, :, 7]
    elif kind == "zero token":
        k[:, :, 3] = v[:, :, 3] = 0
    elif kind == "loud channel":
        k[..., 0] += 100 * spread
    cache = filled(k, v, name, (first,))
    key_bound, value_bound = bounds(cache)
    slack = FLOAT32 * (np.abs(k).max() + np.abs(v).max())
    assert (np.abs(cache.keys() - k)[0] <= key_bound + slack).all()
    assert (np.abs(cache.values() - v)[0] <= value_bound + slack).all()
    assert (value_bound[..., 0] <= np.abs(v[0]).max(axis=-1) / (2 * LARGEST[name]) + slack).all()


def test_keys_of_int4_have_a_scale_for_every_32_columns() -> None:
    """A loud group leaves the steps of the others alone, and the larger side gets the eighth code."""
    k, v = np.random.default_rng(0).standard_normal((2, 1, 2, 40, 80)).astype(np.float32)
    k[..., 32:64] *= 1000
    cache = filled(k, v, "int4", (1,))  # one token at first: means are 0 and factors 1
    arrays = content_of(cache).arrays
    scales = arrays["key_scales"]
    largest = np.stack([np.abs(group).max(axis=-1) for group in np.split(k[0], [32, 64], axis=-1)], axis=-1)
    assert (np.abs(scales) <= largest / 7.5 * (1 + FLOAT32)).all()
    assert (np.abs(scales) >= largest / 8.5 * (1 - FLOAT32)).all()
    assert (scales < 0).any()
    assert (scales > 0).any()
    assert arrays["keys"].min() == -8
    assert arrays["keys"].max() == 7
    assert (arrays["value_scales"] > 0).all()  # they multiply weights


def test_columns_that_are_values_too_share_a_scale() -> None:
    k, _ = np.random.default_rng(0).standard_normal((2, 1, 2, 40, 96)).astype(np.float32)
    cache = sl.KVCache(kv_heads=2, width=96, value_width=64, dtype="int4", shared_values=True)
    cache.append(k)
    scales = content_of(cache).arrays["key_scales"]
    assert scales.shape == (2, 40, 1)
    assert (scales > 0).all()


def distance_bound(cache: sl.KVCache, q: np.ndarray, scale: float) -> float:
    """How far attention over codes may be from float64 attention over `keys()` and `values()`."""
    keys, values = cache.keys().astype(np.float64), cache.values().astype(np.float64)
    mean = keys.mean(axis=2, keepdims=True)
    # A query's code is off by half a step in every column; softmax turns that into weights off by e^(2 delta) - 1.
    delta = scale * HALF_QUERY[cache.dtype] * np.abs(q).max() * 64 * np.abs(keys - mean).sum(axis=-1).max()
    weights = np.expm1(2 * delta) + keys.shape[2] * HALF_WEIGHT[cache.dtype]
    return float((weights + FLOAT32 * 8) * np.abs(values).max())


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("width", [2, 24, 80, 96, 576])
def test_attention_meets_what_is_stored(name: str, rotate: bool, width: int, isa: str) -> None:
    shape = CacheShape(6, 2, width, 40, 700, 5)
    q, k, v = make(shape, "float32")
    with on(isa):
        cache = filled(k, v, name, (300,), rotate=rotate)
        found = cache.attention(q)
    expected, _ = reference.attention(q, cache.keys(), cache.values(), mask=sl.Causal().dense(1, 6, 5, 700, 695))
    assert np.abs(found - expected).max() <= distance_bound(cache, q, width**-0.5)
    assert np.abs(found - expected).max() < CLOSE[name]


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("sharpness", [0.2, 1.0, 3.0])
def test_products_of_codes_add_little(name: str, rotate: bool, sharpness: float) -> None:
    """What the codes of queries and weights cost is small beside what those of keys and values do."""
    q, k, v = make(CacheShape(8, 2, 64, 64, 1500, 4), "float32")
    q *= sharpness
    cache = filled(k, v, name, rotate=rotate)
    exact, stored = (
        sl.attention(q, keys, values, mask=sl.Causal(), q_start=1496)
        for keys, values in ((k, v), (cache.keys(), cache.values()))
    )
    assert np.linalg.norm(cache.attention(q) - stored) < 0.1 * np.linalg.norm(stored - exact)


@pytest.mark.parametrize(("name", "most"), [("int8", 0.03), ("int4", 0.4)])
@pytest.mark.parametrize("rotate", [False, True])
def test_attention_is_near_the_exact_one(name: str, most: float, rotate: bool) -> None:
    q, k, v = make(CacheShape(8, 2, 64, 64, 1500, 4), "float32")
    exact = sl.attention(q, k, v, mask=sl.Causal(), q_start=1496)
    found = filled(k, v, name, rotate=rotate).attention(q)
    assert np.linalg.norm(found - exact) / np.linalg.norm(exact) < most


def test_a_constant_channel_costs_nothing() -> None:
    """Case 44: a key channel that is constant 3.0 keeps its value, and leaves the other channels theirs."""
    q, k, v = make(CacheShape(2, 1, 96, 80, 400, 1), "float32")
    plain = filled(k, v, "int4").attention(q)
    k[..., 5] = 3.0
    cache = filled(k, v, "int4")
    np.testing.assert_allclose(cache.keys()[..., 5], 3.0, atol=1e-6)
    assert np.isfinite(cache.attention(q)).all()
    q[..., 5] = 0  # nobody looks at it: the answer is that of the other channels, up to their own steps
    assert np.abs(cache.attention(q) - plain).max() < 0.5


def test_a_loud_channel_leaves_the_others() -> None:
    """Case 45: channel 0 is 100 + noise, the others are noise; the others survive in four bits."""
    _, k, v = make(CacheShape(2, 1, 64, 64, 600, 1), "float32")
    k[..., 0] += 100
    cache = filled(k, v, "int4", (64,))
    error = np.abs(cache.keys() - k)[..., 1:]
    assert error.max() < 0.45
    assert np.corrcoef(cache.keys()[..., 1:].ravel(), k[..., 1:].ravel())[0, 1] > 0.98


@pytest.mark.parametrize("name", CODES)
def test_an_outlier_token_spoils_no_other(name: str) -> None:
    _, k, v = make(CacheShape(2, 1, 32, 32, 600, 1), "float32")
    quiet = filled(k, v, name, (100,))
    k[:, :, 300], v[:, :, 300] = 1e4, -1e4
    loud = filled(k, v, name, (100,))
    others = np.r_[0:300, 301:600]
    assert same_bits(loud.keys()[:, :, others], quiet.keys()[:, :, others])
    assert same_bits(loud.values()[:, :, others], quiet.values()[:, :, others])


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_no_code_stands_for_is_refused(name: str, bad: float) -> None:
    q, k, v = make(CacheShape(2, 2, 16, 16, 20, 1), "float32")
    for first in (0, 20):
        cache = filled(k[:, :, :first], v[:, :, :first], name)
        before = cache.nbytes, cache.keys(), cache.attention(q)
        for spoiled in (0, 1):
            arrays = [k.copy(), v.copy()]
            arrays[spoiled][0, 1, 19, 3] = bad
            with pytest.raises(ValueError, match="NaN or inf"):
                cache.append(*arrays)
            cache.append(*arrays, lengths=0)
        assert cache.lengths.tolist() == [first]
        assert cache.nbytes == before[0]
        assert same_bits(cache.keys(), before[1])
        assert same_bits(cache.attention(q), before[2])


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("type_name", ["float16", "bfloat16"])
def test_halves_become_codes(name: str, type_name: str) -> None:
    q, k, v = make(CacheShape(4, 2, 32, 32, 200, 2), type_name)
    cache = sl.KVCache(kv_heads=2, width=32, dtype=name)
    cache.append(k, v)
    wide = filled(k.astype(np.float32), v.astype(np.float32), name)
    assert same_bits(cache.keys(), wide.keys())
    found = cache.attention(q)
    assert found.dtype == q.dtype
    assert same_bits(cache.attention(q, out_dtype="float32"), wide.attention(q.astype(np.float32)))
