"""The report as a table: on a terminal (rich) and as Markdown."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from softlookup.bench.peers import OURS
from softlookup.bench.rows import LIMIT
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
    return [(label, list(group)) for label, group in itertools.groupby(rows, _section)]


def remarks(rows: Rows) -> list[str]:
    """What does not fit into columns: what is missing and why, what was measured as limits, wrong answers."""
    found = []
    for row in rows:
        texts = [row["missing"]] if row["missing"] else []
        if row["limits"]:
            texts.append(_limits(row["limits"]))
        if row["contender"] == LIMIT and row["note"]:
            texts.append(row["note"])
        if row["agrees"] is False:
            texts.append(DISAGREES)
        if row["difference"] != row["difference_from_ours"] and row["difference_from_ours"] is not None:
            texts.append(f"its codes cost {row['difference_from_ours']:.1%}")
        if row["extra_bytes"] is not None:
            texts.append(row["note"])
        if texts:
            found.append(f"{_name(row)}: {', '.join(texts)}")
    return found


def markdown(report: dict[str, Any]) -> str:
    """A page with the same table."""
    lines = [f"# {headline(report)}", "", _versions(report), "", *report["doubts"]]
    lines += ["| workload | " + " | ".join(HEADERS) + " | |", "|---|---|" + "---:|" * (len(HEADERS) - 1) + "---|"]
    for label, rows in sections(report["rows"]):
        for row in rows:
            told = "".join(remarks([row])).removeprefix(f"{_name(row)}: ")
            cells = (label, _name(row), *([""] * 5)) if row["missing"] else (label, *cells_of(row))
            lines.append("| " + " | ".join((*cells, told)) + " |")
    growth = growth_lines(report["growths"])
    return "\n".join([*lines, *([""] + [f"- {line}" for line in growth] if growth else [])]) + "\n"


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
        return (_name(row), "", f"{row['extra_bytes'] / 2**20:.1f} MiB", "", "", "")
    silent = row["contender"] in (OURS, LIMIT) or row["ours_is_faster"] is None
    return (
        _name(row),
        _time(row["seconds"]),
        "" if row["unit"] == "us" else f"{row['rate']:.4g} {row['unit']}",
        "" if silent else f"{row['ours_is_faster']:.2f}x",
        "" if row["share_of_limit"] is None else f"{row['share_of_limit']:.2f}",
        "" if row["difference"] is None else f"{row['difference']:.1e}",
    )


def growth_lines(growths: Iterable[dict[str, Any]]) -> list[str]:
    """One line a fit."""
    return [
        f"{growth['contender']}, {growth['workload']}: {growth['quantity'].replace('_', ' ')} grow as "
        f"N^{growth['exponent']:.2f} from N = {growth['sizes'][0]} to {growth['sizes'][-1]}"
        for growth in growths
    ]


def wrong_answers(rows: Rows) -> list[str]:
    """Who answered something else than what was asked."""
    return [f"{row['contender']} in {_label(row)}" for row in rows if row["agrees"] is False]


def _versions(report: dict[str, Any]) -> str:
    peers = ", ".join(f"{name} {found or 'not installed'}" for name, found in report["peers"].items())
    return f"Python {report['python']}, {report['system']}; {report['softlookup']['compiler']}; {peers or 'no peers'}."


def _label(row: dict[str, Any]) -> str:
    return f"{row['workload']}/{row['detail']}/{row['dtype']}"


def _section(row: dict[str, Any]) -> str:
    return f"{row['workload']}/{row['dtype']}" if row["workload"] in SWEEPS else _label(row)


def _name(row: dict[str, Any]) -> str:
    return f"{row['detail']} {row['contender']}" if row["workload"] in SWEEPS else str(row["contender"])


def _limits(limits: dict[str, float]) -> str:
    units = {"gflops": "GFLOP/s", "gbs": "GB/s", "gscores": "Gscores/s"}
    parts = (name.rpartition("_") for name in limits)
    return ", ".join(f"{what} {limits[f'{what}_{unit}']:.3g} {units[unit]}" for what, _, unit in parts)


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
