"""The host tier's memory: one slab of blocks per node, mapped by all of the node's ranks."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import struct
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from raykv.errors import ConfigError, IntegrityError, TransferError
from raykv.memory.checksums import NO_CHECKSUM
from raykv.memory.ids import Ids, checked_targets
from raykv.memory.shared_region import PageKind, SharedRegion, page_kind

# What it is and which layout, blocks, bytes per block, token.
_HEADER = struct.Struct("<8sQQ16s")
_MAGIC = b"raykv-1\n"
# Blocks start on a page, as devices that read or write the slab themselves may want.
_PAGE_BYTES = 4096
_HOST_REGISTER_PORTABLE = 1


@dataclass(frozen=True, slots=True)
class SlabDescriptor:
    """Where a process finds a slab, as long as the process named lives and has it open.

    Attributes:
        pid: A process that has the slab open.
        fd: Its file descriptor.
        token: The slab's own, so that a pid that was used again fools nobody.
        num_blocks: Blocks, with the padding block.
        block_bytes: Bytes of a block.
    """

    pid: int
    fd: int
    token: bytes = field(repr=False)
    num_blocks: int
    block_bytes: int


class HostSlab:
    """Blocks of KV in memory that the processes of a node share.

    One process creates it, others attach. Linux frees it when the last one is gone, SIGKILL of all
    of them included; until then whoever has it mapped reads and writes it, its creator alive or
    not. Block 0 is the padding block, which nobody writes.

    Who gives a block another content first calls ``reassign``. Who read a block compares its
    generation after the copy with the one that it was told: if they differ, what was copied may be
    anything. Nothing else is ordered between processes, and who owns which block is kept elsewhere.

    Attributes:
        num_blocks: Blocks, with the padding block.
        block_bytes: Bytes of a block.
        page_kind: ``"hugetlb"`` (reserved huge pages), ``"transparent"`` (huge pages as the kernel
            finds them; told by the first page) or ``"small"``.
        blocks: Shared uint8 array ``[num_blocks, block_bytes]``; of no blocks after ``close``.
        generations: Shared uint64 array ``[num_blocks]``: how often each block was reassigned.
        checksums: Shared uint64 array ``[num_blocks]``, of each block's content; ``NO_CHECKSUM``
            where it was not computed, or the content is not complete.
    """

    def __init__(self, region: SharedRegion, num_blocks: int, block_bytes: int) -> None:
        # Made by create() and attach().
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._region: SharedRegion | None = region
        self._token = bytes(region.memory[_HEADER.size - 16 : _HEADER.size])
        self._unpin: Any = None
        whole = np.frombuffer(region.memory, np.uint8)
        per_block = whole[64 : 64 + 16 * num_blocks].view(np.uint64).reshape(2, num_blocks)
        self.generations: NDArray[np.uint64] = per_block[0]
        self.checksums: NDArray[np.uint64] = per_block[1]
        start = _blocks_offset(num_blocks)
        end = start + num_blocks * block_bytes
        self.blocks: NDArray[np.uint8] = whole[start:end].reshape(num_blocks, block_bytes)
        self.page_kind: PageKind = page_kind(whole.ctypes.data)

    @classmethod
    def create(cls, num_blocks: int, block_bytes: int) -> HostSlab:
        """Make a slab of zeros.

        Its memory is taken page by page as blocks are first written, unless huge pages are reserved
        on this machine: those are taken at once. See ``populate``.

        Args:
            num_blocks: Blocks to hold; at least 2, as block 0 is padding.
            block_bytes: Bytes of a block.

        Raises:
            ConfigError: A number is too small, the slab does not fit into the memory that is
                available now or into the control group's limit, or the system is not Linux.
        """
        if num_blocks < 2:
            raise ConfigError(
                f"host.num_blocks is {num_blocks}, but block 0 is padding: give at least 2"
            )
        if block_bytes < 1:
            raise ConfigError(f"a host block has {block_bytes} bytes: give at least 1")
        token = secrets.token_bytes(16)
        region = SharedRegion.create(
            _name(token),
            _blocks_offset(num_blocks) + num_blocks * block_bytes,
            what=f"{num_blocks} host blocks of {block_bytes} bytes",
        )
        region.memory[: _HEADER.size] = _HEADER.pack(_MAGIC, num_blocks, block_bytes, token)
        return cls(region, num_blocks, block_bytes)

    @classmethod
    def attach(cls, descriptor: SlabDescriptor) -> HostSlab:
        """Map a slab that another process of this node has open.

        Raises:
            TransferError: That process is gone, or has something else open there, or is not of the
                same node and user.
        """
        region = SharedRegion.open(descriptor.pid, descriptor.fd, _name(descriptor.token))
        num_blocks, block_bytes = descriptor.num_blocks, descriptor.block_bytes
        wanted = _HEADER.pack(_MAGIC, num_blocks, block_bytes, descriptor.token)
        # Who wrote these sizes made the memory to fit, and nobody can make it smaller.
        if not hmac.compare_digest(region.memory[: _HEADER.size], wanted):
            region.close()
            raise TransferError(
                f"descriptor {descriptor.fd} of process {descriptor.pid} is not the slab that was"
                f" meant, of {num_blocks} blocks of {block_bytes} bytes: ask the host tier for a"
                " new descriptor, and run one version of raykv on the node"
            )
        return cls(region, num_blocks, block_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks; 0 after ``close``."""
        return self.blocks.nbytes

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._region is None

    @property
    def descriptor(self) -> SlabDescriptor:
        """What other processes need to attach through this one, whoever created the slab.

        Raises:
            TransferError: The slab is closed.
        """
        region = self._open_region()
        return SlabDescriptor(
            os.getpid(), region.fd, self._token, self.num_blocks, self.block_bytes
        )

    def reassign(self, block_ids: Ids) -> NDArray[np.uint64]:
        """Declare that these blocks get other content from now on.

        Args:
            block_ids: Blocks, all different, never the padding block 0.

        Returns:
            Their new generations ``[n]``.

        Raises:
            TransferError: The slab is closed.
            ValueError: An id is out of range, padding or repeated. Nothing was changed.
        """
        self._open_region()
        ids = checked_targets(block_ids, self.num_blocks, "block_ids")
        self.generations[ids] += np.uint64(1)
        self.checksums[ids] = NO_CHECKSUM
        return self.generations[ids]

    def populate(self) -> None:
        """Take and map all of the memory now, so that first copies need not wait for pages.

        Raises:
            ConfigError: There is not enough.
            TransferError: The slab is closed.
        """
        try:
            self._open_region().populate()
        except OSError as error:
            raise ConfigError(
                f"taking all {self.nbytes} bytes of the slab failed: {error}: ask for fewer host"
                " blocks, or free memory"
            ) from None

    def register_pinned(self, xp: Any) -> bool:
        """Let CUDA copy to and from the slab directly; undone by ``close``. Idempotent.

        Each process registers its own mapping. It takes all of the memory.

        Args:
            xp: The array module of the device.

        Returns:
            Whether the slab is pinned now. Without, copies work but are slower.
        """
        self._open_region()
        if self._unpin is None and xp is not np:
            runtime, address = xp.cuda.runtime, self.blocks.ctypes.data
            # CuPy's CUDA errors derive from RuntimeError.
            with contextlib.suppress(RuntimeError):
                runtime.hostRegister(address, self.nbytes, _HOST_REGISTER_PORTABLE)
                self._unpin = lambda: runtime.hostUnregister(address)
        return self._unpin is not None

    def close(self) -> None:
        """Give up this process's hold on the slab; idempotent.

        Views that others hold stay valid, and the memory mapped, until they are gone.
        """
        region, self._region = self._region, None
        if region is None:
            return
        if self._unpin is not None:
            with contextlib.suppress(RuntimeError):
                self._unpin()
            self._unpin = None
        self.blocks = np.empty((0, self.block_bytes), np.uint8)
        self.generations = self.checksums = np.empty(0, np.uint64)
        region.close()

    def check_integrity(self) -> None:
        """Check that nobody wrote the header or the padding block.

        Raises:
            IntegrityError: Somebody did.
            TransferError: The slab is closed.
        """
        memory = self._open_region().memory
        wanted = _HEADER.pack(_MAGIC, self.num_blocks, self.block_bytes, self._token)
        if memory[: _HEADER.size] != wanted:
            raise IntegrityError("the header of the host slab was overwritten")
        if self.blocks[0].any() or self.generations[0] or self.checksums[0]:
            raise IntegrityError("the padding block of the host slab was written")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _open_region(self) -> SharedRegion:
        if self._region is None:
            raise TransferError("the host slab is closed in this process: attach it again")
        return self._region


def _name(token: bytes) -> str:
    """What /proc shows; the token itself stays inside."""
    return f"raykv-slab-{token[:4].hex()}"


def _blocks_offset(num_blocks: int) -> int:
    return -(-(64 + 16 * num_blocks) // _PAGE_BYTES) * _PAGE_BYTES
