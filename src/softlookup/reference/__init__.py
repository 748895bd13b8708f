"""The float64 oracle: softmax attention and its gradients, written the slow, obvious way.

Policy. Everything is float64 NumPy and every N x M matrix is stored, so that each line can be read beside its formula.
It shares no code with the library and never imports the compiled core: the tests compare the two. (Its imports are
relative, so that it also runs away from the library.) A hidden key is *selected* away, never multiplied by zero,
because 0 * NaN is NaN. Arguments are trusted beyond what broadcasting itself refuses.

Shapes in brackets: `...` leading axes, `Hq` query heads, `Hk` key and value heads (query head h reads key head
h // (Hq / Hk)), `N` queries, `M` keys, `d_k` and `d_v` the widths.
"""

from ._attention import DenseMask, ReferenceStats, attention
from ._gradients import ReferenceGradients, gradients
from ._lookup import lookup, merge

__all__ = ["DenseMask", "ReferenceGradients", "ReferenceStats", "attention", "gradients", "lookup", "merge"]
