"""The bits rule, backward: a gradient has the same bits whatever the threads, the run, the memory and what is hidden.

A query's gradient depends on that row alone: not on the batch, on N, or on keys that it does not see. The gradient of a
key, a value, a bias or a sink is a sum over rows, in ascending order whatever the schedule.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import softlookup as sl
from agreement import on
from cases import TYPES, Shape, arrays
from gradient_agreement import NAMES, Cotangents, asked_of, cotangents
from layouts import LAYOUTS, lay_out

GROUPS = Shape(70, 1300, heads=4, key_heads=2, key_width=24, value_width=20, leading=(5,))
SINKS = np.array([0.3, -np.inf, -1.0, 2.0], dtype=np.float32)


def run(q: Any, k: Any, v: Any, given: Cotangents, *, wrt: tuple[str, ...] = (), **options: Any) -> dict[str, Any]:
    """Every gradient that the call has, or those of `wrt`."""
    _, pullback = sl.attention_vjp(q, k, v, **options)
    grads = pullback(given.dout, given.dlse, wrt=wrt or asked_of(options))
    return {name: getattr(grads, name) for name in NAMES if getattr(grads, name) is not None}


def assert_same_bits(found: dict[str, Any], expected: dict[str, Any], what: str = "") -> None:
    """No byte differs in any array."""
    for name, array in expected.items():
        assert found[name].shape == array.shape, (what, name)
        assert found[name].tobytes() == array.tobytes(), (what, name)


def part(given: Cotangents, *index: Any) -> Cotangents:
    """The slopes of some rows."""
    return Cotangents(given.dout[index], None if given.dlse is None else given.dlse[index])


def everything(shape: Shape) -> dict[str, Any]:
    bias = np.random.default_rng(5).standard_normal((shape.heads, shape.queries, shape.keys)).astype(np.float32)
    return {"bias": bias[None] if shape.leading else bias, "sinks": SINKS[: shape.heads], "softcap": 5.0, "scale": 0.3}


@pytest.mark.parametrize("kind", ["plain", "everything"])
def test_threads_runs_and_batch(kind: str, type_name: str, isa: str) -> None:
    q, k, v = arrays(GROUPS, type_name)
    given = cotangents((5, 4, 70, 20), TYPES[type_name])
    options = everything(GROUPS) if kind == "everything" else {}
    options["mask"] = sl.Window(900, 3)
    start = np.array([0, 1230, 10, 512, 100])
    with on(isa):
        batch = run(q, k, v, given, q_start=start, threads=1, **options)
        for threads in (1, 2, 2, 3):
            again = run(q, k, v, given, q_start=start, threads=threads, **options)
            assert_same_bits(again, batch, f"{threads} threads")
        if kind == "everything":  # sums over the batch are another thing
            options["bias"], options["sinks"] = options["bias"][0], SINKS
        for b in range(5):
            alone = run(q[b], k[b], v[b], part(given, b), q_start=int(start[b]), threads=2, **options)
            assert_same_bits(alone, {name: batch[name][b] for name in "qkv"}, f"item {b} alone")


def test_number_of_queries(type_name: str, isa: str) -> None:
    """The query gradient of row 0, and of every other, with N 8, 9 and more."""
    q, k, v = arrays(Shape(70, 600, heads=4, key_heads=1), type_name)
    given = cotangents((4, 70, 16), TYPES[type_name])
    with on(isa):
        whole = run(q, k, v, given, wrt=("q",), sinks=SINKS, threads=2)
        for queries in (1, 2, 7, 8, 9, 16, 33, 64, 65):
            rows = slice(None), slice(queries)
            fewer = run(q[rows], k, v, part(given, *rows), wrt=("q",), sinks=SINKS)
            assert_same_bits(fewer, {"q": whole["q"][rows]}, f"N {queries}")
        for row in range(0, 70, 3):
            one = slice(None), slice(row, row + 1)
            alone = run(q[one], k, v, part(given, *one), wrt=("q",), sinks=SINKS, q_start=row)
            assert_same_bits(alone, {"q": whole["q"][one]}, f"row {row}")


def test_keys_that_no_row_sees(type_name: str, isa: str) -> None:
    """Cut off behind a causal call, cut off in front of a window, or left in and poisoned."""
    q, k, v = arrays(Shape(40, 1500, heads=2, key_heads=1), type_name)
    given = cotangents((2, 40, 16), TYPES[type_name])
    with on(isa):
        whole = run(q, k, v, given, mask=sl.Window(300, 0), q_start=1000)
        for first, last in ((0, 1040), (700, 1500), (513, 1041), (512, 1040)):
            cut = slice(None), slice(first, last)
            found = run(q, k[cut], v[cut], given, mask=sl.Window(300, 0), q_start=1000, k_start=first)
            expected = {"q": whole["q"], "k": whole["k"][cut], "v": whole["v"][cut]}
            assert_same_bits(found, expected, f"keys {first} to {last}")
        k[:, :700], v[:, 1040:] = np.nan, np.inf
        k[:, 1040:], v[:, :700] = np.inf, np.nan
        assert_same_bits(run(q, k, v, given, mask=sl.Window(300, 0), q_start=1000), whole, "poisoned")
    assert not whole["k"][:, :700].any()
    assert not whole["v"][:, 1040:].any()


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("way", ["mask", "bias"])
def test_hidden_keys_leave_no_trace(way: str, poison: float, type_name: str, isa: str) -> None:
    q, k, v = arrays(Shape(12, 400, heads=2, key_heads=1), type_name)
    given = cotangents((2, 12, 16), TYPES[type_name])
    shown = np.random.default_rng(5).random(400) < 0.5
    shown[130:260] = False  # a whole tile among them
    rows = np.broadcast_to(shown, (12, 400))
    options = {"mask": rows} if way == "mask" else {"bias": np.where(rows, 0, -np.inf).astype(np.float32)}
    dirty = [x.copy() for x in (k, v)]
    for x in dirty:
        with np.errstate(over="ignore"):
            x[:, ~shown] = np.float64(poison)
    with on(isa):
        clean, found = run(q, k, v, given, **options), run(q, *dirty, given, **options)
    assert_same_bits(found, clean, way)
    for name in "kv":
        assert not clean[name][:, ~shown].any()
    if way == "bias":
        assert not clean["bias"][:, ~shown].any()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_an_empty_row_holds_leaves_no_trace(poison: float, type_name: str, isa: str) -> None:
    q, k, v = arrays(Shape(12, 150, heads=2, key_heads=1), type_name)
    given = cotangents((2, 12, 16), TYPES[type_name])
    mask = np.random.default_rng(5).random((12, 150)) < 0.5
    mask[3:6] = False
    options: dict[str, Any] = {"bias": np.zeros((12, 1), np.float32), "sinks": np.array([0.5, -np.inf]), "mask": mask}
    with on(isa):
        clean = run(q, k, v, given, **options)
        q[:, 3:6] = poison
        given.dout[:, 3:6] = poison
        found = run(q, k, v, given, **options)
    assert_same_bits(found, clean)
    assert not clean["q"][:, 3:6].any()
    assert not clean["bias"][3:6].any()


def test_keys_hidden_from_some_rows_only(type_name: str, isa: str) -> None:
    """A NaN in a value reaches the rows that see it and no other."""
    q, k, v = arrays(Shape(9, 300, heads=3, key_heads=1), type_name)
    given = cotangents((3, 9, 16), TYPES[type_name])
    mask = np.ones((9, 300), bool)
    mask[:8, 77] = False
    with on(isa):
        calm = run(q, k, v, given, mask=mask)
        v[:, 77] = np.nan
        wild = run(q, k, v, given, mask=mask)
    assert_same_bits({"q": wild["q"][:, :8]}, {"q": calm["q"][:, :8]})
    assert np.isnan(wild["q"][:, 8].astype(float)).all()


def test_one_mask_written_many_ways(type_name: str, isa: str) -> None:
    size = 260
    q, k, v = arrays(Shape(size, size, heads=2, key_heads=1, leading=(2,)), type_name)
    given = cotangents((2, 2, size, 16), TYPES[type_name])
    lower = np.tri(size, dtype=bool)
    ways: dict[str, Any] = {
        "dense": lower,
        "array of all axes": np.broadcast_to(lower, (2, 2, size, size)),
        "predicate": sl.Predicate(lambda b, h, i, j: j <= i),
        "joined": sl.Causal() & sl.Full() & sl.Lengths([size, size]),
        "halves": sl.Window(100, 0) | (sl.Causal() & ~sl.Window(100, 0)),
    }
    with on(isa):
        causal = run(q, k, v, given, mask=sl.Causal())
        for name, mask in ways.items():
            assert_same_bits(run(q, k, v, given, mask=mask, threads=2), causal, name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout: str, type_name: str, isa: str) -> None:
    laid = [lay_out(x, layout) for x in arrays(Shape(37, 150, 4, 2, 40, 33, leading=(2,)), type_name)]
    copied = [np.array(x, order="C") for x in laid]
    given = cotangents((2, 4, 37, 33), TYPES[type_name])
    dout = lay_out(given.dout, layout)
    with on(isa):
        expected = run(*copied, Cotangents(np.array(dout, order="C"), given.dlse))
        assert_same_bits(run(*laid, Cotangents(dout, given.dlse)), expected)


def test_grouped_heads_against_repeated_ones(type_name: str, isa: str) -> None:
    q, k, v = arrays(Shape(40, 300, heads=6, key_heads=2, leading=(2,)), type_name)
    given = cotangents((2, 6, 40, 16), TYPES[type_name])
    with on(isa):
        grouped = run(q, k, v, given, mask=sl.Causal(), q_start=260, wrt=("q",))
        repeated = [np.repeat(x, 3, axis=-3) for x in (k, v)]
        assert_same_bits(run(q, *repeated, given, mask=sl.Causal(), q_start=260, wrt=("q",)), grouped)


def test_a_pullback_can_be_called_again(type_name: str, isa: str) -> None:
    q, k, v = arrays(Shape(40, 300, heads=6, key_heads=2), type_name)
    given = cotangents((6, 40, 16), TYPES[type_name])
    with on(isa):
        out, pullback = sl.attention_vjp(q, k, v)
        first, zero, again = (pullback(x, given.dlse) for x in (given.dout, np.zeros_like(out), given.dout))
    for name in "qkv":
        assert getattr(first, name).tobytes() == getattr(again, name).tobytes()
    assert not zero.v.any()


@pytest.mark.parametrize("type_name", ["float32"])
def test_one_number_of_a_bias_shared_by_everything(type_name: str, isa: str) -> None:
    """Sums over batch, heads and rows into one row of a bias, by several threads."""
    q, k, v = arrays(GROUPS, type_name)
    given = cotangents((5, 4, 70, 20), TYPES[type_name])
    bias = np.zeros((1, 1300), np.float32)
    with on(isa):
        expected = run(q, k, v, given, bias=bias, threads=1)
        for threads in (2, 3, 4):
            assert_same_bits(run(q, k, v, given, bias=bias, threads=threads), expected)
