"""The transformers adapter in training: gradients of tiny random models, beside stock "eager"."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

import softlookup.transformers as adapter
from tiny_models import CONFIGS, build, padding, tokens

# A gradient's rounding against the largest of its parameter. Some of BERT's are 0 but for rounding: a bias of all keys
# moves no softmax.
RELATIVE = 1e-5
ABSOLUTE = 1e-7


def gradients(model: Any, implementation: str, words: Any, mask: Any) -> tuple[float, dict[str, Any]]:
    """The loss over real tokens, and its gradient in every parameter."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    out = model(words, attention_mask=mask)
    numbers = out.logits if hasattr(out, "logits") else out.last_hidden_state
    if mask is not None:
        numbers = numbers * mask[..., None]
    loss = numbers.square().mean()
    loss.backward()
    return loss.item(), {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_eager(name: str, side: str | None) -> None:
    model, words = build(name), tokens(3, 12)
    mask = None if side is None else padding((12, 7, 4), side)
    loss, expected = gradients(model, "eager", words, mask)
    our_loss, found = gradients(model, "softlookup", words, mask)
    assert our_loss == pytest.approx(loss, rel=1e-5)
    assert found.keys() == expected.keys()
    for parameter, gradient in expected.items():
        allowed = RELATIVE * gradient.abs().max().item() + ABSOLUTE
        assert (found[parameter] - gradient).abs().max().item() <= allowed, parameter


def test_a_float_mask_that_is_learned() -> None:
    model, words = build("llama"), tokens(2, 9)
    found = []
    for implementation in ("eager", "softlookup"):
        model.set_attn_implementation(implementation)
        lower = torch.full((9, 9), torch.finfo(torch.float32).min).triu(1)[None, None].expand(2, 1, 9, 9).clone()
        lower.requires_grad_()
        model(words, attention_mask=lower).logits.square().mean().backward()
        found.append(lower.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-8)


def test_checkpointing_gives_the_same_bits() -> None:
    model, words = build("mistral"), tokens(2, 9)
    _, plain = gradients(model, "softlookup", words, None)
    model.train()
    model.gradient_checkpointing_enable()
    _, checkpointed = gradients(model, "softlookup", words, None)
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)


def test_statistics_are_observed_in_training_too() -> None:
    model, words = build("llama"), tokens(2, 9)
    model.set_attn_implementation("softlookup")
    seen: list[Any] = []
    with adapter.observe(lambda module, stats: seen.append(stats.entropy.shape)):
        model(words).logits.sum().backward()
    assert seen == [(2, 4, 9)] * 2


def test_a_few_steps_of_training_go_the_same_way() -> None:
    losses = []
    for implementation in ("eager", "softlookup"):
        torch.manual_seed(0)
        model, words = build("llama"), tokens(4, 16)
        model.set_attn_implementation(implementation)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(words, labels=words).loss
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[1] < 4.5
