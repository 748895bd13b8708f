"""Statistics of every row of weights, from the moments that the core gathers in the pass that makes the output.

For a row with scores s_j over its visible keys, m = max s_j and p_j = e^(s_j - m), the core sums p, (s - m) p, (s -
m)^2 p, p^2 and j p in one sweep (when m rises by d, the sums are rescaled: sum t p becomes e^-d (sum t p - d sum p),
and so on). Everything follows from these sums, in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softlookup import _core
from softlookup._scoring import Starts
from softlookup._types import FLOAT32, FLOAT64

Numbers = NDArray[Any]

# As the core orders them.
NUMBERS = (
    "entropy",
    "normalized_entropy",
    "max_weight",
    "max_score",
    "sum_squares",
    "jacobian_trace",
    "score_variance",
    "missing_mass",
    "first_key_mass",
    "distance",
)


@dataclass(frozen=True)
class Conventions:
    """How the scores of a result were made; every `Stats` carries it.

    Attributes
    ----------
    scale, softcap
        As used: ``s = scale * (q . k)``, then ``softcap * tanh(s / softcap)``; softcap is None where there is none.
    bias, sinks
        Whether there was a bias, and whether there were sinks.
    mask
        The mask as it was written, or "None".
    q_start
        Position of query row 0, one int or one for each batch item; None where it was not given and is ambiguous.
    k_start
        Position of key column 0.
    dtype
        Type of q, k and v.
    isa
        Instruction set that computed it.
    units
        Unit of lse and entropy.

    Examples
    --------
    >>> import numpy as np
    >>> import softlookup as sl
    >>> x = np.ones((3, 4), np.float32)
    >>> _, stats = sl.attention(x, x, x, mask=sl.Causal(), stats=True)
    >>> stats.conventions.mask, stats.conventions.scale, stats.conventions.units
    ('Causal()', 0.5, 'nats')
    """

    scale: float
    softcap: float | None
    bias: bool
    sinks: bool
    mask: str
    q_start: int | tuple[int, ...] | None
    k_start: int
    dtype: str
    isa: str
    units: str = "nats"


@dataclass(frozen=True, eq=False, repr=False)
class Stats:
    """One number for every row of weights, each [..., Hq, N] ([N] for a single head).

    lse is float64, visible and argmax are int64, all others float32 (float64 for float64 input). An empty row (no
    visible key) has entropy 0, argmax -1, max_score -inf, normalized_entropy NaN and lse -inf, or the sink's logit. A
    row that is NaN has NaN everywhere, and argmax -1.

    Attributes
    ----------
    lse
        Natural log of the softmax denominator, in nats: after scale, softcap, bias, mask and sinks.
    visible
        Number of visible keys.
    entropy
        -sum a ln a in nats, over the keys (renormalised where there are sinks).
    normalized_entropy
        entropy / ln(visible), from 0 to 1; NaN where fewer than two keys are visible.
    max_weight
        The largest weight, e^(max_score - lse).
    argmax
        Column of the largest weight; the lowest wins ties.
    max_score
        The largest score, as it enters the softmax.
    sum_squares
        sum a^2. Its inverse is an effective number of keys; exp(entropy) is another.
    jacobian_trace
        sum a (1 - a), the trace of d a / d s: near 0 the row is saturated and gradients vanish.
    score_variance
        Variance of the scores under the weights (renormalised); minus dH/d(beta) at beta = 1, where beta scales the
        scores.
    missing_mass
        The sink's weight, e^(sink - lse): by how much the weights fall short of one.
    first_key_mass
        Weight on key column 0.
    conventions
        How the scores were made.

    Examples
    --------
    >>> import numpy as np
    >>> import softlookup as sl
    >>> q = np.array([[2, 1]], np.float32)
    >>> k = np.array([[1, 0], [0, 2], [2, 2], [-1, 1]], np.float32)
    >>> _, stats = sl.attention(q, k, k, stats=True)
    >>> stats.argmax, stats.max_weight.round(5), stats.entropy.round(4)
    (array([2]), array([0.88865], dtype=float32), array([0.4463], dtype=float32))
    """

    lse: NDArray[np.float64]
    visible: NDArray[np.int64]
    entropy: Numbers
    normalized_entropy: Numbers
    max_weight: Numbers
    argmax: NDArray[np.int64]
    max_score: Numbers
    sum_squares: Numbers
    jacobian_trace: Numbers
    score_variance: Numbers
    missing_mass: Numbers
    first_key_mass: Numbers
    conventions: Conventions
    _distance: Numbers | None = field(default=None)

    @property
    def distance(self) -> Numbers:
        """Mean of i - j, query position minus key position, under the weights (renormalised where there are sinks).

        Raises
        ------
        ValueError
            If positions are ambiguous: N != M or k_start != 0, and q_start was not given.
        """
        if self._distance is None:
            raise ValueError(
                "softlookup.Stats.distance: found no q_start, with N != M or k_start != 0; expected the position of "
                'query row 0; fix: pass q_start="upper_left" or "lower_right", or an int or int array, to the call'
            )
        return self._distance

    def __repr__(self) -> str:
        return f"Stats(shape={self.lse.shape}, conventions={self.conventions!r})"


def from_moments(
    moments: NDArray[np.float64],
    *,
    sinks: NDArray[np.float64] | None,
    q_start: Starts,
    k_start: int,
    placed: bool,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    conventions: Conventions,
) -> Stats:
    """Statistics from the core's moments, float64 [B, Hq, N, 9].

    These are m, sum p, sum t p, sum t^2 p, sum p^2, sum j p, argmax, visible and the score of column 0, where t = s -
    m and p = e^t over the visible keys, without the sink. sinks is float64 [Hq]; q_start an int or int64 [B]. `placed`
    tells whether positions are known, and with them `distance`. shape is that of the rows, [..., Hq, N] or [N]; dtype
    the type of all statistics but lse and the counts.
    """
    numbers = np.empty((len(NUMBERS), *shape), dtype)
    lse = np.empty(shape)
    counts = np.empty((2, *shape), np.int64)
    _core.statistics(
        moments, sinks, q_start, k_start, numbers, FLOAT64 if dtype == np.float64 else FLOAT32, lse, counts
    )
    fields = dict(zip(NUMBERS, numbers, strict=True))
    distance = fields.pop("distance")
    return Stats(
        lse=lse,
        visible=counts[0],
        argmax=counts[1],
        conventions=conventions,
        _distance=distance if placed else None,
        **fields,
    )
