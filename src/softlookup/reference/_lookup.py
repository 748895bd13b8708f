"""The union of partial lookups, and the dictionary that is looked up softly or hard."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ._attention import Floats


def merge(
    outs: Sequence[ArrayLike], lses: Sequence[ArrayLike], *, sinks: ArrayLike | None = None
) -> tuple[Floats, Floats]:
    """Union of partial lookups over disjoint keys.

    ``lse = ln(sum_p exp(lse_p) + exp(sink))`` and ``out = sum_p exp(lse_p - lse) out_p``
    (Rabe and Staats, 2021, section 3).

    Parameters
    ----------
    outs : sequence of arrays [..., Hq, N, d_v]
        Partial results, computed without sinks.
    lses : sequence of arrays [..., Hq, N]
        Their log-sum-exp; a part whose lse is -inf saw no key and is left out.
    sinks : array [Hq]
        Counted once, here.

    Returns
    -------
    out : float64 [..., Hq, N, d_v]
    lse : float64 [..., Hq, N]

    Examples
    --------
    >>> out, lse = merge([[[1.0]], [[3.0]]], [[0.0], [np.log(3.0)]])
    >>> out, lse
    (array([[2.5]]), array([1.38629436]))
    """
    parts = [np.asarray(out).astype(np.float64) for out in outs]
    logs = [np.asarray(lse).astype(np.float64) for lse in lses]
    if sinks is not None:
        logs.append(np.broadcast_to(np.asarray(sinks, dtype=np.float64)[:, None], logs[0].shape))
    with np.errstate(all="ignore"):
        total = logs[0]
        for log in logs[1:]:
            total = np.logaddexp(total, log)
        out = np.zeros_like(parts[0])
        for part, log in zip(parts, logs, strict=False):
            share = np.exp(log - total)[..., None]
            out = out + np.where(log[..., None] == -np.inf, 0.0, share * part)
    return out, total


def lookup(
    query: ArrayLike,
    keys: ArrayLike,
    values: ArrayLike,
    *,
    beta: float = 1.0,
    similarity: str = "dot",
    match: str | None = None,
) -> Floats:
    """Look a query up among keys, softly or hard.

    ``sum_j softmax_j(beta * similarity(query, k_j)) v_j``. With the similarity "distance" this is
    the Nadaraya-Watson estimator whose Gaussian kernel has the variance 1 / beta.

    Parameters
    ----------
    query : array [d] or [N, d]
    keys : array [M, d]
    values : array [M] or [M, d_v]
    beta : float
        inf is the limit: the average of the values over the keys of the largest similarity.
    similarity : str
        "dot" is q . k; "cosine" is q . k / (|q| |k|), 0 for a zero vector; "distance" is
        -|q - k|^2 / 2.
    match : str
        "equal": the average of the values whose keys equal the query, whatever beta.

    Returns
    -------
    value : float64, [] or [d_v] for one query, [N] or [N, d_v] for several

    Raises
    ------
    ValueError
        If match is "equal" and no key equals a query, or the similarity is unknown.

    Examples
    --------
    >>> keys, values = [[1, 0], [0, 1]], [10.0, 20.0]
    >>> float(lookup([1, 0], keys, values, beta=float("inf")))
    10.0
    >>> float(lookup([0, 1], keys, values, match="equal"))
    20.0
    """
    asked, held, stored = (np.asarray(x).astype(np.float64) for x in (query, keys, values))
    several = np.atleast_2d(asked)
    columns = stored.reshape(len(held), math.prod(stored.shape[1:]))
    similarities = _similarities(several, held, similarity)
    found = []
    for one, row in zip(several, similarities, strict=True):
        if match == "equal":
            chosen = np.all(held == one, axis=-1)
            if not chosen.any():
                raise ValueError(f"no key equals the query {one}")
            weights = chosen / chosen.sum()
        elif beta == np.inf:
            chosen = row == row.max(initial=-np.inf)
            weights = chosen / max(chosen.sum(), 1)
        else:
            exponentials = np.exp(beta * row - np.max(beta * row, initial=-np.inf))
            weights = exponentials / exponentials.sum()
        found.append(weights @ columns)
    return np.array(found).reshape(asked.shape[:-1] + stored.shape[1:])


def _similarities(queries: Floats, keys: Floats, similarity: str) -> Floats:
    if similarity == "distance":
        squares: Floats = ((queries[:, None] - keys) ** 2).sum(axis=-1)
        return -squares / 2
    products: Floats = queries @ keys.T
    if similarity == "dot":
        return products
    if similarity == "cosine":
        norms = np.linalg.norm(queries, axis=-1)[:, None] * np.linalg.norm(keys, axis=-1)
        return np.where(norms == 0, 0.0, products / np.where(norms == 0, 1.0, norms))
    raise ValueError(f"similarity must be 'dot', 'cosine' or 'distance', got {similarity!r}")
