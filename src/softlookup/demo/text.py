"""The text that a model reads: one that comes with Python."""

from __future__ import annotations

from pydoc_data import topics
from typing import Any


def first_words(tokenizer: Any, count: int) -> list[int]:
    """Its first `count` tokens; fewer if it has no more."""
    words: list[int] = tokenizer("\n\n".join(topics.topics.values()))["input_ids"]
    return words[:count]
