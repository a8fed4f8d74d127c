"""Copy on write: which forks need a block of their own, and the copies they owe for it."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import NamedTuple

from .base import LedgerBlockManager
from .block_tables import BlockTables
from .blocks import Blocks
from .sequence import Sequence
from .tokens import as_index


class _Due(NamedTuple):
    source: int
    source_pin: Blocks
    target_pin: Blocks | None

    @property
    def pins(self) -> list[Blocks]:
        return [pin for pin in (self.source_pin, self.target_pin) if pin is not None]


class SwapList:
    """Copies due before the next write.

    Sources and targets stay referenced until the copy is acknowledged, whatever becomes of the
    sequences.
    """

    def __init__(self) -> None:
        self._due: dict[int, _Due] = {}  # by target
        self._handed: dict[int, list[Blocks]] = {}  # pins, by target

    @property
    def is_idle(self) -> bool:
        """Whether no copy is due or under way."""
        return not self._due and not self._handed

    def is_under_way(self, target: int) -> bool:
        """Whether a copy to this target was handed out, and may not be done yet."""
        return target in self._handed

    def add(
        self, source: int, target: int, source_pin: Blocks, target_pin: Blocks | None = None
    ) -> None:
        """Owe a copy. A source that is itself still a target stands for its own source.

        Args:
            source: what to copy.
            target: where to; one that is due already is due from this source instead.
            source_pin: keeps the source from being handed out again; taken over.
            target_pin: likewise; None if somebody else sees to it.
        """
        if source in self._due:
            root = self._due[source]
            source_pin.release()
            source, source_pin = root.source, root.source_pin.share()
        self.cancel(target)
        self._due[target] = _Due(source, source_pin, target_pin)

    def cancel(self, target: int) -> None:
        """Nobody needs this copy any more; one that is not due is passed by."""
        due = self._due.pop(target, None)
        if due is not None:
            for pin in due.pins:
                pin.release()

    def take(self, targets: Container[int] | None = None) -> list[tuple[int, int]]:
        """Hand out the copies that are due, in order; each is handed out once.

        Args:
            targets: those to hand out; None for all.
        """
        due, self._due = self._due, {}
        if targets is not None:
            self._due = {target: one for target, one in due.items() if target not in targets}
            due = {target: one for target, one in due.items() if target in targets}
        for target, one in due.items():
            self._handed.setdefault(target, []).extend(one.pins)
        return [(one.source, target) for target, one in due.items()]

    def acknowledge(self) -> None:
        """All copies that were handed out are done."""
        for pins in self._handed.values():
            for pin in pins:
                pin.release()
        self._handed.clear()


class CopyOnWrite:
    """Gives sequences that are about to write to a shared block one of their own.

    Args:
        manager: whose blocks they are.
        tables: the block tables, row by single block id.

    Attributes:
        has_forks: whether there may be any. Without, ``due`` looks at nobody.
        owed: the copies that are due or under way, by the driver whose sequences owe them.
    """

    def __init__(self, manager: LedgerBlockManager, tables: BlockTables) -> None:
        self.has_forks = False
        self.owed: dict[str, SwapList] = {}
        self._manager = manager
        self._tables = tables

    def due(self, running: Iterable[Sequence]) -> list[tuple[Sequence, int]]:
        """Sequences that are about to write to a block which others use too.

        Each with the block's index in its table: the block of its first uncomputed token. The last
        of several writers keeps the block.
        """
        due: list[tuple[Sequence, int]] = []
        if not self.has_forks:
            return due
        uses: dict[int, int] = {}
        block_size = self._manager.block_size
        for sequence in running:
            state = sequence.kv_state
            index = state.num_computed_tokens // block_size
            if index < state.num_blocks:
                block_id = int(state.block_ids[index])
                if block_id not in uses:
                    one = state.block_ids[index : index + 1]
                    uses[block_id] = int(self._manager.use_counts(one)[0])
                if uses[block_id] > 1:
                    due.append((sequence, index))
                    uses[block_id] -= 1
        return due

    def replace(self, sequence: Sequence, index: int, target: int) -> None:
        """Give a sequence its own copy of one block, to be filled before it writes.

        Args:
            sequence: one that holds a row.
            index: of the block in its table; its use is dropped.
            target: a block with one use, the sequence's from now on.
        """
        row, state = sequence.single_block_id, sequence.kv_state
        source = int(state.block_ids[index])
        if sequence.driver_id not in self.owed:
            self.owed[sequence.driver_id] = SwapList()
        pins = [self._manager.pin(as_index([block_id])) for block_id in (source, target)]
        self.owed[sequence.driver_id].add(source, target, *pins)
        self._manager.adopt([source]).release()
        self._tables.table[row, index] = target
        assert row is not None, "a sequence with blocks has a row"
        state.block_ids = self._tables.ids(row)
        state.num_shared_blocks = min(state.num_shared_blocks, index)

    def take(self, driver_id: str) -> list[tuple[int, int]]:
        """Hand out the copies that are due for one driver's sequences; see ``SwapList.take``."""
        return self.owed[driver_id].take() if driver_id in self.owed else []

    def acknowledge(self, driver_id: str) -> None:
        """All copies that were handed out to this driver are done."""
        if driver_id in self.owed:
            self.owed[driver_id].acknowledge()

    def forget(self, driver_id: str) -> None:
        """Nobody will do this driver's copies any more: their blocks are let go."""
        self.take(driver_id)
        self.acknowledge(driver_id)
        self.owed.pop(driver_id, None)
