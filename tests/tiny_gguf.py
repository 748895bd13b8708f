"""A small model of transformers as a .gguf file, which llama.cpp reads; without a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray


def write_gguf(model: Any, path: Path) -> None:
    """Write a LlamaForCausalLM in float32."""
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        numbers = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            numbers = _pairs_together(numbers, width)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(numbers))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _pairs_together(weight: NDArray[Any], width: int) -> NDArray[Any]:
    """llama.cpp turns neighbouring numbers of a head by an angle, transformers those half a head apart."""
    halves = weight.reshape(-1, 2, width // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)
