"""softlookup itself, as anyone calls it: plain NumPy arrays, outputs allocated by the call."""

from __future__ import annotations

from typing import Any

import softlookup as sl
from softlookup.bench.peers import Answers, Missing, Prepared, wide
from softlookup.bench.workloads import Inputs


def prepare(inputs: Inputs, threads: int, option: str) -> Prepared:
    """The lookup; with the option "stats" it also gathers statistics."""
    workload = inputs.workload
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
