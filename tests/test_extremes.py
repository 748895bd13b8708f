"""Where float32 ends: weights that round to zero, second roundings, quotients and positions out of range, and what a
running call owes to the process around it (its floating-point mode, Ctrl-C, fork)."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import softlookup as sl
from softlookup._attention import forced_isa

ONE = np.ones((1, 1), np.float32)


@pytest.mark.parametrize(
    ("infinite", "top", "keys"), [(0, 5, 64), (130, 0, 256), (0, 130, 256), (0, 600, 1024), (600, 0, 1024)]
)
def test_a_visible_infinity_shows_wherever_it_stands(isa: str, infinite: int, top: int, keys: int) -> None:
    """e^-200 is zero in float32 and not in exact arithmetic, in one tile, across tiles and across blocks."""
    k = np.full((keys, 1), -400, np.float32)
    k[infinite], k[top] = 0, 200
    v = np.ones((keys, 1), np.float32)
    v[infinite] = np.inf
    with forced_isa(isa):
        assert sl.attention(ONE, k, v, scale=1.0) == np.inf


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_finite_columns_beside_one_that_is_not(isa: str, dtype: type, bad: float) -> None:
    one = np.ones((1, 1), dtype)
    k = np.array([[0], [-800]], dtype)
    v = np.array([[1, 1], [bad, 3e38]], dtype)
    with forced_isa(isa):
        out = sl.attention(one, k, v, scale=1.0)
    np.testing.assert_array_equal(out.astype(float), [[bad, 1]])


@pytest.mark.parametrize(("dtype", "step"), [(np.float16, 2.0**-10), (ml_dtypes.bfloat16, 2.0**-7)])
def test_float64_is_rounded_once_to_a_half_type(isa: str, dtype: type, step: float) -> None:
    """Just above half a step: by way of float32 it would be half a step, and round to even, downwards."""
    one = np.ones((1, 1))
    with forced_isa(isa):
        for sign in (1, -1):
            above = sl.attention(one, one, sign * one * (1 + step / 2 + 2.0**-40), out_dtype=dtype)
            below = sl.attention(one, one, sign * one * (1 + step / 2 - 2.0**-40), out_dtype=dtype)
            assert above.astype(float) == sign * (1 + step)
            assert below.astype(float) == sign


@pytest.mark.parametrize(("dtype", "softcap"), [(np.float32, 1e38), (np.float64, 1e308)])
def test_a_huge_softcap_is_none(isa: str, dtype: type, softcap: float) -> None:
    q, k = np.ones((1, 1), dtype), np.array([[1], [0]], dtype)
    with forced_isa(isa):
        weights = sl.attention_weights(q, k, scale=1.0, softcap=softcap)
        plain = sl.attention_weights(q, k, scale=1.0)
    np.testing.assert_array_equal(weights, plain)


@pytest.mark.parametrize(("q_start", "k_start"), [(2**59 + 10, 0), (2**60, -(2**60)), (-(2**60), -(2**60))])
def test_positions_far_out(q_start: int, k_start: int) -> None:
    x = np.ones((3, 1), np.float32)
    visible = sl.attention(x, x, x, mask=sl.Causal(), q_start=q_start, k_start=k_start, stats=True)[1].visible
    expected = sl.Causal().dense(1, 1, 3, 3, q_start, k_start)[0, 0].sum(-1)
    np.testing.assert_array_equal(visible, expected)


def test_hiding_by_mask_and_by_bias_gives_the_same_bits(isa: str) -> None:
    """At a width whose scale is no power of two."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 40, 80), np.float32) * 5
    mask = rng.random((40, 40)) < 0.6
    bias = np.where(mask, np.float32(0), -np.inf).astype(np.float32)
    with forced_isa(isa):
        by_mask, by_bias = sl.attention(q, k, v, mask=mask), sl.attention(q, k, v, bias=bias)
        weights = sl.attention_weights(q, k, mask=mask)
    assert by_mask.tobytes() == by_bias.tobytes()
    np.testing.assert_allclose(weights @ v, by_mask, atol=2e-5)


def test_a_predicate_computes_as_everywhere_else() -> None:
    """Inside a call subnormal numbers are zero; inside a user's function they are not."""
    x = np.ones((3, 1), np.float32)
    mask = sl.Predicate(lambda b, h, i, j: (j <= i) & (np.exp(np.array([-720.0])) > 0))
    for threads in (1, 2):
        _, stats = sl.attention(x, x, x, mask=mask, stats=True, threads=threads)
        np.testing.assert_array_equal(stats.visible, [1, 2, 3])
    assert np.float32(1e-39) * np.float32(1) > 0


INTERRUPTED = """
import os, signal, threading
import numpy as np
import softlookup as sl
x = np.ones((1, 8, 65536, 64), np.float32)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background inherits that it is ignored
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    sl.attention(x, x, x)
except KeyboardInterrupt:
    print("interrupted")
"""

FORKED = """
import multiprocessing, time
import numpy as np
import torch
import softlookup as sl
torch.randn(1500, 1500) @ torch.randn(1500, 1500)

def child(_):
    x = np.ones((8, 512, 64), np.float32)
    return float(sl.attention(x, x, x, threads=2).sum())

with multiprocessing.get_context("fork").Pool(1) as pool:
    print(*pool.map_async(child, [0]).get(timeout=60))
"""


@pytest.mark.parametrize(("program", "printed"), [(INTERRUPTED, "interrupted\n"), (FORKED, f"{float(8 * 512 * 64)}\n")])
def test_the_process_around_a_call(program: str, printed: str) -> None:
    """Ctrl-C ends a call of minutes; a child forked before the parent's first call does not wait for its threads."""
    if "torch" in program:
        pytest.importorskip("torch")
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout == printed, run.stderr
