"""The checks of `merge` and `lookup`, whose arrays are not those of `attention`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softlookup._array_checks import one_type, plain_array
from softlookup._checks import as_sinks, factor
from softlookup._problems import LARGEST_FLOAT32, Problems, describe
from softlookup._types import FLOAT64

Array = NDArray[Any]

SIMILARITIES = ("dot", "cosine", "distance")


def partials(
    problems: Problems, outs: Any, lses: Any, sinks: Any
) -> tuple[list[Array], NDArray[np.float64], NDArray[np.float64] | None] | None:
    """The partial outputs, their lses stacked [P, ..., Hq, N], and the sinks in a shape that broadcasts to an lse."""
    parts, logs = (_listed(problems, name, value) for name, value in (("outs", outs), ("lses", lses)))
    if parts is None or logs is None:
        return None
    if not parts or len(parts) != len(logs):
        found = f"{len(parts)} outputs and {len(logs)} lses"
        problems.value("outs, lses", found, "the same number, at least one", "pass one lse for each output")
        return None
    if one_type(problems, tuple((f"outs[{index}]", part) for index, part in enumerate(parts))) is None:
        return None
    for index, log in enumerate(logs):
        name = f"lses[{index}]"
        if plain_array(problems, name, log) and log.dtype != np.float64:
            problems.type(name, describe(log), "float64, as Stats.lse is", f"{name}.astype(np.float64)")
    shape = parts[0].shape
    for index, (part, log) in enumerate(zip(parts, logs, strict=True)):
        if part.shape != shape or part.ndim < 2:
            expected = "one shape for all outputs, [..., Hq, N, d_v]"
            problems.value(f"outs[{index}]", f"shape {list(part.shape)}", expected, "pass partials of the same queries")
        elif isinstance(log, np.ndarray) and log.shape != shape[:-1]:
            found = f"shape {list(log.shape)}"
            problems.value(f"lses[{index}]", found, f"{list(shape[:-1])}, that of outs without d_v", "pass Stats.lse")
    logits = None
    if sinks is not None and len(shape) > 1:
        logits = as_sinks(problems, sinks, shape[-3] if len(shape) > 2 else 1, FLOAT64)
    if problems.count:
        return None
    return parts, np.stack(logs), logits[:, None] if logits is not None and len(shape) > 2 else logits


def _listed(problems: Problems, name: str, value: Any) -> list[Array] | None:
    """The partials of a sequence of arrays or of a stacked array."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if not isinstance(value, np.ndarray):
        expected = "a list or tuple of numpy.ndarray, or one array with the partials along axis 0"
        fix = f"list({name})" if isinstance(value, Iterable) else f"[{name}]"
        problems.type(name, describe(value), expected, fix)
        return None
    if not plain_array(problems, name, value):
        return None
    if value.ndim == 0:
        problems.value(name, "an array without axes", "partials stacked along axis 0", f"{name}[None]")
        return None
    return list(value)


def lookup_arguments(
    problems: Problems, query: Any, keys: Any, values: Any, beta: Any, similarity: Any, match: Any
) -> None:
    """Report all that is wrong with the arguments of `lookup`."""
    code = one_type(problems, (("query", query), ("keys", keys), ("values", values)))
    _lookup_shapes(problems, query, keys, values)
    if similarity not in SIMILARITIES:
        problems.value("similarity", describe(similarity), " or ".join(map(repr, SIMILARITIES)), "similarity='dot'")
    if match not in (None, "equal"):
        problems.value("match", describe(match), "None or 'equal'", "match='equal' is the dictionary's own rule")
    if not (isinstance(beta, (float, np.floating)) and math.isinf(beta)):
        computed = code if similarity == "dot" else FLOAT64
        fix = "beta=1.0, or beta=np.inf for the nearest key alone"
        if computed != FLOAT64:
            fix += f"; up to {LARGEST_FLOAT32:.3g} unless the arrays are float64"
        factor(problems, "beta", beta, computed, fix, expected="a real number or inf")
    if match == "equal" and not (similarity == "dot" and beta == 1.0):
        found = f"match='equal' with beta={beta!r} and similarity={similarity!r}"
        problems.value("match", found, "match alone, as equality has neither", "leave out beta and similarity")


def _lookup_shapes(problems: Problems, query: Any, keys: Any, values: Any) -> None:
    arrays = (
        ("query", query, 1, "[d] or [N, d]"),
        ("keys", keys, 2, "[M, d]"),
        ("values", values, 1, "[M] or [M, d_v]"),
    )
    if not all(isinstance(array, np.ndarray) for _, array, _, _ in arrays):
        return
    before = problems.count
    for name, array, least, expected in arrays:
        if not least <= array.ndim <= 2:
            problems.value(name, f"shape {list(array.shape)}", expected, "one table of keys and values a call")
    if problems.count > before:
        return
    if query.shape[-1] != keys.shape[1]:
        found = f"widths {query.shape[-1]} and {keys.shape[1]}"
        problems.value("query, keys", found, "one width d, the last axis", "pass vectors of the same space")
    if len(keys) != len(values):
        found = f"{len(keys)} keys and {len(values)} values"
        problems.value("keys, values", found, "one value for each key", "pass as many values as keys")
