"""The compiled core. Private: every argument has been checked by the time it is called, and it checks nothing itself.

Type codes: 0 float32, 1 float64, 2 float16, 3 bfloat16 (arrays of its bits, uint16).
"""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

MOMENTS: int
MOST_MASK_STEPS: int

def attend(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    out: NDArray[Any],
    type: int,
    out_type: int,
    *,
    scale: float,
    softcap: float,
    bias: NDArray[Any] | None = None,
    bias_type: int = 0,
    sinks: NDArray[Any] | None = None,
    q_start: NDArray[Any],
    k_start: int,
    mask: Sequence[tuple[Any, ...]] | None = None,
    moments: NDArray[Any] | None = None,
    threads: int,
    isa: str | None = None,
) -> None: ...
def scores(
    q: NDArray[Any],
    k: NDArray[Any],
    out: NDArray[Any],
    type: int,
    *,
    scale: float,
    softcap: float,
    bias: NDArray[Any] | None = None,
    bias_type: int = 0,
    q_start: NDArray[Any],
    k_start: int,
    mask: Sequence[tuple[Any, ...]] | None = None,
    rows: NDArray[Any] | None = None,
    head_offset: int = 0,
    threads: int,
    isa: str | None = None,
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
    *,
    dlse: NDArray[Any] | None = None,
    delta: NDArray[Any],
    dq: NDArray[Any] | None = None,
    dk: NDArray[Any] | None = None,
    dv: NDArray[Any] | None = None,
    dbias: NDArray[Any] | None = None,
    scale: float,
    softcap: float,
    bias: NDArray[Any] | None = None,
    bias_type: int = 0,
    q_start: NDArray[Any],
    k_start: int,
    mask: Sequence[tuple[Any, ...]] | None = None,
    threads: int,
    isa: str | None = None,
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
