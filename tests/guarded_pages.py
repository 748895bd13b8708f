"""Run as a program with a type and an instruction set: calls whose arrays touch forbidden pages.

Every array ends exactly where an unreadable page begins, then starts exactly where one ends; a read or
write outside ends the process with a signal. Kept out of the test process for that reason.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys

import numpy as np

import softlookup as sl
from cases import TYPES, Shape, arrays
from softlookup._attention import forced_isa

PAGE_BYTES = mmap.PAGESIZE


def guarded(array: np.ndarray, at_end: bool) -> np.ndarray:
    """A copy of a contiguous array with an unreadable page before and behind its own pages."""
    pages = max(-(-array.nbytes // PAGE_BYTES), 1)
    room = mmap.mmap(-1, (pages + 2) * PAGE_BYTES)
    start = ctypes.addressof(ctypes.c_char.from_buffer(room))
    libc = ctypes.CDLL(None, use_errno=True)
    for page in (0, pages + 1):
        if libc.mprotect(ctypes.c_void_p(start + page * PAGE_BYTES), ctypes.c_size_t(PAGE_BYTES), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = (pages + 1) * PAGE_BYTES - array.nbytes if at_end else PAGE_BYTES
    copy = np.frombuffer(room, np.uint8, array.nbytes, offset).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def call(shape: Shape, type_name: str, at_end: bool) -> None:
    """One comparison of a guarded call with an ordinary one, masks and biases and output included."""
    ordinary = list(arrays(shape, type_name))
    mask = np.random.default_rng(3).random((shape.queries, shape.keys)) < 0.7
    bias = np.linspace(-1, 1, mask.size, dtype=np.float32).reshape(mask.shape)
    sinks = np.linspace(-1, 1, shape.heads, dtype=np.float32)
    expected = sl.attention(*ordinary, mask=mask, bias=bias, sinks=sinks)
    q, k, v, mask, bias, sinks, out = (
        guarded(np.ascontiguousarray(x), at_end) for x in (*ordinary, mask, bias, sinks, expected)
    )
    out[...] = 0
    sl.attention(q, k, v, mask=mask, bias=bias, sinks=sinks, out=out, threads=2)
    assert out.tobytes() == expected.tobytes(), shape
    # The rows' last elements, not the array's, stand at the edge: [N, H, d] seen as [H, N, d].
    q, k, v = (guarded(np.ascontiguousarray(x.swapaxes(0, 1)), at_end).swapaxes(0, 1) for x in ordinary)
    plain = sl.attention(*ordinary, q_start=0)
    assert sl.attention(q, k, v, q_start=0).tobytes() == plain.tobytes(), shape


def main(type_name: str, isa: str) -> None:
    """Sizes around one and two vectors, registers and tiles, and the reported one."""
    sizes = [(1, 38, 64, 64), (1, 1, 1, 1), (1, 129, 80, 96), (9, 130, 3, 5), (13, 513, 16, 17), (97, 33, 33, 1)]
    sizes += itertools.product((1, 8), (7, 16, 17, 33), (1, 17), (8, 17))
    with forced_isa(isa):
        for queries, keys, key_width, value_width in sizes:
            for at_end in (True, False):
                call(Shape(queries, keys, 2, 1, key_width, value_width), type_name, at_end)
    print("every call stayed inside")


if __name__ == "__main__":
    if sys.argv[1] not in TYPES:
        raise SystemExit(f"unknown type {sys.argv[1]!r}, expected one of {list(TYPES)}")
    main(*sys.argv[1:])
