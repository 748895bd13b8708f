"""The KV cache: keys and values in the layout that the kernels read, attended to where they lie.

What a query computes does not depend on the chunks in which tokens came, on the rows around it, or on what was rolled
back: the bits rule of `attention` holds.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal, Self, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from softlookup import _core
from softlookup._array_checks import Shapes, as_type, check_out, sizes_of
from softlookup._attention import Start, statistics_of
from softlookup._cache_checks import check_query, config_of
from softlookup._cache_content import content_of, numbers_in, restored
from softlookup._cache_files import load_file, save_file
from softlookup._cache_scoring import cache_scoring, plain_scoring
from softlookup._cache_store import CacheStore
from softlookup._checks import as_threads, flag
from softlookup._mask_algebra import Booleans, Mask
from softlookup._problems import Problems
from softlookup._quantize import rotated
from softlookup._scoring import Scoring
from softlookup._stats import Stats
from softlookup._threads import get_threads
from softlookup._types import FLOAT32, core_view, dtype_of

Array = NDArray[Any]


class KVCache(CacheStore):
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

    @overload
    def attention(
        self,
        q: Array,
        *,
        mask: Mask | Booleans | None = ...,
        bias: Array | None = ...,
        scale: float | None = ...,
        softcap: float | None = ...,
        sinks: Array | None = ...,
        q_start: Start | None = ...,
        out: Array | None = ...,
        out_dtype: DTypeLike | None = ...,
        stats: Literal[False] = ...,
        threads: int | None = ...,
    ) -> Array: ...
    @overload
    def attention(
        self,
        q: Array,
        *,
        mask: Mask | Booleans | None = ...,
        bias: Array | None = ...,
        scale: float | None = ...,
        softcap: float | None = ...,
        sinks: Array | None = ...,
        q_start: Start | None = ...,
        out: Array | None = ...,
        out_dtype: DTypeLike | None = ...,
        stats: Literal[True],
        threads: int | None = ...,
    ) -> tuple[Array, Stats]: ...
    @overload
    def attention(
        self,
        q: Array,
        *,
        mask: Mask | Booleans | None = ...,
        bias: Array | None = ...,
        scale: float | None = ...,
        softcap: float | None = ...,
        sinks: Array | None = ...,
        q_start: Start | None = ...,
        out: Array | None = ...,
        out_dtype: DTypeLike | None = ...,
        stats: bool,
        threads: int | None = ...,
    ) -> Array | tuple[Array, Stats]: ...
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
            and values. int8 meets codes of 16 bits of the query and the weights, int4 of 8 bits: docs/kv-cache.md gives
            the bounds.

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
            q, code = rotated(q, self._rotation_blocks[0], workers), FLOAT32
            target, target_code = np.empty(result.shape, np.float32), FLOAT32
        _core.attend_cache(
            core_view(q, code), core_view(target, target_code), code, target_code, scoring, moments, self._shape,
            self._table.addresses, config.kv_heads, sizes.keys, *self._columns(self._constants), workers, self._isa,
        )  # fmt: skip
        if config.rotate:
            result[...] = rotated(target, self._rotation_blocks[1], workers)

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
