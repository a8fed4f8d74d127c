"""How fast blocks move between a rank's memory and the host slab, against a plain copy.

Both sides are host memory here, and blocks are scattered on both. The plain copy moves as many
bytes between the same two stretches of memory in one NumPy call. Rounds of all alternate, so that
what else the machine does hits each of them. A batch is over in milliseconds, though, and on a
busy machine it may take as long until the thread that copies it gets a processor; so the processor
time is measured too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.memory.block_copier import BlockCopier
from raykv.memory.copy_batches import Direction
from raykv.memory.host_slab import HostSlab
from raykv.memory.room import allocate_zeros

BATCH_BYTES = 64 << 20
BATCH_SIZES = tuple(mib << 20 for mib in (1, 4, 16, 64, 256))
BLOCK_SIZES = (256 << 10, 512 << 10, 1 << 20, 2 << 20)
_DIRECTIONS: tuple[Direction, ...] = ("offload", "load")
# Of what a plain copy reaches, without checksums, in batches of at least BATCH_BYTES: in smaller
# ones it counts how soon the thread gets a processor.
TARGET_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Figure:
    """One kind of batch.

    Attributes:
        direction: ``"offload"`` or ``"load"``.
        batch_mib: size of the batch.
        block_kib: size of a block.
        with_checksums: whether they were computed, or compared.
        gb_per_s: median, 10**9 bytes a second, from submission until it is known to be done.
        plain_gb_per_s: the plain copy's median.
        share: of the plain copy's speed.
        cpu_share: the same of bytes per second of processor time, of all threads.
        target_share: what the shares should reach; None where there is no target.
        page_kind: of the slab.
    """

    direction: str
    batch_mib: float
    block_kib: int
    with_checksums: bool
    gb_per_s: float
    plain_gb_per_s: float
    share: float
    cpu_share: float
    target_share: float | None
    page_kind: str

    def as_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)


def measure(
    batch_sizes: tuple[int, ...] = (BATCH_BYTES,),
    block_sizes: tuple[int, ...] = BLOCK_SIZES,
    num_rounds: int = 15,
) -> Iterator[Figure]:
    """Measure both directions, with and without checksums.

    All memory was written before, on both sides, so no page is taken while the clock runs.

    Args:
        batch_sizes: bytes of one batch; multiples of the block sizes.
        block_sizes: bytes.
        num_rounds: rounds of each.
    """
    for batch_bytes, block_bytes in product(batch_sizes, block_sizes):
        num_blocks = 2 * (batch_bytes // block_bytes) + 1
        (memory,) = allocate_zeros(
            [((num_blocks, block_bytes), "uint8")], "cpu",
            what=f"{num_blocks} blocks of {block_bytes} bytes", remedy="measure smaller batches",
        )  # fmt: skip
        memory[:] = np.random.default_rng(0).integers(0, 256, memory.shape, np.uint8)
        with HostSlab.create(num_blocks, block_bytes) as slab, BlockCopier(slab) as copier:
            slab.populate()
            for direction in _DIRECTIONS:
                yield from _figures(copier, memory, direction, batch_bytes, num_rounds)


def _figures(
    copier: BlockCopier,
    memory: NDArray[np.uint8],
    direction: Direction,
    batch_bytes: int,
    num_rounds: int,
) -> Iterator[Figure]:
    slab = copier.slab
    num_blocks = len(memory)
    length = batch_bytes // slab.block_bytes
    random = np.random.default_rng(1)
    blocks, rows = (1 + random.permutation(num_blocks - 1)[:length] for _ in range(2))
    slab.reassign(blocks)
    source, target = memory, slab.blocks
    if direction == "load":
        _copy(copier, "offload", memory, rows, blocks, with_checksums=True)
        source, target = target, source
    workloads: dict[bool | None, Callable[[], None]] = {
        None: lambda: np.copyto(target[1 : 1 + length], source[1 : 1 + length])
    }
    for with_checksums in (False, True):
        workloads[with_checksums] = lambda checked=with_checksums: _copy(  # type: ignore[misc]
            copier, direction, memory, rows, blocks, with_checksums=checked
        )
    times: dict[bool | None, list[tuple[float, float]]] = {key: [] for key in workloads}
    for _ in range(num_rounds):
        for key, workload in workloads.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            workload()
            times[key].append((time.perf_counter() - start, time.process_time() - cpu_start))
    medians = {key: np.median(times[key], axis=0).tolist() for key in times}
    has_target = batch_bytes >= BATCH_BYTES
    for with_checksums in (False, True):
        yield Figure(
            direction,
            batch_bytes / 2**20,
            slab.block_bytes >> 10,
            with_checksums,
            gb_per_s=round(batch_bytes / medians[with_checksums][0] / 1e9, 2),
            plain_gb_per_s=round(batch_bytes / medians[None][0] / 1e9, 2),
            share=round(medians[None][0] / medians[with_checksums][0], 2),
            cpu_share=round(medians[None][1] / medians[with_checksums][1], 2),
            target_share=TARGET_SHARE if has_target and not with_checksums else None,
            page_kind=slab.page_kind,
        )


def _copy(
    copier: BlockCopier,
    direction: Direction,
    memory: NDArray[np.uint8],
    rows: NDArray[np.int64],
    blocks: NDArray[np.int64],
    *,
    with_checksums: bool,
) -> None:
    ticket = copier.submit(
        direction, memory, rows, blocks,
        generations=copier.slab.generations[blocks], with_checksums=with_checksums,
    )  # fmt: skip
    result = ticket.wait()
    assert result is not None, "it waited"
    assert result.is_ok.all(), result.error
