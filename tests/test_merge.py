"""sl.merge: partial lookups over disjoint keys are one lookup over all of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import softlookup as sl
from agreement import assert_within, expect, on
from cases import TYPES, UNIT_ROUNDOFF, Shape, arrays
from softlookup import reference

ACCUMULATED = ["float32", "float64"]


def parts(q, k, v, cuts, **options):
    """Outs and lses of the stretches of keys between the cuts; bias and mask arrays are cut too."""
    outs, lses = [], []
    for start, stop in itertools.pairwise(cuts):
        keys = slice(start, stop)
        cut = {name: x[..., keys] for name, x in options.items()}
        out, stats = sl.attention(q, k[..., keys, :], v[..., keys, :], stats=True, **cut)
        outs.append(out)
        lses.append(stats.lse)
    return outs, lses


@pytest.mark.parametrize("sinks", [None, np.array([0.5, -np.inf, 2.0, -1.0], np.float32)])
@pytest.mark.parametrize("type_name", ACCUMULATED)
def test_stretches_of_keys_join_exactly(type_name: str, sinks: np.ndarray | None, isa: str) -> None:
    q, k, v = arrays(Shape(9, 700, heads=4, key_heads=2, leading=(2,)), type_name)
    mask = np.random.default_rng(0).random((2, 4, 9, 700)) < 0.3
    mask[0, 0, :, :512] = False
    mask[1, 1] = False
    with on(isa):
        outs, lses = parts(q, k, v, [0, 1, 130, 512, 512, 700], mask=mask)
        out, lse = sl.merge(outs, lses, sinks=sinks)
        whole, stats = sl.attention(q, k, v, mask=mask, sinks=sinks, stats=True)
    expected, expected_stats, tolerance = expect(q, k, v, mask=mask, sinks=sinks)
    allowed = 2 * tolerance.out(expected, float(np.abs(v).max()), type_name, False)
    assert_within(out.astype(float), expected, allowed, "out")
    assert_within(out.astype(float), whole.astype(float), 2 * allowed, "whole")
    assert_within(lse, expected_stats.lse, 2 * tolerance.statistic("lse"), "lse")
    assert lse.dtype == np.float64
    assert out.dtype == q.dtype
    assert not out[1, 1].any()
    np.testing.assert_array_equal(lse[1, 1], -np.inf if sinks is None else sinks[1])
    assert stats.lse.shape == lse.shape


@given(data=st.data())
def test_any_parts_as_the_oracle_joins_them(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    leading = data.draw(st.sampled_from([(), (2,), (2, 3), (0,)]))
    heads, queries, width = (data.draw(st.integers(0 if i else 1, 5)) for i in range(3))
    type_name = data.draw(st.sampled_from(list(TYPES)))
    count = data.draw(st.integers(1, 5))
    shape = (*leading, heads, queries)
    outs = [rng.standard_normal((*shape, width)).astype(TYPES[type_name]) for _ in range(count)]
    lses = [np.where(rng.random(shape) < 0.2, -np.inf, 50 * rng.standard_normal(shape)) for _ in range(count)]
    sinks = rng.standard_normal(heads).astype(np.float32) if data.draw(st.booleans()) else None
    out, lse = sl.merge(outs, lses, sinks=sinks)
    expected, expected_lse = reference.merge(outs, lses, sinks=sinks)
    assert out.dtype == TYPES[type_name]
    accumulated = UNIT_ROUNDOFF["float64" if type_name == "float64" else "float32"]
    largest = max((np.abs(x.astype(float)).max(initial=0) for x in outs), default=0)
    # A share is exp(lse - total): it errs by the spacing of the largest logarithm there is.
    logarithms = max(np.abs(x[np.isfinite(x)]).max(initial=1.0) for x in (*lses, expected_lse))
    of_shares = 4 * UNIT_ROUNDOFF["float64"] * logarithms
    allowed = (16 * accumulated + of_shares) * largest + UNIT_ROUNDOFF[type_name] * np.abs(expected)
    assert_within(out.astype(float), expected, allowed, "out")
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=of_shares)


def test_one_part_is_itself() -> None:
    rng = np.random.default_rng(1)
    out, lse = rng.standard_normal((2, 3, 4)).astype(np.float32), rng.standard_normal((2, 3))
    merged, merged_lse = sl.merge([out], [lse])
    np.testing.assert_array_equal(merged, out)
    np.testing.assert_array_equal(merged_lse, lse)


def test_a_part_that_saw_no_key_leaves_no_trace() -> None:
    seen, blank = np.full((1, 2, 3), 5, np.float32), np.full((1, 2, 3), np.nan, np.float32)
    out, lse = sl.merge([blank, seen, blank], [np.full((1, 2), -np.inf), np.zeros((1, 2)), np.full((1, 2), -np.inf)])
    np.testing.assert_array_equal(out, seen)
    np.testing.assert_array_equal(lse, 0)
    out, lse = sl.merge([np.zeros_like(seen)] * 2, [np.full((1, 2), -np.inf)] * 2)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)


def test_what_is_not_finite_shows_whatever_its_share() -> None:
    outs = [np.array([[np.inf, np.nan, 1, np.inf]]), np.array([[1.0, 1, 1, -np.inf]])]
    out, lse = sl.merge(outs, [np.array([0.0]), np.array([2000.0])])
    np.testing.assert_array_equal(out, [[np.inf, np.nan, 1, np.nan]])
    np.testing.assert_array_equal(lse, [2000])
    out, _ = sl.merge(outs, [np.array([np.nan]), np.array([0.0])])
    assert np.isnan(out).all()


def test_merging_pairs_then_pairs_is_merging_all() -> None:
    rng = np.random.default_rng(2)
    outs, lses = rng.standard_normal((4, 2, 5, 3)), 3 * rng.standard_normal((4, 2, 5))
    left, right = sl.merge(list(outs[:2]), list(lses[:2])), sl.merge(list(outs[2:]), list(lses[2:]))
    nested = sl.merge([left[0], right[0]], [left[1], right[1]])
    flat = sl.merge(list(outs), list(lses))
    np.testing.assert_allclose(nested[0], flat[0], rtol=0, atol=1e-14)
    np.testing.assert_allclose(nested[1], flat[1], rtol=1e-14)


def test_sinks_count_once() -> None:
    q, k, v = arrays(Shape(3, 8, heads=2, key_heads=2), "float64")
    sinks = np.array([1.0, -2.0], np.float32)
    outs, lses = parts(q, k, v, [0, 4, 8])
    once, lse = sl.merge(outs, lses, sinks=sinks)
    whole, stats = sl.attention(q, k, v, sinks=sinks, stats=True)
    np.testing.assert_allclose(once, whole, rtol=0, atol=1e-14)
    np.testing.assert_allclose(lse, stats.lse, rtol=1e-14)


@pytest.mark.parametrize(
    ("outs", "lses"),
    [
        ([], []),
        ([np.zeros((1, 2, 3), "f4")], []),
        ([np.zeros((1, 2, 3), "f4")], [np.zeros((1, 3))]),
        ([np.zeros((1, 2, 3), "f4"), np.zeros((1, 2, 4), "f4")], [np.zeros((1, 2))] * 2),
    ],
    ids=["nothing", "no lse", "lse of another shape", "outs of two shapes"],
)
def test_parts_that_do_not_fit_are_refused(outs: list[np.ndarray], lses: list[np.ndarray]) -> None:
    with pytest.raises(ValueError, match=r"merge|outs|lses"):
        sl.merge(outs, lses)
