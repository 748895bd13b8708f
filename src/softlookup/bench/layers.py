"""What the types of a cache make of the lookups of a real model, layer by layer.

    python -m softlookup.bench.layers [FOLDER]

records the queries, keys and values of every layer of the demo's model (SmolLM2-135M, the first 2048 tokens of its
text), or of an encoder in a folder, such as all-MiniLM-L6-v2 (256 tokens), and prints a Markdown table: how far the
output of the lookup through each type is from that through float32, as a share of its norm.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import transformers
import typer
from numpy.typing import NDArray
from transformers.masking_utils import sdpa_mask

import softlookup as sl
from softlookup._tensors import array_of
from softlookup.bench.quality import CACHES, PIECE, name_of
from softlookup.demo.model_source import find_model, load_model
from softlookup.demo.text import first_words

Array = NDArray[Any]

RECORDER = "softlookup-recorder"
DECODER_TOKENS = 2048
ENCODER_TOKENS = 256


@dataclass(frozen=True)
class Layer:
    """What the attention of one layer was given: q [1, Hq, N, d_k], k [1, Hk, N, d_k], v [1, Hk, N, d_v], float32."""

    q: Array
    k: Array
    v: Array
    causal: bool


def layers_of(model: Any, words: list[int]) -> list[Layer]:
    """Run a model over some words and keep what its layers look up in."""
    layers: list[Layer] = []
    stock = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]

    def record(module: Any, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        q, k, v = (array_of(each.detach().float()).copy() for each in (query, key, value))
        layers.append(Layer(q, k, v, bool(module.is_causal)))
        return stock(module, query, key, value, *rest, **options)

    transformers.AttentionInterface.register(RECORDER, record)
    transformers.AttentionMaskInterface.register(RECORDER, sdpa_mask)
    model.set_attn_implementation(RECORDER)
    with torch.inference_mode():
        model(torch.tensor([words]))
    return layers


def error_of(layer: Layer, dtype: str, rotate: bool) -> float:
    """|out - exact| / |exact| of all queries of one layer; tokens come in pieces, as they do to a model."""
    mask = sl.Causal() if layer.causal else sl.Full()
    exact = sl.attention(layer.q, layer.k, layer.v, mask=mask)
    cache = sl.KVCache(
        kv_heads=layer.k.shape[1], width=layer.k.shape[3], value_width=layer.v.shape[3], dtype=dtype, rotate=rotate
    )
    kind = cache.keys().dtype
    for first in range(0, layer.k.shape[2], PIECE):
        piece = slice(first, first + PIECE)
        cache.append(layer.k[:, :, piece].astype(kind), layer.v[:, :, piece].astype(kind))
    out = cache.attention(layer.q.astype(kind), mask=mask, out_dtype=np.float32)
    return float(np.linalg.norm(out - exact) / np.linalg.norm(exact))


def table(layers: list[Layer]) -> str:
    """The errors of every type, over the layers, as Markdown."""
    lines = ["| cache | error of out: median layer | worst layer |", "|---|---:|---:|"]
    for dtype, rotate in CACHES[1:]:
        errors = [error_of(layer, dtype, rotate) for layer in layers]
        lines.append(f"| {name_of(dtype, rotate)} | {statistics.median(errors):.2%} | {max(errors):.2%} |")
    return "\n".join(lines)


def main(folder: Annotated[Path | None, typer.Argument(help="Of an encoder, with its tokenizer.")] = None) -> None:
    """Print the table."""
    if folder is None:
        model, tokenizer = load_model(find_model("auto", print), print)
        count = DECODER_TOKENS
    else:
        model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        count = ENCODER_TOKENS
    print(table(layers_of(model, first_words(tokenizer, count))))


if __name__ == "__main__":
    typer.run(main)
