"""What a host tier's bookkeeping takes, per block; the copies themselves are not in it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raykv.core import DEFAULT
from raykv.host.host_tier import HostTier
from raykv.host.tickets import LoadResult, Offer, StoreResult, StoreTicket, Want

from .timing import Row, measure

BLOCK_SIZE, NUM_BLOCKS, BATCH = 16, 65_536, 256
TARGET_US = 3.0
_CLIENT = "bench"


class HostBench:
    """A full host tier, so that each store evicts."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        self.tier = HostTier(num_blocks, BLOCK_SIZE, np.zeros(num_blocks, np.uint64), lease_s=60.0)
        self.tier.join(_CLIENT, 1, 0.0)
        self._random = np.random.default_rng(0)
        while self.tier.manager.num_free_blocks:
            self.store(self.offers(1, BATCH))

    def offers(self, num_offers: int, length: int, num_shared: int = 0) -> list[Offer]:
        """New prompts of so many blocks, whose first ones are the same."""
        shared = self._tokens(num_shared)
        rows = (np.concatenate((shared, self._tokens(length))) for _ in range(num_offers))
        return [Offer(row, DEFAULT, num_shared + length) for row in rows]

    def store(self, offers: list[Offer]) -> list[StoreTicket]:
        """Offer, and report all as written."""
        tickets = self.tier.offer(_CLIENT, offers)
        self.tier.stored(
            _CLIENT, [StoreResult(ticket.id, len(ticket.host_ids), None) for ticket in tickets]
        )
        return tickets

    def wants(self, num_wants: int, length: int) -> list[Want]:
        """Prompts that are on the host."""
        offers = self.offers(num_wants, length)
        self.store(offers)
        end = np.zeros(1, np.int32)
        return [Want(np.concatenate((offer.tokens, end)), DEFAULT, 0) for offer in offers]

    def load(self, wants: list[Want]) -> int:
        """Find, and report all as read; returns how many blocks were found."""
        tickets = self.tier.find(_CLIENT, wants)
        num_found = sum(len(ticket.host_ids) for ticket in tickets)
        self.tier.loaded(
            _CLIENT,
            [LoadResult(t.id, np.zeros(len(t.host_ids), np.uint8)) for t in tickets],
        )
        return num_found

    def _tokens(self, num_blocks: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return self._random.integers(0, 1 << 20, num_blocks * BLOCK_SIZE, np.int32)


def rows(num_blocks: int = NUM_BLOCKS, num_runs: int = 100) -> Iterator[Row]:
    """Microseconds per block, in batches of 256, on a tier that is full."""
    bench = HostBench(num_blocks)
    for num_prompts in (1, 8, 32):
        length = BATCH // num_prompts
        yield measure(
            f"offer + stored, {num_prompts} x {length} new blocks, per block", "HostTier",
            bench.store, prepare=lambda n=num_prompts, k=length: bench.offers(n, k),  # type: ignore[misc]
            num_runs=num_runs, num_calls=BATCH, target_us=TARGET_US,
        )  # fmt: skip
    yield measure(
        "offer + stored, 32 x 8 new blocks behind 64 shared ones, per block", "HostTier",
        bench.store, prepare=lambda: bench.offers(32, 8, num_shared=64), num_runs=num_runs,
        num_calls=BATCH + 64, target_us=TARGET_US,
    )  # fmt: skip
    for num_prompts in (1, 32):
        length = BATCH // num_prompts
        yield measure(
            f"find + loaded, {num_prompts} x {length} blocks, per block", "HostTier",
            bench.load, prepare=lambda n=num_prompts, k=length: bench.wants(n, k),  # type: ignore[misc]
            num_runs=num_runs, num_calls=BATCH, target_us=TARGET_US,
        )  # fmt: skip
