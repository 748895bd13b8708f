"""Bad input of `attention_vjp` and its pullback: what each message says, and that all reasons come at once."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import softlookup as sl


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


Q, K, V = zeros(2, 4, 3, 8), zeros(2, 2, 5, 8), zeros(2, 2, 5, 6)
OUT, LSE = zeros(2, 4, 3, 6), np.zeros((2, 4, 3))
TENSOR = type("Tensor", (), {"__module__": "torch"})()

PULLBACK: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    ({"dout": [1.0]}, TypeError, ["dout: found a list", "np.asarray(dout"]),
    ({"dout": TENSOR}, TypeError, ["dout: found a torch.Tensor"]),
    ({"dout": OUT.astype(int)}, TypeError, ["dout: found int64", "dout.astype(np.float32)"]),
    (
        {"dout": OUT.astype(float)},
        TypeError,
        ["dout: found float64", "float32", "dout.astype(np.float32)"],
    ),
    ({"dout": OUT.astype(np.float16)}, TypeError, ["dout: found float16"]),
    ({"dout": OUT[..., :1]}, ValueError, ["dout: found shape [2, 4, 3, 1]", "[2, 4, 3, 6]", "np.broadcast_to"]),
    ({"dout": OUT[0]}, ValueError, ["dout: found shape [4, 3, 6]"]),
    ({"dlse": 1.0}, TypeError, ["dlse: found 1.0", "numpy.ndarray"]),
    ({"dlse": LSE.astype(int)}, TypeError, ["dlse: found int64"]),
    ({"dlse": OUT}, ValueError, ["dlse: found shape [2, 4, 3, 6]", "[2, 4, 3], the shape of lse"]),
    ({"wrt": "q"}, TypeError, ["wrt: found 'q'", "wrt=('q',)"]),
    ({"wrt": None}, TypeError, ["wrt: found None", 'wrt=("q", "k", "v")']),
    ({"wrt": ("q", "w")}, ValueError, ["wrt: found 'w'", "'q', 'k', 'v', 'bias', 'sinks'"]),
    ({"wrt": ["bias"]}, ValueError, ["wrt: found 'bias'", "had no bias", "leave 'bias' out"]),
    ({"wrt": ["sinks", 3]}, ValueError, ["2 problems", "wrt: found 'sinks'", "wrt: found 3"]),
    (
        {"dout": OUT[0].astype(int), "dlse": LSE[0], "wrt": "v"},
        TypeError,
        ["4 problems", "dout: found int64", "dout: found shape", "dlse: found shape [4, 3]", "wrt: found 'v'"],
    ),
]


@pytest.mark.parametrize(("changes", "error", "words"), PULLBACK)
def test_bad_slopes(changes: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    _, pullback = sl.attention_vjp(Q, K, V)
    with pytest.raises(error, match=r"softlookup\.pullback") as caught:
        pullback(**{"dout": OUT, **changes})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"q": [[1.0]]}, TypeError, ["q: found a list"]),
        ({"k": K[..., :5]}, ValueError, ["q, k: found widths 8 and 5"]),
        ({"mask": sl.Causal()}, ValueError, ["q_start: found None with N = 3, M = 5", "lower_right"]),
        ({"out_dtype": int}, TypeError, ["out_dtype"]),
        ({"threads": 0}, ValueError, ["threads: found 0"]),
        ({"scale": "x", "sinks": zeros(3)}, TypeError, ["2 problems", "scale", "sinks: found shape [3]"]),
    ],
)
def test_bad_calls(changes: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error, match=r"softlookup\.attention_vjp") as caught:
        sl.attention_vjp(**{"q": Q, "k": K, "v": V, **changes})
    for word in words:
        assert word in str(caught.value)


def test_what_is_taken_as_it_is() -> None:
    half = [x.astype(ml_dtypes.bfloat16) for x in (Q, K, V)]
    out, pullback = sl.attention_vjp(*half, out_dtype="float16")
    assert out.dtype == np.float16
    for dtype in (np.float16, np.float32):
        assert pullback(OUT.astype(dtype), wrt=["v"]).v.dtype == ml_dtypes.bfloat16
    assert pullback(OUT, LSE.astype(ml_dtypes.bfloat16), wrt={"q", "k"}).k.dtype == ml_dtypes.bfloat16
    assert pullback(OUT, wrt=()).q is None
    assert repr(pullback) == "<softlookup.Pullback of q [2, 4, 3, 8], k [2, 2, 5, 8], v [2, 2, 5, 6]>"
    assert repr(pullback(OUT, wrt=())) == "Grads()"
