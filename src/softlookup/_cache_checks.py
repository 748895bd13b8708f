"""Every check of what a cache is given, and its message. Shapes have exactly four axes: [B, H, T, d]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softlookup._array_checks import float_code, plain_array
from softlookup._checks import flag
from softlookup._problems import LARGEST_POSITION, Problems, describe, integer, integers
from softlookup._quantize import GROUP_COLUMNS, rotation_block
from softlookup._types import BFLOAT16, FLOAT16, FLOAT32, INT4, INT8, NAMES

CODES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16, "int8": INT8, "int4": INT4}
EXPECTED = "float32, bfloat16, float16, int8 or int4"
LARGEST_SIZE = 2**31 - 1
LARGEST_WIDTH = 2**16  # sums of products of codes stay below 2^31, with room for the query's precision
NARROW = (FLOAT32, FLOAT16, BFLOAT16)  # what codes are made of


@dataclass(frozen=True)
class CacheConfig:
    """The arguments that a cache was made with, checked."""

    batch: int
    kv_heads: int
    width: int
    value_width: int
    dtype: str
    window: int | None
    keep_first: int
    capacity: int | None
    shared_values: bool
    rotate: bool

    @property
    def code(self) -> int:
        """The core's code of the stored type."""
        return CODES[self.dtype]

    @property
    def coded(self) -> bool:
        """Whether codes are stored, with scales."""
        return self.code in (INT8, INT4)

    @property
    def key_groups(self) -> int:
        """The scales of one key: int4 has one for every `GROUP_COLUMNS` columns, but where columns are values too."""
        return -(-self.width // GROUP_COLUMNS) if self.code == INT4 and not self.shared_values else 1


def config_of(problems: Problems, **given: Any) -> CacheConfig | None:
    """The configuration, or None after a problem."""
    before = problems.count
    sizes = {}
    for name, fix in (
        ("batch", "batch=1"),
        ("kv_heads", "the number of key heads"),
        ("width", "d_k, the head's width"),
    ):
        sizes[name] = _size(problems, name, given[name], 1, LARGEST_WIDTH if name == "width" else LARGEST_SIZE, fix)
    width, value_width = sizes["width"], given["value_width"]
    if value_width is None:
        value_width = width
    else:
        value_width = _size(problems, "value_width", value_width, 1, LARGEST_WIDTH, "d_v; None is width")
    dtype = _dtype(problems, given["dtype"])
    window = given["window"]
    if window is not None:
        window = _size(problems, "window", window, 1, LARGEST_POSITION, "None keeps every key")
    keep_first = _size(problems, "keep_first", given["keep_first"], 0, LARGEST_POSITION, "keep_first=0")
    if window is None and keep_first:
        problems.value(
            "keep_first", f"{keep_first} without a window", "0, or a window too", "window=..., or keep_first=0"
        )
    capacity = given["capacity"]
    if capacity is not None:
        capacity = _size(problems, "capacity", capacity, 0, LARGEST_POSITION, "None grows as needed")
    for name in ("shared_values", "rotate"):
        flag(problems, name, given[name])
    if given["shared_values"] is True and value_width > width:
        problems.value(
            "value_width", f"{value_width} with shared_values=True", f"at most width = {width}", "value_width <= width"
        )
    if given["rotate"] is True:
        _check_rotation(problems, dtype, width, value_width, given["shared_values"] is True)
    if problems.count > before:
        return None
    return CacheConfig(
        sizes["batch"], sizes["kv_heads"], width, value_width, dtype, window, keep_first, capacity,
        given["shared_values"], given["rotate"],
    )  # fmt: skip


def _size(problems: Problems, name: str, value: object, least: int, most: int, fix: str) -> int:
    expected = f"an int from {least} to {most}" if most < LARGEST_POSITION else f"an int >= {least}"
    number = integer(problems, name, value, least=least, most=most, expected=expected, fix=fix)
    return least if number is None else number


def _dtype(problems: Problems, value: Any) -> str:
    name = value if isinstance(value, str) else ""
    if not isinstance(value, str):
        try:
            name = np.dtype(value).name
        except TypeError:
            name = ""
    if name not in CODES:
        report = problems.value if isinstance(value, str) else problems.type
        report("dtype", describe(value), EXPECTED, 'dtype="float32"')
        return "float32"
    return name


def _check_rotation(problems: Problems, dtype: str, width: int, value_width: int, shared: bool) -> None:
    if CODES[dtype] not in (INT8, INT4):
        problems.value("rotate", f"True with dtype {dtype!r}", "an int8 or int4 cache", "rotate=False")
    widths = ((width, value_width),) if shared else ((width,), (value_width,))
    if any(rotation_block(*each) == 1 for each in widths):
        found = f"True with widths {width} and {value_width}"
        problems.value("rotate", found, "even widths", "rotate=False, or pad the heads to an even width")


def check_rows(problems: Problems, config: CacheConfig, k: Any, v: Any) -> int | None:
    """Report what is wrong with arrays to append; their type code."""
    if config.shared_values:
        if v is not None:
            found = describe(v)
            problems.type("v", found, "None, as the values are the first columns of k (shared_values)", "append(k)")
        return _check_rows(problems, config, (("k", k, config.width),))
    if v is None:
        found = "None"
        problems.type("v", found, f"values [B, Hk, T, {config.value_width}]", "append(k, v)")
        return _check_rows(problems, config, (("k", k, config.width),))
    return _check_rows(problems, config, (("k", k, config.width), ("v", v, config.value_width)))


def _check_rows(problems: Problems, config: CacheConfig, arrays: tuple[tuple[str, Any, int], ...]) -> int | None:
    codes = [float_code(problems, name, array) for name, array, _ in arrays]
    tokens = set()
    for (name, array, width), code in zip(arrays, codes, strict=True):
        if code is None:
            continue
        allowed = NARROW if config.coded else (config.code,)
        if code not in allowed:
            expected = " or ".join(NAMES[one] for one in allowed)
            maker = "ml_dtypes" if allowed[0] == BFLOAT16 else "np"
            problems.type(name, describe(array), expected, f"{name}.astype({maker}.{NAMES[allowed[0]]})")
        shape = (config.batch, config.kv_heads, width)
        if array.ndim != 4 or (*array.shape[:2], array.shape[3]) != shape:
            expected = f"[B, Hk, T, {'d_k' if name == 'k' else 'd_v'}] = [{shape[0]}, {shape[1]}, T, {shape[2]}]"
            fix = f"{name}[None]" if array.ndim == 3 and config.batch == 1 else f"{name} of the cache's own sizes"
            if array.ndim == 4 and array.shape[2] == config.kv_heads:
                fix = f"{name}.swapaxes(-3, -2) if it is [B, T, H, d]"
            problems.value(name, f"shape {list(array.shape)}", expected, fix)
        else:
            tokens.add(array.shape[2])
    if len(tokens) > 1:
        found = f"{arrays[0][1].shape[2]} keys and {arrays[1][1].shape[2]} values"
        problems.value("k, v", found, "one value for each key, axis -2", "pass k and v of the same tokens")
    if None not in codes and len(set(codes)) > 1:
        found = ", ".join(str(array.dtype) for _, array, _ in arrays)
        problems.type("k, v", found, "one type for both", "v.astype(k.dtype), or so")
    return codes[0]


def counts_of(problems: Problems, config: CacheConfig, lengths: Any, tokens: int) -> NDArray[np.int64]:
    """How many of the tokens each item appends."""
    if lengths is None:
        return np.full(config.batch, tokens)
    return per_row(problems, config, "lengths", lengths, np.full(config.batch, tokens), f"T = {tokens}")


def per_row(
    problems: Problems, config: CacheConfig, name: str, value: Any, most: NDArray[np.int64], limit: str
) -> NDArray[np.int64]:
    """One number for each item, from 0 to `most`, which `limit` describes; an int stands for all."""
    fix = f"{name}=np.full({config.batch}, n), or one int for all"
    array = integers(problems, name, value, expected="an int, or ints [B]", fix=fix)
    if array is None:
        return np.zeros(config.batch, np.int64)
    if array.shape not in ((), (config.batch,)):
        problems.value(name, f"shape {list(array.shape)}", f"an int, or [B] = [{config.batch}]", fix)
        return np.zeros(config.batch, np.int64)
    wanted = np.broadcast_to(array, config.batch).astype(np.int64)
    if ((wanted < 0) | (wanted > most)).any():
        row = int(np.flatnonzero((wanted < 0) | (wanted > most))[0])
        problems.value(name, f"{wanted[row]} in row {row}", f"from 0 to {limit.format(most[row])}", "count tokens")
    return wanted


def check_room(problems: Problems, config: CacheConfig, lengths: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
    """Report rows that would grow beyond the capacity."""
    most = LARGEST_POSITION if config.capacity is None else config.capacity
    if (lengths + counts > most).any():
        row = int(np.flatnonzero(lengths + counts > most)[0])
        found = f"{counts[row]} tokens for row {row}, which holds {lengths[row]}"
        fix = "a cache with a larger capacity (None grows as needed), or truncate it first"
        problems.value("k", found, f"at most capacity = {most} tokens in a row", fix)


def chosen_rows(problems: Problems, config: CacheConfig, rows: Any) -> NDArray[np.int64]:
    """Batch items by their index; negative ones from the end."""
    fix = "rows=[0, 0, 1], or an int array"
    indices = integers(problems, "rows", rows, expected="a sequence or array of ints", fix=fix)
    if indices is None:
        return np.zeros(1, np.int64)
    if indices.ndim != 1 or indices.size == 0:
        problems.value("rows", f"shape {list(indices.shape)}", "one axis, of at least one index", fix)
    elif not -config.batch <= indices.min() <= indices.max() < config.batch:
        found = f"indices from {indices.min()} to {indices.max()}"
        problems.value("rows", found, f"{-config.batch} to {config.batch - 1}", fix)
    return np.where(indices < 0, indices + config.batch, indices)


def check_query(problems: Problems, config: CacheConfig, q: Any) -> int | None:
    """Report what is wrong with queries; their type code."""
    if not plain_array(problems, "q", q):
        return None
    code = float_code(problems, "q", q)
    allowed = NARROW if config.coded else (config.code,)
    if code is not None and code not in allowed:
        expected = " or ".join(NAMES[one] for one in allowed) + f", for a cache of {config.dtype}"
        maker = "ml_dtypes" if allowed[0] == BFLOAT16 else "np"
        problems.type("q", describe(q), expected, f"q.astype({maker}.{NAMES[allowed[0]]})")
    heads = q.shape[1] if q.ndim == 4 else 0
    if q.ndim != 4 or q.shape[0] != config.batch or q.shape[3] != config.width or heads % config.kv_heads:
        expected = f"[B, Hq, N, d_k] = [{config.batch}, a multiple of {config.kv_heads}, N, {config.width}]"
        fix = "q[None] for a batch of one; q.swapaxes(-3, -2) if it is [B, N, H, d]"
        problems.value("q", f"shape {list(q.shape)}", expected, fix)
    return code
