"""From transformers' description of a mask to softlookup's own.

Policy. transformers calls a mask function once per forward and kind of layer, and hands its result to every
layer of that kind; so everything that can be decided is decided here, and the layers only read a `MaskPlan`.
Positions are those of the cache, padding included. A part of the mask that transformers writes as one of its
own closures is recognised by the closure's name and becomes a window or lengths: nothing N x M is made for it.
An unknown part is evaluated, so a renamed closure costs time, never exactness. What hides nothing is left out.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import masking_utils

import softlookup as sl

# An unknown part is written out below this many bools (64 MiB, shared by all layers), evaluated tile by tile above.
DENSE_ELEMENTS_MAX = 1 << 26

MaskFunction = Callable[..., torch.Tensor]


@dataclass(frozen=True, eq=False)
class MaskPlan:
    """The mask of one forward and one kind of layer, as the layers need it.

    Attributes
    ----------
    batch, queries, keys
        The sizes B, N, M that transformers announced for the layer.
    visible_keys
        Columns from here on are hidden from every query (the unused end of a static cache): they are cut off.
    mask
        The softlookup mask over the first `visible_keys` columns, or None where it hides nothing.
    q_start, k_start
        The absolute positions of query row 0 and of key column 0.
    """

    batch: int
    queries: int
    keys: int
    visible_keys: int
    mask: sl.Mask | None
    q_start: int
    k_start: int
    ndim: ClassVar[int] = 4

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape [B, 1, N, M] of the tensor that this stands for."""
        return self.batch, 1, self.queries, self.keys

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"softlookup's attention mask has no {name!r}: this model edits its mask as a tensor, "
            "which softlookup does not support; use attn_implementation='sdpa' or 'eager' for it"
        )


def plan_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | MaskPlan | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> MaskPlan:
    """Translate the mask of one forward; the signature is transformers' `AttentionMaskInterface`.

    Parameters
    ----------
    batch_size, q_length, kv_length
        B, N and M.
    q_offset, kv_offset
        Absolute positions of the first query and of the first key. A static cache passes the tensor that its own
        update increments later: it is read now.
    mask_function
        Closure over (batch, head, query position, key position) that gives True where a query may attend.
    attention_mask
        The padding, bool [B, L], True where a token is real; or a plan that was made before, returned unchanged.
    use_vmap
        True when `mask_function` holds a user's function that may not broadcast.
    """
    if isinstance(attention_mask, MaskPlan):
        return attention_mask
    q_start, k_start = int(q_offset), int(kv_offset)
    rule = _Rule()
    rule.add(mask_function, key_end=max(k_start + kv_length, q_start + q_length))
    visible_keys = kv_length
    if rule.right is not None:
        visible_keys = min(max(q_start + q_length + rule.right - k_start, 0), kv_length)
    conditions = [
        _window(rule, q_start, q_length, k_start, visible_keys),
        _padding(attention_mask, k_start, visible_keys),
        _written_out(rule, batch_size, q_length, visible_keys, q_start, k_start, use_vmap),
    ]
    biting = [condition for condition in conditions if condition is not None]
    mask = functools.reduce(operator.and_, biting) if biting else None
    return MaskPlan(batch_size, q_length, kv_length, visible_keys, mask, q_start, k_start)


@dataclass
class _Rule:
    """A conjunction: keys in [i - left, i + right] (None: no limit), and every closure of `others`."""

    left: int | None = None
    right: int | None = None
    others: list[MaskFunction] = field(default_factory=list)

    def narrow(self, left: int | None, right: int | None) -> None:
        if left is not None:
            self.left = left if self.left is None else min(self.left, left)
        if right is not None:
            self.right = right if self.right is None else min(self.right, right)

    def add(self, function: MaskFunction, key_end: int, same_sequence: bool = False) -> None:
        """Take in one closure. `same_sequence`: another part already limits it to pairs of one packed sequence."""
        name, held = _closure(function)
        if name == "causal_mask_function":
            self.narrow(None, 0)
        elif name == "bidirectional_mask_function":
            pass
        elif name == "and_masks":
            parts = held["mask_functions"]
            same_sequence = any(_closure(part)[0] == "packed_sequence_mask_function" for part in parts)
            for part in parts:
                self.add(part, key_end, same_sequence)
        elif name == "sliding_window_overlay":
            self.narrow(held["sliding_window"] - 1, None)
        elif name == "sliding_window_bidirectional_overlay":
            self.narrow(held["sliding_window"], held["sliding_window"])
        elif name == "remap_positions_for_packed_sequence" and same_sequence:
            # Inside one sequence positions rise by one a token: their differences are differences of rows.
            self.add(held["mask_function"], key_end)
        elif name == "chunked_overlay":
            self.narrow(held["chunk_size"] - 1, held["chunk_size"] - 1)
            if key_end > held["chunk_size"] or bool(held["left_padding"].any()):
                self.others.append(function)
        else:
            self.others.append(function)


def _closure(function: MaskFunction) -> tuple[str, dict[str, Any]]:
    """The factory in `transformers.masking_utils` that made a closure ("" for any other), and what it holds."""
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return "", {}
    names: tuple[str, ...] = function.__code__.co_freevars
    cells = function.__closure__ or ()
    return function.__qualname__.partition(".")[0], {
        name: cell.cell_contents for name, cell in zip(names, cells, strict=True)
    }


def _window(rule: _Rule, q_start: int, queries: int, k_start: int, keys: int) -> sl.Mask | None:
    """The window, without the sides that hide nothing from these queries."""
    left, right = rule.left, rule.right
    if left is not None and q_start + queries - 1 - left <= k_start:
        left = None
    if right is not None and q_start + right >= k_start + keys - 1:
        right = None
    if left is None and right is None:
        return None
    return sl.Causal() if left is None and right == 0 else sl.Window(left, right)


def _padding(attention_mask: torch.Tensor | None, k_start: int, keys: int) -> sl.Mask | None:
    """Real tokens at one end of every row become lengths; any other pattern is written out as [B, 1, 1, M]."""
    if attention_mask is None:
        return None
    real: NDArray[np.bool_] = attention_mask[:, k_start : k_start + keys].bool().numpy()
    if real.shape[1] < keys:
        real = np.pad(real, ((0, 0), (0, keys - real.shape[1])))
    if real.all():
        return None
    counts = real.sum(axis=1, dtype=np.int64)
    columns = np.arange(keys)
    if np.array_equal(real, columns < counts[:, None]):
        return sl.Lengths(counts, padding_side="right")
    if np.array_equal(real, columns >= keys - counts[:, None]):
        return sl.Lengths(counts, padding_side="left")
    return sl.Dense(real[:, None, None, :])


def _written_out(
    rule: _Rule, batch: int, queries: int, keys: int, q_start: int, k_start: int, use_vmap: bool
) -> sl.Mask | None:
    """The closures that no other mask expresses."""
    if not rule.others:
        return None
    function = masking_utils.and_masks(*rule.others)
    if not use_vmap and batch * queries * keys > DENSE_ELEMENTS_MAX:
        return sl.Predicate(functools.partial(_evaluate, function))
    visible: Any = masking_utils.sdpa_mask(
        batch, queries, keys, q_start, k_start, function, allow_is_causal_skip=False, use_vmap=use_vmap
    )
    # The same pattern for the whole batch comes expanded: one copy of it is enough.
    shared = visible[:1] if visible.stride(0) == 0 else visible
    return sl.Dense(shared.numpy())


def _evaluate(function: MaskFunction, b: Any, h: Any, i: Any, j: Any) -> NDArray[np.bool_]:
    """A closure over index tensors, called with index arrays. As in transformers, it sees head 0 for every head."""
    del h
    batch, query, key = (torch.as_tensor(np.asarray(index)) for index in (b, i, j))
    visible: NDArray[np.bool_] = function(batch, torch.zeros((), dtype=torch.int64), query, key).numpy()
    return visible
