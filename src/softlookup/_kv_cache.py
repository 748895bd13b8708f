"""The KV cache: keys and values kept in the layout that the kernels read, appended in place, attended to where they lie.

A row of a cache is one sequence of the batch. Its keys stand at positions 0, 1, 2, ... in pages of 512, which caches
share until one of them writes. What a query computes does not depend on the chunks in which tokens came, on the rows
around it, or on what was rolled back: the bits rule of `attention` holds.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal, Self, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from softlookup import _core
from softlookup._array_checks import Shapes, as_type, check_out, sizes_of
from softlookup._attention import Start, current_isa, statistics_of
from softlookup._cache_checks import (
    CacheConfig,
    check_query,
    check_room,
    check_rows,
    chosen_rows,
    config_of,
    counts_of,
    per_row,
)
from softlookup._cache_content import content_of, numbers_in, restored
from softlookup._cache_files import load_file, save_file
from softlookup._cache_scoring import cache_scoring, plain_scoring
from softlookup._checks import as_threads, flag
from softlookup._mask_algebra import Booleans, Mask
from softlookup._pages import PAGE_KEYS, PageShape, PageTable, new_pool
from softlookup._problems import Problems
from softlookup._quantize import Constants, constants_of_first, rotated, rotation_block
from softlookup._scoring import Scoring
from softlookup._stats import Stats
from softlookup._threads import get_threads
from softlookup._types import FLOAT32, core_view, dtype_of

Array = NDArray[Any]
Lengths = NDArray[np.int64]


class KVCache:
    """Keys and values of a growing sequence, or of a batch of them, for decoding at the speed of memory.

    Parameters
    ----------
    batch
        Number of sequences, B.
    kv_heads
        Number of key heads, Hk.
    width, value_width
        d_k and d_v; None is d_v = d_k.
    dtype
        "float32", "bfloat16", "float16", or codes: "int8" and "int4", which take a quarter and an eighth of the bytes
        of float32, and of the time where memory is what decoding waits for. docs/kv-cache.md says what they cost in
        accuracy.
    window, keep_first
        Keep only the last `window` keys and the first `keep_first`: a query at position i sees key j where
        ``j > i - window`` or ``j < keep_first``. Pages that no later query can see are given back. None keeps all.
    capacity
        The most tokens that a row may hold; None grows as needed. With it memory is asked for at once.
    shared_values
        The values are the first d_v columns of the keys, stored once (latent attention).
    rotate
        Rotate keys and values by a Walsh-Hadamard matrix before they become codes, which spreads outliers over the
        columns. For int8 and int4.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong: one error lists all reasons, each with its fix.

    References
    ----------
    Shazeer, "Fast transformer decoding: one write-head is all you need" (2019), for why decoding waits for memory;
    Liu et al., "KIVI" (2024), for columns of keys and tokens of values; Xiao et al., "Efficient streaming language
    models with attention sinks" (2023), for `keep_first`.

    Examples
    --------
    >>> import numpy as np
    >>> import softlookup as sl
    >>> rng = np.random.default_rng(0)
    >>> k, v = rng.standard_normal((2, 1, 2, 700, 64)).astype(np.float32)
    >>> q = rng.standard_normal((1, 4, 1, 64)).astype(np.float32)
    >>> cache = sl.KVCache(kv_heads=2, width=64)
    >>> cache.append(k, v)
    >>> bool((cache.attention(q) == sl.attention(q, k, v)).all())
    True
    >>> small = sl.KVCache(kv_heads=2, width=64, dtype="int8")
    >>> small.append(k, v)
    >>> bool(abs(small.attention(q) - cache.attention(q)).max() < 0.01), small.nbytes < cache.nbytes / 3
    (True, True)
    """

    def __init__(
        self,
        *,
        batch: int = 1,
        kv_heads: int,
        width: int,
        value_width: int | None = None,
        dtype: DTypeLike = "float32",
        window: int | None = None,
        keep_first: int = 0,
        capacity: int | None = None,
        shared_values: bool = False,
        rotate: bool = False,
    ) -> None:
        problems = Problems("KVCache")
        config = config_of(
            problems, batch=batch, kv_heads=kv_heads, width=width, value_width=value_width, dtype=dtype, window=window,
            keep_first=keep_first, capacity=capacity, shared_values=shared_values, rotate=rotate,
        )  # fmt: skip
        problems.raise_any()
        assert config is not None
        self._start(config)

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

    def append(self, k: Array, v: Array | None = None, *, lengths: Lengths | int | None = None) -> None:
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
        return rotated(k, key_block), None if v is None else rotated(v, value_block), FLOAT32

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
        if config.window is None:
            return
        kept = -(-config.keep_first // PAGE_KEYS)
        for row in np.flatnonzero(counts).tolist():
            first = max(int(self._lengths[row]) - config.window + 1, 0) // PAGE_KEYS
            if first > max(kept, int(self._dropped[row])):
                self._table.drop(row, slice(max(kept, int(self._dropped[row])), first))
                self._dropped[row] = first

    def truncate(self, lengths: Lengths | int) -> None:
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

    def select(self, rows: Lengths | list[int]) -> Self:
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

    @overload
    def attention(self, q: Array, *, stats: Literal[False] = ..., **options: Any) -> Array: ...
    @overload
    def attention(self, q: Array, *, stats: Literal[True], **options: Any) -> tuple[Array, Stats]: ...
    @overload
    def attention(self, q: Array, *, stats: bool, **options: Any) -> Array | tuple[Array, Stats]: ...
    def attention(
        self,
        q: Array,
        *,
        mask: Mask | Booleans | None = None,
        bias: Array | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Array | None = None,
        q_start: Start | None = None,
        out: Array | None = None,
        out_dtype: DTypeLike | None = None,
        stats: bool = False,
        threads: int | None = None,
    ) -> Array | tuple[Array, Stats]:
        """Exact attention of the last N tokens' queries over the cache: append their keys first.

        Parameters
        ----------
        q
            Queries [B, Hq, N, d_k], Hq a multiple of Hk, of the cache's type; for codes float32, float16 or bfloat16.
        mask
            As in `softlookup.attention`, with M the longest row's length; None is `Causal()`. `Full()` sees every key,
            as cross-attention does. What lies past a row's length never shows.
        bias, scale, softcap, sinks, out, out_dtype, stats, threads
            As in `softlookup.attention`.
        q_start
            Position of query row 0; None is each row's length - N.

        Returns
        -------
        numpy.ndarray or (numpy.ndarray, Stats)
            The output [B, Hq, N, d_v], of the type of q unless `out_dtype` asks for another, and the statistics if
            asked for. Each row has the bits that `softlookup.attention` gives for float32, bfloat16 and float16 keys
            and values. Codes meet a query and weights of 16 bits: docs/kv-cache.md gives the bound.

        Raises
        ------
        TypeError, ValueError
            If an argument is wrong, or a query's window reaches into keys that were given back; before anything is
            computed.

        References
        ----------
        Dao et al., "Flash-Decoding for long-context inference" (2023), for splitting a row's keys over threads.

        Examples
        --------
        >>> import numpy as np
        >>> import softlookup as sl
        >>> k = np.eye(4, dtype=np.float32).reshape(1, 1, 4, 4)
        >>> cache = sl.KVCache(kv_heads=1, width=4)
        >>> cache.append(k, k)
        >>> cache.attention(k[:, :, -1:], scale=0.0)
        array([[[[0.25, 0.25, 0.25, 0.25]]]], dtype=float32)
        """
        problems = Problems("KVCache.attention")
        options = {"mask": mask, "bias": bias, "scale": scale, "softcap": softcap, "sinks": sinks, "q_start": q_start}
        code, sizes, scoring = self._lookup(problems, q, options)
        out_code = code if out_dtype is None else as_type(problems, out_dtype)
        if out is not None:
            check_out(problems, out, out_code, sizes, (q, bias, sinks, mask))
        flag(problems, "stats", stats)
        workers = get_threads() if threads is None else as_threads(problems, threads)
        problems.raise_any()
        assert sizes is not None
        assert code is not None
        assert out_code is not None
        assert scoring is not None
        direct = out is not None and not scoring.may_fail and not self._config.rotate
        result = out if direct and out is not None else np.empty(sizes.out, dtype_of(out_code))
        moments = np.empty((*sizes.rows, _core.MOMENTS)) if stats else None
        self._attend(q, code, result, out_code, scoring, moments, sizes, workers)
        if out is not None and out is not result:
            out[...] = result
            result = out
        if moments is None:
            return result
        made = statistics_of(moments, scoring, sizes, code, self._isa)
        return result, dataclasses.replace(made, conventions=dataclasses.replace(made.conventions, dtype=self.dtype))

    def _lookup(
        self, problems: Problems, q: Array, options: dict[str, Any]
    ) -> tuple[int | None, Shapes | None, Scoring | None]:
        """Check the queries and how their scores are made."""
        config = self._config
        code = check_query(problems, config, q)
        if problems.count:
            return code, None, None
        keys = int(self._lengths.max())
        around = (config.batch, config.kv_heads, keys)
        sizes = sizes_of(q.shape, (*around, config.width), (*around, config.value_width))
        assert isinstance(sizes, Shapes)
        if all(option is None for option in options.values()):
            scoring = plain_scoring(config, self._lengths, sizes.queries)
        else:
            scoring = cache_scoring(problems, config, self._lengths, code, sizes, options)
        if config.window is not None and self._dropped.any():
            starts = np.broadcast_to(np.asarray(scoring.q_start), config.batch)
            self._check_kept(problems, "q", starts, np.flatnonzero(self._lengths))
        return code, sizes, scoring

    def _attend(
        self,
        q: Array,
        code: int,
        result: Array,
        out_code: int,
        scoring: Scoring,
        moments: NDArray[np.float64] | None,
        sizes: Shapes,
        workers: int,
    ) -> None:
        config = self._config
        target, target_code = result, out_code
        if config.rotate:
            q, code = rotated(q, self._rotation_blocks[0]), FLOAT32
            target, target_code = np.empty(result.shape, np.float32), FLOAT32
        _core.attend_cache(
            core_view(q, code), core_view(target, target_code), code, target_code, scoring, moments, self._shape,
            self._table.addresses, config.kv_heads, sizes.keys, *self._columns(self._constants), workers, self._isa,
        )  # fmt: skip
        if config.rotate:
            result[...] = rotated(target, self._rotation_blocks[1])

    @property
    def _rotation_blocks(self) -> tuple[int, int]:
        """How many neighbouring columns of keys and of values are rotated together."""
        config = self._config
        if config.shared_values:
            block = rotation_block(config.width, config.value_width)
            return block, block
        return rotation_block(config.width), rotation_block(config.value_width)

    def keys(self) -> Array:
        """A copy of all keys, [B, Hk, longest row, d_k]; float32 where codes are stored. What is not there is 0."""
        return numbers_in(self, 0)

    def values(self) -> Array:
        """A copy of all values, [B, Hk, longest row, d_v]; float32 where codes are stored. What is not there is 0."""
        return numbers_in(self, 1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache to a safetensors file. It is written beside its place first, and moved there when whole.

        Raises
        ------
        ImportError
            If the package safetensors is not installed.
        OSError
            If the file cannot be written; what stood there stands still.

        Examples
        --------
        >>> import os, tempfile
        >>> import numpy as np
        >>> import softlookup as sl
        >>> cache = sl.KVCache(kv_heads=1, width=4, dtype="int8")
        >>> cache.append(np.ones((1, 1, 3, 4), np.float32), np.ones((1, 1, 3, 4), np.float32))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     cache.save(os.path.join(folder, "cache.safetensors"))
        ...     again = sl.KVCache.load(os.path.join(folder, "cache.safetensors"))
        >>> again.lengths
        array([3])
        """
        save_file(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a cache that `save` wrote: on this machine or on one with other instructions.

        Raises
        ------
        ImportError
            If the package safetensors is not installed.
        FileNotFoundError
            If there is no such file.
        ValueError
            If it is not such a file, or what is in it does not fit together. Nothing of it is trusted unchecked.
        """
        return load_file(cls, path)

    def __reduce__(self) -> tuple[Any, ...]:
        return restored, (type(self), content_of(self))
