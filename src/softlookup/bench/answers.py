"""Whether a contender computed what was asked: each answer beside ours, ours beside float64 in a few rows."""

from __future__ import annotations

import math

import numpy as np

from softlookup.bench.peers import Answers
from softlookup.bench.workloads import Inputs

# Largest difference, as a share of the largest number of the array: one rounding to the type, and for the half types
# the rounding of the weights and, in some peers, of every partial sum.
TOLERANCES = {"float32": 1e-4, "float64": 1e-10, "float16": 1e-2, "bfloat16": 4e-2, "int8": 1e-3, "int4": 2e-2}
"""By type. What int8 and int4 hold meets 16-bit and 8-bit codes of queries and weights."""
ROWS_CHECKED = 6


def difference(answer: Answers, expected: Answers) -> float:
    """The largest difference of two answers, as a share of the largest expected number of each array."""
    worst = 0.0
    for name, right in expected.items():
        found = answer[name]
        if found.shape != right.shape:
            return math.inf
        gap = float(np.abs(found - right).max(initial=0.0)) / max(float(np.abs(right).max(initial=0.0)), 1e-30)
        worst = max(worst, gap if math.isfinite(gap) else math.inf)
    return worst


def difference_from_float64(inputs: Inputs, answer: Answers) -> float:
    """Our output beside the formula in float64, in rows spread over the workload."""
    workload = inputs.workload
    group = workload.heads // workload.key_heads
    places = np.linspace(0, workload.batch * workload.heads * workload.queries - 1, ROWS_CHECKED).astype(int)
    found, right = [], []
    for item, head, row in zip(*np.unravel_index(places, answer["out"].shape[:3]), strict=True):
        first, last = _visible(inputs, int(item), int(row))
        keys = inputs.k[item, head // group, first:last].astype(np.float64)
        scores = keys @ inputs.q[item, head, row].astype(np.float64) / math.sqrt(workload.width)
        weights = np.exp(scores - scores.max())
        values = inputs.v[item, head // group, first:last].astype(np.float64)
        right.append(weights @ values / weights.sum())
        found.append(answer["out"][item, head, row])
    return difference({"out": np.array(found)}, {"out": np.array(right)})


def _visible(inputs: Inputs, item: int, row: int) -> tuple[int, int]:
    """First and one past the last key that a row sees."""
    workload = inputs.workload
    if workload.window is not None:
        return max(0, row + 1 - workload.window), row + 1
    return 0, row + 1 if workload.causal else workload.key_lengths[item]
