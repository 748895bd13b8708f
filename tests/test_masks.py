"""Masks as values: what every mask and every joining of masks shows, against plain loops; and their manners."""

from __future__ import annotations

import copy
import functools
import operator
import pickle
from collections.abc import Callable

import numpy as np
import pytest

import softlookup as sl
from softlookup import _core

B, HQ, N, M = 2, 3, 4, 5
DENSE = np.arange(B * HQ * N * M).reshape(B, HQ, N, M) % 3 != 0


def even_distance(b: np.ndarray, h: np.ndarray, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    return ((i - j + b + h) % 2) == 0


Rule = Callable[[int, int, int, int, int, int], bool]  # b, h, i, j absolute, r, c local

# Each mask beside its definition, written once more for a single element.
MASKS: list[tuple[sl.Mask, Rule]] = [
    (sl.Full(), lambda b, h, i, j, r, c: True),
    (sl.Causal(), lambda b, h, i, j, r, c: j <= i),
    (sl.Window(1), lambda b, h, i, j, r, c: i - 1 <= j <= i),
    (sl.Window(0, 2), lambda b, h, i, j, r, c: i <= j <= i + 2),
    (sl.Window(None, 1), lambda b, h, i, j, r, c: j <= i + 1),
    (sl.Window(2, None), lambda b, h, i, j, r, c: j >= i - 2),
    (sl.Window(None, None), lambda b, h, i, j, r, c: True),
    (sl.Lengths(3), lambda b, h, i, j, r, c: c < 3),
    (sl.Lengths([2, 5]), lambda b, h, i, j, r, c: c < (2, 5)[b]),
    (sl.Lengths([2, 5], queries=[4, 1]), lambda b, h, i, j, r, c: c < (2, 5)[b] and r < (4, 1)[b]),
    (
        sl.Lengths([2, 0], queries=3, padding_side="left"),
        lambda b, h, i, j, r, c: c >= M - (2, 0)[b] and r >= N - 3,
    ),
    (sl.Dense(DENSE[0, 0]), lambda b, h, i, j, r, c: bool(DENSE[0, 0, r, c])),
    (sl.Dense(DENSE[:, :1, :, :1]), lambda b, h, i, j, r, c: bool(DENSE[b, 0, r, 0])),
    (sl.Dense(DENSE), lambda b, h, i, j, r, c: bool(DENSE[b, h, r, c])),
    (sl.Predicate(even_distance), lambda b, h, i, j, r, c: (i - j + b + h) % 2 == 0),
]
JOINED: list[tuple[sl.Mask, Rule]] = [
    *((~mask, lambda *at, rule=rule: not rule(*at)) for mask, rule in MASKS),
    *(
        (mask & other, lambda *at, rule=rule, second=second: rule(*at) and second(*at))
        for mask, rule in MASKS
        for other, second in MASKS
    ),
    *(
        (mask | other, lambda *at, rule=rule, second=second: rule(*at) or second(*at))
        for mask, rule in MASKS
        for other, second in MASKS
    ),
    (
        (sl.Causal() | ~sl.Window(3)) & ~(sl.Lengths(1) | sl.Dense(DENSE)),
        lambda b, h, i, j, r, c: (j <= i or not (i - 3 <= j <= i)) and not (c < 1 or DENSE[b, h, r, c]),
    ),
]
ALL = [mask for mask, _ in MASKS + JOINED]


def looped(rule: Rule, starts: tuple[int, int], k_start: int) -> np.ndarray:
    shown = np.zeros((B, HQ, N, M), bool)
    for b, h, r, c in np.ndindex(B, HQ, N, M):
        shown[b, h, r, c] = rule(b, h, starts[b] + r, k_start + c, r, c)
    return shown


@pytest.mark.parametrize("starts", [(0, 0), (-2, 3)])
@pytest.mark.parametrize(("mask", "rule"), MASKS + JOINED, ids=repr)
def test_dense_is_the_definition(mask: sl.Mask, rule: Rule, starts: tuple[int, int]) -> None:
    found = mask.dense(B, HQ, N, M, np.array(starts), 1)
    assert found.dtype == bool
    np.testing.assert_array_equal(found, looped(rule, starts, 1))


def test_dense_takes_one_start_for_all_items_and_defaults_to_zero() -> None:
    np.testing.assert_array_equal(
        sl.Causal().dense(B, HQ, N, M, 2, 0), looped(lambda b, h, i, j, r, c: j <= i, (2, 2), 0)
    )
    np.testing.assert_array_equal(sl.Causal().dense(B, HQ, N, M), sl.Causal().dense(B, HQ, N, M, 0, 0))


@pytest.mark.parametrize("shape", [(0, 1, 2, 2), (1, 0, 2, 2), (1, 1, 0, 2), (1, 1, 2, 0)])
def test_dense_of_zero_sizes(shape: tuple[int, int, int, int]) -> None:
    for mask in (sl.Causal(), sl.Lengths(0), sl.Predicate(even_distance), sl.Full()):
        assert mask.dense(*shape).shape == shape


def test_dense_flattens_batch_axes() -> None:
    lengths = np.array([[1, 2], [3, 4]])
    array = np.arange(4)[:, None] < lengths.reshape(2, 2, 1, 1, 1)
    np.testing.assert_array_equal(sl.Lengths(lengths).dense(4, 1, 1, 4)[:, 0, 0], np.arange(4) < lengths.reshape(4, 1))
    np.testing.assert_array_equal(
        sl.Dense(array.swapaxes(-1, -2)).dense(4, 1, 1, 4), sl.Lengths(lengths).dense(4, 1, 1, 4)
    )


def test_dense_says_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"2 lengths.*B = 3"):
        sl.Lengths([1, 2]).dense(3, 1, 1, 4)
    with pytest.raises(ValueError, match=r"Dense of shape \[2, 2\].*\[1, 1, 3, 3\]"):
        sl.Dense(np.ones((2, 2), bool)).dense(1, 1, 3, 3)
    with pytest.raises(ValueError, match=r"(?s)N: found -1.*q_start: found 3 positions"):
        sl.Full().dense(2, 1, -1, 1, np.zeros(3, np.int64))


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (lambda b, h, i, j: i - j, TypeError, r"found int64 \[2, 2\] returned by Predicate.*bool.*comparison"),
        (lambda b, h, i, j: None, TypeError, r"found object \[\] returned by"),
        (lambda b, h, i, j: np.ones((3, 5), bool), ValueError, r"bool \[3, 5\] returned by.*\[rows, keys\] = \[2, 2\]"),
        (lambda b, h, i, j: np.ones((1, 2, 2), bool), ValueError, r"bool \[1, 2, 2\] returned by"),
        (lambda b, h, i, j: np.ma.masked_array(i >= j), TypeError, r"MaskedArray.*filled\(False\)"),
    ],
)
def test_bad_answers_of_a_predicate(function: Callable, error: type[Exception], words: str) -> None:
    mask = sl.Predicate(function)
    with pytest.raises(error, match=words) as dense:
        mask.dense(1, 1, 2, 2)
    x = np.ones((2, 4), np.float32)
    with pytest.raises(error) as called:
        sl.attention(x, x, x, mask=mask)
    assert str(called.value) == str(dense.value)


def test_dense_broadcasts_over_the_leading_axes_of_a_call() -> None:
    lengths = np.array([[1], [3]])
    expected = sl.Lengths(np.broadcast_to(lengths, (2, 3))).dense(6, 1, 2, 4)
    elements = np.broadcast_to(np.arange(4) < lengths[..., None, None, None], (2, 1, 1, 2, 4))
    for mask in (sl.Lengths(lengths), sl.Dense(elements)):
        np.testing.assert_array_equal(mask.dense((2, 3), 1, 2, 4), expected)
        with pytest.raises(ValueError, match=r"Mask\.dense"):
            mask.dense(6, 1, 2, 4)
    assert sl.Causal().dense((), 1, 2, 2).shape == (1, 1, 2, 2)


@pytest.mark.parametrize("join", [operator.and_, operator.or_])
def test_masks_of_too_many_steps_are_not_made(join: Callable[[sl.Mask, sl.Mask], sl.Mask]) -> None:
    windows = [sl.Window(i) for i in range(500)]
    most = _core.MOST_MASK_STEPS
    joined = functools.reduce(join, windows[: most // 2])
    longest = ~joined
    assert longest._steps == most
    assert f"at most {most} steps" in str(sl.Mask.__doc__)
    x = np.ones((3, 4), np.float32)
    shown = longest.dense(1, 1, 3, 3)[0, 0]
    np.testing.assert_array_equal(sl.attention(x, x, x, mask=longest), sl.attention(x, x, x, mask=shown))
    assert pickle.loads(pickle.dumps(longest)) == longest
    assert repr(longest).count("Window") == most // 2
    with pytest.raises(ValueError, match=rf"found {most + 1} steps in masks of .*at most {most}.*Dense.*Predicate"):
        functools.reduce(join, windows)
    with pytest.raises(ValueError, match=rf"found {most + 1} steps in ~ of a mask of {most}"):
        _ = ~join(~functools.reduce(join, windows[: most // 2 - 1]), sl.Causal())


@pytest.mark.parametrize("mask", ALL, ids=repr)
def test_pickle_copy_equality_and_hash(mask: sl.Mask) -> None:
    for twin in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask), copy.copy(mask)):
        assert twin == mask
        assert hash(twin) == hash(mask)
        assert repr(twin) == repr(mask)


def test_equality_is_by_contents() -> None:
    assert sl.Lengths([1, 2]) == sl.Lengths(np.array([1, 2], np.int32))
    assert sl.Lengths([1, 2]) != sl.Lengths([2, 1])
    assert sl.Lengths([1, 2]) != sl.Lengths([1, 2], padding_side="left")
    assert sl.Lengths(3) != sl.Lengths(3, queries=3)
    assert sl.Dense(DENSE) == sl.Dense(DENSE.copy())
    assert sl.Dense(DENSE) != sl.Dense(~DENSE)
    assert sl.Dense(DENSE[0, 0]) != sl.Dense(DENSE[0, 0][None])
    assert sl.Window(2) != sl.Window(3)
    assert sl.Causal() & sl.Window(2) != sl.Causal() | sl.Window(2)
    assert sl.Predicate(even_distance) != sl.Predicate(looped)
    assert sl.Full() != "Full()"
    assert len({sl.Causal(), sl.Causal(), sl.Window(1), sl.Window(1, 0), sl.Lengths(1), sl.Lengths(1)}) == 3


def test_masks_cannot_be_changed() -> None:
    array, lengths = DENSE[0, 0].copy(), np.array([1, 2])
    dense, padded = sl.Dense(array), sl.Lengths(lengths)
    array[:], lengths[:] = ~array, 0
    np.testing.assert_array_equal(dense.dense(1, 1, N, M)[0, 0], DENSE[0, 0])
    assert padded == sl.Lengths([1, 2])
    for stored in (dense.array, padded.keys, pickle.loads(pickle.dumps(dense)).array):
        with pytest.raises(ValueError, match="read-only"):
            stored[...] = 0
    for mask, name in ((sl.Window(1), "left"), (dense, "array"), (padded, "keys"), (sl.Causal() & dense, "left")):
        with pytest.raises(AttributeError):
            setattr(mask, name, None)


@pytest.mark.parametrize("mask", ALL[: len(MASKS)], ids=repr)
def test_no_truth_value(mask: sl.Mask) -> None:
    with pytest.raises(TypeError, match=r"&, \| and ~"):
        bool(mask)
    with pytest.raises(TypeError, match=r"&, \| and ~"):
        _ = mask and sl.Causal()


@pytest.mark.parametrize("join", [lambda a, b: a & b, lambda a, b: b & a, lambda a, b: a | b, lambda a, b: b | a])
@pytest.mark.parametrize("other", [np.ones((2, 2), bool), True, None, "causal"], ids=repr)
def test_only_masks_are_joined(join: Callable[[object, object], object], other: object) -> None:
    with pytest.raises(TypeError, match=r"masks on both sides.*sl\.Dense\(array\)"):
        join(sl.Causal(), other)


def test_light_simplification() -> None:
    causal, window = sl.Causal(), sl.Window(2)
    assert (sl.Full() & causal) is causal
    assert (causal & sl.Full()) is causal
    assert (sl.Full() | causal) == sl.Full()
    assert (causal | sl.Full()) == sl.Full()
    assert ~~causal is causal
    assert ~~(causal & window) == (causal & window)
    assert (causal & causal) is causal
    assert (causal | causal) is causal


@pytest.mark.parametrize(
    ("mask", "written"),
    [
        (sl.Full(), "Full()"),
        (sl.Window(3), "Window(3, 0)"),
        (sl.Window(None, 1), "Window(None, 1)"),
        (sl.Lengths([2, 4]), "Lengths([2, 4])"),
        (sl.Lengths(2, 3, "left"), "Lengths(2, queries=3, padding_side='left')"),
        (sl.Lengths(np.arange(99)), "Lengths(<int64 [99]>)"),
        (sl.Dense(np.eye(2, dtype=bool)), "Dense([[True, False], [False, True]])"),
        (sl.Dense(DENSE), "Dense(<bool [2, 3, 4, 5]>)"),
        (sl.Predicate(even_distance), "Predicate(even_distance)"),
        (~sl.Causal() & sl.Window(1) | sl.Full() & sl.Causal(), "~Causal() & Window(1, 0) | Causal()"),
        (~(sl.Causal() | sl.Window(1)), "~(Causal() | Window(1, 0))"),
        ((sl.Causal() | sl.Window(1)) & sl.Lengths(1), "(Causal() | Window(1, 0)) & Lengths(1)"),
        (sl.Causal() & (sl.Window(1) & sl.Lengths(1)), "Causal() & (Window(1, 0) & Lengths(1))"),
        (sl.Causal() | (sl.Window(1) | sl.Lengths(1)), "Causal() | (Window(1, 0) | Lengths(1))"),
        (sl.Causal() & sl.Window(1) & sl.Lengths(1), "Causal() & Window(1, 0) & Lengths(1)"),
    ],
    ids=str,
)
def test_repr_reads_like_the_source(mask: sl.Mask, written: str) -> None:
    assert repr(mask) == written


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: sl.Window(-1), ValueError, r"left: found -1.*>= 0.*left=None is unlimited"),
        (lambda: sl.Window(True), TypeError, r"left: found True"),
        (lambda: sl.Window(1.0), TypeError, r"left: found 1\.0"),
        (lambda: sl.Window(2**62 + 1), ValueError, r"left=None is unlimited"),
        (lambda: sl.Window(-1, "2"), TypeError, r"(?s)2 problems.*left: found -1.*right: found '2'"),
        (lambda: sl.Lengths(1.5), TypeError, r"keys: found 1\.5; expected ints"),
        (lambda: sl.Lengths(np.array([1.0])), TypeError, r"keys: found float64 \[1\]"),
        (lambda: sl.Lengths([[1], [2, 3]]), TypeError, r"keys: found a list"),
        (lambda: sl.Lengths([1.0, 2.0]), TypeError, r"keys: found a list of float64; expected ints"),
        (lambda: sl.Lengths(True), TypeError, r"keys: found True"),
        (lambda: sl.Lengths([True]), TypeError, r"keys"),
        (lambda: sl.Lengths("3"), TypeError, r"keys: found '3'"),
        (lambda: sl.Lengths(2**70), TypeError, r"keys"),
        (lambda: sl.Lengths(1, queries=1.5), TypeError, r"queries: found 1\.5"),
        (lambda: sl.Lengths(1, padding_side="both"), ValueError, r"padding_side: found 'both'.*left.*right"),
        (lambda: sl.Dense([[True]]), TypeError, r"array: found a list.*np\.asarray\(array, dtype=bool\)"),
        (lambda: sl.Dense(np.ones((2, 2))), TypeError, r"array: found float64 \[2, 2\]"),
        (lambda: sl.Dense(np.ma.masked_array([[True]])), TypeError, r"MaskedArray"),
        (lambda: sl.Dense(np.ones(3, bool)), ValueError, r"array: found bool \[3\].*array\[None, :\]"),
        (lambda: sl.Predicate(3), TypeError, r"function: found 3.*\(b, h, i, j\)"),
    ],
)
def test_bad_masks(make: Callable[[], sl.Mask], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_numpy_integers_are_integers() -> None:
    assert sl.Window(np.int32(2), np.uint8(1)) == sl.Window(2, 1)
    assert type(sl.Window(np.int64(2)).left) is int
    assert sl.Lengths(np.int8(3)) == sl.Lengths(3)


def test_window_of_any_width_stays_exact_at_large_positions() -> None:
    start = 2**60
    for q_start, k_start in ((start, -start), (-start, start)):
        assert sl.Window(2**62, 2**62).dense(1, 1, 2, 2, q_start, k_start).all()
    np.testing.assert_array_equal(sl.Window(1).dense(1, 1, 3, 3, start, start), sl.Window(1).dense(1, 1, 3, 3))
