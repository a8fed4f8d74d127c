"""Device to host: what ended sequences leave, offered to the tier, copied, reported."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.core import BlockManagerImpl, Blocks, Namespace
from raykv.host.tickets import NO_TICKET, Offer, StoreResult, StoreTicket
from raykv.memory.buffers import KVBuffers
from raykv.memory.copy_batches import BlockOutcome, CopyBatch, Ticket
from raykv.tiering.link import TierLink

# A load waits for one such piece at most.
_PIECE_BYTES = 64 << 20
_PIECES_UNDER_WAY = 2  # as much as that many whole ones; short sequences make many small ones


@dataclass(slots=True, eq=False)
class Offload:
    """Leading blocks of a sequence that ended, on their way to the host.

    Attributes:
        tokens: int32 [n], of these blocks.
        namespace: whose they are.
        blocks: pins them; from the ticket on, only those that are stored.
        written: on CUDA, an event behind their last write.
        ticket: where to.
        pieces: their copies, as far as they were started.
        num_started: blocks of the pieces.
        is_cancelled: it is over, whatever the tier answers.
    """

    tokens: NDArray[np.int32]
    namespace: Namespace
    blocks: Blocks
    written: Any = None
    ticket: StoreTicket | None = None
    pieces: list[Ticket] = field(default_factory=list)
    num_started: int = 0
    is_cancelled: bool = False

    @property
    def is_copied(self) -> bool:
        """Whether no copy is under way or to come."""
        return self.num_started == len(self.blocks) and all(one.is_done for one in self.pieces)


class Offloads:
    """The offloads of one rank. Sources stay pinned until their copy is over.

    Args:
        manager: of the device blocks.
        buffers: their memory.
        link: to the tier.
        totals: where blocks are counted.

    Attributes:
        reports: what the tier is to be told.
    """

    def __init__(
        self, manager: BlockManagerImpl, buffers: KVBuffers, link: TierLink, totals: Counter[str]
    ) -> None:
        self.reports: list[StoreResult] = []
        self._manager = manager
        self._buffers = buffers
        self._link = link
        self._totals = totals
        self._piece_blocks = max(1, _PIECE_BYTES // link.blocks.num_bytes)
        self._queued: deque[Offload] = deque()
        self._offered: list[Offload] = []
        self._granted: deque[Offload] = deque()
        self._copying: list[Offload] = []

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued, under way, or to be reported."""
        return not (self._queued or self._offered or self._granted or self._copying or self.reports)

    @property
    def num_blocks(self) -> int:
        """Device blocks that are pinned."""
        stages = (self._queued, self._offered, self._granted, self._copying)
        return sum(len(one.blocks) for stage in stages for one in stage)

    def add(self, tokens: NDArray[np.int32], namespace: Namespace, ids: NDArray[np.int64]) -> None:
        """Queue blocks that are computed; their content is the tokens' KV.

        Args:
            tokens: int32 [n * block_size], from the root on; not to change.
            namespace: whose they are.
            ids: int64 [n], the blocks.
        """
        blocks = self._manager.pin(ids)
        self._queued.append(Offload(tokens, namespace, blocks, self._buffers.record_event()))

    def take_offers(self) -> list[Offer]:
        """What to offer with the next exchange."""
        self._offered = list(self._queued)
        self._queued.clear()
        return [Offer(one.tokens, one.namespace, len(one.blocks)) for one in self._offered]

    def grant(self, tickets: list[StoreTicket]) -> None:
        """What became of the offers."""
        offered, self._offered = self._offered, []
        for one, ticket in zip(offered, tickets, strict=True):
            if ticket.id == NO_TICKET:
                one.blocks.release()
            elif one.is_cancelled:
                self._report(ticket, 0)
            else:
                first, num = ticket.first_block, len(ticket.host_ids)
                whole, one.blocks = one.blocks, one.blocks[first : first + num]
                whole.release()
                one.ticket = ticket
                self._granted.append(one)

    def start(self) -> int:
        """Submit copies, as many as may be under way; returns how many blocks."""
        copier, num_blocks = self._link.copier, 0
        if copier is None:
            return 0
        pieces = (piece for one in self._copying for piece in one.pieces)
        under_way = sum(len(piece.batch) for piece in pieces if not piece.is_done)
        room = _PIECES_UNDER_WAY * self._piece_blocks - under_way
        while room > 0:
            # One is started after the other, so only the last can be unfinished.
            if not self._copying or not self._is_unfinished(self._copying[-1]):
                if not self._granted:
                    break
                self._copying.append(self._granted.popleft())
            one = self._copying[-1]
            num_started = self._start_piece(one, min(room, self._piece_blocks))
            num_blocks += num_started
            room -= num_started
        return num_blocks

    def settle(self) -> None:
        """Let go of what was copied, and note what to report."""
        for one in [one for one in self._copying if one.is_copied]:
            self._copying.remove(one)
            num_ok = self._num_ok(one)
            assert one.ticket is not None, "it was granted"
            self._totals["offloaded"] += num_ok
            self._totals["offloads_failed"] += len(one.blocks) - num_ok
            self._report(one.ticket, num_ok)
            one.blocks.release()

    def cancel_unstarted(self) -> int:
        """Give up what has not started, so that its blocks can be used; returns how many."""
        before = self.num_blocks
        for one in (*self._queued, *self._offered, *self._granted):
            one.is_cancelled = True
            one.blocks.release()
        for one in self._granted:
            assert one.ticket is not None, "it was granted"
            self._report(one.ticket, 0)
        self._queued.clear()
        self._granted.clear()
        for one in self._copying:
            self._cut(one)
        self.settle()
        num_freed = before - self.num_blocks
        self._totals["offloads_cancelled"] += num_freed
        return num_freed

    def lose(self) -> None:
        """The tier is lost: only copies under way are waited for."""
        self.cancel_unstarted()
        self._offered.clear()
        self.reports.clear()

    def _start_piece(self, one: Offload, max_blocks: int) -> int:
        copier, ticket = self._link.copier, one.ticket
        assert copier is not None, "the caller has looked"
        assert ticket is not None, "it was granted"
        part = slice(one.num_started, one.num_started + max_blocks)
        batch = CopyBatch(
            "offload",
            self._buffers.storage,
            one.blocks.index[part],
            ticket.host_ids[part].astype(np.int64),
            ticket.generations[part],
            with_checksums=self._link.config.checksum_rate > 0,
            after=one.written,
        )
        piece = copier.submit_batch(batch)
        one.pieces.append(piece)
        one.num_started += len(piece.batch)
        return len(piece.batch)

    def _cut(self, one: Offload) -> None:
        """Give up what of an offload has not started."""
        # The last one first, for they start in order.
        kept = [piece for piece in reversed(one.pieces) if not piece.cancel()][::-1]
        num_kept = sum(len(piece.batch) for piece in kept)
        if num_kept < len(one.blocks):
            whole, one.blocks = one.blocks, one.blocks[:num_kept]
            whole.release()
            one.pieces, one.num_started = kept, num_kept

    def _is_unfinished(self, one: Offload) -> bool:
        return one.num_started < len(one.blocks)

    def _num_ok(self, one: Offload) -> int:
        """Leading blocks that were copied."""
        num_ok = 0
        for piece in one.pieces:
            assert piece.result is not None, "the caller has waited"
            ok = piece.result.is_ok
            if not ok.all():
                return num_ok + int(ok.argmin())
            num_ok += len(ok)
        return num_ok

    def _report(self, ticket: StoreTicket, num_ok: int) -> None:
        if not self._link.is_up:
            return  # tickets of a tier that was lost mean nothing to the next
        slab, sums = self._link.slab, None
        if num_ok and slab is not None and self._link.config.checksum_rate > 0:
            sums = slab.checksums[ticket.host_ids[:num_ok]]
        self.reports.append(StoreResult(ticket.id, num_ok, sums))


def count_outcomes(totals: Counter[str], prefix: str, outcomes: NDArray[np.uint8]) -> None:
    """Count blocks by what became of them, such as ``loads_corrupt``."""
    for outcome in BlockOutcome:
        if outcome is not BlockOutcome.OK:
            totals[f"{prefix}_{outcome.name.lower()}"] += int((outcomes == outcome).sum())
