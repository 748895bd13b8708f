"""The table of cases: types, shapes, masks, options and tolerances, for every test file and the bench.

Tolerances are derived, not tuned. With u the unit roundoff of the accumulating type (float32; float64
for float64) the families are

    score    delta = 4 u |scale| sum |q_c k_c|, doubled under a softcap, + u |bias|: a chain of d fused
             multiply-adds of random sign strays by about u sqrt(d) times its partial sums.
    weight   r = 2 delta + (16 + 2 ln M) u, relative: the numerator and the denominator each move by
             delta; exp of t costs u |t|, whose mean is at most ln M; the rest is exp itself and the sums.
    value    r max|v|, then one rounding to the stored type, and for bfloat16 on an instruction set with
             a bfloat16 dot product the weights' own rounding, 2^-8 max|v|.
    moment   the derivative of the statistic times delta, plus the rounding of the sums it is made from;
             each is written beside its name below.

The oracle upcasts the rounded inputs, so these errors are all there is. float64 doubles them: there the
oracle errs as much as the library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import expressions as ex
import softlookup as sl
from softlookup.reference import ReferenceStats

TYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
ISAS: list[str] = list(sl.info()["isas"])

UNIT_ROUNDOFF = {"float32": 2.0**-24, "float64": 2.0**-53, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST = {"float32": 2.0**-126, "float64": 2.0**-1022, "float16": 2.0**-25, "bfloat16": 2.0**-126}
ABSORBING = 1e20  # a bias beyond it leaves no bit of the score, in float64 either


@dataclass(frozen=True)
class Shape:
    """Sizes of one call: q [*leading, heads, queries, key_width], k, v [*leading, key_heads, keys, ...]."""

    queries: int
    keys: int
    heads: int = 1
    key_heads: int = 1
    key_width: int = 16
    value_width: int = 16
    leading: tuple[int, ...] = ()

    @property
    def weights(self) -> tuple[int, ...]:
        """[*leading, heads, queries, keys]."""
        return (*self.leading, self.heads, self.queries, self.keys)


SHAPES = {
    "one_pair": Shape(1, 1, key_width=1, value_width=1),
    "narrow": Shape(5, 7, key_width=3, value_width=1, leading=(2,)),
    "square": Shape(24, 24, heads=2, key_heads=2, key_width=8, value_width=8, leading=(2,)),
    "groups": Shape(9, 9, heads=6, key_heads=2, leading=(2, 2)),
    "one_key_head": Shape(33, 33, heads=9, key_heads=1, key_width=64, value_width=64),
    "tile_edge": Shape(130, 129, heads=2, key_heads=1, key_width=80, value_width=96),
    "block_edge": Shape(7, 513, heads=3, key_heads=3, key_width=64, value_width=80),
    "three_blocks": Shape(40, 1100, heads=2, key_heads=1, key_width=16, value_width=3),
    "decode": Shape(1, 1100, heads=9, key_heads=3, key_width=64, value_width=64, leading=(2,)),
    "latent": Shape(3, 70, heads=4, key_heads=1, key_width=576, value_width=512),
    "wide_values": Shape(4, 6, key_width=1, value_width=192),
}


def _per_item(shape: Shape, spread: int) -> np.ndarray:
    """An integer for every batch item, from 0 up to spread, as an array over the leading axes."""
    items = np.prod(shape.leading, dtype=int)
    return (np.arange(items) * 7 % (spread + 1)).reshape(shape.leading or (1,))


def _sparse(shape: Shape) -> np.ndarray:
    return np.random.default_rng(41).random(shape.weights) < 0.3


MASKS: dict[str, Callable[[Shape], ex.Written | None]] = {
    "none": lambda shape: None,
    "full": lambda shape: ex.full(),
    "causal": lambda shape: ex.causal(),
    "window": lambda shape: ex.window(3, 0),
    "band": lambda shape: ex.window(2, 5),
    "future": lambda shape: ~ex.causal(),
    "lengths": lambda shape: ex.lengths(_per_item(shape, shape.keys)),
    "left_padding": lambda shape: (
        ex.lengths(_per_item(shape, shape.keys), _per_item(shape, shape.queries), "left") & ex.causal()
    ),
    "dense": lambda shape: ex.dense(_sparse(shape)),
    "dense_keys": lambda shape: ex.dense(_sparse(shape)[..., :1, :]),
    "predicate": lambda shape: ex.predicate("speckled"),
    "hidden": lambda shape: ~ex.full(),
    "composed": lambda shape: (ex.causal() & ~ex.window(4, 0)) | ex.window(0, 0),
}

OPTIONS: dict[str, Callable[[Shape, np.random.Generator], dict[str, Any]]] = {
    "plain": lambda shape, rng: {},
    "negative_scale": lambda shape, rng: {"scale": -0.3},
    "zero_scale": lambda shape, rng: {"scale": 0.0},
    "softcap": lambda shape, rng: {"softcap": 1.5},
    "sinks": lambda shape, rng: {"sinks": sinks(shape, rng)},
    "bias": lambda shape, rng: {"bias": bias(shape.weights[-2:], rng)},
    "everything": lambda shape, rng: {
        "scale": 0.2,
        "softcap": 4.0,
        "sinks": sinks(shape, rng),
        "bias": bias(shape.weights, rng),
    },
}


def sinks(shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """One float32 logit per head [heads]; where there are several, one is no sink."""
    logits = rng.standard_normal(shape.heads).astype(np.float32)
    logits[1:2] = -np.inf
    return logits


def bias(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """A float32 bias with a few exact -inf, which hide, and a few finfo.min, which do not."""
    values = rng.standard_normal(shape).astype(np.float32)
    values[rng.random(shape) < 0.1] = -np.inf
    values[rng.random(shape) < 0.1] = np.finfo(np.float32).min
    return values


def arrays(shape: Shape, type_name: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Standard normal q, k and v of a shape, rounded to a type."""
    rng = np.random.default_rng(seed)
    keys = (*shape.leading, shape.key_heads, shape.keys)
    sizes = [(*shape.weights[:-1], shape.key_width), (*keys, shape.key_width), (*keys, shape.value_width)]
    q, k, v = (rng.standard_normal(size).astype(TYPES[type_name]) for size in sizes)
    return q, k, v


def rounds_weights(type_name: str, isa: str) -> bool:
    """Whether the weights meet a bfloat16 dot product, and are rounded for it."""
    return type_name == "bfloat16" and isa.endswith(("bf16", "amx"))


@dataclass(frozen=True)
class Tolerances:
    """Absolute tolerance of each row [..., Hq, N] for a quantity, in the families named above."""

    score: np.ndarray
    weight: np.ndarray
    log_keys: float
    unit: float
    stats: ReferenceStats
    keys: int

    def out(self, expected: np.ndarray, largest_value: float, stored: str, rounded_weights: bool) -> np.ndarray:
        """[..., Hq, N, d_v]."""
        weights = self.weight + (UNIT_ROUNDOFF["bfloat16"] if rounded_weights else 0.0)
        return weights[..., None] * largest_value + UNIT_ROUNDOFF[stored] * np.abs(expected) + SMALLEST[stored]

    def relative(self, weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Tolerance of weights, each from its own size and its row's r; none is known below 2^-100."""
        exponents = np.abs(np.log(weights, where=weights > 0, out=np.zeros(weights.shape)))
        return weights * (rows + 2 * self.unit * exponents) + 2.0**-100

    def statistic(self, name: str) -> np.ndarray:
        """Tolerance of one field of the statistics."""
        stats, value = self.stats, getattr(self.stats, name)
        value = np.where(np.isfinite(value), value, 0.0)
        return self._moment(name, stats, value) + self.unit * np.abs(value)

    def _moment(self, name: str, stats: ReferenceStats, value: np.ndarray) -> np.ndarray:
        """What the arithmetic may add before the number is stored."""
        variance = np.nan_to_num(stats.score_variance)
        if name in ("lse", "max_score"):
            return self.score + (8 + 2 * self.log_keys) * self.unit
        if name in ("entropy", "normalized_entropy"):
            # dH = sum p (ln p + H) ds; then ln l + E|t|, each at most ln M; ln(visible) is at least ln 2.
            entropy = 2 * self.score * (1 + np.sqrt(variance)) + (16 + 8 * self.log_keys) * self.unit
            return entropy if name == "entropy" else entropy / np.log(np.maximum(stats.visible, 2))
        if name == "score_variance":
            # 2 sum p (s - mean) ds, and the weights' own change; E t^2 - (E t)^2 cancels.
            moved = 4 * self.score * (np.sqrt(variance) + variance) + self.score**2
            return moved + (16 + 2 * self.log_keys) * self.unit * self._mean_square()
        if name == "distance":
            # Columns are summed by their place in a 128-key tile, wherever in it the keys begin.
            return self.weight * max(self.keys, 128)
        if name == "jacobian_trace":
            return 3 * self.weight
        return self.relative(value, self.weight * (2 if name == "sum_squares" else 1))

    def _mean_square(self) -> np.ndarray:
        """E t^2 with t = s - max, under the weights of the keys alone [..., Hq, N]."""
        shifted = below_the_largest(self.stats)
        masses = np.exp(shifted)
        squares = np.where(masses > 0, shifted, 0.0) ** 2
        return (masses * squares).sum(axis=-1) / np.maximum(masses.sum(axis=-1), 1.0)


def below_the_largest(stats: ReferenceStats) -> np.ndarray:
    """t = s - max of every key, -inf where it is hidden or is no number [..., Hq, N, M]."""
    top = np.where(np.isfinite(stats.max_score), stats.max_score, 0.0)[..., None]
    return np.where(np.isfinite(stats.scores), stats.scores, -np.inf) - top


def tolerances(type_name: str, stats: ReferenceStats, magnitudes: np.ndarray) -> Tolerances:
    """Tolerances of every row; magnitudes [..., Hq, N, M] are those of `score_magnitudes`."""
    unit = UNIT_ROUNDOFF["float64"] * 2 if type_name == "float64" else UNIT_ROUNDOFF["float32"]
    counts = (below_the_largest(stats) > -70) & np.isfinite(magnitudes)
    score = unit * np.where(counts, magnitudes, 0.0).max(axis=-1, initial=0.0)
    log_keys = float(np.log(max(stats.weights.shape[-1], 1)))
    weight = 2 * score + (16 + 2 * log_keys) * unit
    return Tolerances(score, weight, log_keys, unit, stats, stats.weights.shape[-1])


def score_magnitudes(q: Any, k: Any, scale: float | None, softcap: float | None, bias: Any) -> np.ndarray:
    """What a score's rounding errors are proportional to, in units of u: [..., Hq, N, M]."""
    queries, keys = (np.abs(np.asarray(x).astype(np.float64)) for x in (q, k))
    if queries.ndim > 2:
        keys = np.repeat(keys, queries.shape[-3] // max(keys.shape[-3], 1), axis=-3)
    factor = 1 / np.sqrt(queries.shape[-1]) if scale is None else abs(scale)
    magnitudes = 4 * factor * (queries @ keys.swapaxes(-1, -2)) * (1 if softcap is None else 2)
    if bias is not None:
        sizes = np.abs(np.asarray(bias).astype(np.float64))
        magnitudes = magnitudes + np.where(sizes < ABSORBING, sizes, 0.0)
    return magnitudes
