"""Copies that a rank's KV asks its drivers for: forks' own blocks, and recurrent state."""

from __future__ import annotations

from abc import abstractmethod

from raykv.core.copy_on_write import CopyOnWrite
from raykv.core.kv_cache_manager import KVCacheManager
from raykv.rank_states import RankStates


class RankTransfers(KVCacheManager):
    """What each driver is to copy, by the sequences that are its own.

    Attributes:
        states: recurrent state; None where sequences have none.
    """

    states: RankStates | None
    _copies: CopyOnWrite

    @abstractmethod
    def forget_ended(self, driver_id: str) -> None:
        """How this driver's loads ended will not be asked for."""

    def get_swap_block_transfer_infos(self) -> list[list[tuple[int, int]]]:
        """See KVCacheManager."""
        return [self.take_swaps("")]

    def ack_swaps(self, driver_id: str = "") -> None:
        """See KVCacheManager; those of one driver."""
        self._copies.acknowledge(driver_id)

    def take_swaps(self, driver_id: str) -> list[tuple[int, int]]:
        """The copies that one driver's sequences owe; see get_swap_block_transfer_infos."""
        return self._copies.take(driver_id)

    def get_state_transfer_infos(self) -> list[list[tuple[int, int]]]:
        """See KVCacheManager."""
        return [self.take_state_copies("")]

    def ack_state_transfers(self, driver_id: str = "") -> None:
        """See KVCacheManager; those of one driver."""
        if self.states is not None:
            self.states.acknowledge_copies(driver_id)

    def fail_state_transfers(self, driver_id: str = "") -> None:
        """Copies of state that were handed out were not done: they make no checkpoints."""
        if self.states is not None:
            self.states.fail_copies(driver_id)

    def take_state_copies(self, driver_id: str) -> list[tuple[int, int]]:
        """The copies of state that one driver owes; see get_state_transfer_infos."""
        return [] if self.states is None else self.states.take_copies(driver_id)

    def take_state_saves(self, driver_id: str) -> list[tuple[int, int]]:
        """Those of them that make checkpoints: where they fail, no sequence is harmed."""
        return [] if self.states is None else self.states.take_saves(driver_id)

    def forget_driver(self, driver_id: str) -> None:
        """Nobody will copy for this driver's sequences any more, which are gone."""
        self._copies.forget(driver_id)
        self.forget_ended(driver_id)
        if self.states is not None:
            self.states.forget_driver(driver_id)
