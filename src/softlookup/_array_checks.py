"""The checks of arrays: what is an array here, which types it may have, and how the shapes of a call fit together.

Shapes are read as [..., H, N, d]; an array with 2 axes is one head. Nothing is converted: a wrong type is an error that
says how to convert it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from softlookup._problems import Problems, describe
from softlookup._scoring import Scoring
from softlookup._types import BFLOAT16, EXPECTED, NAMES, code_of, core_view

Array = NDArray[Any]
Shape = tuple[int, ...]

MOST_AXES = 32  # of any array: what NumPy broadcasts


class Shapes(NamedTuple):
    """The sizes of one call.

    leading: axes before the heads. axes: how many axes a mask or bias may have, beside 2. single: q, k and v have 2
    axes, one head without an axis for it. plain: the scoring of a call without options; None where d_k = 0 leaves the
    scale open.
    """

    leading: Shape
    heads: int
    key_heads: int
    queries: int
    keys: int
    width: int
    axes: tuple[int, int]
    single: bool
    plain: Scoring | None
    rows: tuple[int, int, int]  # [B, Hq, N], B all leading axes
    scores: Shape  # [..., Hq, N, M]
    out: Shape  # [..., Hq, N, d_v], or [N, d_v] for a single head


def plain_array(problems: Problems, name: str, value: object, example: str = "dtype=np.float32") -> bool:
    """Whether the value is a NumPy array whose elements are what they seem: no subclass but a memory map."""
    if type(value) is np.ndarray or type(value) is np.memmap:
        return True
    makers = {base.__module__.partition(".")[0] for base in type(value).__mro__}
    fix = f"np.asarray({name}, {example})"
    if "torch" in makers:
        fix = (
            f"softlookup.torch.attention takes tensors, softlookup.transformers whole models; else {name}.numpy() "
            f"(bfloat16: {name}.view(torch.uint16).numpy().view(ml_dtypes.bfloat16))"
        )
    elif makers & {"jax", "jaxlib"}:
        fix = f"np.asarray({name})"
    elif isinstance(value, np.ma.MaskedArray):
        fix = f"{name}.filled(0), and pass what it masks as mask= (True = may attend)"
    elif isinstance(value, np.ndarray):
        fix = f"np.asarray({name})"
    problems.type(name, describe(value), "a numpy.ndarray", fix)
    return False


def float_code(problems: Problems, name: str, value: Any) -> int | None:
    """The type code of an array that the core can read in place."""
    if not plain_array(problems, name, value):
        return None
    dtype = value.dtype
    code = code_of(dtype)
    if code is None:
        fix = f"{name}.astype(np.float32)"
        if not dtype.isnative:
            fix = f'{name}.astype({name}.dtype.newbyteorder("="))'
        elif dtype == np.longdouble:
            fix = f"{name}.astype(np.float64)"
        elif dtype == np.uint16:
            fix = f"{name}.view(ml_dtypes.bfloat16) if these are the bits of bfloat16, else {fix}"
        elif dtype.kind == "c":
            fix = f"{name}.real, or the parts side by side along the width"
        problems.type(name, describe(value), EXPECTED, fix)
    elif not value.flags.aligned:
        found = f"{describe(value)} whose elements are not aligned in memory"
        problems.value(name, found, "aligned elements", f"{name}.copy()")
    return code


def input_code(problems: Problems, q: Any, k: Any, v: Any) -> int | None:
    """The type code of q, k and v. The common case is told at once; `one_type` is the rule."""
    if type(q) is type(k) is type(v) is np.ndarray and q.dtype == k.dtype == v.dtype:
        code = code_of(q.dtype)
        if code is not None and q.flags.aligned and k.flags.aligned and v.flags.aligned:
            return code
    return one_type(problems, (("q", q), ("k", k), ("v", v)))


def one_type(problems: Problems, arrays: tuple[tuple[str, Any], ...]) -> int | None:
    """The type code that all the arrays share."""
    codes = [float_code(problems, name, array) for name, array in arrays]
    first = codes[0]
    if None not in codes and codes.count(first) != len(codes):
        names = ", ".join(name for name, _ in arrays)
        found = ", ".join(str(array.dtype) for _, array in arrays)
        problems.type(names, found, "one type for all of them", f"{arrays[-1][0]}.astype({arrays[0][0]}.dtype), or so")
    return first if None not in codes else None


def shapes(problems: Problems, q: Any, k: Any, v: Any) -> Shapes | None:
    """The sizes of a call, from arrays that may still be of a wrong type."""
    if not (isinstance(q, np.ndarray) and isinstance(k, np.ndarray) and isinstance(v, np.ndarray)):
        return None
    sizes = sizes_of(q.shape, k.shape, v.shape)
    if isinstance(sizes, Shapes):
        return sizes
    for problem in sizes:
        problems.value(*problem)
    return None


@lru_cache(maxsize=256)
def sizes_of(q: Shape, k: Shape, v: Shape) -> Shapes | list[tuple[str, str, str, str]]:
    """The sizes, or what is wrong with the shapes. Kept, as calls come in great numbers of the same shapes."""
    if min(len(q), len(k), len(v)) < 2:
        return [
            (name, f"shape {list(shape)}", "at least 2 axes, [..., H, N, d]", f"{name}[None, :] for a single row")
            for name, shape in (("q", q), ("k", k), ("v", v))
            if len(shape) < 2
        ]
    if max(len(q), len(k), len(v)) > MOST_AXES:
        return [
            (
                name,
                f"{len(shape)} axes",
                f"at most {MOST_AXES}",
                f"merge leading axes, {name}.reshape(-1, *{name}.shape[-3:])",
            )
            for name, shape in (("q", q), ("k", k), ("v", v))
            if len(shape) > MOST_AXES
        ]
    wrong = []
    (heads, queries, width), (key_heads, keys, key_width), (value_heads, values, value_width) = (
        shape[-3:] if len(shape) > 2 else (1, *shape) for shape in (q, k, v)
    )
    if width != key_width:
        found = f"widths {width} and {key_width} (shapes {list(q)} and {list(k)})"
        wrong.append(("q, k", found, "one width d_k, the last axis", "project both to the same width"))
    if keys != values:
        found = f"{keys} keys and {values} values (shapes {list(k)} and {list(v)})"
        wrong.append(("k, v", found, "one value for each key, axis -2", "pass k and v of the same positions"))
    if key_heads != value_heads:
        found = f"{key_heads} and {value_heads} heads (shapes {list(k)} and {list(v)})"
        wrong.append(("k, v", found, "the same number of heads, axis -3", "pass k and v of the same heads"))
    if heads % key_heads if key_heads else heads:
        found = f"{heads} query heads and {key_heads} key heads (shapes {list(q)} and {list(k)})"
        fix = "pass heads in axis -3: x.swapaxes(-3, -2) reads [B, N, H, d] in place"
        wrong.append(("q, k", found, "query heads a multiple of key heads", fix))
    try:
        leading = np.broadcast_shapes(q[:-3], k[:-3], v[:-3])
    except ValueError:
        found = f"leading axes {list(q[:-3])}, {list(k[:-3])} and {list(v[:-3])}"
        wrong.append(("q, k, v", found, "leading axes that broadcast", "pass sizes that are equal, or 1"))
    if wrong:
        return wrong
    axes = max(len(q), len(k), len(v))
    return Shapes(
        leading=leading,
        heads=heads,
        key_heads=key_heads,
        queries=queries,
        keys=keys,
        width=width,
        axes=(len(q), axes),
        single=axes == 2,
        plain=Scoring(1.0 / math.sqrt(width), placed=queries == keys) if width else None,
        rows=(math.prod(leading), heads, queries),
        scores=(*leading, heads, queries, keys),
        out=(queries, value_width) if axes == 2 else (*leading, heads, queries, value_width),
    )


def core_inputs(code: int, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """q, k and v as the core takes them, which broadcasts their leading axes. Never a copy."""
    return (q, k, v) if code != BFLOAT16 else (core_view(q, code), core_view(k, code), core_view(v, code))


def check_out(
    problems: Problems, out: object, code: int | None, sizes: Shapes | None, inputs: tuple[object, ...]
) -> None:
    """Report what is wrong with the array that a result of the given type is to be written to."""
    if not plain_array(problems, "out", out):
        return
    assert isinstance(out, np.ndarray)
    type_name = str(out.dtype) if code is None else NAMES[code]
    maker = "ml_dtypes" if type_name == NAMES[BFLOAT16] else "np"
    room = f"np.empty({out.shape if sizes is None else sizes.out}, {maker}.{type_name})"
    if code is not None and code_of(out.dtype) != code:
        fix = f'out_dtype="{out.dtype}" with this out, or an out of type {NAMES[code]}'
        problems.type("out", describe(out), NAMES[code], fix)
    if sizes is not None and out.shape != sizes.out:
        problems.value("out", f"shape {list(out.shape)}", f"{list(sizes.out)}", room)
    if not out.flags.writeable:
        problems.value("out", "a read-only array", "one that can be written to", room)
    if not out.flags.aligned:
        problems.value("out", "elements that are not aligned in memory", "aligned elements", room)
    if _overlaps_itself(out):
        found = f"shape {list(out.shape)} with strides {list(out.strides)}"
        problems.value("out", found, "elements each in their own place", room)
    if any(isinstance(array, np.ndarray) and _overlap(out, array) for array in inputs):
        problems.value("out", "memory shared with an input", "memory of its own", room)


def _overlaps_itself(array: Array) -> bool:
    """Whether two elements may share memory: they cannot where each axis steps over all of the smaller ones."""
    if array.flags.c_contiguous or not array.size:
        return False
    span = array.itemsize
    for step, size in sorted((abs(step), size) for step, size in zip(array.strides, array.shape, strict=True)):
        if size > 1:
            if step < span:
                return True
            span += step * (size - 1)
    return False


def _overlap(first: Array, second: Array) -> bool:
    """Whether two arrays share an element; also where that is too hard to tell."""
    if not np.may_share_memory(first, second):
        return False
    try:
        return np.shares_memory(first, second, max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def as_type(problems: Problems, out_dtype: Any) -> int | None:
    """The type code that `out_dtype` names."""
    if isinstance(out_dtype, str) and out_dtype in NAMES:
        return NAMES.index(out_dtype)
    try:
        code = code_of(np.dtype(out_dtype))
    except TypeError:
        code = None
    if code is None:
        problems.type("out_dtype", describe(out_dtype), EXPECTED, 'out_dtype="float32", or None for the type of q')
    return code
