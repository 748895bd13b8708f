"""The bench: turns and rests, the report and its tables, and the command."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

import typer
from rich.console import Console
from typer.testing import CliRunner, Result

import softlookup as sl
from bench_cases import SMALL, TINY, options, run, short_samples
from softlookup._limits import MeasurementProblem
from softlookup.bench import command as command_module
from softlookup.bench import run as run_module
from softlookup.bench import timing, workloads
from softlookup.bench.command import bench
from softlookup.bench.growth import growths
from softlookup.bench.page import markdown
from softlookup.bench.peers import OURS, PEERS
from softlookup.bench.report import report_of
from softlookup.bench.rows import LIMIT, Row
from softlookup.bench.table import growth_lines, show
from softlookup.bench.workloads import Workload, names

__all__ = ["short_samples"]

pytestmark = pytest.mark.usefixtures("short_samples")


class TestTiming:
    def test_rounds_are_interleaved(self) -> None:
        order: list[str] = []

        def sampler(name: str) -> timing.Sampler:
            return lambda: float(len(order)) if not order.append(name) else 0.0  # type: ignore[func-returns-value]

        samples = timing.interleave({"a": sampler("a"), "b": sampler("b")}, 3, 60.0)
        assert order == ["a", "b"] * 3
        assert samples == {"a": [1.0, 3.0, 5.0], "b": [2.0, 4.0, 6.0]}

    def test_no_round_starts_after_the_time(self) -> None:
        samples = timing.interleave({"a": lambda: 1.0}, 1000, 0.0)
        assert samples == {"a": [1.0]}

    def test_one_call_before_the_first_that_counts(self) -> None:
        calls: list[int] = []
        sampler = timing.CallSampler(lambda: calls.append(1))
        assert sampler() > 0
        assert len(calls) == 1 + sampler.calls

    def test_how_long_a_sample_lasts(self) -> None:
        sampler = timing.CallSampler(lambda: time.sleep(0.001))
        sampler.calls = 3
        assert sampler.bunch_seconds() >= 0.003

    def test_other_work(self) -> None:
        others = timing.OtherWork().cpus()
        assert others is None or 0 <= others < 1024


class TestReport:
    @pytest.fixture(scope="class")
    @staticmethod
    def report() -> dict[str, Any]:
        rows = [*run(SMALL["decode"], "torch-sdpa", "jax"), *run(SMALL["call"])]
        return report_of(rows, options("torch-sdpa", "jax"), 0.5)

    def test_json(self, report: dict[str, Any]) -> None:
        assert json.loads(json.dumps(report, allow_nan=False))["rows"][0]["contender"] == LIMIT
        assert report["schema"] == 1
        assert report["softlookup"] == sl.info()
        assert set(report["peers"]) == {"torch", "jax"}
        assert {field.name for field in dataclasses.fields(Row)} == set(report["rows"][0])
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", report["measured"])

    def test_tables(self, report: dict[str, Any]) -> None:
        console = Console(width=80, record=True, file=io.StringIO())
        show(report, console)
        text = console.export_text()
        page = markdown(report)
        for piece in ("small/40/float32", "softlookup", "limit", "GB/s", "took 0.50 CPUs"):
            assert piece in text
            assert piece in page
        assert "…" not in text

    def test_an_infinite_difference_is_valid_json(self) -> None:
        wrong = Row("small", "full", "float32", "prefill", "jax", difference=math.inf, agrees=False)
        (row,) = json.loads(json.dumps(report_of([wrong], options(), None), allow_nan=False))["rows"]
        assert row["difference"] is None
        assert row["agrees"] is False

    def test_growths(self) -> None:
        def row(workload: str, detail: str, **fields: Any) -> Row:
            return Row(workload, detail, "float32", "prefill", OURS, **fields)

        rows = [row("time-full", str(n), seconds=1e-9 * n**2) for n in (512, 1024, 2048)]
        rows += [row("memory", f"forward-{n}", extra_bytes=7 * n) for n in (512, 1024, 2048)]
        rows += [row("time-window", "512", seconds=1.0), row("tiny", "full", seconds=1.0)]
        found = {growth.workload: growth for growth in growths(rows)}
        assert set(found) == {"time-full", "memory-forward"}
        assert found["time-full"].exponent == pytest.approx(2.0)
        assert found["memory-forward"].exponent == pytest.approx(1.0)
        assert (found["time-full"].expected, found["memory-forward"].expected) == (2.0, 1.0)
        assert found["memory-forward"].quantity == "extra_bytes"

    def test_growth_lines_judge(self) -> None:
        rows = [Row("time-full", str(n), "float32", "prefill", OURS, seconds=1e-9 * n**2.2) for n in (512, 1024, 2048)]
        (line,) = growth_lines(dataclasses.asdict(growth) for growth in growths(rows))
        assert line == (
            "softlookup, time-full, seconds as N^2.20 from N = 512 to 2048; expected 2.0 ± 0.1, not as expected"
        )


class TestPage:
    def page(self, *rows: Row, peers: tuple[str, ...] = (), **arguments: Any) -> list[str]:
        return markdown(report_of(rows, options(*peers), None), **arguments).splitlines()

    def row(self, contender: str, **fields: Any) -> Row:
        return Row("prefill-64", "full", "float32", "prefill", contender, unit="GFLOP/s", **fields)

    def test_a_line_for_each_workload_a_column_for_each_contender(self) -> None:
        lines = self.page(
            self.row(LIMIT, seconds=1.0, rate=400.0),
            self.row(OURS, seconds=2.0, rate=200.0, ours_is_faster=1.0, share_of_limit=0.5, agrees=True),
            self.row("torch-sdpa", seconds=3.0, rate=133.0, ours_is_faster=1.5, agrees=True),
            self.row("jax", seconds=9.0, rate=44.0, ours_is_faster=4.5, agrees=False),
            self.row("torch-flex", missing="needs a C++ compiler"),
        )
        start = lines.index("## Prefill (GFLOP/s)")
        assert lines[start + 2 : start + 8] == [
            "| workload | softlookup | limit | of limit | torch-sdpa | jax |",
            "|---|---:|---:|---:|---:|---:|",
            "| prefill-64/full/float32 | 200 | 400 | 0.50 | 133 (1.50x) | 44 WRONG ANSWER (4.50x) |",
            "",
            "Not measured:",
            "",
        ]
        assert lines[start + 8] == "- torch-flex: needs a C++ compiler (prefill-64/full/float32)"

    def test_every_row_of_a_table_has_as_many_cells(self) -> None:
        lines = self.page(*run(SMALL["decode"], "torch-sdpa"), *run(SMALL["call"]), peers=("torch-sdpa",))
        tables = [list(group) for inside, group in itertools.groupby(lines, lambda line: line[:1] == "|") if inside]
        assert len(tables) == 4
        for table in tables:
            assert len({line.count("|") for line in table}) == 1, table[0]

    def test_growth_memory_and_pictures(self) -> None:
        rows = [
            Row("memory", f"forward-{n}", "float32", "memory", OURS, extra_bytes=n * 1024, note="1024 bytes a row")
            for n in (1024, 2048, 4096)
        ]
        lines = self.page(*rows, pictures=["memory.png"])
        assert "| memory-forward, extra bytes | softlookup | 1024 | 4096 | 1.00 | 1.0 ± 0.1 | as expected |" in lines
        assert "| forward-2048 | 2.0 MiB | 1024 bytes a row |" in lines
        assert "![memory](memory.png)" in lines

    def test_what_to_type(self) -> None:
        lines = self.page(self.row(OURS, seconds=1.0, rate=1.0), peers=("jax",))
        command = next(line for line in lines if "softlookup bench" in line)
        assert "--workload prefill-64 --peer jax" in command
        assert "--peer" not in next(
            line for line in self.page(self.row(OURS, missing="no"), peers=tuple(PEERS)) if "softlookup bench" in line
        )


app = typer.Typer(pretty_exceptions_enable=False)
app.command()(bench)


def command(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, list(arguments))


class TestCommand:
    def test_list(self) -> None:
        result = command("--list")
        assert result.exit_code == 0
        for name in (*names(), *PEERS, "model-8k *", "takes minutes"):
            assert name in result.stdout

    def test_long_workloads_are_asked_for(self) -> None:
        run = {long: {w.name for w in command_module._workloads(None, long=long)} for long in (False, True)}
        assert run[True] == set(names())
        assert run[True] - run[False] == {"model-8k", "time-full", "time-window", "bandwidth", "memory"}

    def test_json_alone_on_standard_output(self) -> None:
        result = command("--workload", TINY, "--peer", "none", "--repeats", "2", "--json", "-")
        assert result.exit_code == 0
        report = json.loads(result.stdout)
        assert [row["contender"] for row in report["rows"]] == [OURS]
        assert len(report["rows"][0]["samples_seconds"]) == 2
        assert report["options"]["rounds"] == 2

    def test_json_file_and_table(self, tmp_path: Path) -> None:
        path = tmp_path / "report.json"
        result = command("--workload", TINY, "--peer", "torch-sdpa", "--repeats", "1", "--json", str(path))
        assert result.exit_code == 0
        assert "tiny/full/float32" in result.stdout
        assert json.loads(path.read_text())["rows"]

    def test_out(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("matplotlib")
        sweeps = [
            *(Workload("time-full", str(n), "float32", "prefill", 1, 1, n, n, 16, peers=()) for n in (64, 128, 256)),
            *(Workload("bandwidth", str(n), "float32", "decode", 1, 1, 1, n, 16, peers=()) for n in (64, 128)),
            *(Workload("memory", f"forward-{n}", "float32", "memory", 1, 1, n, n, 16) for n in (64, 128, 256)),
        ]
        monkeypatch.setattr(workloads, "WORKLOADS", tuple(sweeps))
        extra = iter((1000, 2000, 4000))
        monkeypatch.setattr(run_module, "extra_bytes", lambda *_, **__: next(extra))
        monkeypatch.setattr(command_module, "MACHINE_SECONDS", 0.05)
        chosen = "time-full,bandwidth,memory"
        result = command("--workload", chosen, "--peer", "none", "--repeats", "1", "--out", str(tmp_path / "made"))
        assert result.exit_code == 0, result.stderr
        made = {path.name for path in (tmp_path / "made").iterdir()}
        assert made == {"report.json", "report.md", "time.png", "bandwidth.png", "memory.png"}
        page = (tmp_path / "made" / "report.md").read_text()
        assert json.loads((tmp_path / "made" / "report.json").read_text())["machine"]["peaks"]
        for piece in (
            "fma_float32",
            "GB/s",
            "fitted exponent",
            "![time](time.png)",
            "![bandwidth](bandwidth.png)",
            "![memory](memory.png)",
        ):
            assert piece in page

    def test_forced_set(self) -> None:
        slowest = _first_isa()
        result = command("--workload", TINY, "--peer", "none", "--repeats", "1", "--isa", slowest, "--json", "-")
        assert json.loads(result.stdout)["options"]["isa"] == slowest

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("--workload", "nothing"), "no workload is called nothing"),
            (("--peer", "numpy"), "no peer is called numpy"),
            (("--repeats", "0"), "--repeats 0"),
            (("--seconds", "-1"), "--seconds -1"),
            (("--seconds", "nan"), "--seconds nan"),
            (("--threads", "0"), "threads"),
            (("--isa", "z80"), "--isa z80"),
            (("--json", "/nowhere/at/all.json"), "/nowhere/at/all.json"),
            (("--out", "/dev/null/folder"), "/dev/null"),
        ],
    )
    def test_bad_input_is_one_line(self, arguments: tuple[str, ...], words: str) -> None:
        result = command(*arguments)
        assert result.exit_code == 2
        assert result.stdout == ""
        (line,) = result.stderr.strip().splitlines()
        assert line.startswith("softlookup: ")
        assert words in line

    def test_a_wrong_answer_is_exit_code_1(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(run_module, "difference_from_float64", lambda *_: math.inf)
        result = command("--workload", TINY, "--peer", "none", "--repeats", "1", "--json", "-")
        assert result.exit_code == 1
        assert "wrong answers: softlookup in tiny/full/float32" in result.stderr

    def test_threads_that_never_meet_are_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def never(*_: Any, **__: Any) -> None:
            raise MeasurementProblem("softlookup: 2 threads never ran at the same time")

        monkeypatch.setattr(run_module, "interleave", never)
        result = command("--workload", TINY, "--peer", "none")
        assert result.exit_code == 2
        assert result.stderr.strip().splitlines()[-1] == "softlookup: 2 threads never ran at the same time"


def _first_isa() -> str:
    isas: Any = sl.info()["isas"]
    return str(isas[0])


def test_listing_loads_no_peer() -> None:
    program = (
        "import sys, softlookup.bench.command; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'jax', 'onnxruntime', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
