"""onnxruntime: com.microsoft GroupQueryAttention, its operator for decoding, on a cache bound once.

Past and present are one buffer (io_binding), as its documentation asks for; a step writes its new tokens into it again
and again. Quantised caches have one static, symmetric scale for each channel, its largest absolute number over 2^(bits
- 1) - 1; the answer is checked against the float32 lookup in the same codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

import softlookup as sl
from softlookup.bench.peers import Answers, Missing, Prepared
from softlookup.bench.workloads import Inputs, Workload

TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
CODES = {"int8": TensorProto.INT8, "int4": TensorProto.UINT8}
BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class Cache:
    """Keys or values as they are stored, their scales, and the numbers that they stand for."""

    stored: NDArray[Any]
    scales: NDArray[np.float32] | None
    exact: NDArray[Any]


def prepare(inputs: Inputs, threads: int, code: str) -> Prepared:
    """The lookup; the option `code` is "int8" or "int4" for a quantised cache."""
    workload = inputs.workload
    if workload.kind == "train":
        raise Missing("onnxruntime does not train")
    if workload.dtype not in TYPES:
        raise Missing(f"GroupQueryAttention has no {workload.dtype} on CPUs")
    keys, values = (_cache(array, code) for array in (inputs.k, inputs.v))
    session = _session(workload, threads, code)
    binding, held = _binding(session, inputs, keys, values)

    def call() -> Any:
        session.run_with_iobinding(binding)
        return held["out"]

    shape = (workload.batch, workload.queries, workload.heads, workload.width)

    def answers(result: Any) -> Answers:
        return {"out": result.numpy().reshape(shape).swapaxes(1, 2).astype(np.float32)}

    exact = None
    note = f"{threads} threads, io_binding, shared past and present"
    if code:
        exact = {"out": sl.attention(inputs.q, keys.exact, values.exact, mask=workload.mask, threads=threads)}
        note += f", {code} cache, a scale for each channel"
    return Prepared(call, answers, workload.cache_elements * _bits(workload, code) // 8, note, exact=exact)


def _bits(workload: Workload, code: str) -> int:
    return BITS[code] if code else np.dtype(workload.dtype).itemsize * 8


def _cache(array: NDArray[Any], code: str) -> Cache:
    if not code:
        return Cache(array, None, array)
    largest = 2 ** (BITS[code] - 1) - 1
    scales = (np.abs(array).max(axis=(0, 2), keepdims=True) / largest).astype(np.float32)
    codes = np.rint(array / scales).astype(np.int8)
    exact = codes * scales
    if code == "int8":
        return Cache(codes, scales, exact)
    nibbles = (codes + 8).astype(np.uint8)
    return Cache(nibbles[..., ::2] | (nibbles[..., 1::2] << 4), scales, exact)


def _session(workload: Workload, threads: int, code: str) -> Any:
    numbers = TYPES[workload.dtype]
    stored = CODES[code] if code else numbers
    attributes: dict[str, Any] = {
        "num_heads": workload.heads,
        "kv_num_heads": workload.key_heads,
        "causal": int(workload.causal or workload.kind == "decode"),
        "local_window_size": workload.window or -1,
    }
    types = dict.fromkeys(("query", "key", "value"), numbers) | dict.fromkeys(("past_key", "past_value"), stored)
    types |= dict.fromkeys(("seqlens_k", "total_sequence_length"), TensorProto.INT32)
    order = list(types)
    if code:
        attributes |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": BITS[code]}
        types |= dict.fromkeys(("k_scale", "v_scale"), TensorProto.FLOAT)
        order += [""] * 5 + ["k_scale", "v_scale"]
    outputs = {"out": numbers, "present_key": stored, "present_value": stored}
    node = helper.make_node("GroupQueryAttention", order, list(outputs), domain="com.microsoft", **attributes)
    graph = helper.make_graph(
        [node],
        "lookup",
        [helper.make_tensor_value_info(name, type, None) for name, type in types.items()],
        [helper.make_tensor_value_info(name, type, None) for name, type in outputs.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _binding(session: Any, inputs: Inputs, keys: Cache, values: Cache) -> tuple[Any, dict[str, Any]]:
    """Everything on buffers that stay: the cache, whose last tokens the step appends, and the output.

    The binding points into the arrays and does not hold them: the second result does.
    """
    workload = inputs.workload
    lengths = workload.key_lengths
    new = [_newest(array, workload.queries, lengths) for array in (inputs.k, inputs.v)]
    feeds = {
        "query": _rows_first(inputs.q),
        "key": _rows_first(new[0]),
        "value": _rows_first(new[1]),
        "seqlens_k": np.array(lengths, np.int32) - np.int32(1),
        "total_sequence_length": np.array(max(lengths), np.int32),
    }
    if keys.scales is not None and values.scales is not None:
        feeds |= {"k_scale": keys.scales, "v_scale": values.scales}
    feeds |= {"past_key": keys.stored.copy(), "past_value": values.stored.copy()}
    held = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    held["out"] = onnxruntime.OrtValue.ortvalue_from_numpy(np.empty_like(feeds["query"]))
    binding = session.io_binding()
    for name in feeds:
        binding.bind_ortvalue_input(name, held[name])
    for name, buffer in (("out", "out"), ("present_key", "past_key"), ("present_value", "past_value")):
        binding.bind_ortvalue_output(name, held[buffer])
    return binding, held


def _newest(array: NDArray[Any], count: int, lengths: tuple[int, ...]) -> NDArray[Any]:
    """The last `count` tokens of every batch item [B, Hk, count, d]."""
    return np.stack([item[:, length - count : length] for item, length in zip(array, lengths, strict=True)])


def _rows_first(array: NDArray[Any]) -> NDArray[Any]:
    """[B, H, N, d] as [B, N, H d]."""
    batch, heads, rows, width = array.shape
    return np.ascontiguousarray(array.swapaxes(1, 2).reshape(batch, rows, heads * width))
