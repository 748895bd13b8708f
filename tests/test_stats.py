"""Statistics from moments made by hand, and the manners of `Stats` and `Conventions`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

import softlookup as sl
from softlookup._attention import forced_isa
from softlookup._stats import from_moments

NAMES = [
    *("lse", "visible", "entropy", "normalized_entropy", "max_weight", "argmax", "max_score", "sum_squares"),
    *("jacobian_trace", "score_variance", "missing_mass", "distance", "first_key_mass"),
]
CONVENTIONS = sl.Conventions(1.0, None, False, False, "None", 0, 0, "float64", "none")


def moments_of(scores: list[float]) -> list[float]:
    """The core's nine numbers for one row of scores; -inf is a hidden key."""
    visible = [(column, score) for column, score in enumerate(scores) if score != -math.inf]
    if not visible:
        return [-math.inf, 0, 0, 0, 0, 0, -1, 0, -math.inf]
    top = max(score for _, score in visible)
    sums = [0.0] * 5
    for column, score in visible:
        shift = score - top
        power = math.exp(shift)
        for place, term in enumerate((power, shift * power, shift**2 * power, power**2, column * power)):
            sums[place] += term
    return [top, *sums, scores.index(top), len(visible), scores[0]]


def stats_of(rows: list[list[float]], **changes: Any) -> sl.Stats:
    """Statistics of hand-made moments: one head whose queries are the rows."""
    arguments: dict[str, Any] = {
        "sinks": None,
        "q_start": np.zeros(1, np.int64),
        "k_start": 0,
        "placed": True,
        "shape": (len(rows),),
        "dtype": np.dtype(np.float64),
        "conventions": CONVENTIONS,
    }
    return from_moments(np.array(rows, float).reshape(1, 1, len(rows), 9), **(arguments | changes))


SCORES = [1.0, -2.0, 3.5, 3.5, -math.inf, 0.25]


@pytest.mark.parametrize("sink", [None, -1.0, 3.0, 40.0, -math.inf])
def test_every_statistic_is_its_definition(sink: float | None) -> None:
    shown = [(j, s) for j, s in enumerate(SCORES) if s != -math.inf]
    keys_only = math.fsum(math.exp(s) for _, s in shown)
    total = keys_only + (0.0 if sink is None else math.exp(sink))
    actual = {j: math.exp(s) / total for j, s in shown}
    among = {j: math.exp(s) / keys_only for j, s in shown}
    entropy = -math.fsum(a * math.log(a) for a in among.values())
    mean = math.fsum(among[j] * s for j, s in shown)
    expected = {
        "lse": math.log(total),
        "visible": 5,
        "entropy": entropy,
        "normalized_entropy": entropy / math.log(5),
        "max_weight": max(actual.values()),
        "argmax": 2,
        "max_score": 3.5,
        "sum_squares": math.fsum(a * a for a in actual.values()),
        "jacobian_trace": math.fsum(a * (1 - a) for a in actual.values()),
        "score_variance": math.fsum(among[j] * (s - mean) ** 2 for j, s in shown),
        "missing_mass": 0.0 if sink is None else math.exp(sink) / total,
        "distance": math.fsum(a * (7 - (2 + j)) for j, a in among.items()),
        "first_key_mass": actual[0],
    }
    sinks = None if sink is None else np.array([sink])
    stats = stats_of([moments_of(SCORES)], sinks=sinks, q_start=np.array([7]), k_start=2)
    assert sorted(expected) == sorted(NAMES)
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(stats, name), [value], rtol=1e-12, atol=1e-15, err_msg=name)


EMPTY = moments_of([-math.inf] * 3)


@pytest.mark.parametrize(
    ("sink", "lse", "missing"),
    [(None, -math.inf, 0.0), (-math.inf, -math.inf, 0.0), (0.0, 0.0, 1.0), (-3.0, -3.0, 1.0)],
)
def test_an_empty_row(sink: float | None, lse: float, missing: float) -> None:
    stats = stats_of([EMPTY], sinks=None if sink is None else np.array([sink]))
    expected = dict.fromkeys(NAMES, 0.0) | {
        "lse": lse,
        "normalized_entropy": math.nan,
        "argmax": -1,
        "max_score": -math.inf,
        "missing_mass": missing,
    }
    for name, value in expected.items():
        np.testing.assert_array_equal(getattr(stats, name), [value], err_msg=name)


INFINITE = [math.inf, math.nan, math.nan, math.nan, math.nan, math.nan, 1, 3, 0.0]
NOT_A_NUMBER = [math.nan, math.nan, math.nan, math.nan, math.nan, math.nan, 2, 3, 0.0]
SUM_ONLY = [1.0, math.nan, 0.0, 0.0, 1.0, 0.0, 0, 3, 0.0]
ALL_MINUS_INFINITE = [-math.inf, math.nan, math.nan, math.nan, math.nan, math.nan, 0, 3, -math.inf]


@pytest.mark.parametrize("row", [INFINITE, NOT_A_NUMBER, SUM_ONLY, ALL_MINUS_INFINITE])
def test_a_broken_row_is_nan_alone(row: list[float]) -> None:
    good = moments_of([1.0, 2.0, 3.0])
    stats = stats_of([good, row, EMPTY], sinks=np.array([0.5]))
    plain = stats_of([good, good, EMPTY], sinks=np.array([0.5]))
    for name in NAMES:
        found, beside = getattr(stats, name), getattr(plain, name)
        np.testing.assert_array_equal(found[[0, 2]], beside[[0, 2]], err_msg=name)
        if name not in ("visible", "argmax"):
            assert np.isnan(found[1]), name
    assert stats.argmax[1] == -1
    assert stats.visible[1] == 3


def test_a_sink_that_is_nan_breaks_every_row() -> None:
    stats = stats_of([moments_of([1.0, 2.0]), EMPTY], sinks=np.array([math.nan]))
    assert np.isnan(stats.lse).all()
    assert np.isnan(stats.max_weight).all()
    assert (stats.argmax == -1).all()


def test_rounding_leaves_no_number_past_its_bounds() -> None:
    """Moments as float32 sums may leave them: just past what is possible."""
    rows = [
        [0.0, 1.0 - 1e-7, 1e-7, 0.0, 1.0 + 1e-7, 0.0, 0, 1, 0.0],
        [0.0, 2.0 + 1e-7, -1e-9, -1e-9, 2.0 + 1e-7, 1.0, 0, 2, 1e-7],
    ]
    stats = stats_of(rows)
    for name in ("entropy", "normalized_entropy", "max_weight", "sum_squares", "jacobian_trace", "score_variance"):
        found = getattr(stats, name)
        found = found[~np.isnan(found)]
        assert (found >= 0).all(), name
        assert (found <= 1).all() or name in ("entropy", "score_variance"), name
    for name in ("missing_mass", "first_key_mass"):
        assert ((getattr(stats, name) >= 0) & (getattr(stats, name) <= 1)).all(), name
    assert (stats.entropy <= np.log(stats.visible)).all()


def test_a_saturated_row_keeps_its_small_numbers() -> None:
    stats = stats_of([moments_of([0.0, -30.0])])
    tail = math.exp(-30.0)
    np.testing.assert_allclose(stats.jacobian_trace, [2 * tail], rtol=1e-2)
    np.testing.assert_allclose(stats.entropy, [31 * tail], rtol=1e-2)


def test_sinks_and_starts_go_to_their_own_head_and_item() -> None:
    row = moments_of([0.0, 0.0])
    moments = np.broadcast_to(np.array(row), (2, 3, 4, 9)).copy()
    stats = from_moments(
        moments,
        sinks=np.array([-math.inf, 0.0, math.log(2)]),
        q_start=np.array([10, 20]),
        k_start=5,
        placed=True,
        shape=(1, 2, 3, 4),
        dtype=np.dtype(np.float32),
        conventions=CONVENTIONS,
    )
    np.testing.assert_allclose(
        stats.missing_mass, np.broadcast_to(np.array([0, 1 / 3, 1 / 2])[:, None], (1, 2, 3, 4)), 1e-6
    )
    expected = np.array([10, 20])[:, None, None] + np.arange(4) - 5.5
    np.testing.assert_array_equal(stats.distance, np.broadcast_to(expected, (2, 3, 4))[None])
    assert all(getattr(stats, name).shape == (1, 2, 3, 4) for name in NAMES)


def test_one_start_is_an_int_or_an_array_of_it() -> None:
    rows = [moments_of(SCORES), moments_of([0.5, 1.0])]
    plain, as_array = (stats_of(rows, q_start=start, k_start=-2) for start in (9, np.array([9])))
    np.testing.assert_array_equal(plain.distance, as_array.distance)
    np.testing.assert_allclose(plain.distance[1], 9 + 1 + 2 - 1 / (1 + math.exp(-0.5)))


@pytest.mark.parametrize(("dtype", "rest"), [("float32", "float32"), ("float64", "float64"), ("float16", "float32")])
def test_types_and_shapes(dtype: str, rest: str) -> None:
    x = np.ones((2, 3, 4, 8), dtype)
    for arrays, shape in (((x, x, x), (2, 3, 4)), ((x[0, 0],) * 3, (4,))):
        _, stats = sl.attention(*arrays, stats=True)
        for name in NAMES:
            expected = {"lse": "float64", "visible": "int64", "argmax": "int64"}.get(name, rest)
            assert getattr(stats, name).dtype == expected, name
            assert getattr(stats, name).shape == shape, name


def test_distance_raises_where_positions_are_ambiguous() -> None:
    q, k = np.ones((1, 2, 4)), np.ones((1, 3, 4))
    for options in ({}, {"k_start": 1}):
        _, stats = sl.attention(q, k, k, stats=True, **options)
        with pytest.raises(ValueError, match=r"distance.*q_start.*upper_left.*lower_right"):
            _ = stats.distance
        assert stats.conventions.q_start is None
        np.testing.assert_allclose(stats.entropy, math.log(3))
    _, stats = sl.attention(q, q, q, stats=True, k_start=1)
    with pytest.raises(ValueError, match="q_start"):
        _ = stats.distance
    _, stats = sl.attention(q, k, k, stats=True, q_start="lower_right")
    np.testing.assert_allclose(stats.distance, [[0.0, 1.0]])


def test_stats_is_frozen_and_short_in_print() -> None:
    stats = stats_of([moments_of(SCORES)])
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.entropy = np.zeros(1)  # type: ignore[misc]
    assert repr(stats) == f"Stats(shape=(1,), conventions={CONVENTIONS!r})"
    assert not hasattr(stats, "topk")


def test_conventions_tell_how_it_was_computed() -> None:
    q, k = np.ones((2, 2, 3, 4), np.float32), np.ones((2, 2, 5, 4), np.float32)
    isa = sl.info()["isas"][0]
    with forced_isa(isa):
        _, stats = sl.attention(
            q,
            k,
            k,
            mask=sl.Causal() & sl.Lengths([4, 5]),
            bias=np.zeros((3, 5), np.float32),
            softcap=30,
            sinks=np.zeros(2),
            q_start=np.array([2, 3]),
            k_start=1,
            stats=True,
        )
    assert stats.conventions == sl.Conventions(
        scale=0.5,
        softcap=30.0,
        bias=True,
        sinks=True,
        mask="Causal() & Lengths([4, 5])",
        q_start=(2, 3),
        k_start=1,
        dtype="float32",
        isa=isa,
        units="nats",
    )
    _, stats = sl.attention(q, q, q, scale=0, stats=True)
    assert stats.conventions == sl.Conventions(0.0, None, False, False, "None", 0, 0, "float32", str(sl.info()["isa"]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.conventions.scale = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("sinks", [None, np.array([0.5])])
def test_weights_tell_empty_rows_from_rows_of_minus_infinity(sinks: np.ndarray | None) -> None:
    """Visible scores that are all -inf make a row NaN; hidden ones make it 0: the scores alone look the same."""
    q, k = np.array([[1.0, 1.0]]), np.array([[-np.inf, 0.0], [-np.inf, 1.0]])
    assert np.isnan(sl.attention_weights(q, k, sinks=sinks)).all()
    assert np.isnan(sl.attention(q, k, k, sinks=sinks, stats=True)[1].lse).all()
    for hidden in ({"mask": np.zeros((1, 2), bool)}, {"bias": np.full((1, 2), -np.inf)}):
        assert (sl.attention_weights(q, k, sinks=sinks, **hidden) == 0).all()
