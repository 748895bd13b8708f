"""The same values in other memory: what a caller may hand over without a copy."""

from __future__ import annotations

import numpy as np

LAYOUTS = ("contiguous", "transposed", "width_first", "stepped", "padded", "reversed", "offset", "repeated")


def lay_out(array: np.ndarray, layout: str) -> np.ndarray:
    """An array with the values of `array` (of its first slice, if repeated) in another layout.

    transposed: [..., N, H, d] seen as [..., H, N, d]; width_first: the last axis has the largest stride;
    stepped: every second element of the last axis, every second row; padded: rows longer than they are
    wide; reversed: negative strides; offset: starts one element past an aligned address; repeated: one
    head shown for all of them, stride 0.
    """
    if layout == "contiguous" or array.size == 0:
        return np.ascontiguousarray(array)
    if layout == "transposed":
        axis = max(array.ndim - 3, 0)
        return np.ascontiguousarray(array.swapaxes(axis, -2)).swapaxes(axis, -2)
    if layout == "width_first":
        return np.ascontiguousarray(array.T).T
    if layout == "stepped":
        room = np.zeros((*array.shape[:-2], 2 * array.shape[-2], 2 * array.shape[-1]), array.dtype)
        view = room[..., ::2, ::2]
    elif layout == "padded":
        view = np.zeros((*array.shape[:-1], array.shape[-1] + 5), array.dtype)[..., 2:-3]
    elif layout == "reversed":
        view = np.zeros_like(array, order="C")[..., ::-1, ::-1]
    elif layout == "offset":
        view = np.zeros(array.size + 1, array.dtype)[1:].reshape(array.shape)
    else:
        axis = 0 if array.ndim == 2 else -3
        return np.broadcast_to(array[..., :1, :, :] if axis == -3 else array, array.shape)
    view[...] = array
    return view
