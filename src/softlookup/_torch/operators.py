"""The same two as operators of PyTorch, for graphs: torch.compile, torch.export and whatever watches operators.

A graph knows them by their schema and by the shapes that the fake functions give. Their mask, being text, numbers and
tensors, is a constant of the graph or an input to it like any other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from softlookup._torch.batching import batch_backward, batch_forward
from softlookup._torch.lookups import (
    Arguments,
    Made,
    Slopes,
    empty_output,
    empty_rows,
    keep,
    kept,
    run_backward,
    run_forward,
)

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks, str mask, SymInt[] mask_numbers, Tensor[] mask_arrays, "
    "float? scale, float? softcap, SymInt? q_start, Tensor? q_starts, SymInt k_start, SymInt? threads"
)
_SLOPES = "Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, Tensor tops, str wrt"


@torch.library.custom_op(
    "softlookup::attention",
    mutates_args=(),
    device_types="cpu",
    schema=f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def attend(*inputs: Any) -> Made:
    """A lookup: its arguments are those of `Arguments`."""
    return run_forward(Arguments(*inputs))


@torch.library.custom_op(
    "softlookup::attention_backward",
    mutates_args=(),
    device_types="cpu",
    schema=f"({_ARGUMENTS}, {_SLOPES}) -> Tensor[]",
)
def differentiate(*inputs: Any) -> list[Tensor]:
    """Its gradients: the arguments are those of `Arguments` and of `Slopes`."""
    arguments, slopes = _split(inputs)
    return run_backward(arguments, slopes)


def _split(inputs: tuple[Any, ...]) -> tuple[Arguments, Slopes]:
    size = len(Arguments._fields)
    return Arguments(*inputs[:size]), Slopes(*inputs[size:])


@attend.register_fake
def _fake_attend(*inputs: Any) -> Made:
    arguments = Arguments(*inputs)
    out = empty_output(arguments.q, arguments.k, arguments.v)
    return out, *empty_rows(out)


@differentiate.register_fake
def _fake_differentiate(*inputs: Any) -> list[Tensor]:
    arguments, slopes = _split(inputs)
    return [torch.empty_like(getattr(arguments, name)) for name in slopes.wrt.split()]


def _pull_back(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
    arguments, slopes = kept(ctx, dout, dlse)
    names = slopes.wrt.split()
    found: dict[str, Any] = dict(zip(names, differentiate(*arguments, *slopes), strict=True)) if names else {}
    # PyTorch wants a list for each list of tensors, and takes one without elements for such.
    found["mask_numbers"] = None if arguments.mask_numbers else []
    found["mask_arrays"] = [None for _ in arguments.mask_arrays]
    return tuple(found.get(name) for name in Arguments._fields)


@attend.register_vmap
def _batch_attend(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Made, tuple[int, ...]]:
    return batch_forward(attend, info.batch_size, in_dims, inputs)


@differentiate.register_vmap
def _batch_differentiate(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[list[Tensor], list[int]]:
    found, dims = batch_backward(differentiate, info.batch_size, in_dims, inputs)
    return list(found), list(dims)


attend.register_autograd(_pull_back, setup_context=keep)
