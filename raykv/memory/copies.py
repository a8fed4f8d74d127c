"""Batched copies of whole blocks, on the CPU and on CUDA through the array module.

Ids are given on the host. All arguments are checked before anything is written, so a refused
batch changes nothing. On CUDA the copies run on CuPy's current stream and the call does not wait
for them; the blocks named must stay referenced until an event recorded after the call has passed.
"""

from typing import Any

import numpy as np

from raykv.memory.buffers import KVBuffers
from raykv.memory.ids import Ids, checked_ids, checked_targets
from raykv.memory.rows import copy_rows, read_rows, write_rows


def copy_blocks(buffers: KVBuffers, src_ids: Ids, dst_ids: Ids) -> None:
    """Copy blocks within one buffer, block ``src_ids[i]`` to block ``dst_ids[i]``.

    All sources are read before any destination is written, whatever the order of the pairs. So
    chains (1 to 2, 2 to 3) and swaps do what they say; such batches need scratch memory of their
    own size, others at most 256 MiB or one block, and on the CPU none.

    Args:
        buffers: The memory to change.
        src_ids: Blocks to read; may repeat, may be the padding block.
        dst_ids: Blocks to overwrite; all different, never the padding block 0.

    Raises:
        ValueError: An id is out of range, the lengths differ, or a destination is the padding
            block or repeated. Nothing was written.
    """
    src = checked_ids(src_ids, buffers.num_blocks, "src_ids")
    dst = checked_targets(dst_ids, buffers.num_blocks, "dst_ids")
    if src.size != dst.size:
        raise ValueError(f"{src.size} src_ids do not pair with {dst.size} dst_ids")
    moves = src != dst
    src, dst = src[moves], dst[moves]
    if np.isin(src, dst).any():
        write_rows(buffers.xp, buffers.storage, dst, gather_blocks(buffers, src))
    else:
        copy_rows(buffers.xp, buffers.storage, src, dst)


def gather_blocks(buffers: KVBuffers, ids: Ids, out: Any = None) -> Any:
    """Read blocks into contiguous memory on the same device; the buffer is not changed.

    Args:
        buffers: The memory to read.
        ids: ``n`` blocks, in the order of the result; may repeat.
        out: Contiguous array ``[n, block_elements]`` of the storage's dtype to fill; a new one
            if None.

    Returns:
        Array ``[n, block_elements]``: ``out``, or the new one.

    Raises:
        ValueError: An id is out of range, or ``out`` has another shape or dtype, lies on another
            device, is not contiguous, is read-only, or is part of the buffer. Nothing was
            written.
    """
    blocks = checked_ids(ids, buffers.num_blocks, "ids")
    if out is not None:
        _check_rows(buffers, out, blocks.size, "out")
        if not out.flags.c_contiguous:
            raise ValueError(f"out has strides {out.strides}, but must be contiguous")
        if buffers.device == "cpu" and not out.flags.writeable:
            raise ValueError(f"out of shape {out.shape} is read-only")
    return read_rows(buffers.xp, buffers.storage, blocks, out)


def scatter_blocks(buffers: KVBuffers, ids: Ids, blocks: Any) -> None:
    """Overwrite blocks with rows from the same device.

    Args:
        buffers: The memory to change.
        ids: ``n`` blocks to overwrite; all different, never the padding block 0.
        blocks: Array ``[n, block_elements]`` of the storage's dtype; row i goes to ``ids[i]``.

    Raises:
        ValueError: An id is out of range, is the padding block or repeated, or ``blocks`` has
            another shape or dtype, lies on another device, or is part of the buffer (that is
            ``copy_blocks``). Nothing was written.
    """
    dst = checked_targets(ids, buffers.num_blocks, "ids")
    _check_rows(buffers, blocks, dst.size, "blocks")
    write_rows(buffers.xp, buffers.storage, dst, blocks)


def _check_rows(buffers: KVBuffers, rows: Any, num_rows: int, what: str) -> None:
    if not isinstance(rows, buffers.xp.ndarray):
        raise ValueError(  # noqa: TRY004 - one error class for every misfit of a batch
            f"{what} is a {type(rows).__module__}.{type(rows).__qualname__}, but the buffer on"
            f" {buffers.device} needs a {buffers.xp.__name__}.ndarray"
        )
    shape = (num_rows, buffers.spec.block_elements)
    if rows.shape != shape or rows.dtype != buffers.storage.dtype:
        raise ValueError(
            f"{what} is {rows.dtype} of shape {rows.shape}, but must be"
            f" {buffers.storage.dtype} of shape {shape}"
        )
    if buffers.xp.may_share_memory(rows, buffers.storage):
        raise ValueError(f"{what} of shape {rows.shape} is part of the buffer: use copy_blocks")
