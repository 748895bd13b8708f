"""softlookup: exact softmax attention on CPUs.

Attention is a lookup you can differentiate. Shapes, masks, alignment, empty rows, NaN and the order of scale,
softcap, bias and mask have one meaning everywhere; see `attention`. Nothing here loads a framework: adapters are
imported on demand.

Examples
--------
>>> import numpy as np
>>> import softlookup as sl
>>> x = np.eye(3, dtype=np.float32)
>>> sl.attention(x, x, x, mask=sl.Causal(), scale=0.0).round(4)
array([[1.    , 0.    , 0.    ],
       [0.5   , 0.5   , 0.    ],
       [0.3333, 0.3333, 0.3333]], dtype=float32)
"""

from softlookup._attention import attention, attention_weights
from softlookup._gradients import Grads, Pullback, attention_vjp
from softlookup._kv_cache import KVCache
from softlookup._lookup import lookup
from softlookup._masks import Causal, Dense, Full, Lengths, Mask, Predicate, Window
from softlookup._merge import merge
from softlookup._stats import Conventions, Stats
from softlookup._threads import get_threads, info, set_threads, threads

__all__ = [
    "Causal",
    "Conventions",
    "Dense",
    "Full",
    "Grads",
    "KVCache",
    "Lengths",
    "Mask",
    "Predicate",
    "Pullback",
    "Stats",
    "Window",
    "attention",
    "attention_vjp",
    "attention_weights",
    "get_threads",
    "info",
    "lookup",
    "merge",
    "set_threads",
    "threads",
]
