"""Masks written as text and arrays: what comes out is what went in, for every kind there is."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given

import softlookup as sl
from cases import Shape
from softlookup._mask_codec import are_elements, decode, encode, predicates_of
from strategies import masks

SHAPE = Shape(5, 7, heads=2, leading=(3,))
KINDS: list[sl.Mask] = [
    sl.Full(),
    sl.Causal(),
    sl.Window(3),
    sl.Window(None, 2),
    sl.Window(None, None),
    sl.Lengths(4),
    sl.Lengths([1, 2, 3], padding_side="left"),
    sl.Lengths([1, 2, 3], queries=[4, 5, 0]),
    sl.Dense(np.eye(5, 7, dtype=bool)),
    sl.Predicate(lambda b, h, i, j: i > j),
    ~sl.Causal(),
    sl.Causal() & sl.Window(2, 2),
    sl.Causal() | ~(sl.Lengths([1, 2, 3]) & sl.Dense(np.ones((3, 1, 5, 7), bool))),
]


@pytest.mark.parametrize("mask", KINDS, ids=repr)
def test_every_kind(mask: sl.Mask) -> None:
    encoded = encode(mask)
    assert decode(*encoded) == mask
    assert repr(decode(*encoded)) == repr(mask)
    assert len(are_elements(encoded.words)) == len(encoded.arrays)


def test_no_kind_is_missing_above() -> None:
    def kinds(of: type[sl.Mask]) -> set[str]:
        own = {of.__name__} if of.__module__.startswith("softlookup.") else set()
        return own.union(*map(kinds, of.__subclasses__()))

    def used(mask: sl.Mask) -> set[str]:
        parts = [getattr(mask, name) for name in ("left", "right", "inner") if hasattr(mask, name)]
        return {type(mask).__name__}.union(*(used(part) for part in parts if isinstance(part, sl.Mask)))

    assert set().union(*map(used, KINDS)) == kinds(sl.Mask) - {"Mask", "Joined"}


@given(mask=masks(SHAPE))
def test_any_composition(mask: object) -> None:
    library = mask.library
    np.testing.assert_array_equal(decode(*encode(library)).dense(3, 2, 5, 7), library.dense(3, 2, 5, 7))


def test_arrays_are_not_copied() -> None:
    dense = sl.Dense(np.eye(3, dtype=bool))
    encoded = encode(dense & sl.Causal())
    assert np.shares_memory(encoded.arrays[0], dense.array)
    assert np.shares_memory(decode(*encoded).left.array, dense.array)
    assert are_elements(encoded.words) == [True]
    assert are_elements(encode(sl.Lengths([1, 2], [1, 1]) & dense).words) == [False, False, True]


def test_nothing_stands_for_no_mask() -> None:
    assert decode("", [], []) is None


def test_a_predicate_is_remembered_while_somebody_holds_it() -> None:
    mask = sl.Predicate(lambda b, h, i, j: i == j)
    words = encode(mask & sl.Causal()).words
    held = predicates_of(words)
    del mask
    gc.collect()
    assert decode(words, [], []).left is held[0]
    del held
    gc.collect()
    with pytest.raises(RuntimeError, match="keep a reference"):
        decode(words, [], [])


def test_an_unknown_kind_is_refused() -> None:
    class Odd(sl.Mask):
        pass

    with pytest.raises(NotImplementedError, match="Odd"):
        encode(sl.Causal() & Odd())
