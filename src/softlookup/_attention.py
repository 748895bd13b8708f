"""Attention, and the exact weights of chosen rows: check, plan, run.

All checks of a call come first and report together; only then is anything allocated or computed. The core reads every
array in place, whatever its strides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from softlookup import _core
from softlookup._array_checks import Shapes, as_type, check_out, core_inputs
from softlookup._checks import as_threads, chosen, flag, lookup_of
from softlookup._mask_algebra import Booleans, Mask
from softlookup._problems import Problems
from softlookup._scoring import Scoring
from softlookup._stats import Conventions, Stats, from_moments
from softlookup._threads import get_threads
from softlookup._types import NAMES, core_view, dtype_of, statistics_dtype

Array = NDArray[Any]
Start = int | NDArray[np.int64] | Literal["upper_left", "lower_right"]

_isa: ContextVar[str | None] = ContextVar("softlookup_isa", default=None)


@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Mask | Booleans | None = ...,
    bias: Array | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Array | None = ...,
    q_start: Start | None = ...,
    k_start: int = ...,
    out: Array | None = ...,
    out_dtype: DTypeLike | None = ...,
    stats: Literal[False] = ...,
    threads: int | None = ...,
) -> Array: ...
@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Mask | Booleans | None = ...,
    bias: Array | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Array | None = ...,
    q_start: Start | None = ...,
    k_start: int = ...,
    out: Array | None = ...,
    out_dtype: DTypeLike | None = ...,
    stats: Literal[True],
    threads: int | None = ...,
) -> tuple[Array, Stats]: ...
@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Mask | Booleans | None = ...,
    bias: Array | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Array | None = ...,
    q_start: Start | None = ...,
    k_start: int = ...,
    out: Array | None = ...,
    out_dtype: DTypeLike | None = ...,
    stats: bool,
    threads: int | None = ...,
) -> Array | tuple[Array, Stats]: ...
def attention(
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
    out: Array | None = None,
    out_dtype: DTypeLike | None = None,
    stats: bool = False,
    threads: int | None = None,
) -> Array | tuple[Array, Stats]:
    """Exact softmax attention: ``softmax(scale * q k^T + bias, over the visible keys) v``.

    A score is ``s = scale * (q . k)``, then ``softcap * tanh(s / softcap)``, then ``+ bias``, then the mask, then
    softmax. The N x M scores are never stored. A row without a visible key is 0. NaN and inf in what is visible
    spread; what is hidden never shows. A row's bits do not depend on threads, batch, N, M, strides or how the mask is
    written.

    Parameters
    ----------
    q
        Queries [..., Hq, N, d_k]; [N, d_k] is one head. float32, float64, float16 or bfloat16 (ml_dtypes).
    k
        Keys [..., Hk, M, d_k], of the same type. Hq is a multiple of Hk: query head h reads key head h // (Hq / Hk).
    v
        Values [..., Hk, M, d_v], of the same type. Leading axes of q, k and v broadcast. Any strides are read in place.
    mask
        Which keys a query may attend to: `Full`, `Causal`, `Window`, `Lengths`, `Dense`, `Predicate`, joined by & |
        ~, or a bool array [N, M] or with as many axes as q (True = may attend).
    bias
        Added to the scores: [N, M] or with as many axes as q, broadcast to [..., Hq, N, M]; float32 or the type of q.
        -inf hides a key.
    scale
        Any finite number; None is 1/sqrt(d_k).
    softcap
        Positive; None is none.
    sinks
        [Hq]: one logit a head, added to the softmax denominator only.
    q_start
        Position of query row 0: an int, int64 over the batch axes, "upper_left" (k_start) or "lower_right"
        (k_start + M - N). May be left out where N = M and k_start = 0, or where no mask uses positions.
    k_start
        Position of key column 0.
    out
        Array [..., Hq, N, d_v] for the result; it shares no memory with the inputs. Untouched where the call raises.
    out_dtype
        Type of the result; None is the type of q.
    stats
        Whether to return `Stats` too, made in the same pass.
    threads
        Number of threads of this call; None is `get_threads()`.

    Returns
    -------
    numpy.ndarray or (numpy.ndarray, Stats)
        The output [..., Hq, N, d_v] ([N, d_v] where q, k and v have 2 axes), and the statistics if asked for.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, before anything is computed: one error lists all reasons, each with its fix.

    References
    ----------
    Vaswani et al., "Attention is all you need" (2017), equation 1; Milakov and Gimelshein, "Online normalizer
    calculation for softmax" (2018), algorithm 3, for the one pass over the keys.

    Examples
    --------
    >>> import numpy as np
    >>> import softlookup as sl
    >>> q = np.array([[2, 1]], np.float32)
    >>> k = np.array([[1, 0], [0, 2], [2, 2], [-1, 1]], np.float32)
    >>> v = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]], np.float32)
    >>> sl.attention(q, k, v).round(5)
    array([[0.05882, 0.05882, 0.89495]], dtype=float32)
    """
    problems = Problems("attention")
    code, sizes, scoring = lookup_of(problems, q, k, v, mask, bias, scale, softcap, sinks, q_start, k_start)
    out_code = code if out_dtype is None else as_type(problems, out_dtype)
    if out is not None:
        check_out(problems, out, out_code, sizes, (q, k, v, bias, sinks, mask))
    flag(problems, "stats", stats)
    workers = get_threads() if threads is None else as_threads(problems, threads)
    problems.raise_any()
    assert sizes is not None
    assert code is not None
    assert out_code is not None
    # What the user asked to fill is not left half written by a function of theirs that raises.
    result = np.empty(sizes.out, dtype_of(out_code)) if out is None or scoring.may_fail else out
    moments = np.empty((*sizes.rows, _core.MOMENTS)) if stats else None
    attend(code, scoring, (q, k, v), result, out_code, moments, workers)
    if out is not None and out is not result:
        out[...] = result
        result = out
    if moments is None:
        return result
    return result, statistics_of(moments, scoring, sizes, code, current_isa())


def attend(
    code: int,
    scoring: Scoring,
    arrays: tuple[Array, Array, Array],
    out: Array,
    out_code: int,
    moments: NDArray[np.float64] | None,
    threads: int,
) -> None:
    """Fill the output, and the moments of its rows if they are asked for, from q, k and v."""
    q, k, v = core_inputs(code, *arrays)
    _core.attend(q, k, v, core_view(out, out_code), code, out_code, scoring, moments, threads, _isa.get())


def statistics_of(moments: NDArray[np.float64], scoring: Scoring, sizes: Shapes, code: int, isa: str) -> Stats:
    """The statistics of a call that gathered moments, with its conventions."""
    start = scoring.q_start
    first_start = start if isinstance(start, int) else int(start[0]) if start.size == 1 else tuple(start.tolist())
    conventions = Conventions(
        scale=scoring.scale,
        softcap=scoring.softcap or None,
        bias=scoring.bias is not None,
        sinks=scoring.sinks is not None,
        mask=repr(scoring.mask),
        q_start=first_start if scoring.placed else None,
        k_start=scoring.k_start,
        dtype=NAMES[code],
        isa=isa,
    )
    return from_moments(
        moments,
        sinks=scoring.sinks,
        q_start=scoring.q_start,
        k_start=scoring.k_start,
        placed=scoring.placed,
        shape=sizes.out[:-1],
        dtype=statistics_dtype(code),
        conventions=conventions,
    )


def attention_weights(
    q: Array,
    k: Array,
    v: Array | None = None,
    *,
    rows: Sequence[int] | NDArray[np.int64] | None = None,
    heads: Sequence[int] | NDArray[np.int64] | None = None,
    mask: Mask | Booleans | None = None,
    bias: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    q_start: Start | None = None,
    k_start: int = 0,
    threads: int | None = None,
) -> Array:
    """The exact weights of chosen rows and heads, which `attention` never stores.

    The core makes the scores of the chosen rows, as it does in `attention`; their softmax is taken in float64.

    Parameters
    ----------
    q, k
        As in `attention`: [..., Hq, N, d_k] and [..., Hk, M, d_k].
    v
        Weights do not depend on it; it is checked if it is given, so that a call of `attention` can be asked as it
        stands.
    rows
        Local indices of queries, R ints, negative ones from the end as in NumPy; None is all.
    heads
        Indices of query heads, likewise; None is all. Where q and k have 2 axes there is one: None, [0] or [-1].
    mask, bias, scale, softcap, sinks, q_start, k_start, threads
        As in `attention`.

    Returns
    -------
    numpy.ndarray
        float32 (float64 for float64 input) [..., heads, R, M]; [R, M] where q and k have 2 axes. A row sums to one;
        to less where there are sinks; an empty row is 0.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, before anything is computed.

    References
    ----------
    Vaswani et al., "Attention is all you need" (2017), equation 1.

    Examples
    --------
    >>> import numpy as np
    >>> import softlookup as sl
    >>> q = np.array([[2, 1]], np.float32)
    >>> k = np.array([[1, 0], [0, 2], [2, 2], [-1, 1]], np.float32)
    >>> sl.attention_weights(q, k, rows=[-1]).round(5)
    array([[0.05252, 0.05252, 0.88865, 0.0063 ]], dtype=float32)
    """
    problems = Problems("attention_weights")
    v = k if v is None else v
    code, sizes, scoring = lookup_of(problems, q, k, v, mask, bias, scale, softcap, sinks, q_start, k_start)
    picked_rows = chosen(problems, "rows", rows, None if sizes is None else sizes.queries)
    picked_heads = chosen(problems, "heads", heads, None if sizes is None else sizes.heads)
    if sizes is not None and sizes.single and picked_heads.size != 1:
        found = f"{picked_heads.size} heads of arrays with 2 axes, which are one head"
        problems.value("heads", found, "one head, or None", "q[None] and k[None] have an axis of heads to choose from")
    workers = get_threads() if threads is None else as_threads(problems, threads)
    problems.raise_any()
    assert sizes is not None
    assert code is not None
    shape = (*sizes.leading, picked_heads.size, picked_rows.size, sizes.keys)
    weights = np.empty(shape, statistics_dtype(code))
    if weights.size:
        readers, keys, _ = core_inputs(code, q, k, v)
        group = sizes.heads // sizes.key_heads
        for place, head in enumerate(picked_heads.tolist()):
            made = np.empty((*sizes.leading, 1, picked_rows.size, sizes.keys), weights.dtype)
            weights[..., [place], :, :] = _softmax_of_head(
                _of_head(readers, head),
                _of_head(keys, head // group),
                made,
                code,
                _scoring_of_head(scoring, head),
                picked_rows,
                head,
                workers,
            )
    return weights[0] if sizes.single else weights


def _of_head(array: Array, head: int) -> Array:
    """One head of an array, as a view; all of it where all heads share it."""
    return array if array.ndim == 2 or array.shape[-3] == 1 else array[..., head : head + 1, :, :]


def _scoring_of_head(scoring: Scoring, head: int) -> Scoring:
    """The scoring of one head alone."""
    bias, program, sinks = scoring.bias, scoring.program, scoring.sinks
    return scoring._replace(
        bias=None if bias is None else _of_head(bias, head),
        program=program and [("dense", _of_head(step[1], head)) if step[0] == "dense" else step for step in program],
        sinks=None if sinks is None else sinks[head : head + 1],
    )


def _softmax_of_head(
    q: Array,
    k: Array,
    made: Array,
    code: int,
    scoring: Scoring,
    rows: NDArray[np.int64],
    head: int,
    threads: int,
) -> NDArray[np.float64]:
    """Softmax, in float64, of the scores of one head's chosen rows [..., 1, R, M], which `made` has room for."""
    _core.scores(q, k, made, code, scoring, rows, head, threads, _isa.get())
    scores = made.astype(np.float64)
    top = scores.max(axis=-1, keepdims=True)
    empty = top == -np.inf
    if empty.any():
        # A visible key may score -inf too. With a scale of 0 a visible product is 0 or NaN, so only hidden keys do.
        plain = scoring._replace(scale=0.0, softcap=0.0)
        _core.scores(q, k, made, code, plain, rows, head, threads, _isa.get())
        empty = (made == -np.inf).all(axis=-1, keepdims=True)
    sink = -np.inf if scoring.sinks is None else scoring.sinks[0]
    with np.errstate(invalid="ignore", over="ignore"):
        np.subtract(scores, top, out=scores)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True) + np.exp(sink - top)
    np.copyto(scores, 0.0, where=empty)
    return scores


def current_isa() -> str:
    """The instruction set that a call made here runs on."""
    return _isa.get() or _core.default_isa()


@contextmanager
def forced_isa(name: str) -> Iterator[None]:
    """Run the calls inside a with block on one instruction set of this CPU, for tests.

    Raises
    ------
    ValueError
        If this CPU or this build does not have it.
    """
    if name not in _core.isas():
        found = f"softlookup: found instruction set {name!r}; expected one of {', '.join(_core.isas())}"
        raise ValueError(f"{found}; fix: pick one of softlookup.info()['isas']")
    token = _isa.set(name)
    try:
        yield
    finally:
        _isa.reset(token)
