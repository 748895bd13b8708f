"""The array that a result is written to: which ones are refused, and what becomes of it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import softlookup as sl
from test_checks import F32, call, readonly, zeros


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"out": zeros(2, 4, 3, 5)}, ValueError, ["out: found shape [2, 4, 3, 5]", "[2, 4, 3, 6]"]),
        ({"out": zeros(1, 4, 3, 6)}, ValueError, ["out: found shape"]),
        (
            {"out": zeros(2, 4, 3, 6, dtype=np.float64)},
            TypeError,
            ["out: found float64", "float32", 'out_dtype="float64"'],
        ),
        ({"out": zeros(2, 4, 3, 6), "out_dtype": "float64"}, TypeError, ["out: found float32", "expected float64"]),
        ({"out": readonly(2, 4, 3, 6)}, ValueError, ["read-only", "np.empty((2, 4, 3, 6), np.float32)"]),
        (
            {"out": np.frombuffer(bytearray(577), F32, 144, 1).reshape(2, 4, 3, 6)},
            ValueError,
            ["out: found elements that are not aligned", "np.empty((2, 4, 3, 6), np.float32)"],
        ),
        (
            {"out": np.lib.stride_tricks.as_strided(zeros(200), (2, 4, 3, 6), (64, 24, 24, 4))},
            ValueError,
            ["out: found shape [2, 4, 3, 6] with strides [64, 24, 24, 4]", "each in their own place"],
        ),
        ({"out": [1.0]}, TypeError, ["out: found a list"]),
        (
            {"out": np.lib.stride_tricks.as_strided(zeros(4), (2, 4, 3, 6), (0, 0, 0, 4))},
            ValueError,
            ["out: found shape [2, 4, 3, 6] with strides [0, 0, 0, 4]"],
        ),
    ],
)  # fmt: skip
def test_bad_out(changes: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        call(**changes)
    assert [word for word in words if word not in str(caught.value)] == []


def test_out_shares_no_memory_with_inputs() -> None:
    x = np.ones((1, 1, 4, 8), F32)
    before = x.copy()
    for out in (x, x[..., ::-1, :], x[..., ::-1]):
        with pytest.raises(ValueError, match="out: found memory shared with an input"):
            sl.attention(x, x, x, out=out)
    np.testing.assert_array_equal(x, before)
    room = np.zeros(32, F32)
    with pytest.raises(ValueError, match="out: found memory shared with an input"):
        sl.attention(x, x, x, mask=room.view(bool)[:16].reshape(4, 4), out=room.reshape(x.shape))
    packed = np.ones((1, 1, 4, 16), F32)
    out = packed[..., 8:]
    assert sl.attention(packed[..., :8], packed[..., :8], packed[..., :8], out=out) is out


@pytest.mark.parametrize("dtype", [F32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("out_dtype", ["float32", np.float64, np.dtype(np.float16), "bfloat16", None])
def test_out_dtype(dtype: Any, out_dtype: Any) -> None:
    x = np.ones((1, 1, 4, 8), dtype)
    expected = np.dtype(dtype if out_dtype is None else ml_dtypes.bfloat16 if out_dtype == "bfloat16" else out_dtype)
    found = sl.attention(x, x, x, out_dtype=out_dtype)
    assert found.dtype == expected
    np.testing.assert_array_equal(found.astype(F32), 1)
    out = np.zeros((1, 1, 4, 8), expected)
    assert sl.attention(x, x, x, out=out, out_dtype=out_dtype) is out
    np.testing.assert_array_equal(out.astype(F32), 1)


def test_out_is_untouched_where_a_predicate_raises() -> None:
    def late(b: np.ndarray, h: np.ndarray, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        if h.max() > 0:
            raise ZeroDivisionError
        return j <= i

    x = np.ones((1, 4, 300, 8), F32)
    out = np.full(x.shape, 7, F32)
    with pytest.raises(ZeroDivisionError):
        sl.attention(x, x, x, mask=sl.Causal() & sl.Predicate(late), out=out, threads=1)
    assert (out == 7).all()
    assert sl.attention(x, x, x, mask=sl.Predicate(lambda b, h, i, j: j <= i), out=out) is out
    np.testing.assert_allclose(out, 1, rtol=1e-6)


@pytest.mark.parametrize(
    "out", [zeros(5, 3, 4, 6).transpose(1, 2, 0, 3)[:2, :, ::-1][:, :, 1:4], zeros(9, 2, 4, 3, 6)[::9][0]]
)
def test_out_of_any_order(out: np.ndarray) -> None:
    assert call(out=out) is out
