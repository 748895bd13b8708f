"""What the demo shows with NumPy alone: a worked lookup, masks, entropy, speed. Everything is plain data (JSON)."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import softlookup as sl

Floats: TypeAlias = NDArray[Any]

PICTURE_SIZE = 10
SPEED_ROUNDS = 5
SHARPNESS = (0.0, 0.5, 1.0, 2.0, 4.0, 16.0)


def basics() -> dict[str, Any]:
    """Run every part; a few seconds on two slow cores."""
    return {"lookup": worked_lookup(), "masks": mask_pictures(), "entropy": entropy_rows(), "speed": speed()}


def worked_lookup() -> dict[str, Any]:
    """One query on four keys, small enough to check by hand."""
    query = np.array([[2.0, 1.0]])
    keys = np.array([[1.0, 0.0], [0.0, 2.0], [2.0, 2.0], [-1.0, 1.0]])
    values = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    return {
        "query": query[0].tolist(),
        "keys": keys.tolist(),
        "values": values.tolist(),
        "scores": (keys @ query[0]).tolist(),
        "scaled_scores": (keys @ query[0] / math.sqrt(2)).tolist(),
        "weights": sl.attention_weights(query, keys, values)[0].tolist(),
        "out": sl.attention(query, keys, values)[0].tolist(),
        "unscaled_weights": sl.attention_weights(query, keys, values, scale=1.0)[0].tolist(),
    }


def mask_pictures() -> list[dict[str, Any]]:
    """Three masks as rows of text, and the share of the scores that is computed at all."""
    size = PICTURE_SIZE
    padded = sl.Lengths([size - 3], padding_side="left")
    named: list[tuple[str, sl.Mask]] = [
        ("Causal()", sl.Causal()),
        ("Window(3, 0)", sl.Window(3, 0)),
        ("Causal() & left padding", sl.Causal() & padded),
    ]
    pictures = []
    for name, mask in named:
        visible = mask.dense(1, 1, size, size, 0, 0)[0, 0]
        rows = ["".join("■" if seen else "·" for seen in row) for row in visible]
        pictures.append({"name": name, "rows": rows, "visible": int(visible.sum()), "of": size * size})
    return pictures


def entropy_rows() -> list[dict[str, float]]:
    """The same query made sharper and sharper: from a mean over the keys to a plain dictionary lookup."""
    generator = np.random.default_rng(0)
    query, keys, values = (generator.standard_normal((rows, 64), dtype=np.float32) for rows in (1, 256, 256))
    rows = []
    for beta in SHARPNESS:
        _, stats = sl.attention(query, keys, values, scale=beta / 8.0, stats=True)
        entropy = float(stats.entropy[0])
        rows.append(
            {
                "beta": beta,
                "entropy_nats": entropy,
                "normalized_entropy": float(stats.normalized_entropy[0]),
                "effective_keys": math.exp(entropy),
                "max_weight": float(stats.max_weight[0]),
                "jacobian_trace": float(stats.jacobian_trace[0]),
            }
        )
    return rows


def speed() -> list[dict[str, Any]]:
    """softlookup.attention beside NumPy's own formula: medians of interleaved runs, float32."""
    generator = np.random.default_rng(1)

    def arrays(*shapes: tuple[int, ...]) -> list[Floats]:
        return [generator.standard_normal(shape, dtype=np.float32) for shape in shapes]

    return [
        _race("causal, q k v [8, 1024, 64]", *arrays((8, 1024, 64), (8, 1024, 64), (8, 1024, 64)), causal=True),
        _race(
            "q [32, 1, 128], k v [8, 4096, 128]", *arrays((32, 1, 128), (8, 4096, 128), (8, 4096, 128)), causal=False
        ),
    ]


def numpy_attention(q: Floats, k: Floats, v: Floats, *, causal: bool) -> Floats:
    """The formula as one writes it with NumPy: q [Hq, N, d_k], k [Hk, M, d_k], v [Hk, M, d_v] -> [Hq, N, d_v]."""
    heads, queries, width = q.shape
    grouped = q.reshape(k.shape[0], -1, width)
    scores = (grouped @ k.swapaxes(-1, -2)).reshape(heads, queries, -1)
    scores *= np.float32(1 / math.sqrt(width))
    if causal:
        scores += np.triu(np.full((queries, queries), -np.inf, dtype=np.float32), 1)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return (scores.reshape(k.shape[0], -1, k.shape[1]) @ v).reshape(heads, queries, -1)


def _race(name: str, q: Floats, k: Floats, v: Floats, *, causal: bool) -> dict[str, Any]:
    def ours() -> Floats:
        return sl.attention(q, k, v, mask=sl.Causal() if causal else None)

    def numpy_formula() -> Floats:
        return numpy_attention(q, k, v, causal=causal)

    difference = float(np.abs(ours() - numpy_formula()).max())
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(SPEED_ROUNDS):
        for function, taken in zip((ours, numpy_formula), seconds, strict=True):
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    softlookup_seconds, numpy_seconds = (statistics.median(taken) for taken in seconds)
    return {
        "name": name,
        "softlookup_seconds": softlookup_seconds,
        "numpy_seconds": numpy_seconds,
        "ratio": numpy_seconds / softlookup_seconds,
        "largest_difference": difference,
    }
