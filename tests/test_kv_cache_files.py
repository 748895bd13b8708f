"""Files of caches: what was saved comes back, and what is broken or hostile is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import softlookup as sl
from agreement import on
from cache_cases import ALL, CODES, CacheShape, dtype_of, empty, filled, make, same_bits
from cases import ISAS

SHAPE = CacheShape(4, 2, 33, 24, 1300, 2, batch=2)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 300, "keep_first": 3},
    "capacity": {"capacity": 2000},
}


def saved(path: Path, name: str = "int8", **options: Any) -> sl.KVCache:
    _, k, v = make(SHAPE, name)
    cache = empty(k, v, name, **options)
    cache.append(k[:, :, :900], v[:, :, :900], lengths=[900, 17])
    cache.append(k[:, :, 900:], v[:, :, 900:])
    cache.save(path)
    return cache


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_round_trip(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    path = tmp_path / "cache.safetensors"
    cache = saved(path, name, **options)
    again = sl.KVCache.load(path)
    q, k, v = make(SHAPE, name)
    assert repr(again) == repr(cache)
    for _ in range(2):
        assert same_bits(again.attention(q), cache.attention(q))
        assert same_bits(again.keys(), cache.keys())
        for each in (cache, again):
            each.append(k[:, :, :3], v[:, :, :3])
    assert [file.name for file in tmp_path.iterdir()] == ["cache.safetensors"]


@pytest.mark.parametrize("name", ALL)
def test_round_trip_of_shared_and_rotated(tmp_path: Path, name: str) -> None:
    rng = np.random.default_rng(0)
    k = rng.standard_normal((1, 1, 600, 48)).astype(dtype_of(name))
    q = rng.standard_normal((1, 8, 1, 48)).astype(dtype_of(name))
    cache = sl.KVCache(kv_heads=1, width=48, value_width=32, dtype=name, shared_values=True, rotate=name in CODES)
    cache.append(k)
    cache.save(tmp_path / "cache")
    assert same_bits(sl.KVCache.load(tmp_path / "cache").attention(q), cache.attention(q))


def test_files_are_read_on_other_instruction_sets(tmp_path: Path) -> None:
    q, k, v = make(SHAPE, "float32")
    path = tmp_path / "cache"
    with on(ISAS[0]):
        filled(k, v, "float32").save(path)
    for isa in ISAS:
        with on(isa):
            expected = sl.attention(q, k, v, mask=sl.Causal(), q_start=1298)
            assert same_bits(sl.KVCache.load(path).attention(q), expected)


def rewritten(path: Path, change: Any) -> None:
    """The file with changed tensors and metadata."""
    with safe_open(path, framework="numpy") as file:
        metadata = dict(file.metadata())
    tensors = load_file(path)
    change(tensors, metadata)
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path, metadata=metadata)


def edit(name: str, function: Any) -> Any:
    def change(tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
        tensors[name] = function(tensors[name])

    return change


def configure(**options: Any) -> Any:
    def change(tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
        metadata["config"] = json.dumps(json.loads(metadata["config"]) | options)

    return change


def negated(array: np.ndarray) -> np.ndarray:
    return -array


CHANGES: dict[str, Any] = {
    "no key tensor": lambda tensors, metadata: tensors.pop("keys"),
    "one tensor more": lambda tensors, metadata: tensors.update(extra=np.zeros(3)),
    "another format": lambda tensors, metadata: metadata.update(format="pt"),
    "another version": lambda tensors, metadata: metadata.update(version="2"),
    "no configuration": lambda tensors, metadata: metadata.pop("config"),
    "configuration is no json": lambda tensors, metadata: metadata.update(config="{"),
    "configuration is a list": lambda tensors, metadata: metadata.update(config="[]"),
    "a wider head": configure(width=34),
    "more heads": configure(kv_heads=3),
    "a huge batch": configure(batch=2**40),
    "a huge width": configure(width=2**31),
    "another type": configure(dtype="float32"),
    "an unknown type": configure(dtype="int3"),
    "a full cache": configure(capacity=5),
    "a negative width": configure(width=-33),
    "text for a number": configure(batch="2"),
    "keys of another type": edit("keys", lambda array: array.astype(np.float32)),
    "keys of another shape": edit("keys", lambda array: array[:, :, :5]),
    "fewer keys": edit("keys", lambda array: array[:, :5]),
    "fewer values": edit("values", lambda array: array[:, :5]),
    "flat keys": edit("keys", lambda array: array.ravel()),
    "scales of NaN": edit("key_scales", lambda array: array * np.float32(np.nan)),
    "negative scales": edit("value_scales", negated),
    "infinite means": edit("key_means", lambda array: array + np.float32(np.inf)),
    "factors of zero": edit("key_factors", lambda array: 0 * array),
    "codes beyond": edit("keys", lambda array: np.full_like(array, -128)),
    "longer rows": edit("lengths", lambda array: array + 1),
    "negative lengths": edit("lengths", negated),
    "a huge length": edit("lengths", lambda array: array * 2**50),
    "ranges elsewhere": edit("ranges", lambda array: array + np.array([0, 512, 0])),
    "ranges of another row": edit("ranges", lambda array: array + np.array([5, 0, 0])),
    "negative ranges": edit("ranges", negated),
    "ranges that overflow": edit("ranges", lambda array: array * 2**61),
    "lengths of another type": edit("lengths", lambda array: array.astype(np.int32)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_does_not_fit_is_refused(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "cache"
    saved(path)
    rewritten(path, change)
    with pytest.raises(ValueError, match=r"softlookup\.KVCache\.load: found .*; expected .*; fix: ") as caught:
        sl.KVCache.load(path)
    assert "\n" not in str(caught.value)


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    saved(path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for content in (b"", b"\0" * 64, rng.bytes(4000), whole[: len(whole) // 2], whole[:9], b"\xff" * 8 + whole[8:]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"KVCache\.load: found"):
            sl.KVCache.load(path)
    save_file({"keys": np.zeros((2, 3))}, path)
    with pytest.raises(ValueError, match="found format None"):
        sl.KVCache.load(path)
    with pytest.raises(FileNotFoundError):
        sl.KVCache.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        sl.KVCache.load(tmp_path)


def test_every_byte_of_the_header_may_be_wrong(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    cache = saved(path, "int4")
    whole = path.read_bytes()
    for place in range(0, 1000, 13):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x15]) + whole[place + 1 :])
        try:
            again = sl.KVCache.load(path)
        except ValueError:
            continue
        assert again.lengths.tolist() == cache.lengths.tolist()


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache"
    saved(path)
    before = path.read_bytes()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("safetensors.numpy.save_file", fail)
    with pytest.raises(OSError, match="full"):
        saved(path, "float32")
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]
    with pytest.raises(FileNotFoundError):
        saved(tmp_path / "nowhere" / "cache")
