"""What a contender of the model workload is: a model that reads a text behind what it has read before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

WARM_UP_TOKENS = 256

Logits = NDArray[np.float32]
"""[vocabulary], of the last token that was read."""


class Reader(Protocol):
    """A model with a cache. `clear` and `rewind` also make ready what comes next, and are not timed; `read` is."""

    note: str
    """How it is configured."""
    dtype: str
    """Of the cache, and of the arithmetic of attention."""

    def clear(self) -> None:
        """Empty the cache."""

    def rewind(self, length: int) -> None:
        """Keep the first tokens in the cache alone."""

    def read(self, words: Sequence[int]) -> Logits:
        """Read tokens, one or many at once, and append them to the cache."""

    def close(self) -> None:
        """Put back what was changed for the whole process, and let the memory go."""


def warm_up(reader: Reader, words: Sequence[int]) -> None:
    """Threads, buffers and code are made by the first calls of a process: not in a measured one."""
    reader.clear()
    reader.read(words[:WARM_UP_TOKENS])
    reader.read(words[:1])
