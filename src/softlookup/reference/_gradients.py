"""Gradients, one row at a time, from the Jacobian of its softmax.

With a_j the weights of a row over its visible keys, p_j = dout . v_j, and the sink's weight a_0, the scalar
dout . out + dlse * lse has the slopes

    d / d s_j  = a_j (p_j - sum_l a_l p_l) + a_j dlse        d / d sink = a_0 (dlse - sum_l a_l p_l)

because d a_l / d s_j = a_l ([l = j] - a_j), d a_l / d sink = -a_l a_0, and the slope of lse is the weight itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ._attention import Bools, DenseMask, Floats, ReferenceStats, _align, _sink, _start, _visible, attention


@dataclass(frozen=True)
class ReferenceGradients:
    """Slopes of ``sum(dout * out) + sum(dlse * lse)``, each of the shape of what it belongs to.

    Attributes
    ----------
    q, k, v : float64
    bias, sinks : float64 or None
        None where the call had none. A bias of -inf hides, and a sink of -inf is none: their slope is 0.
    """

    q: Floats
    k: Floats
    v: Floats
    bias: Floats | None
    sinks: Floats | None


def gradients(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    dout: ArrayLike,
    dlse: ArrayLike | None = None,
    *,
    mask: ArrayLike | DenseMask | None = None,
    bias: ArrayLike | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    q_start: ArrayLike | None = None,
    k_start: int = 0,
) -> ReferenceGradients:
    """Gradients of `attention` with respect to every real input.

    Parameters
    ----------
    q, k, v, mask, bias, scale, softcap, sinks, q_start, k_start
        As in `attention`.
    dout : array [..., Hq, N, d_v] or [N, d_v]
        Slope of the loss in the output.
    dlse : array [..., Hq, N] or [N]
        Slope of the loss in lse; 0 if None. What a row without keys and without a sink is given counts nothing.

    Returns
    -------
    ReferenceGradients

    Examples
    --------
    >>> found = gradients([[2.0]], [[0.0], [1.0]], [[0.0], [1.0]], [[1.0]], scale=1.0)
    >>> weight = 1 / (1 + np.exp(-2.0))
    >>> np.allclose(found.q, weight * (1 - weight)), np.allclose(found.v, [[1 - weight], [weight]])
    (True, True)
    """
    given = [np.asarray(x).astype(np.float64) for x in (q, k, v)]
    single = given[0].ndim == 2
    headed = [x[None] for x in given] if single else given
    options = {"mask": mask, "bias": bias, "scale": scale, "softcap": softcap, "sinks": sinks}
    _, stats = attention(*headed, **options, q_start=q_start, k_start=k_start)  # type: ignore[arg-type]
    queries, keys, values = _align(*headed)
    shape = stats.weights.shape
    visible = _visible(mask, bias, shape, _start(q_start, k_start, shape), k_start)
    slopes_out = np.asarray(dout).astype(np.float64).reshape(*shape[:-1], values.shape[-1])
    slopes_lse = np.zeros(shape[:-1]) if dlse is None else np.asarray(dlse).astype(np.float64).reshape(shape[:-1])
    factor = 1 / math.sqrt(queries.shape[-1]) if scale is None else scale
    with np.errstate(all="ignore"):
        by_score, by_sink, by_value = _softmax_slopes(stats, visible, values, slopes_out, slopes_lse)
        by_product = np.where(visible, by_score * _steepness(queries, keys, factor, softcap), 0.0) * factor
        by_query, by_key = _product_slopes(by_product, visible, queries, keys)
        logits = _sink(sinks, shape)
        by_sink = np.where(logits == -np.inf, 0.0, by_sink)
    return ReferenceGradients(
        q=_sum_to(by_query, headed[0].shape).reshape(given[0].shape),
        k=_sum_to(by_key, headed[1].shape).reshape(given[1].shape),
        v=_sum_to(by_value, headed[2].shape).reshape(given[2].shape),
        bias=None if bias is None else _sum_to(by_score, np.shape(bias)),
        sinks=None if sinks is None else _sum_to(by_sink[..., None], (shape[-3], 1, 1)).reshape(-1),
    )


def _softmax_slopes(
    stats: ReferenceStats, visible: Bools, values: Floats, slopes_out: Floats, slopes_lse: Floats
) -> tuple[Floats, Floats, Floats]:
    """Slopes in the scores [..., N, M], in each row's sink [..., N], and in the values of each query head."""
    by_score, by_value = np.zeros(visible.shape), np.zeros(values.shape)
    by_sink = np.zeros(visible.shape[:-1])
    for row in np.ndindex(visible.shape[:-1]):
        shown, head = visible[row], row[:-1]
        weights = stats.weights[row][shown]
        products = values[head][shown] @ slopes_out[row]
        mean = weights @ products
        by_score[row][shown] = weights * (products - mean) + weights * slopes_lse[row]
        by_sink[row] = stats.missing_mass[row] * (slopes_lse[row] - mean)
        by_value[head][shown] += weights[:, None] * slopes_out[row]
    return by_score, by_sink, by_value


def _steepness(queries: Floats, keys: Floats, factor: float, softcap: float | None) -> Floats:
    """Slope of the softcap at every product [..., N, M]."""
    if softcap is None:
        return np.ones((*queries.shape[:-1], keys.shape[-2]))
    products: Floats = factor * (queries @ keys.swapaxes(-1, -2))
    return 1 - np.tanh(products / softcap) ** 2


def _product_slopes(slopes: Floats, visible: Bools, queries: Floats, keys: Floats) -> tuple[Floats, Floats]:
    """Slopes in the queries, and in the keys of each query head, from those in q . k."""
    by_query, by_key = np.zeros(queries.shape), np.zeros(keys.shape)
    for row in np.ndindex(visible.shape[:-1]):
        shown, head = visible[row], row[:-1]
        by_query[row] = slopes[row][shown] @ keys[head][shown]
        by_key[head][shown] += slopes[row][shown][:, None] * queries[row]
    return by_query, by_key


def _sum_to(full: Floats, shape: tuple[int, ...]) -> Floats:
    """Sum over what was broadcast: groups of heads, axes of size 1 and axes that were missing."""
    *leading, heads, rows, columns = full.shape
    own = shape[-3] if len(shape) > 2 else 1
    if 1 < own < heads:
        full = full.reshape(*leading, own, heads // own, rows, columns).sum(axis=-3)
    full = full.sum(axis=tuple(range(full.ndim - len(shape))))
    summed: Floats = full.sum(axis=tuple(axis for axis, size in enumerate(shape) if size == 1), keepdims=True)
    return summed
