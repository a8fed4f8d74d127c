"""A host tier's books and memory, of KV blocks and of recurrent state, as one."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from raykv.config import PoolConfig
from raykv.errors import ConfigError
from raykv.host.host_states import HostStates
from raykv.host.host_tier import HostTier
from raykv.host.messages import Ask, BlockKind
from raykv.host.state_stats import HostStatesStats
from raykv.host.state_tickets import StateLoad, StateLoaded, StateOffer, StateStored, StateTicket
from raykv.host.tickets import NO_TICKET, LoadTicket, Want
from raykv.memory.host_slab import HostSlab

NO_LOAD = LoadTicket(
    NO_TICKET, 0, np.empty(0, np.int32), np.empty(0, np.uint64), np.empty(0, np.uint64)
)


class TierBooks:
    """What is made once it is known what a block is.

    Args:
        config: the pool's, with ``host``.
        kind: what a block is.

    Attributes:
        kind: the same.
        blocks: the books of KV blocks.
        slab: their memory.
        states: the books of checkpoints; None where sequences have no recurrent state.
        states_slab: their memory; None likewise.

    Raises:
        ConfigError: the memory cannot be had.
    """

    def __init__(self, config: PoolConfig, kind: BlockKind) -> None:
        host, linear = config.host, config.linear_state
        assert host is not None, "a host tier is asked for"
        self.kind = kind
        self.slab = HostSlab.create(host.num_blocks, kind.num_bytes)
        self.blocks = HostTier(
            host.num_blocks,
            config.block_size,
            self.slab.generations,
            lease_s=host.lease_s,
            eviction=host.eviction,
            hash_seed=config.hash_seed,
        )
        self.states: HostStates | None = None
        self.states_slab: HostSlab | None = None
        if kind.checkpoint_bytes and linear is not None:
            num_slots = host.num_state_slots or linear.num_slots
            self.states_slab = HostSlab.create(num_slots, kind.checkpoint_bytes)
            self.states = HostStates(
                num_slots,
                config.block_size,
                self.states_slab.generations,
                hash_seed=config.hash_seed,
            )
        if host.populate:
            for slab in self._slabs():
                slab.populate()

    def check_kind(self, kind: BlockKind) -> None:
        """Refuse a rank whose blocks are others.

        Raises:
            ConfigError: they are.
        """
        if kind != self.kind:
            raise ConfigError(
                f"a rank with blocks of {kind.num_bytes} bytes cannot share a host tier with ranks"
                f" whose blocks have {self.kind.num_bytes}, or are of another layout or model: give"
                " all the same model and dtype"
            )

    # -- clients --------------------------------------------------------------------------------

    def unmapped(self, client_id: str) -> None:
        """See HostTier.unmapped."""
        self.confirmed_dead(client_id)

    def confirmed_dead(self, client_id: str) -> None:
        """See HostTier.confirmed_dead."""
        self.blocks.confirmed_dead(client_id)
        if self.states is not None:
            self.states.clear_client(client_id)

    def expire(self, now_s: float) -> None:
        """See HostTier.expire."""
        for silent in self.blocks.expire(now_s):
            if self.states is not None:
                self.states.end_client(silent.client_id)

    # -- traffic --------------------------------------------------------------------------------

    def report_states(
        self, client_id: str, stored: Iterable[StateStored], loaded: Iterable[StateLoaded]
    ) -> None:
        """Checkpoints that were stored and loaded; see HostStates."""
        if self.states is not None:
            self.states.stored(client_id, stored)
            self.states.loaded(client_id, loaded)

    def offer_states(self, client_id: str, offers: Iterable[StateOffer]) -> list[list[StateTicket]]:
        """See HostStates.offer."""
        return [] if self.states is None else self.states.offer(client_id, offers)

    def find(self, client_id: str, want: Want) -> LoadTicket:
        """See HostTier.find."""
        return self.blocks.find(client_id, [want])[0]

    def find_state(self, client_id: str, ask: Ask) -> tuple[LoadTicket, StateLoad | None]:
        """The deepest checkpoint that is here with all of its KV, and that KV."""
        (tokens, namespace, first_block), size = ask.want, self.blocks.manager.block_size
        num_ready = self.blocks.num_ready(tokens[: max(0, len(tokens) - 1)], namespace)
        state = None
        if self.states is not None:
            state = self.states.find(
                client_id,
                tokens,
                namespace,
                min_tokens=first_block * size,
                max_tokens=num_ready * size,
                step_tokens=ask.state_step,
            )
        if state is None:
            return NO_LOAD, None
        return self.find(client_id, Want(tokens[: state.num_tokens + 1], *ask.want[1:])), state

    # -- the rest -------------------------------------------------------------------------------

    def reset(self) -> int:
        """Forget everything; returns how many blocks were cached."""
        if self.states is not None:
            self.states.reset()
        return self.blocks.reset()

    def retire(self, weights_version: int) -> int:
        """See ``BlockManager.retire``."""
        if self.states is not None:
            self.states.retire(weights_version)
        return self.blocks.retire(weights_version)

    def state_stats(self) -> HostStatesStats | None:
        """Count checkpoints; None where sequences have no recurrent state."""
        return None if self.states is None else self.states.stats()

    def check_integrity(self) -> None:
        """Check the books, and that nobody wrote a slab's header or padding.

        Raises:
            IntegrityError: something disagrees.
        """
        self.blocks.check_integrity()
        if self.states is not None:
            self.states.check_integrity()
        for slab in self._slabs():
            slab.check_integrity()

    def close(self) -> None:
        """Let go of the memory; idempotent."""
        for slab in self._slabs():
            slab.close()

    def _slabs(self) -> list[HostSlab]:
        return [slab for slab in (self.slab, self.states_slab) if slab is not None]
