"""Bad input: what each message says, that all reasons come at once, and that nothing is computed before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import softlookup as sl
from softlookup._attention import forced_isa

F32 = np.float32
BAD = float("nan")


def zeros(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.zeros(shape, dtype)


Q, K, V = zeros(2, 4, 3, 8), zeros(2, 2, 5, 8), zeros(2, 2, 5, 6)
SQUARE = zeros(2, 4, 5, 8)


def call(**changes: Any) -> Any:
    """A good call with some arguments changed."""
    arguments = {"q": Q, "k": K, "v": V, **changes}
    return sl.attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def foreign(module: str, name: str) -> object:
    """An object that looks like another framework's array, without that framework."""
    return type(name, (), {"__module__": module})()


Bad = tuple[dict[str, Any], type[Exception], list[str]]

ARRAYS: list[Bad] = [
    ({"q": [[1.0]]}, TypeError, ["q: found a list", "numpy.ndarray", "np.asarray(q, dtype=np.float32)"]),
    ({"k": None}, TypeError, ["k: found None", "np.asarray(k"]),
    (
        {"q": foreign("torch", "Tensor")},
        TypeError,
        ["a torch.Tensor", "q.numpy()", "view(torch.uint16)", "softlookup.transformers"],
    ),
    ({"q": foreign("torch.nn.parameter", "Parameter")}, TypeError, ["q.numpy()", "softlookup.transformers"]),
    ({"v": foreign("jaxlib._jax", "ArrayImpl")}, TypeError, ["a jaxlib.ArrayImpl", "np.asarray(v)"]),
    ({"q": np.ma.masked_array(Q)}, TypeError, ["MaskedArray", "filled", "mask="]),
    ({"q": zeros(3, 8).view(np.matrix)}, TypeError, ["matrix", "np.asarray(q)"]),
    (
        {"q": zeros(2, 4, 3, 8, dtype=np.int64)},
        TypeError,
        ["q: found int64 [2, 4, 3, 8]", "float32", "q.astype(np.float32)"],
    ),
    ({"q": zeros(2, 4, 3, 8, dtype=bool)}, TypeError, ["q: found bool", "q.astype(np.float32)"]),
    ({"q": zeros(2, 4, 3, 8, dtype=object)}, TypeError, ["q: found object"]),
    ({"q": zeros(2, 4, 3, 8, dtype=np.complex64)}, TypeError, ["complex64", "q.real"]),
    ({"q": zeros(2, 4, 3, 8, dtype=np.longdouble)}, TypeError, [str(np.dtype(np.longdouble)), "q.astype(np.float64)"]),
    ({"q": zeros(2, 4, 3, 8, dtype=np.uint16)}, TypeError, ["uint16", "q.view(ml_dtypes.bfloat16)"]),
    ({"q": Q.astype(Q.dtype.newbyteorder())}, TypeError, ["q.dtype.newbyteorder"]),
    ({"k": K.astype(np.float64)}, TypeError, ["q, k, v", "float32, float64, float32", "one type", "astype"]),
    ({"v": V.astype(ml_dtypes.bfloat16)}, TypeError, ["float32, float32, bfloat16"]),
    ({"q": np.frombuffer(bytes(97), F32, 24, 1).reshape(1, 1, 3, 8)}, ValueError, ["aligned", "q.copy()"]),
    ({"q": zeros(8)}, ValueError, ["q: found shape [8]", "at least 2 axes", "q[None, :]"]),
    ({"q": zeros(2, 4, 3, 7)}, ValueError, ["q, k: found widths 7 and 8", "[2, 4, 3, 7]", "d_k"]),
    ({"v": zeros(2, 2, 4, 6)}, ValueError, ["k, v: found 5 keys and 4 values", "one value for each key"]),
    ({"v": zeros(2, 4, 5, 6)}, ValueError, ["k, v: found 2 and 4 heads", "the same number of heads"]),
    ({"q": zeros(2, 3, 3, 8)}, ValueError, ["3 query heads and 2 key heads", "multiple", "swapaxes(-3, -2)"]),
    ({"k": zeros(2, 0, 5, 8), "v": zeros(2, 0, 5, 6)}, ValueError, ["4 query heads and 0 key heads"]),
    (
        {"q": zeros(*(1,) * 30, 4, 3, 8)},
        ValueError,
        ["q: found 33 axes", "at most 32", "q.reshape(-1, *q.shape[-3:])"],
    ),
    ({"q": zeros(3, 4, 3, 8)}, ValueError, ["leading axes [3], [2] and [2]", "broadcast"]),
]  # fmt: skip

NUMBERS: list[Bad] = [
    ({"scale": BAD}, ValueError, ["scale: found nan", "finite", "1/sqrt(d_k)"]),
    ({"scale": np.inf}, ValueError, ["scale: found inf"]),
    ({"scale": 10**400}, ValueError, ["scale: found 1000", "finite"]),
    ({"scale": 1e39}, ValueError, ["scale: found 1e+39", "float64"]),
    ({"scale": 1e-38}, ValueError, ["scale: found 1e-38", "normal numbers of float32", "1.18e-38"]),
    ({"scale": -5e-324}, ValueError, ["scale: found -5e-324", "float64"]),
    ({"scale": "1"}, TypeError, ["scale: found '1'", "real number"]),
    ({"scale": True}, TypeError, ["scale: found True"]),
    ({"scale": 1j}, TypeError, ["scale: found 1j"]),
    ({"scale": np.ones(1)}, TypeError, ["scale: found float64 [1]"]),
    ({"q": zeros(1, 1, 0), "k": zeros(1, 1, 0), "v": zeros(1, 1, 2)}, ValueError, ["scale: found None with d_k = 0"]),
    ({"softcap": 0.0}, ValueError, ["softcap: found 0.0", "> 0", "None is no softcap"]),
    ({"softcap": -1}, ValueError, ["softcap: found -1"]),
    ({"softcap": BAD}, ValueError, ["softcap: found nan"]),
    ({"softcap": np.inf}, ValueError, ["softcap: found inf"]),
    ({"softcap": 1e-45}, ValueError, ["softcap: found 1e-45", "float64"]),
    ({"softcap": "2"}, TypeError, ["softcap: found '2'"]),
    ({"k_start": 1.0}, TypeError, ["k_start: found 1.0", "an int"]),
    ({"k_start": True}, TypeError, ["k_start: found True"]),
    ({"k_start": 2**63}, ValueError, ["k_start: found 9223372036854775808", "within 2**60"]),
    ({"k_start": 2**60 + 1}, ValueError, ["k_start: found 1152921504606846977", "within 2**60"]),
    ({"threads": 0}, ValueError, ["threads: found 0", "from 1 to 1024", "None takes the default"]),
    ({"threads": -2}, ValueError, ["threads: found -2"]),
    ({"threads": 1025}, ValueError, ["threads: found 1025"]),
    ({"threads": 2.0}, TypeError, ["threads: found 2.0"]),
    ({"threads": True}, TypeError, ["threads: found True"]),
    ({"stats": 1}, TypeError, ["stats: found 1", "True or False"]),
    ({"out_dtype": np.int32}, TypeError, ["out_dtype", "float32, float64, float16 or bfloat16"]),
    ({"out_dtype": "float31"}, TypeError, ["out_dtype: found 'float31'"]),
]  # fmt: skip

MASKS: list[Bad] = [
    ({"mask": np.eye(3, 5)}, TypeError, ["mask: found float64 [3, 5]", "bias=", "mask.astype(bool)", "bool array"]),
    ({"mask": np.eye(3, 5, dtype=np.int8)}, TypeError, ["mask.astype(bool)", "bias="]),
    ({"mask": np.full((3, 5), -np.inf)}, TypeError, ["mask: found float64", "bias="]),
    ({"mask": np.arange(15).reshape(3, 5)}, TypeError, ["mask: found int64", "mask != 0"]),
    ({"mask": [[True]]}, TypeError, ["mask: found a list", "np.asarray(mask, dtype=bool)"]),
    ({"mask": foreign("torch", "Tensor")}, TypeError, ["mask: found a torch.Tensor", "mask.numpy()"]),
    ({"mask": np.ma.masked_array(np.ones((3, 5), bool))}, TypeError, ["mask: found", "MaskedArray"]),
    ({"mask": True}, TypeError, ["mask: found True", "softlookup.Causal()"]),
    ({"mask": "causal"}, TypeError, ["mask: found 'causal'", "softlookup.Causal()"]),
    ({"mask": sl.Causal}, TypeError, ["the class Causal", "softlookup.Causal(...)"]),
    ({"mask": np.ones((3, 4), bool)}, ValueError, ["mask: found shape [3, 4]", "[N, M] = [3, 5]"]),
    ({"mask": np.ones((2, 3, 5), bool)}, ValueError, ["mask: found shape [2, 3, 5]", "mask[:, None]", "mask[None]"]),
    ({"mask": np.ones(5, bool)}, ValueError, ["mask: found shape [5]", "fix: mask[None]"]),
    (
        {"mask": sl.Causal() & sl.Dense(np.ones((2, 1, 3, 6), bool)), "q_start": 0},
        ValueError,
        ["[2, 1, 3, 6]", "[2, 4, 3, 5]"],
    ),
    (
        {"mask": sl.Causal()},
        ValueError,
        ["q_start: found None", "N = 3, M = 5", "Causal()", '"upper_left" (0)', '"lower_right" (2)'],
    ),
    ({"mask": ~sl.Window(1) | sl.Full() & sl.Lengths(1)}, ValueError, ["q_start", "upper_left", "lower_right"]),
    ({"mask": sl.Predicate(lambda b, h, i, j: j <= i)}, ValueError, ["q_start: found None", "Predicate"]),
    (
        {"q": SQUARE, "mask": sl.Causal(), "k_start": 7},
        ValueError,
        ["k_start = 7", '"upper_left" (7)', '"lower_right" (7)'],
    ),
    ({"mask": sl.Lengths(6)}, ValueError, ["Lengths keys: found lengths from 6 to 6", "M = 5"]),
    ({"mask": sl.Lengths([3, -1])}, ValueError, ["Lengths keys: found lengths from -1 to 3"]),
    ({"mask": sl.Lengths(5, queries=4)}, ValueError, ["Lengths queries: found lengths from 4 to 4", "N = 3"]),
    ({"mask": sl.Lengths([1, 2, 3])}, ValueError, ["Lengths keys: found shape [3]", "batch axes [2]", "q[:, None]"]),
    ({"q_start": "lower_left"}, ValueError, ["q_start: found 'lower_left'", "upper_left", "lower_right"]),
    ({"q_start": 1.0}, TypeError, ["q_start: found 1.0", "an int or int array"]),
    ({"q_start": np.zeros(2)}, TypeError, ["q_start: found float64 [2]"]),
    ({"q_start": np.zeros(3, int)}, ValueError, ["q_start: found shape [3]", "batch axes [2]"]),
    ({"q_start": np.zeros((2, 1), int)}, ValueError, ["q_start: found shape [2, 1]"]),
    ({"q_start": True}, TypeError, ["q_start: found True"]),
    ({"q_start": 2**63}, TypeError, ["q_start"]),
    ({"q_start": np.array([2**60 + 1, 0])}, ValueError, ["q_start", "within 2**60"]),
    ({"q_start": -(2**60) - 1}, ValueError, ["q_start", "within 2**60"]),
    ({"q_start": np.ones((1,) * 40 + (2,), int)}, ValueError, ["q_start: found shape [1,", "batch axes [2]"]),
    ({"q_start": np.zeros(2, np.uint64)}, TypeError, ["q_start: found uint64 [2]"]),
]  # fmt: skip

BIASES: list[Bad] = [
    ({"bias": np.ones((3, 5), bool)}, TypeError, ["bias: found bool [3, 5]", "mask="]),
    (
        {"bias": zeros(3, 5, dtype=np.float64)},
        TypeError,
        ["bias: found float64 [3, 5]", "float32", "bias.astype(np.float32)"],
    ),
    ({"bias": zeros(3, 5, dtype=np.float16)}, TypeError, ["bias: found float16"]),
    ({"bias": zeros(3, 5, dtype=np.int64)}, TypeError, ["bias: found int64"]),
    ({"bias": [[0.0]]}, TypeError, ["bias: found a list"]),
    ({"bias": zeros(3, 6)}, ValueError, ["bias: found shape [3, 6]", "[3, 5]"]),
    ({"bias": zeros(4, 3, 5)}, ValueError, ["bias: found shape [4, 3, 5]", "bias[:, None]", "bias[None]"]),
    ({"bias": zeros(3, 4, 3, 5)}, ValueError, ["bias: found shape [3, 4, 3, 5]", "[2, 4, 3, 5]"]),
    ({"sinks": zeros(2)}, ValueError, ["sinks: found shape [2]", "[Hq] = [4]"]),
    ({"sinks": zeros(4, 1)}, ValueError, ["sinks: found shape [4, 1]"]),
    ({"sinks": np.array([0, 0, np.inf, 0], F32)}, ValueError, ["sinks: found +inf", "-inf for no sink"]),
    ({"sinks": np.array([0, -np.inf, -1e39, 1])}, ValueError, ["sinks: found magnitudes up to 1e+39", "3.4e+38"]),
    ({"sinks": [0.0] * 4}, TypeError, ["sinks: found a list"]),
    ({"sinks": zeros(4, dtype=np.int64)}, TypeError, ["sinks: found int64"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "words"), ARRAYS + NUMBERS + MASKS + BIASES)
def test_message_and_nothing_written(changes: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    out = np.full((2, 4, 3, 6), 7, F32)
    with pytest.raises(error) as caught:
        call(**changes, out=out)
    message = str(caught.value)
    assert type(caught.value) is error
    assert message.startswith("softlookup.attention: ")
    assert all(part in message for part in ("found", "expected", "fix")), message
    assert [word for word in words if word not in message] == [], message
    assert (out == 7).all()


@pytest.mark.parametrize(("changes", "error", "words"), ARRAYS + MASKS + BIASES)
def test_weights_refuse_the_same(changes: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    arguments = {"q": Q, "k": K, "v": V, **changes}
    with pytest.raises(error, match=r"softlookup\.attention_weights") as caught:
        sl.attention_weights(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)
    assert [word for word in words if word not in str(caught.value)] == []


def readonly(*shape: int) -> np.ndarray:
    array = zeros(*shape)
    array.setflags(write=False)
    return array


def test_all_reasons_at_once() -> None:
    with pytest.raises(TypeError) as caught:
        call(q=Q.astype(np.int32), mask=np.ones((3, 4), bool), scale=BAD, softcap=-1, sinks=zeros(3), threads=0, out=[])
    message = str(caught.value)
    assert "7 problems" in message
    for number, name in enumerate(["q", "mask", "scale", "softcap", "sinks", "out", "threads"], 1):
        assert f"\n  {number}. {name}: found" in message
    with pytest.raises(ValueError, match=r"(?s)2 problems:.*widths 7 and 8.*3 query heads"):
        call(q=zeros(2, 3, 3, 7))
    with pytest.raises(ValueError, match=r"(?s)2 problems:.*scale: found inf.*out: found shape"):
        call(scale=np.inf, out=zeros(1))


def test_nothing_is_called_before_the_checks_pass() -> None:
    def never(b: object, h: object, i: object, j: object) -> Any:
        raise AssertionError("the mask was evaluated")

    with pytest.raises(ValueError, match="scale"):
        call(mask=sl.Predicate(never), q_start=0, scale=BAD)


@pytest.mark.parametrize(
    "changes",
    [
        {"scale": 2},
        {"scale": np.float32(0.5)},
        {"scale": 0.0},
        {"scale": -1.5},
        {"scale": 1.2e-38},
        {"k_start": 2**60, "q_start": -(2**60), "mask": sl.Window(2**62)},
        {"softcap": np.int64(3)},
        {"k_start": np.int32(4)},
        {"q_start": -3, "mask": sl.Causal()},
        {"q_start": np.int16(3), "mask": sl.Causal()},
        {"q_start": np.array(3), "mask": sl.Causal()},
        {"q_start": np.array([3]), "mask": sl.Causal()},
        {"q_start": np.array([3, 1], np.int32), "mask": sl.Causal()},
        {"q_start": "lower_right", "mask": sl.Causal(), "k_start": 9},
        {"mask": sl.Lengths([0, 5])},
        {"mask": sl.Window(None, None)},
        {"mask": np.ones((3, 5), bool)},
        {"mask": np.ones((1, 5), bool)},
        {"mask": np.ones((2, 1, 1, 5), bool)},
        {"bias": zeros(1, 5)},
        {"bias": zeros(1, 4, 3, 5)},
        {"sinks": np.zeros(4)},
        {"sinks": np.array([3e38, -3e38, -np.inf, 0])},
        {"sinks": np.array([0, np.nan, -np.inf, 1], np.float16)},
        {"threads": np.int64(1)},
        {"k": K[:1], "v": V[:1]},
        {"k": K[0], "v": V},
        {"k": K[0, 0], "v": V[0, 0]},
        {"q": readonly(2, 4, 3, 8)},
    ],
    ids=str,
)
def test_good_input_is_taken(changes: dict[str, Any]) -> None:
    assert call(**changes).shape == (2, 4, 3, 6)


def test_memory_maps_are_arrays(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "keys", F32, "w+", shape=(4, 8))
    mapped[:] = np.arange(32).reshape(4, 8)
    plain = np.asarray(mapped).copy()
    np.testing.assert_array_equal(sl.attention(mapped, mapped, mapped), sl.attention(plain, plain, plain))


def test_width_zero_needs_a_scale() -> None:
    q, k, v = zeros(1, 3, 0), zeros(1, 2, 0), np.array([[[1.0], [2.0]]], F32)
    np.testing.assert_allclose(sl.attention(q, k, v, scale=1.0), np.full((1, 3, 1), 1.5))


@pytest.mark.parametrize("axis", ["B", "Hq", "Hk", "N", "M", "d_v"])
def test_zero_sizes(axis: str) -> None:
    size = {"B": 2, "Hq": 4, "Hk": 2, "N": 3, "M": 3, "d_k": 8, "d_v": 6, axis: 0}
    if axis == "Hk":
        size["Hq"] = 0
    q = zeros(size["B"], size["Hq"], size["N"], size["d_k"])
    k = zeros(size["B"], size["Hk"], size["M"], size["d_k"])
    v = np.ones((size["B"], size["Hk"], size["M"], size["d_v"]), F32)
    mask = sl.Causal() & sl.Lengths(size["M"]) & sl.Predicate(lambda b, h, i, j: j <= i)
    out, stats = sl.attention(q, k, v, mask=mask, q_start=0, sinks=zeros(size["Hq"]), stats=True)
    assert out.shape == (size["B"], size["Hq"], size["N"], size["d_v"])
    assert stats.lse.shape == stats.distance.shape == out.shape[:-1]
    if axis == "M":
        assert (out == 0).all()
        assert (stats.lse == 0).all()
        assert (stats.argmax == -1).all()
    weights = sl.attention_weights(q, k, v, mask=mask, q_start=0)
    assert weights.shape == (size["B"], size["Hq"], size["N"], size["M"])


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"rows": 1}, ValueError, ["rows: found shape []", "rows=[0, -1]"]),
        ({"rows": [3]}, ValueError, ["rows: found indices from 3 to 3", "-3 to 2"]),
        ({"rows": [-4, 0]}, ValueError, ["rows: found indices from -4 to 0"]),
        ({"rows": [1.0]}, TypeError, ["rows: found a list", "ints"]),
        ({"rows": np.ones(3, bool)}, TypeError, ["rows: found bool [3]"]),
        ({"rows": "all"}, TypeError, ["rows: found 'all'"]),
        ({"heads": [4]}, ValueError, ["heads: found indices from 4 to 4", "-4 to 3"]),
        ({"heads": [0.5], "rows": [9]}, TypeError, ["2 problems", "heads", "rows"]),
        ({"v": V.astype(np.float64)}, TypeError, ["q, k, v", "float64"]),
        ({"v": V[..., :4, :]}, ValueError, ["5 keys and 4 values"]),
    ],
)
def test_bad_choice_of_weights(changes: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        sl.attention_weights(Q, K, **changes)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("bad", [0, 1025, 1.5, True, "2"])
@pytest.mark.parametrize("function", [sl.set_threads, lambda n: sl.threads(n).__enter__()])
def test_bad_threads(function: Callable[[Any], None], bad: Any) -> None:
    before = sl.get_threads()
    with pytest.raises((TypeError, ValueError), match=r"threads: found .* an int from 1 to 1024"):
        function(bad)
    assert sl.get_threads() == before


def test_no_number_of_threads_is_the_default() -> None:
    before = sl.get_threads()
    sl.set_threads(before + 1)
    with sl.threads(before + 2):
        with sl.threads(None):
            assert sl.get_threads() == before + 1
        assert sl.get_threads() == before + 2
    sl.set_threads(None)
    assert sl.get_threads() == before


def test_float64_takes_its_own_range() -> None:
    x = np.ones((1, 2, 2))
    np.testing.assert_array_equal(sl.attention(x, x, x, scale=1e-300, sinks=np.array([-1e300])), 1)
    with pytest.raises(ValueError, match=r"scale: found 1e-308; .* normal numbers of float64"):
        sl.attention(x, x, x, scale=1e-308)


def test_bad_instruction_set() -> None:
    with pytest.raises(ValueError, match=r"found instruction set 'z80'; expected one of x?"), forced_isa("z80"):
        pass
