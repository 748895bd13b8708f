"""One row of attention at a time: the output, and every statistic by its definition."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]


class DenseMask(Protocol):
    """A mask that can write itself out."""

    def dense(self, b: int, h: int, n: int, m: int, q_start: Any, k_start: int, /) -> Bools:
        """Return the bool array [B, Hq, N, M], True where a query may attend."""
        ...


@dataclass(frozen=True)
class ReferenceStats:
    """What each row of a lookup did; arrays [..., Hq, N] unless said otherwise.

    Attributes
    ----------
    lse : float64
        Natural log of the denominator, the sink included.
    visible, argmax : int64
        Number of keys that the row may see, and the lowest column of the largest score; -1 where
        the row is empty or NaN.
    entropy, normalized_entropy : float64
        In nats, over the keys renormalised; the second over ln(visible), NaN below 2 keys.
    max_weight, sum_squares, jacobian_trace, first_key_mass : float64
        max a, sum a^2, sum a (1 - a), and a of key column 0, with a the actual weights.
    max_score, score_variance : float64
        The largest visible score, -inf where the row is empty; the variance of the scores under
        the renormalised weights.
    missing_mass : float64
        The sink's weight, 0 where there is none.
    distance : float64 or None
        Mean of i - j in absolute positions under the renormalised weights; None where the positions
        are ambiguous (N != M or k_start != 0, and q_start was not given).
    weights, scores : float64 [..., Hq, N, M]
        exp(s - lse), 0 where hidden; s as it enters the softmax, -inf where hidden.
    """

    lse: Floats
    visible: Integers
    entropy: Floats
    normalized_entropy: Floats
    max_weight: Floats
    argmax: Integers
    max_score: Floats
    sum_squares: Floats
    jacobian_trace: Floats
    score_variance: Floats
    missing_mass: Floats
    distance: Floats | None
    first_key_mass: Floats
    weights: Floats
    scores: Floats


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    mask: ArrayLike | DenseMask | None = None,
    bias: ArrayLike | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    q_start: ArrayLike | None = None,
    k_start: int = 0,
) -> tuple[Floats, ReferenceStats]:
    """Exact softmax attention in float64, with every statistic of one row.

    The score is ``s = scale * (q . k)``, then ``softcap * tanh(s / softcap)``, then ``+ bias``,
    then the mask, then the softmax (Vaswani et al., 2017, equation 1, and the four additions).

    Parameters
    ----------
    q, k, v : arrays [..., Hq, N, d_k], [..., Hk, M, d_k] and [..., Hk, M, d_v]
        Queries, keys and values of any real type; arrays with two axes are one head.
    mask : bool array [N, M] or broadcastable to [..., Hq, N, M], or an object with ``dense``
        True means *may attend*.
    bias : array [N, M] or broadcastable to [..., Hq, N, M]
        Added after scale and softcap; exactly -inf hides a key.
    scale : float
        1 / sqrt(d_k) if None.
    softcap : float
        No cap if None.
    sinks : array [Hq]
        One logit per query head, in the denominator only; -inf is no sink.
    q_start : int, int array over the leading axes, "upper_left" or "lower_right"
        Position of query row 0. None means 0.
    k_start : int
        Position of key column 0.

    Returns
    -------
    out : float64 [..., Hq, N, d_v] or [N, d_v]
    stats : ReferenceStats

    Raises
    ------
    ValueError
        If a mask object meets N != M or k_start != 0 without q_start, or the shapes do not fit.

    Examples
    --------
    >>> out, stats = attention([[2, 1]], [[1, 0], [0, 2], [2, 2], [-1, 1]],
    ...                        [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]])
    >>> stats.weights.round(5)
    array([[0.05252, 0.05252, 0.88865, 0.0063 ]])
    >>> out.round(5)
    array([[0.05882, 0.05882, 0.89495]])
    """
    queries, keys, values = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    axes = queries.ndim
    if axes == 2:
        queries, keys, values = queries[None], keys[None], values[None]
    queries, keys, values = _align(queries, keys, values)
    shape = (*queries.shape[:-1], keys.shape[-2])
    start = _start(q_start, k_start, shape)
    visible = _visible(mask, bias, shape, start, k_start)
    with np.errstate(all="ignore"):
        scores = np.where(visible, _scores(queries, keys, bias, scale, softcap), -np.inf)
        stats = _statistics(scores, visible, _sink(sinks, shape), _distances(start, k_start, shape))
        out = _weighted_sum(stats.weights, visible, values)
    return _unwrap(out, stats, axes)


def _align(queries: Floats, keys: Floats, values: Floats) -> tuple[Floats, Floats, Floats]:
    """Broadcast the leading axes and repeat key heads until there is one for each query head."""
    leading = np.broadcast_shapes(queries.shape[:-3], keys.shape[:-3], values.shape[:-3])
    heads, key_heads = queries.shape[-3], keys.shape[-3]
    reads = np.arange(heads) // max(heads // max(key_heads, 1), 1)
    queries = np.broadcast_to(queries, leading + queries.shape[-3:])
    keys = np.broadcast_to(keys, leading + keys.shape[-3:])[..., reads, :, :]
    values = np.broadcast_to(values, leading + values.shape[-3:])[..., reads, :, :]
    return queries, keys, values


def _start(q_start: Any, k_start: int, shape: tuple[int, ...]) -> Integers | None:
    """Position of query row 0 [...], None where it is ambiguous."""
    *leading, _, queries, keys = shape
    if q_start is None and (queries != keys or k_start != 0):
        return None
    named = {None: 0, "upper_left": k_start, "lower_right": k_start + keys - queries}
    start = named[q_start] if q_start is None or isinstance(q_start, str) else q_start
    return np.broadcast_to(np.asarray(start, dtype=np.int64), leading)


def _visible(mask: Any, bias: Any, shape: tuple[int, ...], start: Integers | None, k_start: int) -> Bools:
    """What the mask shows and a bias of exactly -inf does not hide: bool [..., Hq, N, M]."""
    visible = np.ones(shape, dtype=np.bool_)
    if hasattr(mask, "dense"):
        if start is None:
            raise ValueError("a mask object needs q_start where N != M or k_start != 0")
        dense = mask.dense(start.size, *shape[-3:], start.reshape(-1), k_start)
        visible &= dense.reshape(shape)
    elif mask is not None:
        visible &= np.asarray(mask, dtype=np.bool_)
    if bias is not None:
        visible &= np.asarray(bias).astype(np.float64) != -np.inf
    return visible


def _scores(queries: Floats, keys: Floats, bias: Any, scale: float | None, softcap: float | None) -> Floats:
    factor = 1 / math.sqrt(queries.shape[-1]) if scale is None else scale
    scores: Floats = factor * (queries @ keys.swapaxes(-1, -2))
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    if bias is not None:
        scores = scores + np.asarray(bias).astype(np.float64)
    return scores


def _distances(start: Integers | None, k_start: int, shape: tuple[int, ...]) -> Floats | None:
    """i - j in absolute positions [..., 1, N, M], None where they are ambiguous."""
    if start is None:
        return None
    rows = start[..., None, None, None] + np.arange(shape[-2])[:, None]
    return (rows - (k_start + np.arange(shape[-1]))).astype(np.float64)


def _sink(sinks: ArrayLike | None, shape: tuple[int, ...]) -> Floats:
    """The sink's logit of every row [..., Hq, N], -inf where there is none."""
    logits = np.full(shape[-3], -np.inf) if sinks is None else np.asarray(sinks, dtype=np.float64)
    return np.broadcast_to(logits[:, None], shape[:-1])


def _statistics(scores: Floats, visible: Bools, sink: Floats, distances: Floats | None) -> ReferenceStats:
    """Softmax of the visible scores [..., M] beside a sink [...], and the moments of each row.

    A score of +inf or NaN, or nothing but -inf among the visible ones, makes s - max and with it the whole row NaN,
    each number of it. An empty row is known by its count, never by its maximum.
    """
    count = visible.sum(axis=-1)
    empty = count == 0
    largest = scores.max(axis=-1, initial=-np.inf)
    centred = np.where(visible, scores - largest[..., None], 0.0)
    exponentials = np.where(visible, np.exp(centred), 0.0)
    total = exponentials.sum(axis=-1)
    keys_lse = largest + np.where(empty, 0.0, np.log(total))
    lse = np.where(np.isnan(keys_lse), np.nan, np.logaddexp(keys_lse, sink))
    among_keys = exponentials / np.where(empty, 1.0, total)[..., None]
    missing = np.where(sink == -np.inf, 0.0, 1 / (1 + np.exp(keys_lse - sink)))
    kept = np.where(sink == -np.inf, 1.0, 1 / (1 + np.exp(sink - keys_lse)))
    weights = np.where(visible, among_keys * kept[..., None], 0.0)

    lowest = scores.argmax(axis=-1) if scores.shape[-1] else -1
    spoiled = np.where(np.isnan(lse), np.nan, 0.0)
    logarithms = np.where(empty[..., None], 0.0, centred - np.log(total)[..., None])
    entropy = spoiled - (among_keys * np.where(among_keys > 0, logarithms, 0.0)).sum(axis=-1)
    mean = (among_keys * np.where(among_keys > 0, centred, 0.0)).sum(axis=-1)
    deviations = np.where(among_keys > 0, centred - mean[..., None], 0.0)
    variance = (among_keys * deviations**2).sum(axis=-1)
    return ReferenceStats(
        lse=lse,
        visible=count.astype(np.int64),
        entropy=entropy,
        normalized_entropy=np.where(count < 2, np.nan, entropy / np.log(np.maximum(count, 2))),
        max_weight=weights.max(axis=-1, initial=0.0) + spoiled,
        argmax=np.where(empty | np.isnan(lse), -1, lowest).astype(np.int64),
        max_score=largest + spoiled,
        sum_squares=(weights**2).sum(axis=-1),
        jacobian_trace=(weights * (1 - weights)).sum(axis=-1),
        score_variance=variance + spoiled,
        missing_mass=missing + spoiled,
        distance=None if distances is None else (among_keys * distances).sum(axis=-1),
        first_key_mass=weights[..., :1].sum(axis=-1) + spoiled,
        weights=weights,
        scores=scores,
    )


def _weighted_sum(weights: Floats, visible: Bools, values: Floats) -> Floats:
    """Row by row over the visible keys alone: a hidden NaN has nothing to touch."""
    out = np.zeros((*weights.shape[:-1], values.shape[-1]))
    for row in np.ndindex(weights.shape[:-1]):
        shown = visible[row]
        out[row] = weights[row][shown] @ values[row[:-1]][shown]
    return out


def _unwrap(out: Floats, stats: ReferenceStats, axes: int) -> tuple[Floats, ReferenceStats]:
    """Take away again the head axis that two-dimensional arrays were given."""
    if axes > 2:
        return out, stats
    fields: dict[str, Any] = {name: None if x is None else x[0] for name, x in vars(stats).items()}
    return out[0], ReferenceStats(**fields)
