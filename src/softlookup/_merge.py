"""The exact union of partial lookups over disjoint sets of keys.

Each partial result carries the log of its softmax denominator; e^(lse - lse of the union) is its share. An empty
partial (lse -inf) is left out by selection, so that nothing in its output shows, NaN included. What is not finite in
any other shows, also where its share rounds to zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softlookup._lookup_checks import partials
from softlookup._problems import Problems

Array = NDArray[Any]


def merge(
    outs: Array | Sequence[Array],
    lses: NDArray[np.float64] | Sequence[NDArray[np.float64]],
    *,
    sinks: Array | None = None,
) -> tuple[Array, NDArray[np.float64]]:
    """Merge partial lookups of the same queries over disjoint keys into the lookup over all of them.

    Parameters
    ----------
    outs
        P partial outputs [..., Hq, N, d_v] ([N, d_v] for a single head), as a sequence or stacked [P, ..., Hq, N, d_v].
        Ask `attention` for float32 ones (out_dtype=) where q is half precision: they are rounded once, here.
    lses
        Their `Stats.lse`, float64 [..., Hq, N] ([N]), likewise; without sinks.
    sinks
        [Hq]: logits that count once, here, and not in the partials.

    Returns
    -------
    (numpy.ndarray, numpy.ndarray)
        The output [..., Hq, N, d_v], of the type of outs, and its lse, float64 [..., Hq, N]. Where every partial is
        empty the output is 0, and the lse -inf or the sink's logit. inf and NaN in a partial that is not empty show,
        whatever its share.

    Raises
    ------
    TypeError, ValueError
        If the shapes or types do not fit, with all reasons.

    Notes
    -----
    A share is known to float64's spacing at the lse: where scores exceed 2**52 or so, a partial of two keys with one
    score and a partial of one have the same lse, and so the same share.

    References
    ----------
    Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), section 3.1.

    Examples
    --------
    >>> import numpy as np
    >>> import softlookup as sl
    >>> q, k = np.ones((1, 2)), np.arange(6.0).reshape(3, 2)
    >>> parts = [sl.attention(q, part, part, stats=True) for part in (k[:1], k[1:])]
    >>> out, lse = sl.merge([out for out, _ in parts], [stats.lse for _, stats in parts])
    >>> np.allclose(out, sl.attention(q, k, k))
    True
    """
    problems = Problems("merge")
    checked = partials(problems, outs, lses, sinks)
    problems.raise_any()
    assert checked is not None
    parts, logs, logits = checked
    top = logs.max(axis=0)
    if logits is not None:
        top = np.maximum(top, logits)
    shift = np.where(top == -np.inf, 0.0, top)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        denominator = np.exp(logs - shift).sum(axis=0)
        if logits is not None:
            denominator = denominator + np.exp(logits - shift)
        lse = shift + np.log(denominator)
        total = np.zeros(parts[0].shape)
        for part, log in zip(parts, logs, strict=True):
            share = (np.exp(log - shift) / denominator)[..., None]
            wide = part.astype(np.float64)
            seen = np.where(np.isfinite(wide), share * wide, share + wide)  # the sum, as 0 * inf is NaN
            total += np.where((log == -np.inf)[..., None], 0.0, seen)
        return total.astype(parts[0].dtype), lse
