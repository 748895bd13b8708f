"""The content of a cache apart from where it lies: what files and pickles hold.

Pages lie as the kernels of one instruction set read them; here their rows are taken out one after the other, as they
are stored: floats, or codes with their scales. Rows of all batch items stand behind one another in `ranges`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from softlookup import _core
from softlookup._cache_checks import CacheConfig
from softlookup._pages import PAGE_KEYS
from softlookup._quantize import Constants, numbers_of, rotated
from softlookup._threads import get_threads
from softlookup._types import BFLOAT16, dtype_of

if TYPE_CHECKING:
    from softlookup._cache_store import CacheStore

Array = NDArray[Any]
Cache = TypeVar("Cache", bound="CacheStore")


class Content(NamedTuple):
    """A cache, whole: its configuration, and arrays by name."""

    config: dict[str, Any]
    arrays: dict[str, Array]


def ranges_of(cache: CacheStore) -> NDArray[np.int64]:
    """What is there: int64 [R, 3] of row, first position and number of tokens."""
    ranges = []
    kept = -(-cache.keep_first // PAGE_KEYS) * PAGE_KEYS
    for row, (length, dropped) in enumerate(zip(cache._lengths.tolist(), cache._dropped.tolist(), strict=True)):
        parts = [(0, length)] if dropped == 0 else [(0, kept), (dropped * PAGE_KEYS, length)]
        ranges += [(row, first, last - first) for first, last in parts if last > first]
    return np.array(ranges, np.int64).reshape(-1, 3)


def element_dtype(config: CacheConfig) -> np.dtype[Any]:
    """The type of stored elements as arrays have it: bfloat16 as its bits, codes as int8."""
    if config.coded:
        return np.dtype(np.int8)
    return np.dtype(np.uint16) if config.code == BFLOAT16 else dtype_of(config.code)


def room_for(config: CacheConfig, tokens: int) -> dict[str, Array]:
    """Empty arrays for the rows of so many tokens."""
    dtype = element_dtype(config)
    arrays = {"keys": np.empty((config.kv_heads, tokens, config.width), dtype)}
    if not config.shared_values:
        arrays["values"] = np.empty((config.kv_heads, tokens, config.value_width), dtype)
    if config.coded:
        arrays["key_scales"] = np.empty((config.kv_heads, tokens, config.key_groups), np.float32)
        if not config.shared_values:
            arrays["value_scales"] = np.empty((config.kv_heads, tokens), np.float32)
    return arrays


def move(cache: CacheStore, row: int, first: int, arrays: dict[str, Array], *, into_pages: bool) -> None:
    """Rows of one batch item out of the pages into contiguous arrays [Hk, T, ...], or back."""
    _core.move_rows(
        cache._shape, cache._table.addresses, row, first, arrays["keys"], arrays.get("values"),
        arrays.get("key_scales"), arrays.get("value_scales"), into_pages, get_threads(), cache._isa,
    )  # fmt: skip


def content_of(cache: CacheStore) -> Content:
    """The content of a cache, copied."""
    config = cache._config
    ranges = ranges_of(cache)
    arrays = room_for(config, int(ranges[:, 2].sum()))
    place = 0
    for row, first, count in ranges.tolist():
        part = room_for(config, count)
        move(cache, row, first, part, into_pages=False)
        for name, array in part.items():
            arrays[name][:, place : place + count] = array
        place += count
    arrays |= {"lengths": cache._lengths.copy(), "ranges": ranges}
    if cache._constants is not None:
        arrays |= {"key_means": cache._constants.key_means, "key_factors": cache._constants.key_factors}
    return Content(asdict(config), arrays)


def restored(kind: type[Cache], content: Content) -> Cache:
    """A cache of this content, which is trusted: `_cache_files` checks what comes from a file."""
    cache = object.__new__(kind)
    config = CacheConfig(**content.config)
    cache._start(config)
    arrays = content.arrays
    place = 0
    for row, first, count in arrays["ranges"].tolist():
        cache._table.own(row, first // PAGE_KEYS, (first + count - 1) // PAGE_KEYS + 1)
        part = {name: np.ascontiguousarray(arrays[name][:, place : place + count]) for name in room_for(config, 0)}
        move(cache, row, first, part, into_pages=True)
        place += count
        kept = -(-config.keep_first // PAGE_KEYS)
        if first > kept * PAGE_KEYS or (first and not kept):
            cache._dropped[row] = first // PAGE_KEYS
    cache._lengths = arrays["lengths"].astype(np.int64)
    if config.coded:
        plain = cache._constants
        assert plain is not None
        means, factors = arrays["key_means"], arrays["key_factors"]
        values = (means, factors) if config.shared_values else (plain.value_means, plain.value_factors)
        width = min(plain.value_means.shape[-1], means.shape[-1])
        cache._constants = Constants(means, factors, values[0][..., :width], values[1][..., :width])
    return cache


def numbers_in(cache: CacheStore, which: int) -> Array:
    """All keys (0) or values (1) as numbers, [B, Hk, longest row, d]."""
    config = cache._config
    name = "keys" if which == 0 or config.shared_values else "values"
    width = config.value_width if which else config.width
    dtype = np.dtype(np.float32) if config.coded else dtype_of(config.code)
    numbers = np.zeros((config.batch, config.kv_heads, int(cache._lengths.max()), width), dtype)
    for row, first, count in ranges_of(cache).tolist():
        part = room_for(config, count)
        move(cache, row, first, part, into_pages=False)
        numbers[row, :, first : first + count] = _numbers(cache, row, part, name, which)[..., :width]
    return numbers


def _numbers(cache: CacheStore, row: int, part: dict[str, Array], name: str, which: int) -> Array:
    config = cache._config
    constants = cache._constants
    if constants is None:
        return part[name] if config.code != BFLOAT16 else part[name].view(dtype_of(BFLOAT16))
    own = name == "keys"
    means = (constants.key_means if own else constants.value_means)[row]
    factors = (constants.key_factors if own else constants.value_factors)[row]
    numbers = numbers_of(part[name], part[f"{name[:-1]}_scales"], means, factors)
    return rotated(numbers, cache._rotation_blocks[which], get_threads()) if config.rotate else numbers
