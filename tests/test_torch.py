"""softlookup.torch on tensors: the numbers of the library on arrays, autograd, and bad input."""

from __future__ import annotations

import functools
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

import softlookup as sl
from agreement import on
from cases import ISAS
from softlookup._tensors import array_of
from softlookup._torch import lookups
from softlookup.torch import attention
from torch_cases import DTYPES, MASKS, PADDED, gradients, tensors

sdpa = torch.nn.functional.scaled_dot_product_attention

CLOSE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 6e-2, torch.float16: 8e-3}


class TestValues:
    @pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_output_and_gradients_have_the_bits_of_those_on_arrays(self, dtype: Any, mask: Any) -> None:
        held = tensors(dtype)
        options = {"mask": mask, "q_start": 2, "softcap": 3.0, "scale": 0.4}
        arrays = {name: array_of(tensor) for name, tensor in held.items()}
        for isa in ISAS:
            with on(isa):
                out, lse = attention(**held, **options, return_lse=True)
                found = gradients((out, lse), held.values())
                plain = attention(**held, **options) if dtype is torch.float64 else None
                expected, pullback = sl.attention_vjp(**arrays, **options)
                torch.manual_seed(1)
                slopes = [array_of(torch.randn_like(one)) for one in (out, lse)]
                grads = pullback(*slopes, wrt=tuple(held))
            assert array_of(out).tobytes() == expected.tobytes()
            assert plain is None or torch.equal(plain, out)
            np.testing.assert_array_equal(array_of(lse), pullback.stats.lse)
            for name, gradient in zip(held, found, strict=True):
                assert gradient.dtype == dtype
                assert array_of(gradient).tobytes() == getattr(grads, name).tobytes(), name

    @pytest.mark.parametrize("grouped", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("kind", ["full", "causal", "mask", "bias"])
    def test_agrees_with_torch(self, kind: str, dtype: Any, grouped: bool) -> None:
        torch.manual_seed(0)
        q = torch.randn(2, 4, 33, 16).to(dtype).requires_grad_()
        k, v = (torch.randn(2, 2 if grouped else 4, 33, 16).to(dtype).requires_grad_() for _ in range(2))
        chosen = torch.rand(2, 1, 33, 33) < 0.7
        theirs = {"causal": {"is_causal": True}, "mask": {"attn_mask": chosen}, "full": {}}
        ours = {"causal": {"mask": sl.Causal()}, "mask": {"mask": chosen}, "full": {}}
        inputs = [q, k, v]
        if kind == "bias":
            inputs.append(torch.randn(1, 4, 33, 33).to(dtype).requires_grad_())
            theirs["bias"], ours["bias"] = {"attn_mask": inputs[3]}, {"bias": inputs[3]}
        expected = sdpa(q, k, v, enable_gqa=grouped, **theirs[kind])
        found = attention(q, k, v, **ours[kind])
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE[dtype])
        pairs = zip(gradients(found, inputs), gradients(expected, inputs), strict=True)
        for gradient, wanted in pairs:
            torch.testing.assert_close(gradient, wanted, rtol=CLOSE[dtype], atol=4 * CLOSE[dtype])

    @pytest.mark.parametrize("options", [{}, {"softcap": 1.5, "scale": -0.4}], ids=["plain", "softcap"])
    @pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
    def test_gradcheck(self, mask: Any, options: dict[str, Any]) -> None:
        held = tensors(torch.float64)

        def call(*inputs: Tensor) -> Any:
            return attention(**dict(zip(held, inputs, strict=True)), mask=mask, q_start=2, **options, return_lse=True)

        assert torch.autograd.gradcheck(call, tuple(held.values()), fast_mode=True)

    def test_gradcheck_of_broadcast_and_expanded_inputs(self) -> None:
        q = torch.randn(3, 2, 4, 5, dtype=torch.float64, requires_grad=True)
        k = torch.randn(2, 6, 5, dtype=torch.float64, requires_grad=True)
        v = torch.randn(1, 6, 3, dtype=torch.float64, requires_grad=True)
        check = functools.partial(torch.autograd.gradcheck, fast_mode=True)
        assert check(lambda q, k, v: attention(q, k, v.expand(3, 2, 6, 3)), (q, k, v))
        assert check(lambda q, k: attention(q[0, 0], k[0], k[1]), (q, k))

    @pytest.mark.parametrize("grad", [False, True])
    def test_any_strides(self, grad: bool) -> None:
        held = tensors(grad=grad)
        q, k, v = (held[name].detach() for name in "qkv")
        expected = attention(q, k, v)
        wide = torch.randn(2, 4, 5, 16)
        wide[..., ::2] = q
        laid = [wide[..., ::2], k.transpose(1, 2).contiguous().transpose(1, 2), v.mT.contiguous().mT]
        assert torch.equal(attention(*(tensor.requires_grad_(grad) for tensor in laid)), expected)

    @pytest.mark.parametrize("sizes", [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
    @pytest.mark.parametrize("grad", [False, True])
    def test_sizes_of_zero(self, sizes: tuple[int, int, int], grad: bool) -> None:
        batch, queries, keys = sizes
        q = torch.randn(batch, 2, queries, 4, requires_grad=grad)
        k, v = torch.randn(2, batch, 2, keys, 4)
        out = attention(q, k, v)
        assert out.shape == q.shape
        assert not out.any()
        if grad:
            assert gradients(out, [q])[0].shape == q.shape


class TestLayout:
    @pytest.mark.parametrize("grad", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_heads_lie_as_in_q(self, dtype: Any, grad: bool) -> None:
        rows_first = torch.randn(2, 5, 4, 8).to(dtype).requires_grad_(grad)
        k, v = torch.randn(2, 2, 4, 7, 8).to(dtype)
        out = attention(rows_first.transpose(1, 2), k, v)
        assert out.shape == (2, 4, 5, 8)
        assert out.transpose(1, 2).is_contiguous()
        assert attention(rows_first.transpose(1, 2).contiguous(), k, v).is_contiguous()

    def test_a_read_only_mask_gives_no_warning(self) -> None:
        held = tensors()
        reversed_mask = np.random.default_rng(0).random((5, 7))[::-1] < 0.5
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for mask in (MASKS["dense"], PADDED, reversed_mask):
                attention(held["q"], held["k"], held["v"], mask=mask, q_start=np.array([1, 2])[::-1])


class TestAutograd:
    def test_nothing_is_recorded_where_nothing_is_needed(self) -> None:
        held = tensors(grad=False)
        assert attention(**held).grad_fn is None
        held["k"].requires_grad_()
        assert attention(**held).grad_fn is not None
        with torch.no_grad():
            assert not attention(**held).requires_grad
        with torch.inference_mode():
            assert attention(**held).is_inference()
        parameter = torch.nn.Parameter(held["q"])
        with torch.no_grad():
            attention(parameter, held["k"], held["v"])

    @pytest.mark.parametrize("code", range(1, 32))
    def test_every_combination_of_what_requires_grad(self, code: int) -> None:
        held = tensors(grad=False)
        whole = tensors()
        expected = dict(zip(whole, gradients(attention(**whole, mask=PADDED, q_start=2), whole.values()), strict=True))
        for place, name in enumerate(held):
            held[name].requires_grad_(bool(code >> place & 1))
        torch.manual_seed(1)
        out = attention(**held, mask=PADDED, q_start=2)
        out.backward(torch.randn_like(out))
        for name, tensor in held.items():
            if tensor.requires_grad:
                assert torch.equal(tensor.grad, expected[name]), name
            else:
                assert tensor.grad is None

    def test_lse_alone_has_gradients(self) -> None:
        held = tensors(torch.float64)
        _, lse = attention(**held, return_lse=True)
        found = gradients(lse, [held["q"], held["k"]])
        scores = held["q"] @ held["k"].repeat_interleave(2, 1).mT / 8**0.5 + held["bias"]
        sinks = held["sinks"].reshape(1, 4, 1, 1).expand(2, 4, 5, 1)
        expected = torch.cat([scores, sinks], -1).logsumexp(-1)
        torch.testing.assert_close(lse, expected)
        for gradient, wanted in zip(found, gradients(expected, [held["q"], held["k"]]), strict=True):
            torch.testing.assert_close(gradient, wanted)

    def test_merged_partial_lookups_train_as_the_whole(self) -> None:
        """Keys in two parts, joined through lse: the gradients are those of one lookup over all of them."""
        held = tensors(torch.float64)
        q, k, v = (held[name] for name in "qkv")
        whole = attention(q, k, v)
        parts = [attention(q, k[:, :, cut], v[:, :, cut], return_lse=True) for cut in (slice(0, 3), slice(3, 7))]
        shares = torch.softmax(torch.stack([lse for _, lse in parts]), 0)[..., None]
        merged = shares[0] * parts[0][0] + shares[1] * parts[1][0]
        torch.testing.assert_close(merged, whole)
        for gradient, wanted in zip(gradients(merged, [q, k, v]), gradients(whole, [q, k, v]), strict=True):
            torch.testing.assert_close(gradient, wanted)

    def test_hidden_nan_has_finite_gradients(self) -> None:
        held = tensors(grad=False)
        q, k, v = (held[name] for name in "qkv")
        k[:, :, 5:], v[:, :, 5:] = float("nan"), float("inf")
        inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
        for gradient in gradients(attention(*inputs, mask=sl.Lengths([5, 0])), inputs):
            assert gradient.isfinite().all()
            assert not gradient[1].any()

    def test_a_predicate_lives_until_the_way_back(self) -> None:
        held = tensors()
        out = attention(held["q"], held["k"], held["v"], mask=sl.Predicate(lambda b, h, i, j: j <= i), q_start=2)
        expected = attention(held["q"], held["k"], held["v"], mask=sl.Causal(), q_start=2)
        inputs = [held[name] for name in "qkv"]
        for found, wanted in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
            assert torch.equal(found, wanted)

    def test_changed_tensors_are_noticed(self) -> None:
        held = tensors()
        for change in ("output", "input"):
            scaled = held["q"] * 1
            out = attention(scaled, held["k"], held["v"])
            loss = out.square().sum()
            (out if change == "output" else scaled).data.add_(0)  # without autograd's eye: no error
            with torch.no_grad():
                (out if change == "output" else scaled).add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

    def test_checkpointing(self) -> None:
        held = tensors()
        inputs = [held[name] for name in "qkv"]

        def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, mask=PADDED, q_start=2).sin()

        kept = torch.utils.checkpoint.checkpoint(block, *inputs, use_reentrant=False)
        for found, wanted in zip(gradients(kept, inputs), gradients(block(*inputs), inputs), strict=True):
            assert torch.equal(found, wanted)

    def test_second_derivatives_and_forward_mode_are_refused(self) -> None:
        held = tensors()
        (gradient,) = torch.autograd.grad(attention(**held).sum(), held["q"], create_graph=True)
        with pytest.raises(NotImplementedError, match="first derivatives only"):
            gradient.sum().backward()
        q, k, v = (held[name].detach() for name in "qkv")
        with pytest.raises(NotImplementedError, match="forward-mode"):
            torch.func.jvp(lambda q: attention(q, k, v), (q,), (q,))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast(self, dtype: Any) -> None:
        held = tensors()
        with torch.autocast("cpu", dtype=dtype):
            out = attention(held["q"], held["k"].to(dtype), held["v"], bias=held["bias"])
            assert sdpa(held["q"], held["q"], held["q"]).dtype == out.dtype == dtype
        assert gradients(out, [held["q"]])[0].dtype == torch.float32
        with torch.autocast("cpu", dtype=dtype):
            double = tensors(torch.float64)
            assert attention(**double).dtype == torch.float64


BAD: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    ({"q": np.zeros((2, 3))}, TypeError, ["q: found float64 [2, 3]", "torch.Tensor", "softlookup.attention"]),
    ({"k": torch.zeros(2, 2, 7, 8, device="meta")}, ValueError, ["k: found a tensor on meta", "k.cpu()"]),
    ({"v": torch.zeros(2, 2, 7, 6).int()}, TypeError, ["v: found int32 [2, 2, 7, 6]", "v.float()"]),
    ({"q": torch.zeros(8)}, ValueError, ["q: found shape [8]", "at least 2 axes"]),
    ({"q": torch.zeros(2, 4, 5, 8).to_sparse()}, TypeError, ["q: found a tensor of layout", "q.to_dense()"]),
    ({"mask": torch.zeros(5, 7)}, TypeError, ["mask: found float32 [5, 7]", "bias= if it is added"]),
    ({"mask": np.zeros((5, 7))}, TypeError, ["mask: found float64 [5, 7]"]),
    ({"mask": "causal"}, TypeError, ["mask: found 'causal'"]),
    ({"mask": torch.zeros(5, 7, dtype=torch.bool, device="meta")}, ValueError, ["mask: found a tensor on meta"]),
    ({"mask": torch.zeros(5, 6, dtype=torch.bool)}, ValueError, ["mask: found shape [5, 6]"]),
    ({"bias": torch.zeros(5, 6)}, ValueError, ["bias: found shape [5, 6]"]),
    ({"sinks": torch.zeros(3)}, ValueError, ["sinks: found shape [3]"]),
    ({"k": torch.zeros(2, 2, 7, 8).double()}, TypeError, ["q, k, v: found float32, float64, float32"]),
    ({"k": torch.zeros(3, 2, 7, 8)}, ValueError, ["leading axes"]),
    ({"scale": "x"}, TypeError, ["scale: found 'x'"]),
    ({"softcap": -1.0}, ValueError, ["softcap: found -1.0"]),
    ({"mask": sl.Causal()}, ValueError, ["q_start", "lower_right"]),
    ({"mask": sl.Causal(), "q_start": "middle"}, (TypeError, ValueError), ["q_start: found 'middle'"]),
    ({"k_start": 0.5}, TypeError, ["k_start: found 0.5"]),
    ({"threads": 0}, ValueError, ["threads: found 0"]),
    (
        {"q": torch.zeros(2, 4, 5, 8, device="meta"), "v": None, "mask": torch.zeros(5, 7)},
        TypeError,
        ["3 problems", "q: found a tensor on meta", "v: found None", "mask: found float32"],
    ),
]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("changes", "error", "words"), BAD)
def test_bad_input(changes: dict[str, Any], error: type[Exception], words: list[str], grad: bool) -> None:
    held = {**tensors(grad=False), "bias": None, "sinks": None}
    held["q"].requires_grad_(grad)
    with pytest.raises(error, match=r"softlookup\.(torch\.)?attention: ") as caught:
        attention(**{**held, **changes})
    for word in words:
        assert word in str(caught.value)


def test_threads_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    original = lookups.attend

    def watched(*given: Any) -> None:
        asked.append(given[-1])
        original(*given)

    monkeypatch.setattr(lookups, "attend", watched)
    held = tensors(grad=False)
    attention(**held)
    attention(**held, threads=1)
    assert asked == [torch.get_num_threads(), 1]


def test_importing_softlookup_loads_no_framework() -> None:
    program = "import sys, softlookup; assert not {'torch', 'jax', 'transformers'} & set(sys.modules), 'loaded'"
    subprocess.run([sys.executable, "-c", program], check=True)
