"""The books of a node's host tier: which host block holds what, and who may touch it.

Copies nothing and knows no clock: clients copy, and report. A client offers what it computed, gets
host blocks for what the host lacks, writes them and reports; from then on they are found. A client
that wants a prompt's KV gets host blocks to read, which stay as they are until it reports.

Blocks that are being written stand in the prefix cache from the start, marked as not ready: nobody
finds them, but who offers the same prefix meanwhile stores only what goes beyond. If they never get
ready, they are forgotten together with all that was built on them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from raykv.core import BlockManagerImpl, Namespace, as_tokens
from raykv.core.namespace import DEFAULT
from raykv.core.tokens import TokenIds
from raykv.errors import ConfigError
from raykv.host.audit import audit
from raykv.host.blocks import HostBlocks, Row, Transfer
from raykv.host.clients import Client, HostClients
from raykv.host.stats import HostTierStats, count
from raykv.host.tickets import (
    NO_TICKET,
    LoadOutcome,
    LoadResult,
    LoadTicket,
    Offer,
    SilentClient,
    StoreResult,
    StoreTicket,
    Want,
)


class HostTier:
    """Keeps the books of host blocks for the processes of a node (the seed's section 9.4).

    Each host block is padding (block 0), free, being stored, cached (and maybe pinned), pinned
    though it is forgotten, or in quarantine. A client writes only what it was given to store, and
    that is given to nobody else until the client reports its end, or cannot write any more. So what
    a reader gets is right, or its generation or checksum tells.

    Args:
        num_blocks: host blocks, the padding block included.
        block_size: tokens per block.
        generations: uint64 [num_blocks], such as a slab's: a block's is raised whenever it is
            given to somebody to write.
        lease_s: seconds that a client may be silent.
        eviction: see BlockManagerImpl.
        hash_seed: the pool's secret for prefix hashes.

    Attributes:
        manager: of the host blocks.
        blocks: which of them are complete, and which corrupt.
        clients: who they are, and what they have under way.

    Raises:
        ConfigError: impossible sizes, or an array of generations that does not fit.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        generations: NDArray[np.uint64],
        *,
        lease_s: float,
        eviction: str = "lru",
        hash_seed: bytes | None = None,
    ) -> None:
        if generations.shape != (num_blocks,) or generations.dtype != np.uint64:
            raise ConfigError(
                f"generations are {generations.dtype} of shape {generations.shape}, but must be"
                f" uint64 of shape ({num_blocks},), one per host block"
            )
        self.manager = BlockManagerImpl(
            num_blocks, block_size, hash_seed=hash_seed, eviction=eviction
        )
        self.blocks = HostBlocks(self.manager, generations)
        self.clients = HostClients(lease_s)
        self._last_ticket = NO_TICKET

    # -- clients --------------------------------------------------------------------------------

    def join(self, client_id: str, pid: int, now_s: float) -> None:
        """Let a process store and load; idempotent.

        Args:
            client_id: its name, which no other process has, before or after it.
            pid: its process.
            now_s: seconds on the caller's clock.

        Raises:
            RequestError: another process has this name, or left something under way under it.
        """
        self.clients.join(client_id, pid, now_s)

    def renew(self, client_id: str, now_s: float) -> bool:
        """Note a sign of life. False: its lease is over and its tickets are void, join again."""
        return self.clients.renew(client_id, now_s)

    def leave(self, client_id: str) -> None:
        """End a client's lease; one that has none is passed by.

        Stores that it did not report are quarantined as if it had gone silent.
        """
        client = self.clients.find(client_id)
        if client is not None:
            self._end(client)

    def expire(self, now_s: float) -> list[SilentClient]:
        """End the leases of clients that were silent for too long.

        Their loads are let go: a reader that still reads sees by the generation if a block was
        reassigned. What they were storing they may still write, so it goes to nobody until
        ``confirmed_dead`` or ``unmapped``.

        Returns:
            These clients, for the caller to see whether they live.
        """
        silent = self.clients.silent(now_s)
        for client in silent:
            self._end(client)
        return [SilentClient(client.client_id, client.pid) for client in silent]

    def confirmed_dead(self, client_id: str) -> int:
        """The client's process is gone: what it had under way is over.

        Returns:
            Blocks that leave quarantine.
        """
        self.leave(client_id)
        return self.clients.clear(client_id)

    def unmapped(self, client_id: str) -> int:
        """The client has unmapped the slab, and so cannot write any more; see ``confirmed_dead``.

        It lives and may join again.
        """
        return self.confirmed_dead(client_id)

    # -- storing --------------------------------------------------------------------------------

    def offer(self, client_id: str, offers: Iterable[Offer]) -> list[StoreTicket]:
        """Give host blocks for what the host lacks of each offer, root first.

        As many as there is room for, evicting what is not pinned; nothing that an offer of the call
        builds on is evicted for another. What somebody is storing already is not given again.

        Returns:
            A ticket per offer, in order.

        Raises:
            RankUnavailableError: the client has no lease; nothing changed.
            ValueError: an offer has fewer full blocks than it says; nothing changed.
        """
        client = self.clients.need(client_id)
        rows = [self._offered(offer) for offer in offers]
        transfers = self.blocks.give(rows)
        return [self._store_ticket(client, transfer) for transfer in transfers]

    def stored(self, client_id: str, results: Iterable[StoreResult]) -> None:
        """Let the leading blocks that are complete be found, and take back the others.

        A client reports a store when nothing of it will be written any more. Tickets that are over
        are counted and change nothing, but that their blocks leave quarantine.

        Raises:
            ValueError: a result does not fit its ticket; nothing changed.
        """
        results = [StoreResult(*result) for result in results]
        stores = self._under_way(client_id, stores=True)
        for result in results:
            if result.ticket_id in stores:
                stores[result.ticket_id].check_stored(result)
        ended = []
        for result in results:
            store = stores.pop(result.ticket_id, None)
            if store is None:
                self.blocks.totals["expired"] += 1
                self.clients.clear_ticket(client_id, result.ticket_id)
            else:
                ended.append((store, result))
        self.blocks.publish(ended)

    def num_ready(self, token_ids: TokenIds, namespace: Namespace = DEFAULT) -> int:
        """Leading full blocks that are complete; holds none, and nothing counts as used by it.

        Raises:
            ValueError: the token ids are no row of integers that fit int32.
        """
        return self.blocks.num_ready((as_tokens(token_ids), namespace))

    # -- loading --------------------------------------------------------------------------------

    def find(self, client_id: str, wants: Iterable[Want]) -> list[LoadTicket]:
        """Give host blocks to read for what the host has of each prompt beyond the device.

        One token of the prompt at least is left to compute. What is found counts as used now.

        Returns:
            A ticket per prompt, in order.

        Raises:
            RankUnavailableError: the client has no lease; nothing changed.
            ValueError: a prompt is no row of tokens, or a number is negative; nothing changed.
        """
        client = self.clients.need(client_id)
        rows = [(self._wanted(want), want.num_device_blocks) for want in wants]
        return [
            self._load_ticket(client, self.blocks.look_up(row, num_device_blocks))
            for row, num_device_blocks in rows
        ]

    def loaded(self, client_id: str, results: Iterable[LoadResult]) -> None:
        """Let go of what was read. What was corrupt is never found again, nor what depends on it.

        Corrupt blocks stay in quarantine until ``release_quarantine``. Tickets that are over are
        counted and change nothing.

        Raises:
            ValueError: a result does not fit its ticket; nothing changed.
        """
        results = [
            LoadResult(ticket_id, np.asarray(outcomes, np.uint8)) for ticket_id, outcomes in results
        ]
        loads = self._under_way(client_id, stores=False)
        for result in results:
            if result.ticket_id in loads:
                loads[result.ticket_id].check_loaded(result)
        for result in results:
            load = loads.pop(result.ticket_id, None)
            if load is None:
                self.blocks.totals["expired"] += 1
                continue
            outcomes = result.outcomes
            self.blocks.totals["loaded"] += int(np.count_nonzero(outcomes == LoadOutcome.OK))
            self.blocks.totals["stale"] += int(np.count_nonzero(outcomes == LoadOutcome.STALE))
            for block_id in load.own[outcomes == LoadOutcome.CORRUPT].tolist():
                self.blocks.set_aside(block_id)
            load.blocks.release()

    # -- the rest -------------------------------------------------------------------------------

    def release_quarantine(self, block_ids: Iterable[int] | None = None) -> int:
        """Let corrupt blocks be used again; all of them, or those listed.

        Returns:
            How many left quarantine.
        """
        return self.blocks.release_quarantine(block_ids)

    def reset(self) -> int:
        """Forget everything that is cached, what is being stored included; returns how many."""
        return self.manager.reset_prefix_cache()

    def retire(self, weights_version: int) -> int:
        """See ``BlockManager.retire``."""
        return self.manager.retire(weights_version)

    def stats(self) -> HostTierStats:
        """Count blocks; changes nothing."""
        return count(self)

    def check_integrity(self) -> None:
        """Recompute who holds each block, and in which state it is.

        Raises:
            IntegrityError: something disagrees.
        """
        audit(self)

    # -- inside ---------------------------------------------------------------------------------

    def _offered(self, offer: Offer) -> Row:
        tokens = as_tokens(offer.tokens)
        num_full = len(tokens) // self.manager.block_size
        if not 0 <= offer.num_blocks <= num_full:
            raise ValueError(
                f"an offer of {len(tokens)} tokens has {num_full} full blocks of"
                f" {self.manager.block_size}, but says that {offer.num_blocks} are computed"
            )
        return tokens[: offer.num_blocks * self.manager.block_size], offer.namespace

    def _wanted(self, want: Want) -> Row:
        if want.num_device_blocks < 0:
            raise ValueError(f"a client cannot have {want.num_device_blocks} blocks of a prompt")
        tokens = as_tokens(want.tokens)
        size = self.manager.block_size
        return tokens[: max(0, len(tokens) - 1) // size * size], want.namespace

    def _store_ticket(self, client: Client, store: Transfer) -> StoreTicket:
        ids = store.own
        ticket_id = self._note(client.stores, store)
        generations = self.blocks.generations[ids]
        return StoreTicket(ticket_id, store.first_block, ids.astype(np.int32), generations)

    def _load_ticket(self, client: Client, load: Transfer) -> LoadTicket:
        ids, blocks = load.own, self.blocks
        return LoadTicket(
            self._note(client.loads, load),
            load.first_block,
            ids.astype(np.int32),
            blocks.generations[ids],
            blocks.checksums[ids],
        )

    def _note(self, under_way: dict[int, Transfer], transfer: Transfer) -> int:
        """The number of a ticket for this transfer."""
        if not len(transfer.own):
            return NO_TICKET
        self._last_ticket += 1
        under_way[self._last_ticket] = transfer
        return self._last_ticket

    def _under_way(self, client_id: str, *, stores: bool) -> dict[int, Transfer]:
        client = self.clients.find(client_id)
        if client is None:
            return {}
        return client.stores if stores else client.loads

    def _end(self, client: Client) -> None:
        self.clients.end(client)
        for load in client.loads.values():
            load.blocks.release()
        for ticket_id, store in client.stores.items():
            self.manager.forget(store.own[:1])
            self.clients.leave_behind(client, ticket_id, store.blocks[store.first_block :])
            store.blocks.release()
