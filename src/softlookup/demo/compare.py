"""Stock attention beside softlookup: the same model object, the same tokens, measured one after the other.

Policy. The stock implementation decodes greedily; softlookup is then fed the stock tokens and its own choice is
compared at every step. Up to the first step where the two choices differ that *is* its greedy decoding, so one run
gives the number of tokens that agree and the largest difference of the logits over all steps. Time covers the forward
call alone.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.modeling_layers import GradientCheckpointingLayer

import softlookup.transformers

CACHES = ("float32", "bfloat16", "int8", "int4")
STOCK = "sdpa"
OURS = "softlookup"
WARM_UP_TOKENS = 16

Tick = Callable[[], None]


@dataclass(frozen=True)
class Run:
    """One prefill and `tokens - 1` decoding steps of one implementation."""

    prefill_seconds: float
    step_seconds: tuple[float, ...]
    logits: torch.Tensor
    """float32 [tokens, vocabulary]: of the last prompt token, then of every step."""
    choices: tuple[int, ...]
    cache_bytes: int


def run(
    model: Any,
    implementation: str,
    prompt: Sequence[int],
    tokens: int,
    follow: Sequence[int] | None,
    tick: Tick,
    stored: str | None = None,
) -> Run:
    """Prefill `prompt` and decode `tokens` tokens, greedily or along `follow`; `tick` for every layer, then token.

    Keys and values are kept as stock transformers does, or in softlookup's cache of the type `stored`.
    """
    model.set_attn_implementation(implementation)
    cache: Any = transformers.DynamicCache(config=model.config)
    if stored is not None:
        cache = softlookup.transformers.Cache(model.config, dtype=stored)
    words = torch.tensor([list(prompt)])
    seconds: list[float] = []
    rows: list[torch.Tensor] = []
    with torch.inference_mode():
        for step in range(tokens):
            with _layers_tick(model, tick) if step == 0 else contextlib.nullcontext():
                start = time.perf_counter()
                logits = model(words, cache=cache, use_cache=True, logits_to_keep=1).logits
                seconds.append(time.perf_counter() - start)
            rows.append(logits[0, -1].float())
            token = int(rows[-1].argmax()) if follow is None else follow[step]
            words = torch.tensor([[token]])
            if step:
                tick()
    logits = torch.stack(rows)
    held = cache.nbytes if stored is not None else _held_bytes(cache)
    return Run(seconds[0], tuple(seconds[1:]), logits, tuple(logits.argmax(-1).tolist()), held)


def _held_bytes(cache: Any) -> int:
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))


def ticks(model: Any, tokens: int) -> int:
    """How often one run ticks."""
    return len(_layers(model)) + tokens - 1


def warm_up(model: Any, prompt: Sequence[int]) -> None:
    """Threads, buffers and code are made by the first calls of a process: not in a measured one."""
    for implementation in (STOCK, OURS):
        run(model, implementation, prompt[:WARM_UP_TOKENS], 2, None, lambda: None)


def compare(stock: Run, ours: Run, context: int) -> dict[str, Any]:
    """One line of the table as plain data."""
    tokens = len(stock.choices)
    agree = next((i for i in range(tokens) if stock.choices[i] != ours.choices[i]), tokens)
    margin = None
    if agree < tokens:
        row = stock.logits[agree]
        margin = float(row[stock.choices[agree]] - row[ours.choices[agree]])
    return {
        "context": context,
        "tokens": tokens,
        "stock": _times(stock, context),
        "softlookup": _times(ours, context),
        "largest_logit_difference": float((stock.logits - ours.logits).abs().max()),
        "tokens_that_agree": agree,
        "stock_logit_margin_at_split": margin,
        "cache_bytes": stock.cache_bytes,
    }


def compare_cache(stock: Run, ours: Run, dtype: str) -> dict[str, Any]:
    """One line of the table of caches as plain data."""
    return {
        "dtype": dtype,
        **_times(ours, 1),
        "cache_bytes": ours.cache_bytes,
        "largest_logit_difference": float((stock.logits - ours.logits).abs().max()),
        "choices_that_agree": sum(a == b for a, b in zip(stock.choices, ours.choices, strict=True)),
        "tokens": len(stock.choices),
    }


def _times(run: Run, context: int) -> dict[str, float | None]:
    steps = run.step_seconds
    return {
        "prefill_seconds": run.prefill_seconds,
        "prefill_tokens_per_second": context / run.prefill_seconds,
        "decode_ms_per_token": 1000 * statistics.median(steps) if steps else None,
    }


def _layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextlib.contextmanager
def _layers_tick(model: Any, tick: Tick) -> Iterator[None]:
    hooks = [layer.register_forward_hook(lambda *_: tick()) for layer in _layers(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
