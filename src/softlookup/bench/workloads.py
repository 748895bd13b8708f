"""The workloads by name, and what each of them counts.

Operations are those of the visible pairs of a query and a key alone, 4 d each (a product with K, a product with V);
training is 3.5 times that (the backward pass executes five products of the same size). Bytes are those of the keys and
values that the rows see, once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import softlookup as sl
from softlookup._quantize import GROUP_COLUMNS
from softlookup._types import NAMES, dtype_of

Kind = Literal["prefill", "decode", "train", "call", "memory", "model"]

TRAINING_FACTOR = 3.5
SEED = 20261129
TWO_TYPES = ("float32", "bfloat16")
CACHE_TYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Workload:
    """One line of the table: q [batch, heads, queries, width], k and v [batch, key_heads, keys, width].

    The batch of a model workload are the layers; it is every lookup that the model makes while it reads its prompt.
    """

    name: str
    detail: str
    dtype: str
    kind: Kind
    heads: int
    key_heads: int
    queries: int
    keys: int
    width: int
    batch: int = 1
    causal: bool = False
    window: int | None = None
    """Keys that a row sees, its own included; causal."""
    lengths: tuple[int, ...] | None = None
    """Keys that each batch item has; all of them where it is None."""
    peers: tuple[str, ...] | None = None
    """The only peers that it is run with; None is all that were asked for."""

    @property
    def label(self) -> str:
        """name/detail/dtype: what selects this line alone."""
        return f"{self.name}/{self.detail}/{self.dtype}"

    @property
    def key_lengths(self) -> tuple[int, ...]:
        """Keys that each batch item has."""
        return self.lengths or (self.keys,) * self.batch

    @property
    def pairs(self) -> int:
        """Visible pairs of a query head's row and a key, over all batch items and query heads."""
        if self.window is not None:
            rows = np.minimum(np.arange(1, self.queries + 1), self.window)
            return int(rows.sum()) * self.heads * self.batch
        if self.causal:
            return self.queries * (self.queries + 1) // 2 * self.heads * self.batch
        return self.queries * sum(self.key_lengths) * self.heads

    @property
    def operations(self) -> float:
        """Floating-point operations, a multiply-add being two."""
        return 4 * self.width * self.pairs * (TRAINING_FACTOR if self.kind == "train" else 1)

    @property
    def cache_elements(self) -> int:
        """Elements of K and V that are read."""
        return 2 * self.key_heads * self.width * sum(self.key_lengths)

    @property
    def cache_bytes(self) -> int:
        """Bytes of K and V that are read, in the workload's own type."""
        return self.cache_elements * dtype_of(NAMES.index(self.dtype)).itemsize

    def coded_bytes(self, dtype: str) -> int:
        """Bytes of K and V that are read as codes, int8 or int4, with the float32 scales of each row of both."""
        groups = 1 if dtype == "int8" else -(-self.width // GROUP_COLUMNS)
        scales = (groups + 1) * self.key_heads * sum(self.key_lengths)
        return self.cache_elements // (1 if dtype == "int8" else 2) + 4 * scales

    @property
    def mask(self) -> sl.Mask | None:
        """As softlookup takes it."""
        if self.window is not None:
            return sl.Window(self.window - 1)
        if self.causal:
            return sl.Causal()
        return None if self.lengths is None else sl.Lengths(list(self.lengths))

    def dense_mask(self) -> NDArray[np.bool_] | None:
        """True means may attend: [batch or 1, 1, queries, keys], or None where everything is visible."""
        mask = self.mask
        return None if mask is None else mask.dense(self.batch, 1, self.queries, self.keys)


@dataclass(frozen=True, eq=False)
class Inputs:
    """The arrays of a workload, the same for every contender: standard normal numbers, rounded to its type."""

    workload: Workload
    q: NDArray[Any]
    k: NDArray[Any]
    v: NDArray[Any]
    dout: NDArray[Any] | None

    @classmethod
    def of(cls, workload: Workload) -> Inputs:
        """Make the arrays; the same ones every time."""
        random = np.random.default_rng(SEED)
        dtype = dtype_of(NAMES.index(workload.dtype))
        rows = (workload.batch, workload.heads, workload.queries, workload.width)
        columns = (workload.batch, workload.key_heads, workload.keys, workload.width)

        def normal(shape: tuple[int, ...]) -> NDArray[Any]:
            return random.standard_normal(shape, np.float32).astype(dtype, copy=False)

        q, k, v = normal(rows), normal(columns), normal(columns)
        return cls(workload, q, k, v, normal(rows) if workload.kind == "train" else None)


def _prefill(name: str, width: int, queries: int, dtypes: Iterable[str]) -> list[Workload]:
    return [
        Workload(name, detail, dtype, "prefill", 8, 8, queries, queries, width, causal=detail == "causal")
        for dtype in dtypes
        for detail in ("full", "causal")
    ]


def _train(name: str, width: int) -> list[Workload]:
    return [
        Workload(name, "causal", dtype, "train", 8, 8, 2048, 2048, width, causal=True)
        for dtype in ("float32", "bfloat16")
    ]


def _decode(name: str, heads: int, key_heads: int, width: int, keys: Iterable[int]) -> list[Workload]:
    return [
        Workload(name, str(count), dtype, "decode", heads, key_heads, 1, count, width)
        for count in keys
        for dtype in CACHE_TYPES
    ]


def _decode_batch() -> list[Workload]:
    lengths = tuple(int(length) for length in np.linspace(500, 8000, 8).round())
    return [
        Workload("decode-batch", "500-8000", dtype, "decode", 32, 8, 1, 8000, 128, batch=8, lengths=lengths)
        for dtype in TWO_TYPES
    ]


def _sweeps() -> list[Workload]:
    """What the plots are made of: time against N, bandwidth against M, memory against N."""
    sdpa = ("torch-sdpa",)
    full = [
        Workload("time-full", str(n), "float32", "prefill", 2, 2, n, n, 64, peers=sdpa)
        for n in (512, 1024, 2048, 4096, 8192)
    ]
    window = [
        Workload("time-window", str(n), "float32", "prefill", 2, 2, n, n, 64, causal=True, window=256, peers=())
        for n in (2048, 4096, 8192, 16384, 32768)
    ]
    bandwidth = [
        Workload("bandwidth", str(m), dtype, "decode", 32, 8, 1, m, 128, peers=sdpa)
        for dtype in TWO_TYPES
        for m in (1024, 2048, 4096, 8192, 16384, 32768, 65536)
    ]
    memory = [
        Workload("memory", f"{what}-{n}", "float32", "memory", 1, 1, n, n, 64, peers=())
        for what in ("forward", "backward")
        for n in (8192, 16384, 32768, 65536, 131072)
    ]
    return full + window + bandwidth + memory


SWEEPS = ("time-full", "time-window", "bandwidth", "memory")
LONG = ("model-8k", *SWEEPS)  # minutes: run where they are named, or the report goes into a folder

WORKLOADS: tuple[Workload, ...] = (
    *_prefill("prefill-64", 64, 2048, ("float32", "bfloat16", "float16", "float64")),
    *_prefill("prefill-128", 128, 2048, TWO_TYPES),
    *_prefill("prefill-long", 64, 4096, ("float32",)),
    Workload("window-256", "causal", "float32", "prefill", 8, 8, 4096, 4096, 64, causal=True, window=256),
    *_decode("decode-8b", 32, 8, 128, (4096, 32768)),
    *_decode("decode-small", 9, 3, 64, (8192, 65536)),
    *_decode("decode-mha", 8, 8, 128, (32768,)),
    *_decode_batch(),
    *_train("train-64", 64),
    *_train("train-128", 128),
    Workload("tiny", "full", "float32", "call", 1, 1, 16, 16, 64),
    Workload("model-8k", "7900", "float32", "model", 9, 3, 7900, 7900, 64, batch=30, causal=True),
    *_sweeps(),
)


def names() -> list[str]:
    """The names of all workloads, in the order of the table."""
    return list(dict.fromkeys(workload.name for workload in WORKLOADS))


def select(wanted: Iterable[str]) -> list[Workload]:
    """The lines that are called so, by name or by name/detail/dtype, in the order of the table; all for nothing.

    Raises
    ------
    ValueError
        If nothing has one of these names; the message lists those that there are.

    Examples
    --------
    >>> from softlookup.bench.workloads import select
    >>> [workload.label for workload in select(["tiny", "prefill-long"])]
    ['prefill-long/full/float32', 'prefill-long/causal/float32', 'tiny/full/float32']
    """
    asked = set(wanted)
    unknown = asked - set(names()) - {workload.label for workload in WORKLOADS}
    if unknown:
        raise ValueError(
            f"no workload is called {', '.join(sorted(unknown))}; there are {', '.join(names())}, "
            f"and name/detail/dtype for one line"
        )
    return [w for w in WORKLOADS if not asked or w.name in asked or w.label in asked]
