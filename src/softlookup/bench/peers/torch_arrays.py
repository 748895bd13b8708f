"""NumPy arrays as tensors on the same memory, so that pages and alignment are the same for all, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def tensor(array: NDArray[Any]) -> torch.Tensor:
    """The same numbers on the same memory."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array(tensor: torch.Tensor) -> NDArray[Any]:
    """As float32, or float64 if it is that."""
    numbers: NDArray[Any] = (tensor if tensor.dtype == torch.float64 else tensor.float()).detach().numpy()
    return numbers


def use_threads(threads: int) -> Callable[[], None]:
    """Give PyTorch that many threads; returns what puts the old number back."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    return lambda: torch.set_num_threads(before)
