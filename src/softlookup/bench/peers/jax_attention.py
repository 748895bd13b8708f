"""JAX: jax.nn.dot_product_attention, compiled by jit, in its own layout [B, N, H, d]."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from softlookup.bench.peers import Answers, Missing, Prepared
from softlookup.bench.workloads import Inputs, Workload


def prepare(inputs: Inputs, threads: int, option: str) -> Prepared:
    """The lookup; compiled by the first call."""
    workload = inputs.workload
    if workload.dtype == "float64":
        raise Missing("jax computes in float32 unless the whole process is switched to x64")
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if threads != available:
        raise Missing(f"XLA takes no number of threads: it uses all {available} CPUs (start the process on fewer)")
    q, k, v = (_device_array(array) for array in (inputs.q, inputs.k, inputs.v))
    lookup = partial(jax.nn.dot_product_attention, **_options(workload))
    note = f"{threads} threads, jit"
    if workload.kind == "train":
        return Prepared(_training(lookup, inputs, q, k, v), _gradients, workload.cache_bytes, note)
    compiled = jax.jit(lookup)

    def call() -> Any:
        return compiled(q, k, v).block_until_ready()

    return Prepared(call, lambda out: {"out": _as_ours(out)}, workload.cache_bytes, note)


def _training(lookup: Any, inputs: Inputs, q: Any, k: Any, v: Any) -> Any:
    assert inputs.dout is not None
    slope = _device_array(inputs.dout)

    def both(q: Any, k: Any, v: Any, slope: Any) -> Any:
        out, pullback = jax.vjp(lookup, q, k, v)
        return out, *pullback(slope)

    compiled = jax.jit(both)

    def call() -> Any:
        return jax.block_until_ready(compiled(q, k, v, slope))

    return call


def _options(workload: Workload) -> dict[str, Any]:
    if workload.window is not None:
        return {"is_causal": True, "local_window_size": (workload.window - 1, 0)}
    if workload.lengths is not None:
        return {"key_value_seq_lengths": np.array(workload.lengths, np.int32)}
    return {"is_causal": workload.causal}


def _gradients(result: Any) -> Answers:
    return {name: _as_ours(one) for name, one in zip(("out", "dq", "dk", "dv"), result, strict=True)}


def _device_array(array: NDArray[Any]) -> Any:
    return jax.device_put(np.ascontiguousarray(array.swapaxes(1, 2)))


def _as_ours(array: Any) -> NDArray[np.float32]:
    return np.asarray(array).swapaxes(1, 2).astype(np.float32)
