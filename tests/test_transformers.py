"""The transformers adapter: logits, tokens and errors of tiny random models, beside stock "eager"."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

import softlookup.transformers as adapter
from softlookup._transformers import masks
from tiny_models import (
    BFLOAT16_TOLERANCE,
    CAUSAL,
    CONFIGS,
    FLOAT32_TOLERANCE,
    VOCABULARY,
    WINDOW,
    both,
    build,
    difference,
    logits,
    padding,
    tokens,
)


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param)


class TestLogits:
    def test_float32(self, model: Any) -> None:
        assert difference(both(model, tokens(2, 19))) < FLOAT32_TOLERANCE

    @pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "bert", "gemma2", "gpt_oss"])
    def test_bfloat16(self, name: str) -> None:
        assert difference(both(build(name, torch.bfloat16), tokens(2, 19))) < BFLOAT16_TOLERANCE

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
    def test_other_types(self, dtype: Any) -> None:
        bound = 1e-10 if dtype is torch.float64 else BFLOAT16_TOLERANCE / 8
        stock, ours = both(build("llama", dtype), tokens(2, 9))
        assert difference((stock, ours)) < max(bound, 1e-6)

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding(self, model: Any, side: str) -> None:
        mask = padding((12, 7, 1), side)
        assert difference(both(model, tokens(3, 12), attention_mask=mask), mask.bool()) < FLOAT32_TOLERANCE

    def test_padding_with_a_hole(self, model: Any) -> None:
        mask = padding((12, 12), "left")
        mask[1, 4:6] = 0
        assert difference(both(model, tokens(2, 12), attention_mask=mask), mask.bool()) < FLOAT32_TOLERANCE

    @pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 2, 3 * WINDOW])
    @pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss", "modernbert", "llama4"])
    def test_lengths_around_the_window(self, name: str, length: int) -> None:
        assert difference(both(build(name), tokens(1, length))) < FLOAT32_TOLERANCE

    def test_torch_compile_calls_it_between_graphs(self) -> None:
        model, words = build("mistral"), tokens(1, 9)
        plain = logits(model, "softlookup", words)
        with torch.no_grad():
            compiled = torch.compile(model, backend="eager")(words).logits
        assert torch.equal(compiled, plain)

    def test_packed_sequences(self) -> None:
        positions = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4, 5, 6]])
        model, packed = build("mistral"), tokens(1, 13)
        pair = both(model, packed, position_ids=positions, use_cache=False)
        assert difference(pair) < FLOAT32_TOLERANCE
        alone = logits(model, "softlookup", packed[:, 4:6], use_cache=False)
        assert float((pair[1][:, 4:6] - alone).abs().max()) < FLOAT32_TOLERANCE


class TestUserMasks:
    def visible(self, length: int) -> Any:
        generator = torch.Generator().manual_seed(3)
        chosen = torch.rand(2, 1, length, length, generator=generator) < 0.6
        return chosen | torch.eye(length, dtype=torch.bool)

    @pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma2", "gpt_oss"])
    def test_float_of_zero_and_least(self, name: str) -> None:
        mask = torch.zeros(2, 1, 11, 11).masked_fill(~self.visible(11), torch.finfo(torch.float32).min)
        assert difference(both(build(name), tokens(2, 11), attention_mask=mask)) < FLOAT32_TOLERANCE

    def test_bool(self) -> None:
        model, visible = build("llama"), self.visible(11)
        additive = torch.zeros(2, 1, 11, 11).masked_fill(~visible, -torch.inf)
        stock = logits(model, "eager", tokens(2, 11), attention_mask=additive)
        ours = logits(model, "softlookup", tokens(2, 11), attention_mask=visible)
        assert difference((stock, ours)) < FLOAT32_TOLERANCE

    def test_float_with_other_numbers_is_a_bias(self) -> None:
        mask = torch.randn(2, 1, 11, 11).masked_fill(~self.visible(11), torch.finfo(torch.float32).min)
        assert difference(both(build("llama"), tokens(2, 11), attention_mask=mask)) < FLOAT32_TOLERANCE

    def test_bfloat16_bias(self) -> None:
        mask = torch.randn(2, 1, 11, 11).masked_fill(~self.visible(11), torch.finfo(torch.bfloat16).min)
        pair = both(build("llama", torch.bfloat16), tokens(2, 11), attention_mask=mask.bfloat16())
        assert difference(pair) < BFLOAT16_TOLERANCE

    def test_least_number_of_bfloat16_in_a_float32_mask_hides(self) -> None:
        least = torch.full((1, 1, 1, 3), torch.finfo(torch.bfloat16).min)
        query, key = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 3, 8)
        out, _ = adapter._attention_forward(torch.nn.Module(), query, key, key, least)
        assert torch.equal(out, torch.zeros(1, 1, 1, 8))


class TestGenerate:
    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    @pytest.mark.parametrize("name", CAUSAL)
    @pytest.mark.parametrize("side", ["none", "left"])
    def test_greedy_tokens(self, name: str, cache: str, side: str) -> None:
        model, length = build(name), WINDOW + 2
        mask = padding((length, length - 3), side) if side == "left" else torch.ones(2, length, dtype=torch.long)
        choices = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        if cache == "static":
            choices["cache_implementation"] = "static"
        results = []
        for implementation in ("eager", "softlookup"):
            model.set_attn_implementation(implementation)
            results.append(model.generate(tokens(2, length), attention_mask=mask, **choices))
        assert torch.equal(*results)

    @pytest.mark.parametrize("name", ["llama", "mistral"])
    def test_chunks_through_a_cache(self, name: str) -> None:
        """More than one new token on a cache that is not empty: the queries stand at its end."""
        model, words = build(name), tokens(1, 17)
        pieces = {}
        for implementation in ("eager", "softlookup"):
            model.set_attn_implementation(implementation)
            cache = transformers.DynamicCache(config=model.config)
            with torch.no_grad():
                pieces[implementation] = torch.cat(
                    [model(part, cache=cache).logits for part in words.split([6, 4, 1, 6], dim=1)], dim=1
                )
        assert difference((pieces["eager"], pieces["softlookup"])) < FLOAT32_TOLERANCE
        whole = logits(model, "softlookup", words)
        assert float((whole - pieces["softlookup"]).abs().max()) < FLOAT32_TOLERANCE


class TestEncoderDecoder:
    def test_t5_position_bias(self) -> None:
        torch.manual_seed(0)
        config = transformers.T5Config(
            d_model=32, num_layers=2, num_heads=4, d_kv=8, d_ff=64, vocab_size=VOCABULARY, decoder_start_token_id=0
        )
        model = transformers.T5ForConditionalGeneration(config).eval()
        words, mask = tokens(2, 9), padding((9, 5), "right")
        pair = both(model, words, attention_mask=mask, decoder_input_ids=tokens(2, 6))
        assert difference(pair) < FLOAT32_TOLERANCE

    def test_cross_attention_without_a_mask_is_not_causal(self) -> None:
        torch.manual_seed(0)
        config = transformers.BartConfig(
            d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=VOCABULARY, max_position_embeddings=64,
        )  # fmt: skip
        model = transformers.BartForConditionalGeneration(config).eval()
        assert difference(both(model, tokens(2, 6), decoder_input_ids=tokens(2, 4))) < FLOAT32_TOLERANCE
        query, key = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
        module = torch.nn.Module()
        module.is_causal = True
        out, _ = adapter._attention_forward(module, query, key, key, None)
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, key).transpose(1, 2)
        assert float((out - expected).abs().max()) < 1e-6


class TestErrors:
    def call(self, dtype: Any = torch.float32, mask: Any = None, **keywords: Any) -> Any:
        x = torch.zeros(1, 2, 3, 8).to(dtype)
        return adapter._attention_forward(torch.nn.Module(), x, x, x, mask, **keywords)

    def test_everything_unsupported_is_named_at_once(self) -> None:
        with pytest.raises(NotImplementedError, match=r"dropout=0\.1.*indices.*cu_seq_lens_q"):
            self.call(dropout=0.1, indices=torch.zeros(1), cu_seq_lens_q=torch.zeros(2), unknown=None)

    def test_training_with_dropout(self) -> None:
        config = CONFIGS["llama"]()
        config.attention_dropout = 0.1
        model = transformers.LlamaForCausalLM(config).train()
        model.set_attn_implementation("softlookup")
        with torch.no_grad(), pytest.raises(NotImplementedError, match=r"model\.eval\(\)"):
            model(tokens(1, 4))

    def test_requested_weights(self) -> None:
        model = build("llama")
        model.set_attn_implementation("softlookup")
        with torch.no_grad(), pytest.raises(NotImplementedError, match="attention_weights"):
            model(tokens(1, 4), output_attentions=True)

    def test_weights_requested_in_the_config(self) -> None:
        model = build("llama")
        model.config.output_attentions = True
        with pytest.raises(NotImplementedError, match="eager"):
            logits(model, "softlookup", tokens(1, 4))

    def test_other_devices(self) -> None:
        with pytest.raises(ValueError, match="a tensor on meta"):
            adapter._attention_forward(torch.nn.Module(), *[torch.zeros(1, 2, 3, 8, device="meta")] * 3, None)

    def test_types(self) -> None:
        with pytest.raises(TypeError, match=r"expected one of torch\.float32, torch\.bfloat16"):
            self.call(dtype=torch.int64)

    @pytest.mark.parametrize(
        ("mask", "error", "message"),
        [
            (torch.ones(1, 1, 3, 3, dtype=torch.long), TypeError, r"attention_mask\.bool\(\)"),
            (torch.ones(1, 3), ValueError, "expected 4 axes"),
            (torch.ones(1, 1, 3, 5, dtype=torch.bool), ValueError, "mask"),
        ],
    )
    def test_masks(self, mask: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            self.call(mask=mask)

    def test_mask_for_another_length(self) -> None:
        with pytest.raises(ValueError, match="made for 5 keys and the layer has 3"):
            self.call(mask=masks.plan_mask(1, 3, 5))

    def test_open_positions(self) -> None:
        query, key = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 5, 8)
        with pytest.raises(ValueError, match="pass an attention_mask"):
            adapter._attention_forward(torch.nn.Module(), query, key, key, None, is_causal=True)


def test_registering_twice_changes_nothing() -> None:
    adapter.register()
    before = dict(transformers.AttentionInterface._global_mapping)
    adapter.register()
    assert transformers.AttentionInterface._global_mapping == before


@pytest.mark.parametrize("framework", ["torch", "transformers", "jax", "typer", "matplotlib"])
def test_import_softlookup_loads_no_framework(framework: str) -> None:
    program = f"import sys, softlookup; sys.exit({framework!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
