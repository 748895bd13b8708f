"""The compiled core. Private: every argument has been checked by the time it is called, and it checks nothing itself.

`out` has all leading axes; the leading axes and heads of other arrays, and all axes of a bias or a mask, broadcast to
it as in NumPy. Type codes: 0 float32, 1 float64, 2 float16, 3 bfloat16 (arrays of its bits, uint16).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from softlookup._pages import PageShape
from softlookup._scoring import Scoring, Starts

MOMENTS: int
MOST_MASK_STEPS: int
PAGE_KEYS: int
GROUP_COLUMNS: int

def attend(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    out: NDArray[Any],
    type: int,
    out_type: int,
    scoring: Scoring,
    moments: NDArray[Any] | None,
    threads: int,
    isa: str | None,
) -> None: ...
def page_head_bytes(shape: PageShape, isa: str | None) -> int: ...
def append(
    shape: PageShape,
    table: NDArray[np.int64],
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    k: NDArray[Any],
    v: NDArray[Any] | None,
    type: int,
    key_means: NDArray[np.float32] | None,
    key_factors: NDArray[np.float32] | None,
    value_means: NDArray[np.float32] | None,
    value_factors: NDArray[np.float32] | None,
    threads: int,
    isa: str | None,
) -> bool: ...
def rotate(numbers: NDArray[np.float32], block: int, threads: int) -> None: ...
def move_rows(
    shape: PageShape,
    table: NDArray[np.int64],
    batch: int,
    first: int,
    keys: NDArray[Any],
    values: NDArray[Any] | None,
    key_scales: NDArray[np.float32] | None,
    value_scales: NDArray[np.float32] | None,
    into_pages: bool,
    threads: int,
    isa: str | None,
) -> None: ...
def attend_cache(
    q: NDArray[Any],
    out: NDArray[Any],
    type: int,
    out_type: int,
    scoring: Scoring,
    moments: NDArray[Any] | None,
    shape: PageShape,
    table: NDArray[np.int64],
    key_heads: int,
    keys: int,
    key_means: NDArray[np.float32] | None,
    key_factors: NDArray[np.float32] | None,
    value_means: NDArray[np.float32] | None,
    value_factors: NDArray[np.float32] | None,
    threads: int,
    isa: str | None,
) -> None: ...
def scores(
    q: NDArray[Any],
    k: NDArray[Any],
    out: NDArray[Any],
    type: int,
    scoring: Scoring,
    rows: NDArray[Any],
    head_offset: int,
    threads: int,
    isa: str | None,
) -> None: ...
def differentiate(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    out: NDArray[Any],
    dout: NDArray[Any],
    top: NDArray[Any],
    share: NDArray[Any],
    type: int,
    out_type: int,
    dout_type: int,
    gradient_type: int,
    scoring: Scoring,
    dlse: NDArray[Any] | None,
    delta: NDArray[Any],
    dq: NDArray[Any] | None,
    dk: NDArray[Any] | None,
    dv: NDArray[Any] | None,
    dbias: NDArray[Any] | None,
    threads: int,
    isa: str | None,
) -> None: ...
def statistics(
    moments: NDArray[Any],
    sinks: NDArray[Any] | None,
    q_start: Starts,
    k_start: int,
    numbers: NDArray[Any],
    type: int,
    lse: NDArray[Any],
    counts: NDArray[Any],
) -> None: ...
def normalizers(
    moments: NDArray[Any],
    sinks: NDArray[Any] | None,
    lse: NDArray[Any],
    top: NDArray[Any],
    share: NDArray[Any],
) -> None: ...
def isas() -> list[str]: ...
def compiled_isas() -> list[str]: ...
def default_isa() -> str: ...
def thread_backend() -> str: ...
def compiler() -> str: ...

MOST_LIMIT_ROUNDS: int

def limit_loops(isa: str) -> list[tuple[str, int, int]]: ...
def run_limit_loop(isa: str, index: int, rounds: int, threads: int) -> tuple[float, bool]: ...
def read_unrolls(isa: str) -> tuple[int, int]: ...
def run_read_loop(isa: str, index: int, array: NDArray[Any], threads: int) -> tuple[float, int]: ...
