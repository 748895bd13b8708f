"""The default number of threads: what the environment says, else what the machine and its control groups allow."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from softlookup._threads import default_threads


def run(variable: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import softlookup; print(softlookup.get_threads())"],
        env={**os.environ, "SOFTLOOKUP_NUM_THREADS": variable},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("text", ["0", "many", "1.5", "", "4096"])
def test_bad_variable(text: str) -> None:
    done = run(text)
    assert done.returncode == 1
    assert f"ValueError: softlookup: found SOFTLOOKUP_NUM_THREADS={text!r}; expected an int from 1" in done.stderr


def test_variable_replaces_the_default() -> None:
    assert run("3").stdout == "3\n"


@dataclass
class Machine:
    """A machine, as its files tell: which CPUs share a core, and the quotas of the control groups."""

    name: str
    cpus: int
    threads: int
    siblings: list[str] = field(default_factory=list)
    groups: str = ""
    quotas: dict[str, str] = field(default_factory=dict)

    def write(self, root: Path) -> Path:
        files = {f"sys/fs/cgroup/{name}": text for name, text in self.quotas.items()}
        for cpu, group in enumerate(self.siblings):
            files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = group
        for name, text in {**files, "proc/self/cgroup": self.groups}.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return root


PAIRS = ["0,2", "1,3", "0,2", "1,3"]
VERSION_1 = "3:memory:/a\n2:cpu,cpuacct:/docker/x\n0::/"
INSIDE = "cpu,cpuacct/docker/x"
MACHINES = [
    Machine("nothing known", 4, 4),
    Machine("hyperthreads", 4, 2, siblings=PAIRS),
    Machine("one hyperthread of each core allowed", 2, 2, siblings=PAIRS),
    Machine("v2", 8, 3, groups="0::/user/job", quotas={"user/job/cpu.max": "300000 100000"}),
    Machine("v2 rounds down", 8, 2, groups="0::/user/job", quotas={"user/job/cpu.max": "299999 100000"}),
    Machine("v2 at least one", 8, 1, groups="0::/user/job", quotas={"user/job/cpu.max": "50000 100000"}),
    Machine("v2 parent", 8, 2, groups="0::/a/b", quotas={"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 100000"}),
    Machine("v2 container", 8, 4, groups="0::/", quotas={"cpu.max": "400000 100000"}),
    Machine("v2 above the machine", 2, 2, groups="0::/", quotas={"cpu.max": "400000 100000"}),
    Machine(
        "v1",
        8,
        4,
        groups=VERSION_1,
        quotas={f"{INSIDE}/cpu.cfs_quota_us": "200000", f"{INSIDE}/cpu.cfs_period_us": "50000"},
    ),
    Machine("v1 container", 8, 1, groups=VERSION_1, quotas={"cpu/cpu.cfs_quota_us": "150000"}),
    Machine("v1 unlimited", 8, 8, groups=VERSION_1, quotas={"cpu/cpu.cfs_quota_us": "-1"}),
    Machine("v1 of another controller", 8, 8, groups="4:memory:/a", quotas={"cpu/cpu.cfs_quota_us": "100000"}),
]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_default(machine: Machine, tmp_path: Path) -> None:
    assert default_threads(set(range(machine.cpus)), machine.write(tmp_path)) == machine.threads
