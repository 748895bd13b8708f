"""softlookup for PyTorch: `attention` on CPU tensors, with autograd, torch.compile and vmap.

Tensors are read in place, whatever their strides. Where no gradient is recorded and nothing traces, the call goes
straight to the core; a gradient is recorded by a function of autograd (`_torch/functions.py`); what traces sees an
operator (`_torch/operators.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, overload

import numpy as np

try:
    import torch
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"softlookup.torch needs {missing.name}: pip install 'softlookup[torch]'", name=missing.name
    ) from missing

from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

import softlookup as sl
from softlookup._checks import as_mask
from softlookup._mask_codec import encode
from softlookup._problems import Problems, describe, integer, real
from softlookup._tensors import FLOATS, is_heads_last, tensor_of
from softlookup._torch.functions import Attend
from softlookup._torch.lookups import compute
from softlookup._torch.operators import attend

__all__ = ["attention"]

Mask = sl.Mask | Tensor | np.ndarray[Any, np.dtype[np.bool_]]
_PLAIN = frozenset({Tensor, torch.nn.Parameter})

Start = int | Tensor | np.ndarray[Any, np.dtype[np.int64]] | Literal["upper_left", "lower_right"]


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = ...,
    bias: Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    q_start: Start | None = ...,
    k_start: int = ...,
    return_lse: Literal[False] = ...,
    threads: int | None = ...,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = ...,
    bias: Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    q_start: Start | None = ...,
    k_start: int = ...,
    return_lse: Literal[True],
    threads: int | None = ...,
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    q_start: Start | None = None,
    k_start: int = 0,
    return_lse: bool = False,
    threads: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`softlookup.attention` on tensors, differentiable in q, k, v, bias and sinks.

    The meaning, and the bits, are those of `softlookup.attention`.

    Parameters
    ----------
    q, k, v
        CPU tensors [..., Hq, N, d_k], [..., Hk, M, d_k] and [..., Hk, M, d_v]: float32, float64, float16 or bfloat16,
        one type for all (under autocast: cast to its type). Any strides are read in place.
    mask
        A mask of softlookup, or a bool tensor or array [N, M] or with as many axes as q (True = may attend). A compiled
        function may make a Causal, a Window or a Full of its own, joined by & and |; it is handed all others.
    bias, sinks
        Tensors, as in `softlookup.attention`.
    q_start
        An int, an int64 tensor or array over the batch axes, "upper_left" or "lower_right".
    scale, softcap, k_start
        As in `softlookup.attention`.
    return_lse
        Whether to return the natural log of the softmax denominators too, float64 [..., Hq, N]; differentiable.
    threads
        None is `torch.get_num_threads()`.

    Returns
    -------
    torch.Tensor or (torch.Tensor, torch.Tensor)
        The output [..., Hq, N, d_v], of the type of q, and lse if asked for. In memory heads and rows lie as in q:
        where q is a view of [..., N, Hq, d_k], `out.transpose(-3, -2)` is contiguous.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, before anything is computed: one error lists all reasons, each with its fix.
    NotImplementedError
        For a `Predicate` under torch.compile or vmap, second derivatives, and forward-mode differentiation.

    References
    ----------
    Dao et al., "FlashAttention: fast and memory-efficient exact attention with IO-awareness" (2022), algorithm 4.

    Examples
    --------
    >>> import torch
    >>> import softlookup as sl
    >>> from softlookup.torch import attention
    >>> q = torch.randn(2, 9, 16, 64, requires_grad=True)
    >>> k, v = torch.randn(2, 2, 3, 16, 64)
    >>> out = attention(q, k, v, mask=sl.Causal())
    >>> out.sum().backward()
    >>> q.grad.shape
    torch.Size([2, 9, 16, 64])
    """
    problems = Problems("torch.attention")
    _check_tensor(problems, "q", q)
    _check_tensor(problems, "k", k)
    _check_tensor(problems, "v", v)
    if bias is not None:
        _check_tensor(problems, "bias", bias)
    if sinks is not None:
        _check_tensor(problems, "sinks", sinks, least_axes=1)
    if isinstance(mask, Tensor):
        _check_mask(problems, mask)
    problems.raise_any()
    if torch.is_autocast_enabled("cpu"):
        q, k, v = _autocast(q), _autocast(k), _autocast(v)
    single = q.dim() == k.dim() == v.dim() == 2
    q, k, v = _with_heads(q), _with_heads(k), _with_heads(v)
    inputs = q, k, v, mask, bias, scale, softcap, sinks, q_start, k_start, threads
    options = (mask, bias, sinks, q_start)
    tensors = [q, k, v, *(value for value in options if isinstance(value, Tensor))]
    out: Tensor
    lse: Tensor | None
    if _is_traced(tensors):
        out, lse = _apply(attend, problems, _Inputs(*inputs))
    elif _is_differentiated(tensors):
        out, lse = _apply(Attend.apply, problems, _Inputs(*inputs))
    else:
        heads_last = is_heads_last(q.stride())
        out, stats = compute(problems, *inputs, stats=return_lse, heads_last=heads_last)
        out = out.transpose(-3, -2) if heads_last else out
        lse = None if stats is None else torch.from_numpy(stats.lse)
    if single:
        out, lse = out[0], None if lse is None else lse[0]
    return (out, lse) if return_lse and lse is not None else out


class _Inputs(NamedTuple):
    """The arguments of a call, with a head axis."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Any
    bias: Tensor | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    q_start: Any
    k_start: int
    threads: int | None


def _is_traced(tensors: list[Tensor]) -> bool:
    """Whether something is to see an operator: a graph that is being made, a mode that watches, a tensor's subclass."""
    return (
        torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
        or torch._C._get_tracing_state() is not None
        or not _PLAIN.issuperset(map(type, tensors))
    )


def _is_differentiated(tensors: list[Tensor]) -> bool:
    """Whether a gradient is recorded, or a transform of torch.func is at work."""
    records = torch.is_grad_enabled()
    for tensor in tensors:
        if (records and tensor.requires_grad) or is_functorch_wrapped_tensor(tensor):
            return True
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def _apply(function: Callable[..., Any], problems: Problems, inputs: _Inputs) -> tuple[Tensor, Tensor]:
    """The call through a function of PyTorch's, which takes `Arguments`."""
    mask = _encoded(problems, inputs.mask)
    q_start, q_starts = _starts(problems, inputs)
    scale, softcap = (
        None if value is None else real(problems, name, value, expected="a finite real number", fix="pass a float")
        for name, value in (("scale", inputs.scale), ("softcap", inputs.softcap))
    )
    k_start = integer(problems, "k_start", inputs.k_start)
    threads = None if inputs.threads is None else integer(problems, "threads", inputs.threads)
    problems.raise_any()
    out, lse, *_ = function(
        inputs.q, inputs.k, inputs.v, inputs.bias, inputs.sinks, *mask,
        scale, softcap, q_start, q_starts, k_start, threads,
    )  # fmt: skip
    return out, lse


def _encoded(problems: Problems, mask: Any) -> tuple[str, list[int], list[Tensor]]:
    """The mask as the function takes it."""
    if mask is None:
        return "", [], []
    if isinstance(mask, np.ndarray):
        mask = tensor_of(mask)
        _check_mask(problems, mask)
    if isinstance(mask, Tensor):
        return "dense", [], [mask]
    if not isinstance(mask, sl.Mask):
        as_mask(problems, mask, None)
        return "", [], []
    if torch.compiler.is_compiling() and any(isinstance(leaf, sl.Predicate) for leaf in mask._leaves()):
        raise NotImplementedError(
            "softlookup.torch.attention: found a Predicate under torch.compile, whose graph cannot hold its function; "
            "expected another mask; fix: softlookup.Dense(mask.dense(B, Hq, N, M)), or torch.compiler.disable"
        )
    words, numbers, arrays = encode(mask)
    return words, numbers, [tensor_of(array) for array in arrays]


def _starts(problems: Problems, inputs: _Inputs) -> tuple[int | None, Tensor | None]:
    """One position for all batch items, or a tensor of them."""
    q_start = inputs.q_start
    if isinstance(q_start, str):
        q_start = _aligned(q_start, inputs.k_start, inputs.k.shape[-2] - inputs.q.shape[-2])
    if q_start is None:
        return None, None
    if isinstance(q_start, Tensor):
        return None, q_start
    if isinstance(q_start, np.ndarray):
        return None, tensor_of(q_start)
    if isinstance(q_start, (list, tuple)):
        return None, torch.tensor(q_start)
    return integer(problems, "q_start", q_start, expected="an int, or ints over the batch axes"), None


def _aligned(name: str, k_start: int, difference: int) -> int | str:
    """The position that a name means, with difference = M - N; an unknown name is left to be reported."""
    return {"upper_left": k_start, "lower_right": k_start + difference}.get(name, name)


def _autocast(tensor: Tensor) -> Tensor:
    """As the operators that PyTorch itself casts under autocast, its own SDPA among them."""
    return tensor if tensor.dtype is torch.float64 else tensor.to(torch.get_autocast_dtype("cpu"))


def _with_heads(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() > 2 else tensor.unsqueeze(0)


def _check_tensor(problems: Problems, name: str, tensor: Any, least_axes: int = 2) -> None:
    """Report what only a tensor can be wrong in; shapes and numbers are checked as for arrays."""
    if not isinstance(tensor, Tensor):
        fix = f"torch.as_tensor({name}); softlookup.attention takes arrays"
        problems.type(name, describe(tensor), "a torch.Tensor", fix)
    elif tensor.layout is not torch.strided:
        problems.type(name, f"a tensor of layout {tensor.layout}", "a strided one", f"{name}.to_dense()")
    elif not tensor.is_cpu:
        problems.value(name, f"a tensor on {tensor.device}", "one on the CPU", f"{name}.cpu()")
    elif tensor.dtype not in FLOATS:
        problems.type(name, _described(tensor), "float32, float64, float16 or bfloat16", f"{name}.float()")
    elif tensor.dim() < least_axes:
        problems.value(name, f"shape {list(tensor.shape)}", "at least 2 axes, [..., H, N, d]", f"{name}[None]")


def _check_mask(problems: Problems, mask: Tensor) -> None:
    if mask.dtype is not torch.bool:
        fix = "bias= if it is added to the scores; mask.bool() if non-zero means may attend"
        problems.type("mask", _described(mask), "a softlookup mask, or a bool tensor (True = may attend)", fix)
    elif not mask.is_cpu:
        problems.value("mask", f"a tensor on {mask.device}", "one on the CPU", "mask.cpu()")


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
