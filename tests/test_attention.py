"""sl.attention and its statistics against the float64 oracle: the table, then anything hypothesis draws."""

import itertools
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import softlookup as sl
from agreement import check_out, compare, expect, on, options_for
from cases import ISAS, MASKS, OPTIONS, SHAPES, TYPES, Shape, arrays
from expressions import Geometry
from strategies import Call, calls


def _generator(*names: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32("/".join(names).encode()))


@pytest.mark.parametrize("shape_name", SHAPES)
@pytest.mark.parametrize("mask_name", MASKS)
def test_table_of_masks(mask_name: str, shape_name: str, type_name: str) -> None:
    shape = SHAPES[shape_name]
    written = MASKS[mask_name](shape)
    isa = ISAS[zlib.crc32(f"{mask_name}{shape_name}".encode()) % len(ISAS)]
    compare(*arrays(shape, type_name), isa=isa, written=written, **options_for(shape, written))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape_name", ["one_pair", "groups", "tile_edge", "block_edge", "decode"])
def test_table_of_options(option: str, shape_name: str, type_name: str, isa: str) -> None:
    shape = SHAPES[shape_name]
    compare(*arrays(shape, type_name), isa=isa, **OPTIONS[option](shape, _generator(option, shape_name)))


@pytest.mark.parametrize("type_name", TYPES)
@given(data=st.data())
def test_any_call(type_name: str, data: st.DataObject) -> None:
    call: Call = data.draw(calls(type_name))
    compare(call.q, call.k, call.v, isa=call.isa, written=call.written, **call.options)


@given(data=st.data())
def test_dense_of_any_mask_is_its_plain_reading(data: st.DataObject) -> None:
    call: Call = data.draw(calls("float32"))
    if call.written is None:
        return
    leading = np.broadcast_shapes(*(x.shape[:-3] for x in (call.q, call.k, call.v)))
    shape = (*leading, *call.q.shape[-3:-1], call.k.shape[-2])
    k_start = call.options["k_start"]
    q_start = call.options.get("q_start", 0)
    q_start = {"upper_left": k_start, "lower_right": k_start + shape[-1] - shape[-2]}.get(str(q_start), q_start)
    plain = call.written.dense(Geometry(shape, q_start, k_start))
    batch = int(np.prod(leading, dtype=int))
    starts = np.broadcast_to(np.asarray(q_start, dtype=np.int64), leading).reshape(-1)
    dense = call.written.library.dense(batch, *shape[-3:], starts, k_start)
    assert dense.dtype == np.bool_
    np.testing.assert_array_equal(dense, plain.reshape(batch, *shape[-3:]))


@pytest.mark.parametrize("mask_name", ["none", "causal", "dense"])
def test_two_axes_are_one_head(mask_name: str, type_name: str, isa: str) -> None:
    shape = Shape(9, 9, key_width=5, value_width=3)
    written = MASKS[mask_name](shape)
    q, k, v = arrays(shape, type_name)
    mask = None if written is None else written.dense(Geometry(shape.weights))[0]
    bias = np.linspace(-1, 1, 81, dtype=np.float32).reshape(9, 9)
    out, stats = compare(q[0], k[0], v[0], isa=isa, mask=mask, bias=bias, sinks=np.array([0.5], np.float32))
    assert out.shape == (9, 3)
    assert stats.lse.shape == (9,)
    with on(isa):
        three = sl.attention(q, k, v, mask=mask, bias=bias, sinks=np.array([0.5], np.float32))
    np.testing.assert_array_equal(three[0], out)


def test_leading_axes_broadcast_from_either_side(type_name: str, isa: str) -> None:
    q, k, v = arrays(Shape(5, 5, heads=4, key_heads=2, leading=(3, 2)), type_name)
    compare(q, k[0], v[:, :1], isa=isa, written=MASKS["causal"](SHAPES["square"]))
    compare(q[0, 0], k, v[0], isa=isa)
    compare(q[:, :1], k[:1], v[0, 0], isa=isa)


NARROW = ("float32", "float16", "bfloat16")


@pytest.mark.parametrize(("type_name", "out_type"), [("float64", "float64"), *itertools.product(NARROW, NARROW)])
def test_out_dtype_is_rounded_once(type_name: str, out_type: str, isa: str) -> None:
    q, k, v = arrays(SHAPES["square"], type_name)
    dtype = TYPES[out_type]
    expected, _, tolerance = expect(q, k, v)
    with on(isa):
        out = sl.attention(q, k, v, out_dtype=dtype)
        wide = sl.attention(q, k, v, out_dtype=np.float64 if type_name == "float64" else np.float32)
    assert out.dtype == dtype
    check_out(out, expected, tolerance, v, isa)
    np.testing.assert_array_equal(out, wide.astype(dtype))


def test_out_is_filled_in_place_whatever_its_strides(type_name: str, isa: str) -> None:
    shape = Shape(7, 7, heads=2, key_heads=1, leading=(2,))
    q, k, v = arrays(shape, type_name)
    with on(isa):
        fresh = sl.attention(q, k, v)
        room = np.full((2, 7, 2, 40), 7, dtype=fresh.dtype)
        out = room[..., 3:35:2].swapaxes(1, 2)
        returned = sl.attention(q, k, v, out=out)
        again, stats = sl.attention(q, k, v, out=out, stats=True)
    assert returned is out
    assert again is out
    assert stats.lse.shape == (2, 2, 7)
    np.testing.assert_array_equal(out, fresh)
    untouched = np.ones(40, dtype=bool)
    untouched[3:35:2] = False
    np.testing.assert_array_equal(room[..., untouched], 7)


def test_named_alignments_equal_their_numbers(isa: str) -> None:
    q, k, v = arrays(Shape(3, 8), "float32")
    with on(isa):
        for name, number in {"upper_left": 4, "lower_right": 9}.items():
            named = sl.attention(q, k, v, mask=sl.Causal(), q_start=name, k_start=4)
            np.testing.assert_array_equal(named, sl.attention(q, k, v, mask=sl.Causal(), q_start=number, k_start=4))


def test_statistics_relate_to_each_other(type_name: str, isa: str) -> None:
    """A row's own identities, without the oracle: they hold to the rounding of the stored numbers."""
    q, k, v = arrays(SHAPES["tile_edge"], type_name)
    with on(isa):
        _, stats = sl.attention(q, k, v, mask=sl.Causal(), q_start=0, stats=True, sinks=np.array([0.5, -np.inf]))
    close = {"rtol": 1e-6, "atol": 2e-6}
    np.testing.assert_allclose(stats.max_weight, np.exp(stats.max_score - stats.lse), **close)
    np.testing.assert_allclose(stats.jacobian_trace + stats.sum_squares, 1 - stats.missing_mass, **close)
    np.testing.assert_allclose(stats.missing_mass[0], np.exp(0.5 - stats.lse[0]), **close)
    assert not stats.missing_mass[1].any()
    two = stats.visible > 1
    np.testing.assert_allclose(stats.normalized_entropy[two], stats.entropy[two] / np.log(stats.visible[two]), **close)
    assert (stats.normalized_entropy[two] <= 1 + 1e-6).all()
    first = stats.visible == 1
    np.testing.assert_allclose(stats.entropy[first], 0, atol=1e-6)
    np.testing.assert_allclose(stats.distance[first], 0, atol=1e-6)
    np.testing.assert_array_equal(stats.argmax[first], 0)


def test_ties_of_argmax_go_to_the_lowest_column(type_name: str, isa: str) -> None:
    q, k, v = arrays(Shape(3, 300, key_width=4), type_name)
    k[:, :] = 0
    with on(isa):
        _, stats = sl.attention(q, k, v, stats=True)
        _, masked = sl.attention(q, k, v, stats=True, mask=np.arange(300)[None] >= 129 * np.ones((3, 1)))
    np.testing.assert_array_equal(stats.argmax, 0)
    np.testing.assert_array_equal(masked.argmax, 129)
