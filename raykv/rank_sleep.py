"""Sleep of one rank: when it may, and what becomes of cache, K/V memory and recurrent state."""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn

from raykv.core.block_manager import BlockManagerImpl
from raykv.core.rows import Rows
from raykv.core.sequence import Sequence
from raykv.errors import RequestError
from raykv.memory.buffers import KVBuffers
from raykv.rank_states import RankStates


class RankSleep:
    """Gives a rank's K/V memory back, and takes it again.

    Args:
        dp_rank: the rank's number.
        manager: its KV blocks.
        rows: its sequences.
        buffers: its K/V memory, None when only books are kept.
        states: its recurrent state, None where sequences have none.

    Attributes:
        is_asleep: whether the memory was given back; nothing can be allocated meanwhile.
    """

    def __init__(
        self,
        dp_rank: int,
        manager: BlockManagerImpl,
        rows: Rows,
        buffers: KVBuffers | None,
        states: RankStates | None,
    ) -> None:
        self.is_asleep = False
        self._dp_rank = dp_rank
        self._manager = manager
        self._rows = rows
        self._states = states
        state_buffers = None if states is None else states.buffers
        self._memory = [each for each in (buffers, state_buffers) if each is not None]

    def sleep(self) -> None:
        """Forget all cached prefixes and give the K/V memory back; idempotent.

        Raises:
            RequestError: somebody holds blocks; nothing changed.
        """
        if self.is_asleep:
            return
        self.check_unused()
        manager = self._manager
        num_held = manager.num_total_blocks - manager.num_available_blocks
        if num_held:
            raise RequestError(
                f"rank {self._dp_rank} cannot sleep while handles or copies hold {num_held} "
                "blocks: release them, or acknowledge the copies with ack_swaps()"
            )
        if self._states is not None and self._holds_state(self._states):
            raise RequestError(
                f"rank {self._dp_rank} cannot sleep while copies of recurrent state are under way: "
                "acknowledge them with ack_state_transfers()"
            )
        manager.reset_prefix_cache()
        if self._states is not None:
            self._states.cache.clear()
        for memory in self._memory:
            memory.release()
        self.is_asleep = True

    def _holds_state(self, states: RankStates) -> bool:
        slots = states.cache
        return states.is_copying or slots.num_total_slots > states.num_obtainable_slots

    def wake_up(self) -> None:
        """Take K/V memory again; idempotent.

        Raises:
            ConfigError: it does not fit any more; the rank goes on sleeping.
        """
        for memory in self._memory:
            memory.restore()
        self.is_asleep = False

    def check_unused(self, besides: Collection[Sequence] = ()) -> None:
        """Whether the rank may sleep, as far as sequences go.

        Raises:
            RequestError: some hold rows or blocks that are not among ``besides``.
        """
        held = [sequence for _, sequence in self._rows.held() if sequence not in besides]
        if held:
            num_blocks = sum(sequence.kv_state.num_blocks for sequence in held)
            raise RequestError(
                f"rank {self._dp_rank} cannot sleep while {len(held)} sequences of your scheduler "
                f"hold {num_blocks} blocks: deallocate them first"
            )

    def refuse(self) -> NoReturn:
        """Tell who wants blocks that the rank sleeps.

        Raises:
            RequestError: always.
        """
        raise RequestError(f"rank {self._dp_rank} sleeps: call wake_up() first")
