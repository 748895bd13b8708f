"""PyTorch: torch.nn.functional.scaled_dot_product_attention, on tensors that stand ready.

Causal prefill says is_causal, groups of heads say enable_gqa; what has no argument of its own (a window, ragged
lengths) is a boolean attn_mask, made beforehand.
"""

from __future__ import annotations

from typing import Any

import torch

from softlookup.bench.peers import Answers, Prepared
from softlookup.bench.peers.torch_arrays import array, tensor, use_threads
from softlookup.bench.workloads import Inputs


def prepare(inputs: Inputs, threads: int, option: str) -> Prepared:
    """The lookup; with the option "from numpy" the call converts to tensors and back."""
    workload = inputs.workload
    options: dict[str, Any] = {"enable_gqa": workload.heads != workload.key_heads}
    note = f"{threads} threads"
    if workload.causal and workload.window is None:
        options["is_causal"] = True
    elif (dense := workload.dense_mask()) is not None:
        options["attn_mask"] = torch.from_numpy(dense)
        note += ", dense boolean mask"
    close = use_threads(threads)
    if workload.kind == "train":
        return Prepared(_training(inputs, options), _gradients, workload.cache_bytes, note, close=close)
    call = _from_numpy(inputs, options) if option else _ready(inputs, options)
    return Prepared(
        call,
        lambda out: {"out": array(torch.as_tensor(out))},
        workload.cache_bytes,
        note,
        around=torch.inference_mode,
        close=close,
    )


def _ready(inputs: Inputs, options: dict[str, Any]) -> Any:
    q, k, v = tensor(inputs.q), tensor(inputs.k), tensor(inputs.v)

    def call() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    return call


def _from_numpy(inputs: Inputs, options: dict[str, Any]) -> Any:
    def call() -> Any:
        q, k, v = torch.from_numpy(inputs.q), torch.from_numpy(inputs.k), torch.from_numpy(inputs.v)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options).numpy()

    return call


def _training(inputs: Inputs, options: dict[str, Any]) -> Any:
    assert inputs.dout is not None
    q, k, v = (tensor(one).requires_grad_() for one in (inputs.q, inputs.k, inputs.v))
    slope = tensor(inputs.dout)

    def call() -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
        return out, *torch.autograd.grad(out, (q, k, v), slope)

    return call


def _gradients(result: Any) -> Answers:
    return {name: array(one) for name, one in zip(("out", "dq", "dk", "dv"), result, strict=True)}
