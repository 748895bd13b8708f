"""Every instruction set of this machine, at every length from nothing to two vectors and one, and each edge."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import softlookup as sl
from agreement import compare, on
from cases import ISAS, MASKS, Shape, arrays

TWO_VECTORS_AND_ONE = 2 * 16 + 1  # 16 float32 lanes are the widest vector
EDGES = [63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 192, 193, 255, 256, 257, 511, 512, 513, 640, 1023, 1024, 1025]


def test_numbers_of_keys(type_name: str, isa: str) -> None:
    for keys in (*range(TWO_VECTORS_AND_ONE + 1), *EDGES):
        compare(*arrays(Shape(2, keys, key_width=5, value_width=3), type_name, seed=keys), isa=isa)


def test_numbers_of_queries(type_name: str, isa: str) -> None:
    for queries in (*range(TWO_VECTORS_AND_ONE + 1), *EDGES[:12]):
        shape = Shape(queries, 35, key_width=5, value_width=3)
        compare(*arrays(shape, type_name, seed=queries), isa=isa)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 9, 16, 17])
def test_numbers_of_heads_in_a_group(heads: int, type_name: str, isa: str) -> None:
    for queries in (1, 2, 5, 13):
        shape = Shape(queries, 40, heads=2 * heads, key_heads=2, key_width=8, value_width=8)
        written = MASKS["causal"](shape)
        compare(*arrays(shape, type_name), isa=isa, written=written, q_start="lower_right")


def test_widths_of_keys(type_name: str, isa: str) -> None:
    for width in (*range(1, TWO_VECTORS_AND_ONE + 1), 63, 64, 65, 80, 96, 127, 192, 576):
        compare(*arrays(Shape(7, 35, key_width=width, value_width=2), type_name, seed=width), isa=isa)


def test_widths_of_values(type_name: str, isa: str) -> None:
    for width in (*range(TWO_VECTORS_AND_ONE + 1), 63, 64, 65, 80, 96, 127, 192, 512):
        compare(*arrays(Shape(7, 35, key_width=3, value_width=width), type_name, seed=width), isa=isa)


def test_starts_at_every_element_of_a_vector(type_name: str, isa: str) -> None:
    q, k, v = arrays(Shape(9, 60, key_width=40, value_width=40), type_name)
    for start in range(17):
        compare(q[..., start : start + 17], k[:, start:, start : start + 17], v[:, start:, start:], isa=isa)


@pytest.mark.parametrize("shift", [0, 1, 100, 127, 128, 500, 511])
def test_blocks_stand_at_absolute_positions(shift: int, type_name: str, isa: str) -> None:
    """The same keys cut differently into blocks and tiles give the same result to rounding."""
    shape = Shape(4, 600, heads=2, key_heads=1)
    written = MASKS["window"](shape)
    options = {"isa": isa, "k_start": shift, "q_start": shift + 500}
    compare(*arrays(shape, type_name), written=written, **options)
    compare(*arrays(shape, type_name), **options)


def test_instruction_sets_agree_with_each_other() -> None:
    """They may differ in bits, but only as the tolerances allow; the same name always gives the same bits."""
    q, k, v = arrays(Shape(33, 700, heads=4, key_heads=2, key_width=64, value_width=64), "float32")
    outs = []
    for isa in (*ISAS, *ISAS):
        with on(isa):
            outs.append(sl.attention(q, k, v))
    for first, second in zip(outs[: len(ISAS)], outs[len(ISAS) :], strict=True):
        np.testing.assert_array_equal(first, second)
        np.testing.assert_allclose(first, outs[0], rtol=0, atol=4e-6)


def test_info_lists_what_can_be_forced() -> None:
    info = sl.info()
    assert info["isa"] in info["isas"]
    assert set(info["isas"]) <= set(info["compiled_isas"])
    for isa in info["isas"]:
        with on(isa):
            assert sl.attention(np.ones((1, 1), "f4"), np.ones((1, 1), "f4"), np.full((1, 1), 3, "f4")) == 3
    with pytest.raises(ValueError, match=info["isas"][0]), on("vax"):
        sl.attention(np.ones((1, 1), "f4"), np.ones((1, 1), "f4"), np.ones((1, 1), "f4"))


@pytest.mark.parametrize("isa_name", ISAS)
def test_environment_chooses_the_instruction_set(isa_name: str) -> None:
    program = (
        "import numpy as np, softlookup as sl\n"
        "rng = np.random.default_rng(0)\n"
        "q, k, v = (rng.standard_normal((20, 16)).astype('f4') for _ in range(3))\n"
        "print(sl.info()['isa'], sl.attention(q, k, v).tobytes().hex())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "SOFTLOOKUP_ISA": isa_name}
    )
    assert done.returncode == 0, done.stderr
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((20, 16)).astype("f4") for _ in range(3))
    with on(isa_name):
        assert done.stdout.split() == [isa_name, sl.attention(q, k, v).tobytes().hex()]


def test_environment_with_an_unknown_instruction_set_lists_the_usable_ones() -> None:
    program = "import numpy as np, softlookup as sl; x = np.ones((1, 1), 'f4'); sl.attention(x, x, x)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "SOFTLOOKUP_ISA": "vax"}
    )
    assert done.returncode == 1
    assert "ValueError" in done.stderr
    assert "vax" in done.stderr
    assert all(isa in done.stderr for isa in ISAS)
