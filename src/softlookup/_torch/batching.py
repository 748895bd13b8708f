"""vmap: the axis that it adds becomes one more leading axis of a single call.

Only the sinks have no leading axes: where they are batched, or their gradient is asked for, one call is made for each
element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from softlookup._mask_codec import are_elements
from softlookup._torch.lookups import Arguments, Made, Slopes

Dims = tuple[Any, ...]
SIZE = len(Arguments._fields)


def batch_forward(call: Callable[..., Any], size: int, in_dims: Dims, inputs: Sequence[Any]) -> tuple[Made, Dims]:
    """The lookups of a batch of `size`, by one call of `call` on `Arguments`."""
    arguments = Arguments(*inputs)
    dims: Any = Arguments(*in_dims)  # each field's axis of the batch, or None
    _refuse_predicates(arguments.mask)
    if dims.sinks is not None:
        made = _one_by_one(call, size, in_dims, inputs)
    else:
        made = call(*_folded(arguments, dims, size, ()))
    return (made[0], made[1], made[2], made[3]), (0,) * 4


def batch_backward(
    call: Callable[..., Any], size: int, in_dims: Dims, inputs: Sequence[Any]
) -> tuple[tuple[Tensor, ...], Dims]:
    """Their gradients, each element's own, by one call of `call` on `Arguments` and `Slopes`."""
    arguments, slopes = Arguments(*inputs[:SIZE]), Slopes(*inputs[SIZE:])
    dims: Any = Arguments(*in_dims[:SIZE])
    _refuse_predicates(arguments.mask)
    names = slopes.wrt.split()
    if dims.sinks is not None or "sinks" in names:
        found = _one_by_one(call, size, in_dims, inputs)
        return tuple(found), (0,) * len(names)
    tensors = zip(slopes[:-1], in_dims[SIZE:-1], strict=True)
    spread = [None if tensor is None else _batched(tensor, dim, size) for tensor, dim in tensors]
    found = call(*_folded(arguments, dims, size, names), *spread, slopes.wrt)
    shapes = [_batched(getattr(arguments, name), getattr(dims, name), size).shape for name in names]
    return tuple(part.reshape(shape) for part, shape in zip(found, shapes, strict=True)), (0,) * len(names)


def _refuse_predicates(words: str) -> None:
    if "predicate" in words:
        raise NotImplementedError(
            "softlookup.torch.attention: found a Predicate under vmap, which would change the batch index that its "
            "function is given; expected another mask; fix: softlookup.Dense(mask.dense(B, Hq, N, M))"
        )


def _folded(arguments: Arguments, dims: Any, size: int, own: Sequence[str]) -> Arguments:
    """The arguments with one more leading axis. Those in `own` get it also where all elements share them."""
    lookup, lookup_dims = arguments[:3], dims[:3]
    rank = max(tensor.dim() - (dim is not None) for tensor, dim in zip(lookup, lookup_dims, strict=True))
    fronted = {name for name in ("q", "k", "v", "bias") if getattr(dims, name) is not None or name in own}
    if not fronted & {"q", "k", "v"}:
        fronted.add("q")
    q, k, v = (
        _fronted(tensor, dim, size, rank) if name in fronted else tensor
        for name, tensor, dim in zip("qkv", lookup, lookup_dims, strict=True)
    )
    bias, starts = arguments.bias, arguments.q_starts
    return arguments._replace(
        q=q,
        k=k,
        v=v,
        bias=None if bias is None else _like_scores(bias, dims.bias, size, rank, "bias" in fronted),
        mask_arrays=_folded_mask(arguments, dims.mask_arrays, size, rank),
        q_starts=None if starts is None else _per_item(starts, dims.q_starts, size, rank),
    )


def _folded_mask(arguments: Arguments, dims: Any, size: int, rank: int) -> list[Tensor]:
    return [
        _like_scores(array, dim, size, rank, dim is not None) if of_scores else _per_item(array, dim, size, rank)
        for array, dim, of_scores in zip(
            arguments.mask_arrays,
            _dims_of_list(dims, arguments.mask_arrays),
            are_elements(arguments.mask),
            strict=True,
        )
    ]


def _dims_of_list(dims: Any, tensors: list[Tensor]) -> Sequence[Any]:
    """vmap gives None for a whole list that is not batched."""
    return dims if isinstance(dims, (list, tuple)) else [None] * len(tensors)


def _batched(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The tensor with the batch in front: moved there, or the same for all."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _fronted(tensor: Tensor, dim: int | None, size: int, rank: int) -> Tensor:
    """[size, 1, ..., *own], with rank axes after the first."""
    tensor = _batched(tensor, dim, size)
    return tensor[(slice(None), *[None] * (rank + 1 - tensor.dim()))]


def _like_scores(tensor: Tensor, dim: int | None, size: int, rank: int, batched: bool) -> Tensor:
    """A bias or the elements of a mask, which have 2 axes or as many as the scores."""
    if batched:
        return _fronted(tensor, dim, size, rank)
    return tensor[(None,) * (rank + 1 - tensor.dim())] if tensor.dim() > 2 else tensor


def _per_item(tensor: Tensor, dim: int | None, size: int, rank: int) -> Tensor:
    """Lengths or positions, which have the leading axes."""
    return tensor if dim is None else _fronted(tensor, dim, size, rank - 3)


def _one_by_one(call: Callable[..., Any], size: int, in_dims: Dims, inputs: Sequence[Any]) -> list[Tensor]:
    """A call for each element of the batch, stacked."""
    arguments = tuple(zip(inputs, in_dims, strict=True))
    made = [call(*(_element(value, dim, index) for value, dim in arguments)) for index in range(size)]
    return [torch.stack(parts) for parts in zip(*made, strict=True)]


def _element(value: Any, dim: Any, index: int) -> Any:
    if isinstance(value, list):
        return [_element(tensor, own, index) for tensor, own in zip(value, _dims_of_list(dim, value), strict=True)]
    return value if dim is None else value.select(dim, index)
