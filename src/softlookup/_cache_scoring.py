"""How the scores of a cache are made: the scoring of the call, with what the cache itself hides.

The keys of a row stand at 0, 1, ..., its queries at its last positions. A row hides what lies past its length, and a
window hides what it may have given back: both become steps of the mask's program, and only where they hide something.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softlookup import _core
from softlookup._array_checks import Shapes
from softlookup._cache_checks import CacheConfig
from softlookup._checks import scoring_of
from softlookup._mask_algebra import Step
from softlookup._masks import Causal
from softlookup._problems import Problems
from softlookup._scoring import Scoring, Starts

Lengths = NDArray[np.int64]

_CAUSAL = Causal()
_CAUSAL_STEP: Step = ("window", None, 0)


def plain_scoring(config: CacheConfig, lengths: Lengths, queries: int) -> Scoring:
    """The scoring of a call without options."""
    starts = _last_positions(lengths, queries)
    program: list[Step] | None = None
    if queries > 1 or not isinstance(starts, int):  # a single query at the last position sees every key anyhow
        program = [_CAUSAL_STEP]
    program = _joined(program, _window_steps(config, lengths))
    return Scoring(1.0 / math.sqrt(config.width), q_start=starts, program=program, mask=_CAUSAL)


def cache_scoring(
    problems: Problems, config: CacheConfig, lengths: Lengths, code: int | None, sizes: Shapes, options: dict[str, Any]
) -> Scoring:
    """The checked scoring of a call with options: mask, bias, scale, softcap, sinks and q_start."""
    mask = _CAUSAL if options["mask"] is None else options["mask"]
    starts = options["q_start"]
    if starts is None:
        last = _last_positions(lengths, sizes.queries)
        starts = last if isinstance(last, int) else last.reshape(sizes.leading)
    scoring = scoring_of(
        problems, code, sizes, mask, options["bias"], options["scale"], options["softcap"], options["sinks"], starts, 0
    )
    program = scoring.program
    if lengths.size and lengths.min() != lengths.max():
        program = _joined(program, [("lengths", np.ascontiguousarray(lengths), None, "right")])
    program = _joined(program, _window_steps(config, lengths))
    if program is not None and len(program) > _core.MOST_MASK_STEPS:
        found = f"{len(program)} steps, with those that keep to the rows' lengths and the window"
        fix = "write it as one softlookup.Predicate or softlookup.Dense"
        problems.value("mask", found, f"at most {_core.MOST_MASK_STEPS}", fix)
    return scoring._replace(program=program)


def _last_positions(lengths: Lengths, queries: int) -> Starts:
    """Where the first of the last queries of each row stands."""
    first = int(lengths[0])
    if (lengths == first).all():
        return first - queries
    return lengths - queries


def _window_steps(config: CacheConfig, lengths: Lengths) -> list[Step]:
    if config.window is None or int(lengths.max()) <= config.window:
        return []
    steps: list[Step] = [("window", config.window - 1, None)]
    if config.keep_first:
        steps += [("lengths", np.array([config.keep_first]), None, "right"), ("or",)]
    return steps


def _joined(program: list[Step] | None, steps: list[Step]) -> list[Step] | None:
    """What both let through."""
    if not steps:
        return program
    return [*program, *steps, ("and",)] if program else steps
