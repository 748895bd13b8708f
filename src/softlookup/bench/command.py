"""`softlookup bench`. Bad input ends with exit code 2 and one line, a wrong answer of any contender with 1."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import softlookup as sl
from softlookup._limits import MeasurementProblem
from softlookup.bench.page import markdown
from softlookup.bench.peers import PEERS
from softlookup.bench.report import report_of
from softlookup.bench.rows import Row
from softlookup.bench.run import Options, run_workload
from softlookup.bench.table import show, wrong_answers
from softlookup.bench.timing import OtherWork
from softlookup.bench.workloads import LONG, WORKLOADS, Workload, names, select
from softlookup.machine import Machine, measure

STANDARD_OUTPUT = "-"
MACHINE_SECONDS = 10.0


def bench(
    workload: Annotated[
        str | None,
        typer.Option(help="Names, or name/detail/dtype, separated by commas; all but the long ones by default."),
    ] = None,
    peer: Annotated[str, typer.Option(help="Names separated by commas, all, or none.")] = "all",
    repeats: Annotated[int, typer.Option(help="Rounds in which every contender has one turn.")] = 7,
    seconds: Annotated[float, typer.Option(help="Time for each workload, after which no round starts.")] = 20.0,
    threads: Annotated[int | None, typer.Option(help="Threads of all; the default is that of the library.")] = None,
    isa: Annotated[str | None, typer.Option(help="Force an instruction set of this CPU.")] = None,
    json_path: Annotated[
        str | None, typer.Option("--json", help="File for the report as JSON; - is standard output.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.json, report.md (a page with plots); runs the long ones too.")
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="List the workloads and the peers, and stop.")] = False,
) -> None:
    """Measure softlookup beside its peers and the limits of this machine, in one run, each answer checked."""
    if list_only:
        _show_names(Console())
        return
    chosen = _workloads(workload, long=out is not None)
    options = _options(peer, repeats, seconds, threads, isa)
    _check_outputs(json_path, out)
    others = OtherWork()
    try:
        machine = None if out is None else _machine(options)
        rows = _run(chosen, options)
    except MeasurementProblem as problem:
        _fail(str(problem))
    report = report_of(rows, options, others.cpus(), machine)
    if json_path != STANDARD_OUTPUT:
        show(report, Console())
    _write(report, json_path, out)
    if wrong := wrong_answers(report["rows"]):
        print(f"softlookup: wrong answers: {'; '.join(wrong)}", file=sys.stderr)
        raise typer.Exit(1)


def _machine(options: Options) -> Machine:
    """What the machine can do at its best, on one thread and on all."""
    return measure(seconds=MACHINE_SECONDS, threads=sorted({1, options.threads}), isas=[options.isa])


def _run(chosen: list[Workload], options: Options) -> list[Row]:
    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(chosen))
        for workload in chosen:
            rows += run_workload(workload, options, lambda text: progress.update(task, description=text))
            progress.advance(task)
    return rows


def _workloads(text: str | None, *, long: bool) -> list[Workload]:
    if text is None:
        return [workload for workload in WORKLOADS if long or workload.name not in LONG]
    try:
        return select(text.split(","))
    except ValueError as problem:
        _fail(f"--workload {text}: {problem}")


def _options(peer: str, repeats: int, seconds: float, threads: int | None, isa: str | None) -> Options:
    named = {"all": tuple(PEERS), "none": ()}
    peers = named[peer] if peer in named else tuple(peer.split(","))
    if unknown := [name for name in peers if name not in PEERS]:
        _fail(
            f"--peer {peer}: no peer is called {', '.join(unknown)}; expected all, none, or some of {', '.join(PEERS)}"
        )
    if repeats < 1:
        _fail(f"--repeats {repeats}: expected at least 1")
    if not seconds > 0:
        _fail(f"--seconds {seconds}: expected a positive number")
    try:
        info = sl.info()
        with sl.threads(sl.get_threads() if threads is None else threads):
            count = sl.get_threads()
    except ValueError as problem:
        _fail(str(problem))
    usable: Any = info["isas"]
    if isa is not None and isa not in usable:
        _fail(f"--isa {isa}: this CPU and build have {', '.join(usable)}")
    return Options(peers, repeats, seconds, count, isa or str(info["isa"]))


def _check_outputs(json_path: str | None, out: Path | None) -> None:
    """Find out before the run, not after it."""
    try:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        if json_path not in (None, STANDARD_OUTPUT):
            Path(str(json_path)).touch()
    except OSError as problem:
        _fail(f"cannot write {problem.filename}: {problem.strerror}")
    if out is not None:
        try:
            import matplotlib  # noqa: F401
        except ModuleNotFoundError:
            _fail("--out draws plots with matplotlib: pip install 'softlookup[bench]'")


def _write(report: dict[str, Any], json_path: str | None, out: Path | None) -> None:
    text = json.dumps(report, indent=2)
    if json_path == STANDARD_OUTPUT:
        print(text)
    elif json_path is not None:
        Path(json_path).write_text(text + "\n")
    if out is not None:
        from softlookup.bench.plots import draw

        (out / "report.json").write_text(text + "\n")
        pictures = draw(report, out)
        (out / "report.md").write_text(markdown(report, [path.name for path in pictures]))
        paths = [out / "report.json", out / "report.md", *pictures]
        Console(stderr=True).print(f"wrote {', '.join(map(str, paths))}", soft_wrap=True)


def _show_names(console: Console) -> None:
    table = Table("workload", "lines", title="Workloads", title_justify="left")
    for name in names():
        lines = [f"{workload.detail}/{workload.dtype}" for workload in WORKLOADS if workload.name == name]
        table.add_row(f"{name} *" if name in LONG else name, ", ".join(lines))
    console.print(table)
    console.print("* takes minutes: run where it is named, or with --out", highlight=False)
    peers = Table("peer", "package", "installed", title="Peers", title_justify="left")
    for peer in PEERS.values():
        peers.add_row(peer.name, peer.package, peer.version() or "not installed")
    console.print(peers)


def _fail(message: str) -> NoReturn:
    print(f"softlookup: {' '.join(message.split()).removeprefix('softlookup: ')}", file=sys.stderr)
    raise typer.Exit(2)
