"""Running one backward pass on the library and on the oracle, and comparing the two.

Tolerances are derived from those of the forward pass in cases.py. With a the weights, r their relative tolerance, u the
unit roundoff of the sums, P_ij = sum_c |dout_ic v_jc|, A_i = sum_j a_ij P_ij and b = 2^-8 where the forward pass rounds
weights to bfloat16 (its output then strays from that of the exact weights, and delta with it), the families are

    slope    S_ij = a_ij (P_ij + A_i + |dlse_i|) bounds a slope; it strays by (2 r + b + 12 u + 2 u |ln a_ij|) S_ij: the
             weight moves by r, delta by r A_i, and the products of dout and v are chains as scores are.
    cap      the softcap's slope 1 - tanh^2 strays by 10 u and by what the score's own rounding moves it.
    sum      a gradient is a sum of slopes times q, k or dout: each term's own tolerance, 4 u of its size, then one
             rounding to the stored type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import softlookup as sl
from agreement import assert_within, expect, on, plain_mask, type_name_of
from cases import SMALLEST, UNIT_ROUNDOFF, Tolerances, rounds_weights
from expressions import Written
from softlookup import reference
from softlookup.reference import ReferenceGradients
from softlookup.reference._attention import _align
from softlookup.reference._gradients import _sum_to

NAMES = ("q", "k", "v", "bias", "sinks")


@dataclass(frozen=True)
class Cotangents:
    """Slopes of a loss in the output and in lse."""

    dout: np.ndarray
    dlse: np.ndarray | None


def cotangents(shape: tuple[int, ...], dtype: Any, seed: int = 0, dlse: bool = True) -> Cotangents:
    """Standard normal slopes for an output of a shape."""
    rng = np.random.default_rng((seed, 77))
    return Cotangents(rng.standard_normal(shape).astype(dtype), rng.standard_normal(shape[:-1]) if dlse else None)


def asked_of(options: dict[str, Any]) -> tuple[str, ...]:
    """Every gradient that a call with these options has."""
    return ("q", "k", "v", *(name for name in ("bias", "sinks") if options.get(name) is not None))


def compare_gradients(
    q: Any,
    k: Any,
    v: Any,
    *,
    isa: str,
    written: Written | None = None,
    given: Cotangents | None = None,
    dlse: bool = True,
    **options: Any,
) -> sl.Grads:
    """Run both on one call, check every gradient, and return the library's."""
    library = {**options, **({} if written is None else {"mask": written.library})}
    with on(isa):
        out, pullback = sl.attention_vjp(q, k, v, **library)
        given = cotangents(out.shape, out.dtype, dlse=dlse) if given is None else given
        found = pullback(given.dout, given.dlse, wrt=asked_of(options))
    oracle = {key: value for key, value in options.items() if key not in ("threads", "out_dtype")}
    expected, tolerance = expect_gradients(q, k, v, given, isa, written=written, **oracle)
    for name in NAMES:
        gradient, target = getattr(found, name), {"q": q, "k": k, "v": v, **options}.get(name)
        if target is None:
            assert gradient is None, name
            continue
        assert gradient.dtype == target.dtype, name
        wanted = getattr(expected, name)
        assert gradient.shape == target.shape == wanted.shape, name
        stored = type_name_of(gradient)
        allowed = getattr(tolerance, name) + UNIT_ROUNDOFF[stored] * np.abs(wanted) + SMALLEST[stored]
        assert_within(gradient.astype(np.float64), wanted, allowed, name)
    return found


def expect_gradients(
    q: Any, k: Any, v: Any, given: Cotangents, isa: str, *, written: Written | None = None, **options: Any
) -> tuple[ReferenceGradients, ReferenceGradients]:
    """The oracle's gradients, and the tolerance of each before it is stored."""
    options = {**options, "mask": plain_mask(q, k, v, written, options)}
    _, stats, tolerance = expect(q, k, v, **options)
    expected = reference.gradients(q, k, v, given.dout, given.dlse, **options)
    return expected, _tolerances((q, k, v), given, isa, stats, tolerance, options)


def _tolerances(
    arrays: tuple[Any, ...],
    given: Cotangents,
    isa: str,
    stats: reference.ReferenceStats,
    tolerance: Tolerances,
    options: dict[str, Any],
) -> ReferenceGradients:
    """The families above, summed as the gradients are."""
    headed = [x[None] if x.ndim == 2 else x for x in arrays]
    shapes = [x.shape for x in headed]
    q, k, v = _align(*(_sizes(x) for x in headed))
    u, rows = tolerance.unit, q.shape[:-1]
    dout = np.broadcast_to(_sizes(given.dout), (*rows, v.shape[-1]))
    dlse = np.zeros(rows) if given.dlse is None else _sizes(given.dlse).reshape(rows)
    a = np.nan_to_num(stats.weights).reshape(*rows, k.shape[-2])
    products = dout @ v.swapaxes(-1, -2)
    mean = (a * products).sum(axis=-1) + dlse
    slopes = a * (products + mean[..., None]) + 2.0**-100
    rounding = UNIT_ROUNDOFF["bfloat16"] if rounds_weights(type_name_of(arrays[2]), isa) else 0.0
    relative = 2 * tolerance.weight[..., None] + 12 * u - 2 * u * np.log(np.where(a > 0, a, 1.0))
    slope_error = (relative + rounding) * slopes
    factor, steepness, cap_error = _cap(q, k, u, options)
    product_error = slope_error * steepness + slopes * (cap_error + 4 * u * steepness)
    shares = np.nan_to_num(stats.missing_mass) * (2 * tolerance.weight + 12 * u + rounding) * mean
    bias, sinks = options.get("bias"), options.get("sinks")
    return ReferenceGradients(
        q=_sum_to(factor * (product_error @ k), shapes[0]).reshape(arrays[0].shape),
        k=_sum_to(factor * (product_error.swapaxes(-1, -2) @ q), shapes[1]).reshape(arrays[1].shape),
        v=_sum_to(((relative + 4 * u) * (a + 2.0**-100)).swapaxes(-1, -2) @ dout, shapes[2]).reshape(arrays[2].shape),
        bias=None if bias is None else _sum_to(slope_error + 4 * u * slopes, bias.shape),
        sinks=None if sinks is None else _sum_to(shares[..., None], (*sinks.shape, 1, 1)).reshape(sinks.shape),
    )


def _cap(q: np.ndarray, k: np.ndarray, u: float, options: dict[str, Any]) -> tuple[float, Any, Any]:
    """|scale|, the softcap's slope at each score, and the error of that slope."""
    scale, softcap = options.get("scale"), options.get("softcap")
    factor = 1 / np.sqrt(q.shape[-1]) if scale is None else abs(scale)
    if softcap is None:
        return factor, 1.0, 0.0
    # The largest slope that a score of this size may have is at 0: |q| . |k| says nothing about the score itself.
    return factor, 1.0, 10 * u + 8 * u * factor * (q @ k.swapaxes(-1, -2)) / softcap


def _sizes(array: np.ndarray) -> np.ndarray:
    """Absolute values, 0 where there is no number: what is hidden, or makes the expected value no number either."""
    return np.nan_to_num(np.abs(array.astype(np.float64)), nan=0.0, posinf=0.0)
