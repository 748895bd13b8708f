"""The model workload of the bench, on a tiny random model: who takes part, what is compared, what is missing.

llama.cpp is played by a stand-in that computes right answers with transformers; where the real one is installed, it
reads the same tiny model from a .gguf file.
"""

from __future__ import annotations

import ctypes
import dataclasses
import io
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

for package in ("typer", "torch", "transformers", "platformdirs", "huggingface_hub"):
    pytest.importorskip(package)

import torch  # noqa: E402
from rich.console import Console  # noqa: E402

from bench_cases import limits_of_decoding, options, short_samples  # noqa: E402
from softlookup.bench.model import prompt as prompt_module  # noqa: E402
from softlookup.bench.model.run import ANSWER_TOKENS, Decode, Prefill  # noqa: E402
from softlookup.bench.page import markdown  # noqa: E402
from softlookup.bench.peers import OURS, PEERS, STOCK, model_llama, model_transformers  # noqa: E402
from softlookup.bench.report import report_of  # noqa: E402
from softlookup.bench.rows import LIMIT, LIMITS, NO_ATTENTION, Row  # noqa: E402
from softlookup.bench.run import run_workload  # noqa: E402
from softlookup.bench.table import show  # noqa: E402
from softlookup.bench.workloads import select  # noqa: E402
from softlookup.demo.model_source import MODEL_NAME, Source  # noqa: E402
from softlookup.demo.problem import DemoProblem  # noqa: E402
from tiny_language_model import HEADS, KEY_HEADS, LAYERS, WIDTH, byte_tokenizer, tiny_model  # noqa: E402

__all__ = ["short_samples"]

pytestmark = pytest.mark.usefixtures("short_samples", "tiny_source")

WORDS = 40
HALF = ("softlookup-bf16", "transformers-bf16")
LLAMA = ("llama.cpp-f16", "llama.cpp-q8_0", "llama.cpp-q4_0")
WORKLOAD = dataclasses.replace(select(["model-8k"])[0], detail=str(WORDS), queries=WORDS, keys=WORDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def tiny_source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_module, "find_model", lambda wanted, say: Source("tiny", folder))


def run(*peers: str) -> list[Row]:
    return run_workload(WORKLOAD, options(*peers), lambda _: None)


def by_name(rows: list[Row], part: str) -> dict[str, Row]:
    return {row.contender: row for row in rows if row.detail == part}


class TestRun:
    @pytest.fixture(scope="class")
    @staticmethod
    def rows(folder: Path) -> list[Row]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prompt_module, "find_model", lambda wanted, say: Source("tiny", folder))
            return run(*HALF)

    @pytest.mark.parametrize("part", ["prefill", "decode"])
    def test_contenders(self, rows: list[Row], part: str) -> None:
        names = [row.contender for row in rows if row.detail == part]
        assert names == [*LIMITS.values(), *NO_ATTENTION.values(), OURS, STOCK, *HALF]
        for row in by_name(rows, part).values():
            assert row.missing is None
            assert row.seconds is not None
            assert row.rate == pytest.approx(WORDS / row.seconds if part == "prefill" else 1e3 * row.seconds)

    @pytest.mark.parametrize("part", ["prefill", "decode"])
    def test_ours_answers_as_the_stock_model_does(self, rows: list[Row], part: str) -> None:
        count = 1 if part == "prefill" else ANSWER_TOKENS - 1
        found = by_name(rows, part)
        ours = found[OURS]
        assert ours.agrees
        assert ours.same_tokens == (count, count)
        assert ours.difference is not None
        assert 0 < ours.difference < 1e-5
        assert found[STOCK].difference == 0
        for name in HALF:
            assert found[name].difference is not None
            assert found[name].difference > ours.difference

    def test_limits(self, rows: list[Row]) -> None:
        found = by_name(rows, "decode")
        limit = found[LIMIT]
        assert limit.limits is not None
        assert set(limit.limits) == limits_of_decoding() | {"without_attention_seconds", "lookups_seconds"}
        assert limit.seconds == pytest.approx(
            limit.limits["without_attention_seconds"] + limit.limits["lookups_seconds"]
        )
        assert "read_gbs" not in (by_name(rows, "prefill")[LIMIT].limits or {})
        for name, dtype in ((OURS, "float32"), (HALF[0], "bfloat16")):
            expected = found[LIMITS[dtype]].samples_seconds[0] / found[name].samples_seconds[0]
            assert found[name].share_of_limit == pytest.approx(expected)

    def test_half_precision_is_compared_with_half_precision(self, rows: list[Row]) -> None:
        found = by_name(rows, "decode")
        ours, stock = (found[name].samples_seconds[0] for name in HALF)
        assert found[HALF[1]].ours_is_faster == pytest.approx(stock / ours)

    def test_page(self, rows: list[Row]) -> None:
        page = markdown(report_of(rows, options(*HALF), None))
        for piece in (
            "### Prefill",
            "### Decode",
            "tokens/s",
            "ms/token",
            f"{ANSWER_TOKENS - 1} of {ANSWER_TOKENS - 1}",
        ):
            assert piece in page
        assert "without attention" in page

    def test_table_fits_a_terminal(self, rows: list[Row]) -> None:
        console = Console(width=80, record=True, file=io.StringIO())
        long = [dataclasses.replace(row, seconds=535.46, rate=1234.5) for row in rows]
        show(report_of(long, options(*HALF), None), console)
        assert "…" not in console.export_text()

    def test_shape_is_that_of_the_model(self) -> None:
        prompt = prompt_module.Prompt.of(WORKLOAD, lambda _: None)
        shape = prompt.workload
        assert (shape.batch, shape.heads, shape.key_heads, shape.width) == (LAYERS, HEADS, KEY_HEADS, WIDTH)
        assert len(prompt.words) == WORDS
        assert prompt.model("bfloat16") is prompt.model("bfloat16")
        assert prompt.model("bfloat16").dtype is torch.bfloat16

    def test_without_the_peers_the_stock_model_still_judges(self) -> None:
        names = [row.contender for row in run() if row.detail == "prefill"]
        assert names == [LIMIT, NO_ATTENTION["float32"], OURS, STOCK]

    def test_a_wrong_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        read = model_transformers.TransformersReader.read

        def shifted(self: model_transformers.TransformersReader, words: list[int]) -> Any:
            return read(self, words) + np.float32(self._implementation == "softlookup")

        monkeypatch.setattr(model_transformers.TransformersReader, "read", shifted)
        assert by_name(run(), "decode")[OURS].agrees is False

    def test_no_attention_has_the_shape_of_attention(self) -> None:
        query, key, value = torch.ones(1, 4, 5, 8), torch.ones(1, 2, 5, 8), torch.ones(1, 2, 5, 6)
        out, weights = model_transformers._no_attention(torch.nn.Identity(), query, key, value, None, scaling=1.0)
        assert out.shape == (1, 5, 4, 6)
        assert weights is None


class TestSamplers:
    class Recorder:
        note, dtype = "", "float32"

        def __init__(self) -> None:
            self.calls: list[Any] = []

        def clear(self) -> None:
            self.calls.append("clear")

        def rewind(self, length: int) -> None:
            self.calls.append(length)

        def read(self, words: Any) -> Any:
            self.calls.append(list(words))
            return np.zeros(3, np.float32)

        def close(self) -> None:
            pass

    def test_prefill_starts_from_nothing(self) -> None:
        reader = self.Recorder()
        sampler = Prefill(reader, [1, 2], lambda: reader.calls.append("announced"))
        assert sampler() >= 0
        assert reader.calls == ["announced", "clear", [1, 2]]
        assert sampler.logits is not None

    def test_every_turn_decodes_the_same_tokens(self) -> None:
        reader = self.Recorder()
        sampler = Decode(reader, 7, [4, 5, 6])
        for _ in range(2):
            assert sampler() >= 0
        assert reader.calls == [7, [4], [5], [6]] * 2


class TestMissing:
    def test_no_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def offline(wanted: str, say: Any) -> Source:
            raise DemoProblem("pip could not download the model")

        monkeypatch.setattr(prompt_module, "find_model", offline)
        (row,) = run(*PEERS)
        assert (row.contender, row.missing) == (OURS, "pip could not download the model")

    def test_a_text_too_short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prompt_module, "first_words", lambda tokenizer, count: [1, 2, 3])
        (row,) = run()
        assert row.missing is not None
        assert f"only 3 of {WORDS} tokens" in row.missing

    def test_no_transformers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        monkeypatch.setitem(sys.modules, "transformers.utils.logging", None)
        for name in ("softlookup.bench.model.run", "softlookup.bench.model.prompt"):
            monkeypatch.delitem(sys.modules, name)
        (row,) = run()
        assert row.missing is not None
        assert row.missing.startswith("transformers")
        assert row.missing.endswith("is not installed: pip install 'softlookup[bench]'")

    def test_no_llama(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "llama_cpp", None)
        rows = by_name(run(*LLAMA), "decode")
        for name in LLAMA:
            assert rows[name].missing == "llama_cpp is not installed: pip install 'softlookup[bench-llama]'"


class StandIn(types.ModuleType):
    """As much of llama_cpp as the peer uses; its answers are those of the tiny model, without a cache."""

    GGML_TYPE_F16, GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, LLAMA_FTYPE_MOSTLY_F16 = 1, 2, 8, 1

    def __init__(self) -> None:
        super().__init__("llama_cpp")
        stand_in = self
        self.made: list[dict[str, Any]] = []
        self.quantize_fails = False

        class Llama:
            def __init__(self, **arguments: Any) -> None:
                assert Path(arguments["model_path"]).read_bytes() == b"half"
                stand_in.made.append(arguments)
                self.model = tiny_model()
                self.words: list[int] = []
                self.n_tokens = 0
                self.ctx = self

            def reset(self) -> None:
                self.n_tokens = 0

            def eval(self, words: list[int]) -> None:
                self.words = [*self.words[: self.n_tokens], *words]
                self.n_tokens = len(self.words)
                with torch.no_grad():
                    self.logits = self.model(torch.tensor([self.words])).logits[0, -1].numpy().copy()

            def n_vocab(self) -> int:
                return int(self.model.config.vocab_size)

            def close(self) -> None:
                del self.model

        self.Llama = Llama

    @staticmethod
    def llama_get_logits(context: Any) -> Any:
        return context.logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    @staticmethod
    def llama_model_quantize_default_params() -> Any:
        class Parameters(ctypes.Structure):
            _fields_ = [("ftype", ctypes.c_int), ("allow_requantize", ctypes.c_bool)]

        return Parameters()

    def llama_model_quantize(self, source: bytes, target: bytes, parameters: Any) -> int:
        assert Path(source.decode()).read_bytes() == b"quarter"
        Path(target.decode()).write_bytes(b"half")
        return int(self.quantize_fails)


class TestLlama:
    @pytest.fixture
    def stand_in(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandIn:
        module = StandIn()
        gguf = tmp_path / "model.gguf"
        gguf.write_bytes(b"quarter")
        monkeypatch.setitem(sys.modules, "llama_cpp", module)
        monkeypatch.setattr(model_llama, "find_gguf", lambda say: gguf)
        return module

    def test_answers_and_configuration(self, stand_in: StandIn, tmp_path: Path) -> None:
        rows = by_name(run(*LLAMA), "decode")
        for name in LLAMA:
            assert rows[name].agrees
            assert rows[name].same_tokens == (ANSWER_TOKENS - 1, ANSWER_TOKENS - 1)
            assert rows[name].share_of_limit is None
        first, second, third = stand_in.made
        assert (first["type_k"], first["type_v"]) == (1, 1)
        assert (second["type_k"], second["type_v"]) == (8, 8)
        assert (third["type_k"], third["type_v"]) == (2, 2)
        assert first["flash_attn"]
        assert first["n_ctx"] == 256
        kept = {path.name for path in tmp_path.iterdir()}
        assert kept == {"model.gguf", f"{MODEL_NAME}.F16.gguf"}

    def test_a_conversion_that_fails(self, stand_in: StandIn, tmp_path: Path) -> None:
        stand_in.quantize_fails = True
        row = by_name(run(LLAMA[0]), "prefill")[LLAMA[0]]
        assert row.missing is not None
        assert "could not convert" in row.missing
        assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]

    def test_the_real_one(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        pytest.importorskip("llama_cpp")
        from tiny_gguf import write_gguf

        write_gguf(tiny_model(), tmp_path / "tiny.gguf")
        monkeypatch.setattr(model_llama, "find_gguf", lambda say: tmp_path / "tiny.gguf")
        row = by_name(run(LLAMA[0]), "decode")[LLAMA[0]]
        assert row.missing is None
        assert row.difference is not None
        assert 0 < row.difference < 0.02
