"""Caches for the tests: shapes that pages, groups and odd widths make hard, and caches filled from arrays."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

import softlookup as sl
from cases import TYPES

FLOATS = ("float32", "bfloat16", "float16")
CODES = ("int8", "int4")
ALL = (*FLOATS, *CODES)
# How far lookups among standard normal numbers may be from those in what the codes stand for. int8 meets 16-bit codes
# of queries and weights. int4 meets bytes: with a largest number of 3 the step of a query is 3 / 127, so a scaled score
# is off by 0.007 in the mean square, a weight by as much of itself, and one lookup in thousands by three times that.
# test_kv_cache_quantised.py derives bounds.
CLOSE = {"int8": 1e-3, "int4": 2e-2}


@dataclass(frozen=True)
class CacheShape:
    """Sizes of a cache and of what is asked of it."""

    heads: int
    kv_heads: int
    width: int
    value_width: int
    tokens: int
    queries: int
    batch: int = 1


SHAPES = {
    "one_key": CacheShape(1, 1, 1, 1, 1, 1),
    "page_edge": CacheShape(4, 2, 64, 64, 512, 1),
    "past_the_edge": CacheShape(10, 2, 64, 64, 513, 1, batch=2),
    "odd_widths": CacheShape(6, 1, 80, 24, 1025, 5),
    "group_of_seven": CacheShape(7, 1, 96, 33, 700, 32),
    "group_of_twelve": CacheShape(24, 2, 64, 128, 1100, 2),
    "group_of_sixteen": CacheShape(16, 1, 40, 40, 511, 3),
    "single_heads": CacheShape(3, 3, 128, 64, 1300, 1, batch=3),
    "prefill": CacheShape(4, 2, 32, 32, 600, 600),
    "latent": CacheShape(20, 1, 576, 512, 530, 2),
}


def dtype_of(name: str) -> np.dtype[Any]:
    """The type of the arrays that a cache of this type takes."""
    return TYPES.get(name, np.dtype(np.float32))


def make(shape: CacheShape, name: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [B, Hq, N, d_k], k and v [B, Hk, M, d]."""
    rng = np.random.default_rng(seed)
    sizes = (
        (shape.batch, shape.heads, shape.queries, shape.width),
        (shape.batch, shape.kv_heads, shape.tokens, shape.width),
        (shape.batch, shape.kv_heads, shape.tokens, shape.value_width),
    )
    q, k, v = (rng.standard_normal(size).astype(dtype_of(name)) for size in sizes)
    return q, k, v


def empty(k: np.ndarray, v: np.ndarray, name: str, **options: Any) -> sl.KVCache:
    """A cache for such rows."""
    return sl.KVCache(
        batch=k.shape[0], kv_heads=k.shape[1], width=k.shape[3], value_width=v.shape[3], dtype=name, **options
    )


def filled(k: np.ndarray, v: np.ndarray, name: str, pieces: tuple[int, ...] = (), **options: Any) -> sl.KVCache:
    """A cache that got its tokens in pieces that begin at 0 and at the given tokens."""
    cache = empty(k, v, name, **options)
    bounds = (0, *pieces, k.shape[2])
    for first, last in pairwise(bounds):
        cache.append(k[:, :, first:last], v[:, :, first:last])
    return cache


def same_bits(found: np.ndarray, expected: np.ndarray) -> bool:
    """Whether two arrays are equal byte by byte."""
    left, right = (np.ascontiguousarray(array) for array in (found, expected))
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
