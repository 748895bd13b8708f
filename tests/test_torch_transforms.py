"""softlookup.torch under vmap and the transforms of torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

import softlookup as sl
from softlookup.torch import attention
from torch_cases import MASKS, PADDED, compiled_alike, gradients, tensors

sdpa = torch.nn.functional.scaled_dot_product_attention


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
