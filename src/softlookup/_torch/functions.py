"""Autograd outside of graphs: two functions, for a lookup and for its gradients.

The operators of `_torch/operators.py` would do for autograd, too. But these take a fraction of their time, and
torch.func's transforms (grad, vjp, vmap, and what is made of them) go through functions only.
"""

from __future__ import annotations

import inspect
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from softlookup._torch.batching import batch_backward, batch_forward
from softlookup._torch.lookups import Arguments, Made, Slopes, keep, kept, run_backward, run_forward


class Attend(torch.autograd.Function):
    """A lookup: its arguments are those of `Arguments`."""

    @staticmethod
    def forward(*inputs: Any) -> Made:
        return run_forward(Arguments(*inputs))

    setup_context = staticmethod(keep)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        arguments, slopes = kept(ctx, dout, dlse)
        names, differentiate = slopes.wrt.split(), cast(Any, Differentiate.apply)
        found = dict(zip(names, differentiate(*arguments, *slopes), strict=True)) if names else {}
        return tuple(found.get(name) for name in Arguments._fields)

    @staticmethod
    def jvp(ctx: Any, *_: Tensor | None) -> NoReturn:
        raise NotImplementedError(
            "softlookup.torch.attention: found forward-mode differentiation; expected reverse mode; "
            "fix: torch.func.vjp, torch.func.jacrev or backward()"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Made, tuple[int, ...]]:
        return batch_forward(Attend.apply, info.batch_size, in_dims, inputs)


class Differentiate(torch.autograd.Function):
    """Its gradients: the arguments are those of `Arguments` and of `Slopes`."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        size = len(Arguments._fields)
        return tuple(run_backward(Arguments(*inputs[:size]), Slopes(*inputs[size:])))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> NoReturn:
        raise NotImplementedError(
            "softlookup.torch.attention: found a gradient of its gradients asked for; expected first derivatives only; "
            "fix: torch.nn.functional.scaled_dot_product_attention has second ones"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return batch_backward(Differentiate.apply, info.batch_size, in_dims, inputs)


# Autograd asks for it at every call, and making it anew takes longer than the call of a small lookup.
for _function in (Attend, Differentiate):
    _function.forward.__signature__ = inspect.signature(_function.forward)  # type: ignore[attr-defined]
