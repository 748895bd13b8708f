"""Gradients for NumPy: a forward pass that keeps what its pullback needs, and the pullback."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from softlookup._array_checks import as_type
from softlookup._attention import Start, current_isa, statistics_of
from softlookup._backward import Lookup, backward, forward, rounded, rows_of, zeros_as
from softlookup._checks import as_threads, lookup_of
from softlookup._gradient_checks import as_lse_slope, as_wrt, check_output_slope
from softlookup._mask_algebra import Booleans, Mask
from softlookup._problems import Problems
from softlookup._stats import Stats
from softlookup._threads import get_threads
from softlookup._types import dtype_of, statistics_dtype, sum_code

Array = NDArray[Any]
Doubles = NDArray[np.float64]


@dataclass(frozen=True, eq=False, repr=False)
class Grads:
    """Gradients of a loss in the inputs of a lookup; None where not asked for.

    Attributes
    ----------
    q, k, v, bias, sinks
        Each of the shape and type of what it belongs to. What is hidden, an empty row, a bias of -inf and a sink of
        -inf have gradient 0.

    Examples
    --------
    >>> import numpy as np
    >>> import softlookup as sl
    >>> x = np.ones((3, 4), np.float32)
    >>> out, pullback = sl.attention_vjp(x, x, x)
    >>> pullback(np.ones_like(out), wrt=("v",))
    Grads(v=float32 [3, 4])
    """

    q: Array | None = None
    k: Array | None = None
    v: Array | None = None
    bias: Array | None = None
    sinks: Array | None = None

    def __repr__(self) -> str:
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        shown = (f"{name}={array.dtype} {list(array.shape)}" for name, array in held.items() if array is not None)
        return f"Grads({', '.join(shown)})"


class Pullback:
    """What turns the slope of a loss in the output into gradients; made by `attention_vjp`.

    It may be called any number of times. It reads the arrays of the forward call again, so these must not change
    before its last call.
    """

    __slots__ = ("_lookup", "_moments", "_out_code", "_threads", "_wide")

    def __init__(self, lookup: Lookup, out_code: int, wide: Array, moments: Doubles, threads: int | None) -> None:
        self._lookup = lookup
        self._out_code = out_code
        self._wide = wide
        self._moments = moments
        self._threads = threads

    @property
    def stats(self) -> Stats:
        """Statistics of the forward pass, as `attention` gives them with stats=True."""
        lookup = self._lookup
        return statistics_of(self._moments, lookup.scoring, lookup.sizes, lookup.code, lookup.isa)

    def __call__(
        self,
        dout: Array,
        dlse: Array | None = None,
        wrt: tuple[str, ...] = ("q", "k", "v"),
    ) -> Grads:
        """Gradients of a loss, from its slopes in what the forward pass gave.

        Parameters
        ----------
        dout
            Slope of the loss in the output: of its shape, and of its type or float32 (float64 for float64 input).
        dlse
            Slope of the loss in `stats.lse`, [..., Hq, N] ([N] for a single head); None is 0.
        wrt
            Which gradients to make, out of "q", "k", "v", "bias" and "sinks".

        Returns
        -------
        Grads

        Raises
        ------
        TypeError, ValueError
            If an argument is wrong, before anything is computed: one error lists all reasons, each with its fix.

        References
        ----------
        Dao et al., "FlashAttention" (2022), appendix B.4, with the slope of lse and of the sinks added.

        Examples
        --------
        >>> import numpy as np
        >>> import softlookup as sl
        >>> q, k, v = np.array([[2.0]]), np.array([[0.0], [1.0]]), np.array([[0.0], [1.0]])
        >>> out, pullback = sl.attention_vjp(q, k, v)
        >>> grads = pullback(np.ones_like(out))
        >>> grads.q.round(4), grads.v.ravel().round(4)  # a (1 - a); 1 - a and a
        (array([[0.105]]), array([0.1192, 0.8808]))
        """
        lookup, problems = self._lookup, Problems("pullback")
        sizes = lookup.sizes
        check_output_slope(problems, dout, sizes, (self._out_code, sum_code(lookup.code)))
        lse_slope = as_lse_slope(problems, dlse, sizes)
        absent = tuple(name for name in ("bias", "sinks") if getattr(lookup, name) is None)
        names = as_wrt(problems, wrt, absent)
        problems.raise_any()
        rows = rows_of(self._moments, lookup.scoring.sinks)
        targets = {name: zeros_as(getattr(lookup, name)) for name in names}
        workers = get_threads() if self._threads is None else self._threads
        backward(lookup, self._wide, rows, dout, lse_slope, targets, workers)
        return Grads(**targets)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(getattr(self._lookup, name).shape)}" for name in "qkv")
        return f"<softlookup.Pullback of {shapes}>"


def attention_vjp(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Mask | Booleans | None = None,
    bias: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    q_start: Start | None = None,
    k_start: int = 0,
    out_dtype: DTypeLike | None = None,
    threads: int | None = None,
) -> tuple[Array, Pullback]:
    """`attention`, and the function that turns a slope in its output into gradients.

    Like `jax.vjp`: what the backward pass needs is held by the pullback, so nothing can be forgotten or given twice.
    Memory is O(N), and gradients have the same bits whatever the threads.

    Parameters
    ----------
    q, k, v, mask, bias, scale, softcap, sinks, q_start, k_start, out_dtype, threads
        As in `attention`. The arrays must not change before the last call of the pullback.

    Returns
    -------
    (numpy.ndarray, Pullback)
        The output, with the bits that `attention` gives it, read-only as the pullback needs it; and
        `pullback(dout, dlse=None, wrt=("q", "k", "v"))`, which gives `Grads`. `pullback.stats` are the statistics.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, before anything is computed: one error lists all reasons, each with its fix.

    References
    ----------
    Dao et al., "FlashAttention: fast and memory-efficient exact attention with IO-awareness" (2022), algorithm 4.

    Examples
    --------
    >>> import numpy as np
    >>> import softlookup as sl
    >>> x = np.random.default_rng(0).standard_normal((4, 8, 16), np.float32)
    >>> out, pullback = sl.attention_vjp(x, x[:2], x[:2], mask=sl.Causal(), sinks=np.zeros(4, np.float32))
    >>> grads = pullback(np.ones_like(out), wrt=("q", "k", "sinks"))
    >>> grads.q.shape, grads.k.shape, grads.v, grads.sinks.shape
    ((4, 8, 16), (2, 8, 16), None, (4,))
    """
    problems = Problems("attention_vjp")
    code, sizes, scoring = lookup_of(problems, q, k, v, mask, bias, scale, softcap, sinks, q_start, k_start)
    out_code = code if out_dtype is None else as_type(problems, out_dtype)
    workers = None if threads is None else as_threads(problems, threads)
    problems.raise_any()
    assert sizes is not None
    assert code is not None
    assert out_code is not None
    lookup = Lookup(q, k, v, bias, sinks, code, sizes, scoring, current_isa())
    wide = np.empty(sizes.out, statistics_dtype(code))
    moments = forward(lookup, wide, get_threads() if workers is None else workers)
    out = rounded(wide, dtype_of(out_code))
    out.setflags(write=False)
    return out, Pullback(lookup, out_code, wide, moments, workers)
