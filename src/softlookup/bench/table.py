"""The report as tables on a terminal (rich), and the texts of their cells."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from softlookup.bench.growth import EXPONENT_TOLERANCE
from softlookup.bench.peers import OURS
from softlookup.bench.rows import is_limit
from softlookup.bench.workloads import SWEEPS

HEADERS = ("contender", "time", "rate", "ours faster", "of limit", "difference")
NARROW = ("contender", "time", "rate", "ours\nfaster", "of\nlimit", "differ-\nence")
DISAGREES = "WRONG ANSWER"

Rows = Sequence[dict[str, Any]]


def show(report: dict[str, Any], console: Console) -> None:
    """Print a small table for each workload, and how times and memory grow."""
    console.print(headline(report), soft_wrap=True, highlight=False)
    for doubt in report["doubts"]:
        console.print(doubt, soft_wrap=True, highlight=False)
    for label, rows in sections(report["rows"]):
        table = Table(title=label, title_justify="left", title_style="bold", box=box.SIMPLE)
        for place, header in enumerate(NARROW):
            table.add_column(header, justify="right" if place else "left", no_wrap=True)
        for row in rows:
            if not row["missing"]:
                table.add_row(*cells_of(row))
        if table.row_count:
            console.print(table)
        else:
            console.print(f"[bold]{label}[/]")
        for line in remarks(rows):
            console.print(f"  {line}", soft_wrap=True, highlight=False, markup=False)
    for line in growth_lines(report["growths"]):
        console.print(line, soft_wrap=True, highlight=False)


def sections(rows: Rows) -> list[tuple[str, Rows]]:
    """The rows of each workload, or of each type of a sweep, under its label."""
    return [(label, list(group)) for label, group in itertools.groupby(rows, section_of)]


def remarks(rows: Rows) -> list[str]:
    """What does not fit into columns: what is missing and why, what was measured as limits, wrong answers."""
    found = []
    for row in rows:
        texts = [row["missing"]] if row["missing"] else []
        if row["limits"]:
            texts.append(_limits(row["limits"]))
        if is_limit(row["contender"]) and row["note"]:
            texts.append(row["note"])
        if row["same_tokens"] is not None:
            texts.append("{} of {} tokens the same".format(*row["same_tokens"]))
        if row["agrees"] is False:
            texts.append(DISAGREES)
        if row["difference"] != row["difference_from_ours"] and row["difference_from_ours"] is not None:
            texts.append(f"its codes cost {row['difference_from_ours']:.1%}")
        if row["extra_bytes"] is not None:
            texts.append(row["note"])
        if texts:
            found.append(f"{name_of(row)}: {', '.join(texts)}")
    return found


def section_of(row: dict[str, Any]) -> str:
    """The label of a row's workload, or of the type of a sweep."""
    return f"{row['workload']}/{row['dtype']}" if row["workload"] in SWEEPS else _label(row)


def name_of(row: dict[str, Any]) -> str:
    """The contender; in a sweep with the size before it."""
    return f"{row['detail']} {row['contender']}" if row["workload"] in SWEEPS else str(row["contender"])


def headline(report: dict[str, Any]) -> str:
    """Version, CPU, instruction set, threads, date."""
    info, options = report["softlookup"], report["options"]
    units = f" (has {', '.join(report['matrix_units'])})" if report["matrix_units"] else ""
    return (
        f"softlookup {info['version']} on {info['cpu']}{units}, {options['isa']}, {options['threads']} threads, "
        f"{report['measured'][:10]}"
    )


def cells_of(row: dict[str, Any]) -> tuple[str, ...]:
    """One text a column, of a row that is not missing."""
    if row["extra_bytes"] is not None:
        return (name_of(row), "", f"{row['extra_bytes'] / 2**20:.1f} MiB", "", "", "")
    silent = row["contender"] == OURS or is_limit(row["contender"]) or row["ours_is_faster"] is None
    return (
        name_of(row),
        _time(row["seconds"]),
        "" if row["unit"] == "us" else f"{row['rate']:.4g} {row['unit']}",
        "" if silent else f"{row['ours_is_faster']:.2f}x",
        "" if row["share_of_limit"] is None else f"{row['share_of_limit']:.2f}",
        "" if row["difference"] is None else f"{row['difference']:.1e}",
    )


def growth_lines(growths: Iterable[dict[str, Any]]) -> list[str]:
    """One line a fit."""
    return [
        f"{contender}, {what} as N^{exponent} from N = {first} to {last}; expected {expected}, {verdict}"
        for what, contender, first, last, exponent, expected, verdict in map(growth_cells, growths)
    ]


def growth_cells(growth: dict[str, Any]) -> tuple[str, ...]:
    """What grows, of whom, from and to which N, the exponent, the one expected, and whether it is that."""
    return (
        f"{growth['workload']}, {growth['quantity'].replace('_', ' ')}",
        growth["contender"],
        str(growth["sizes"][0]),
        str(growth["sizes"][-1]),
        f"{growth['exponent']:.2f}",
        f"{growth['expected']:.1f} ± {EXPONENT_TOLERANCE}",
        "as expected" if abs(growth["exponent"] - growth["expected"]) <= EXPONENT_TOLERANCE else "not as expected",
    )


def wrong_answers(rows: Rows) -> list[str]:
    """Who answered something else than what was asked."""
    return [f"{row['contender']} in {_label(row)}" for row in rows if row["agrees"] is False]


def _label(row: dict[str, Any]) -> str:
    return f"{row['workload']}/{row['detail']}/{row['dtype']}"


def _limits(limits: dict[str, float]) -> str:
    units = {"gflops": "GFLOP/s", "gbs": "GB/s", "gscores": "Gscores/s"}
    texts = []
    for name, value in limits.items():
        what, _, unit = name.rpartition("_")
        amount = _time(value) if unit == "seconds" else f"{value:.3g} {units[unit]}"
        texts.append(f"{what.replace('_', ' ')} {amount}")
    return ", ".join(texts)


def _time(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
