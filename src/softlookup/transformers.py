"""softlookup under Hugging Face transformers: `register()`, then `model.set_attn_implementation("softlookup")`.

Policy. The attention function and the mask function are registered together, because a key without a mask function
gets no mask at all and padding would be lost in silence. Tensors are read in place through NumPy views and the result
is written into a tensor of the layout that transformers wants: nothing is copied. Whatever this adapter cannot honour
raises, and names the keyword; nothing is ignored but what cannot change the result. torch.compile breaks its graph
around both functions.

A mask keeps the meaning that the stock "eager" implementation gives it, with one difference: a row from which every key
is hidden (a padding token on the left) is 0 here and an average over hidden keys there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

try:
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface, cache_utils

    from softlookup._tensors import FLOATS, array_of
    from softlookup._torch.lookups import compute
    from softlookup._transformers.caches import KEYWORD, TYPES, StoredLayer, refuse_gradients
    from softlookup._transformers.masks import MaskPlan, plan_mask
    from softlookup.torch import attention
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"softlookup.transformers needs {missing.name}: pip install 'softlookup[transformers]'", name=missing.name
    ) from missing

import softlookup as sl
from softlookup._problems import Problems

__all__ = ["Cache", "register"]

KEY = "softlookup"

# Keywords that models pass along and that cannot change what attention computes.
_HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",
        "logits_to_keep",
        "num_items_in_batch",
        "output_attentions",  # judged on its own
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",  # packed sequences are in the mask already
        "return_dict",
        "use_cache",
    }
)

Observer = Callable[[torch.nn.Module, sl.Stats], None]
_observer: ContextVar[Observer | None] = ContextVar("softlookup_observer", default=None)


def register() -> None:
    """Make "softlookup" an attention implementation of transformers; calling it again changes nothing.

    Afterwards `model.set_attn_implementation("softlookup")`, or `attn_implementation="softlookup"` at loading, runs
    every layer that goes through transformers' `AttentionInterface` on `softlookup.attention`: causal, sliding-window,
    chunked, packed, padded and 4-D user masks (bool: True attends; float: added, and finfo.min hides), static and
    dynamic caches, grouped heads, softcap, sinks and position biases. Gradients reach all of them: models train.

    Raises
    ------
    NotImplementedError
        Later, in a forward pass: for dropout > 0, requested attention weights, or a keyword it does not know.

    Examples
    --------
    >>> import torch, transformers
    >>> import softlookup.transformers
    >>> softlookup.transformers.register()
    >>> config = transformers.LlamaConfig(
    ...     hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    ...     num_attention_heads=4, num_key_value_heads=2, vocab_size=50,
    ... )
    >>> model = transformers.LlamaForCausalLM(config).eval()
    >>> tokens = torch.arange(6)[None]
    >>> with torch.no_grad():
    ...     stock = model(tokens).logits
    ...     model.set_attn_implementation("softlookup")
    ...     ours = model(tokens).logits
    >>> bool((stock - ours).abs().max() < 1e-5)
    True
    """
    AttentionInterface.register(KEY, _outside_graphs(_attention_forward))
    AttentionMaskInterface.register(KEY, _outside_graphs(plan_mask))


class Cache(cache_utils.Cache):
    """A transformers cache that keeps keys and values in `softlookup.KVCache`, in floats or in codes.

    Pass it as `cache=` (`past_key_values=` in older models) to a model or to `generate`. With the attention
    implementation "softlookup" the kernel reads what is stored where it lies; any other implementation gets it as
    tensors. Greedy search, sampling, beams, assisted generation, sliding windows, padding on the left and cropping work
    as with the stock caches. Layers that hold no keys (linear attention) are the stock ones. It holds no gradients.

    Parameters
    ----------
    config
        The model's configuration, `model.config` itself.
    dtype
        "float32", "bfloat16", "float16", "int8" or "int4"; None is the type of the model.
    rotate
        Rotate before codes are made (see `KVCache`); None is True for int4, which it serves best.

    Raises
    ------
    TypeError, ValueError
        If dtype or rotate is none of these.

    Examples
    --------
    >>> import torch, transformers
    >>> import softlookup.transformers
    >>> softlookup.transformers.register()
    >>> config = transformers.LlamaConfig(
    ...     hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    ...     num_attention_heads=4, num_key_value_heads=2, vocab_size=50,
    ... )
    >>> model = transformers.LlamaForCausalLM(config).eval()
    >>> model.set_attn_implementation("softlookup")
    >>> cache = softlookup.transformers.Cache(model.config, dtype="int8")
    >>> made = model.generate(torch.arange(6)[None], cache=cache, max_new_tokens=3, do_sample=False, pad_token_id=0)
    >>> cache.get_seq_length(), cache.stores[0].dtype
    (8, 'int8')
    """

    def __init__(self, config: Any, *, dtype: str | None = None, rotate: bool | None = None) -> None:
        turned = dtype == "int4" if rotate is None else rotate
        sl.KVCache(kv_heads=1, width=2, dtype=dtype or "float32", rotate=turned)  # raises what is wrong with them
        text = config.get_text_config(decoder=True)
        kinds, options = cache_utils.get_layer_types_and_kwargs(text)
        layers: list[Any] = []
        for kind, given in zip(kinds, options, strict=True):
            stock = cache_utils.DYNAMIC_LAYER_TYPE_MAPPING[kind]
            if stock in (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer):
                layers.append(StoredLayer(text, dtype, turned, **given))
            else:
                layers.append(stock(**given))
        super().__init__(layers=layers)

    @property
    def stores(self) -> list[sl.KVCache]:
        """The stores of the layers that have begun."""
        layers = (layer for layer in self.layers if isinstance(layer, StoredLayer))
        return [layer.store for layer in layers if layer.store is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of all stores."""
        return sum(store.nbytes for store in self.stores)


@functools.cache
def _outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as torch.compile is to see it: called, never traced."""
    compiler: Any = torch.compiler
    called: Callable[..., Any] = compiler.disable(function)
    return called


@contextlib.contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Call `observer(module, stats)` after every attention inside the block, with statistics [B, Hq, N]."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | MaskPlan | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [B, Hq, N, d_k], key and value [B, Hk, M, d], result [B, N, Hq, d_v]."""
    store: sl.KVCache | None = kwargs.pop(KEYWORD, None)
    if dropout or not kwargs.keys() <= _HARMLESS or _wants_weights(module, kwargs):
        _refuse_unsupported(module, dropout, kwargs)
    if not (query.is_cpu and key.is_cpu and value.is_cpu and query.dtype in FLOATS):
        _refuse_tensors(query, key, value, s_aux, position_bias, attention_mask)
    observer = _observer.get()
    lookup: dict[str, Any] = {"scale": scaling, "softcap": softcap}
    keys = key.shape[2] if store is None else int(store.lengths[0])
    if isinstance(attention_mask, MaskPlan):
        _check_keys(attention_mask, keys)
        if store is None:
            key, value, position_bias = _cut(attention_mask, key, value, position_bias)
        if attention_mask.mask is not None or observer is not None:  # else nothing looks at positions
            lookup.update(mask=attention_mask.mask, q_start=attention_mask.q_start, k_start=attention_mask.k_start)
    elif attention_mask is None:
        lookup |= _unmasked(query.shape[2], keys, is_causal, sliding_window, store is not None)
    else:
        lookup |= _user_mask(attention_mask)
    if position_bias is not None:
        lookup["bias"] = position_bias + lookup["bias"] if "bias" in lookup else position_bias
    if s_aux is not None:
        lookup["sinks"] = s_aux if s_aux.dtype is torch.float64 else s_aux.float()
    if store is not None:
        return _attend_store(store, query, lookup, module, observer), None
    if torch.is_grad_enabled() and _needs_gradients(query, key, value, *lookup.values()):
        out = attention(query, key, value, **lookup).transpose(1, 2).contiguous()
        if observer is not None:
            _compute(query, key, value, lookup, module, observer)
    else:
        out = _compute(query, key, value, lookup, module, observer)
    return out, None


def _compute(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lookup: dict[str, Any],
    module: torch.nn.Module,
    observer: Observer | None,
) -> torch.Tensor:
    """The output [B, N, Hq, d_v], written straight into that layout, without gradients."""
    watched = observer is not None
    out, stats = compute(Problems("attention"), query, key, value, **lookup, stats=watched, heads_last=True)
    if observer is not None and stats is not None:
        observer(module, stats)
    return out


def _needs_gradients(*arguments: Any) -> bool:
    return any(isinstance(argument, torch.Tensor) and argument.requires_grad for argument in arguments)


def _wants_weights(module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether attention weights are asked for, in the call or in the config (set while another implementation ran)."""
    return bool(kwargs.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False))


def _refuse_unsupported(module: torch.nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    reasons = []
    if dropout:
        reasons.append(f"dropout={dropout} (call model.eval(), or set the config's attention dropout to 0)")
    if _wants_weights(module, kwargs):
        reasons.append(
            "output_attentions=True (softlookup.attention_weights gives the weights of chosen rows and heads; "
            "attn_implementation='eager' stores them all)"
        )
    reasons += [name for name, value in kwargs.items() if name not in _HARMLESS and value is not None]
    if reasons:
        raise NotImplementedError(
            f"softlookup's attention, called by {type(module).__name__}, does not support {'; '.join(reasons)}"
        )


def _refuse_tensors(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: torch.Tensor | MaskPlan | None
) -> None:
    tensors = [query, key, value, *(other for other in others if isinstance(other, torch.Tensor))]
    for tensor in tensors:
        if not tensor.is_cpu:
            raise ValueError(
                f"softlookup computes on CPUs and was given a tensor on {tensor.device}: "
                "load the weights and move the model with model.to('cpu')"
            )
    for tensor in tensors[:3]:
        if tensor.dtype not in FLOATS:
            raise TypeError(
                f"softlookup was given {tensor.dtype}, expected one of {', '.join(map(str, FLOATS))}: "
                "load the model with one of these dtypes"
            )


def _attend_store(
    store: sl.KVCache,
    query: torch.Tensor,
    lookup: dict[str, Any],
    module: torch.nn.Module,
    observer: Observer | None,
) -> torch.Tensor:
    """Attention over a store, written into the layout that transformers wants."""
    refuse_gradients(query, *lookup.values())
    asked = query.to(TYPES.get(store.dtype, query.dtype))
    options: dict[str, Any] = {
        name: array_of(value) if isinstance(value, torch.Tensor) else value for name, value in lookup.items()
    }
    options.pop("k_start", None)
    if options.get("mask") is None:
        options["mask"] = sl.Full()
    out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], store.value_width)
    target = array_of(out).swapaxes(1, 2)
    threads = torch.get_num_threads()
    if asked.dtype is not query.dtype:
        options["out_dtype"] = target.dtype
    if observer is None:
        store.attention(array_of(asked), out=target, threads=threads, **options)
    else:
        observer(module, store.attention(array_of(asked), out=target, threads=threads, stats=True, **options)[1])
    return out


def _check_keys(plan: MaskPlan, keys: int) -> None:
    if keys != plan.keys:
        raise ValueError(
            f"the attention mask was made for {plan.keys} keys and the layer has {keys}: the cache "
            "and the mask disagree (a cache made for another config?)"
        )


def _cut(
    plan: MaskPlan, key: torch.Tensor, value: torch.Tensor, position_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Leave out the columns that the plan hides from every query."""
    end = plan.visible_keys
    if end == plan.keys:
        return key, value, position_bias
    return key[:, :, :end], value[:, :, :end], None if position_bias is None else position_bias[..., :end]


def _unmasked(
    queries: int, keys: int, is_causal: bool | None, sliding_window: int | None, at_the_end: bool
) -> dict[str, Any]:
    """No mask is no mask (cross-attention, encoders), unless the layer itself asks for one by keyword.

    `sliding_window` is left + 1, and in a layer that is not causal also right + 1. It counts only here: as in the stock
    implementations, a mask that is given holds its window already. Queries over a store stand `at_the_end` of its keys.
    """
    width = sliding_window if sliding_window is not None and sliding_window < max(queries, keys) else None
    if width is None and (not is_causal or queries == 1):
        return {}
    if queries != keys and not at_the_end:
        raise ValueError(
            f"is_causal={is_causal} and sliding_window={sliding_window} without an attention mask leave the positions "
            f"of {queries} queries among {keys} keys open: pass an attention_mask"
        )
    if width is None:
        return {"mask": sl.Causal()}
    return {"mask": sl.Window(width - 1, 0 if is_causal else width - 1)}


def _user_mask(mask: torch.Tensor) -> dict[str, Any]:
    """A user's mask [B or 1, Hq or 1, N or 1, M], as the stock implementations read it."""
    if mask.ndim != 4:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, expected 4 axes [batch, heads or 1, queries, keys]"
        )
    if mask.dtype is torch.bool:
        return {"mask": sl.Dense(mask.numpy())}
    if mask.dtype not in FLOATS:
        raise TypeError(
            f"attention_mask has type {mask.dtype}, expected bool (True attends) or float (added to the scores): "
            "for a mask of 0 and 1 pass attention_mask.bool()"
        )
    # A float32 mask may have been filled with bfloat16's least number, which is not float32's.
    hidden = mask.detach() <= max(torch.finfo(mask.dtype).min, torch.finfo(torch.bfloat16).min)
    if not mask.requires_grad and not bool(((mask != 0) & ~hidden).any()):
        return {"mask": sl.Dense((~hidden).numpy())}
    return {"bias": mask.masked_fill(hidden, -torch.inf)}
