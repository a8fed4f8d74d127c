"""Copies of recurrent state that are due, and the checkpoints that they make."""

from __future__ import annotations

from dataclasses import dataclass, field

from .blocks import Blocks
from .checked_prefix import CheckedPrefix
from .copy_on_write import SwapList
from .linear_state import LinearStatePrefixCache
from .reservation import Reservation
from .sequence import Sequence


@dataclass(slots=True, eq=False)
class Save:
    """A checkpoint on its way: its slot is reserved, the state is to be copied into it.

    Attributes:
        sequence: whose state.
        num_tokens: the boundary that the state stands at; 0 once it was given up.
        reservation: the slot.
        name: of the prefix, under which it can be found once the copy is done; None as long as a
            later boundary may take its place.
        prefix: what the name stands for.
        is_copied: whether the slot holds the state.
    """

    sequence: Sequence
    num_tokens: int
    reservation: Reservation
    name: bytes | None = None
    prefix: CheckedPrefix | None = None
    is_copied: bool = False

    def give_up(self) -> None:
        """Give the slot back; there will be no checkpoint."""
        self.num_tokens = 0
        self.reservation.release()


@dataclass(slots=True)
class _Owed:
    """What one driver owes.

    Attributes:
        copies: all of it.
        due: saves that are to be handed out, by their targets.
        handed: saves that were, with the boundary that the state stood at then.
    """

    copies: SwapList = field(default_factory=SwapList)
    due: dict[int, Save] = field(default_factory=dict)
    handed: list[tuple[Save, int]] = field(default_factory=list)

    def is_due(self, save: Save) -> bool:
        """Whether its copy is to be handed out (again)."""
        return self.due.get(save.reservation.slot) is save


class StateCopies:
    """What each driver owes; the engine is one of them.

    Args:
        cache: the slots' books.
    """

    def __init__(self, cache: LinearStatePrefixCache) -> None:
        self._cache = cache
        self._owed: dict[str, _Owed] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no copy is due or under way."""
        return all(owed.copies.is_idle for owed in self._owed.values())

    def add(
        self, driver_id: str, source: int, target: int, source_pin: Blocks, target_pin: Blocks
    ) -> None:
        """Owe a copy into a live slot; see ``SwapList.add``. Slots are given by their addresses."""
        self._of(driver_id).copies.add(source, target, source_pin, target_pin)

    def is_under_way(self, driver_id: str, target: int) -> bool:
        """Whether a copy into a live slot was handed out, and may not be done yet."""
        owed = self._owed.get(driver_id)
        return owed is not None and owed.copies.is_under_way(target)

    def add_save(self, save: Save, source: int, source_pin: Blocks) -> None:
        """Owe the copy of a live slot that makes a checkpoint."""
        owed = self._of(save.sequence.driver_id)
        save.is_copied = False
        target = save.reservation.slot
        # A reservation may be given up while the copy is under way; the pin stays until it is done.
        target_pin = self._cache.slots.pin_one(target)
        owed.copies.add(source, target, source_pin, target_pin)
        owed.due[target] = save

    def release(self, sequence: Sequence, target: int) -> None:
        """A sequence's live slot, the target, is given back: what is due to it or from it is not.

        A save is given up, for who ends may never fetch it, and its slot is to come back. What was
        handed out goes on, and a fork's copy of the slot stays due; pins see to both.
        """
        owed = self._owed.get(sequence.driver_id)
        if owed is not None:
            owed.copies.cancel(target)
            for save in [one for one in owed.due.values() if one.sequence is sequence]:
                self._cancel(owed, save)

    def take(self, driver_id: str) -> list[tuple[int, int]]:
        """Hand out the copies that are due, as (source, target) addresses.

        A state that has moved on since is no checkpoint of the boundary any more (vLLM 34587).
        """
        owed = self._owed.get(driver_id)
        if owed is None:
            return []
        self._hand_out(owed)
        return owed.copies.take()

    def take_saves(self, driver_id: str) -> list[tuple[int, int]]:
        """The same, of those only that make checkpoints: whose failure harms no sequence."""
        owed = self._owed.get(driver_id)
        return [] if owed is None else owed.copies.take(self._hand_out(owed))

    def acknowledge(self, driver_id: str) -> None:
        """All copies that were handed out are done: checkpoints with a name can be found now."""
        owed = self._owed.get(driver_id)
        if owed is None:
            return
        owed.copies.acknowledge()
        handed, owed.handed = owed.handed, []
        for save, num_tokens in handed:
            if save.num_tokens != num_tokens or owed.is_due(save):
                continue  # given up, or a later boundary took its place
            save.is_copied = True
            if save.name is not None:
                self.commit(save)

    def fail(self, driver_id: str) -> None:
        """The copies that were handed out were not done: they make no checkpoints."""
        owed = self._owed.get(driver_id)
        if owed is None:
            return
        self._cache.num_skipped_total += len(owed.handed)
        for save, _ in owed.handed:
            if not owed.is_due(save):
                save.give_up()
        owed.handed = []
        owed.copies.acknowledge()

    def forget(self, driver_id: str) -> None:
        """Nobody will do this driver's copies any more: their slots are let go."""
        owed = self._owed.pop(driver_id, None)
        if owed is not None:
            owed.copies.take()
            owed.copies.acknowledge()
            for save in (*owed.due.values(), *(save for save, _ in owed.handed)):
                save.give_up()

    def commit(self, save: Save) -> None:
        """Let a checkpoint whose copy is done be found."""
        self._cache.commit(save.reservation, save.name, prefix=save.prefix)

    def _hand_out(self, owed: _Owed) -> list[int]:
        """Note the saves that are handed out now; returns their targets."""
        for save in list(owed.due.values()):
            if save.sequence.kv_state.num_computed_tokens == save.num_tokens:
                owed.handed.append((save, save.num_tokens))
            else:
                self._cancel(owed, save)
        due, owed.due = owed.due, {}
        return list(due)

    def _cancel(self, owed: _Owed, save: Save) -> None:
        target = save.reservation.slot
        del owed.due[target]
        owed.copies.cancel(target)
        save.give_up()

    def _of(self, driver_id: str) -> _Owed:
        if driver_id not in self._owed:
            self._owed[driver_id] = _Owed()
        return self._owed[driver_id]
