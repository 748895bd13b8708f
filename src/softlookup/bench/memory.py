"""Peak extra memory of one lookup: what a process holds at its peak beyond inputs and outputs.

Measured in a process of its own. The inputs are allocated and written first, and a small call has made the threads;
then the peak is set back (Linux: /proc/self/clear_refs), the lookup runs, and the peak is read again. The output and
the gradients are taken off; statistics are not.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import softlookup as sl
from softlookup._attention import forced_isa
from softlookup._limits import MeasurementProblem

Array = NDArray[np.float32]

SMALL_ROWS = 64
STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


def extra_bytes(rows: int, width: int, *, threads: int, isa: str, backward: bool = False) -> int:
    """Peak bytes beyond inputs and outputs of a full float32 lookup of one head with N = M = rows, and statistics.

    Raises
    ------
    MeasurementProblem
        If the process that measures fails.
    """
    task = {"rows": rows, "width": width, "threads": threads, "isa": isa, "backward": backward}
    command = [sys.executable, "-m", "softlookup.bench.memory", json.dumps(task)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise MeasurementProblem(f"softlookup bench: the memory run failed: {run.stderr.strip().splitlines()[-1]}")
    return int(run.stdout)


def _measure(*, rows: int, width: int, threads: int, isa: str, backward: bool) -> int:
    random = np.random.default_rng(0)
    q, k, v, dout = (random.standard_normal((1, rows, width), np.float32) for _ in range(4))
    run = _both if backward else _forward
    with forced_isa(isa):
        small = (slice(None), slice(SMALL_ROWS))
        run(q[small], k[small], v[small], dout[small], threads)
        before = _start()
        outputs_bytes = run(q, k, v, dout, threads)
        peak = _peak_bytes()
    return peak - before - outputs_bytes


def _forward(q: Array, k: Array, v: Array, dout: Array, threads: int) -> int:
    """A lookup with statistics; returns the bytes of its output."""
    out, _ = sl.attention(q, k, v, threads=threads, stats=True)
    return out.nbytes


def _both(q: Array, k: Array, v: Array, dout: Array, threads: int) -> int:
    """A lookup, its statistics and its gradients; returns the bytes of output and gradients."""
    out, pullback = sl.attention_vjp(q, k, v, threads=threads)
    grads = pullback(dout)
    _ = pullback.stats
    return out.nbytes + sum(grad.nbytes for grad in (grads.q, grads.k, grads.v) if grad is not None)


def _start() -> int:
    """Set the peak back to what is held now, and return that."""
    if CLEAR_REFS.exists():
        CLEAR_REFS.write_text("5")
    return _peak_bytes()


def _peak_bytes() -> int:
    """The most memory that this process has held. Linux's ru_maxrss would remember the process it was forked from."""
    if STATUS.exists():
        found = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text())
        assert found is not None
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    print(_measure(**json.loads(sys.argv[1])))
