"""Faults that users of other attention implementations met, by their public issue numbers, with our inputs.

pt = pytorch/pytorch, hf = huggingface/transformers, jax = jax-ml/jax, ort = microsoft/onnxruntime,
onnx = onnx/onnx, mlx = ml-explore/mlx, lcpp = ggml-org/llama.cpp. Each holds on every instruction set.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import expressions as ex
import softlookup as sl
from agreement import compare, on
from cases import TYPES, Shape, arrays
from layouts import lay_out
from softlookup import reference


@pytest.fixture(autouse=True)
def _everywhere(isa: str) -> Iterator[None]:
    with on(isa):
        yield


def single(*rows: object, dtype: type = np.float32) -> np.ndarray:
    """One head of rows [len(rows), d]."""
    return np.array(rows, dtype=dtype).reshape(len(rows), -1)


def weights(bias: np.ndarray | None = None, **options: object) -> np.ndarray:
    """The weights of one row over two keys whose products are zero."""
    return sl.attention_weights(single(0), single(0, 0), single(0, 0), bias=bias, **options)[0]


def test_pt41508_a_padded_row_that_sees_nothing_is_zero() -> None:
    q, k, v = arrays(Shape(4, 4, heads=2, key_heads=2, leading=(2,)), "float32")
    out, stats = sl.attention(q, k, v, mask=sl.Window(1, 0) & sl.Lengths([4, 2]), stats=True)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(out[1, :, 3], 0)
    np.testing.assert_array_equal(stats.lse[1, :, 3], -np.inf)
    np.testing.assert_array_equal(stats.visible, [[[1, 2, 2, 2]] * 2, [[1, 2, 1, 0]] * 2])
    one_head = np.array([True, False]).reshape(1, 2, 1, 1)
    out, stats = sl.attention(q, k, v, mask=one_head, stats=True)
    np.testing.assert_array_equal(out[:, 1], 0)
    np.testing.assert_array_equal(stats.lse[:, 1], -np.inf)
    assert np.isfinite(out).all()
    assert out[:, 0].all()


@pytest.mark.parametrize("window", [(10, 0), (10, 10)])
def test_pt127055_tiles_with_no_visible_key(window: tuple[int, int], isa: str, type_name: str) -> None:
    compare(*arrays(Shape(640, 640, key_width=8), type_name), isa=isa, written=ex.window(*window))


def test_pt127055_causal_one_past_many_tiles(type_name: str) -> None:
    q, k, v = arrays(Shape(4097, 4097, key_width=8, value_width=4), type_name)
    out, stats = sl.attention(q, k, v, mask=sl.Causal(), stats=True)
    np.testing.assert_array_equal(stats.visible[0], np.arange(4097) + 1)
    rows = np.array([0, 1, 127, 128, 511, 512, 1023, 2048, 4095, 4096])
    shown = np.arange(4097) <= rows[:, None]
    expected, expected_stats = reference.attention(q[:, rows], k, v, mask=shown)
    tolerance = {"bfloat16": 2**-6, "float16": 2**-9}.get(type_name, 1e-5)
    np.testing.assert_allclose(out[:, rows].astype(float), expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(stats.lse[:, rows], expected_stats.lse, rtol=0, atol=1e-5)


def test_pt110213_no_finite_sentinel_stands_for_hidden() -> None:
    q, k, v = single(1), single(-2e5, 0), single(3, 5)
    for hide in ({"mask": np.array([[True, False]])}, {"bias": single([0, -np.inf])}):
        out, stats = sl.attention(q, k, v, scale=1, stats=True, **hide)
        assert out[0, 0] == 3
        assert stats.lse[0] == -2e5
        np.testing.assert_array_equal(sl.attention_weights(q, k, v, scale=1, **hide), [[1, 0]])


def test_pt170415_true_attends() -> None:
    q, k, v = single(0, 0), single(0, 0), single(1, 2)
    out = sl.attention(q, k, v, mask=np.array([[1, 0], [1, 1]], dtype=bool))
    np.testing.assert_array_equal(out, [[1], [1.5]])


def test_pt103963_a_float_is_a_bias_and_never_a_mask() -> None:
    numbers = single([1, 0])
    np.testing.assert_allclose(weights(numbers), [0.7311, 0.2689], atol=5e-5)
    with pytest.raises(TypeError, match="bias"):
        sl.attention(single(0), single(0, 0), single(0, 0), mask=numbers)


def test_pt103082_mlx2835_causal_alignment_is_named() -> None:
    def visible(queries: int, keys: int, q_start: int) -> list[list[int]]:
        shape = [np.zeros((size, 1), np.float32) for size in (queries, keys, keys)]
        shown = sl.attention_weights(*shape, mask=sl.Causal(), q_start=q_start)
        return [np.flatnonzero(row).tolist() for row in shown]

    for queries, keys in ((3, 5), (5, 2)):
        shape = [np.zeros((size, 1), np.float32) for size in (queries, keys, keys)]
        with pytest.raises(ValueError, match=r"(?s)upper_left.*lower_right|lower_right.*upper_left"):
            sl.attention(*shape, mask=sl.Causal())
    assert visible(3, 5, 0)[0] == [0]
    assert visible(3, 5, 2) == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert visible(5, 2, -3) == [[], [], [], [0], [0, 1]]


def test_onnx8054_each_item_stands_at_its_own_end() -> None:
    q, k, v = arrays(Shape(2, 8, heads=2, key_heads=1, leading=(2,)), "float32")
    length = np.array([3, 5])
    options = {"mask": sl.Causal() & sl.Lengths(length), "q_start": length - 2}
    out, stats = sl.attention(q, k, v, stats=True, **options)
    np.testing.assert_array_equal(stats.visible, [[[2, 3]] * 2, [[4, 5]] * 2])
    for b, size in enumerate(length):
        alone = sl.attention(q[b], k[b, :, :size], v[b, :, :size], mask=sl.Causal(), q_start="lower_right")
        np.testing.assert_array_equal(out[b], alone)


def test_hf48172_cross_attention_without_a_mask_is_not_causal(isa: str) -> None:
    _, stats = compare(*arrays(Shape(4, 6), "float32"), isa=isa)
    np.testing.assert_array_equal(stats.visible, 6)


def test_pt101531_two_masks_are_a_logical_and() -> None:
    q, k, v = arrays(Shape(3, 3), "float32")
    hide_first = np.array([[False, True, True]] * 3)
    for mask in (sl.Causal() & sl.Dense(hide_first), sl.Dense(hide_first) & sl.Causal()):
        out, stats = sl.attention(q, k, v, mask=mask, stats=True)
        np.testing.assert_array_equal(stats.visible, [[0, 1, 2]])
        np.testing.assert_array_equal(out[0, 0], 0)
        np.testing.assert_array_equal(out[0, 1], v[0, 1])


def test_hf40700_windows_are_exact_on_both_sides() -> None:
    zeros = np.zeros((5, 1), np.float32)

    def seen(mask: object) -> list[list[int]]:
        return [np.flatnonzero(row).tolist() for row in sl.attention_weights(zeros, zeros, zeros, mask=mask)]

    back = [[0], [0, 1], [1, 2], [2, 3], [3, 4]]
    both = [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [1, 2, 3, 4], [2, 3, 4]]
    assert seen(sl.Window(1, 0)) == seen(sl.Window(1)) == back
    assert seen(sl.Window(2, 2)) == both
    assert seen(sl.Window(1, 0) & sl.Window(2, 2)) == back
    assert seen(sl.Window(2, 2) & sl.Causal()) == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]
    for width in range(6):
        for i, row in enumerate(seen(sl.Window(width, 0))):
            assert row == list(range(max(i - width, 0), i + 1))


def test_jax23349_padding_full_of_nan_never_shows(type_name: str) -> None:
    q, k, v = arrays(Shape(3, 6, heads=2, key_heads=1, leading=(2,)), type_name)
    for b, size in enumerate((2, 4)):
        k[b, :, size:] = v[b, :, size:] = np.nan
    out, stats = sl.attention(q, k, v, mask=sl.Lengths([2, 4]), stats=True)
    assert np.isfinite(out.astype(float)).all()
    assert np.isfinite(stats.lse).all()
    np.testing.assert_array_equal(stats.visible, [[[2] * 3] * 2, [[4] * 3] * 2])


def test_transformer_lens1005_left_padding_equals_the_unpadded_run() -> None:
    q, k, v = arrays(Shape(5, 5, heads=2, key_heads=2, leading=(2,)), "float32")
    mask = sl.Causal() & sl.Lengths([5, 3], [5, 3], padding_side="left")
    out, stats = sl.attention(q, k, v, mask=mask, stats=True)
    np.testing.assert_array_equal(out[1, :, :2], 0)
    np.testing.assert_array_equal(stats.visible[1, 0], [0, 0, 1, 2, 3])
    alone = sl.attention(q[1, :, 2:], k[1, :, 2:], v[1, :, 2:], mask=sl.Causal())
    np.testing.assert_allclose(out[1, :, 2:], alone, rtol=0, atol=2e-6)
    np.testing.assert_array_equal(out[0], sl.attention(q[0], k[0], v[0], mask=sl.Causal()))


def test_automodel2658_a_sink_alone() -> None:
    q, k, v = arrays(Shape(2, 3), "float32")
    sink = np.zeros(1, np.float32)
    for hide in ({"mask": ~sl.Full()}, {"bias": np.full((2, 3), -np.inf, np.float32)}):
        out, stats = sl.attention(q, k, v, sinks=sink, stats=True, **hide)
        np.testing.assert_array_equal(out, 0)
        np.testing.assert_array_equal(stats.lse, 0)
        np.testing.assert_array_equal(stats.missing_mass, 1)


def test_pt101967_lcpp3523_nan_under_the_mask(type_name: str) -> None:
    q, k, v = (x.astype(TYPES[type_name]) for x in (single(1), single(1, np.nan), single([2, 3], [np.nan, np.nan])))
    np.testing.assert_array_equal(sl.attention(q, k, v, mask=np.array([[True, False]])), v[:1])


def test_pt119131_float16_products_beyond_its_range() -> None:
    q = np.full((1, 64), 40, np.float16)
    k, v = np.full((2, 64), 40, np.float16), single([1], [3], dtype=np.float16)
    out, stats = sl.attention(q, k, v, stats=True)
    assert stats.max_score[0] == 12800
    assert out[0, 0] == 2


def test_pt105202_scale_of_minus_one_and_zero() -> None:
    q, k, v = single(1), single(0, 1), single(0, 1)
    assert sl.attention(q, k, v, scale=-1)[0, 0] == pytest.approx(0.2689, abs=5e-5)
    assert sl.attention(q, k, v, scale=0)[0, 0] == 0.5


def test_tt_metal42891_scale_never_touches_the_bias() -> None:
    np.testing.assert_allclose(weights(single([0, 2]), scale=0.5), [0.1192, 0.8808], atol=5e-5)


def test_onnx7865_ort28379_the_mask_comes_after_the_softcap() -> None:
    np.testing.assert_array_equal(weights(softcap=1.0, mask=np.array([[True, False]])), [1, 0])
    np.testing.assert_array_equal(weights(single([0, -np.inf]), softcap=1.0), [1, 0])


@pytest.mark.parametrize("keys", [65, 129, 513])
def test_lcpp29034_padding_lanes_stay_dead_under_a_softcap(keys: int, isa: str, type_name: str) -> None:
    """Every real score is near -softcap, so that a padding lane of score 0 would take the whole row."""
    q, k, v = arrays(Shape(3, keys, key_width=4), type_name)
    q[:], k[:] = 4, -4 + k / 16
    _, stats = compare(q, k, v, isa=isa, softcap=30.0)
    np.testing.assert_array_equal(stats.visible, keys)
    assert stats.max_score.max() < -20


@pytest.mark.parametrize("which", ["k", "v"])
def test_pt112577_one_array_alone_transposed(which: str, type_name: str) -> None:
    held = dict(zip("qkv", arrays(Shape(9, 33, heads=4, key_heads=4, leading=(2,)), type_name), strict=True))
    contiguous = sl.attention(*held.values())
    held[which] = lay_out(held[which], "transposed")
    assert not held[which].flags.c_contiguous
    np.testing.assert_array_equal(sl.attention(*held.values()), contiguous)


def test_pt191937_keys_expanded_with_stride_zero(type_name: str) -> None:
    q, k, v = arrays(Shape(3, 33, heads=4, key_heads=1, leading=(2,)), type_name)
    expanded = [np.broadcast_to(x[:1], (2, 4, 33, 16)) for x in (k, v)]
    assert expanded[0].strides[:2] == (0, 0)
    np.testing.assert_array_equal(sl.attention(q, *expanded), sl.attention(q, *(x.copy() for x in expanded)))


def test_coreai_torch117_values_of_another_width(isa: str, type_name: str) -> None:
    q, k, v = arrays(Shape(4, 5, key_width=32, value_width=24), type_name)
    out, _ = compare(q, k, v, isa=isa)
    assert out.shape == (1, 4, 24)
    np.testing.assert_array_equal(out, sl.attention(q, k, v, scale=1 / np.sqrt(32)))


def test_onnx7274_query_heads_read_key_heads_in_order() -> None:
    q, k = np.zeros((4, 1, 1), np.float32), np.zeros((2, 1, 1), np.float32)
    out = sl.attention(q, k, np.array([1, 2], np.float32).reshape(2, 1, 1))
    np.testing.assert_array_equal(out.ravel(), [1, 1, 2, 2])


def test_tabpfn800_mlx3573_the_same_bits_whatever_stands_beside(type_name: str) -> None:
    q, k, v = arrays(Shape(9, 700, heads=2, key_heads=1, leading=(5,)), type_name)
    row = sl.attention(q, k, v, threads=1)[2, :, 0].tobytes()
    assert sl.attention(q[:, :, :8], k, v, threads=2)[2, :, 0].tobytes() == row
    for threads in (1, 2):
        assert sl.attention(q[2, :, :8], k[2], v[2], threads=threads)[:, 0].tobytes() == row
        assert sl.attention(q[2], k[2], v[2], threads=threads)[:, 0].tobytes() == row
