"""Copies of rows of one two-dimensional array, on the CPU and on CUDA; ids are checked before."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

# On CUDA a copy passes through scratch memory in pieces of at most this size: large enough to
# hide kernel launches, small beside the pool. CuPy's scatter also counts elements in int32 and
# would write elsewhere beyond 2**31 of them.
PIECE_BYTES = 256 << 20


def rows_per_piece(storage: Any) -> int:
    """Rows of an array ``[n, elements]`` that one piece holds; at least 1."""
    return max(1, PIECE_BYTES // int(storage.shape[1] * storage.itemsize))


def read_rows(xp: Any, storage: Any, ids: NDArray[np.int64], out: Any = None) -> Any:
    """Gather rows into contiguous memory.

    Args:
        xp: The array module of the storage.
        storage: Array ``[n, elements]``.
        ids: Rows, on the host; may repeat.
        out: Contiguous array ``[len(ids), elements]`` to fill; a new one if None.

    Returns:
        ``out``, or the new array.
    """
    if out is None:
        out = xp.empty((ids.size, storage.shape[1]), storage.dtype)
    if not ids.size:
        return out
    if xp is np:
        # With the default mode NumPy fills a hidden copy of out first: a third of the speed.
        np.take(storage, ids, axis=0, out=out, mode="clip")
    else:
        xp.take(storage, xp.asarray(ids), axis=0, out=out)
    return out


def write_rows(xp: Any, storage: Any, ids: NDArray[np.int64], rows: Any) -> None:
    """Scatter rows ``[len(ids), elements]``, which lie elsewhere, to different ids."""
    step = ids.size if xp is np else rows_per_piece(storage)
    for start in range(0, ids.size, max(step, 1)):
        piece = slice(start, start + step)
        storage[xp.asarray(ids[piece])] = rows[piece]


def copy_rows(xp: Any, storage: Any, src: NDArray[np.int64], dst: NDArray[np.int64]) -> None:
    """Copy rows within an array, where no source is a target and targets differ.

    The scratch memory is taken before the first write, so that a lack of it changes nothing.
    """
    if xp is np:
        # One pass over memory: 14 GB/s where gathering and scattering 360 KiB blocks reached 8.
        for source, target in zip(src.tolist(), dst.tolist(), strict=True):
            storage[target] = storage[source]
        return
    step = rows_per_piece(storage)
    scratch = xp.empty((min(step, src.size), storage.shape[1]), storage.dtype)
    for start in range(0, src.size, step):
        piece = slice(start, start + step)
        rows = scratch[: src[piece].size]
        read_rows(xp, storage, src[piece], rows)
        write_rows(xp, storage, dst[piece], rows)
