"""What the bench says of the layers of a model, on tiny random ones."""

from __future__ import annotations

import pytest

for package in ("typer", "torch", "transformers", "platformdirs"):
    pytest.importorskip(package)

import numpy as np  # noqa: E402

import softlookup as sl  # noqa: E402
from softlookup.bench.layers import error_of, layers_of, table  # noqa: E402
from tiny_language_model import KEY_HEADS, LAYERS, WIDTH, tiny_model  # noqa: E402
from tiny_models import build  # noqa: E402

WORDS = list(range(3, 43))


def test_layers_of_a_decoder_are_what_it_looks_up_in() -> None:
    layers = layers_of(tiny_model(), WORDS)
    assert len(layers) == LAYERS
    for layer in layers:
        assert layer.causal
        assert layer.k.shape == layer.v.shape == (1, KEY_HEADS, 40, WIDTH)
        assert layer.q.shape[2:] == (40, WIDTH)


def test_an_encoder_sees_every_key() -> None:
    layers = layers_of(build("bert"), WORDS)
    assert len(layers) == 2
    assert not any(layer.causal for layer in layers)


def test_errors_are_those_of_the_lookup_in_what_is_stored() -> None:
    layer = layers_of(build("bert"), WORDS)[1]
    errors = [error_of(layer, dtype, False) for dtype in ("float32", "bfloat16", "int8", "int4")]
    assert errors[0] == 0
    assert 0 < max(errors[1:3]) < errors[3]
    exact = sl.attention(layer.q, layer.k, layer.v)
    cache = sl.KVCache(kv_heads=layer.k.shape[1], width=layer.k.shape[3], dtype="int4")
    cache.append(layer.k, layer.v)
    stored = sl.attention(layer.q, cache.keys(), cache.values())
    assert errors[3] == pytest.approx(np.linalg.norm(stored - exact) / np.linalg.norm(exact), rel=0.1)


def test_table_has_a_line_for_every_type() -> None:
    lines = table(layers_of(tiny_model(), WORDS)).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| bfloat16", "| float16", "| int8", "| int8, rotated", "| int4", "| int4, rotated",
    ]  # fmt: skip
