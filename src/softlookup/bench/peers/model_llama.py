"""llama.cpp, through llama-cpp-python: the same weights as float16, flash attention, a cache in float16, q8_0 or q4_0.

The weights are the demo's own, read from the .gguf file that transformers reads too and written out as float16 by
llama.cpp's own tool for that (llama_model_quantize), once, into the user's cache. Flash attention is what its
documentation asks for with long contexts, and what a quantised cache needs.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from softlookup.bench.model.prompt import MORE_TOKENS, Prompt, Tell
from softlookup.bench.model.reader import Logits, Reader
from softlookup.bench.peers import Missing
from softlookup.demo.model_source import MODEL_NAME, find_gguf

CONTEXT_MULTIPLE = 256
KINDS = {"float16": "GGML_TYPE_F16", "q8_0": "GGML_TYPE_Q8_0", "q4_0": "GGML_TYPE_Q4_0"}
BATCH_TOKENS = 512  # read at once: llama.cpp's own n_ubatch


def prepare(prompt: Prompt, threads: int, option: str) -> Reader:
    """A model; the option names the type of the cache."""
    return LlamaReader(open_llama(len(prompt.words) + MORE_TOKENS, option, threads, prompt.tell), threads, option)


def open_llama(positions: int, cache: str, threads: int, tell: Tell, *, every_logit: bool = False) -> Any:
    """The `llama_cpp.Llama` of the demo's model, with a cache of a type for so many tokens.

    It keeps the logits of the last token that it read, or of all (`scores` [positions, vocabulary]).
    """
    import llama_cpp  # not at the top: it is an extra of its own, and this file is read without it

    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
    kind = getattr(llama_cpp, KINDS[cache])
    return llama_cpp.Llama(
        model_path=str(_half_precision(llama_cpp, find_gguf(tell), tell)),
        n_ctx=-(-positions // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE,
        n_batch=BATCH_TOKENS,
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn=True,
        type_k=kind,
        type_v=kind,
        logits_all=every_logit,
        verbose=False,
    )


class LlamaReader:
    """A model of llama.cpp and its cache."""

    def __init__(self, llama: Any, threads: int, cache: str) -> None:
        import llama_cpp

        self.dtype = cache
        self.note = f"{threads} threads, float16 weights, {cache} cache, flash attention"
        self._get_logits = llama_cpp.llama_get_logits
        self._llama = llama

    def clear(self) -> None:
        """Empty the cache."""
        self._llama.reset()

    def rewind(self, length: int) -> None:
        """What is read next then replaces what stands behind this in the cache."""
        self._llama.n_tokens = length

    def read(self, words: Sequence[int]) -> Logits:
        """Read tokens and append them to the cache."""
        self._llama.eval(words)
        found = self._get_logits(self._llama.ctx)
        return np.ctypeslib.as_array(found, shape=(self._llama.n_vocab(),)).astype(np.float32)

    def close(self) -> None:
        """Let the memory go."""
        self._llama.close()


def _half_precision(llama_cpp: Any, gguf: Path, tell: Tell) -> Path:
    """The float16 file beside the one that was downloaded; it appears there only when it is complete."""
    path = gguf.with_name(f"{MODEL_NAME}.F16.gguf")
    if not path.is_file():
        tell(f"converting {MODEL_NAME} to float16 (270 MB in {path})")
        partial = path.with_suffix(".part")
        how = llama_cpp.llama_model_quantize_default_params()
        how.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_F16
        how.allow_requantize = True
        if llama_cpp.llama_model_quantize(str(gguf).encode(), str(partial).encode(), ctypes.byref(how)):
            partial.unlink(missing_ok=True)
            raise Missing(f"llama.cpp could not convert {gguf} to float16")
        partial.replace(path)
    return path
