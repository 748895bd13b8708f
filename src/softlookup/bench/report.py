"""The report of a run: everything that was measured, as plain data."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import softlookup as sl
from softlookup.bench.growth import growths
from softlookup.bench.peers import OURS, PEERS
from softlookup.bench.rows import Row
from softlookup.bench.run import Options
from softlookup.machine import Machine, matrix_units

SCHEMA = 1
MOST_OTHERS = 0.1  # CPUs


def report_of(
    rows: Sequence[Row], options: Options, others_cpus: float | None, machine: Machine | None = None
) -> dict[str, Any]:
    """The rows, and what they were made on and with; `others_cpus` were taken by other work meanwhile."""
    packages = {peer.package: peer.version() for peer in PEERS.values() if peer.name in options.peers}
    return {
        "schema": SCHEMA,
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "softlookup": sl.info(),
        "matrix_units": matrix_units(),
        "machine": None if machine is None else json.loads(machine.to_json()) | {"doubts": list(machine.doubts())},
        "python": platform.python_version(),
        "system": platform.platform(),
        "peers": {name: found for name, found in packages.items() if name != OURS},
        "options": asdict(options),
        "others_cpus": others_cpus,
        "doubts": list(_doubts(others_cpus)),
        "growths": [asdict(growth) for growth in growths(rows)],
        "rows": [_plain(row) for row in rows],
    }


def _plain(row: Row) -> dict[str, Any]:
    """A row as data; a difference that is not finite is None, for JSON has no such number."""
    fields = asdict(row)
    return {name: None if isinstance(one, float) and not math.isfinite(one) else one for name, one in fields.items()}


def _doubts(others_cpus: float | None) -> Iterator[str]:
    if others_cpus is not None and others_cpus > MOST_OTHERS:
        yield (
            f"Other work, or the host of this virtual machine, took {others_cpus:.2f} CPUs meanwhile: the figures say "
            f"little."
        )
