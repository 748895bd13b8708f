"""What the types of a cache cost a real model: perplexity on real text, and how often its first choice stays the same.

    python -m softlookup.bench.quality

reads the demo's model (SmolLM2-135M, float32 weights) and prints a Markdown table, with rows of llama.cpp (float16
weights) where it is installed. The text is fed in pieces, so every piece attends to what the cache stored of the pieces
before it and of itself, as decoding does. Perplexity is that of all tokens but the first; agreement is the share of
tokens whose most likely successor is that of the float32 cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

import softlookup.transformers
from softlookup import get_threads
from softlookup._pages import PAGE_KEYS
from softlookup.bench.peers.model_llama import open_llama
from softlookup.demo.model_source import find_model, load_model
from softlookup.demo.text import first_words

PIECE = 512
LENGTHS = (2048, 7900)
CACHES: tuple[tuple[str, bool], ...] = (
    ("float32", False),
    ("bfloat16", False),
    ("float16", False),
    ("int8", False),
    ("int8", True),
    ("int4", False),
    ("int4", True),
)
"""By type, with and without rotation; the first is what the others are compared with."""

LLAMA_BYTES = {"float16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
"""By the type of a cache of llama.cpp, what a number takes: blocks of 32 share a scale of float16."""

Say = Callable[[str], None]
Read = Callable[[int, list[int]], torch.Tensor]
"""Reads the words that stand from a position on; their logits [words, vocabulary], float32."""


@dataclass(frozen=True)
class Quality:
    """What one cache gave on one text: choices [tokens], perplexity, bytes of one token in all layers."""

    choices: torch.Tensor
    perplexity: float
    bytes_per_token: float


def name_of(dtype: str, rotate: bool) -> str:
    """A cache's name in the tables."""
    return f"{dtype}, rotated" if rotate else dtype


def quality_of(model: Any, words: list[int], dtype: str, rotate: bool) -> Quality:
    """Read the words through a cache of a type."""
    cache = softlookup.transformers.Cache(model.config, dtype=dtype, rotate=rotate)

    def read(_: int, piece: list[int]) -> torch.Tensor:
        return model(torch.tensor([piece]), cache=cache).logits[0].float()  # type: ignore[no-any-return]

    choices, perplexity = _read_in_pieces(read, words)
    held = math.ceil(len(words) / PAGE_KEYS) * PAGE_KEYS  # whole pages
    return Quality(choices, perplexity, cache.nbytes / held)


def quality_of_llama(words: list[int], dtype: str, numbers: int, say: Say) -> Quality:
    """Read them with llama.cpp, which keeps so many numbers for each token."""
    llama = open_llama(len(words), dtype, get_threads(), say, every_logit=True)

    def read(first: int, piece: list[int]) -> torch.Tensor:
        llama.eval(piece)
        return torch.from_numpy(llama.scores[first : first + len(piece)])

    try:
        choices, perplexity = _read_in_pieces(read, words)
    finally:
        llama.close()
    return Quality(choices, perplexity, numbers * LLAMA_BYTES[dtype])


def _read_in_pieces(read: Read, words: list[int]) -> tuple[torch.Tensor, float]:
    """The choices after every token, and the perplexity."""
    choices, loss = [], 0.0
    with torch.inference_mode():
        for first in range(0, len(words), PIECE):
            logits = read(first, words[first : first + PIECE])
            choices.append(logits.argmax(-1))
            targets = torch.tensor(words[first + 1 : first + PIECE + 1])
            loss += float(torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="sum"))
    return torch.cat(choices), math.exp(loss / (len(words) - 1))


def table(say: Say = print) -> str:
    """The table, as Markdown."""
    softlookup.transformers.register()
    model, tokenizer = load_model(find_model("auto", say), say)
    model.set_attn_implementation("softlookup")
    words = first_words(tokenizer, max(LENGTHS))
    config = model.config
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    contenders: dict[str, Callable[[list[int]], Quality]] = {
        name_of(dtype, rotate): partial(quality_of, model, dtype=dtype, rotate=rotate) for dtype, rotate in CACHES
    }
    if find_spec("llama_cpp") is not None:
        for dtype in LLAMA_BYTES:
            contenders[f"llama.cpp {dtype}"] = partial(quality_of_llama, dtype=dtype, numbers=numbers, say=say)
    lines = [
        "| cache | bytes a token | " + " | ".join(f"perplexity at {n} | same choice" for n in LENGTHS) + " |",
        "|---|---:|" + "---:|---:|" * len(LENGTHS),
    ]
    exact: dict[int, torch.Tensor] = {}
    for name, contender in contenders.items():
        cells = []
        for length in LENGTHS:
            found = contender(words[:length])
            right = exact.setdefault(length, found.choices)
            same = float((found.choices == right).float().mean())
            cells.append(f"{found.perplexity:.4f} | {same:.2%}")
        lines.append(f"| {name} | {found.bytes_per_token:.0f} | {' | '.join(cells)} |")
        say(lines[-1])
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
