"""Checksums of blocks: 64 bits that tell damage, not malice."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

NO_CHECKSUM = 0


def block_checksum(row: Any) -> int:
    """The XXH3 checksum of one block; never ``NO_CHECKSUM``.

    Python's other threads run meanwhile.

    Args:
        row: Contiguous memory on the host, such as a row of an array; of any dtype.

    Raises:
        ValueError: It is not contiguous, or not in host memory.
    """
    # A block whose checksum is 0 shares that of another one: 1 in 2**64.
    return int(xxh3_64_intdigest(row)) or 1


def block_checksums(rows: NDArray[Any] | Iterable[Any]) -> NDArray[np.uint64]:
    """The checksums of many blocks.

    Args:
        rows: An array ``[n, ...]`` whose rows are contiguous, or the rows.

    Returns:
        Array ``[n]``; see ``block_checksum``.

    Raises:
        ValueError: See ``block_checksum``.
    """
    return np.fromiter(map(block_checksum, rows), np.uint64)
