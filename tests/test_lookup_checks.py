"""Bad input of `merge` and `lookup`: what each message says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import softlookup as sl

TENSOR = type("Tensor", (), {"__module__": "torch"})()


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


OUT, LSE = zeros(2, 4, 3, 6), np.zeros((2, 4, 3))


@pytest.mark.parametrize(
    ("outs", "lses", "sinks", "error", "words"),
    [
        ([], [], None, ValueError, ["outs, lses: found 0 outputs and 0 lses", "at least one"]),
        ([OUT], [LSE, LSE], None, ValueError, ["1 outputs and 2 lses"]),
        ([OUT], [LSE.astype(np.float32)], None, TypeError, ["lses[0]: found float32", "lses[0].astype(np.float64)"]),
        ([OUT, OUT.astype(np.float64)], [LSE, LSE], None, TypeError, ["outs[0], outs[1]", "float32, float64"]),
        ([OUT, OUT[..., :2, :]], [LSE, LSE], None, ValueError, ["outs[1]: found shape [2, 4, 2, 6]"]),
        ([OUT], [LSE[..., :2]], None, ValueError, ["lses[0]: found shape [2, 4, 2]", "[2, 4, 3]"]),
        ([[1.0]], [LSE], None, TypeError, ["outs[0]: found a list"]),
        (OUT.astype(int), LSE, None, TypeError, ["outs[0]: found int64"]),
        (TENSOR, LSE, None, TypeError, ["outs: found a torch.Tensor"]),
        ((x for x in [OUT]), LSE, None, TypeError, ["outs: found a generator", "a list or tuple", "list(outs)"]),
        ([OUT], [LSE], zeros(3), ValueError, ["sinks: found shape [3]", "[Hq] = [4]"]),
        ([OUT], [LSE[0], 1], [1.0], ValueError, ["1 outputs and 2 lses"]),
        ([OUT], [LSE[0]], [1.0], TypeError, ["2 problems", "lses[0]", "sinks: found a list"]),
    ],
)
def test_bad_merge(outs: Any, lses: Any, sinks: Any, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error, match=r"softlookup\.merge") as caught:
        sl.merge(outs, lses, sinks=sinks)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"query": zeros(1, 1, 3)}, ValueError, ["query: found shape [1, 1, 3]", "[d] or [N, d]"]),
        ({"keys": zeros(3)}, ValueError, ["keys: found shape [3]", "[M, d]"]),
        ({"values": zeros(2, 1, 1)}, ValueError, ["values: found shape [2, 1, 1]"]),
        ({"query": zeros(4)}, ValueError, ["query, keys: found widths 4 and 3"]),
        ({"values": zeros(3)}, ValueError, ["keys, values: found 2 keys and 3 values"]),
        ({"values": zeros(2, dtype=np.float64)}, TypeError, ["query, keys, values", "float32, float32, float64"]),
        ({"query": [1.0, 2.0, 3.0]}, TypeError, ["query: found a list"]),
        ({"beta": float("nan")}, ValueError, ["beta: found nan"]),
        ({"beta": None}, TypeError, ["beta: found None"]),
        ({"beta": "1"}, TypeError, ["beta: found '1'"]),
        ({"beta": 1e-40}, ValueError, ["beta: found 1e-40", "normal numbers of float32"]),
        ({"beta": 1e300}, ValueError, ["beta: found 1e+300", "3.4e+38 unless the arrays are float64"]),
        ({"beta": True}, TypeError, ["beta: found True"]),
        ({"similarity": "euclid"}, ValueError, ["similarity: found 'euclid'", "'dot' or 'cosine' or 'distance'"]),
        ({"match": "close"}, ValueError, ["match: found 'close'", "'equal'"]),
        ({"match": "equal", "beta": 2.0}, ValueError, ["match", "beta=2.0"]),
        ({"match": "equal", "similarity": "cosine"}, ValueError, ["match", "cosine"]),
        (
            {"match": "equal", "query": np.ones((2, 3), np.float32)},
            ValueError,
            ["query: found row 0", "none of the 2 keys"],
        ),
    ],
)
def test_bad_lookup(changes: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    arguments = {"query": zeros(3), "keys": zeros(2, 3), "values": zeros(2), **changes}
    with pytest.raises(error, match=r"softlookup\.lookup") as caught:
        sl.lookup(arguments.pop("query"), arguments.pop("keys"), arguments.pop("values"), **arguments)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("bad", [None, "1", float("nan")])
def test_beta_has_no_default_of_a_scale(bad: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"beta: found .*; expected a real number or inf; ") as caught:
        sl.lookup(zeros(3), zeros(2, 3), zeros(2), beta=bad)
    assert "d_k" not in str(caught.value)
