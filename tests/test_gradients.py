"""attention_vjp against the float64 oracle and finite differences: the table, then anything hypothesis draws."""

from __future__ import annotations

import itertools
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import expressions as ex
import softlookup as sl
from agreement import on, options_for
from cases import ISAS, MASKS, OPTIONS, SHAPES, TYPES, Shape, arrays
from expressions import Geometry
from gradient_agreement import Cotangents, asked_of, compare_gradients, cotangents
from layouts import LAYOUTS, lay_out
from softlookup import reference
from strategies import Call, calls

GRADIENTS = ("q", "k", "v")


def generator(*names: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32("/".join(names).encode()))


def rotating(*names: str) -> str:
    """One instruction set for a case: over the table all of them take their turn."""
    return ISAS[zlib.crc32("/".join(names).encode()) % len(ISAS)]


@pytest.mark.parametrize("shape_name", SHAPES)
@pytest.mark.parametrize("mask_name", MASKS)
def test_table_of_masks(mask_name: str, shape_name: str, type_name: str) -> None:
    shape = SHAPES[shape_name]
    written = MASKS[mask_name](shape)
    isa = rotating(mask_name, shape_name, type_name)
    compare_gradients(*arrays(shape, type_name), isa=isa, written=written, **options_for(shape, written))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape_name", ["one_pair", "groups", "tile_edge", "block_edge", "decode"])
def test_table_of_options(option: str, shape_name: str, type_name: str, isa: str) -> None:
    shape = SHAPES[shape_name]
    options = OPTIONS[option](shape, generator(option, shape_name))
    compare_gradients(*arrays(shape, type_name), isa=isa, dlse=option != "plain", **options)


@pytest.mark.parametrize("type_name", TYPES)
@settings(max_examples=60)
@given(data=st.data())
def test_any_call(type_name: str, data: st.DataObject) -> None:
    call: Call = data.draw(calls(type_name))
    compare_gradients(call.q, call.k, call.v, isa=call.isa, written=call.written, **call.options)


@pytest.mark.parametrize("mask_name", ["none", "causal", "dense"])
def test_two_axes_are_one_head(mask_name: str, type_name: str, isa: str) -> None:
    shape = Shape(9, 9, key_width=5, value_width=3)
    written = MASKS[mask_name](shape)
    q, k, v = (x[0] for x in arrays(shape, type_name))
    mask = None if written is None else written.dense(Geometry(shape.weights))[0]
    options = {"bias": np.linspace(-1, 1, 81, dtype=np.float32).reshape(9, 9), "sinks": np.array([0.5], np.float32)}
    grads = compare_gradients(q, k, v, isa=isa, mask=mask, **options)
    assert grads.q is not None
    assert grads.q.shape == (9, 5)


def test_leading_axes_that_were_broadcast_are_summed(type_name: str, isa: str) -> None:
    q, k, v = arrays(Shape(5, 5, heads=4, key_heads=2, leading=(3, 2)), type_name)
    causal = MASKS["causal"](SHAPES["square"])
    compare_gradients(q, k[0], v[:, :1], isa=isa, written=causal)
    compare_gradients(q[0, 0], k, v[0], isa=isa, written=causal)
    compare_gradients(q[:, :1], k[:1], v[0, 0], isa=isa)
    compare_gradients(q[0], k[0, 0], v, isa=isa)


def test_a_broadcast_sum_is_rounded_once(isa: str) -> None:
    """A thousand gradients of nearly one, in float16: summed as they are stored, they would stop growing at 2048."""
    q, k = np.zeros((2500, 1, 1, 1), np.float16), np.zeros((1, 1, 1), np.float16)
    with on(isa):
        out, pullback = sl.attention_vjp(q, k, k)
        grads = pullback(np.full_like(out, 0.9), wrt=("v",))
    assert grads.v == np.float16(2500 * np.float16(0.9).astype(float))


@pytest.mark.parametrize("axes", list(itertools.product([False, True], repeat=4)))
def test_bias_is_summed_over_every_broadcast_axis(axes: tuple[bool, ...], isa: str) -> None:
    shape = Shape(6, 9, heads=4, key_heads=2, leading=(3,))
    size = tuple(full if keep else 1 for full, keep in zip(shape.weights, axes, strict=True))
    bias = np.random.default_rng(3).standard_normal(size).astype(np.float32)
    sinks = np.array([0.1, -np.inf, 2.0, -1.0])
    mask = np.random.default_rng(4).random((6, 9)) < 0.7
    mask[2] = False
    for type_name in ("float32", "float64", "bfloat16"):
        compare_gradients(*arrays(shape, type_name), isa=isa, bias=bias, sinks=sinks, mask=mask, dlse=axes[0])


@pytest.mark.parametrize("type_name", ["float16", "bfloat16", "float64"])
def test_bias_and_sinks_keep_their_own_type(type_name: str, isa: str) -> None:
    shape = Shape(6, 9, heads=4, key_heads=2)
    rng = np.random.default_rng(8)
    for dtype in (np.dtype(np.float32), TYPES[type_name]):
        options = {"bias": rng.standard_normal((6, 9)).astype(dtype), "sinks": rng.standard_normal(4).astype(dtype)}
        compare_gradients(*arrays(shape, type_name), isa=isa, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_memory(layout: str, type_name: str, isa: str) -> None:
    laid = [lay_out(x, layout) for x in arrays(Shape(13, 37, 4, 2, 20, 12, leading=(2,)), type_name)]
    bias = lay_out(np.random.default_rng(1).standard_normal((2, 4, 13, 37)).astype(np.float32), layout)
    given = cotangents((2, 4, 13, 12), TYPES[type_name])
    dlse = None if given.dlse is None else lay_out(given.dlse, layout)
    compare_gradients(*laid, isa=isa, bias=bias, given=Cotangents(lay_out(given.dout, layout), dlse))


@pytest.mark.parametrize("out_type", TYPES)
def test_dout_has_the_type_of_the_output_or_of_the_sums(out_type: str, isa: str) -> None:
    shape = Shape(5, 7, heads=2)
    for type_name in ("float64",) if out_type == "float64" else ("float32", "float16", "bfloat16"):
        for dtype in (TYPES[out_type], np.dtype(np.float64 if type_name == "float64" else np.float32)):
            given = cotangents((2, 5, 16), dtype)
            compare_gradients(*arrays(shape, type_name), isa=isa, given=given, out_dtype=TYPES[out_type])


def test_only_what_is_asked_for_is_made(type_name: str, isa: str) -> None:
    shape = Shape(6, 9, heads=4, key_heads=2)
    options: dict[str, Any] = {"bias": np.zeros((6, 9), np.float32), "sinks": np.zeros(4, np.float32)}
    with on(isa):
        out, pullback = sl.attention_vjp(*arrays(shape, type_name), **options)
        whole = pullback(out, wrt=asked_of(options))
        for count in range(6):
            for names in itertools.combinations(asked_of(options), count):
                part = pullback(out, wrt=names)
                for name in asked_of(options):
                    made = getattr(part, name)
                    assert (made is not None) == (name in names)
                    if made is not None:
                        assert made.tobytes() == getattr(whole, name).tobytes()
    assert repr(whole).startswith(f"Grads(q={type_name} [4, 6, 16], k=")


@pytest.mark.parametrize("sizes", [(0, 3, 5, 4), (2, 0, 5, 4), (2, 3, 0, 4), (2, 3, 5, 0)])
def test_sizes_of_zero(sizes: tuple[int, ...], type_name: str, isa: str) -> None:
    batch, queries, keys, value_width = sizes
    shape = Shape(queries, keys, 4, 2, 6, value_width, leading=(batch,))
    options = {"bias": np.zeros((queries, keys), np.float32), "sinks": np.array([0, 1, -np.inf, 2], np.float32)}
    compare_gradients(*arrays(shape, type_name), isa=isa, **options)
    options["bias"] = np.zeros((queries, 1), np.float32)
    compare_gradients(*arrays(shape, type_name), isa=isa, **options)


def test_width_of_zero(type_name: str, isa: str) -> None:
    shape = Shape(3, 5, heads=2, key_width=0)
    compare_gradients(*arrays(shape, type_name), isa=isa, scale=1.0, bias=np.eye(3, 5, dtype=np.float32))


def test_no_heads(type_name: str, isa: str) -> None:
    q = np.zeros((2, 0, 3, 4), TYPES[type_name])
    with on(isa):
        out, pullback = sl.attention_vjp(q, q, q, sinks=np.zeros(0))
        grads = pullback(out, wrt=("q", "v", "sinks"))
    assert grads.q.shape == grads.v.shape == q.shape
    assert grads.sinks.shape == (0,)


# Against the function itself


@pytest.mark.parametrize("option", ["plain", "negative_scale", "softcap", "sinks", "everything"])
@pytest.mark.parametrize("mask_name", ["none", "causal", "dense", "left_padding"])
def test_finite_differences(mask_name: str, option: str, isa: str) -> None:
    """Along random directions through all inputs at once, in float64."""
    shape = Shape(7, 7, heads=4, key_heads=2, key_width=5, value_width=3, leading=(2,))
    rng = generator(mask_name, option)
    options = OPTIONS[option](shape, rng)
    options = {name: value.astype(float) if name in ("bias", "sinks") else value for name, value in options.items()}
    if "bias" in options:  # beside finfo.min nothing else of a row can be seen
        options["bias"] = np.where(np.isfinite(options["bias"]) & (options["bias"] < -1e9), -3.0, options["bias"])
    written = MASKS[mask_name](shape)
    mask = None if written is None else written.library
    point = dict(zip(GRADIENTS, arrays(shape, "float64"), strict=True))
    point |= {name: options.pop(name) for name in ("bias", "sinks") if name in options}
    slopes = cotangents((2, 4, 7, 3), np.float64)

    def loss(at: dict[str, np.ndarray]) -> float:
        out, stats = sl.attention(**at, **options, mask=mask, stats=True)
        lse = np.where(np.isfinite(stats.lse), stats.lse, 0.0)
        return float((slopes.dout * out).sum() + (slopes.dlse * lse).sum())

    step = 1e-5
    with on(isa):
        _, pullback = sl.attention_vjp(**point, **options, mask=mask)
        grads = pullback(slopes.dout, slopes.dlse, wrt=tuple(point))
        for _ in range(4):
            way = {name: rng.standard_normal(x.shape) for name, x in point.items()}
            ends = [{name: x + sign * step * way[name] for name, x in point.items()} for sign in (1, -1)]
            slope = (loss(ends[0]) - loss(ends[1])) / (2 * step)
            expected = sum(float((getattr(grads, name) * way[name]).sum()) for name in point)
            assert slope == pytest.approx(expected, rel=1e-7, abs=1e-7)


def test_statistics_and_output_are_those_of_attention(type_name: str, isa: str) -> None:
    q, k, v = arrays(SHAPES["groups"], type_name)
    options: dict[str, Any] = {"mask": sl.Window(4, 0), "sinks": np.linspace(-1, 1, 6), "softcap": 3.0}
    for out_dtype in (None, *(TYPES[name] for name in TYPES if type_name != "float64" != name)):
        with on(isa):
            out, pullback = sl.attention_vjp(q, k, v, out_dtype=out_dtype, **options)
            expected, stats = sl.attention(q, k, v, out_dtype=out_dtype, stats=True, **options)
        assert out.dtype == expected.dtype
        assert out.tobytes() == expected.tobytes()
        for name in ("lse", "entropy", "distance", "argmax"):
            np.testing.assert_array_equal(getattr(pullback.stats, name), getattr(stats, name))
        assert pullback.stats.conventions == stats.conventions


def test_the_pullback_runs_where_the_forward_pass_ran(isa: str) -> None:
    q, k, v = arrays(SHAPES["groups"], "float32")
    with on(isa):
        out, pullback = sl.attention_vjp(q, k, v)
        inside = pullback(out)
    outside = pullback(out)
    assert inside.q.tobytes() == outside.q.tobytes()


def test_the_output_cannot_be_changed_under_the_pullback(type_name: str) -> None:
    out, _ = sl.attention_vjp(*arrays(SHAPES["narrow"], type_name))
    with pytest.raises(ValueError, match="read-only"):
        out += out


# Faults that users of other implementations met: cases of test_known_faults.py, backward


def test_pt41508_a_padded_row_that_sees_nothing_has_finite_gradients(type_name: str, isa: str) -> None:
    q, k, v = arrays(Shape(4, 4, heads=2, key_heads=2, leading=(2,)), type_name)
    written = ex.window(1, 0) & ex.lengths(np.array([4, 2]))
    given = cotangents(q.shape, q.dtype, dlse=False)
    given.dout[1, :, 3] = 0  # the loss leaves the row out
    grads = compare_gradients(q, k, v, isa=isa, written=written, given=given)
    assert not grads.q[1, :, 3].any()
    one_head = np.array([True, False]).reshape(1, 2, 1, 1)
    grads = compare_gradients(q, k, v, isa=isa, mask=one_head)
    for name in GRADIENTS:
        assert np.isfinite(getattr(grads, name).astype(float)).all()
        assert not getattr(grads, name)[:, 1].any()


def test_automodel2658_a_sink_alone_has_the_slope_of_lse(type_name: str, isa: str) -> None:
    q, k, v = arrays(Shape(2, 3), type_name)
    sink = np.zeros(1, np.float32)
    for hide in ({"mask": ~sl.Full()}, {"bias": np.full((2, 3), -np.inf, np.float32)}):
        given = Cotangents(np.full((1, 2, 16), np.nan, q.dtype), np.array([[0.25, 2.0]]))
        with on(isa):
            _, pullback = sl.attention_vjp(q, k, v, sinks=sink, **hide)
            grads = pullback(given.dout, given.dlse, wrt=asked_of({"sinks": sink, **hide}))
        assert grads.sinks == 2.25
        for name in asked_of(hide):
            assert not getattr(grads, name).any()


@pytest.mark.parametrize("hide", ["mask", "bias"])
def test_pt101967_lcpp3523_nan_under_the_mask_has_finite_gradients(hide: str, type_name: str, isa: str) -> None:
    dtype = TYPES[type_name]
    q, k, v = (np.array(rows, dtype) for rows in ([[1.0]], [[1.0], [np.nan]], [[2.0, 3.0], [np.nan, np.nan]]))
    options = {"mask": np.array([[True, False]])} if hide == "mask" else {"bias": np.array([[0, -np.inf]], np.float32)}
    with on(isa):
        out, pullback = sl.attention_vjp(q, k, v, **options)
        grads = pullback(np.array([[1, 2]], dtype), np.array([0.5]), wrt=asked_of(options))
    np.testing.assert_array_equal(out, v[:1])
    np.testing.assert_array_equal(grads.v, [[1, 2], [0, 0]])
    np.testing.assert_array_equal(grads.q, [[0.5]])
    np.testing.assert_array_equal(grads.k, [[0.5], [0]])


def test_attention_gym20_a_bias_shared_along_diagonals(isa: str) -> None:
    """b[i - j]: the gradient of b[0] is the sum of the three diagonal terms of the whole bias' gradient."""
    q, k, v = arrays(Shape(3, 3), "float64")
    b = np.array([0.3, -0.2, 0.5, 0.1, -0.4])
    offsets = np.arange(3)[:, None] - np.arange(3) + 2
    given = cotangents((1, 3, 16), np.float64)
    grads = compare_gradients(q, k, v, isa=isa, bias=b[offsets], given=given)
    shared = np.array([grads.bias[offsets == place].sum() for place in range(5)])
    assert shared[2] == pytest.approx(np.trace(grads.bias))
    for place in range(5):
        losses = []
        for sign in (1, -1):
            moved = b.copy()
            moved[place] += sign * 1e-6
            out, stats = reference.attention(q, k, v, bias=moved[offsets])
            losses.append((given.dout * out).sum() + (given.dlse * stats.lse).sum())
        assert shared[place] == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-6)


# What is no number


@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
def test_visible_nan_spreads_as_in_the_oracle(which: str, type_name: str, isa: str) -> None:
    shape = Shape(6, 150, heads=2, key_heads=1, key_width=5, value_width=5)
    held = dict(zip(GRADIENTS, arrays(shape, type_name), strict=True))
    given = cotangents((2, 6, 5), TYPES[type_name])
    mask = np.random.default_rng(2).random((2, 6, 150)) < 0.5
    poisoned = given.dout if which == "dout" else held[which]
    poisoned[0, 3, 2] = np.nan
    compare_gradients(*held.values(), isa=isa, mask=mask, given=given, bias=np.zeros((6, 150), np.float32))


def test_all_biases_at_the_least_number_are_all_equal(type_name: str, isa: str) -> None:
    """lse cannot hold ln(count) beside finfo.min; the weights are 1 / count all the same."""
    shape = Shape(5, 130, heads=2)
    bias = np.full((5, 130), np.finfo(np.float32).min, np.float32)
    compare_gradients(*arrays(shape, type_name), isa=isa, bias=bias)


@pytest.mark.parametrize("scale", [300.0, -1e4])
def test_saturated_rows(scale: float, type_name: str, isa: str) -> None:
    shape = Shape(9, 200, heads=2, key_heads=1)
    compare_gradients(*arrays(shape, type_name), isa=isa, scale=scale, sinks=np.array([0.0, 1e4]))
