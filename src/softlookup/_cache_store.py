"""The store of a cache: rows of tokens in pages, appended in place, rolled back, and shared until one side writes.

A row is one sequence of the batch. Its keys stand at positions 0, 1, 2, ... in pages of 512. What is stored of a token
depends on nothing that comes after it, nor on the rows around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from softlookup import _core
from softlookup._attention import current_isa
from softlookup._cache_checks import CacheConfig, check_room, check_rows, chosen_rows, counts_of, per_row
from softlookup._pages import PAGE_KEYS, PageShape, PageTable, new_pool
from softlookup._problems import Problems
from softlookup._quantize import Constants, constants_of_first, rotated, rotation_block
from softlookup._threads import get_threads
from softlookup._types import FLOAT32, core_view

Array = NDArray[Any]
Lengths = NDArray[np.int64]
Asked = NDArray[np.int64] | Sequence[int] | int


class CacheStore:
    """What `KVCache` is but for attention and files."""

    def _start(self, config: CacheConfig) -> None:
        self._config = config
        self._isa = current_isa()  # pages lie as its kernels read them
        self._shape = PageShape(config.code, config.width, config.value_width, config.shared_values)
        blocks = 0 if config.capacity is None else -(-config.capacity // PAGE_KEYS)
        if config.window is not None:
            blocks = min(blocks, (config.window + config.keep_first) // PAGE_KEYS + 2)
        pool = new_pool(self._shape, config.kv_heads, self._isa, config.batch * blocks)
        self._table = PageTable(pool, config.batch)
        self._lengths: Lengths = np.zeros(config.batch, np.int64)
        self._dropped: Lengths = np.zeros(config.batch, np.int64)  # blocks of a row before this one were given back
        self._remembers = False  # whether a window gives back nothing for now, so that all can be rolled back
        self._constants = None
        if config.coded:
            self._constants = Constants.plain(config.batch, config.kv_heads, config.width, config.value_width)

    batch = property(lambda self: self._config.batch, doc="Number of sequences.")
    kv_heads = property(lambda self: self._config.kv_heads, doc="Number of key heads.")
    width = property(lambda self: self._config.width, doc="d_k.")
    value_width = property(lambda self: self._config.value_width, doc="d_v.")
    dtype = property(lambda self: self._config.dtype, doc="Name of the stored type.")
    window = property(lambda self: self._config.window, doc="How many of the last keys are kept; None is all.")
    keep_first = property(lambda self: self._config.keep_first, doc="How many of the first keys are kept beside them.")
    capacity = property(lambda self: self._config.capacity, doc="The most tokens of a row; None is no limit.")
    shared_values = property(lambda self: self._config.shared_values, doc="Whether values are columns of the keys.")
    rotate = property(lambda self: self._config.rotate, doc="Whether what becomes codes is rotated first.")

    @property
    def lengths(self) -> Lengths:
        """Tokens appended to each row so far and not rolled back, int64 [B]."""
        return self._lengths.copy()

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that this cache holds, those it shares included, of its table and its constants."""
        constants = 0 if self._constants is None else self._constants.nbytes
        return self._table.page_count * self._table.pool.page_bytes + self._table.addresses.nbytes + constants

    def __repr__(self) -> str:
        config = self._config
        lengths = self._lengths.tolist()
        shown = lengths[0] if len(set(lengths)) == 1 else lengths
        return (
            f"KVCache(batch={config.batch}, kv_heads={config.kv_heads}, width={config.width}, "
            f"value_width={config.value_width}, dtype={config.dtype!r}, lengths={shown}, nbytes={self.nbytes})"
        )

    def append(self, k: Array, v: Array | None = None, *, lengths: Asked | None = None) -> None:
        """Add tokens at the end of every row; codes are made as they come in.

        Parameters
        ----------
        k
            Keys [B, Hk, T, d_k], of the cache's type; for codes float32, float16 or bfloat16, all of them finite.
        v
            Values [B, Hk, T, d_v], of the same type; None where values are columns of the keys.
        lengths
            Row b appends its first ``lengths[b]`` tokens only; None is all T.

        Raises
        ------
        TypeError, ValueError
            If an array does not fit, a row would grow beyond the capacity, or a number that is to become a code is not
            finite. The cache is as it was.
        MemoryError
            If there is no memory; the cache is as it was.
        """
        config = self._config
        problems = Problems("KVCache.append")
        code = check_rows(problems, config, k, v)
        problems.raise_any()
        assert code is not None
        counts = counts_of(problems, config, lengths, k.shape[2])
        check_room(problems, config, self._lengths, counts)
        problems.raise_any()
        constants = self._constants
        if config.coded:
            k, v, code = self._prepared(k, v, code)
            first = [row for row in range(config.batch) if self._lengths[row] == 0 and counts[row] > 0]
            if first and constants is not None:
                with np.errstate(invalid="ignore", over="ignore"):
                    constants = constants_of_first(constants, first, counts, k, v)
        new = self._make_room(counts)
        stored = _core.append(
            self._shape, self._table.addresses, self._lengths, counts, core_view(k, code),
            None if v is None else core_view(v, code), code, *self._columns(constants), get_threads(), self._isa,
        )  # fmt: skip
        if not stored:
            for row, blocks in new:
                self._table.drop(row, blocks)
            problems.value("k, v", "NaN or inf", f"finite numbers, as {config.dtype} has no other", "a float cache")
            problems.raise_any()
        self._constants = constants
        self._forget(counts)
        self._lengths = self._lengths + counts

    def _prepared(self, k: Array, v: Array | None, code: int) -> tuple[Array, Array | None, int]:
        """What becomes codes: rotated, if that was asked for."""
        if not self._config.rotate:
            return k, v, code
        key_block, value_block = self._rotation_blocks
        workers = get_threads()
        return rotated(k, key_block, workers), None if v is None else rotated(v, value_block, workers), FLOAT32

    def _columns(self, constants: Constants | None) -> tuple[Any, Any, Any, Any]:
        if constants is None:
            return None, None, None, None
        values = (constants.value_means, constants.value_factors) if self._config.shared_values else (None, None)
        return constants.key_means, constants.key_factors, *values

    def _make_room(self, counts: Lengths) -> list[tuple[int, list[int]]]:
        """Pages of its own for what each row appends; the new ones, for whoever has to give them back."""
        new: list[tuple[int, list[int]]] = []
        try:
            for row, (start, count) in enumerate(zip(self._lengths.tolist(), counts.tolist(), strict=True)):
                if count:
                    last = (start + count - 1) // PAGE_KEYS + 1
                    new.append((row, self._table.own(row, start // PAGE_KEYS, last)))
        except MemoryError:
            for row, blocks in new:
                self._table.drop(row, blocks)
            raise
        return new

    def _forget(self, counts: Lengths) -> None:
        """Give back the pages that neither a query at the first new position nor any later one can see."""
        config = self._config
        if config.window is None or self._remembers:
            return
        kept = -(-config.keep_first // PAGE_KEYS)
        for row in np.flatnonzero(counts).tolist():
            first = max(int(self._lengths[row]) - config.window + 1, 0) // PAGE_KEYS
            if first > max(kept, int(self._dropped[row])):
                self._table.drop(row, slice(max(kept, int(self._dropped[row])), first))
                self._dropped[row] = first

    def _forget_past(self) -> None:
        """Give back what was remembered only to be rolled back."""
        self._remembers = False
        self._forget(np.ones(self._config.batch, np.int64))
        self._remembers = True

    def truncate(self, lengths: Asked) -> None:
        """Roll back to the first `lengths` tokens of each row, as if what followed had never come.

        Parameters
        ----------
        lengths
            An int for all rows, or ints [B], from 0 to the row's length.

        Raises
        ------
        TypeError, ValueError
            If they are no such ints, or if a window would then need keys that were given back. What the last append
            added can always be rolled back. The cache is as it was.
        """
        problems = Problems("KVCache.truncate")
        wanted = per_row(problems, self._config, "lengths", lengths, self._lengths, "the row's length, {}")
        if not problems.count and self._config.window is not None:
            self._check_kept(problems, "lengths", wanted, np.flatnonzero(wanted))
        problems.raise_any()
        for row, length in enumerate(wanted.tolist()):
            blocks = -(-length // PAGE_KEYS)
            if length < self._lengths[row]:
                self._table.drop(row, slice(blocks, None))
            if length == 0:
                self._dropped[row] = 0
        self._lengths = wanted

    def _check_kept(self, problems: Problems, name: str, positions: Lengths, rows: NDArray[np.intp]) -> None:
        """Report rows where the window of a query at a position reaches into what was given back."""
        window = self._config.window or 0
        for row in rows.tolist():
            oldest = max(int(positions[row]) - window + 1, 0)
            if self._dropped[row] > oldest // PAGE_KEYS:
                found = f"position {positions[row]} in row {row}, whose window begins at key {oldest}"
                kept = int(self._dropped[row]) * PAGE_KEYS
                expected = f"a position from {kept + window - 1} on, as keys before {kept} were given back"
                problems.value(name, found, expected, "a larger window, or fork() before going on")
                return

    def fork(self) -> Self:
        """A cache of the same content. Both share pages until one of them writes."""
        return self._selected(np.arange(self._config.batch))

    def select(self, rows: Lengths | Sequence[int]) -> Self:
        """A cache of the chosen rows, in their order; a row may come again. Pages are shared until one side writes.

        Raises
        ------
        TypeError, ValueError
            If they are not indices of rows.
        """
        problems = Problems("KVCache.select")
        chosen = chosen_rows(problems, self._config, rows)
        problems.raise_any()
        return self._selected(chosen)

    def _selected(self, rows: Lengths) -> Self:
        cache = object.__new__(type(self))
        cache.__dict__.update(self.__dict__)
        cache._config = CacheConfig(**{**self._config.__dict__, "batch": rows.size})
        cache._table = self._table.select(rows)
        cache._lengths = self._lengths[rows]
        cache._dropped = self._dropped[rows]
        cache._constants = None if self._constants is None else self._constants.select(rows)
        return cache

    def __copy__(self) -> Self:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.fork()

    @property
    def _rotation_blocks(self) -> tuple[int, int]:
        """How many neighbouring columns of keys and of values are rotated together."""
        config = self._config
        if config.shared_values:
            block = rotation_block(config.width, config.value_width)
            return block, block
        return rotation_block(config.width), rotation_block(config.value_width)
