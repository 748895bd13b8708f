"""How many threads a call uses, and what this installation runs on.

The default is the smallest of three limits: the CPUs this process may run on, the CPU quota of its control group, and
the physical cores among those CPUs (two hyperthreads share the units that attention is bound by).
SOFTLOOKUP_NUM_THREADS replaces it. It is found at first use, so that importing reads no files.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np

from softlookup import _core
from softlookup._checks import LARGEST_THREADS, as_threads
from softlookup._problems import Problems

VARIABLE = "SOFTLOOKUP_NUM_THREADS"

_chosen: int | None = None  # by set_threads, for the process
_scoped: ContextVar[int | None] = ContextVar("softlookup_threads", default=None)  # by threads(n), for the context


def set_threads(n: int | None) -> None:
    """Set the number of threads that calls use from now on, in the whole process.

    Parameters
    ----------
    n
        From 1 to 1024; None goes back to the default.

    Raises
    ------
    TypeError, ValueError
        If n is neither such an int nor None.

    Examples
    --------
    >>> import softlookup as sl
    >>> sl.set_threads(1)
    >>> sl.get_threads()
    1
    >>> sl.set_threads(None)
    """
    global _chosen
    _chosen = _checked("set_threads", n)


def get_threads() -> int:
    """The number of threads that a call made here would use.

    Raises
    ------
    ValueError
        If SOFTLOOKUP_NUM_THREADS is set to something else than an int from 1 to 1024.

    Examples
    --------
    >>> import softlookup as sl
    >>> sl.get_threads() >= 1
    True
    """
    return _scoped.get() or _chosen or _default()


@contextmanager
def threads(n: int | None) -> Iterator[None]:
    """Use n threads for the calls inside a with block, in this thread or task only.

    Parameters
    ----------
    n
        From 1 to 1024; None is the number outside all such blocks.

    Raises
    ------
    TypeError, ValueError
        If n is neither such an int nor None.

    Examples
    --------
    >>> import softlookup as sl
    >>> with sl.threads(1):
    ...     sl.get_threads()
    1
    """
    token = _scoped.set(_checked("threads", n))
    try:
        yield
    finally:
        _scoped.reset(token)


def info() -> dict[str, object]:
    """What this installation is and runs on.

    Returns
    -------
    dict
        version, isa (the instruction set in use), isas (those this CPU can run), compiled_isas, threads (per call),
        thread_backend, cpu, compiler, numpy.

    Raises
    ------
    ValueError
        If SOFTLOOKUP_ISA or SOFTLOOKUP_NUM_THREADS is set to something impossible.

    Examples
    --------
    >>> import softlookup as sl
    >>> sl.info()["isa"] in sl.info()["isas"]
    True
    """
    return {
        "version": version("softlookup"),
        "isa": _core.default_isa(),
        "isas": _core.isas(),
        "compiled_isas": _core.compiled_isas(),
        "threads": get_threads(),
        "thread_backend": _core.thread_backend(),
        "cpu": _cpu_name(),
        "compiler": _core.compiler(),
        "numpy": np.__version__,
    }


def _checked(where: str, n: object) -> int | None:
    if n is None:
        return None
    problems = Problems(where)
    number = as_threads(problems, n)
    problems.raise_any()
    return number


@cache
def _default() -> int:
    text = os.environ.get(VARIABLE)
    if text is None:
        return default_threads(_affinity(), Path("/"))
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= LARGEST_THREADS:
        raise ValueError(
            f"softlookup: found {VARIABLE}={text!r}; expected an int from 1 to {LARGEST_THREADS}; "
            f"fix: set it to one, or unset it"
        )
    return number


def default_threads(cpus: set[int], root: Path) -> int:
    """The default for a process that may run on these CPUs; root is / (a test's own directory otherwise)."""
    return max(1, min(len(cpus), _physical_cores(cpus, root), int(_quota(root) or len(cpus))))


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _physical_cores(cpus: set[int], root: Path) -> int:
    """Physical cores among the CPUs; all of them where the system does not tell which share one."""
    cores = {_read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or f"{cpu}" for cpu in cpus}
    return len(cores)


def _quota(root: Path) -> float | None:
    """The tightest CPU quota, in CPUs, of the control groups (version 1 or 2) this process is in."""
    quotas = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = ["sys/fs/cgroup/cpu", f"sys/fs/cgroup/{controllers}"] if controllers else ["sys/fs/cgroup"]
        # A container sees its own group at the mount's root, under the name that it has outside.
        path = Path(group.lstrip("/"))
        for mount in mounts:
            quotas += [_quota_of(root / mount / part) for part in (path, *path.parents)]
    return min((quota for quota in quotas if quota), default=None)


def _quota_of(group: Path) -> float | None:
    text = _read(group / "cpu.max")
    if text is None:
        text = f"{_read(group / 'cpu.cfs_quota_us') or -1} {_read(group / 'cpu.cfs_period_us') or 100_000}"
    quota, _, period = text.partition(" ")
    if quota in ("max", "-1"):
        return None
    return int(quota) / int(period or 100_000)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _cpu_name() -> str:
    for line in (_read(Path("/proc/cpuinfo")) or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
