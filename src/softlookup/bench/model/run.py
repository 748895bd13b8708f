"""Runs the model workload: rounds of prefills, then rounds of a few decoding steps, everyone in turns.

The limit of a model is the time that it takes without attention (the same model on an implementation that looks nothing
up, in the same round) and the least time that its lookups take on this machine (softlookup.bench.limit). So far as the
cache is copied by transformers' own update, that is in the time without attention.

The answers. The stock float32 model, always among the contenders, decodes greedily; the others are fed its tokens, and
their logits and their own choices are compared with its. Where all choices are the same, that *is* their greedy
decoding. Ours in float32 has to give the same logits and the same tokens. All others round weights, activations or the
cache to fewer bits, each in its own way, and their differences are told, not judged, as long as they are roundings: a
tenth of the largest logit is more than any of these types explains, and less than what a wrong mask or position does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from softlookup._attention import forced_isa
from softlookup.bench.limit import MOST_SECONDS, LimitSampler
from softlookup.bench.model.prompt import MORE_TOKENS, Prompt, Tell
from softlookup.bench.model.reader import Logits, Reader, warm_up
from softlookup.bench.model.result import Result
from softlookup.bench.peers import MODELS, OURS, PEERS, SOFTLOOKUP_MODEL, STOCK, Missing, Peer
from softlookup.bench.rows import LIMITS, NO_ATTENTION, Row
from softlookup.bench.run import Options
from softlookup.bench.timing import Sampler, interleave
from softlookup.bench.workloads import Workload

STEPS = 4  # timed in one turn
ANSWER_TOKENS = 16

assert max(ANSWER_TOKENS, STEPS + 1) < MORE_TOKENS


@dataclass
class Prefill:
    """Seconds to read the prompt, which may be minutes; keeps what came out, and leaves the cache filled."""

    reader: Reader
    words: list[int]
    announce: Callable[[], None]
    logits: Logits | None = None

    def __call__(self) -> float:
        self.announce()
        self.reader.clear()
        start = time.perf_counter()
        self.logits = self.reader.read(self.words)
        return time.perf_counter() - start


@dataclass
class Decode:
    """Seconds to read one token after the prompt: the mean of a few, after one that does not count."""

    reader: Reader
    length: int
    tokens: list[int]

    def __call__(self) -> float:
        self.reader.rewind(self.length)
        self.reader.read(self.tokens[:1])
        start = time.perf_counter()
        for token in self.tokens[1:]:
            self.reader.read([token])
        return (time.perf_counter() - start) / (len(self.tokens) - 1)


def run_model(workload: Workload, options: Options, tell: Tell) -> list[Row]:
    """Rows of the prefill and of the decoding; raises DemoProblem if there is no model."""
    prompt = Prompt.of(workload, tell)
    with ExitStack() as stack:
        stack.enter_context(forced_isa(options.isa))
        readers: dict[str, Reader] = {}
        absent: dict[str, str] = {}
        for peer in _contenders(options):
            tell(f"{workload.label}: preparing {peer.name}")
            try:
                readers[peer.name] = _prepare(peer, prompt, options.threads, stack)
            except Missing as reason:
                absent[peer.name] = str(reason)
        prefill, decode = (_limits(shape, readers, options) for shape in _lookups(prompt.workload))
        prefills = {
            name: Prefill(reader, prompt.words, partial(tell, f"{workload.label}: prefill, {name}"))
            for name, reader in readers.items()
        }
        prefill_seconds = interleave(_samplers(prefill, prefills), options.rounds, options.seconds)
        tell(f"{workload.label}: comparing answers")
        length = len(prompt.words)
        tokens, logits = _answers(readers, length, {name: sampler.logits for name, sampler in prefills.items()})
        tell(f"{workload.label}: decoding, {', '.join(readers)}")
        decodes = {name: Decode(reader, length, tokens[: 1 + STEPS]) for name, reader in readers.items()}
        decode_seconds = interleave(_samplers(decode, decodes), options.rounds, options.seconds)
    logits_of = {"prefill": slice(0, 1), "decode": slice(1, None)}
    parts = (("prefill", prefill_seconds, prefill), ("decode", decode_seconds, decode))
    rows = []
    for part, taken, limits in parts:
        some = {name: found[logits_of[part]] for name, found in logits.items()}
        rows += Result(part, prompt.workload, taken, limits, some).rows(readers, absent)
    return rows


def _contenders(options: Options) -> list[Peer]:
    """Ours, the stock model, who was asked for, and the models without attention that their limits are made of."""
    asked = (PEERS[name] for name in options.peers if PEERS[name].kinds == MODELS)
    chosen = dict.fromkeys((SOFTLOOKUP_MODEL, PEERS[STOCK], *asked))
    dtypes = [dtype for dtype in NO_ATTENTION if any(peer.option.endswith(f" {dtype}") for peer in chosen)]
    nothing = [Peer(NO_ATTENTION[dtype], "model_transformers", "transformers", f"nothing {dtype}") for dtype in dtypes]
    return [*nothing, *chosen]


def _prepare(peer: Peer, prompt: Prompt, threads: int, stack: ExitStack) -> Reader:
    """Make a reader ready. What fails in a peer's own code is a reason to miss it; in transformers', an error."""
    try:
        reader: Reader = peer.prepare(prompt, threads)
        stack.callback(reader.close)
        warm_up(reader, prompt.words)
        return reader
    except Missing:
        raise
    except Exception as problem:
        if peer.name in (OURS, STOCK):
            raise
        first_line = str(problem).strip().partition("\n")[0]
        raise Missing(f"fails: {type(problem).__name__}: {first_line}") from problem


def _lookups(workload: Workload) -> tuple[Workload, Workload]:
    """All lookups of the prompt, and all lookups of one token after it, as workloads with a limit."""
    return replace(workload, kind="prefill"), replace(workload, kind="decode", queries=1, causal=False)


def _limits(workload: Workload, readers: dict[str, Reader], options: Options) -> dict[str, LimitSampler]:
    """The limits of the lookups alone, by type; what is read is allocated by PyTorch, as the caches are."""
    found = {}
    for dtype in (dtype for dtype, name in NO_ATTENTION.items() if name in readers):
        lookups = replace(workload, dtype=dtype)
        arrays = [torch.ones(lookups.cache_bytes // 4, dtype=torch.int32).numpy()] if lookups.kind == "decode" else []
        found[dtype] = LimitSampler(lookups, arrays, options.isa, options.threads)
        found[dtype].last(MOST_SECONDS)  # the calls beside it last longer
    return found


def _samplers(limits: dict[str, LimitSampler], contenders: Mapping[str, Sampler]) -> dict[str, Sampler]:
    return {**{LIMITS[dtype]: limit for dtype, limit in limits.items()}, **contenders}


def _answers(
    readers: dict[str, Reader], length: int, first: dict[str, Logits | None]
) -> tuple[list[int], dict[str, NDArray[np.float32]]]:
    """The tokens that the stock model chooses, and everyone's logits [ANSWER_TOKENS, vocabulary] along them."""
    tokens: list[int] = []
    found = {}
    for name in (STOCK, *(name for name in readers if name != STOCK and name not in NO_ATTENTION.values())):
        logits = first[name]
        assert logits is not None
        rows = [logits]
        readers[name].rewind(length)
        for step in range(ANSWER_TOKENS):
            if name == STOCK:
                tokens.append(int(rows[-1].argmax()))
            if step + 1 < ANSWER_TOKENS:
                rows.append(readers[name].read([tokens[step]]))
        found[name] = np.stack(rows)
    return tokens, found
