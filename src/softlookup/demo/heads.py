"""The entropy of every head of a model on a text, from the statistics of one prefill, and its picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

import softlookup as sl
from softlookup.transformers import observe

Floats = NDArray[np.float64]


def entropy_by_head(model: Any, prompt: Sequence[int], tick: Callable[[], None]) -> Floats:
    """Mean over the rows of entropy / ln(visible keys): [layers, heads], 0 a lookup, 1 a plain mean of the values."""
    layers: list[Floats] = []

    def keep(module: torch.nn.Module, stats: sl.Stats) -> None:
        del module
        # The first row sees one key only and has no normalised entropy (NaN).
        layers.append(np.nanmean(stats.normalized_entropy, axis=(0, 2), dtype=np.float64))
        tick()

    model.set_attn_implementation("softlookup")
    with torch.inference_mode(), observe(keep):
        model(torch.tensor([list(prompt)]), use_cache=False, logits_to_keep=1)
    return np.stack(layers)


def draw_entropy(entropy: Floats, title: str, path: Path) -> None:
    """Write the heat map [layers, heads] as a PNG. The colours (cividis) read the same without colour vision."""
    layers, heads = entropy.shape
    figure = Figure(figsize=(3.2 + 0.32 * heads, 1.8 + 0.24 * layers), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(entropy, cmap="cividis", vmin=0.0, vmax=1.0, aspect="auto", interpolation="nearest")
    axes.set_xlabel("query head")
    axes.set_ylabel("layer")
    axes.set_xticks(range(0, heads, max(1, heads // 16)))
    axes.set_yticks(range(0, layers, max(1, layers // 16)))
    axes.set_title(title, fontsize=10)
    bar = figure.colorbar(image, ax=axes)
    bar.set_label(
        "entropy of a row / ln(visible keys), mean over the rows\n(0: one key is looked up, 1: all keys are averaged)"
    )
    figure.savefig(path)
