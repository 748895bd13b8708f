"""Tiny random transformers models, and stock "eager" beside "softlookup" on them.

Tolerances. float32: both sides round differently in the last bits of sums of a few dozen terms, and two layers of a
tiny model amplify that little: 2e-5 on logits of order 1. bfloat16: eager rounds its weights to bfloat16 before they
meet the values (2**-8 relative) and softlookup does not, so logits may differ by a few such steps: 6e-2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

import softlookup.transformers

softlookup.transformers.register()

VOCABULARY = 97
WINDOW = 5
FLOAT32_TOLERANCE = 2e-5
BFLOAT16_TOLERANCE = 6e-2

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128, "vocab_size": VOCABULARY, "bos_token_id": 1}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=WINDOW),
    "gpt2": lambda: transformers.GPT2Config(**GPT2, eos_token_id=None, pad_token_id=0),
    "bert": lambda: transformers.BertConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}),
    "gemma2": lambda: transformers.Gemma2Config(
        **SMALL, head_dim=8, query_pre_attn_scalar=8, sliding_window=WINDOW, attn_logit_softcapping=0.5
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SMALL, head_dim=8, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1
    ),
    "modernbert": lambda: transformers.ModernBertConfig(
        **{k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "num_hidden_layers")},
        num_hidden_layers=2,
        global_attn_every_n_layers=2,
        local_attention=2 * WINDOW,
    ),
    "llama4": lambda: transformers.Llama4TextConfig(
        **SMALL, head_dim=8, attention_chunk_size=WINDOW, num_local_experts=2, num_experts_per_tok=1,
        intermediate_size_mlp=64, no_rope_layers=[1, 0],
    ),
}  # fmt: skip
CAUSAL = ("llama", "mistral", "gpt2", "gemma2", "gpt_oss", "llama4")


def build(name: str, dtype: Any = torch.float32) -> Any:
    """A random model whose attention is not flat: large projections make the rows differ."""
    torch.manual_seed(7)
    config = CONFIGS[name]()
    family = transformers.AutoModelForCausalLM if name in CAUSAL else transformers.AutoModelForMaskedLM
    model = family.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in parameter_name:
                parameter.mul_(4.0)
            if "sinks" in parameter_name:
                parameter.normal_()
    return model.to(dtype)


def tokens(batch: int, length: int) -> Any:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def logits(model: Any, implementation: str, *arguments: Any, **keywords: Any) -> Any:
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(*arguments, **keywords).logits.float()


def both(model: Any, *arguments: Any, **keywords: Any) -> tuple[Any, Any]:
    return tuple(logits(model, key, *arguments, **keywords) for key in ("eager", "softlookup"))


def difference(pair: tuple[Any, Any], real: Any = None) -> float:
    stock, ours = pair
    assert torch.isfinite(ours).all()
    assert stock.std() > 1e-3, "a flat model would prove nothing"
    gap = (stock - ours).abs()
    return float((gap if real is None else gap[real]).max())


def padding(lengths: tuple[int, ...], side: str) -> Any:
    size = max(lengths)
    column = torch.arange(size)
    rows = [column >= size - n if side == "left" else column < n for n in lengths]
    return torch.stack(rows).long()
