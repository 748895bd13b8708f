"""The report of a run: everything that was measured, as plain data, and how it grows."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

import softlookup as sl
from softlookup.bench.peers import OURS, PEERS
from softlookup.bench.rows import LIMIT, Row
from softlookup.bench.run import Options
from softlookup.machine import matrix_units

SCHEMA = 1
MOST_OTHERS = 0.1  # CPUs


@dataclass(frozen=True)
class Growth:
    """How a quantity grows with the size: quantity = factor x size ^ exponent, a least-squares fit in logarithms."""

    workload: str
    dtype: str
    contender: str
    quantity: str
    exponent: float
    sizes: tuple[int, ...]
    values: tuple[float, ...]


def report_of(rows: Sequence[Row], options: Options, others_cpus: float | None) -> dict[str, Any]:
    """The rows, and what they were made on and with; `others_cpus` were taken by other work meanwhile."""
    packages = {peer.package: peer.version() for peer in PEERS.values() if peer.name in options.peers}
    return {
        "schema": SCHEMA,
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "softlookup": sl.info(),
        "matrix_units": matrix_units(),
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


def growths(rows: Iterable[Row]) -> list[Growth]:
    """The fits of the sweeps: seconds against N, extra bytes against N; those with at least three sizes."""
    quantities = {"time-full": "seconds", "time-window": "seconds", "memory": "extra_bytes"}
    points: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    for row in rows:
        value = getattr(row, quantities.get(row.workload, "missing"))
        if row.contender != LIMIT and row.workload in quantities and isinstance(value, (int, float)) and value > 0:
            kind, _, size = row.detail.rpartition("-")
            name = f"{row.workload}-{kind}" if kind else row.workload
            points.setdefault((name, row.dtype, row.contender), []).append((int(size), value))
    return [
        _fit(name, dtype, contender, "extra_bytes" if name.startswith("memory") else "seconds", sorted(found))
        for (name, dtype, contender), found in points.items()
        if len(found) >= 3
    ]


def _fit(name: str, dtype: str, contender: str, quantity: str, points: list[tuple[int, float]]) -> Growth:
    sizes, values = zip(*points, strict=True)
    exponent = float(np.polyfit([math.log(size) for size in sizes], [math.log(value) for value in values], 1)[0])
    return Growth(name, dtype, contender, quantity, exponent, sizes, values)
