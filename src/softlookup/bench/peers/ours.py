"""softlookup itself, as anyone calls it: NumPy arrays, or a cache that holds them; outputs allocated by the call."""

from __future__ import annotations

from typing import Any

import softlookup as sl
from softlookup.bench.peers import Answers, Missing, Prepared, wide
from softlookup.bench.workloads import Inputs


def prepare(inputs: Inputs, threads: int, option: str) -> Prepared:
    """The lookup; with the option "stats" also statistics; with "cache", or codes by name, from a cache of those."""
    workload = inputs.workload
    if option in ("cache", "int8", "int4"):
        return _cached(inputs, threads, workload.dtype if option == "cache" else option)
    arguments: dict[str, Any] = {"mask": workload.mask, "threads": threads}
    note = f"{threads} threads"
    if option == "stats":
        arguments["stats"] = True
        note += ", with statistics"
    if workload.kind == "train":
        return Prepared(_training(inputs, arguments), _gradients, workload.cache_bytes, note)

    def call() -> Any:
        return sl.attention(inputs.q, inputs.k, inputs.v, **arguments)

    return Prepared(call, _output, workload.cache_bytes, note)


def _cached(inputs: Inputs, threads: int, dtype: str) -> Prepared:
    """Decoding from a cache that holds the keys and values already."""
    workload = inputs.workload
    cache = sl.KVCache(batch=workload.batch, kv_heads=workload.key_heads, width=workload.width, dtype=dtype)
    cache.append(inputs.k, inputs.v, lengths=list(workload.key_lengths))
    coded = dtype != workload.dtype
    exact = None
    if coded:
        stored = sl.attention(inputs.q, cache.keys(), cache.values(), mask=workload.mask, threads=threads)
        exact = {"out": wide(stored)}

    def call() -> Any:
        return cache.attention(inputs.q, threads=threads)

    read = workload.coded_bytes(dtype) if coded else workload.cache_bytes
    return Prepared(call, _output, read, f"{threads} threads, KVCache of {dtype}", exact, dtype if coded else "")


def _training(inputs: Inputs, arguments: dict[str, Any]) -> Any:
    if not hasattr(sl, "attention_vjp"):
        raise Missing("this version has no attention_vjp")
    dout = inputs.dout
    assert dout is not None

    def call() -> Any:
        out, pullback = sl.attention_vjp(inputs.q, inputs.k, inputs.v, **arguments)
        return out, pullback(dout)

    return call


def _output(result: Any) -> Answers:
    return {"out": wide(result[0] if isinstance(result, tuple) else result)}


def _gradients(result: Any) -> Answers:
    out, grads = result
    named = {"out": out, "dq": grads.q, "dk": grads.k, "dv": grads.v}
    return {name: wide(array) for name, array in named.items()}
