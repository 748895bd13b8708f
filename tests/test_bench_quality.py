"""What the bench says of the quality of a cache's types, on a tiny random model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

for package in ("typer", "torch", "transformers", "platformdirs"):
    pytest.importorskip(package)

import numpy as np  # noqa: E402
import torch  # noqa: E402

import softlookup as sl  # noqa: E402
import softlookup.transformers  # noqa: E402
from softlookup.bench import quality  # noqa: E402
from softlookup.bench.peers import model_llama  # noqa: E402
from tiny_language_model import KEY_HEADS, LAYERS, WIDTH, tiny_model  # noqa: E402

DTYPES = ("float32", "int8", "int4")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "PIECE", 16)


class TestQualityOf:
    def test_float32_is_the_model_itself(self) -> None:
        softlookup.transformers.register()
        model = tiny_model()
        model.set_attn_implementation("softlookup")
        words = torch.randint(0, 256, (50,), generator=torch.Generator().manual_seed(1))
        found = quality.quality_of(model, words.tolist(), "float32", False)
        with torch.inference_mode():
            logits = model(words[None]).logits[0]
        loss = torch.nn.functional.cross_entropy(logits[:-1], words[1:])
        assert found.perplexity == pytest.approx(math.exp(float(loss)), rel=1e-4)
        assert found.choices.tolist() == logits.argmax(-1).tolist()

    def test_bytes_follow_the_type(self) -> None:
        softlookup.transformers.register()
        model = tiny_model()
        model.set_attn_implementation("softlookup")
        words = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(2)).tolist()
        found = [quality.quality_of(model, words, dtype, False) for dtype in DTYPES]
        for each, dtype in zip(found, DTYPES, strict=True):
            cache = sl.KVCache(batch=1, kv_heads=KEY_HEADS, width=WIDTH, dtype=dtype)
            ones = np.ones((1, KEY_HEADS, 40, WIDTH), np.float32)
            cache.append(ones, ones)
            assert each.bytes_per_token == LAYERS * cache.nbytes / 512
            assert len(each.choices) == 40

    def test_llama_reads_the_same_text(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        pytest.importorskip("llama_cpp")
        from tiny_gguf import write_gguf

        model = tiny_model()
        write_gguf(model, tmp_path / "tiny.gguf")
        monkeypatch.setattr(model_llama, "find_gguf", lambda say: tmp_path / "tiny.gguf")
        words = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(2)).tolist()
        expected = quality.quality_of(model, words, "float32", False)
        found = quality.quality_of_llama(words, "float16", 100, print)
        assert found.perplexity == pytest.approx(expected.perplexity, rel=1e-2)
        assert found.bytes_per_token == 200
        assert len(found.choices) == 40
