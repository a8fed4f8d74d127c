"""The one check of block, slot and address numbers that come from outside."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = Sequence[int] | NDArray[np.integer]


def checked_ids(ids: Ids, limit: int, what: str) -> NDArray[np.int64]:
    """Return ids as an int64 array on the host.

    Args:
        ids: Whole numbers, one-dimensional, on the host; may be empty.
        limit: First number that is too large.
        what: Name of the argument, for messages.

    Returns:
        Array ``[n]``.

    Raises:
        ValueError: The ids are not one-dimensional whole numbers in ``[0, limit)``.
    """
    array = np.asarray(ids)
    if array.ndim != 1:
        raise ValueError(f"{what} has shape {array.shape}, but must be one-dimensional")
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{what} has dtype {array.dtype}, but must hold whole numbers")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= limit:
        raise ValueError(f"{what} spans {low} to {high}, but must lie in [0, {limit})")
    return array.astype(np.int64, copy=False)


def checked_targets(
    ids: Ids, limit: int, what: str, *, padding: tuple[int, ...] = (0,), unit: str = "block"
) -> NDArray[np.int64]:
    """Return ids that a batch may write, as an int64 array on the host.

    Args:
        ids: See ``checked_ids``.
        limit: First number that is too large.
        what: Name of the argument, for messages.
        padding: Ids that are never written.
        unit: What an id stands for, for messages.

    Returns:
        Array ``[n]``.

    Raises:
        ValueError: ``checked_ids`` refuses them, one is padding, or one repeats.
    """
    targets = checked_ids(ids, limit, what)
    unique, counts = np.unique(targets, return_counts=True)
    for each in padding:
        if (targets == each).any():
            raise ValueError(f"{what} holds {each}, the padding {unit}, which is never overwritten")
    if unique.size < targets.size:
        worst = counts.argmax()
        raise ValueError(
            f"{what} holds {unit} {unique[worst]} {counts[worst]} times, but a batch may write a"
            f" {unit} only once"
        )
    return targets
