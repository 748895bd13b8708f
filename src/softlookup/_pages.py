"""The memory of caches: pages that caches share until one of them writes, and the table that says where they lie.

A page holds one block of 512 keys, with their values, of all heads of one batch item. Pages are cut from slabs that
double in size, so memory stays where it is when a cache grows. Large slabs ask the system for huge pages: a cache read
through pages of 4 KiB loses a tenth of the memory's bandwidth. Slabs are never touched here: who writes first, touches.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from softlookup import _core

PAGE_KEYS: int = _core.PAGE_KEYS

_HUGE_PAGE = 1 << 21
_FIRST_SLAB = 1 << 18
_LARGEST_SLAB = 1 << 26
_LINE = 64


class PageShape(NamedTuple):
    """What one head of a page holds; the core reads the fields in this order."""

    type: int  # of the stored elements: softlookup._types, INT8 or INT4
    width: int
    value_width: int
    rows: bool  # rows of keys whose first columns are the values


class Pool:
    """Pages of one size, given out and taken back, with a count of the tables that hold each."""

    def __init__(self, page_bytes: int, expected: int = 1) -> None:
        self.page_bytes = page_bytes
        self._next_slab = max(_FIRST_SLAB, expected * page_bytes)
        self._slabs: list[mmap.mmap] = []
        self._free: list[int] = []
        self._more: dict[int, int] = {}  # of a page with several holders: how many beside the first
        self._lock = threading.Lock()

    def take(self) -> int:
        """The address of a page that nobody else holds.

        Raises
        ------
        MemoryError
            If the system gives no memory.
        """
        with self._lock:
            if not self._free:
                self._add_slab()
            return self._free.pop()

    def share(self, pages: NDArray[np.int64]) -> None:
        """Count one more holder of every page."""
        with self._lock:
            for page in pages[pages != 0].tolist():
                self._more[page] = self._more.get(page, 0) + 1

    def give_back(self, pages: NDArray[np.int64]) -> None:
        """Count one holder less of every page; who was the last leaves it free."""
        with self._lock:
            for page in pages[pages != 0].tolist():
                if page in self._more:
                    self._more[page] -= 1
                    if self._more[page] == 0:
                        del self._more[page]
                else:
                    self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """Whether somebody else holds the page too."""
        return page in self._more

    def copy_of(self, page: int) -> int:
        """A page of the same content that nobody else holds."""
        copy = self.take()
        ctypes.memmove(copy, page, self.page_bytes)
        return copy

    def _add_slab(self) -> None:
        size = max(self._next_slab, self.page_bytes)
        alignment = _HUGE_PAGE if size >= _HUGE_PAGE else _LINE
        size = -(-size // alignment) * alignment
        try:
            slab = mmap.mmap(-1, size + alignment, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise MemoryError(f"softlookup: no memory for {size} bytes of a cache's pages ({error})") from error
        start = ctypes.addressof(ctypes.c_char.from_buffer(slab))
        skipped = -start % alignment
        if size >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            slab.madvise(mmap.MADV_HUGEPAGE, skipped - skipped % mmap.PAGESIZE)
        first = start + skipped
        # From the end of the list they are taken in the order of their addresses.
        self._free += range(first + (size // self.page_bytes - 1) * self.page_bytes, first - 1, -self.page_bytes)
        self._slabs.append(slab)
        self._next_slab = min(2 * size, _LARGEST_SLAB)


class PageTable:
    """The pages of one cache: addresses int64 [B, blocks], 0 where there is none."""

    def __init__(self, pool: Pool, batch: int) -> None:
        self.pool = pool
        self.addresses = np.zeros((batch, 4), np.int64)

    def __del__(self) -> None:
        self.pool.give_back(self.addresses)

    @property
    def page_count(self) -> int:
        """How many distinct pages the table holds."""
        return int(np.unique(self.addresses[self.addresses != 0]).size)

    def select(self, rows: NDArray[np.int64]) -> PageTable:
        """A table of some batch items, which shares their pages."""
        table = PageTable(self.pool, rows.size)
        addresses = self.addresses[rows]
        self.pool.share(addresses)
        table.addresses = addresses
        return table

    def own(self, item: int, first: int, last: int) -> list[int]:
        """Make sure that blocks first .. last - 1 of an item have pages that nobody else holds; the new blocks.

        Raises
        ------
        MemoryError
            If there is no memory for them; nothing is new then.
        """
        if last > self.addresses.shape[1]:
            wider = np.zeros((len(self.addresses), max(last, 2 * self.addresses.shape[1])), np.int64)
            wider[:, : self.addresses.shape[1]] = self.addresses
            self.addresses = wider
        new: list[int] = []
        try:
            for block in range(first, last):
                page = int(self.addresses[item, block])
                if page == 0:
                    self.addresses[item, block] = self.pool.take()
                    new.append(block)
                elif self.pool.is_shared(page):
                    self.addresses[item, block] = self.pool.copy_of(page)
                    self.pool.give_back(np.array([page]))
        except MemoryError:
            self.drop(item, new)
            raise
        return new

    def drop(self, item: int, blocks: list[int] | slice) -> None:
        """Give back the pages of some blocks of an item."""
        self.pool.give_back(self.addresses[item, blocks])
        self.addresses[item, blocks] = 0


def new_pool(shape: PageShape, kv_heads: int, isa: str, expected: int) -> Pool:
    """A pool of pages for caches of this shape under one instruction set."""
    return Pool(kv_heads * _core.page_head_bytes(shape, isa), expected)
