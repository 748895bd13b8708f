"""The command line without a model: what it prints, JSON alone on standard output, and one line for bad input."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner, Result

import softlookup as sl
from softlookup.cli import app
from softlookup.demo import basics


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, list(arguments))


def program(text: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program of its own, where packages and variables can be taken away."""
    command = [sys.executable, "-c", text, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def fails(*arguments: str) -> str:
    """The one line that a bad call ends with."""
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert lines[-1].startswith("softlookup: ")
    assert "Traceback" not in result.stderr
    return lines[-1]


class TestInfo:
    def test_json(self) -> None:
        result = run("info", "--json")
        assert result.exit_code == 0
        assert json.loads(result.stdout) == sl.info()

    def test_table(self) -> None:
        result = run("info")
        assert result.exit_code == 0
        for name in sl.info():
            assert name in result.stdout

    @pytest.mark.parametrize("command", ["info", "demo"])
    @pytest.mark.parametrize("variable", ["SOFTLOOKUP_NUM_THREADS", "SOFTLOOKUP_ISA"])
    def test_impossible_environment(self, command: str, variable: str) -> None:
        done = program("from softlookup.cli import main; main()", command, **{variable: "many"})
        assert done.returncode == 2
        (line,) = done.stderr.strip().splitlines()
        assert variable in line
        assert line.count("softlookup: ") == 1

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
    @pytest.mark.parametrize("arguments", [["info"], ["info", "--json"], ["bench", "--list"]])
    def test_full_disk(self, arguments: list[str]) -> None:
        with Path("/dev/full").open("w") as full:
            command = [sys.executable, "-c", "from softlookup.cli import main; main()", *arguments]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr == "softlookup: cannot write the output: No space left on device\n"


class TestBench:
    def test_list_needs_no_package_of_a_peer(self) -> None:
        absent = (
            "import sys; sys.modules.update(dict.fromkeys(['torch', 'jax', 'onnxruntime', 'matplotlib', 'ml_dtypes']))"
        )
        done = program(f"{absent}; from softlookup.cli import main; main()", "bench", "--list")
        assert done.returncode == 0
        assert done.stderr == ""
        assert "torch-sdpa" in done.stdout

    def test_plots_need_a_package(self, tmp_path: Path) -> None:
        text = "import sys; sys.modules['matplotlib'] = None; from softlookup.cli import main; main()"
        done = program(text, "bench", "--workload", "tiny", "--out", str(tmp_path))
        assert done.returncode == 2
        (line,) = done.stderr.strip().splitlines()
        assert "softlookup[bench]" in line


class TestDemo:
    def test_everything_as_text(self) -> None:
        start = time.perf_counter()
        result = run("demo")
        assert time.perf_counter() - start < 10
        assert result.exit_code == 0
        assert result.stderr == ""
        for piece in ("0.88865", "0.05882", "■ ■ · ·", "34 of 100 scores", "entropy", "NumPy ms"):
            assert piece in result.stdout
        assert max(map(len, result.stdout.splitlines())) <= 80

    def test_json_alone_on_standard_output(self) -> None:
        report = json.loads(program("from softlookup.cli import main; main()", "demo", "--json").stdout)
        assert report["info"]["version"] == sl.info()["version"]
        assert [round(weight, 5) for weight in report["basics"]["lookup"]["weights"]] == [
            0.05252,
            0.05252,
            0.88865,
            0.0063,
        ]

    def test_no_framework_is_loaded(self) -> None:
        text = (
            "import sys; from softlookup.cli import app; from typer.testing import CliRunner; "
            "CliRunner().invoke(app, ['demo']); print({'torch', 'transformers', 'matplotlib'} & set(sys.modules))"
        )
        assert program(text).stdout == "set()\n"


class TestBasics:
    def test_lookup(self) -> None:
        lookup = basics.worked_lookup()
        assert [round(number, 5) for number in lookup["out"]] == [0.05882, 0.05882, 0.89495]
        assert [round(number, 5) for number in lookup["unscaled_weights"]] == [0.01765, 0.01765, 0.96382, 0.00088]

    def test_masks(self) -> None:
        causal, window, padded = basics.mask_pictures()
        size = basics.PICTURE_SIZE
        assert causal["visible"] == size * (size + 1) // 2
        assert [row.count("■") for row in window["rows"]] == [min(i + 1, 4) for i in range(size)]
        assert padded["rows"][:3] == ["·" * size] * 3

    def test_entropy_falls_from_ln_m(self) -> None:
        entropies = [row["entropy_nats"] for row in basics.entropy_rows()]
        assert entropies[0] == pytest.approx(math.log(256), abs=1e-5)
        assert entropies == sorted(entropies, reverse=True)

    def test_speed_compares_equal_results(self) -> None:
        for race in basics.speed():
            assert race["largest_difference"] < 1e-5
            assert race["ratio"] == race["numpy_seconds"] / race["softlookup_seconds"]


class TestBadInput:
    @pytest.mark.parametrize("contexts", ["a,b", "", "0", "512,-1", "1.5"])
    def test_contexts(self, contexts: str) -> None:
        assert "expected positive whole numbers" in fails("demo", "--contexts", contexts)

    def test_tokens(self) -> None:
        assert "--tokens 0" in fails("demo", "--tokens", "0")

    @pytest.mark.parametrize(
        "arguments", [["nonsense"], ["--nonsense"], ["demo", "--nonsense"], ["demo", "--tokens", "x"]]
    )
    def test_unknown_arguments(self, arguments: list[str]) -> None:
        done = program("from softlookup.cli import main; main()", *arguments)
        assert done.returncode == 2
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert line.startswith("softlookup: ")
        assert line.endswith("; see softlookup --help")

    def test_no_arguments_show_the_help(self) -> None:
        done = program("from softlookup.cli import main; main()")
        assert done.returncode == 2
        assert "Commands:" in done.stderr

    def test_model_that_is_nowhere(self) -> None:
        pytest.importorskip("transformers")
        assert "--model nowhere: no such folder or file" in fails("demo", "--model", "nowhere")
        assert run("demo", "--model", "nowhere").stderr.startswith("softlookup: --model nowhere")

    def test_folder_without_a_model(self, tmp_path: Path) -> None:
        pytest.importorskip("transformers")
        assert "has no config.json" in fails("demo", "--model", str(tmp_path))

    def test_file_of_another_kind(self, tmp_path: Path) -> None:
        pytest.importorskip("transformers")
        file = tmp_path / "model.bin"
        file.touch()
        assert "not a .gguf file" in fails("demo", "--model", str(file))

    @pytest.mark.parametrize(
        ("package", "arguments", "fix"),
        [
            ("typer", ["demo"], "softlookup[cli]"),
            ("torch", ["demo", "--model", "auto"], "softlookup[demo]"),
            ("matplotlib", ["demo", "--model", "auto"], "softlookup[demo]"),
        ],
    )
    def test_missing_package(self, package: str, arguments: list[str], fix: str) -> None:
        text = f"import sys; sys.modules[{package!r}] = None; from softlookup.cli import main; main()"
        done = program(text, *arguments)
        assert done.returncode == 2
        assert done.stdout == ""
        (line,) = done.stderr.strip().splitlines()
        assert package in line
        assert fix in line
