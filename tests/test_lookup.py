"""sl.lookup, the differentiable dictionary, against its oracle and its limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import softlookup as sl
from cases import TYPES
from softlookup import reference

SIMILARITIES = ["dot", "cosine", "distance"]


def _table(type_name: str, keys: int = 12, width: int = 5, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    dtype = TYPES[type_name]
    return tuple(rng.standard_normal(size).astype(dtype) for size in [(4, width), (keys, width), (keys, 3)])


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_soft_lookup(similarity: str, beta: float, type_name: str) -> None:
    query, keys, values = _table(type_name)
    keys[3] = 0
    found = sl.lookup(query, keys, values, beta=beta, similarity=similarity)
    expected = reference.lookup(query, keys, values, beta=beta, similarity=similarity)
    assert found.dtype == query.dtype
    # Weights err by 2 beta |s| of the accumulating type's unit; a half type then rounds the value, and
    # its keys once more where a similarity needs them normalised.
    tolerance = {"float32": 2e-5, "float64": 4e-14, "float16": 2**-8, "bfloat16": 2**-5}[type_name]
    np.testing.assert_allclose(found.astype(float), expected, rtol=0, atol=tolerance)


@given(data=st.data())
def test_any_lookup(data: st.DataObject) -> None:
    keys, width = data.draw(st.integers(1, 140)), data.draw(st.integers(1, 9))
    query, held, values = _table("float64", keys, width, data.draw(st.integers(0, 999)))
    query = query[: data.draw(st.integers(0, 4))] if data.draw(st.booleans()) else query[0]
    values = values if data.draw(st.booleans()) else values[:, 0]
    options = {
        "beta": data.draw(st.sampled_from([0.0, 0.5, 1.0, 20.0, math.inf])),
        "similarity": data.draw(st.sampled_from(SIMILARITIES)),
    }
    found = sl.lookup(query, held, values, **options)
    expected = reference.lookup(query, held, values, **options)
    assert np.shape(found) == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_infinite_beta_is_the_limit_and_averages_ties(similarity: str, type_name: str) -> None:
    dtype = TYPES[type_name]
    keys = np.array([[2, 0], [0, 2], [2, 0], [-2, 0], [0, -2]], dtype)
    values = np.array([[1, 0], [10, 1], [3, 0], [50, 1], [70, 1]], dtype)
    np.testing.assert_array_equal(
        sl.lookup(np.array([1, 0], dtype), keys, values, beta=math.inf, similarity=similarity), [2, 0]
    )
    both = sl.lookup(np.array([[1, 1], [0, -3]], dtype), keys, values[:, 0], beta=math.inf, similarity=similarity)
    np.testing.assert_allclose(both.astype(float), [14 / 3, 70], rtol=2**-8)
    near = sl.lookup(np.array([[1, 1]], np.float64), *(x.astype(np.float64) for x in (keys, values)), beta=1e4)
    np.testing.assert_allclose(near, [[14 / 3, 1 / 3]], rtol=1e-12)


def test_equal_match_is_the_dictionary(type_name: str) -> None:
    dtype = TYPES[type_name]
    keys = np.array([[1, 2], [3, 4], [1, 2], [-0.0, 0.0]], dtype)
    values = np.array([[10, 1], [20, 2], [30, 3], [40, 4]], dtype)
    np.testing.assert_array_equal(sl.lookup(np.array([3, 4], dtype), keys, values, match="equal"), [20, 2])
    np.testing.assert_array_equal(sl.lookup(np.array([1, 2], dtype), keys, values[:, 0], match="equal"), 20)
    several = sl.lookup(np.array([[0, 0], [3, 4]], dtype), keys, values, match="equal")
    np.testing.assert_array_equal(several, [[40, 4], [20, 2]])
    with pytest.raises(ValueError, match="equal"):
        sl.lookup(np.array([[3, 4], [9, 9]], dtype), keys, values, match="equal")


@pytest.mark.parametrize(
    ("query", "values", "shape"),
    [((5,), (7, 3), (3,)), ((2, 5), (7, 3), (2, 3)), ((5,), (7,), ()), ((2, 5), (7,), (2,)), ((0, 5), (7, 3), (0, 3))],
)
@pytest.mark.parametrize("options", [{}, {"beta": math.inf}, {"similarity": "cosine"}, {"similarity": "distance"}])
def test_shapes(query: tuple[int, ...], values: tuple[int, ...], shape: tuple[int, ...], options: dict) -> None:
    found = sl.lookup(np.ones(query, "f4"), np.ones((7, 5), "f4"), np.full(values, 3, "f4"), **options)
    assert np.shape(found) == shape
    np.testing.assert_allclose(found, 3, rtol=1e-6)


def test_a_zero_vector_has_cosine_zero() -> None:
    keys, values = np.array([[0.0, 0.0], [1.0, 0.0]]), np.array([1.0, 0.0])
    found = sl.lookup(np.array([5.0, 0.0]), keys, values, similarity="cosine", beta=math.log(3))
    np.testing.assert_allclose(found, 0.25, rtol=1e-14)
    np.testing.assert_allclose(sl.lookup(np.zeros(2), keys, values, similarity="cosine"), 0.5, rtol=1e-14)


def test_cosine_of_very_long_and_very_short_vectors() -> None:
    keys = np.array([[1e30, 0], [0, 1e-30], [-1e30, 0]])
    found = sl.lookup(np.array([1e-30, 0.0]), keys, np.array([1.0, 2.0, 3.0]), similarity="cosine", beta=math.inf)
    assert found == 1


def test_distance_is_gaussian_kernel_regression() -> None:
    """Nadaraya and Watson: weights exp(-beta |q - k|^2 / 2), beta the inverse variance."""
    keys = np.linspace(-3, 3, 50)[:, None]
    values = np.sin(keys[:, 0])
    query, beta = np.array([[0.4], [-1.3]]), 1 / 0.2**2
    kernel = np.exp(-beta * (query - keys.T) ** 2 / 2)
    expected = kernel @ values / kernel.sum(axis=1)
    np.testing.assert_allclose(sl.lookup(query, keys, values, beta=beta, similarity="distance"), expected, rtol=1e-11)


@pytest.mark.parametrize("beta", [1.0, 1e300, 1e308, math.inf, -1.0, -1e308, -math.inf])
@pytest.mark.parametrize("reach", [1.0, 10.0, 1e200, 8e307])
def test_no_finite_distance_hides(beta: float, reach: float) -> None:
    if abs(beta) * reach == 1:
        return  # soft
    keys, values = np.array([[reach], [2 * reach]]), np.array([1.0, 2.0])
    for query in (np.zeros(1), np.zeros((2, 1))):
        found = sl.lookup(query, keys, values, similarity="distance", beta=beta)
        np.testing.assert_allclose(found, 1.0 if beta > 0 else 2.0, rtol=1e-6)


def test_near_keys_stay_soft_beside_one_that_is_far_beyond_squares() -> None:
    keys, values = np.array([[1.0], [2.0], [1e200]]), np.array([1.0, 2.0, 5.0])
    expected = sl.lookup(np.zeros(1), keys[:2], values[:2], similarity="distance")
    np.testing.assert_allclose(sl.lookup(np.zeros(1), keys, values, similarity="distance"), expected, rtol=1e-14)
    values[2] = np.inf  # seen, though it weighs nothing
    assert sl.lookup(np.zeros(1), keys, values, similarity="distance") == np.inf
    keys[2] = np.nan
    assert np.isnan(sl.lookup(np.zeros(1), keys, values, similarity="distance"))
    assert sl.lookup(np.full(1, np.nan), keys[:0], values[:0], similarity="distance") == 0


@pytest.mark.parametrize("beta", [1e300, 1.7e308, -1.7e308])
def test_any_beta_with_cosine_in_any_type(beta: float, type_name: str) -> None:
    keys, values = np.array([[3, 0], [1, 1], [0, 2]], TYPES[type_name]), np.array([1, 2, 3], TYPES[type_name])
    found = sl.lookup(keys[0], keys, values, similarity="cosine", beta=beta)
    assert found == (1 if beta > 0 else 3)


def test_the_seeds_lookup_without_scale() -> None:
    keys, values = np.array([[1, 0], [0, 2], [2, 2], [-1, 1.0]]), np.eye(4)
    found = sl.lookup(np.array([2.0, 1.0]), keys, values)
    np.testing.assert_array_equal(found.round(5), [0.01765, 0.01765, 0.96382, 0.00088])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"similarity": "euclidean"}, "similarity"),
        ({"match": "nearly"}, "match"),
        ({"beta": math.nan}, "beta"),
        ({"keys": np.ones((7, 4))}, "keys"),
        ({"values": np.ones((6, 3))}, "values"),
        ({"query": np.ones((1, 2, 5))}, "query"),
    ],
    ids=lambda x: x if isinstance(x, str) else next(iter(x)),
)
def test_bad_input_is_named(options: dict, named: str) -> None:
    arguments = {"query": np.ones(5), "keys": np.ones((7, 5)), "values": np.ones((7, 3)), **options}
    with pytest.raises(ValueError, match=named):
        sl.lookup(**arguments)
