"""Hypothesis strategies: whole calls, drawn from every axis of the table at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

import expressions as ex
from cases import ISAS, TYPES, Shape, bias, sinks
from layouts import LAYOUTS, lay_out

BATCHES = [(), (1,), (2,), (3,), (2, 2), (0,)]
HEADS = [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (6, 3)]
WIDTHS = [1, 3, 8, 16, 17, 64, 80, 96]
LONG_KEYS = [127, 128, 129, 255, 511, 512, 513, 520, 1100]
LONG_QUERIES = [95, 97, 130]


@dataclass(frozen=True)
class Call:
    """Everything one comparison needs."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    written: ex.Written | None
    options: dict[str, Any]
    isa: str

    def __repr__(self) -> str:
        arrays = {"q": self.q, "k": self.k, "v": self.v}
        parts = [f"{name} {x.shape} strides {x.strides}" for name, x in arrays.items()]
        shown = {key: value if np.ndim(value) == 0 else np.shape(value) for key, value in self.options.items()}
        return f"Call({self.q.dtype}, {', '.join(parts)}, mask={self.written}, {shown}, isa={self.isa})"


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Sizes mostly below 70, now and then across the 128-key tile and the 512-key block."""
    leading = draw(st.sampled_from(BATCHES))
    heads, key_heads = draw(st.sampled_from(HEADS))
    long = draw(st.integers(0, 7))
    queries = draw(st.sampled_from(LONG_QUERIES) if long == 1 else st.integers(0, 12 if long == 0 else 70))
    keys = draw(st.sampled_from(LONG_KEYS) if long == 0 else st.integers(0, 70))
    widths = draw(st.sampled_from(WIDTHS)), draw(st.sampled_from(WIDTHS))
    return Shape(queries, keys, heads, key_heads, *widths, leading)


def masks(shape: Shape) -> st.SearchStrategy[ex.Written]:
    """Every kind of mask that fits the shape, and their compositions."""
    items = int(np.prod(shape.leading, dtype=int))
    per_item = shape.leading or (1,)

    def sizes(limit: int) -> st.SearchStrategy[np.ndarray]:
        return st.lists(st.integers(0, limit), min_size=items, max_size=items).map(
            lambda drawn: np.array(drawn, dtype=np.int64).reshape(per_item)
        )

    width = st.one_of(st.none(), st.integers(0, 40), st.sampled_from([127, 128, 512]))
    axes = st.tuples(*(st.booleans() for _ in shape.weights))

    def dense(drawn: tuple[tuple[bool, ...], int, bool]) -> ex.Written:
        kept, seed, two_axes = drawn
        full = tuple(size if keep else 1 for size, keep in zip(shape.weights, kept, strict=True))
        chosen = shape.weights[-2:] if two_axes else full
        return ex.dense(np.random.default_rng(seed).random(chosen) < 0.6)

    leaves = st.one_of(
        st.just(ex.full()),
        st.just(ex.causal()),
        st.builds(ex.window, width, width),
        st.builds(
            ex.lengths,
            sizes(shape.keys),
            st.one_of(st.none(), sizes(shape.queries)),
            st.sampled_from(["right", "left"]),
        ),
        st.tuples(axes, st.integers(0, 999), st.booleans()).map(dense),
        st.sampled_from(sorted(ex.PREDICATES)).map(ex.predicate),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds(lambda a, b: a & b, inner, inner),
            st.builds(lambda a, b: a | b, inner, inner),
            st.builds(lambda a: ~a, inner),
        ),
        max_leaves=4,
    )


@st.composite
def alignments(draw: st.DrawFn, shape: Shape, written: ex.Written | None) -> dict[str, Any]:
    """Where the rows and columns stand; left out only where that is no error."""
    k_start = draw(st.sampled_from([0, 0, 0, 1, 7, 130, 500, 1024]))
    free = written is None or not written.positional or (shape.queries == shape.keys and k_start == 0)
    near = st.integers(k_start - 20, k_start + shape.keys + 20)
    choices = [near, st.sampled_from(["upper_left", "lower_right"])]
    if shape.leading:
        items = int(np.prod(shape.leading, dtype=int))
        choices.append(
            st.lists(near, min_size=items, max_size=items).map(
                lambda drawn: np.array(drawn, dtype=np.int64).reshape(shape.leading)
            )
        )
    if free:
        choices.append(st.none())
    q_start = draw(st.one_of(choices))
    return {"k_start": k_start, **({} if q_start is None else {"q_start": q_start})}


@st.composite
def score_options(draw: st.DrawFn, shape: Shape, dtype: np.dtype[Any]) -> dict[str, Any]:
    """Scale, softcap, sinks and bias, each left out half of the time."""
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.0, -0.5, 0.125, 1.0]))
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 3.0, 50.0]))
    if draw(st.booleans()):
        options["sinks"] = sinks(shape, rng).astype(draw(st.sampled_from([np.dtype(np.float32), dtype])))
    if draw(st.booleans()):
        kept = draw(st.tuples(*(st.booleans() for _ in shape.weights)))
        full = tuple(size if keep else 1 for size, keep in zip(shape.weights, kept, strict=True))
        values = bias(draw(st.sampled_from([full, shape.weights[-2:]])), rng)
        if draw(st.booleans()):
            with np.errstate(over="ignore"):
                values = values.astype(dtype)
        options["bias"] = lay_out(values, draw(st.sampled_from(LAYOUTS)))
    return options


@st.composite
def calls(draw: st.DrawFn, type_name: str) -> Call:
    """A whole call of one type: shape, memory, mask, alignment, options, instruction set."""
    shape, dtype = draw(shapes()), TYPES[type_name]
    rng = np.random.default_rng(draw(st.integers(0, 9999)))
    written = draw(st.one_of(st.none(), masks(shape)))
    options = {
        **draw(alignments(shape, written)),
        **draw(score_options(shape, dtype)),
        "threads": draw(st.sampled_from([None, 1, 2, 3])),
    }
    if draw(st.integers(0, 3)) == 0:
        options["out_dtype"] = TYPES["float32" if type_name != "float64" else "float64"]
    keys = (shape.key_heads, shape.keys)
    sizes = [(*shape.weights[-3:-1], shape.key_width), (*keys, shape.key_width), (*keys, shape.value_width)]
    owner = draw(st.integers(0, 2))  # one of q, k, v has every leading axis; the others may broadcast
    drawn = []
    for index, size in enumerate(sizes):
        leading = shape.leading if index == owner or draw(st.booleans()) else draw(_broadcast(shape.leading))
        # The mask and the bias have as many axes as q.
        leading = (1,) * (len(shape.leading) - len(leading)) + leading if index == 0 else leading
        values = rng.standard_normal((*leading, *size)).astype(dtype)
        drawn.append(lay_out(values, draw(st.sampled_from(LAYOUTS))))
    q, k, v = drawn
    return Call(q, k, v, written, options, draw(st.sampled_from(ISAS)))


def _broadcast(leading: tuple[int, ...]) -> st.SearchStrategy[tuple[int, ...]]:
    """The same axes with ones, or fewer of them."""
    return st.sampled_from([(1,) * len(leading), leading[1:], ()])
