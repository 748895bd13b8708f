"""The layers of a transformers cache that keep keys and values in a `softlookup.KVCache`.

Policy. A layer's `update` appends and hands its store on to the attention function, through the keywords that both get;
the kernel then reads codes and halves where they lie, and only the new tokens travel as tensors. Where another
attention implementation is set, or a model passes no keywords, `update` returns everything that is stored as tensors:
slower, and right. Positions are those of the whole sequence, so a sliding layer says that it holds all keys and lets
the mask and the store's own window hide what was given back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

import softlookup as sl
from softlookup._tensors import array_of, tensor_of

KEYWORD = "softlookup_cache"

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def refuse_gradients(*arguments: Any) -> None:
    """Raise if gradients would be lost: what is stored has no history."""
    if torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in arguments):
        raise RuntimeError(
            "softlookup.transformers.Cache: found tensors that require gradients; expected none, as what is stored has "
            "no history; fix: call the model under torch.no_grad(), or without this cache"
        )


class StoredLayer(CacheLayerMixin):
    """One layer's keys and values.

    Parameters
    ----------
    config
        The model's text configuration, which names the attention implementation in use.
    dtype
        The store's type; None is that of the first keys.
    rotate
        Whether codes are made of rotated numbers.
    sliding_window
        Keys that a query sees, its own included; None is all.
    """

    is_croppable = True
    supports_early_init = False

    def __init__(self, config: Any, dtype: str | None, rotate: bool, sliding_window: int | None = None) -> None:
        self.store: sl.KVCache | None = None
        self.is_initialized = False
        self.is_sliding = sliding_window is not None
        self.sliding_window = sliding_window
        self.record_past = False
        self._config = config
        self._dtype = dtype
        self._rotate = rotate
        self._length = 0

    # The base class has attributes there; a store is read when somebody asks.
    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """All keys as a tensor, for models that read them from the layer (encoder-decoders do)."""
        return None if self.store is None else tensor_of(self.store.keys()).to(self._given)

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """All values as a tensor."""
        return None if self.store is None else tensor_of(self.store.values()).to(self._given)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the store, once the sizes are known."""
        self._given = key_states.dtype
        self.device = key_states.device
        self.dtype = key_states.dtype
        name = self._dtype or str(key_states.dtype).removeprefix("torch.")
        self.store = sl.KVCache(
            batch=key_states.shape[0],
            kv_heads=key_states.shape[1],
            width=key_states.shape[3],
            value_width=value_states.shape[3],
            dtype=name,
            window=self.sliding_window,
            rotate=self._rotate,
        )
        self.is_initialized = True
        self.store._remembers = self.record_past

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_: Any,
        kwargs: dict[str, Any] | None = None,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new tokens; give the store to the attention function, or everything to the caller."""
        refuse_gradients(key_states, value_states)
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        assert self.store is not None
        self.store.append(array_of(self._stored(key_states)), array_of(self._stored(value_states)))
        self._length += key_states.shape[2]
        if kwargs is not None and getattr(self._config, "_attn_implementation", None) == "softlookup":
            kwargs[KEYWORD] = self.store
            return key_states, value_states
        keys, values = self.keys, self.values
        assert keys is not None
        assert values is not None
        return keys, values

    def _stored(self, states: torch.Tensor) -> torch.Tensor:
        """New tokens in the store's type; codes are made from what the model has."""
        assert self.store is not None
        return states.to(TYPES.get(self.store.dtype, states.dtype))

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return self._length

    def get_max_length(self) -> int:
        """No maximum, or the window."""
        return self.sliding_window or -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that the mask has to be made for, and the position of the first."""
        return self._length + query_length, 0

    def reset(self) -> None:
        """Forget everything."""
        self.store = None
        self.is_initialized = False
        self._length = 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Go on with the chosen beams. Pages are shared until a beam writes."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Go on with the chosen rows."""
        if self.store is not None:
            chosen = indices.nonzero()[:, 0] if indices.dtype is torch.bool else indices
            self.store = self.store.select(chosen.numpy())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        if self.store is not None:
            self.store = self.store.select(np.repeat(np.arange(self.store.batch), repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Roll back the last tokens; their number is negative, as transformers has it."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"softlookup.transformers.Cache.crop: found {tokens_to_remove}; expected 0 or a negative int, minus "
                "the number of tokens to remove; fix: crop(-n)"
            )
        if self.store is None:
            return
        self._length = max(self._length + tokens_to_remove, 0)
        self.store.truncate(self._length)
        if self.record_past:
            self.store._forget_past()

    def activate_past_recording(self, **_: Any) -> None:
        """Give back nothing of a window until the next `crop`."""
        self.record_past = True
        if self.store is not None:
            self.store._remembers = True

    def offload(self) -> None:
        """Nothing to do: a store lives on the CPU."""

    def prefetch(self) -> None:
        """Nothing to do: a store lives on the CPU."""
