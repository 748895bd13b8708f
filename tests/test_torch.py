"""softlookup.torch: the same numbers as on arrays, autograd, graphs and transforms."""

from __future__ import annotations

import functools
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import softlookup as sl
from agreement import on
from cases import ISAS
from softlookup._mask_codec import encode
from softlookup._tensors import array_of, tensor_of
from softlookup._torch.operators import attend, differentiate
from softlookup.torch import attention

Tensor = torch.Tensor
sdpa = torch.nn.functional.scaled_dot_product_attention

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
CLOSE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 6e-2, torch.float16: 8e-3}
PADDED = sl.Causal() & sl.Lengths([7, 3])
MASKS = {
    "none": None,
    "causal": sl.Causal(),
    "padded": PADDED,
    "dense": sl.Dense(np.random.default_rng(0).random((5, 7)) < 0.6),
    "joined": PADDED | ~sl.Dense(np.random.default_rng(1).random((2, 1, 5, 7)) < 0.8),
    "predicate": sl.Predicate(lambda b, h, i, j: (i + j + h) % 3 > 0),
}


def tensors(dtype: Any = torch.float32, grad: bool = True, seed: int = 0) -> dict[str, Tensor]:
    """q, k and v of a grouped call, a bias and sinks."""
    torch.manual_seed(seed)
    shapes = {"q": (2, 4, 5, 8), "k": (2, 2, 7, 8), "v": (2, 2, 7, 6), "bias": (1, 4, 5, 7), "sinks": (4,)}
    return {name: torch.randn(shape).to(dtype).requires_grad_(grad) for name, shape in shapes.items()}


def arguments(dtype: Any = torch.float32, mask: Any = None, heads_last: bool = False) -> tuple[Any, ...]:
    """What the operators take."""
    held = tensors(dtype)
    if heads_last:
        for name in "qkv":
            held[name] = held[name].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    words, numbers, arrays = ("", [], []) if mask is None else encode(mask)
    return *held.values(), words, numbers, [tensor_of(array) for array in arrays], 0.3, 2.0, 2, None, 0, None


def gradients(out: Any, inputs: Any, seed: int = 1) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    outs = out if isinstance(out, tuple) else (out,)
    return torch.autograd.grad(outs, list(inputs), [torch.randn_like(one) for one in outs])


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


class TestOperators:
    @pytest.mark.parametrize("heads_last", [False, True])
    @pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_forward(self, dtype: Any, mask: Any, heads_last: bool) -> None:
        torch.library.opcheck(attend, arguments(dtype, mask, heads_last))

    @pytest.mark.parametrize("wrt", ["q k v bias sinks", "v", "bias sinks"])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_backward(self, dtype: Any, wrt: str) -> None:
        given = [x.detach() if isinstance(x, Tensor) else x for x in arguments(dtype, PADDED)]
        out, lse, wide, tops = attend(*given)
        saved = (out if dtype in (torch.float32, torch.float64) else wide, lse, tops, wrt)
        for slopes in ((torch.randn_like(out), torch.randn_like(lse)), (None, torch.randn_like(lse))):
            torch.library.opcheck(differentiate, (*given, *slopes, *saved))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_have_the_bits_of_the_functions(self, dtype: Any) -> None:
        given = arguments(dtype, PADDED)
        held = dict(zip(("q", "k", "v", "bias", "sinks"), given[:5], strict=True))
        eager = attention(**held, mask=PADDED, scale=0.3, softcap=2.0, q_start=2, return_lse=True)
        made = attend(*given)[:2]
        for left, right in zip(eager, made, strict=True):
            assert torch.equal(left, right)
        for left, right in zip(gradients(eager, given[:5]), gradients(made, given[:5]), strict=True):
            assert torch.equal(left, right)


def compiled_alike(function: Callable[..., Any], *inputs: Tensor) -> None:
    """One graph forward and one backward, with the bits of the eager run."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found, expected = compiled(*inputs), function(*inputs)
    assert torch.equal(found, expected)
    needed = [tensor for tensor in inputs if tensor.requires_grad]
    for gradient, wanted in zip(gradients(found, needed), gradients(expected, needed), strict=True):
        assert torch.equal(gradient, wanted)


class TestGraphs:
    @pytest.mark.parametrize("mask", [mask for name, mask in MASKS.items() if name != "predicate"], ids=str)
    def test_masks_from_outside(self, mask: Any) -> None:
        held = tensors()
        compiled_alike(
            lambda q, k, v, b, s: attention(q, k, v, mask=mask, bias=b, sinks=s, softcap=2.0, q_start=2),
            *held.values(),
        )

    @pytest.mark.parametrize("start", [2, "lower_right", torch.tensor([1, 2]), np.array([1, 2])], ids=str)
    def test_masks_made_inside_and_every_kind_of_start(self, start: Any) -> None:
        inputs = [tensors(torch.bfloat16)[name] for name in "qkv"]
        compiled_alike(
            lambda q, k, v: attention(q, k, v, mask=sl.Causal() & sl.Window(2) | sl.Window(0, 1), q_start=start),
            *inputs,
        )

    @pytest.mark.parametrize("kind", ["tensor", "array"])
    def test_masks_of_bools(self, kind: str) -> None:
        chosen = torch.rand(5, 7) < 0.6
        inputs = [tensors()[name] for name in "qkv"]
        compiled_alike(lambda q, k, v: attention(q, k, v, mask=chosen if kind == "tensor" else chosen.numpy()), *inputs)

    def test_one_head_and_lse(self) -> None:
        inputs = [tensors()[name].detach()[0, 0].requires_grad_() for name in "qkv"]
        compiled_alike(lambda q, k, v: torch.cat([x.flatten() for x in attention(q, k, v, return_lse=True)]), *inputs)

    def test_inductor(self) -> None:
        held = tensors()
        inputs = [held[name] for name in "qkv"]

        def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q.sin(), k * 2, v, mask=sl.Causal(), q_start=2).relu()

        compiled = torch.compile(layer, fullgraph=True)
        torch.testing.assert_close(compiled(*inputs), layer(*inputs))
        pairs = zip(gradients(compiled(*inputs), inputs), gradients(layer(*inputs), inputs), strict=True)
        for gradient, wanted in pairs:
            torch.testing.assert_close(gradient, wanted)

    def test_any_number_of_rows_by_one_graph(self) -> None:
        held = tensors(grad=False)
        graphs = 0

        def count(graph: Any, _: Any) -> Any:
            nonlocal graphs
            graphs += 1
            return graph.forward

        torch._dynamo.reset()
        compiled = torch.compile(
            lambda q, k, v: attention(q, k, v, mask=sl.Causal(), q_start="lower_right"),
            fullgraph=True, dynamic=True, backend=count,
        )  # fmt: skip
        for rows in (3, 4, 5):
            q = held["q"][:, :, :rows]
            found = compiled(q, held["k"], held["v"])
            expected = attention(q, held["k"], held["v"], mask=sl.Causal(), q_start="lower_right")
            assert torch.equal(found, expected)
        assert graphs == 1

    def test_a_new_mask_is_noticed(self) -> None:
        held = tensors(grad=False)
        compiled = torch.compile(
            lambda mask: attention(held["q"], held["k"], held["v"], mask=mask, q_start=2),
            fullgraph=True, backend="eager",
        )  # fmt: skip
        windows = [sl.Window(width) for width in (1, 2, 3, 4, 5)] + [sl.Window(None, 1)]
        for mask in (*windows, sl.Causal(), MASKS["dense"], ~MASKS["dense"], sl.Window(1)):
            expected = attention(held["q"], held["k"], held["v"], mask=mask, q_start=2)
            assert torch.equal(compiled(mask), expected)

    def test_export(self) -> None:
        class Model(torch.nn.Module):
            def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return attention(q, k, v, mask=PADDED, q_start=2)

        inputs = tuple(tensors(grad=False)[name] for name in "qkv")
        exported = torch.export.export(Model(), inputs)
        assert torch.equal(exported.module()(*inputs), Model()(*inputs))

    def test_what_watches_sees_the_operator(self) -> None:
        from torch.fx.experimental.proxy_tensor import make_fx

        inputs = [tensors(grad=False)[name] for name in "qkv"]
        graph = make_fx(lambda q, k, v: attention(q, k, v))(*inputs)
        assert "softlookup.attention" in graph.code
        with torch._subclasses.FakeTensorMode():
            assert attention(*(torch.empty(tensor.shape) for tensor in inputs)).shape == (2, 4, 5, 6)

    def test_a_predicate_is_refused(self) -> None:
        inputs = [tensors()[name] for name in "qkv"]
        torch._dynamo.reset()
        compiled = torch.compile(lambda *x: attention(*x, mask=MASKS["predicate"], q_start=2), fullgraph=True)
        with pytest.raises(Exception, match=r"Predicate under torch\.compile"):
            compiled(*inputs)


def looped(function: Callable[..., Tensor], dims: tuple[int | None, ...], inputs: tuple[Tensor, ...]) -> Tensor:
    """What vmap means."""
    size = next(x.shape[dim] for x, dim in zip(inputs, dims, strict=True) if dim is not None)
    pairs = list(zip(inputs, dims, strict=True))
    return torch.stack([function(*(x if d is None else x.select(d, i) for x, d in pairs)) for i in range(size)])


class TestTransforms:
    def check(self, function: Callable[..., Tensor], dims: tuple[int | None, ...], *inputs: Tensor) -> None:
        assert torch.equal(torch.vmap(function, in_dims=dims)(*inputs), looped(function, dims, inputs))

    @pytest.fixture
    def many(self) -> dict[str, Tensor]:
        """Three of everything; q [3, 2, 4, 5, 8]."""
        held = [tensors(grad=False, seed=seed) for seed in range(3)]
        return {name: torch.stack([one[name] for one in held]) for name in held[0]}

    def test_vmap_over_q_k_and_v(self, many: dict[str, Tensor]) -> None:
        q, k, v = (many[name] for name in "qkv")

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, mask=PADDED, q_start=2)

        self.check(call, (0, 0, 0), q, k, v)
        self.check(call, (0, None, None), q, k[0], v[0])
        self.check(call, (None, 0, 0), q[0], k, v)
        self.check(call, (1, 2, 4), q.movedim(0, 1), k.movedim(0, 2), v.movedim(0, 4))
        self.check(attention, (0, 0, 0), q[:, 0, 0], k[:, 0, 0], v[:, 0, 0])
        self.check(attention, (0, 0, 0), q[:, 0], k, v)
        self.check(lambda q: torch.vmap(lambda one: attention(one, k[0, 0], v[0, 0]))(q), (0,), q)

    def test_vmap_over_all_else(self, many: dict[str, Tensor]) -> None:
        q, k, v, bias, sinks = many.values()
        masks, starts = torch.rand(3, 2, 1, 5, 7) < 0.6, torch.tensor([[1, 2], [3, 4], [0, 0]])

        def call(q: Tensor, **options: Any) -> Tensor:
            return attention(q, k[0], v[0], **options)

        for dim, batched in ((0, q), (None, q[0])):
            self.check(lambda q, b: call(q, bias=b), (dim, 0), batched, bias)
            self.check(lambda q, b: call(q, bias=b), (dim, 0), batched, bias[:, 0, 0])
            self.check(lambda q, m: call(q, mask=m), (dim, 0), batched, masks)
            self.check(lambda q, m: call(q, mask=m), (dim, 0), batched, masks[:, 0, 0])
            self.check(lambda q, s: call(q, mask=sl.Causal(), q_start=s), (dim, 0), batched, starts)
            self.check(lambda q, s: call(q, mask=sl.Causal(), q_start=s), (dim, 0), batched, starts[:, 0])
            self.check(lambda q, s: call(q, sinks=s), (dim, 0), batched, sinks)
        self.check(lambda q: call(q, bias=bias[0], sinks=sinks[0], mask=MASKS["joined"], q_start=2), (0,), q)

    @pytest.mark.parametrize(
        ("names", "dims"),
        [
            ("q k v", (0, 0, 0, None, None)),
            ("q k v bias", (0, None, None, None, None)),
            ("q k v bias", (None, 0, None, None, None)),
            ("k bias", (None, None, None, 0, None)),
            ("q sinks", (0, None, None, None, None)),
            ("v sinks", (None, None, None, None, 0)),
        ],
    )
    def test_gradients_of_each(self, names: str, dims: tuple[int | None, ...], many: dict[str, Tensor]) -> None:
        places = tuple(list(many).index(name) for name in names.split())

        def loss(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
            return attention(q, k, v, bias=bias, sinks=sinks, mask=PADDED, q_start=2).square().sum()

        def flat(*inputs: Tensor) -> Tensor:
            return torch.cat([x.flatten() for x in torch.func.grad(loss, argnums=places)(*inputs)])

        inputs = [x if dim == 0 else x[0] for x, dim in zip(many.values(), dims, strict=True)]
        self.check(flat, dims, *inputs)

    def test_func_agrees_with_backward(self) -> None:
        held = tensors()
        out = attention(**held)
        torch.manual_seed(1)
        slope = torch.randn_like(out)
        _, pullback = torch.func.vjp(lambda *x: attention(*x[:3], bias=x[3], sinks=x[4]), *held.values())
        for found, wanted in zip(pullback(slope), gradients(out, held.values()), strict=True):
            assert torch.equal(found, wanted)

    def test_jacobian(self) -> None:
        q, k, v = (tensors(torch.float64)[name][0, :2].detach() for name in "qkv")
        found = torch.func.jacrev(lambda q: attention(q, k, v))(q)
        expected = torch.autograd.functional.jacobian(lambda q: sdpa(q, k, v), q)
        torch.testing.assert_close(found, expected)

    def test_in_a_graph(self, many: dict[str, Tensor]) -> None:
        inputs = [many[name].requires_grad_() for name in "qkv"]
        compiled_alike(torch.vmap(lambda q, k, v: attention(q, k, v, mask=PADDED, q_start=2)), *inputs)

    def test_a_predicate_is_refused(self, many: dict[str, Tensor]) -> None:
        with pytest.raises(NotImplementedError, match="Predicate under vmap"):
            torch.vmap(lambda q: attention(q, many["k"][0], many["v"][0], mask=MASKS["predicate"], q_start=2))(
                many["q"]
            )


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
    original = sl.attention

    def watched(*given: Any, **options: Any) -> Any:
        asked.append(options["threads"])
        return original(*given, **options)

    monkeypatch.setattr(sl, "attention", watched)
    held = tensors(grad=False)
    attention(**held)
    attention(**held, threads=1)
    assert asked == [torch.get_num_threads(), 1]


def test_importing_softlookup_loads_no_framework() -> None:
    program = "import sys, softlookup; assert not {'torch', 'jax', 'transformers'} & set(sys.modules), 'loaded'"
    subprocess.run([sys.executable, "-c", program], check=True)
