"""PyTorch's tensors as arrays and back, for every adapter that meets them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from softlookup._types import BFLOAT16, code_of, dtype_of

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """The tensor's own memory as an array. (A parameter says requires_grad also where no gradient is recorded.)

    Raises
    ------
    ImportError
        If the tensor is bfloat16 and the package ml_dtypes is not installed.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(dtype_of(BFLOAT16))
    array: NDArray[Any] = tensor.numpy()
    return array


def tensor_of(array: NDArray[Any]) -> torch.Tensor:
    """The array's own memory as a tensor that is only read; a copy where PyTorch has no tensor of its strides."""
    if not torch.compiler.is_compiling():  # what follows is not traced; a graph takes arrays as they are
        if any(step < 0 for step in array.strides):
            array = array.copy()
        if not array.flags.writeable:
            array = np.asarray(_Writable(array))
        if code_of(array.dtype) == BFLOAT16:
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class _Writable:
    """A read-only array that says it can be written to: PyTorch warns of others, whatever is done with them."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def is_heads_last(strides: tuple[int, ...]) -> bool:
    """Whether [..., H, N, d] lies in memory as [..., N, H, d]."""
    return bool(strides[-3] < strides[-2])
