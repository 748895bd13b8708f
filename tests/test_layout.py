"""Memory: strides read in place, sizes of zero, broadcasting, and nothing touched past an array's end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import softlookup as sl
from agreement import compare, on
from cases import ISAS, TYPES, Shape, arrays
from layouts import LAYOUTS, lay_out

ZERO_SIZES = {
    "no batch": Shape(3, 4, leading=(0,)),
    "no batch of two axes": Shape(3, 4, leading=(2, 0)),
    "no heads": Shape(3, 4, heads=0, key_heads=0),
    "no queries": Shape(0, 4, heads=2, key_heads=1, leading=(2,)),
    "no keys": Shape(3, 0, heads=2, key_heads=1, leading=(2,)),
    "nothing": Shape(0, 0),
    "no value width": Shape(3, 4, value_width=0, leading=(2,)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_read_in_place(layout: str, type_name: str, isa: str) -> None:
    q, k, v = (lay_out(x, layout) for x in arrays(Shape(19, 140, 4, 2, 20, 33, leading=(2,)), type_name))
    before = [x.copy() for x in (q, k, v)]
    compare(q, k, v, isa=isa)
    for array, copy in zip((q, k, v), before, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_read_only_arrays_and_views_of_one_array(type_name: str, isa: str) -> None:
    x = arrays(Shape(12, 12, heads=3, key_heads=3), type_name)[0]
    x.flags.writeable = False
    compare(x, x, x[..., ::-1], isa=isa)
    fused = np.concatenate([x, x * x.dtype.type(0.5), -x], axis=-1)
    compare(*np.split(fused, 3, axis=-1), isa=isa)


@pytest.mark.parametrize("offset", range(1, 9))
def test_arrays_that_start_between_vectors(offset: int, type_name: str, isa: str) -> None:
    shifted = []
    for array in arrays(Shape(5, 37, key_width=19, value_width=21), type_name):
        room = np.zeros(array.size + offset, array.dtype)
        view = room[offset:].reshape(array.shape)
        view[...] = array
        shifted.append(view)
    compare(*shifted, isa=isa)


def test_elements_between_their_own_boundaries_are_refused_with_the_fix(type_name: str) -> None:
    """No instruction set promises to read them, and nothing is copied silently."""
    q, k, v = arrays(Shape(3, 4), type_name)
    records = np.zeros(3, dtype=[("tag", np.uint8), ("query", q.dtype, 16)])
    records["query"] = q[0]
    packed = records["query"]
    assert not packed.flags.aligned
    with pytest.raises(ValueError, match=r"q: .*aligned.*copy"):
        sl.attention(packed, k[0], v[0])
    np.testing.assert_array_equal(sl.attention(packed.copy(), k[0], v[0]), sl.attention(q, k, v)[0])


@pytest.mark.parametrize("name", ZERO_SIZES)
def test_sizes_of_zero(name: str, type_name: str, isa: str) -> None:
    shape = ZERO_SIZES[name]
    q, k, v = arrays(shape, type_name)
    out, stats = compare(q, k, v, isa=isa, q_start=0, sinks=np.full(shape.heads, 0.5, np.float32))
    assert out.shape == (*shape.weights[:-1], shape.value_width)
    assert stats.lse.shape == shape.weights[:-1]
    compare(q, k, v, isa=isa, q_start=0, mask=np.ones(shape.weights, bool), bias=np.zeros(shape.weights, np.float32))
    with on(isa):
        causal = sl.attention(q, k, v, mask=sl.Causal() & sl.Full(), q_start=0)
        assert sl.attention_weights(q, k, v).shape == shape.weights
    assert causal.shape == out.shape
    if shape.keys == 0:
        assert not out.any()
        np.testing.assert_array_equal(stats.lse, 0.5)


def test_masks_and_biases_broadcast_along_any_axis(type_name: str, isa: str) -> None:
    shape = Shape(7, 140, heads=4, key_heads=2, leading=(3,))
    q, k, v = arrays(shape, type_name)
    rng = np.random.default_rng(1)
    for size in [(1, 1, 1, 140), (3, 1, 1, 140), (1, 4, 1, 1), (1, 4, 7, 140), (3, 1, 7, 1), (7, 140)]:
        bias = rng.standard_normal(size).astype(np.float32)
        compare(q, k, v, isa=isa, mask=rng.random(size) < 0.6, bias=bias)


def test_one_query_over_one_key_of_every_width(type_name: str, isa: str) -> None:
    for width in (1, 2, 3, 5, 31, 576):
        q, k, v = arrays(Shape(1, 1, key_width=width, value_width=width), type_name)
        with on(isa):
            np.testing.assert_array_equal(sl.attention(q, k, v), v)


@pytest.mark.parametrize("isa_name", ISAS)
@pytest.mark.parametrize("type_name", TYPES)
def test_nothing_is_touched_outside_the_arrays(type_name: str, isa_name: str) -> None:
    """pt#169222: N1 M38 and others, every array between two pages that no one may read."""
    program = Path(__file__).with_name("guarded_pages.py")
    done = subprocess.run(
        [sys.executable, str(program), type_name, isa_name], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-2000:]}"
    assert done.stdout.strip() == "every call stayed inside"
