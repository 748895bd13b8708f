"""The bits rule: a row's bits depend on its own query, on what it sees, on the type and the instruction set.

Not on threads, batch, N, M, strides, how the mask is written, what is hidden, or whether statistics were
asked for. Everything here compares raw bytes, of the output and of every statistic.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import expressions as ex
import softlookup as sl
from agreement import INDICES, STATISTICS, on
from cases import Shape, arrays
from layouts import LAYOUTS, lay_out

Rows = dict[str, np.ndarray]


def run(q: Any, k: Any, v: Any, **options: Any) -> Rows:
    """Every number a call gives, each with the row axis second from the end."""
    out, stats = sl.attention(q, k, v, stats=True, **options)
    rows = {"out": out}
    for name in (*STATISTICS, *INDICES):
        rows[name] = np.asarray(getattr(stats, name))[..., None]
    return rows


def pick(rows: Rows, *index: Any) -> Rows:
    """The same part of every array."""
    return {name: array[index] for name, array in rows.items()}


def assert_same_bits(found: Rows, expected: Rows, what: str = "") -> None:
    """No byte differs in any array."""
    for name, array in expected.items():
        assert found[name].shape == array.shape, (what, name)
        assert found[name].dtype == array.dtype, (what, name)
        left, right = (np.ascontiguousarray(x).view(np.uint8) for x in (found[name], array))
        assert np.array_equal(left, right), f"{what} {name}: {(left != right).sum()} bytes differ"


SINKS = np.array([0.3, -np.inf, -1.0, 2.0], dtype=np.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {"scale": 0.3, "softcap": 5.0, "sinks": SINKS},
}
GROUPS = Shape(70, 700, heads=4, key_heads=2, key_width=24, value_width=20, leading=(5,))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_threads_and_batch(options: dict[str, Any], type_name: str, isa: str) -> None:
    q, k, v = arrays(GROUPS, type_name)
    mask, start = sl.Window(200, 3), np.array([0, 630, 10, 512, 100])
    with on(isa):
        batch = run(q, k, v, mask=mask, q_start=start, threads=1, **options)
        for threads in (2, 3):
            assert_same_bits(run(q, k, v, mask=mask, q_start=start, threads=threads, **options), batch, "threads")
        for b in range(5):
            alone = run(q[b], k[b], v[b], mask=mask, q_start=int(start[b]), threads=2, **options)
            assert_same_bits(alone, pick(batch, b), f"item {b} alone")


def test_statistics_asked_or_not(type_name: str, isa: str) -> None:
    q, k, v = arrays(GROUPS, type_name)
    with on(isa):
        for options in OPTIONS.values():
            silent = sl.attention(q, k, v, **options)
            observed, _ = sl.attention(q, k, v, stats=True, **options)
            assert_same_bits({"out": observed}, {"out": silent})


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_number_of_queries(options: dict[str, Any], type_name: str, isa: str) -> None:
    """Row r with N 8, 9, 33 and alone."""
    q, k, v = arrays(Shape(33, 600, heads=4, key_heads=1), type_name)
    with on(isa):
        whole = run(q, k, v, q_start=0, **options)
        for queries in (1, 2, 7, 8, 9, 16, 17, 32):
            part = run(q[:, :queries], k, v, q_start=0, **options)
            assert_same_bits(part, pick(whole, ..., slice(queries), slice(None)), f"N {queries}")
        for row in range(33):
            alone = run(q[:, row : row + 1], k, v, q_start=row, **options)
            assert_same_bits(alone, pick(whole, ..., slice(row, row + 1), slice(None)), f"row {row}")


def test_number_of_keys_behind_a_causal_row(type_name: str, isa: str) -> None:
    """Causal row 511 at M 2048 and at M 512, and a few around it; M cut just behind each row."""
    q, k, v = arrays(Shape(2048, 2048, key_width=8, value_width=8), type_name)
    with on(isa):
        long = run(q, k, v, mask=sl.Causal(), threads=2)
        short = run(q[:, :512], k[:, :512], v[:, :512], mask=sl.Causal())
        assert_same_bits(short, pick(long, slice(None), slice(512)), "M 512")
        for row in (0, 1, 126, 127, 128, 129, 510, 511, 512, 513, 1023, 1024, 2047):
            decoded = run(q[:, row : row + 1], k[:, : row + 1], v[:, : row + 1], mask=sl.Causal(), q_start=row)
            assert_same_bits(decoded, pick(long, slice(None), slice(row, row + 1)), f"row {row} decoded")


def test_one_mask_written_many_ways(type_name: str, isa: str) -> None:
    size = 260
    q, k, v = arrays(Shape(size, size, heads=2, key_heads=1, leading=(2,)), type_name)
    lower = np.tri(size, dtype=bool)
    ways = {
        "window": sl.Window(None, 0),
        "dense": sl.Dense(lower),
        "array": lower,
        "array of all axes": np.broadcast_to(lower, (2, 2, size, size)),
        "predicate": sl.Predicate(lambda b, h, i, j: j <= i),
        "not not": ~~sl.Causal(),
        "joined": sl.Causal() & sl.Full() & sl.Lengths([size, size]),
        "halves": sl.Window(100, 0) | (sl.Causal() & ~sl.Window(100, 0)),
    }
    with on(isa):
        causal = run(q, k, v, mask=sl.Causal())
        for name, mask in ways.items():
            assert_same_bits(run(q, k, v, mask=mask), causal, name)
        zero = np.zeros((size, size), np.float32)
        hidden = np.where(lower, 0, -np.inf).astype(np.float32)
        biased = run(q, k, v, mask=sl.Causal(), bias=zero)
        assert_same_bits(run(q, k, v, bias=hidden), biased, "bias of -inf")
        assert_same_bits(run(q, k, v, mask=sl.Causal(), bias=hidden), biased, "mask and bias of -inf")


def test_lengths_against_shorter_arrays(type_name: str, isa: str) -> None:
    q, k, v = arrays(Shape(6, 700, heads=2, key_heads=2, leading=(3,)), type_name)
    keys = [700, 129, 40]
    with on(isa):
        padded = run(q, k, v, mask=sl.Lengths(keys), q_start=0)
        for b, size in enumerate(keys):
            alone = run(q[b], k[b, :, :size], v[b, :, :size], q_start=0)
            for rows in (alone, parts := pick(padded, b)):
                assert rows["visible"].max() == size
            assert_same_bits(alone, parts, f"length {size}")


def test_grouped_heads_against_repeated_ones(type_name: str, isa: str) -> None:
    q, k, v = arrays(Shape(40, 300, heads=6, key_heads=2, leading=(2,)), type_name)
    repeated = [np.repeat(x, 3, axis=-3) for x in (k, v)]
    with on(isa):
        grouped = run(q, k, v, mask=sl.Causal(), q_start=260)
        assert_same_bits(run(q, *repeated, mask=sl.Causal(), q_start=260), grouped)
        for h in range(6):
            one = slice(h, h + 1)
            alone = run(q[:, one], k[:, h // 3, None], v[:, h // 3, None], mask=sl.Causal(), q_start=260)
            assert_same_bits(alone, pick(grouped, slice(None), one), f"head {h}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout: str, type_name: str, isa: str) -> None:
    laid = [lay_out(x, layout) for x in arrays(Shape(37, 150, 4, 2, 40, 33, leading=(2,)), type_name)]
    copied = [np.array(x, order="C") for x in laid]
    bias = np.linspace(-2, 2, 37 * 150, dtype=np.float32).reshape(37, 150)
    mask = np.random.default_rng(2).random((2, 4, 37, 150)) < 0.7
    with on(isa):
        expected = run(*copied, mask=mask, bias=bias, q_start=0)
        assert_same_bits(run(*laid, mask=lay_out(mask, "transposed"), bias=lay_out(bias, layout), q_start=0), expected)
        for index in range(3):
            mixed = [laid[i] if i == index else copied[i] for i in range(3)]
            assert_same_bits(run(*mixed, mask=mask, bias=bias, q_start=0), expected, "qkv"[index])


@pytest.mark.parametrize("queries", [1, 5])
def test_hidden_keys_dropped_from_the_front(queries: int, type_name: str, isa: str) -> None:
    """A windowed row sees the same keys at the same positions, so k_start may take the rest away."""
    q, k, v = arrays(Shape(queries, 1500, heads=2, key_heads=1), type_name)
    start = 1500 - queries
    with on(isa):
        whole = run(q, k, v, mask=sl.Window(300, 0), q_start=start)
        for counts_columns in ("argmax", "first_key_mass", "distance"):
            del whole[counts_columns]
        for dropped in (1, 2, 7, 127, 128, 129, 511, 512, 513, 1024, 1025, start - 300):
            part = run(
                q, k[:, dropped:], v[:, dropped:], mask=sl.Window(300, 0), q_start=start, k_start=dropped, threads=2
            )
            assert_same_bits(part, whole, f"{dropped} keys dropped")


def test_one_long_row_split_over_threads(type_name: str, isa: str) -> None:
    q, k, v = arrays(Shape(3, 5000, key_width=64, value_width=72), type_name)
    with on(isa):
        sequential = run(q, k, v, q_start=0, threads=1)
        for threads in (2, 3, 4):
            assert_same_bits(run(q, k, v, q_start=0, threads=threads), sequential, f"{threads} threads")
            for row in range(3):
                one = slice(row, row + 1)
                alone = run(q[:, one], k, v, q_start=row, threads=threads)
                assert_same_bits(alone, pick(sequential, slice(None), one), f"row {row}, {threads} threads")


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_what_is_hidden_leaves_no_trace(poison: float, type_name: str, isa: str) -> None:
    q, k, v = arrays(Shape(12, 400, heads=2, key_heads=1), type_name)
    shown = np.random.default_rng(5).random(400) < 0.5
    shown[130:260] = False  # a whole tile among them
    dirty = [x.copy() for x in (k, v)]
    for x in dirty:
        with np.errstate(over="ignore"):
            x[:, ~shown] = np.float64(poison)
    ways = [{"mask": shown[None] & np.ones((12, 1), bool)}]
    ways.append({"bias": np.where(shown, 0, -np.inf).astype(np.float32)[None] * np.ones((12, 1), np.float32)})
    with on(isa):
        for way in ways:
            assert_same_bits(run(q, *dirty, q_start=0, **way), run(q, k, v, q_start=0, **way), str(list(way)))


def test_a_row_does_not_see_its_neighbours(type_name: str, isa: str) -> None:
    """Poisoned or enormous queries beside it, other rows' masks and biases: row 4 keeps its bits."""
    q, k, v = arrays(Shape(9, 300, heads=3, key_heads=1), type_name)
    mask = np.ones((9, 300), bool)
    bias = np.random.default_rng(6).standard_normal((9, 300)).astype(np.float32)
    with on(isa):
        calm = pick(run(q, k, v, mask=mask, bias=bias, q_start=0), slice(None), slice(4, 5))
        q[:, :4], q[:, 5:] = np.nan, 60.0
        mask[0], mask[3, 100:], bias[6], bias[7, ::2] = False, False, -np.inf, np.finfo(np.float32).min
        wild = pick(run(q, k, v, mask=mask, bias=bias, q_start=0), slice(None), slice(4, 5))
    assert_same_bits(wild, calm)


def test_written_masks_agree_with_their_dense_reading(type_name: str, isa: str) -> None:
    q, k, v = arrays(Shape(50, 200, heads=2, key_heads=2, leading=(2,)), type_name)
    geometry = ex.Geometry((2, 2, 50, 200), 150)
    padded = ex.lengths(np.array([150, 60]), np.array([50, 20]), "left")
    with on(isa):
        for written in (ex.window(5, 9), padded, ex.predicate("speckled"), padded & (~ex.window(20, 0) | ex.causal())):
            named = run(q, k, v, mask=written.library, q_start=150)
            dense = run(q, k, v, mask=written.dense(geometry), q_start=150)
            assert_same_bits(named, dense, str(written))
