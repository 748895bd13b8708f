"""The dictionary made soft, and hard again: lookups of vectors in a table of keys and values.

Finite beta runs on the core. "dot" runs in the type of its arrays. "cosine" and "distance" run on float64 copies,
because their keys are first transformed and a transformed key has no exact place in a smaller type:

- "cosine": vectors are divided by their lengths; a zero vector stays zero, so that its cosine is 0.
- "distance": -|q - k|^2 / 2 = q . k - |k|^2 / 2 - |q|^2 / 2, whose last term is the same for all keys and drops out of
  the softmax. The other two cancel when q and k are far from the origin and near each other, so both are first moved:
  by the query where there is one, else by the mean key. What is left of the error is float64's rounding of R^2, with R
  the radius of the keys around that point.

Where beta times a similarity could leave the range of float64, the similarities of a query are first counted from that
of its best key: the best then scores 0, and what is too far away to be counted weighs nothing, as it should.

Infinite beta and match="equal" average the values of the keys that win, and compute no softmax at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from softlookup._attention import attention
from softlookup._lookup_checks import lookup_arguments
from softlookup._problems import Problems

Array = NDArray[Any]
Doubles = NDArray[np.float64]
Similarity = Literal["dot", "cosine", "distance"]

EPSILON = float(np.finfo(np.float64).eps)
LARGEST_SCORE = 1e290  # by products and squares; leaves room for the sums over the width
LARGEST_GAP = 1e300  # a finite score for a key that weighs nothing: -inf would hide it, and what is not finite in it


def lookup(
    query: Array,
    keys: Array,
    values: Array,
    *,
    beta: float = 1.0,
    similarity: Similarity = "dot",
    match: Literal["equal"] | None = None,
) -> Array:
    """Look a query up in a table: the values of all keys, weighted by softmax(beta * similarity(query, key)).

    Parameters
    ----------
    query
        [d], or [N, d] for N lookups at once. float32, float64, float16 or bfloat16.
    keys
        [M, d], of the same type.
    values
        [M, d_v], or [M] for numbers; of the same type.
    beta
        How hard the lookup is: 0 averages all values, inf takes the value of the most similar key (ties, up to the
        rounding of float64, are averaged); negative numbers prefer the least similar.
    similarity
        "dot": q . k. "cosine": q . k / (|q| |k|), 0 where one is zero. "distance": -|q - k|^2 / 2.
    match
        "equal" is the dictionary's rule instead: the value of the key equal to the query, or the average of several.

    Returns
    -------
    numpy.ndarray
        [d_v] or [N, d_v]; a number or [N] where values are numbers. Of the type of values. 0 where there are no keys.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, with all reasons; with match="equal", if a query is equal to no key.

    References
    ----------
    lookup(q) = sum_j a_j v_j with a = softmax(beta s): Graves et al., "Neural Turing Machines" (2014), equations 2, 5,
    6; Ramsauer et al., "Hopfield networks is all you need" (2020), equation 3 (beta).

    Examples
    --------
    >>> import numpy as np
    >>> import softlookup as sl
    >>> keys = np.array([[1, 0], [0, 1]], np.float32)
    >>> values = np.array([10, 20], np.float32)
    >>> sl.lookup(keys[1], keys, values, beta=np.inf), sl.lookup(keys[1], keys, values, beta=0.0)
    (np.float32(20.0), np.float32(15.0))
    >>> sl.lookup(keys, keys, values, match="equal")
    array([10., 20.], dtype=float32)
    """
    problems = Problems("lookup")
    lookup_arguments(problems, query, keys, values, beta, similarity, match)
    problems.raise_any()
    queries = np.atleast_2d(query)
    table = values.reshape(len(values), math.prod(values.shape[1:]))
    with np.errstate(invalid="ignore", over="ignore"):  # inf and NaN spread without a warning, as in attention
        if match == "equal":
            found = _equal(queries, keys, table)
        elif math.isinf(beta):
            found = _nearest(queries, keys, table, beta, similarity)
        elif similarity == "dot":
            found = attention(queries, keys, table, scale=float(beta))
        else:
            found = _transformed(queries, keys, table, float(beta), similarity)
    result: Array = found.astype(values.dtype, copy=False).reshape(query.shape[:-1] + values.shape[1:])[()]
    return result


def _transformed(queries: Array, keys: Array, table: Array, beta: float, similarity: Similarity) -> Array:
    """The soft lookup by cosine or distance: a dot product of moved vectors, in float64."""
    bias = None
    if similarity == "cosine":
        moved_queries, moved_keys = (_polar(vectors.astype(np.float64))[0] for vectors in (queries, keys))
    else:
        moved_queries, moved_keys = queries.astype(np.float64), keys.astype(np.float64)
        if len(keys):
            centre = (moved_queries if len(queries) == 1 else moved_keys).mean(axis=0)
            moved_queries, moved_keys = moved_queries - centre, moved_keys - centre
    reach = np.abs(moved_keys).max(initial=0.0) + np.abs(moved_queries).max(initial=0.0)
    in_range = abs(beta) * max(1.0, reach) ** 2 * max(1, keys.shape[1]) <= LARGEST_SCORE  # not where there is NaN
    if len(keys) and not in_range:
        return _from_the_best(queries, keys, table, beta, similarity)
    if similarity == "distance":
        bias = -0.5 * beta * np.square(moved_keys).sum(axis=1)[None]
    return attention(moved_queries, moved_keys, table.astype(np.float64), scale=beta, bias=bias, out_dtype=table.dtype)


def _from_the_best(queries: Array, keys: Array, table: Array, beta: float, similarity: Similarity) -> Array:
    """The soft lookup by similarities counted from that of each query's best key, which no beta makes overflow."""
    wide_table = table.astype(np.float64)
    found = np.empty((len(queries), table.shape[1]), table.dtype)
    blank_query, blank_keys = np.zeros((1, 1)), np.zeros((len(keys), 1))
    for row, (nearness, _) in enumerate(_row_scores(queries, keys, similarity)):
        best = nearness.max() if beta > 0 else nearness.min()
        factors = [np.full(len(keys), abs(beta)), np.abs(nearness - best)]
        if similarity == "distance":  # |q - k|^2 / 2 - |q - b|^2 / 2, from a quarter of each distance
            factors.append(np.abs(nearness + best))
        smallest, *middle, largest = np.sort(np.stack(factors), axis=0)
        gaps = smallest * largest  # first, so that neither end of the range is overrun on the way
        if similarity == "distance":
            gaps = 8.0 * (gaps * middle[0])
        bias = -np.minimum(gaps, LARGEST_GAP)[None]
        found[row] = attention(blank_query, blank_keys, wide_table, scale=1.0, bias=bias, out_dtype=table.dtype)[0]
    return found


def _polar(vectors: Doubles) -> tuple[Doubles, Doubles]:
    """Directions and lengths; divided first by their largest element, so that no square overflows."""
    largest = np.abs(vectors).max(axis=-1, keepdims=True, initial=0.0)
    scaled: Doubles = vectors / np.where(largest == 0, 1.0, largest)
    lengths = np.sqrt(np.square(scaled).sum(axis=-1, keepdims=True))
    return scaled / np.where(largest == 0, 1.0, lengths), (largest * lengths)[..., 0]


def _nearest(queries: Array, keys: Array, table: Array, beta: float, similarity: Similarity) -> Doubles:
    """The limit of infinite beta: for each query the average value of the most (or least) similar keys."""
    found = np.zeros((len(queries), table.shape[1]))
    if not len(keys):
        return found
    for row, (scores, magnitudes) in enumerate(_row_scores(queries, keys, similarity)):
        scores = math.copysign(1.0, beta) * scores
        best = scores.max()
        rounding = EPSILON * (keys.shape[1] + 4) * magnitudes
        winners = scores + rounding >= best - rounding[scores.argmax()]
        found[row] = table[winners].astype(np.float64).mean(axis=0) if np.isfinite(best) else np.nan
    return found


def _row_scores(queries: Array, keys: Array, similarity: Similarity) -> Iterator[tuple[Doubles, Doubles]]:
    """For each query what grows with its similarity to each key, and the numbers whose rounding is in it.

    By distance that is minus a quarter of the distance, which no finite vectors make overflow.
    """
    wide_queries, wide_keys = queries.astype(np.float64), keys.astype(np.float64)
    if similarity == "cosine":
        wide_queries, wide_keys = _polar(wide_queries)[0], _polar(wide_keys)[0]
    for query in wide_queries:
        if similarity == "distance":
            quarters = _polar(0.25 * wide_keys - 0.25 * query)[1]
            yield -quarters, 0.5 * quarters
        else:
            # A sum along each key's own row: equal keys have equal bits, which a matrix product does not promise.
            terms = wide_keys * query
            yield terms.sum(axis=1), np.abs(terms).sum(axis=1)


def _equal(queries: Array, keys: Array, table: Array) -> Doubles:
    """The dictionary: for each query the average value of the keys equal to it."""
    found = np.empty((len(queries), table.shape[1]))
    for row, query in enumerate(queries):
        winners = (keys == query).all(axis=1)
        if not winners.any():
            problems = Problems("lookup")
            shown = np.array2string(query.astype(np.float64), threshold=8)
            problems.value(
                "query",
                f"row {row}, {shown}, equal to none of the {len(keys)} keys",
                "a key equal to each query",
                'similarity="distance" with beta=inf takes the nearest key',
            )
            problems.raise_any()
        found[row] = table[winners].astype(np.float64).mean(axis=0)
    return found
