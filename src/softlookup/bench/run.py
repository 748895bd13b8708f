"""Runs workloads: ours, the peers and the limit in turns, their answers side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import softlookup as sl
from softlookup._attention import forced_isa
from softlookup.bench.answers import TOLERANCES, difference, difference_from_float64
from softlookup.bench.limit import LimitSampler
from softlookup.bench.memory import extra_bytes
from softlookup.bench.peers import OURS, PEERS, SOFTLOOKUP, Answers, Missing, Peer, Prepared
from softlookup.bench.rows import LIMIT, UNITS, Row, ratio
from softlookup.bench.timing import CallSampler, Sampler, interleave
from softlookup.bench.workloads import Inputs, Workload
from softlookup.demo.problem import DemoProblem

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """How to run: the peers by name, rounds at most, seconds after which no round starts, threads, instruction set."""

    peers: tuple[str, ...]
    rounds: int
    seconds: float
    threads: int
    isa: str

    def contenders(self, workload: Workload) -> list[Peer]:
        """Ours, and the peers that this workload is for."""
        return [SOFTLOOKUP, *(PEERS[name] for name in self.peers if PEERS[name].is_for(workload))]


@dataclass
class Contender:
    """A contender that is ready, and what its first call returned."""

    prepared: Prepared
    sampler: CallSampler
    answer: Answers


def run_workload(workload: Workload, options: Options, tell: Tell) -> list[Row]:
    """All rows of one workload: the limit, ours, then the peers; `tell` hears what is being done."""
    if workload.kind == "memory":
        tell(f"{workload.label}: in a process of its own")
        return [_memory_row(workload, options)]
    if workload.kind == "model":
        return _model_rows(workload, options, tell)
    try:
        inputs = Inputs.of(workload)
    except ImportError:
        return [_row(workload, OURS, missing="bfloat16 arrays need ml_dtypes: pip install 'softlookup[bench]'")]
    with ExitStack() as stack:
        stack.enter_context(forced_isa(options.isa))
        limit = LimitSampler(workload, (inputs.k, inputs.v), options.isa, options.threads)
        ready: dict[str, Contender] = {}
        absent: dict[str, str] = {}
        contenders = options.contenders(workload)
        for peer in contenders:
            tell(f"{workload.label}: preparing {peer.name}")
            try:
                ready[peer.name] = _prepare(peer, inputs, options.threads, stack)
            except Missing as reason:
                absent[peer.name] = str(reason)
        tell(f"{workload.label}: timing {', '.join(ready)}")
        if OURS in ready:
            limit.last(ready[OURS].sampler.bunch_seconds())
        samplers: dict[str, Sampler] = {LIMIT: limit} if workload.kind != "call" else {}
        samplers |= {name: contender.sampler for name, contender in ready.items()}
        samples = interleave(samplers, options.rounds, options.seconds)
        rows = [
            _row(workload, peer.name, missing=absent[peer.name])
            if peer.name in absent
            else _timed_row(inputs, peer.name, ready, samples, limit)
            for peer in contenders
        ]
        if LIMIT in samples:
            samples[LIMIT].append(limit())
            rows.insert(0, _limit_row(workload, limit, samples))
        return rows


def _prepare(peer: Peer, inputs: Inputs, threads: int, stack: ExitStack) -> Contender:
    """Make a peer ready and ask it once. What fails in a peer's own code is a reason to miss it; in ours, an error."""
    try:
        prepared = peer.prepare(inputs, threads)
        stack.callback(prepared.close)
        with prepared.around():
            answers = prepared.answers(prepared.call())
        return Contender(prepared, CallSampler(prepared.call, prepared.around), answers)
    except Missing:
        raise
    except Exception as problem:
        if peer.module == "ours":
            raise
        first_line = str(problem).strip().partition("\n")[0]
        raise Missing(f"fails: {type(problem).__name__}: {first_line}") from problem


def _row(workload: Workload, contender: str, **fields: Any) -> Row:
    return Row(workload.name, workload.detail, workload.dtype, workload.kind, contender, **fields)


def _timed_row(
    inputs: Inputs, name: str, ready: dict[str, Contender], samples: dict[str, list[float]], limit: LimitSampler
) -> Row:
    workload, contender = inputs.workload, ready[name]
    own = samples[name]
    seconds = statistics.median(own)
    ours = ready.get(OURS)
    from_ours = None
    gap: float | None
    if name == OURS:
        gap = difference_from_float64(inputs, contender.answer)
    else:
        from_ours = None if ours is None else difference(contender.answer, ours.answer)
        exact = contender.prepared.exact
        gap = from_ours if exact is None else difference(contender.answer, exact)
    return _row(
        workload,
        name,
        seconds=seconds,
        samples_seconds=tuple(own),
        rate=_rate(workload, seconds, contender.prepared.cache_bytes),
        unit=UNITS[workload.kind],
        ours_is_faster=ratio(own, samples[OURS]) if OURS in samples else None,
        share_of_limit=_share_of_limit(contender.prepared, own, samples, limit),
        difference=gap,
        difference_from_ours=from_ours,
        agrees=None if gap is None else gap <= TOLERANCES.get(contender.prepared.codes, TOLERANCES[workload.dtype]),
        note=contender.prepared.note,
    )


def _share_of_limit(
    prepared: Prepared, own: list[float], samples: dict[str, list[float]], limit: LimitSampler
) -> float | None:
    if LIMIT not in samples:
        return None
    if not prepared.codes:
        return ratio(samples[LIMIT], own)
    least = limit.seconds_of_codes(prepared.codes, prepared.cache_bytes)
    return None if least is None else least / statistics.median(own)


def _limit_row(workload: Workload, limit: LimitSampler, samples: dict[str, list[float]]) -> Row:
    seconds = statistics.median(samples[LIMIT])
    return _row(
        workload,
        LIMIT,
        seconds=seconds,
        samples_seconds=tuple(samples[LIMIT]),
        rate=_rate(workload, seconds, workload.cache_bytes),
        unit=UNITS[workload.kind],
        ours_is_faster=ratio(samples[LIMIT], samples[OURS]) if OURS in samples else None,
        limits=limit.medians(),
        note="; ".join(limit.doubts()),
    )


def _model_rows(workload: Workload, options: Options, tell: Tell) -> list[Row]:
    try:
        from softlookup.bench.model.run import run_model
    except ModuleNotFoundError as problem:
        return [_row(workload, OURS, missing=f"{problem.name} is not installed: pip install 'softlookup[bench]'")]
    try:
        return run_model(workload, options, tell)
    except DemoProblem as problem:
        return [_row(workload, OURS, missing=str(problem))]


def _memory_row(workload: Workload, options: Options) -> Row:
    backward = workload.detail.startswith("backward")
    if backward and not hasattr(sl, "attention_vjp"):
        return _row(workload, OURS, missing="this version has no attention_vjp")
    extra = extra_bytes(
        workload.queries, workload.width, threads=options.threads, isa=options.isa, backward=backward
    )  # fmt: skip
    return _row(workload, OURS, extra_bytes=extra, note=f"with statistics, {extra / workload.queries:.0f} bytes a row")


def _rate(workload: Workload, seconds: float, cache_bytes: int) -> float:
    if workload.kind == "decode":
        return cache_bytes / seconds / 1e9
    return seconds * 1e6 if workload.kind == "call" else workload.operations / seconds / 1e9
