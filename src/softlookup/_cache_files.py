"""Files of caches, in the safetensors format. What comes from a file is checked against its own configuration before
anything is made of it.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from softlookup._cache_checks import CacheConfig, config_of
from softlookup._cache_content import Content, content_of, element_dtype, restored
from softlookup._pages import PAGE_KEYS
from softlookup._problems import Problems
from softlookup._quantize import LARGEST_CODE, LOWEST_CODE, Constants
from softlookup._types import INT4

if TYPE_CHECKING:
    from softlookup._cache_store import CacheStore

FORMAT = "softlookup.KVCache"
VERSION = "1"

Array = NDArray[Any]
Cache = TypeVar("Cache", bound="CacheStore")


def save_file(cache: CacheStore, path: str | os.PathLike[str]) -> None:
    """Write a cache; whole, or not at all."""
    safetensors = _safetensors("save")
    content = content_of(cache)
    arrays = content.arrays
    if cache._config.code == INT4:
        arrays = {name: _packed(array) if name in ("keys", "values") else array for name, array in arrays.items()}
    metadata = {"format": FORMAT, "version": VERSION, "config": json.dumps(content.config)}
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    try:
        data = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        safetensors.save_file(data, temporary, metadata=metadata)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load_file(kind: type[Cache], path: str | os.PathLike[str]) -> Cache:
    """Read a cache and check everything in its file."""
    safetensors = _safetensors("load")
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"softlookup.KVCache.load: found no file {os.fspath(path)!r}; fix: pass what save wrote"
        )
    try:
        with safetensors.safe_open(os.fspath(path), framework="numpy") as file:
            config = _config(path, file.metadata() or {})
            expected = _check_shapes(path, config, {name: file.get_slice(name) for name in file.keys()})  # noqa: SIM118
            arrays = {name: file.get_tensor(name) for name in expected}
    except safetensors.SafetensorError as error:
        _refuse(path, f"a file that safetensors cannot read ({error})")
    if config.code == INT4:
        widths = {"keys": config.width, "values": config.value_width}
        arrays = {name: _unpacked(array, widths[name]) if name in widths else array for name, array in arrays.items()}
    _check_values(path, config, arrays)
    return restored(kind, Content(config.__dict__, arrays))


def _refuse(path: str | os.PathLike[str], found: str) -> NoReturn:
    raise ValueError(
        f"softlookup.KVCache.load: found {found} in {os.fspath(path)!r}; expected a file that KVCache.save wrote; "
        "fix: save the cache again, with the version that reads it"
    )


def _config(path: str | os.PathLike[str], metadata: dict[str, str]) -> CacheConfig:
    if metadata.get("format") != FORMAT:
        _refuse(path, f"format {metadata.get('format')!r}")
    if metadata.get("version") != VERSION:
        _refuse(path, f"version {metadata.get('version')!r}, where this softlookup reads {VERSION!r},")
    try:
        given = json.loads(metadata.get("config", ""))
    except ValueError:
        given = None
    if not isinstance(given, dict) or set(given) != set(CacheConfig.__dataclass_fields__):
        _refuse(path, "no configuration of a cache")
    problems = Problems("KVCache.load")
    config = config_of(problems, **given)
    if config is None:
        try:
            problems.raise_any()
        except (TypeError, ValueError) as error:
            _refuse(path, f"a configuration that no cache has ({error})")
        _refuse(path, "a configuration that no cache has")
    return config


def _check_shapes(path: str | os.PathLike[str], config: CacheConfig, slices: dict[str, Any]) -> list[str]:
    """Check names, types and shapes, before any tensor is read."""
    tokens = slices["keys"].get_shape()[1] if "keys" in slices and len(slices["keys"].get_shape()) == 3 else -1
    ranges = slices["ranges"].get_shape()[0] if "ranges" in slices and slices["ranges"].get_shape() else -1
    elements = {"int8": "I8", "float32": "F32", "float16": "F16", "uint16": "U16"}[element_dtype(config).name]
    expected: dict[str, tuple[str, list[int]]] = {"lengths": ("I64", [config.batch]), "ranges": ("I64", [ranges, 3])}
    widths = {"keys": config.width} if config.shared_values else {"keys": config.width, "values": config.value_width}
    for name, width in widths.items():
        stored = (width + 1) // 2 if config.code == INT4 else width
        type_name = "U8" if config.code == INT4 else elements
        expected[name] = (type_name, [config.kv_heads, tokens, stored])
        if config.coded:
            groups = [config.key_groups] if name == "keys" else []
            expected[f"{name[:-1]}_scales"] = ("F32", [config.kv_heads, tokens, *groups])
    if config.coded:
        for name in ("key_means", "key_factors"):
            columns = Constants.columns_of(config.width)
            expected[name] = ("F32", [config.batch, config.kv_heads, columns])
    if set(slices) != set(expected):
        _refuse(path, f"the tensors {', '.join(sorted(slices))} instead of {', '.join(sorted(expected))}")
    for name, (type_name, shape) in expected.items():
        found = (slices[name].get_dtype(), list(slices[name].get_shape()))
        if found != (type_name, shape):
            _refuse(path, f"{name} of type {found[0]} and shape {found[1]} instead of {type_name} and {shape}")
    return list(expected)


def _check_values(path: str | os.PathLike[str], config: CacheConfig, arrays: dict[str, Array]) -> None:
    """Check that lengths and ranges fit together, and that codes are what codes can be."""
    lengths, ranges = arrays["lengths"], arrays["ranges"]
    most = config.capacity if config.capacity is not None else 2**60
    if ((lengths < 0) | (lengths > most)).any():
        _refuse(path, f"lengths {lengths.tolist()[:8]}, which a row cannot have,")
    if (ranges < 0).any() or int(ranges[:, 2].sum()) != arrays["keys"].shape[1]:
        _refuse(path, f"ranges that do not count its {arrays['keys'].shape[1]} tokens")
    kept = -(-config.keep_first // PAGE_KEYS) * PAGE_KEYS
    seen: dict[int, list[tuple[int, int]]] = {}
    for row, first, count in ranges.tolist():
        if row >= config.batch:
            _refuse(path, f"tokens of row {row} of {config.batch}")
        seen.setdefault(row, []).append((first, first + count))
    for row, length in enumerate(lengths.tolist()):
        parts = seen.get(row, [])
        whole = parts == ([(0, length)] if length else [])
        if not whole and not _is_window(config, parts, length, kept):
            _refuse(path, f"tokens {parts} of row {row} with length {length}")
    for name in ("key_scales", "value_scales", "key_factors"):
        signed = name == "key_scales" and config.code == INT4 and not config.shared_values
        if name in arrays and not (np.isfinite(arrays[name]) & (signed | (arrays[name] >= 0))).all():
            _refuse(path, f"{name} that are not finite{'' if signed else ' and positive'}")
    if config.coded and not np.isfinite(arrays["key_means"]).all():
        _refuse(path, "key_means that are not finite")
    if config.coded and (arrays["key_factors"][..., : config.width] == 0).any():
        _refuse(path, "key_factors of zero")
    for name in ("keys", "values"):
        if not config.coded or name not in arrays:
            continue
        lowest, largest = LOWEST_CODE[config.code], LARGEST_CODE[config.code]
        if ((arrays[name] < lowest) | (arrays[name] > largest)).any():
            _refuse(path, f"{name} with codes beyond {lowest} and {largest}")


def _is_window(config: CacheConfig, parts: list[tuple[int, int]], length: int, kept: int) -> bool:
    """Whether the parts are the first keys and the last ones of a row that a window has left."""
    if config.window is None or not parts or parts[-1][1] != length:
        return False
    first = parts[-1][0]
    firsts = [(0, kept)] if kept else []
    reaches = first <= max(length - config.window, 0)
    return parts[:-1] == firsts and first % PAGE_KEYS == 0 and first > kept and reaches


def _packed(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Two codes a byte, the first in the low half; a zero beside the last of an odd number."""
    even = codes if codes.shape[-1] % 2 == 0 else np.pad(codes, ((0, 0), (0, 0), (0, 1)))
    halves = even.view(np.uint8) & 15
    return (halves[..., 0::2] | halves[..., 1::2] << 4).astype(np.uint8)


def _unpacked(packed: NDArray[np.uint8], width: int) -> NDArray[np.int8]:
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.int8)
    codes[..., 0::2] = (packed << 4).view(np.int8) >> 4
    codes[..., 1::2] = packed.view(np.int8) >> 4
    return np.ascontiguousarray(codes[..., :width])


def _safetensors(what: str) -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError:
        raise ImportError(
            f"softlookup.KVCache.{what}: found no package safetensors; expected it installed; "
            "fix: pip install safetensors"
        ) from None

    class Package:
        save_file = staticmethod(safetensors.numpy.save_file)
        safe_open = safetensors.safe_open
        SafetensorError = safetensors.SafetensorError

    return Package


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
