"""The rows of the report: plain data, as they go into the JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LIMIT = "limit"  # the contender that is the machine
# Of a model, whose types are compared in one workload: the machine's limit, and what takes no part in the lookups.
LIMITS = {"float32": LIMIT, "bfloat16": f"{LIMIT}-bf16"}
NO_ATTENTION = {"float32": "no-attention", "bfloat16": "no-attention-bf16"}
UNITS = {"prefill": "GFLOP/s", "train": "GFLOP/s", "decode": "GB/s", "call": "us"}
MODEL_UNITS = {"prefill": "tokens/s", "decode": "ms/token"}


@dataclass(frozen=True)
class Row:
    """One contender in one workload.

    Attributes
    ----------
    workload, detail, dtype, kind, contender
        What was run, and by whom; "limit" is the machine.
    missing
        Why there is no time, or None.
    seconds, samples_seconds
        Median of the samples, and the samples, of one call.
    rate, unit
        GFLOP/s of visible pairs, GB/s of the contender's own cache, or microseconds a call; of a model tokens/s or
        ms/token.
    ours_is_faster
        Its time over ours: median over the rounds. A bfloat16 model is compared with ours in bfloat16.
    share_of_limit
        The time at the machine's limits over its time: median over the rounds.
    difference
        Largest difference from the right answer, as a share of the largest number: ours from float64 in some rows, a
        peer's from ours, a quantised cache's from the lookup in its own codes; of a model its logits from those of the
        stock float32 model.
    difference_from_ours
        The same, always from ours: for a quantised cache that is what the codes cost.
    agrees
        Whether `difference` is within the tolerance of the type (and, of a float32 model, every token the same).
    same_tokens
        Of a model: how many tokens it chooses like the stock float32 model, each after the same text, and of how many.
    limits
        For the limit: medians of what was measured, with units in the names.
    note
        How it was configured.
    """

    workload: str
    detail: str
    dtype: str
    kind: str
    contender: str
    missing: str | None = None
    seconds: float | None = None
    samples_seconds: tuple[float, ...] = ()
    rate: float | None = None
    unit: str | None = None
    ours_is_faster: float | None = None
    share_of_limit: float | None = None
    difference: float | None = None
    difference_from_ours: float | None = None
    agrees: bool | None = None
    same_tokens: tuple[int, int] | None = None
    limits: dict[str, float] | None = None
    extra_bytes: int | None = None
    note: str = ""


def is_limit(contender: str) -> bool:
    """Whether the name stands for the machine."""
    return contender in LIMITS.values()


def ratio(times: Sequence[float], of: Sequence[float]) -> float:
    """Median over the rounds of the ratio within each."""
    return statistics.median(one / other for one, other in zip(times, of, strict=False))
