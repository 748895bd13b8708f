"""One lookup on tensors and its gradients: what the eager function and the operators of the graph have in common.

Their arguments are tensors, numbers and text: a mask comes as the words, numbers and arrays of `_mask_codec`, so that
what Window, Lengths and Dense hold are ordinary numbers and tensors, which vmap and torch.compile can follow.
Everything is checked here, by the checks that all faces share.

Forward gives four tensors: the output; lse [..., Hq, N]; the output in float32, of width 0 where the output itself is
in the type of the sums; the largest score of every row and its weight [..., Hq, N, 2]. The last two are only for the
way back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from softlookup._attention import attend, current_isa, statistics_of
from softlookup._backward import Lookup, Rows, backward, forward, rows_of
from softlookup._checks import as_threads, lookup_of
from softlookup._core import MOMENTS
from softlookup._mask_codec import decode, predicates_of
from softlookup._problems import Problems
from softlookup._stats import Stats
from softlookup._tensors import array_of, is_heads_last
from softlookup._types import statistics_dtype, sum_code

DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")
PLAIN = (
    "mask",
    "mask_numbers",
    "scale",
    "softcap",
    "q_start",
    "k_start",
    "threads",
)  # neither tensors nor lists of them

Made = tuple[Tensor, Tensor, Tensor, Tensor]


class Arguments(NamedTuple):
    """The arguments of a lookup, in order. Of q_start (one for all items) and q_starts at most one is given."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None
    mask: str
    mask_numbers: list[int]
    mask_arrays: list[Tensor]
    scale: float | None
    softcap: float | None
    q_start: int | None
    q_starts: Tensor | None
    k_start: int
    threads: int | None


class Slopes(NamedTuple):
    """What gradients need beside the arguments: slopes of the loss, what forward gave, and the names asked for.

    out is the output in the type of the sums; wrt is names separated by spaces.
    """

    dout: Tensor | None
    dlse: Tensor | None
    out: Tensor
    lse: Tensor
    tops: Tensor
    wrt: str


def compute(
    problems: Problems,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any = None,
    bias: Any = None,
    scale: object = None,
    softcap: object = None,
    sinks: Any = None,
    q_start: Any = None,
    k_start: object = 0,
    threads: object = None,
    *,
    stats: bool = False,
    heads_last: bool = False,
) -> tuple[Tensor, Stats | None]:
    """A lookup that nothing records or traces, straight on the core: the output, and statistics if asked for.

    Options are tensors, or what `softlookup.attention` takes. The output is [..., Hq, N, d_v]; heads_last: it is
    [..., N, Hq, d_v].
    """
    arrays = array_of(q), array_of(k), array_of(v)
    options = (_as_array(mask), _as_array(bias), scale, softcap, _as_array(sinks), _as_array(q_start), k_start)
    code, sizes, scoring = lookup_of(problems, *arrays, *options)
    workers = torch.get_num_threads() if threads is None else as_threads(problems, threads)
    problems.raise_any()
    assert sizes is not None
    assert code is not None
    out = q.new_empty(_heads_last(sizes.out) if heads_last else sizes.out)
    filled = array_of(out)
    moments = np.empty((*sizes.rows, MOMENTS)) if stats else None
    attend(code, scoring, arrays, filled.swapaxes(-3, -2) if heads_last else filled, code, moments, workers)
    return out, None if moments is None else statistics_of(moments, scoring, sizes, code, current_isa())


def _as_array(value: Any) -> Any:
    return array_of(value) if value is not None and isinstance(value, Tensor) else value


def empty_output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Room for the output [..., Hq, N, d_v]. Heads and rows lie in memory as in q, as PyTorch's own SDPA has it."""
    leading = q.shape[:-3]
    if not leading == k.shape[:-3] == v.shape[:-3]:
        leading = torch.broadcast_shapes(leading, k.shape[:-3], v.shape[:-3])
    shape = (*leading, *q.shape[-3:-1], v.shape[-1])
    return q.new_empty(_heads_last(shape)).transpose(-3, -2) if is_heads_last(q.stride()) else q.new_empty(shape)


def _heads_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    *leading, heads, rows, width = shape
    return (*leading, rows, heads, width)


def empty_rows(out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the three other tensors."""
    shape = out.shape[:-1]
    width = 0 if out.dtype in (torch.float32, torch.float64) else out.shape[-1]
    wide = out.new_empty((*shape, width), dtype=torch.float32)
    return out.new_empty(shape, dtype=torch.float64), wide, out.new_empty((*shape, 2), dtype=torch.float64)


def run_forward(arguments: Arguments) -> Made:
    """The four tensors, computed."""
    lookup, threads = _checked(arguments)
    out = empty_output(arguments.q, arguments.k, arguments.v)
    lse, wide, tops = empty_rows(out)
    result = array_of(out)
    if sum_code(lookup.code) == lookup.code:
        moments = forward(lookup, result, threads)
    else:
        sums = array_of(wide)
        moments = forward(lookup, sums, threads)
        with np.errstate(all="ignore"):
            result[...] = sums
    rows = rows_of(moments, lookup.scoring.sinks)
    lse.numpy()[...] = rows.lse.reshape(lse.shape)
    kept_rows = tops.numpy()
    kept_rows[..., 0], kept_rows[..., 1] = rows.top.reshape(lse.shape), rows.share.reshape(lse.shape)
    return out, lse, wide, tops


def run_backward(arguments: Arguments, slopes: Slopes) -> list[Tensor]:
    """The gradients that are asked for, in that order."""
    lookup, threads = _checked(arguments)
    shape, wide = lookup.sizes.rows, array_of(slopes.out)
    tops = array_of(slopes.tops)
    # The core reads numbers of rows one after another; under vmap, what all elements share has a stride of 0.
    rows = Rows(*(np.ascontiguousarray(x).reshape(shape) for x in (array_of(slopes.lse), tops[..., 0], tops[..., 1])))
    if slopes.dout is None:
        dout = np.broadcast_to(np.zeros((), statistics_dtype(lookup.code)), wide.shape)
    else:
        dout = array_of(slopes.dout)
    dlse = None if slopes.dlse is None else np.ascontiguousarray(array_of(slopes.dlse)).reshape(shape)
    gradients = {name: torch.zeros_like(getattr(arguments, name)) for name in slopes.wrt.split()}
    targets = {name: array_of(tensor) for name, tensor in gradients.items()}
    backward(lookup, wide, rows, dout, dlse, targets, threads)
    return list(gradients.values())


def _checked(arguments: Arguments) -> tuple[Lookup, int]:
    """The call as the core takes it, and its number of threads."""
    problems = Problems("torch.attention")
    q, k, v, bias, sinks, starts = (
        None if tensor is None else array_of(tensor) for tensor in (*arguments[:5], arguments.q_starts)
    )
    mask = decode(arguments.mask, arguments.mask_numbers, [array_of(array) for array in arguments.mask_arrays])
    q_start = arguments.q_start if starts is None else starts
    code, sizes, scoring = lookup_of(
        problems, q, k, v, mask, bias, arguments.scale, arguments.softcap, sinks, q_start, arguments.k_start
    )
    threads = torch.get_num_threads() if arguments.threads is None else as_threads(problems, arguments.threads)
    problems.raise_any()
    assert q is not None
    assert k is not None
    assert v is not None
    assert code is not None
    assert sizes is not None
    return Lookup(q, k, v, bias, sinks, code, sizes, scoring, current_isa()), threads


def keep(ctx: Any, inputs: tuple[Any, ...], output: Made) -> None:
    """Save for the way back what it needs: `setup_context` of autograd."""
    arguments, (out, lse, wide, tops) = Arguments(*inputs), output
    saved = out if out.dtype in (torch.float32, torch.float64) else wide
    ctx.save_for_backward(*arguments[:5], arguments.q_starts, saved, lse, tops, *arguments.mask_arrays)
    ctx.plain = {name: getattr(arguments, name) for name in PLAIN}
    if not torch.compiler.is_compiling():
        ctx.predicates = predicates_of(arguments.mask)  # held, as the words alone do not hold them
    ctx.mark_non_differentiable(wide, tops)
    ctx.set_materialize_grads(False)


def kept(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Arguments, Slopes]:
    """What was saved, with the slopes that came back; of the gradients those that autograd needs are asked for."""
    q, k, v, bias, sinks, q_starts, out, lse, tops, *mask_arrays = ctx.saved_tensors
    arguments = Arguments(q, k, v, bias, sinks, mask_arrays=mask_arrays, q_starts=q_starts, **ctx.plain)
    needed = zip(DIFFERENTIABLE, ctx.needs_input_grad, strict=False)
    wrt = [] if dout is None and dlse is None else [name for name, is_needed in needed if is_needed]
    return arguments, Slopes(dout, dlse, out, lse, tops, " ".join(wrt))
