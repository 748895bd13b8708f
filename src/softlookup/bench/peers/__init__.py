"""The contenders, one file each, loaded when they are asked for.

A peer's file makes a `Prepared`: the call that is timed, on arrays that stand ready in the peer's own layout, and how
to read its answer; for a whole language model it makes a `Reader` (softlookup.bench.model). What a peer cannot do, or
the lack of its package, is a `Missing` with the reason, and becomes a row of the table.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softlookup._types import NAMES
from softlookup.bench.workloads import CACHE_TYPES, Workload

Answers = dict[str, NDArray[Any]]

OURS = "softlookup"
STOCK = "transformers"
LOOKUPS = ("prefill", "decode", "train", "call")
MODELS = ("model",)


class Missing(Exception):
    """Why a contender has no time in this workload."""


def wide(array: NDArray[Any]) -> NDArray[Any]:
    """As float32, or float64 if it is that."""
    return array if array.dtype == np.float64 else array.astype(np.float32, copy=False)


def _nothing() -> None:
    return None


def _no_context() -> AbstractContextManager[Any]:
    return nullcontext()


@dataclass(frozen=True)
class Prepared:
    """A contender, ready to run one workload."""

    call: Callable[[], Any]
    """One complete lookup."""
    answers: Callable[[Any], Answers]
    """What the call returned, as float32 or float64: out [B, Hq, N, d], and dq, dk, dv where it trains."""
    cache_bytes: int
    """Bytes of keys and values that one call reads."""
    note: str
    """How it is configured."""
    exact: Answers | None = None
    """The answer to what it really computes, where that is not the workload itself: a quantised cache."""
    codes: str = ""
    """The type of our own cache of codes, "int8" or "int4": its products are those of integers, with a limit and a
    tolerance of their own."""
    around: Callable[[], AbstractContextManager[Any]] = _no_context
    """What a whole bunch of calls runs inside."""
    close: Callable[[], None] = _nothing
    """Puts back what was changed for the whole process."""


@dataclass(frozen=True)
class Peer:
    """A contender by name: where its file is, the package that its version is told from, and what it is for."""

    name: str
    module: str
    package: str
    option: str = ""
    kinds: tuple[str, ...] = LOOKUPS
    dtypes: tuple[str, ...] = NAMES
    extra: str = "bench"
    """What of softlookup's extras installs it."""

    def is_for(self, workload: Workload) -> bool:
        """Whether this workload is what the contender is there for; one that then fails to run it is a row."""
        asked = workload.peers is None or self.name in workload.peers
        return asked and workload.kind in self.kinds and workload.dtype in self.dtypes

    def prepare(self, inputs: Any, threads: int) -> Any:
        """Make it ready; raises Missing. Inputs give a Prepared, the Prompt of a model workload a Reader."""
        try:
            module = importlib.import_module(f"softlookup.bench.peers.{self.module}")
            return module.prepare(inputs, threads, self.option)
        except ModuleNotFoundError as problem:
            raise Missing(f"{problem.name} is not installed: pip install 'softlookup[{self.extra}]'") from None

    def version(self) -> str | None:
        """The installed version, None where there is none."""
        try:
            return version(self.package)
        except ModuleNotFoundError:
            return None


PEERS = {
    peer.name: peer
    for peer in (
        Peer("softlookup-stats", "ours", "softlookup", "stats", kinds=("prefill",)),
        Peer("softlookup-cache", "ours", "softlookup", "cache", kinds=("decode",), dtypes=CACHE_TYPES),
        Peer("softlookup-int8", "ours", "softlookup", "int8", kinds=("decode",), dtypes=("float32",)),
        Peer("softlookup-int4", "ours", "softlookup", "int4", kinds=("decode",), dtypes=("float32",)),
        Peer("torch-sdpa", "torch_sdpa", "torch"),
        Peer("torch-from-numpy", "torch_sdpa", "torch", "from numpy", kinds=("call",)),
        Peer("torch-flex", "torch_flex", "torch", kinds=("prefill", "decode", "train")),
        Peer("onnxruntime", "onnxruntime_gqa", "onnxruntime"),
        Peer("onnxruntime-int8", "onnxruntime_gqa", "onnxruntime", "int8", kinds=("decode",), dtypes=("float32",)),
        Peer("onnxruntime-int4", "onnxruntime_gqa", "onnxruntime", "int4", kinds=("decode",), dtypes=("float32",)),
        Peer("jax", "jax_attention", "jax"),
        Peer("softlookup-cache-f32", "model_transformers", "softlookup", "cache float32", kinds=MODELS),
        Peer("softlookup-cache-bf16", "model_transformers", "softlookup", "cache bfloat16", kinds=MODELS),
        Peer("softlookup-cache-int8", "model_transformers", "softlookup", "cache int8", kinds=MODELS),
        Peer("softlookup-cache-int4", "model_transformers", "softlookup", "cache int4", kinds=MODELS),
        Peer("softlookup-bf16", "model_transformers", "softlookup", "softlookup bfloat16", kinds=MODELS),
        Peer(STOCK, "model_transformers", "transformers", "sdpa float32", kinds=MODELS),
        Peer("transformers-bf16", "model_transformers", "transformers", "sdpa bfloat16", kinds=MODELS),
        Peer("llama.cpp-f16", "model_llama", "llama-cpp-python", "float16", kinds=MODELS, extra="bench-llama"),
        Peer("llama.cpp-q8_0", "model_llama", "llama-cpp-python", "q8_0", kinds=MODELS, extra="bench-llama"),
        Peer("llama.cpp-q4_0", "model_llama", "llama-cpp-python", "q4_0", kinds=MODELS, extra="bench-llama"),
    )
}
SOFTLOOKUP = Peer(OURS, "ours", "softlookup")
SOFTLOOKUP_MODEL = Peer(OURS, "model_transformers", "softlookup", "softlookup float32", kinds=MODELS)
