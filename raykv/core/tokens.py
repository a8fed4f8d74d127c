"""Token ids as the core keeps them: contiguous int32 arrays."""

import struct
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

TokenIds: TypeAlias = NDArray[np.int32] | Sequence[int]
"""Token ids as callers may pass them: an int32 array, or any sequence of ints."""

BlockIds: TypeAlias = NDArray[np.int32]
"""Block ids as users and kernels see them, int32 [n]."""

Index: TypeAlias = NDArray[np.int64]
"""Block ids inside a manager, int64 [n]: NumPy gathers and scatters two to three times faster by
its native index type than by int32, which it converts on every use."""

NO_INDEX: Index = np.empty(0, np.int64)
NO_INDEX.flags.writeable = False


def as_index(block_ids: Iterable[int] | BlockIds | Index) -> Index:
    """Copy block ids as int64 [n]."""
    ids = block_ids if isinstance(block_ids, np.ndarray) else list(block_ids)
    return np.array(ids, np.int64)


def as_tokens(token_ids: TokenIds) -> NDArray[np.int32]:
    """View or convert token ids as a contiguous int32 array [n]; the result may alias the input.

    Raises:
        ValueError: not one-dimensional, not integers, or outside int32.
    """
    if (
        isinstance(token_ids, np.ndarray)
        and token_ids.dtype == np.int32
        and token_ids.ndim == 1
        and token_ids.flags.c_contiguous
    ):
        return token_ids
    if isinstance(token_ids, list):
        # A third of the time that NumPy takes to convert a list; it checks types and range, too.
        try:
            return np.frombuffer(struct.pack(f"{len(token_ids)}i", *token_ids), np.int32)
        except struct.error:
            pass  # something else stands in it: below is said what
    tokens = np.asarray(token_ids)
    if tokens.size == 0:
        return np.empty(0, np.int32)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"token ids must be one row of integers, got shape {tokens.shape} of {tokens.dtype}"
        )
    limits = np.iinfo(np.int32)
    if tokens.min() < limits.min or tokens.max() > limits.max:
        raise ValueError(f"token ids must fit int32, got {tokens.min()}..{tokens.max()}")
    return np.ascontiguousarray(tokens, dtype=np.int32)
