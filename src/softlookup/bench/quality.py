"""What the types of a cache cost a real model: perplexity on real text, and how often its first choice stays the same.

    python -m softlookup.bench.quality

reads the demo's model (SmolLM2-135M, float32 weights) and prints a Markdown table. The text is fed in pieces, so every
piece attends to what the cache stored of the pieces before it and of itself, as decoding does. Perplexity is that of
all tokens but the first; agreement is the share of tokens whose most likely successor is that of the float32 cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

import softlookup.transformers
from softlookup._pages import PAGE_KEYS
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


@dataclass(frozen=True)
class Quality:
    """What one cache gave on one text: choices [tokens], perplexity, bytes of one token in all layers."""

    choices: torch.Tensor
    perplexity: float
    bytes_per_token: float


def quality_of(model: Any, words: torch.Tensor, dtype: str, rotate: bool) -> Quality:
    """Read the words [1, N] through a cache of a type."""
    cache = softlookup.transformers.Cache(model.config, dtype=dtype, rotate=rotate)
    choices, loss = [], 0.0
    with torch.inference_mode():
        for first in range(0, words.shape[1], PIECE):
            piece = words[:, first : first + PIECE]
            logits = model(piece, cache=cache).logits[0].float()
            choices.append(logits.argmax(-1))
            targets = words[0, first + 1 : first + PIECE + 1]
            loss += float(torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="sum"))
    held = math.ceil(words.shape[1] / PAGE_KEYS) * PAGE_KEYS  # whole pages
    return Quality(torch.cat(choices), math.exp(loss / (words.shape[1] - 1)), cache.nbytes / held)


def table(say: Any = print) -> str:
    """The table, as Markdown."""
    softlookup.transformers.register()
    model, tokenizer = load_model(find_model("auto", say), say)
    model.set_attn_implementation("softlookup")
    words = torch.tensor([first_words(tokenizer, max(LENGTHS))])
    lines = [
        "| cache | bytes a token | " + " | ".join(f"perplexity at {n} | same choice" for n in LENGTHS) + " |",
        "|---|---:|" + "---:|---:|" * len(LENGTHS),
    ]
    exact: dict[int, torch.Tensor] = {}
    for dtype, rotate in CACHES:
        cells = []
        for length in LENGTHS:
            found = quality_of(model, words[:, :length], dtype, rotate)
            right = exact.setdefault(length, found.choices)
            same = float((found.choices == right).float().mean())
            cells.append(f"{found.perplexity:.4f} | {same:.2%}")
        name = f"{dtype}, rotated" if rotate else dtype
        lines.append(f"| {name} | {found.bytes_per_token:.0f} | {' | '.join(cells)} |")
        say(lines[-1])
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
