"""Threads: counts, concurrent callers, fork, and company with another library's OpenMP team."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, get_ident

import numpy as np
import pytest

import softlookup as sl
from cases import Shape, arrays

SETUP = (
    "import os, sys, numpy as np\n"
    "def inputs():\n"
    "    rng = np.random.default_rng(0)\n"
    "    return [rng.standard_normal((4, 200, 32)).astype('f4') for _ in range(3)]\n"
)


def program(body: str, **environment: str) -> str:
    """Run a program in a fresh interpreter, with these of our variables only, and return what it printed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SOFTLOOKUP_")}
    done = subprocess.run(
        [sys.executable, "-c", SETUP + body],
        capture_output=True,
        text=True,
        timeout=120,
        env={**inherited, **environment},
    )
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-2000:]}"
    return done.stdout.strip()


def test_counts_are_set_and_restored() -> None:
    before = sl.get_threads()
    assert before >= 1
    assert sl.info()["threads"] == before
    try:
        sl.set_threads(2)
        assert sl.get_threads() == 2
        with sl.threads(1):
            assert sl.get_threads() == 1
            with sl.threads(3):
                assert sl.get_threads() == 3
            assert sl.get_threads() == 1
        assert sl.get_threads() == 2
        with pytest.raises(KeyError), sl.threads(1):
            raise KeyError
        assert sl.get_threads() == 2
    finally:
        sl.set_threads(before)


@pytest.mark.parametrize("count", [0, -1, 1.5, "2"])
def test_counts_that_are_none_are_refused(count: object) -> None:
    before = sl.get_threads()
    with pytest.raises((ValueError, TypeError), match="thread"):
        sl.set_threads(count)
    assert sl.get_threads() == before
    x = np.ones((1, 1), np.float32)
    with pytest.raises((ValueError, TypeError), match="thread"):
        sl.attention(x, x, x, threads=count)


def test_many_more_threads_than_work_or_cores() -> None:
    q, k, v = arrays(Shape(3, 5), "float32")
    expected = sl.attention(q, k, v, threads=1)
    for threads in (2, 7, 64, 1000):
        np.testing.assert_array_equal(sl.attention(q, k, v, threads=threads), expected)


def test_environment_sets_the_count() -> None:
    show = "import softlookup as sl; print(sl.get_threads(), sl.info()['threads'])"
    assert program(show, SOFTLOOKUP_NUM_THREADS="1") == "1 1"
    assert program(show, SOFTLOOKUP_NUM_THREADS="3") == "3 3"
    default = int(program(show).split()[0])
    assert 1 <= default <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize("value", ["0", "-2", "many", "1.5"])
def test_environment_that_is_no_count_is_refused_by_name(value: str) -> None:
    body = (
        "try:\n"
        "    import softlookup as sl\n"
        "    sl.attention(*inputs())\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    said = program(body, SOFTLOOKUP_NUM_THREADS=value)
    assert "SOFTLOOKUP_NUM_THREADS" in said
    assert value in said


def test_default_count_follows_the_affinity() -> None:
    body = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nimport softlookup as sl\nprint(sl.get_threads())"
    assert program(body) == "1"


def test_concurrent_callers_get_what_they_would_alone() -> None:
    calls = [
        (arrays(Shape(40 + n, 300 + 17 * n, heads=4, key_heads=2, leading=(2,)), "float32", seed=n), 1 + n % 3)
        for n in range(12)
    ]
    alone = [sl.attention(*call, threads=1).tobytes() for call, _ in calls]
    start = Barrier(4)

    def work(offset: int) -> None:
        start.wait(timeout=60)
        for round_number in range(24):
            index = (offset * 5 + round_number) % len(calls)
            call, threads = calls[index]
            assert sl.attention(*call, threads=threads).tobytes() == alone[index]

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, offset) for offset in range(4)]:
            done.result(timeout=120)


def test_predicates_run_under_concurrent_callers() -> None:
    """A predicate needs the interpreter lock inside a call that has given it up."""
    q, k, v = arrays(Shape(60, 200, heads=2, key_heads=1), "float32")
    expected = sl.attention(q, k, v, mask=sl.Causal(), q_start=140)
    mask = sl.Predicate(lambda b, h, i, j: j <= i)
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(sl.attention, q, k, v, mask=mask, q_start=140, threads=2) for _ in range(16)]
        for job in jobs:
            np.testing.assert_array_equal(job.result(timeout=120), expected)


@pytest.mark.parametrize(("keys", "is_small"), [(16, True), (40_000, False)])
def test_a_call_is_given_no_more_threads_than_it_has_work_for(keys: int, is_small: bool) -> None:
    q, k, v = arrays(Shape(4, keys, heads=2, key_heads=2), "float32")
    callers = set()

    def told(b: object, h: object, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        callers.add(get_ident())
        return i >= 0 * j

    for _ in range(1 if is_small else 20):
        sl.attention(q, k, v, mask=sl.Predicate(told), q_start=0, threads=2)
    assert (callers == {get_ident()}) == is_small


@pytest.mark.parametrize("threads", [1, 2])
def test_what_a_predicate_raises_reaches_the_caller(threads: int) -> None:
    q, k, v = arrays(Shape(60, 300, heads=4, key_heads=2), "float32")

    def fails(b: object, h: object, i: object, j: np.ndarray) -> np.ndarray:
        raise LookupError("no such key, says the predicate")

    with pytest.raises(LookupError, match="says the predicate"):
        sl.attention(q, k, v, mask=sl.Predicate(fails), q_start=0, threads=threads)
    for wrong in (lambda b, h, i, j: np.ones((2, 3, 4), bool), lambda b, h, i, j: (i - j).astype(float)):
        with pytest.raises((ValueError, TypeError), match=r"(?i)predicate"):
            sl.attention(q, k, v, mask=sl.Predicate(wrong), q_start=0, threads=threads)
    assert np.isfinite(sl.attention(q, k, v, threads=threads)).all()


FORK = """
import softlookup as sl
arrays = inputs()
expected = sl.attention(*arrays, threads=2).tobytes()
child = os.fork()
if child == 0:
    import faulthandler
    faulthandler.dump_traceback_later(60, exit=True)
    same = all(sl.attention(*arrays, threads=n).tobytes() == expected for n in (1, 2, 3, 2))
    os._exit(0 if same else 3)
_, status = os.waitpid(child, 0)
assert sl.attention(*arrays, threads=2).tobytes() == expected
print(os.waitstatus_to_exitcode(status), sl.info()["thread_backend"])
"""


def test_a_forked_child_computes_too() -> None:
    assert program(FORK) == "0 pool"


def test_a_forked_child_of_a_process_that_runs_torch() -> None:
    pytest.importorskip("torch")
    body = "import torch\ntorch.set_num_threads(2)\n(torch.ones(512, 512) @ torch.ones(512, 512)).sum()\n"
    assert program(body + FORK).startswith("0 ")


def test_the_openmp_team_of_torch_is_used_whichever_is_imported_first() -> None:
    pytest.importorskip("torch")
    body = (
        "{first}\n{second}\n"
        "import torch, softlookup as sl\n"
        "q, k, v = inputs()\n"
        "out = sl.attention(q, k, v, threads=2)\n"
        "stock = torch.nn.functional.scaled_dot_product_attention(*(torch.from_numpy(x)[None] for x in (q, k, v)))\n"
        "assert np.abs(stock[0].numpy() - out).max() < 1e-5\n"
        "print(sl.info()['thread_backend'], out.tobytes() == sl.attention(q, k, v, threads=1).tobytes())\n"
    )
    imports = {"first": "import torch", "second": "import softlookup"}
    assert program(body.format(**imports)) == "openmp True"
    assert program(body.format(first=imports["second"], second=imports["first"])) == "openmp True"


def test_importing_the_library_loads_no_framework() -> None:
    body = (
        "import softlookup\n"
        "frameworks = {'torch', 'jax', 'transformers', 'typer', 'rich', 'ml_dtypes', 'scipy', 'matplotlib'}\n"
        "print(sorted(frameworks & set(sys.modules)))\n"
    )
    assert program(body) == "[]"
