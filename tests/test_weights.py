"""sl.attention_weights: the exact weights of the rows and heads asked for, and of nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import softlookup as sl
from agreement import assert_within, expect, on, options_for
from cases import MASKS, OPTIONS, SHAPES, Shape, arrays
from strategies import Call, calls


def check(found: np.ndarray, expected: np.ndarray, tolerance: Any, type_name: str) -> None:
    assert found.dtype == (np.float64 if type_name == "float64" else np.float32)
    allowed = tolerance.relative(expected, tolerance.weight[..., None]) + tolerance.unit * expected
    assert_within(found.astype(float), expected, allowed, "weights")


@pytest.mark.parametrize("mask_name", MASKS)
@pytest.mark.parametrize("shape_name", ["square", "groups", "block_edge"])
def test_all_rows(shape_name: str, mask_name: str, type_name: str, isa: str) -> None:
    shape = SHAPES[shape_name]
    q, k, v = arrays(shape, type_name)
    written = MASKS[mask_name](shape)
    alignment = options_for(shape, written)
    _, stats, tolerance = expect(q, k, v, written=written, **alignment)
    with on(isa):
        found = sl.attention_weights(q, k, v, mask=None if written is None else written.library, **alignment)
    check(found, stats.weights, tolerance, type_name)
    assert not found[stats.weights == 0].any()


@pytest.mark.parametrize("option", OPTIONS)
def test_options(option: str, type_name: str, isa: str) -> None:
    shape = SHAPES["groups"]
    q, k, v = arrays(shape, type_name)
    options = OPTIONS[option](shape, np.random.default_rng(1))
    _, stats, tolerance = expect(q, k, v, **options)
    with on(isa):
        check(sl.attention_weights(q, k, v, **options), stats.weights, tolerance, type_name)


@given(data=st.data())
def test_any_call(data: st.DataObject) -> None:
    call: Call = data.draw(calls(data.draw(st.sampled_from(["float32", "float64", "float16", "bfloat16"]))))
    options = {name: x for name, x in call.options.items() if name not in ("out_dtype", "threads")}
    _, stats, tolerance = expect(call.q, call.k, call.v, written=call.written, **options)
    mask = None if call.written is None else call.written.library
    with on(call.isa):
        found = sl.attention_weights(call.q, call.k, call.v, mask=mask, **options)
        type_name = "float64" if call.q.dtype == np.float64 else "float32"
        check(found, stats.weights, tolerance, type_name)
        queries, heads = call.q.shape[-2], call.q.shape[-3]
        if queries:
            rows = data.draw(st.lists(st.integers(0, queries - 1), max_size=4))
            chosen = data.draw(st.lists(st.integers(0, heads - 1), max_size=3))
            some = sl.attention_weights(call.q, call.k, call.v, mask=mask, rows=rows, heads=chosen, **options)
            np.testing.assert_array_equal(some, found[..., chosen, :, :][..., rows, :])


def test_chosen_rows_and_heads_are_those_of_all(type_name: str, isa: str) -> None:
    q, k, v = arrays(Shape(40, 300, heads=6, key_heads=2, leading=(2,)), type_name)
    mask = sl.Causal() & sl.Predicate(lambda b, h, i, j: (b + 3 * h + j) % 5 != 0) & sl.Lengths([300, 170])
    options: dict[str, Any] = {"mask": mask, "q_start": "lower_right"}
    with on(isa):
        whole = sl.attention_weights(q, k, v, **options)
        for rows in ([0], [39, 3, 3], np.array([5, 6, 7]), []):
            some = sl.attention_weights(q, k, v, rows=rows, **options)
            np.testing.assert_array_equal(some, whole[..., rows, :] if len(rows) else whole[..., :0, :])
        for heads in ([0], [5, 1], [2, 2], []):
            some = sl.attention_weights(q, k, v, heads=heads, **options)
            np.testing.assert_array_equal(some, whole[:, heads] if len(heads) else whole[:, :0])
        both = sl.attention_weights(q, k, v, rows=[7, 30], heads=[4, 0], **options)
    np.testing.assert_array_equal(both, whole[:, [4, 0]][..., [7, 30], :])


def test_weights_multiply_out_to_the_output(type_name: str, isa: str) -> None:
    q, k, v = arrays(SHAPES["tile_edge"], type_name)
    sinks = np.array([0.5, -1.0], np.float32)
    with on(isa):
        out, stats = sl.attention(q, k, v, sinks=sinks, stats=True)
        weights = sl.attention_weights(q, k, v, sinks=sinks).astype(float)
    tolerance = {"float32": 1e-5, "float64": 1e-13, "float16": 2e-3, "bfloat16": 2**-6}[type_name]
    np.testing.assert_allclose(weights @ v.astype(float), out.astype(float), rtol=0, atol=tolerance)
    np.testing.assert_allclose(weights.sum(axis=-1), 1 - stats.missing_mass, rtol=0, atol=1e-5)
    np.testing.assert_allclose(weights.max(axis=-1), stats.max_weight, rtol=0, atol=1e-5)
    np.testing.assert_allclose((weights**2).sum(axis=-1), stats.sum_squares, rtol=0, atol=1e-5)


def test_two_axes_give_a_matrix(isa: str) -> None:
    q, k, v = (x[0] for x in arrays(Shape(4, 6), "float32"))
    with on(isa):
        assert sl.attention_weights(q, k, v).shape == (4, 6)
        assert sl.attention_weights(q, k, v, rows=[1]).shape == (1, 6)


def test_two_axes_are_one_head() -> None:
    q, k, _ = (x[0] for x in arrays(Shape(4, 6), "float32"))
    for one in (None, [0], [-1]):
        assert sl.attention_weights(q, k, heads=one).shape == (4, 6)
    for several in ([], [0, 0]):
        with pytest.raises(ValueError, match=rf"heads: found {len(several)} heads .*; fix: q\[None\]"):
            sl.attention_weights(q, k, heads=several)


def test_empty_rows_weigh_nothing(type_name: str, isa: str) -> None:
    q, k, v = arrays(Shape(3, 140), type_name)
    q[:], k[:] = np.nan, np.nan
    with on(isa):
        np.testing.assert_array_equal(sl.attention_weights(q, k, v, mask=~sl.Full()), 0)


@pytest.mark.parametrize("wrong", [{"rows": [4]}, {"rows": [-5]}, {"heads": [2]}, {"rows": [0.5]}, {"heads": [[0]]}])
def test_rows_and_heads_that_do_not_exist_are_refused(wrong: dict[str, Any]) -> None:
    q, k, v = arrays(Shape(4, 6, heads=2, key_heads=1), "float32")
    with pytest.raises((ValueError, TypeError, IndexError), match=next(iter(wrong))):
        sl.attention_weights(q, k, v, **wrong)
