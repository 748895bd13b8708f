"""The demo on a real language model: measure, look inside, write report.json and entropy.png."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# transformers' own bars would tear ours apart; tqdm reads this when it is first imported.
os.environ.setdefault("TQDM_DISABLE", "1")

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import softlookup.transformers
from softlookup.demo import compare, heads
from softlookup.demo.model_source import find_model, load_model
from softlookup.demo.problem import DemoProblem
from softlookup.demo.text import first_words

COLUMNS = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())


@dataclass(frozen=True)
class Prepared:
    """A model on this disk and in memory, and the text that it will read."""

    name: str
    model: Any
    words: list[int]


def prepare(wanted: str, contexts: Sequence[int], tokens: int, console: Console) -> Prepared:
    """Fetch and load the model, and cut the text; progress goes to `console`.

    Parameters
    ----------
    wanted
        "auto", a path, or a hub repository.
    contexts
        Prompt lengths in tokens.
    tokens
        Tokens to decode after each prompt.

    Raises
    ------
    DemoProblem
        If the model cannot be had, or is too short for the contexts.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    # Off a terminal a transient bar leaves nothing but an empty line.
    with Progress(*COLUMNS, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("model", total=None)
        source = find_model(wanted, lambda text: progress.update(task, description=text))
        model, tokenizer = load_model(source, lambda text: progress.update(task, description=text))
        return Prepared(source.name, model, _words(tokenizer, model, max(contexts), tokens))


def run_model_demo(
    prepared: Prepared, contexts: Sequence[int], tokens: int, out: Path, console: Console
) -> dict[str, Any]:
    """Compare at every context, draw the entropy of the longest, write report.json and entropy.png into `out`."""
    softlookup.transformers.register()
    model, longest = prepared.model, prepared.words
    # Few refreshes: the thread that draws competes with what is measured.
    with Progress(*COLUMNS, console=console, refresh_per_second=2) as progress:
        rows, stock = [], None
        for context in contexts:
            row, stock = _one_context(model, longest[:context], tokens, progress)
            rows.append(row)
        assert stock is not None
        caches = _caches(model, longest[: contexts[-1]], tokens, stock, progress)
        tick = _bar(progress, f"{len(longest)} tokens, entropy of every head", model.config.num_hidden_layers)
        entropy = heads.entropy_by_head(model, longest, tick)
    report = {
        "model": prepared.name,
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "stock_implementation": compare.STOCK,
        "text": "CPython's pydoc_data.topics",
        "contexts": rows,
        "caches": {"context": contexts[-1], "rows": caches},
        "entropy": {"context": len(longest), "layers_by_heads": entropy.round(6).tolist()},
        "files": [str(out / "report.json"), str(out / "entropy.png")],
    }
    out.mkdir(parents=True, exist_ok=True)
    heads.draw_entropy(
        entropy, f"How spread out each head reads\n{prepared.name}, {len(longest)} tokens", out / "entropy.png"
    )
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def _caches(
    model: Any, prompt: Sequence[int], tokens: int, stock: compare.Run, progress: Progress
) -> list[dict[str, Any]]:
    """The same tokens with softlookup's own cache, in each of its types."""
    rows = []
    for dtype in compare.CACHES:
        tick = _bar(progress, f"{len(prompt)} tokens, cache of {dtype}", compare.ticks(model, tokens))
        ours = compare.run(model, compare.OURS, prompt, tokens, stock.choices, tick, dtype)
        rows.append(compare.compare_cache(stock, ours, dtype))
    return rows


def _one_context(
    model: Any, prompt: Sequence[int], tokens: int, progress: Progress
) -> tuple[dict[str, Any], compare.Run]:
    total = compare.ticks(model, tokens)
    compare.warm_up(model, prompt)
    stock = compare.run(
        model, compare.STOCK, prompt, tokens, None, _bar(progress, f"{len(prompt)} tokens, stock attention", total)
    )
    ours = compare.run(
        model, compare.OURS, prompt, tokens, stock.choices, _bar(progress, f"{len(prompt)} tokens, softlookup", total)
    )
    return compare.compare(stock, ours, len(prompt)), stock


def _bar(progress: Progress, name: str, total: int) -> Callable[[], None]:
    if not progress.console.is_terminal:  # no bars in a log: a line when a long step starts
        progress.console.print(name)
    task = progress.add_task(name, total=total)
    return lambda: progress.advance(task)


def _words(tokenizer: Any, model: Any, context: int, tokens: int) -> list[int]:
    """The first `context` tokens of the text."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and context + tokens > limit:
        raise DemoProblem(
            f"--contexts {context} and --tokens {tokens} need {context + tokens} positions and the model has {limit}: "
            "pass smaller ones"
        )
    words = first_words(tokenizer, context)
    if len(words) < context:
        raise DemoProblem(f"--contexts {context}: the text has only {len(words)} tokens; pass a smaller one")
    return words
