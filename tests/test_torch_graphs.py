"""softlookup.torch in graphs: the operators, torch.compile, torch.export and what watches operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

import softlookup as sl
from softlookup._mask_codec import encode
from softlookup._tensors import tensor_of
from softlookup._torch.operators import attend, differentiate
from softlookup.torch import attention
from torch_cases import DTYPES, MASKS, PADDED, compiled_alike, gradients, tensors


def arguments(dtype: Any = torch.float32, mask: Any = None, heads_last: bool = False) -> tuple[Any, ...]:
    """What the operators take."""
    held = tensors(dtype)
    if heads_last:
        for name in "qkv":
            held[name] = held[name].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    words, numbers, arrays = ("", [], []) if mask is None else encode(mask)
    return *held.values(), words, numbers, [tensor_of(array) for array in arrays], 0.3, 2.0, 2, None, 0, None


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
