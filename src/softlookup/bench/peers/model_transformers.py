"""transformers: one model object for each type, on an attention implementation of choice, with its own cache or ours.

"nothing" is an implementation that looks nothing up: what then remains is the time without attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface

import softlookup.transformers
from softlookup.bench.model.prompt import Prompt
from softlookup.bench.model.reader import Logits, Reader
from softlookup.bench.peers.torch_arrays import use_threads

NOTHING = "softlookup_bench_nothing"


def prepare(prompt: Prompt, threads: int, option: str) -> Reader:
    """A model; the option names the implementation, or "cache" for our cache, and the type."""
    implementation, dtype = option.split()
    softlookup.transformers.register()
    AttentionInterface.register(NOTHING, _no_attention)
    AttentionMaskInterface.register(NOTHING, _no_mask)
    if implementation == "cache":
        return CacheReader(prompt, threads, dtype)
    return TransformersReader(prompt, threads, NOTHING if implementation == "nothing" else implementation, dtype)


class TransformersReader:
    """A model of transformers and a DynamicCache."""

    def __init__(self, prompt: Prompt, threads: int, implementation: str, dtype: str) -> None:
        self.dtype = dtype
        self.note = f"{threads} threads, {dtype} weights and cache"
        self.close = use_threads(threads)
        self._model = prompt.model(dtype)
        self._implementation = implementation
        self.clear()

    def new_cache(self) -> Any:
        """An empty cache for the model."""
        return transformers.DynamicCache(config=self._model.config)

    def clear(self) -> None:
        """Empty the cache."""
        self._model.set_attn_implementation(self._implementation)
        self._cache: Any = self.new_cache()

    def rewind(self, length: int) -> None:
        """Keep the first tokens in the cache alone."""
        self._model.set_attn_implementation(self._implementation)
        self._cache.crop(length - self._cache.get_seq_length())

    def read(self, words: Sequence[int]) -> Logits:
        """Read tokens and append them to the cache."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([words]), cache=self._cache, use_cache=True, logits_to_keep=1).logits
        numbers: Logits = logits[0, -1].float().numpy()
        return numbers


class CacheReader(TransformersReader):
    """The same with softlookup's cache; the weights are bfloat16 unless the cache is float32."""

    def __init__(self, prompt: Prompt, threads: int, dtype: str) -> None:
        weights = "float32" if dtype == "float32" else "bfloat16"
        self._stored = dtype
        super().__init__(prompt, threads, "softlookup", weights)
        self.dtype = dtype
        self.note = f"{threads} threads, {weights} weights, softlookup.transformers.Cache of {dtype}"

    def new_cache(self) -> Any:
        """An empty cache of ours."""
        return softlookup.transformers.Cache(self._model.config, dtype=self._stored)


def _no_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """A result of the right shape, [B, N, Hq, d_v]."""
    batch, heads, queries, _width = query.shape
    return query.new_zeros((batch, queries, heads, value.shape[3])), None


def _no_mask(*_: Any, **__: Any) -> None:
    return None
