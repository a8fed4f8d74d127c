"""The blocks of a host tier: which are complete, which are being written, which are corrupt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raykv.core import AdmitRequest, Admitted, BlockManagerImpl, Blocks, Namespace
from raykv.core.tokens import NO_INDEX, Index
from raykv.host.tickets import LoadResult, StoreResult

Row = tuple[NDArray[np.int32], Namespace]
"""Tokens of full blocks, from the root on, and whose they are."""


@dataclass(slots=True, eq=False)
class Transfer:
    """A store or a load under way.

    Attributes:
        blocks: holds its host blocks and all their ancestors, from the root on.
        first_block: where its own begin.
    """

    blocks: Blocks
    first_block: int

    @property
    def own(self) -> Index:
        """Ids of the blocks that are written or read, int64 [n]."""
        return self.blocks.index[self.first_block :]

    def check_stored(self, result: StoreResult) -> None:
        """Raise ValueError if a store cannot have ended like this."""
        num_blocks, num_ok = len(self.own), result.num_ok
        if not 0 <= num_ok <= num_blocks:
            raise ValueError(
                f"store {result.ticket_id} is of {num_blocks} blocks, but {num_ok} are reported"
            )
        if result.checksums is not None and len(result.checksums) < num_ok:
            raise ValueError(
                f"store {result.ticket_id} reports {num_ok} blocks, but {len(result.checksums)}"
                " checksums: give one for each, or None"
            )

    def check_loaded(self, result: LoadResult) -> None:
        """Raise ValueError if a load cannot have ended like this."""
        if result.outcomes.shape != self.own.shape:
            raise ValueError(
                f"load {result.ticket_id} is of {len(self.own)} blocks, but outcomes of shape"
                f" {result.outcomes.shape} are reported: give one for each"
            )


class HostBlocks:
    """Gives host blocks to write and to read. Who gets them is somebody else's business.

    Args:
        manager: of the host blocks.
        generations: uint64 [num_blocks], raised whenever a block is given to be written.

    Attributes:
        manager: of the host blocks.
        generations: as given.
        checksums: uint64 [num_blocks], of what was stored last; 0 where that is not known.
        ready: bool [num_blocks], whether a cached block's content is complete.
        corrupt: holds the blocks that were found corrupt, by id.
        totals: what was counted since the start; see HostTierStats.
    """

    def __init__(self, manager: BlockManagerImpl, generations: NDArray[np.uint64]) -> None:
        self.manager = manager
        self.generations = generations
        self.checksums = np.zeros(len(generations), np.uint64)
        self.ready = np.zeros(len(generations), np.bool_)
        self.corrupt: dict[int, Blocks] = {}
        self.totals: Counter[str] = Counter()

    def give(self, rows: Sequence[Row]) -> list[Transfer]:
        """Give blocks to write what is not cached of each row, root first, as far as there is room.

        Nothing that a row builds on is evicted for another. What somebody is writing already is not
        given again.

        Returns:
            One per row; of no blocks where there is nothing to write.
        """
        manager, given = self.manager, dict[int, Transfer]()
        # Held until all are served, so that none makes room by evicting what another builds on.
        matches = [manager.allocate_shared(tokens, namespace=space) for tokens, space in rows]
        # Rows that go on alike behind what matches would get the same blocks twice: only the first
        # of them goes with the others, at once. What the rest share with it matches then.
        together = self._unlike(rows, range(len(rows)), matches)
        if self._give_all(rows, together, given) and len(given) < len(rows):
            rest = [at for at in range(len(rows)) if at not in given]
            longer = [manager.allocate_shared(rows[at][0], namespace=rows[at][1]) for at in rest]
            matches += longer
            self._give_all(rows, self._unlike(rows, rest, longer), given)
        transfers = [
            given[at] if at in given else self._give_some(row) for at, row in enumerate(rows)
        ]
        for match in matches:
            match.release()
        return transfers

    def publish(self, ended: Sequence[tuple[Transfer, StoreResult]]) -> None:
        """Let what is complete be found, and take back the rest."""
        complete = [NO_INDEX]
        for store, (_, num_ok, checksums) in ended:
            own = store.own
            complete.append(own[:num_ok])
            if num_ok < len(own):
                self.manager.forget(own[num_ok : num_ok + 1])  # and with it all that follows
            if checksums is not None:
                self.checksums[own[:num_ok]] = checksums[:num_ok]
        ids = np.concatenate(complete)
        # Some are not if an ancestor was lost meanwhile, or all was reset.
        cached = self.manager.is_cached(ids)
        self.ready[ids] = cached
        num_cached = int(np.count_nonzero(cached))
        self.totals["stored"] += num_cached
        self.totals["orphaned"] += len(ids) - num_cached
        for store, _ in ended:
            store.blocks.release()

    def look_up(self, row: Row, first_block: int) -> Transfer:
        """Give the complete blocks from this one on to read; what is found counts as used now."""
        tokens, namespace = row
        blocks = self.manager.allocate_shared(tokens, namespace=namespace)
        ready = self.ready[blocks.index]
        num_ready = len(ready) if ready.all() else int(ready.argmin())
        if num_ready <= first_block:
            blocks.release()
        elif num_ready < len(blocks):
            whole, blocks = blocks, blocks[:num_ready]
            whole.release()
        load = Transfer(blocks, first_block)
        self.totals["hit"] += len(load.own)
        return load

    def num_ready(self, row: Row) -> int:
        """Leading blocks of a row that are complete; changes nothing."""
        tokens, namespace = row
        ready = self.ready[self.manager.matching_ids(tokens, namespace=namespace)]
        return len(ready) if ready.all() else int(ready.argmin())

    def set_aside(self, block_id: int) -> None:
        """Never find a corrupt block again, and keep it from being given."""
        if block_id not in self.corrupt:
            self.corrupt[block_id] = self.manager.pin(np.array([block_id]))
            self.totals["corrupt"] += 1
        self.manager.forget([block_id])

    def release_quarantine(self, block_ids: Iterable[int] | None) -> int:
        """Let corrupt blocks be given again, all or those listed; returns how many."""
        chosen = list(self.corrupt) if block_ids is None else block_ids
        released = [self.corrupt.pop(i) for i in chosen if i in self.corrupt]
        for blocks in released:
            blocks.release()
        return len(released)

    def _unlike(
        self, rows: Sequence[Row], places: Iterable[int], matches: list[Blocks]
    ) -> list[int]:
        """Of the rows at these places, the first of each that go on alike behind their match."""
        size, first_of = self.manager.block_size, dict[Hashable, int]()
        for at, match in zip(places, matches, strict=True):
            tokens, space = rows[at]
            first_of.setdefault((space, tokens[: (len(match) + 1) * size].tobytes()), at)
        return list(first_of.values())

    def _give_all(self, rows: Sequence[Row], places: list[int], given: dict[int, Transfer]) -> bool:
        """Serve these rows, which share no new block, in full; whether there was room."""
        admitted = self.manager.admit([self._request(rows[at]) for at in places])
        if admitted is None:
            return False
        self._reassign(np.concatenate([NO_INDEX, *(ids[first:] for ids, first in admitted)]))
        for at, granted in zip(places, admitted, strict=True):
            given[at] = self._begin(rows[at], granted)
        return True

    def _request(self, row: Row) -> AdmitRequest:
        tokens, namespace = row
        return AdmitRequest(len(tokens) // self.manager.block_size, tokens, namespace)

    def _give_some(self, row: Row) -> Transfer:
        """Serve one row whose match is held, as far as there is room."""
        manager, (tokens, namespace) = self.manager, row
        request = self._request(row)
        admitted = manager.admit([request])
        if admitted is None:
            # Whatever matches is held, so it takes nothing from what is available.
            known = manager.num_matching_blocks(tokens, namespace=namespace)
            room = known + manager.num_available_blocks
            self.totals["refused"] += request.num_blocks - room
            admitted = manager.admit([AdmitRequest(room, tokens, namespace)])
            assert admitted is not None, "as many as are available could not be had"
        ids, first = admitted[0]
        self._reassign(ids[first:])
        return self._begin(row, admitted[0])

    def _reassign(self, ids: Index) -> None:
        """These blocks get other content from now on."""
        self.ready[ids] = False
        self.checksums[ids] = 0
        self.generations[ids] += np.uint64(1)

    def _begin(self, row: Row, granted: Admitted) -> Transfer:
        manager, (tokens, namespace), (ids, first) = self.manager, row, granted
        blocks = manager.adopt(ids)
        if first == len(ids):
            blocks.release()
        else:
            known = tokens[: len(ids) * manager.block_size]
            num_new = manager.cache(known, blocks, namespace=namespace)
            assert num_new == len(ids) - first, "what was admitted as new is cached"
        return Transfer(blocks, first)
