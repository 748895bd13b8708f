"""A tiny random language model with a tokenizer of bytes, as the demo and the bench load theirs."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

LAYERS, HEADS, KEY_HEADS, WIDTH = 3, 4, 2, 8
POSITIONS = 128


def tiny_model() -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=HEADS * WIDTH,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        vocab_size=256,
        max_position_embeddings=POSITIONS,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5.0)
    return model


def byte_tokenizer() -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
