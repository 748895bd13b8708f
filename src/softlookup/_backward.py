"""One lookup forward, keeping what its gradients need, and backward: what all faces of the library share.

Nothing N x M is kept: the output, before it is rounded to a half type, and a few numbers of each row. The core makes
the weights again from them, tile by tile. Sums are float32 (float64 for float64 input) and are rounded once, to the
type of what they belong to. An axis that was broadcast is summed in a fixed order, in float64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from softlookup import _core
from softlookup._array_checks import Shapes, core_inputs
from softlookup._scoring import Scoring
from softlookup._types import code_of, core_view, statistics_dtype, sum_code

Array = NDArray[Any]
Doubles = NDArray[np.float64]


class Lookup(NamedTuple):
    """One checked call: its arrays as they were given, and what was read out of them."""

    q: Array
    k: Array
    v: Array
    bias: Array | None
    sinks: Array | None
    code: int
    sizes: Shapes
    scoring: Scoring
    isa: str


class Rows(NamedTuple):
    """What a pullback needs of every row, each float64 [B, Hq, N].

    lse: log of the denominator. top: the largest score, -inf where the row is empty. share: its weight.
    """

    lse: Doubles
    top: Doubles
    share: Doubles


def forward(lookup: Lookup, wide: Array, threads: int) -> Doubles:
    """Fill the output in the type of the sums, and return the moments of every row [B, Hq, N, 9]."""
    sizes, code = lookup.sizes, lookup.code
    moments = np.empty((*sizes.rows, _core.MOMENTS))
    q, k, v = core_inputs(code, lookup.q, lookup.k, lookup.v)
    _core.attend(q, k, v, wide, code, sum_code(code), lookup.scoring, moments, threads, lookup.isa)
    return moments


def rounded(wide: Array, dtype: np.dtype[Any]) -> Array:
    """The output in another type; a view where that is the type of the sums."""
    if wide.dtype == dtype:
        return wide.view()
    with np.errstate(all="ignore"):
        return wide.astype(dtype)


def rows_of(moments: Doubles, sinks: Doubles | None) -> Rows:
    """What the backward pass needs of the moments."""
    shape = moments.shape[:-1]
    rows = Rows(np.empty(shape), np.empty(shape), np.empty(shape))
    _core.normalizers(moments, sinks, *rows)
    return rows


def backward(
    lookup: Lookup,
    wide: Array,
    rows: Rows,
    dout: Array,
    dlse: Doubles | None,
    targets: dict[str, Array],
    threads: int,
) -> None:
    """Fill the gradients that are asked for, which are zeros of the shape and type of what they belong to.

    wide is the output in the type of the sums; dlse is [B, Hq, N].
    """
    sizes, code = lookup.sizes, lookup.code
    parts, part_code = _parts(lookup, targets)
    delta = np.zeros(sizes.rows) if dlse is None else -dlse
    dout_code = code_of(dout.dtype)
    assert dout_code is not None
    dout = core_view(dout, dout_code)
    if targets:
        _core.differentiate(
            *core_inputs(code, lookup.q, lookup.k, lookup.v),
            wide,
            dout,
            rows.top,
            rows.share,
            code,
            sum_code(code),
            dout_code,
            part_code,
            lookup.scoring,
            dlse,
            delta,
            _core_part(parts, "q", part_code),
            _core_part(parts, "k", part_code),
            _core_part(parts, "v", part_code),
            parts.get("bias"),
            threads,
            lookup.isa,
        )
    if "bias" in targets and "bias" not in parts:
        parts["bias"] = _row_slopes(lookup, rows, delta, dlse)
    if "sinks" in targets:
        parts["sinks"] = _sink_slopes(lookup, rows, delta, dlse)
    for name, part in parts.items():
        _store(part, targets[name])


def _parts(lookup: Lookup, targets: dict[str, Array]) -> tuple[dict[str, Array], int]:
    """What the core is to fill, and the type code of that for q, k and v.

    The target itself, unless broadcast axes have still to be summed; then zeros of all axes, in the type of the sums.
    """
    sizes, sums = lookup.sizes, statistics_dtype(lookup.code)
    headed = {name: array[None] if array.ndim == 2 else array for name, array in targets.items() if name in "qkv"}
    shapes = {name: (*sizes.leading, *array.shape[-3:]) for name, array in headed.items()}
    if all(array.shape == shapes[name] for name, array in headed.items()):
        parts, code = headed, lookup.code
    else:
        parts, code = {name: np.zeros(shape, sums) for name, shape in shapes.items()}, sum_code(lookup.code)
    bias = targets.get("bias")
    if bias is not None and not (bias.shape[-1] == 1 and sizes.keys != 1):
        parts["bias"] = bias if bias.dtype == sums else np.zeros(bias.shape, sums)
    return parts, code


def _core_part(parts: dict[str, Array], name: str, code: int) -> Array | None:
    return core_view(parts[name], code) if name in parts else None


def _store(part: Array, target: Array) -> None:
    """Sum over what was broadcast, and round once, to the type of the target."""
    if np.may_share_memory(part, target):
        return
    shape = target.shape
    missing = part.ndim - len(shape)
    axes = tuple(
        axis for axis, size in enumerate(part.shape) if axis < missing or (shape[axis - missing] == 1 and size != 1)
    )
    with np.errstate(all="ignore"):
        target[...] = part.sum(axis=axes, dtype=np.float64, keepdims=True).reshape(shape) if axes else part


def zeros_as(array: Array) -> Array:
    """Zeros of its shape and type, with heads and rows in memory in the order that they have there."""
    if array.ndim > 2 and abs(array.strides[-3]) < abs(array.strides[-2]):
        return np.zeros(array.swapaxes(-3, -2).shape, array.dtype).swapaxes(-3, -2)
    return np.zeros(array.shape, array.dtype)


def _row_slopes(lookup: Lookup, rows: Rows, delta: Doubles, dlse: Doubles | None) -> Doubles:
    """The slopes of all scores of a row, summed: [..., Hq, N, 1]. The gradient of a bias that is the same for all keys.

    With the sink's weight a_0, sum_j a_j (p_j - delta) = (delta + dlse) - (1 - a_0) delta.
    """
    slopes = _sink_weights(lookup, rows) * delta + (0.0 if dlse is None else dlse)
    return np.where(_empty(rows), 0.0, slopes).reshape(*lookup.sizes.scores[:-1], 1)


def _sink_slopes(lookup: Lookup, rows: Rows, delta: Doubles, dlse: Doubles | None) -> Doubles:
    """The gradient of the sinks [Hq]. The output of an empty row is 0 whatever its slope: only lse counts there."""
    known = np.where(_empty(rows), 0.0 if dlse is None else -dlse, delta)
    by_row: Doubles = -_sink_weights(lookup, rows) * known
    summed: Doubles = by_row.sum(axis=(0, 2))
    return summed


def _sink_weights(lookup: Lookup, rows: Rows) -> Doubles:
    """The weight of each row's sink [B, Hq, N]; 0 where there is none."""
    if lookup.scoring.sinks is None:
        return np.zeros(rows.lse.shape)
    logits = lookup.scoring.sinks[:, None]
    with np.errstate(all="ignore"):
        return np.where(logits == -np.inf, 0.0, np.exp(logits - rows.lse))


def _empty(rows: Rows) -> NDArray[np.bool_]:
    empty: NDArray[np.bool_] = (rows.top == -np.inf) & (rows.share == 0)
    return empty
