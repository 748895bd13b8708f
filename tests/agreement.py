"""Running one call on the library and on the oracle, and comparing the two.

The oracle is handed the plain reading of the mask, so the library's own `dense` is never its judge.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

import softlookup as sl
from cases import TYPES, Shape, Tolerances, rounds_weights, score_magnitudes, tolerances
from expressions import Geometry, Written
from softlookup import reference
from softlookup._attention import forced_isa

STATISTICS = (
    "lse",
    "entropy",
    "normalized_entropy",
    "max_weight",
    "max_score",
    "sum_squares",
    "jacobian_trace",
    "score_variance",
    "missing_mass",
    "distance",
    "first_key_mass",
)
INDICES = ("visible", "argmax")


def on(isa: str) -> AbstractContextManager[Any]:
    """Every call inside runs on the named instruction set."""
    return forced_isa(isa)


def type_name_of(array: np.ndarray) -> str:
    """The table's name of an array's type."""
    return next(name for name, dtype in TYPES.items() if dtype == array.dtype)


def expect(q: Any, k: Any, v: Any, *, written: Written | None = None, **options: Any) -> tuple[Any, Any, Any]:
    """The oracle's out and statistics, and the tolerances of the call."""
    options = {**options, "mask": plain_mask(q, k, v, written, options)}
    out, stats = reference.attention(q, k, v, **options)
    magnitudes = score_magnitudes(q, k, options.get("scale"), options.get("softcap"), options.get("bias"))
    magnitudes = np.broadcast_to(magnitudes, stats.weights.shape)
    return out, stats, tolerances(type_name_of(q), stats, magnitudes)


def plain_mask(q: Any, k: Any, v: Any, written: Written | None, options: dict[str, Any]) -> Any:
    """The mask as the oracle is handed it."""
    if written is None:
        return options.get("mask")
    leading = np.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    shape = (*leading, *(q.shape[-3:-1] if q.ndim > 2 else (1, len(q))), k.shape[-2])
    mask = written.dense(Geometry(shape, _start(options, shape), options.get("k_start", 0)))
    return mask[0] if q.ndim == 2 else mask


def _start(options: dict[str, Any], shape: tuple[int, ...]) -> Any:
    q_start, k_start = options.get("q_start"), options.get("k_start", 0)
    named = {"upper_left": k_start, "lower_right": k_start + shape[-1] - shape[-2]}
    if q_start is None:
        return 0
    return named[q_start] if isinstance(q_start, str) else q_start


def check_out(found: np.ndarray, expected: np.ndarray, tolerance: Tolerances, v: np.ndarray, isa: str) -> None:
    """The output is the oracle's, rounded to its own type."""
    assert found.shape == expected.shape
    values = np.abs(v.astype(np.float64))
    largest = float(values.max(initial=0.0, where=np.isfinite(values)))
    rounded = rounds_weights(type_name_of(v), isa)
    allowed = tolerance.out(expected, largest, type_name_of(found), rounded)
    assert_within(found.astype(np.float64), expected, allowed, "out")


def check_statistics(found: Any, expected: reference.ReferenceStats, tolerance: Tolerances, type_name: str) -> None:
    """Every one-pass statistic is the oracle's; where positions are ambiguous, the distance raises."""
    stored = np.float64 if type_name == "float64" else np.float32
    for name in STATISTICS:
        if name == "distance" and expected.distance is None:
            with pytest.raises((ValueError, AttributeError), match="q_start"):
                _ = found.distance
            continue
        value = np.asarray(getattr(found, name))
        assert value.dtype == (np.float64 if name == "lse" else stored), name
        assert_within(value.astype(np.float64), getattr(expected, name), tolerance.statistic(name), name)
    for name in INDICES:
        assert np.asarray(getattr(found, name)).dtype == np.int64, name
    np.testing.assert_array_equal(found.visible, expected.visible)
    _check_argmax(np.asarray(found.argmax), expected, tolerance)


def _check_argmax(found: np.ndarray, expected: reference.ReferenceStats, tolerance: Tolerances) -> None:
    """The same column, or one whose score the arithmetic cannot tell from the largest."""
    np.testing.assert_array_equal(found == -1, expected.argmax == -1)
    if expected.scores.shape[-1] == 0:
        return
    chosen = np.take_along_axis(expected.scores, np.maximum(found, 0)[..., None], axis=-1)[..., 0]
    with np.errstate(invalid="ignore"):
        close = expected.max_score - chosen <= 2 * tolerance.score
    assert np.all(close | (found == expected.argmax))


def assert_within(found: np.ndarray, expected: np.ndarray, allowed: np.ndarray, name: str) -> None:
    """|found - expected| <= allowed where finite; elsewhere the same NaN or the same infinity."""
    assert found.shape == expected.shape, (name, found.shape, expected.shape)
    exact = ~np.isfinite(expected)
    np.testing.assert_array_equal(found[exact], expected[exact], err_msg=name)
    finite = ~exact
    error = np.abs(found[finite] - expected[finite])
    limit = np.broadcast_to(allowed, expected.shape)[finite]
    bad = ~(error <= limit)
    if bad.any():
        worst = np.nanargmax(np.where(np.isnan(error), np.inf, error / limit))
        raise AssertionError(
            f"{name}: {bad.sum()} of {expected.size} beyond the tolerance; worst: found {found[finite][worst]!r}, "
            f"expected {expected[finite][worst]!r}, allowed {limit[worst]:.3e}, error {error[worst]:.3e}"
        )


def compare(
    q: Any, k: Any, v: Any, *, isa: str, written: Written | None = None, stats: bool = True, **options: Any
) -> tuple[Any, Any]:
    """Run both on one call, check everything, and return the library's result."""
    library = {**options, **({} if written is None else {"mask": written.library})}
    threads, out_dtype = library.get("threads"), library.get("out_dtype")
    oracle = {key: value for key, value in options.items() if key not in ("threads", "out_dtype", "out")}
    expected, expected_stats, tolerance = expect(q, k, v, written=written, **oracle)
    with on(isa):
        result = sl.attention(q, k, v, stats=stats, **library)
    out, found_stats = result if stats else (result, None)
    assert out.dtype == (q.dtype if out_dtype is None else out_dtype), threads
    check_out(out, expected, tolerance, v, isa)
    if found_stats is not None:
        check_statistics(found_stats, expected_stats, tolerance, type_name_of(q))
    return out, found_stats


def options_for(shape: Shape, written: Written | None) -> dict[str, Any]:
    """The alignment a positional mask needs where N and M differ."""
    ambiguous = shape.queries != shape.keys and written is not None and written.positional
    return {"q_start": "lower_right"} if ambiguous else {}
