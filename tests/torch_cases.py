"""Tensors, masks and comparisons that the tests of softlookup.torch share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import softlookup as sl

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
PADDED = sl.Causal() & sl.Lengths([7, 3])
MASKS = {
    "none": None,
    "causal": sl.Causal(),
    "padded": PADDED,
    "dense": sl.Dense(np.random.default_rng(0).random((5, 7)) < 0.6),
    "joined": PADDED | ~sl.Dense(np.random.default_rng(1).random((2, 1, 5, 7)) < 0.8),
    "predicate": sl.Predicate(lambda b, h, i, j: (i + j + h) % 3 > 0),
}


def tensors(dtype: Any = torch.float32, grad: bool = True, seed: int = 0) -> dict[str, Tensor]:
    """q, k and v of a grouped call, a bias and sinks."""
    torch.manual_seed(seed)
    shapes = {"q": (2, 4, 5, 8), "k": (2, 2, 7, 8), "v": (2, 2, 7, 6), "bias": (1, 4, 5, 7), "sinks": (4,)}
    return {name: torch.randn(shape).to(dtype).requires_grad_(grad) for name, shape in shapes.items()}


def gradients(out: Any, inputs: Any, seed: int = 1) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    outs = out if isinstance(out, tuple) else (out,)
    return torch.autograd.grad(outs, list(inputs), [torch.randn_like(one) for one in outs])


def compiled_alike(function: Callable[..., Any], *inputs: Tensor) -> None:
    """One graph forward and one backward, with the bits of the eager run."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found, expected = compiled(*inputs), function(*inputs)
    assert torch.equal(found, expected)
    needed = [tensor for tensor in inputs if tensor.requires_grad]
    for gradient, wanted in zip(gradients(found, needed), gradients(expected, needed), strict=True):
        assert torch.equal(gradient, wanted)
