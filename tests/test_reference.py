"""The float64 oracle against loops, exact decimals, closed forms and the seed's numbers."""

import math
import subprocess
import sys
from decimal import Decimal, localcontext

import ml_dtypes
import numpy as np
import pytest

from softlookup import reference

SEED = {
    "q": np.array([[2.0, 1.0]]),
    "k": np.array([[1.0, 0.0], [0.0, 2.0], [2.0, 2.0], [-1.0, 1.0]]),
    "v": np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 1.0, 1.0]]),
}


def loop_row(query, keys, values, shown, bias, scale, softcap, sink, positions):
    """One row with math alone: the visible keys, their weights, and each statistic's definition."""
    scores = {}
    for j, key in enumerate(keys):
        if shown[j] and bias[j] != -math.inf:
            s = scale * math.fsum(a * b for a, b in zip(query, key, strict=True))
            if softcap is not None:
                s = softcap * math.tanh(s / softcap)
            scores[j] = s + bias[j]
    sink_mass = math.exp(sink)
    keys_mass = math.fsum(math.exp(s) for s in scores.values())
    actual = {j: math.exp(s) / (keys_mass + sink_mass) for j, s in scores.items()}
    kept = {j: math.exp(s) / keys_mass for j, s in scores.items()}
    mean = math.fsum(p * scores[j] for j, p in kept.items())
    entropy = -math.fsum(p * math.log(p) for p in kept.values())
    return {
        "out": [math.fsum(a * values[j][c] for j, a in actual.items()) for c in range(len(values[0]))],
        "lse": math.log(keys_mass + sink_mass) if keys_mass + sink_mass else -math.inf,
        "visible": len(scores),
        "entropy": entropy,
        "normalized_entropy": entropy / math.log(len(scores)) if len(scores) > 1 else math.nan,
        "max_weight": max(actual.values(), default=0),
        "argmax": max(scores, key=lambda j: (scores[j], -j), default=-1),
        "max_score": max(scores.values(), default=-math.inf),
        "sum_squares": math.fsum(a * a for a in actual.values()),
        "jacobian_trace": math.fsum(a * (1 - a) for a in actual.values()),
        "score_variance": math.fsum(p * (scores[j] - mean) ** 2 for j, p in kept.items()),
        "missing_mass": sink_mass / (keys_mass + sink_mass) if sink_mass else 0,
        "distance": math.fsum(p * (positions[0] - positions[1] - j) for j, p in kept.items()),
        "first_key_mass": actual.get(0, 0),
        "weights": [actual.get(j, 0) for j in range(len(keys))],
        "scores": [scores.get(j, -math.inf) for j in range(len(keys))],
    }


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [None, [0.3, -1.0, -math.inf, 2.0]])
@pytest.mark.parametrize("scale", [None, -0.7, 0.0])
def test_every_field_equals_a_plain_loop(scale, sinks, softcap):
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal(shape) for shape in [(2, 4, 3, 5), (2, 2, 6, 5), (1, 2, 6, 2)])
    mask = rng.random((2, 4, 3, 6)) < 0.6
    mask[1, 2, 0] = False
    bias = rng.standard_normal((1, 4, 3, 6))
    bias[0, 1, 2, 3:] = -math.inf
    q_start, k_start = np.array([4, -2]), 3
    out, stats = reference.attention(
        q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks,
        q_start=q_start, k_start=k_start,
    )  # fmt: skip
    for b, h, i in np.ndindex(2, 4, 3):
        expected = loop_row(
            q[b, h, i], k[b, h // 2], v[0, h // 2], mask[b, h, i], bias[0, h, i],
            1 / math.sqrt(5) if scale is None else scale, softcap,
            -math.inf if sinks is None else sinks[h], (q_start[b] + i, k_start),
        )  # fmt: skip
        np.testing.assert_allclose(out[b, h, i], expected.pop("out"), rtol=1e-13, atol=1e-15)
        for name, value in expected.items():
            found = getattr(stats, name)[b, h, i]
            np.testing.assert_allclose(found, value, rtol=1e-12, atol=1e-14, err_msg=name)


def test_seed_numbers():
    out, stats = reference.attention(**SEED)
    np.testing.assert_array_equal(stats.weights.round(5), [[0.05252, 0.05252, 0.88865, 0.00630]])
    np.testing.assert_array_equal(out.round(5), [[0.05882, 0.05882, 0.89495]])
    np.testing.assert_allclose(stats.scores[0] * math.sqrt(2), [2, 2, 6, -1], rtol=1e-15)
    _, unscaled = reference.attention(**SEED, scale=1)
    np.testing.assert_array_equal(unscaled.weights.round(5), [[0.01765, 0.01765, 0.96382, 0.00088]])


def test_weights_to_the_last_digit_of_float64():
    with localcontext() as context:
        context.prec = 60
        exponentials = [(Decimal(s) / Decimal(2).sqrt()).exp() for s in (2, 2, 6, -1)]
        exact = [float(e / sum(exponentials)) for e in exponentials]
        lse = float(sum(exponentials).ln())
    _, stats = reference.attention(**SEED)
    rounding_of_scores = 3 * np.spacing(6 / math.sqrt(2)) / 2
    np.testing.assert_allclose(stats.weights[0], exact, rtol=rounding_of_scores + 2e-16)
    np.testing.assert_allclose(stats.lse[0], lse, rtol=4e-16)


def test_geometric_scores_have_closed_forms():
    """Scores -j ln 2 for j < M weigh 2^-j: every statistic is a finite geometric sum."""
    keys, half = 12, 0.5
    bias = -math.log(2) * np.arange(keys)[None]
    zeros = np.zeros((1, 1)), np.zeros((keys, 1)), np.zeros((keys, 1))
    _, stats = reference.attention(*zeros, bias=bias, q_start=keys - 1)
    total = 2 - half ** (keys - 1)
    powers = np.array([half**j for j in range(keys)]) / total
    mean = sum(j * p for j, p in enumerate(powers))
    np.testing.assert_allclose(stats.lse[0], math.log(total), rtol=1e-14)
    np.testing.assert_allclose(stats.entropy[0], math.log(total) + mean * math.log(2), rtol=1e-14)
    np.testing.assert_allclose(stats.sum_squares[0], (1 - 0.25**keys) / 0.75 / total**2, rtol=1e-14)
    np.testing.assert_allclose(stats.distance[0], keys - 1 - mean, rtol=1e-14)
    second = sum(j * j * p for j, p in enumerate(powers))
    np.testing.assert_allclose(stats.score_variance[0], math.log(2) ** 2 * (second - mean**2), rtol=1e-13)


def test_streaming_recurrence_gives_the_entropy():
    """design.md's one-pass form: when the maximum rises by -delta, u <- e^delta (u + delta l)."""
    rng = np.random.default_rng(3)
    q, k = rng.standard_normal((1, 8)), 3 * rng.standard_normal((40, 8))
    _, stats = reference.attention(q, k, k)
    largest, total, moment = -math.inf, 0.0, 0.0
    for score in stats.scores[0]:
        if score > largest:
            delta = largest - score
            moment = math.exp(delta) * (moment + delta * total) if total else 0.0
            total *= math.exp(delta)
            largest = score
        total += math.exp(score - largest)
        moment += (score - largest) * math.exp(score - largest)
    np.testing.assert_allclose(math.log(total) - moment / total, stats.entropy[0], rtol=1e-13)


def test_scores_and_temperature_derivative():
    """At beta = 1 the entropy falls with beta at the rate of the score variance."""
    rng = np.random.default_rng(5)
    q, k = rng.standard_normal((3, 4)), rng.standard_normal((9, 4))
    step = 1e-5
    above, below, here = (reference.attention(q, k, k, scale=0.5 * beta)[1] for beta in (1 + step, 1 - step, 1))
    slope = (above.entropy - below.entropy) / (2 * step)
    np.testing.assert_allclose(slope, -here.score_variance, rtol=1e-8)


def test_empty_rows_with_and_without_a_sink():
    arrays = np.ones((2, 1, 3)), np.ones((1, 4, 3)), np.ones((1, 4, 2))
    hidden = np.zeros((1, 4), bool)
    out, stats = reference.attention(*arrays, mask=hidden, sinks=[-math.inf, 0.25])
    assert not out.any()
    assert not stats.weights.any()
    np.testing.assert_array_equal(stats.lse, [[-math.inf], [0.25]])
    np.testing.assert_array_equal(stats.missing_mass, [[0], [1]])
    np.testing.assert_array_equal(stats.argmax, [[-1], [-1]])
    np.testing.assert_array_equal(stats.max_score, [[-math.inf]] * 2)
    for name in ("entropy", "max_weight", "sum_squares", "jacobian_trace", "score_variance"):
        assert not getattr(stats, name).any(), name
    assert np.isnan(stats.normalized_entropy).all()
    assert stats.distance is None


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_hidden_poison_never_shows_and_visible_poison_does(poison):
    q, k, v = np.ones((2, 2)), np.ones((3, 2)), np.arange(6.0).reshape(3, 2)
    k[1] = v[1] = poison
    mask = np.array([[True, False, True], [True, True, True]])
    out, stats = reference.attention(q, k, v, mask=mask)
    np.testing.assert_array_equal(out[0], [2, 3])
    assert stats.lse[0] == pytest.approx(math.sqrt(2) + math.log(2))
    assert np.isnan(out[1]).all()
    assert stats.argmax[1] == (0 if poison == -np.inf else -1)
    hidden_by_bias, _ = reference.attention(q, k, v, bias=np.where(mask, 0, -np.inf))
    np.testing.assert_array_equal(hidden_by_bias[0], [2, 3])


def test_only_visible_scores_of_minus_infinity_make_the_row_nan():
    q, k, v = np.ones((1, 1)), np.full((2, 1), -np.inf), np.ones((2, 1))
    for sinks in (None, [0.0]):
        out, stats = reference.attention(q, k, v, sinks=sinks)
        assert np.isnan(out).all()
        assert np.isnan(stats.lse).all()
        assert (stats.argmax == -1).all()
        assert (stats.visible == 2).all()
        for name in ("entropy", "max_weight", "max_score", "sum_squares", "score_variance", "missing_mass"):
            assert np.isnan(getattr(stats, name)).all(), name


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_inputs_are_upcast_exactly(dtype):
    rng = np.random.default_rng(11)
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in [(3, 4), (5, 4), (5, 2)]]
    out, stats = reference.attention(*arrays)
    exact, exact_stats = reference.attention(*(x.astype(np.float64) for x in arrays))
    assert out.dtype == stats.weights.dtype == np.float64
    np.testing.assert_array_equal(out, exact)
    np.testing.assert_array_equal(stats.lse, exact_stats.lse)


def test_named_alignments_and_mask_objects():
    class Recorder:
        def dense(self, batch, heads, queries, keys, q_start, k_start):
            self.seen = (batch, heads, queries, keys, q_start.tolist(), k_start)
            return np.ones((batch, heads, queries, keys), bool)

    mask, arrays = Recorder(), (np.ones((2, 3, 1, 4, 2)), np.ones((1, 1, 7, 2)), np.ones((1, 7, 2)))
    reference.attention(*arrays, mask=mask, q_start="upper_left", k_start=5)
    assert mask.seen == (6, 1, 4, 7, [5] * 6, 5)
    reference.attention(*arrays, mask=mask, q_start="lower_right", k_start=5)
    assert mask.seen == (6, 1, 4, 7, [8] * 6, 5)
    reference.attention(*arrays, mask=mask, q_start=[[1], [2]])
    assert mask.seen == (6, 1, 4, 7, [1, 1, 1, 2, 2, 2], 0)
    with pytest.raises(ValueError, match="q_start"):
        reference.attention(*arrays, mask=mask)


@pytest.mark.parametrize("sinks", [None, [0.5, -np.inf]])
def test_merge_is_the_lookup_over_all_keys(sinks):
    rng = np.random.default_rng(13)
    q, k, v = (rng.standard_normal(s) for s in [(3, 2, 4, 5), (3, 2, 9, 5), (3, 2, 9, 3)])
    mask = rng.random((3, 2, 4, 9)) < 0.5
    mask[0, 0, 0] = False
    cuts = [slice(0, 2), slice(2, 7), slice(7, 9)]
    outs, lses = [], []
    for cut in cuts:
        part, part_stats = reference.attention(q, k[..., cut, :], v[..., cut, :], mask=mask[..., cut])
        outs.append(part)
        lses.append(part_stats.lse)
    out, lse = reference.merge(outs, lses, sinks=sinks)
    whole, stats = reference.attention(q, k, v, mask=mask, sinks=sinks)
    np.testing.assert_allclose(out, whole, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(lse, stats.lse, rtol=1e-13)
    assert not out[0, 0, 0].any()


def test_merge_leaves_a_part_without_keys_out_whatever_it_holds():
    out, lse = reference.merge([[[np.nan]], [[2.0]]], [[-np.inf], [1.0]])
    np.testing.assert_array_equal(out, [[2.0]])
    np.testing.assert_array_equal(lse, [1.0])


@pytest.mark.parametrize("similarity", ["dot", "cosine", "distance"])
def test_lookup_equals_a_loop(similarity):
    rng = np.random.default_rng(17)
    queries, keys, values = (rng.standard_normal(s) for s in [(4, 3), (6, 3), (6, 2)])
    keys[2] = 0

    def compare(a, b):
        if similarity == "distance":
            return -sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / 2
        product = sum(x * y for x, y in zip(a, b, strict=True))
        if similarity == "dot":
            return product
        norms = math.hypot(*a) * math.hypot(*b)
        return product / norms if norms else 0.0

    found = reference.lookup(queries, keys, values, beta=1.7, similarity=similarity)
    for query, row in zip(queries, found, strict=True):
        grades = [math.exp(1.7 * compare(query, key)) for key in keys]
        expected = [sum(g * v[c] for g, v in zip(grades, values, strict=True)) for c in range(2)]
        np.testing.assert_allclose(row, np.array(expected) / sum(grades), rtol=1e-13)


def test_lookup_limits_and_shapes():
    keys, values = np.array([[1, 0], [0, 1], [1, 0], [2, 2]]), np.array([1.0, 10.0, 3.0, 100.0])
    assert reference.lookup([1, 0], keys[:3], values[:3], beta=np.inf) == 2.0
    assert reference.lookup([1, 0], keys, values, match="equal") == 2.0
    assert reference.lookup([1, 0], keys, values, beta=0) == 28.5
    assert reference.lookup([1.0, 0.0], keys, values, beta=np.inf, similarity="distance") == 2.0
    assert reference.lookup([[1, 0], [0, 1]], keys, values, match="equal").tolist() == [2.0, 10.0]
    assert reference.lookup([1, 0], keys, values[:, None]).shape == (1,)
    assert reference.lookup([[1, 0]], keys, np.ones((4, 5))).shape == (1, 5)
    assert reference.lookup([1, 0], keys, values).shape == ()
    with pytest.raises(ValueError, match="no key equals"):
        reference.lookup([[1, 0], [3, 3]], keys, values, match="equal")
    with pytest.raises(ValueError, match="similarity"):
        reference.lookup([1, 0], keys, values, similarity="euclidean")


def test_oracle_stands_on_numpy_alone():
    program = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('oracle', {reference.__file__!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['oracle'] = module\n"
        "spec.loader.exec_module(module)\n"
        "print(module.attention([[1.0]], [[1.0]], [[3.0]])[0])\n"
        "assert not any(name.split('.')[0] == 'softlookup' for name in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[[3.]]"
