"""What turns products into weights, all checked, as the core takes it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from softlookup._mask_algebra import Mask, Step
from softlookup._masks import Predicate

Starts = int | NDArray[np.int64]  # one for all batch items, or one for each


class Scoring(NamedTuple):
    """The scoring of one call. The core reads the fields up to the program, in this order."""

    scale: float
    softcap: float = 0.0  # 0.0 for none
    bias: NDArray[Any] | None = None  # broadcasts to the scores
    bias_code: int = 0
    sinks: NDArray[np.float64] | None = None
    q_start: Starts = 0
    k_start: int = 0
    program: list[Step] | None = None  # the mask's, for the sizes of the call
    mask: Mask | None = None
    placed: bool = True  # whether absolute positions are known

    @property
    def may_fail(self) -> bool:
        """Whether the core calls functions of the user, which may raise."""
        return self.mask is not None and any(isinstance(leaf, Predicate) for leaf in self.mask._leaves())
