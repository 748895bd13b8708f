"""NaN, infinities, extreme numbers and empty rows: what is visible spreads, what is hidden never shows."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import expressions as ex
import softlookup as sl
from agreement import compare, on
from cases import TYPES, Shape, arrays

POISONS = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
SHAPE = Shape(6, 150, heads=2, key_heads=1, key_width=5, value_width=3)


@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
@pytest.mark.parametrize("place", ["q", "k", "v"])
def test_visible_poison_spreads_as_in_the_oracle(place: str, poison: float, type_name: str, isa: str) -> None:
    held = dict(zip("qkv", arrays(SHAPE, type_name), strict=True))
    held[place][0, 3, 1] = poison
    compare(**held, isa=isa)
    held[place][0, -1, 0] = poison
    compare(**held, isa=isa, written=ex.window(2, 1), q_start="lower_right")


@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
def test_only_the_rows_that_see_a_poisoned_key_show_it(poison: float, type_name: str, isa: str) -> None:
    q, k, v = arrays(Shape(150, 150, key_width=5, value_width=3), type_name)
    v[0, 70, 1] = poison
    with on(isa):
        out, stats = sl.attention(q, k, v, mask=sl.Window(3, 0), stats=True)
    touched = ~np.isfinite(out[0].astype(float))
    expected = np.zeros_like(touched)
    expected[70:74, 1] = True
    np.testing.assert_array_equal(touched, expected)
    assert np.isfinite(stats.lse).all()


@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
@pytest.mark.parametrize("mask_name", ["lengths", "dense", "window", "bias", "predicate"])
def test_hidden_poison_never_shows(mask_name: str, poison: float, type_name: str, isa: str) -> None:
    """Keys 20 to 139 and the last row are hidden; their numbers are garbage of every kind."""
    q, k, v = arrays(Shape(150, 150, key_width=5, value_width=3), type_name)
    shown = np.arange(150)[None] + np.zeros((150, 1)) < 20
    ways = {
        "lengths": {"mask": sl.Lengths([20])},
        "dense": {"mask": shown},
        "window": {"mask": sl.Window(200, 200) & sl.Predicate(lambda b, h, i, j: j < 20)},
        "bias": {"bias": np.where(shown, 0, -np.inf).astype(np.float32)},
        "predicate": {"mask": sl.Predicate(lambda b, h, i, j: (j < 20) & (i >= 0))},
    }
    with on(isa):
        clean = sl.attention(
            q, k, v, mask=shown, bias=np.zeros((150, 150), np.float32) if mask_name == "bias" else None
        )
        k[:, 20:], v[:, 20:] = poison, poison
        out, stats = sl.attention(q, k, v, stats=True, **ways[mask_name])
    np.testing.assert_array_equal(out, clean)
    np.testing.assert_array_equal(stats.visible, 20)
    for name in ("lse", "entropy", "max_weight", "sum_squares", "score_variance", "distance", "first_key_mass"):
        assert np.isfinite(getattr(stats, name)).all(), name


def test_poison_in_hidden_rows_and_in_a_hidden_bias(type_name: str, isa: str) -> None:
    q, k, v = arrays(Shape(9, 140, heads=2, key_heads=1), type_name)
    shown = np.random.default_rng(0).random((9, 140)) < 0.5
    shown[4] = False
    bias = np.zeros((9, 140), np.float32)
    with on(isa):
        clean = sl.attention(q, k, v, mask=shown, bias=bias)
        q[:, 4] = np.nan
        bias[~shown] = np.nan
        np.testing.assert_array_equal(sl.attention(q, k, v, mask=shown, bias=bias), clean)
        bias[~shown] = np.inf
        np.testing.assert_array_equal(sl.attention(q, k, v, mask=shown, bias=bias), clean)
    np.testing.assert_array_equal(clean[:, 4], 0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_visible_bias_that_is_no_number_makes_its_row_nan(value: float, type_name: str, isa: str) -> None:
    q, k, v = arrays(Shape(4, 130), type_name)
    bias = np.zeros((4, 130), np.float32)
    bias[2, 129] = value
    out, stats = compare(q, k, v, isa=isa, bias=bias)
    assert np.isnan(out[:, 2].astype(float)).all()
    assert np.isfinite(out[:, [0, 1, 3]].astype(float)).all()
    assert stats.argmax[0, 2] == -1


def test_only_scores_of_minus_infinity_make_the_row_nan(type_name: str, isa: str) -> None:
    """The keys are visible, so the row is not empty: -inf - (-inf) is NaN, as in float64."""
    q, k, v = arrays(Shape(2, 5, key_width=1), type_name)
    q[:], k[:] = 1, -np.inf
    for sinks in (None, np.zeros(1, np.float32)):
        out, stats = compare(q, k, v, isa=isa, sinks=sinks)
        assert np.isnan(out.astype(float)).all()
        np.testing.assert_array_equal(stats.visible, 5)


def test_a_visible_score_of_minus_infinity_has_no_weight(type_name: str, isa: str) -> None:
    q, k, v = arrays(Shape(2, 140, key_width=1), type_name)
    q[:] = 1
    k[:, 130] = -np.inf
    out, stats = compare(q, k, v, isa=isa)
    np.testing.assert_array_equal(stats.visible, 140)
    assert np.isfinite(out.astype(float)).all()


@pytest.mark.parametrize("bias_is", ["float32", "of the type"])
def test_finfo_min_is_a_number(bias_is: str, type_name: str, isa: str) -> None:
    """Beside ordinary scores it weighs nothing; alone it hides nothing, and where it absorbs them all are equal."""
    q, k, v = arrays(Shape(3, 200), type_name)
    dtype = TYPES["float32"] if bias_is == "float32" else q.dtype
    bias = np.zeros((3, 200), dtype)
    bias[0] = bias[1, 100:] = ml_dtypes.finfo(dtype).min
    out, stats = compare(q, k, v, isa=isa, bias=bias, q_start=0)
    with on(isa):
        half = sl.attention(q[:, 1:2], k[:, :100], v[:, :100], bias=bias[1:2, :100])
    np.testing.assert_array_equal(stats.visible, 200)
    np.testing.assert_array_equal(out[:, 1:2], half)
    assert np.isfinite(stats.lse).all()
    if dtype != np.float16:
        np.testing.assert_allclose(stats.entropy[0, 0], np.log(200), rtol=1e-6)


def test_scores_far_apart_do_not_overflow(type_name: str, isa: str) -> None:
    q, k, v = arrays(Shape(3, 300, key_width=4), type_name)
    for scale in (1000.0, -1000.0):
        out, stats = compare(q, k, v, isa=isa, scale=scale)
        assert np.isfinite(out.astype(float)).all()
        assert (stats.max_weight > 0.5).mean() > 0.5


def test_rising_and_falling_maxima(type_name: str, isa: str) -> None:
    """The running maximum moves at every key, in every tile, or only once, by hundreds."""
    q, k, v = arrays(Shape(2, 1100, key_width=1), type_name)
    q[:] = 1
    ramps = [np.linspace(0, 300, 1100), np.linspace(300, 0, 1100), np.where(np.arange(1100) == 700, 400, 0)]
    for ramp in ramps:
        k[0, :, 0] = ramp
        compare(q, k, v, isa=isa)


def test_empty_rows(type_name: str, isa: str) -> None:
    shape = Shape(5, 130, heads=2, key_heads=1, leading=(2,))
    q, k, v = arrays(shape, type_name)
    shown = np.ones((2, 2, 5, 130), bool)
    shown[0, 1, 2] = shown[1, 0] = False
    for sinks in (None, np.array([0.75, -np.inf], np.float32)):
        out, stats = compare(q, k, v, isa=isa, mask=shown, sinks=sinks, q_start=0)
        for name in ("entropy", "max_weight", "sum_squares", "jacobian_trace", "score_variance", "distance"):
            assert not getattr(stats, name)[1, 0].any(), name
        assert not out[1, 0].any()
        np.testing.assert_array_equal(stats.argmax[1, 0], -1)
        np.testing.assert_array_equal(stats.lse[1, 0], -np.inf if sinks is None else 0.75)
        assert stats.lse[0, 1, 2] == -np.inf
        assert np.isnan(stats.normalized_entropy[1, 0]).all()


def test_a_sink_of_minus_infinity_is_no_sink(type_name: str, isa: str) -> None:
    q, k, v = arrays(SHAPE, type_name)
    with on(isa):
        out, stats = sl.attention(q, k, v, stats=True)
        same, same_stats = sl.attention(q, k, v, stats=True, sinks=np.full(2, -np.inf, np.float32))
    np.testing.assert_array_equal(same, out)
    np.testing.assert_array_equal(same_stats.lse, stats.lse)
    np.testing.assert_array_equal(same_stats.missing_mass, 0)


@pytest.mark.parametrize("sink", [-200.0, 200.0])
def test_a_sink_far_from_the_scores(sink: float, type_name: str, isa: str) -> None:
    _, stats = compare(*arrays(SHAPE, type_name), isa=isa, sinks=np.full(2, sink, np.float32))
    np.testing.assert_allclose(stats.missing_mass, float(sink > 0), atol=1e-30)


def test_rounding_to_half_types_is_to_nearest_even(isa: str) -> None:
    """One key makes out its value exactly, so a float32 out meets the store's rounding alone."""
    rng = np.random.default_rng(8)
    numbers = (rng.standard_normal(4000) * 10.0 ** rng.integers(-9, 5, 4000)).astype(np.float32)
    ties = [1 + 2.0**-9, 1 + 3 * 2.0**-9, 1 + 2.0**-12, 1 + 3 * 2.0**-12, 65519.0, 65520.0, 2.0**-25, 3 * 2.0**-25]
    v = np.concatenate([numbers, np.float32(ties), [np.nan, np.inf, -np.inf, -0.0]]).astype(np.float32)[None, None]
    one = np.ones((1, 1, 1), np.float32)
    for out_type in ("float16", "bfloat16"):
        with on(isa), np.errstate(over="ignore"):
            out = sl.attention(one, one, v, out_dtype=TYPES[out_type])
            expected = v.astype(TYPES[out_type])
        np.testing.assert_array_equal(out.astype(np.float32), expected.astype(np.float32))


def test_every_half_number_is_read_exactly(isa: str) -> None:
    """All 65536 bit patterns through one key: subnormals, infinities and NaN come out as they went in."""
    patterns = np.arange(2**16, dtype=np.uint16)
    for type_name in ("float16", "bfloat16"):
        v = patterns.view(TYPES[type_name])[None]
        one = np.ones((1, 1), TYPES[type_name])
        with on(isa):
            out = sl.attention(one, one, v)
        wide = v.astype(np.float32)
        expected = wide if type_name == "float16" else np.where(np.abs(wide) < 2.0**-126, 0, wide)
        np.testing.assert_array_equal(np.where(np.abs(wide) < 2.0**-126, 0, out.astype(np.float32)), expected)
