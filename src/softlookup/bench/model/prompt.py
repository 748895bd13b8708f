"""A real model and a real text, found as the demo finds them; the weights are loaded once for each type."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

# As in the demo: the bars of transformers would tear ours apart; tqdm reads this when it is first imported.
os.environ.setdefault("TQDM_DISABLE", "1")

import torch
from transformers.utils.logging import disable_progress_bar

from softlookup.bench.workloads import Workload
from softlookup.demo.model_source import Source, find_model, load_model
from softlookup.demo.problem import DemoProblem
from softlookup.demo.text import first_words

MORE_TOKENS = 64  # that a context must have room for, after the prompt

Tell = Callable[[str], None]


@dataclass
class Prompt:
    """What every contender reads.

    Attributes
    ----------
    workload
        With the heads, the width and, as its batch, the layers of the model.
    words
        Token numbers.
    source
        Where the model is on this disk.
    """

    workload: Workload
    words: list[int]
    source: Source
    tell: Tell
    _models: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, workload: Workload, tell: Tell) -> Prompt:
        """Find the model, load it, and cut the text; raises DemoProblem."""
        logging.getLogger("transformers").setLevel(logging.ERROR)
        disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
        source = find_model("auto", tell)
        model, tokenizer = load_model(source, tell)
        words = first_words(tokenizer, workload.keys)
        if len(words) < workload.keys:
            raise DemoProblem(
                f"the text has only {len(words)} of {workload.keys} tokens: a newer Python has a longer one"
            )
        return cls(_shaped(workload, model.config), words, source, tell, {"float32": model})

    def model(self, dtype: str) -> Any:
        """The model in a type, the same object every time."""
        if dtype not in self._models:
            self._models[dtype], _ = load_model(self.source, self.tell, getattr(torch, dtype))
        return self._models[dtype]


def _shaped(workload: Workload, config: Any) -> Workload:
    heads = config.num_attention_heads
    return replace(
        workload,
        heads=heads,
        key_heads=config.num_key_value_heads,
        width=getattr(config, "head_dim", None) or config.hidden_size // heads,
        batch=config.num_hidden_layers,
    )
