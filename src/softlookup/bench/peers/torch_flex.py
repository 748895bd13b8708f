"""PyTorch: FlexAttention, compiled, with a block mask for what is hidden."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from softlookup.bench.peers import Missing, Prepared
from softlookup.bench.peers.torch_arrays import array, tensor, use_threads
from softlookup.bench.workloads import Inputs, Workload

Rule = Callable[[Any, Any, Any, Any], Any]


def prepare(inputs: Inputs, threads: int, option: str) -> Prepared:
    """The lookup; compiled by the first call."""
    workload = inputs.workload
    if workload.kind == "train":
        raise Missing("FlexAttention has no backward pass on CPUs")
    if workload.dtype == "float64":
        raise Missing("FlexAttention has no float64 on CPUs")
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise Missing("torch.compile needs a C++ compiler")
    q, k, v = tensor(inputs.q), tensor(inputs.k), tensor(inputs.v)
    rule = _rule(workload)
    batch = None if workload.lengths is None else workload.batch
    block_mask = (
        None if rule is None else create_block_mask(rule, batch, None, workload.queries, workload.keys, device="cpu")
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    grouped = workload.heads != workload.key_heads

    def call() -> Any:
        return compiled(q, k, v, block_mask=block_mask, enable_gqa=grouped)

    close = use_threads(threads)
    note = f"{threads} threads, compiled" + ("" if block_mask is None else ", block mask")
    return Prepared(
        call, lambda out: {"out": array(out)}, workload.cache_bytes, note, around=torch.no_grad, close=close
    )


def _rule(workload: Workload) -> Rule | None:
    """The mask as FlexAttention takes it."""
    if workload.window is not None:
        window = workload.window
        return lambda b, h, i, j: (i >= j) & (i - j < window)
    if workload.causal:
        return lambda b, h, i, j: i >= j
    if workload.lengths is not None:
        lengths = torch.tensor(workload.lengths)
        return lambda b, h, i, j: j < lengths[b]
    return None
