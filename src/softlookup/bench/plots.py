"""The sweeps as pictures (matplotlib): time against N, bandwidth against M, memory against N."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

COLOURS = {"softlookup": "#0b6e99", "torch-sdpa": "#d9730d", "limit": "#787774"}
MARKERS = {"float32": "o", "bfloat16": "s"}
PLAIN = FuncFormatter(lambda value, _: f"{value:g}")
MEMORY_TARGET_MIB = 64


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write the pictures that the report has points for; returns their paths."""
    drawn = (
        _time_against_n(report, folder / "time.png"),
        _bandwidth_against_m(report, folder / "bandwidth.png"),
        _memory_against_n(report, folder / "memory.png"),
    )
    return [path for path in drawn if path is not None]


def _time_against_n(report: dict[str, Any], path: Path) -> Path | None:
    growths = [growth for growth in report["growths"] if growth["quantity"] == "seconds"]
    if not growths:
        return None
    axes = _axes("Time of one lookup, 2 heads, d 64, float32", "N = M", "ms")
    for growth in growths:
        line = "--" if growth["workload"] == "time-window" else "-"
        what = "window of 256" if growth["workload"] == "time-window" else "full"
        label = f"{growth['contender']}, {what}: N^{growth['exponent']:.2f}"
        _fitted(axes, growth, 1e3, line, COLOURS.get(growth["contender"], "black"), label)
    _logarithmic(axes)
    return _saved(axes, path)


def _bandwidth_against_m(report: dict[str, Any], path: Path) -> Path | None:
    rows = [row for row in report["rows"] if row["workload"] == "bandwidth" and row["seconds"]]
    if not rows:
        return None
    axes = _axes("Decoding: 32 query heads on 8 key heads, d 128", "M keys", "GB/s of the cache")
    for contender in dict.fromkeys(row["contender"] for row in rows):
        for dtype in dict.fromkeys(row["dtype"] for row in rows):
            points = [(int(r["detail"]), r["rate"]) for r in rows if (r["contender"], r["dtype"]) == (contender, dtype)]
            if points:
                line = "-" if dtype == "float32" else "--"
                sizes, rates = zip(*sorted(points), strict=True)
                colour = COLOURS.get(contender, "black")
                axes.plot(sizes, rates, line, marker=MARKERS[dtype], color=colour, label=f"{contender}, {dtype}")
    axes.set_ylim(bottom=0)
    return _saved(axes, path)


def _memory_against_n(report: dict[str, Any], path: Path) -> Path | None:
    growths = [growth for growth in report["growths"] if growth["quantity"] == "extra_bytes"]
    if not growths:
        return None
    axes = _axes("Peak memory beyond inputs and outputs, one head, d 64, with statistics", "N = M", "MiB")
    for growth in growths:
        what = growth["workload"].removeprefix("memory-")
        line = "-" if what == "forward" else "--"
        _fitted(axes, growth, 2**-20, line, COLOURS["softlookup"], f"{what}: N^{growth['exponent']:.2f}")
    axes.axhline(MEMORY_TARGET_MIB, color=COLOURS["limit"], linestyle=":", label=f"target: {MEMORY_TARGET_MIB} MiB")
    _logarithmic(axes)
    return _saved(axes, path)


def _fitted(axes: Axes, growth: dict[str, Any], unit: float, line: str, colour: str, label: str) -> None:
    """The points, and the fitted power as a line through them."""
    sizes, values = np.array(growth["sizes"]), np.array(growth["values"]) * unit
    centre = np.exp(np.log(values).mean() - growth["exponent"] * np.log(sizes).mean())
    axes.plot(sizes, values, "o", color=colour)
    axes.plot(sizes, centre * sizes ** growth["exponent"], line, color=colour, label=label)


def _axes(title: str, across: str, up: str) -> Axes:
    axes: Axes = Figure(figsize=(7, 4.5), layout="constrained").subplots()
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(PLAIN)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _logarithmic(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(PLAIN)
    axes.yaxis.set_minor_formatter(NullFormatter())


def _saved(axes: Axes, path: Path) -> Path:
    axes.legend(frameon=False)
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.savefig(path, dpi=150)
    return path
