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
from torch.autograd.forward_ad import unpack_dual
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

import softlookup as sl
from softlookup._checks import as_mask
from softlookup._mask_codec import encode
from softlookup._problems import Problems, describe, integer, real
from softlookup._tensors import FLOATS, array_of, tensor_of
from softlookup._torch.functions import Attend
from softlookup._torch.lookups import empty_output
from softlookup._torch.operators import attend

__all__ = ["attention"]

Mask = sl.Mask | Tensor | np.ndarray[Any, np.dtype[np.bool_]]
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
    if isinstance(mask, np.ndarray):
        mask = tensor_of(mask)
    problems = Problems("torch.attention")
    for name, tensor in (("q", q), ("k", k), ("v", v), ("bias", bias), ("sinks", sinks)):
        _check_tensor(problems, name, tensor)
    if isinstance(mask, Tensor):
        _check_mask(problems, mask)
    problems.raise_any()
    if torch.is_autocast_enabled("cpu"):
        q, k, v = _autocast(q), _autocast(k), _autocast(v)
    single = q.dim() == k.dim() == v.dim() == 2
    q, k, v = _with_heads(q), _with_heads(k), _with_heads(v)
    start = _aligned(q_start, k_start, k.shape[-2] - q.shape[-2]) if isinstance(q_start, str) else q_start
    inputs = _Inputs(q, k, v, mask, bias, scale, softcap, sinks, start, k_start, threads)
    out: Tensor
    lse: Tensor | None
    if _is_traced(inputs):
        out, lse = _apply(attend, problems, inputs)
    elif _is_differentiated(inputs):
        out, lse = _apply(Attend.apply, problems, inputs)
    else:
        out, lse = _compute(inputs, return_lse)
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


def _is_traced(inputs: _Inputs) -> bool:
    """Whether something is to see an operator: a graph that is being made, a mode that watches, a tensor's subclass."""
    return (
        torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
        or torch._C._get_tracing_state() is not None
        or any(isinstance(value, Tensor) and type(value) not in (Tensor, torch.nn.Parameter) for value in inputs)
    )


def _is_differentiated(inputs: _Inputs) -> bool:
    """Whether a gradient is recorded, or a transform of torch.func is at work."""
    records = torch.is_grad_enabled()
    for value in inputs:
        if isinstance(value, Tensor) and (
            (records and value.requires_grad)
            or is_functorch_wrapped_tensor(value)
            or unpack_dual(value).tangent is not None
        ):
            return True
    return False


def _compute(inputs: _Inputs, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """The call straight on the core."""
    q, k, v, mask, bias, scale, softcap, sinks, q_start, k_start, threads = inputs
    try:
        out = empty_output(q, k, v)
    except RuntimeError:  # the leading axes do not broadcast, which the call reports with all else
        out = torch.empty(0, dtype=q.dtype)
    made = sl.attention(
        array_of(q),
        array_of(k),
        array_of(v),
        mask=array_of(mask) if isinstance(mask, Tensor) else mask,
        bias=None if bias is None else array_of(bias),
        scale=scale,
        softcap=softcap,
        sinks=None if sinks is None else array_of(sinks),
        q_start=array_of(q_start) if isinstance(q_start, Tensor) else q_start,
        k_start=k_start,
        out=array_of(out),
        stats=return_lse,
        threads=torch.get_num_threads() if threads is None else threads,
    )
    return out, torch.from_numpy(made[1].lse) if isinstance(made, tuple) else None


def _apply(function: Callable[..., Any], problems: Problems, inputs: _Inputs) -> tuple[Tensor, Tensor]:
    """The call through a function of PyTorch's, which takes `Arguments`."""
    mask = _encoded(problems, inputs.mask)
    q_start, q_starts = _starts(problems, inputs.q_start)
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


def _starts(problems: Problems, q_start: Any) -> tuple[int | None, Tensor | None]:
    """One position for all batch items, or a tensor of them."""
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


def _check_tensor(problems: Problems, name: str, tensor: Any) -> None:
    """Report what only a tensor can be wrong in; shapes and numbers are checked as for arrays."""
    if tensor is None and name in ("bias", "sinks"):
        return
    if not isinstance(tensor, Tensor):
        fix = f"torch.as_tensor({name}); softlookup.attention takes arrays"
        problems.type(name, describe(tensor), "a torch.Tensor", fix)
    elif tensor.layout is not torch.strided:
        problems.type(name, f"a tensor of layout {tensor.layout}", "a strided one", f"{name}.to_dense()")
    elif not tensor.is_cpu:
        problems.value(name, f"a tensor on {tensor.device}", "one on the CPU", f"{name}.cpu()")
    elif tensor.dtype not in FLOATS:
        problems.type(name, _described(tensor), "float32, float64, float16 or bfloat16", f"{name}.float()")
    elif tensor.dim() < 2 and name != "sinks":
        problems.value(name, f"shape {list(tensor.shape)}", "at least 2 axes, [..., H, N, d]", f"{name}[None]")


def _check_mask(problems: Problems, mask: Tensor) -> None:
    if mask.dtype is not torch.bool:
        fix = "bias= if it is added to the scores; mask.bool() if non-zero means may attend"
        problems.type("mask", _described(mask), "a softlookup mask, or a bool tensor (True = may attend)", fix)
    elif not mask.is_cpu:
        problems.value("mask", f"a tensor on {mask.device}", "one on the CPU", "mask.cpu()")


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
