"""`softlookup.transformers.Cache`: tokens and logits of tiny models with it, beside the stock cache and "eager".

Floats must give the stock tokens. Codes change logits a little, and random models have no favourites; so codes are held
to themselves: read by the kernel where they lie, and read by "eager" as the tensors that they stand for.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

import softlookup as sl
import softlookup.transformers as adapter
from tiny_models import CAUSAL, FLOAT32_TOLERANCE, WINDOW, build, padding, tokens

SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
}


def generated(model: Any, implementation: str, words: Any, cache: Any, **options: Any) -> Any:
    torch.manual_seed(3)
    model.set_attn_implementation(implementation)
    options = {"max_new_tokens": 2 * WINDOW + 4, "pad_token_id": 0, **options}
    return model.generate(words, **options) if cache is None else model.generate(words, cache=cache, **options)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_generates_the_stock_tokens(name: str, search: dict[str, Any]) -> None:
    model = build(name)
    words = tokens(1, 9)
    stock = generated(model, "eager", words, None, **search)
    for implementation in ("softlookup", "eager"):
        cache = adapter.Cache(model.config)
        assert torch.equal(generated(model, implementation, words, cache, **search), stock), implementation
        assert cache.get_seq_length() == stock.shape[1] - 1
        assert all(store.dtype == "float32" for store in cache.stores)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
@pytest.mark.parametrize("search", [SEARCHES["greedy"], SEARCHES["beams"]], ids=["greedy", "beams"])
def test_batches_padded_on_the_left(name: str, search: dict[str, Any]) -> None:
    model, words, mask = build(name), tokens(3, 11), padding((11, 4, 1), "left")
    stock = generated(model, "eager", words, None, attention_mask=mask, **search)
    ours = generated(model, "softlookup", words, adapter.Cache(model.config), attention_mask=mask, **search)
    assert torch.equal(ours, stock)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_assisted_generation(name: str) -> None:
    model, assistant = build(name), build(name)
    words = tokens(1, 9)
    stock = generated(model, "eager", words, None, do_sample=False)
    assistant.set_attn_implementation("softlookup")
    cache = adapter.Cache(model.config)
    ours = generated(model, "softlookup", words, cache, do_sample=False, assistant_model=assistant)
    assert torch.equal(ours, stock)


def logits_of(model: Any, implementation: str, words: Any, cache: Any, pieces: tuple[int, ...]) -> Any:
    """Logits of all tokens, fed in pieces."""
    model.set_attn_implementation(implementation)
    made, first = [], 0
    with torch.no_grad():
        for count in pieces:
            made.append(model(words[:, first : first + count], cache=cache).logits)
            first += count
    return torch.cat(made, dim=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "llama4"])
def test_codes_are_read_as_what_they_stand_for(name: str, dtype: str) -> None:
    model, words = build(name), tokens(2, 24)
    ours = logits_of(model, "softlookup", words, adapter.Cache(model.config, dtype=dtype), (17, 1, 4, 1, 1))
    eager = logits_of(model, "eager", words, adapter.Cache(model.config, dtype=dtype), (17, 1, 4, 1, 1))
    # A store of halves rounds the query too, and one of codes queries and weights, where "eager" gets them whole.
    bound = {"float32": FLOAT32_TOLERANCE, "bfloat16": 6e-2, "float16": 6e-3, "int8": 2e-3, "int4": 6e-2}
    assert (ours - eager).abs().max() < bound[dtype]
    exact = logits_of(model, "eager", words, transformers.DynamicCache(config=model.config), (17, 1, 4, 1, 1))
    assert (ours - exact).abs().max() < {"float32": FLOAT32_TOLERANCE, "int4": 1.0}.get(dtype, 6e-2)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_chunks_leave_the_logits(dtype: str) -> None:
    model, words = build("mistral"), tokens(1, 40)
    whole = logits_of(model, "softlookup", words, adapter.Cache(model.config, dtype=dtype), (20, 20))
    pieces = logits_of(model, "softlookup", words, adapter.Cache(model.config, dtype=dtype), (20, 3, 1, 16))
    assert (whole - pieces).abs().max() < FLOAT32_TOLERANCE


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_cropping(name: str, dtype: str) -> None:
    model, words = build(name), tokens(1, 30)
    model.set_attn_implementation("softlookup")
    cache = adapter.Cache(model.config, dtype=dtype)
    whole = adapter.Cache(model.config, dtype=dtype)
    with torch.no_grad():
        model(words[:, :20], cache=cache)
        model(words[:, :20], cache=whole)
        kept = copy.deepcopy(cache)
        model(words[:, :6], cache=cache)
        cache.crop(-6)
        assert cache.get_seq_length() == 20
        after = model(words[:, 20:], cache=cache).logits
        assert torch.equal(after, model(words[:, 20:], cache=whole).logits)
        assert torch.equal(after, model(words[:, 20:], cache=kept).logits)
    with pytest.raises(ValueError, match=r"crop\(-n\)"):
        cache.crop(3)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.nbytes == 0


def test_a_window_bounds_the_store() -> None:
    model = build("mistral")
    model.set_attn_implementation("softlookup")
    cache = adapter.Cache(model.config)
    with torch.no_grad():
        for _ in range(12):
            model(tokens(1, 120), cache=cache)
    assert cache.get_seq_length() == 1440
    assert all(store._table.page_count <= 2 for store in cache.stores)


def test_a_cache_for_another_type_of_model() -> None:
    model, words = build("llama", torch.bfloat16), tokens(1, 9)
    model.set_attn_implementation("softlookup")
    for dtype in ("float32", "int8"):
        with torch.no_grad():
            logits = model(words, cache=adapter.Cache(model.config, dtype=dtype)).logits
        assert logits.dtype is torch.bfloat16
        assert torch.isfinite(logits).all()


def test_statistics_come_from_the_store() -> None:
    model, words = build("llama"), tokens(1, 9)
    model.set_attn_implementation("softlookup")
    seen: list[sl.Stats] = []
    with torch.no_grad(), adapter.observe(lambda module, stats: seen.append(stats)):
        model(words, cache=adapter.Cache(model.config, dtype="int8"))
    assert [stats.entropy.shape for stats in seen] == [(1, 4, 9)] * 2
    assert {stats.conventions.dtype for stats in seen} == {"int8"}


def test_gradients_are_refused() -> None:
    model = build("llama")
    model.set_attn_implementation("softlookup")
    with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
        model(tokens(1, 5), cache=adapter.Cache(model.config))


@pytest.mark.parametrize(("options", "words"), [({"dtype": "int3"}, "int3"), ({"rotate": True}, "rotate")])
def test_no_such_cache(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        adapter.Cache(build("llama").config, **options)
