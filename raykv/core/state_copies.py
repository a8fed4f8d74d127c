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
        num_in_flight: copies into the slot that were handed out and are not done.
    """

    sequence: Sequence
    num_tokens: int
    reservation: Reservation
    name: bytes | None = None
    prefix: CheckedPrefix | None = None
    is_copied: bool = False
    num_in_flight: int = 0


@dataclass(slots=True)
class _Owed:
    copies: SwapList = field(default_factory=SwapList)
    due: dict[int, Save] = field(default_factory=dict)  # by target
    handed: list[tuple[Save, int]] = field(default_factory=list)  # each with its boundary then


class StateCopies:
    """What each driver owes; the engine is one of them.

    Args:
        cache: the slots' books.
    """

    def __init__(self, cache: LinearStatePrefixCache) -> None:
        self._cache = cache
        self._owed: dict[str, _Owed] = {}

    def add(
        self, driver_id: str, source: int, target: int, source_pin: Blocks, target_pin: Blocks
    ) -> None:
        """Owe a copy into a live slot; see ``SwapList.add``. Slots are given by their addresses."""
        self._of(driver_id).copies.add(source, target, source_pin, target_pin)

    def add_save(self, save: Save, source: int, source_pin: Blocks) -> None:
        """Owe the copy of a live slot that makes a checkpoint."""
        owed = self._of(save.sequence.driver_id)
        save.is_copied = False
        target = save.reservation.slot
        owed.copies.add(source, target, source_pin)
        owed.due[target] = save

    def cancel(self, driver_id: str, target: int) -> None:
        """A live slot is given back: nothing has to be copied there any more."""
        self._of(driver_id).copies.cancel(target)

    def give_up(self, save: Save) -> None:
        """There will be no checkpoint: the slot comes back once no copy writes to it any more."""
        save.num_tokens = 0
        owed, target = self._of(save.sequence.driver_id), save.reservation.slot
        if owed.due.get(target) is save:
            del owed.due[target]
            owed.copies.cancel(target)
        if not save.num_in_flight:
            save.reservation.release()

    def take(self, driver_id: str) -> list[tuple[int, int]]:
        """Hand out the copies that are due, as (source, target) addresses.

        A state that has moved on since is no checkpoint of the boundary any more (vLLM 34587).
        """
        if driver_id not in self._owed:
            return []
        owed = self._owed[driver_id]
        for save in list(owed.due.values()):
            if save.sequence.kv_state.num_computed_tokens == save.num_tokens:
                owed.handed.append((save, save.num_tokens))
                save.num_in_flight += 1
            else:
                self.give_up(save)
        owed.due = {}
        return owed.copies.take()

    def acknowledge(self, driver_id: str) -> None:
        """All copies that were handed out are done: checkpoints with a name can be found now."""
        if driver_id not in self._owed:
            return
        owed = self._owed[driver_id]
        owed.copies.acknowledge()
        handed, owed.handed = owed.handed, []
        for save, num_tokens in handed:
            save.num_in_flight -= 1
            if not save.num_tokens:
                self.give_up(save)
            # Else a later boundary has taken its place meanwhile, and its copy is not done.
            elif save.num_tokens == num_tokens:
                save.is_copied = True
                if save.name is not None:
                    self.commit(save)

    def fail(self, driver_id: str) -> None:
        """The copies that were handed out were not done: they make no checkpoints."""
        if driver_id in self._owed:
            owed = self._owed[driver_id]
            self._cache.num_skipped_total += len(owed.handed)
            handed, owed.handed = owed.handed, []
            owed.copies.acknowledge()
            for save, _ in handed:
                save.num_in_flight -= 1
                self.give_up(save)

    def forget(self, driver_id: str) -> None:
        """Nobody will do this driver's copies any more: their slots are let go."""
        owed = self._owed.pop(driver_id, None)
        if owed is not None:
            owed.copies.take()
            owed.copies.acknowledge()
            for save in (*owed.due.values(), *(save for save, _ in owed.handed)):
                save.num_tokens = 0
                save.reservation.release()

    def commit(self, save: Save) -> None:
        """Let a checkpoint whose copy is done be found."""
        self._cache.commit(save.reservation, save.name, prefix=save.prefix)

    def _of(self, driver_id: str) -> _Owed:
        if driver_id not in self._owed:
            self._owed[driver_id] = _Owed()
        return self._owed[driver_id]
