"""The rows of the model workload, made of its samples and of everyone's logits."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softlookup.bench.answers import difference
from softlookup.bench.limit import LimitSampler
from softlookup.bench.model.reader import Reader
from softlookup.bench.peers import OURS, STOCK
from softlookup.bench.rows import LIMITS, MODEL_UNITS, NO_ATTENTION, Row, ratio
from softlookup.bench.workloads import Workload

# Of the logits, as a share of the largest; by the type of the cache (softlookup.bench.model.run says why;
# four bits explain more).
HALF, NIBBLE = 1e-1, 5e-1
TOLERANCES = {
    "float32": 1e-4,
    "bfloat16": HALF,
    "float16": HALF,
    "q8_0": HALF,
    "int8": HALF,
    "q4_0": NIBBLE,
    "int4": NIBBLE,
}
OURS_IN = {"float32": OURS, "bfloat16": f"{OURS}-bf16"}

Seconds = Mapping[str, Sequence[float]]


@dataclass
class Result:
    """What a part of the workload, "prefill" or "decode", gave: seconds, and logits [tokens, vocabulary] of everyone.

    The limits are those of the lookups alone, by type; `seconds` has their samples too.
    """

    part: str
    workload: Workload
    seconds: Seconds
    limits: Mapping[str, LimitSampler]
    logits: Mapping[str, NDArray[np.float32]]
    limit_seconds: dict[str, list[float]] = field(init=False)
    """Time without attention and the least time of the lookups, by type."""

    def __post_init__(self) -> None:
        self.limit_seconds = {
            dtype: [
                nothing + lookups
                for nothing, lookups in zip(self.seconds[NO_ATTENTION[dtype]], self.seconds[LIMITS[dtype]], strict=True)
            ]
            for dtype in self.limits
        }

    def rows(self, readers: Mapping[str, Reader], absent: Mapping[str, str]) -> list[Row]:
        """The limits, the models without attention, ours and the peers."""
        rows = [self._limit_row(dtype) for dtype in self.limits]
        for name, reader in readers.items():
            row = self._bare_row if name in NO_ATTENTION.values() else self._contender_row
            rows.append(row(name, reader))
        return rows + [self._row(name, missing=reason) for name, reason in absent.items()]

    def _limit_row(self, dtype: str) -> Row:
        samples = self.limit_seconds[dtype]
        measured = {"without_attention_seconds": statistics.median(self.seconds[NO_ATTENTION[dtype]])}
        measured["lookups_seconds"] = statistics.median(self.seconds[LIMITS[dtype]])
        limit = self.limits[dtype]
        limits = measured | limit.medians()
        return self._timed(LIMITS[dtype], samples, limits=limits, note="; ".join(limit.doubts()))

    def _bare_row(self, name: str, reader: Reader) -> Row:
        return self._timed(name, self.seconds[name], note=reader.note)

    def _contender_row(self, name: str, reader: Reader) -> Row:
        own = self.seconds[name]
        ours = self.seconds.get(OURS_IN.get(reader.dtype, OURS), self.seconds[OURS])
        limit = self.limit_seconds.get(reader.dtype)
        gap = difference({"logits": self.logits[name]}, {"logits": self.logits[STOCK]})
        right, found = (self.logits[which].argmax(-1) for which in (STOCK, name))
        same = int((found == right).sum())
        exact = reader.dtype != "float32" or same == len(right)
        return self._timed(
            name,
            own,
            ours_is_faster=ratio(own, ours),
            share_of_limit=None if limit is None else ratio(limit, own),
            difference=gap,
            agrees=gap <= TOLERANCES[reader.dtype] and exact,
            same_tokens=(same, len(right)),
            note=reader.note,
        )

    def _timed(self, name: str, samples: Sequence[float], **fields: Any) -> Row:
        seconds = statistics.median(samples)
        rate = self.workload.keys / seconds if self.part == "prefill" else 1e3 * seconds
        unit = MODEL_UNITS[self.part]
        return self._row(name, seconds=seconds, samples_seconds=tuple(samples), rate=rate, unit=unit, **fields)

    def _row(self, name: str, **fields: Any) -> Row:
        return Row(self.workload.name, self.part, self.workload.dtype, self.workload.kind, name, **fields)
