"""The seed's worked example, and the properties it derives for every attention."""

import math

import numpy as np
import pytest

import softlookup as sl
from agreement import on
from cases import SHAPES, TYPES, Shape, arrays

QUERY = [[2, 1]]
KEYS = [[1, 0], [0, 2], [2, 2], [-1, 1]]
VALUES = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]]
EXACT = ("float32", "float64")


def _example(type_name: str) -> list[np.ndarray]:
    return [np.array(x, dtype=TYPES[type_name]) for x in (QUERY, KEYS, VALUES)]


@pytest.mark.parametrize("type_name", EXACT)
def test_worked_lookup(type_name: str, isa: str) -> None:
    q, k, v = _example(type_name)
    with on(isa):
        out, stats = sl.attention(q, k, v, stats=True)
        weights = sl.attention_weights(q, k, v)
        unscaled = sl.attention_weights(q, k, v, scale=1)
    np.testing.assert_array_equal(weights.round(5), np.array([[0.05252, 0.05252, 0.88865, 0.00630]], q.dtype))
    np.testing.assert_array_equal(out.round(5), np.array([[0.05882, 0.05882, 0.89495]], q.dtype))
    np.testing.assert_array_equal(unscaled.round(5), np.array([[0.01765, 0.01765, 0.96382, 0.00088]], q.dtype))
    assert stats.lse[0] == pytest.approx(math.log(78.31), abs=1e-4)
    assert stats.max_score[0] == pytest.approx(4.243, abs=5e-4)
    assert stats.argmax[0] == 2


def test_worked_lookup_in_half_types(isa: str) -> None:
    for type_name, tolerance in {"float16": 2**-11, "bfloat16": 2**-8}.items():
        with on(isa):
            out = sl.attention(*_example(type_name))
        np.testing.assert_allclose(out.astype(float), [[0.05882, 0.05882, 0.89495]], rtol=0, atol=tolerance)


def test_rows_sum_to_one(type_name: str, isa: str) -> None:
    for shape in (SHAPES["groups"], SHAPES["block_edge"]):
        q, k, v = arrays(shape, type_name)
        ones = np.ones_like(v)
        with on(isa):
            out = sl.attention(q, k, ones)
            weights = sl.attention_weights(q, k, v)
        np.testing.assert_allclose(out.astype(float), 1, atol=2**-8 if type_name == "bfloat16" else 1e-5)
        np.testing.assert_allclose(weights.sum(axis=-1, dtype=float), 1, atol=1e-5)
        assert (weights >= 0).all()


@pytest.mark.parametrize("type_name", EXACT)
def test_out_lies_in_the_convex_hull(type_name: str, isa: str) -> None:
    """Between the extremes of the values along any direction, not only along the axes."""
    q, k, v = arrays(Shape(30, 50, heads=2, key_heads=1), type_name, seed=3)
    with on(isa):
        out = sl.attention(q, k, v)
    directions = np.random.default_rng(0).standard_normal((16, 200))
    projected, corners = out @ directions, v @ directions
    assert (projected <= corners.max(axis=-2, keepdims=True) + 1e-5).all()
    assert (projected >= corners.min(axis=-2, keepdims=True) - 1e-5).all()


def test_out_is_never_longer_than_the_longest_value(type_name: str, isa: str) -> None:
    q, k, v = arrays(SHAPES["one_key_head"], type_name, seed=4)
    with on(isa):
        out = sl.attention(q, k, v, mask=sl.Causal())
    longest = np.linalg.norm(v.astype(float), axis=-1).max()
    assert np.linalg.norm(out.astype(float), axis=-1).max() <= longest * (1 + 2**-7)


@pytest.mark.parametrize("shift", [-1000.0, 3.0, 4096.0])
def test_scores_may_be_shifted(shift: float, isa: str) -> None:
    """Adding c to every score leaves the weights and moves lse by c."""
    q, k, v = arrays(Shape(6, 40, key_width=8), "float64")
    with on(isa):
        out, stats = sl.attention(q, k, v, stats=True)
        moved, moved_stats = sl.attention(q, k, v, bias=np.full((6, 40), shift), stats=True)
    np.testing.assert_allclose(moved, out, rtol=0, atol=1e-11)
    np.testing.assert_allclose(moved_stats.lse, stats.lse + shift, rtol=0, atol=1e-11)
    np.testing.assert_allclose(moved_stats.entropy, stats.entropy, atol=1e-10)


def test_mask_before_the_softmax_renormalises_where_zeroing_after_shrinks(isa: str) -> None:
    q, k, v = arrays(Shape(8, 8), "float64")
    hidden = ~np.tri(8, dtype=bool)
    with on(isa):
        before = sl.attention_weights(q, k, v, mask=sl.Causal())
        weights = sl.attention_weights(q, k, v)
        out = sl.attention(q, k, v, mask=sl.Causal())
    zeroed = np.where(hidden, 0, weights)
    assert (zeroed[0, :-1].sum(axis=-1) < 1 - 1e-3).all()
    np.testing.assert_allclose(before, zeroed / zeroed.sum(axis=-1, keepdims=True), rtol=1e-12)
    assert not before[0][hidden].any()
    np.testing.assert_allclose(out, before @ v, rtol=1e-12)


def test_large_beta_is_the_hard_lookup_and_small_beta_the_mean(isa: str) -> None:
    q, k, v = arrays(Shape(5, 12, key_width=4), "float64", seed=9)
    best = np.argmax(q @ k.swapaxes(-1, -2), axis=-1)
    distance = []
    with on(isa):
        for beta in (1.0, 10.0, 100.0, 1e4, 1e8):
            out, stats = sl.attention(q, k, v, scale=beta, stats=True)
            distance.append(np.abs(out - v[0][best]).max())
        uniform, flat = sl.attention(q, k, v, scale=0, stats=True)
    assert distance == sorted(distance, reverse=True)
    assert distance[-1] == 0
    np.testing.assert_array_equal(stats.argmax, best)
    np.testing.assert_array_equal(stats.jacobian_trace, 0)
    np.testing.assert_allclose(uniform, v.mean(axis=-2, keepdims=True) + 0 * uniform, rtol=1e-13)
    np.testing.assert_allclose(flat.entropy, math.log(12), rtol=1e-13)
    np.testing.assert_allclose(flat.normalized_entropy, 1, rtol=1e-13)


def test_unscaled_scores_saturate_as_the_width_grows(isa: str) -> None:
    """The seed's reason for 1 / sqrt(d_k): at d_k = 64 unscaled rows are nearly one-hot."""
    q, k, v = arrays(Shape(64, 64, key_width=64), "float32")
    with on(isa):
        _, scaled = sl.attention(q, k, v, stats=True)
        _, raw = sl.attention(q, k, v, scale=1, stats=True)
    assert scaled.score_variance.mean() == pytest.approx(1, abs=0.35)
    assert scaled.normalized_entropy.mean() > 0.8
    assert raw.normalized_entropy.mean() < 0.3
    assert raw.jacobian_trace.mean() < 0.5 * scaled.jacobian_trace.mean()


def test_order_of_the_keys_is_no_matter(isa: str) -> None:
    q, k, v = arrays(Shape(5, 200), "float64")
    order = np.random.default_rng(1).permutation(200)
    with on(isa):
        out, stats = sl.attention(q, k, v, stats=True)
        permuted, moved = sl.attention(q, k[:, order], v[:, order], stats=True)
    np.testing.assert_allclose(permuted, out, rtol=0, atol=1e-14)
    np.testing.assert_array_equal(order[moved.argmax], stats.argmax)
