"""Masks as text, numbers and arrays, for frameworks whose operators take no Python objects.

A mask is written in postfix order, like the core's program, but before the sizes of a call are known: so it passes
through a framework's graph as a constant string beside ordinary numbers and arrays, is compared, kept and shown like
any other argument, and comes out as the same mask on the other side. Only the function of a Predicate cannot be
written: its mask is remembered for as long as somebody holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from softlookup._mask_algebra import And, Full, Mask, Not, Or
from softlookup._masks import Causal, Dense, Lengths, Predicate, Window

Arrays = list[NDArray[Any]]

UNLIMITED = -1

_predicates: WeakValueDictionary[int, Predicate] = WeakValueDictionary()
_keys = count()


class Encoded(NamedTuple):
    """A mask that can be passed on: its words, separated by spaces, and what they take, in their order."""

    words: str
    numbers: list[int]
    arrays: Arrays


def encode(mask: Mask) -> Encoded:
    """The mask, written.

    Raises
    ------
    NotImplementedError
        If the mask is of a kind that is missing here.
    """
    if isinstance(mask, (And, Or)):
        left, right = encode(mask.left), encode(mask.right)
        words = f"{left.words} {right.words} {'and' if isinstance(mask, And) else 'or'}"
        return Encoded(words, left.numbers + right.numbers, left.arrays + right.arrays)
    if isinstance(mask, Not):
        inner = encode(mask.inner)
        return Encoded(f"{inner.words} not", inner.numbers, inner.arrays)
    if isinstance(mask, Window):
        return Encoded("window", [UNLIMITED if side is None else side for side in (mask.left, mask.right)], [])
    if isinstance(mask, Lengths):
        arrays = [lengths for lengths in (mask.keys, mask.queries) if isinstance(lengths, np.ndarray)]
        return Encoded(f"lengths:{mask.padding_side}:{len(arrays)}", [], arrays)
    if isinstance(mask, Dense):
        return Encoded("dense", [], [mask.array])
    if isinstance(mask, Predicate):
        key = next(_keys)
        _predicates[key] = mask
        return Encoded(f"predicate:{key}", [], [])
    if isinstance(mask, (Causal, Full)):
        return Encoded("causal" if isinstance(mask, Causal) else "full", [], [])
    raise NotImplementedError(f"softlookup: found {mask!r}, which has no words yet; expected a mask that has")


def decode(words: str, numbers: Sequence[int], arrays: Sequence[NDArray[Any]]) -> Mask | None:
    """The mask that `encode` wrote; None for no words. Its arrays are read in place.

    Raises
    ------
    RuntimeError
        If a Predicate in it is gone.
    """
    counts, fields = iter(numbers), iter(arrays)
    stack: list[Mask] = []
    for word in words.split():
        name, *details = word.split(":")
        if name in _JOINS:
            right = stack.pop()
            stack.append(_JOINS[name](stack.pop(), right))
        elif name == "not":
            stack.append(Not(stack.pop()))
        elif name == "window":
            left, right_side = (None if side == UNLIMITED else side for side in (next(counts), next(counts)))
            stack.append(Window(left, right_side))
        elif name == "lengths":
            keys = next(fields)
            queries = next(fields) if details[1] == "2" else None
            stack.append(Lengths(keys, queries, padding_side="left" if details[0] == "left" else "right"))
        elif name == "dense":
            stack.append(Dense._borrow(next(fields)))
        elif name == "predicate":
            stack.append(_remembered(int(details[0])))
        else:
            stack.append(Causal() if name == "causal" else Full())
    return stack[0] if stack else None


_JOINS: dict[str, Callable[[Mask, Mask], Mask]] = {"and": And, "or": Or}


def predicates_of(words: str) -> list[Predicate]:
    """The masks that the words remember: whoever keeps the words must hold these."""
    return [_remembered(int(word.partition(":")[2])) for word in words.split() if word.startswith("predicate")]


def _remembered(key: int) -> Predicate:
    mask = _predicates.get(key)
    if mask is None:
        raise RuntimeError(
            "softlookup: found a Predicate that no longer exists; expected its mask to be held until the last backward "
            "pass; fix: keep a reference to the mask"
        )
    return mask


def are_elements(words: str) -> list[bool]:
    """For every array of a mask, whether it is the elements [..., N, M] of a Dense; all others are lengths [...]."""
    kinds: list[bool] = []
    for word in words.split():
        if word == "dense":
            kinds.append(True)
        elif word.startswith("lengths"):
            kinds += [False] * int(word.rpartition(":")[2])
    return kinds
