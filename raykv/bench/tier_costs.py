"""What a rank pays for its host tier, beside the copies: microseconds, and messages.

The rank is a RankKV over blocks of 128 bytes, its tier is in the same process and full, so that
each store evicts. Times are the owner's: processor time of the thread that owns the rank, while
another one copies. Over Ray the tier's share of it is spent in the tier's process, in exchange for
packing one message each way.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from raykv.config import PoolConfig
from raykv.core import Sequence
from raykv.hierarchy import HierarchyBlockManagerPool
from raykv.host.handle import LocalTier
from raykv.host.tier_host import TierHost
from raykv.messages import Answer, Call
from raykv.rank import RankKV
from raykv.rank_handle import Reply
from raykv.remote_rank import RemoteRank
from raykv.testing import loopback_pool

from .timing import Row, measure

BLOCK_SIZE, BATCH = 16, 256  # tokens; blocks
NUM_HOST_BLOCKS = 65_536
OFFLOAD_TARGET_US = 3.0
MAX_EXTRA_EXCHANGES = 1
_DRIVER = ""  # of sequences that no pool gave a driver
_TINY = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "device": "cpu"}


class CountingTier(LocalTier):
    """A tier in this process that counts what it is asked.

    Attributes:
        counts: calls by name.
    """

    def __init__(self, host: TierHost) -> None:
        super().__init__(host)
        self.counts: Counter[str] = Counter()

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """See TierHandle."""
        self.counts[method] += 1
        return super().call(method, *arguments)


class TierBench:
    """A rank with a host tier that is full, or without one.

    Args:
        num_host_blocks: blocks of the tier; None for none.
    """

    def __init__(self, num_host_blocks: int | None = NUM_HOST_BLOCKS) -> None:
        self.kv = RankKV(make_config(num_host_blocks))
        self._random = np.random.default_rng(0)
        self._host: TierHost | None = None
        if num_host_blocks is not None:
            self._host = TierHost(self.kv.config)
            self.kv.connect_tier(LocalTier(self._host))
            while self._host.stats().free:
                self.offload(self.computed(1, BATCH))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kv.close_tier()
        if self._host is not None:
            self._host.close()

    def computed(self, num_sequences: int, length: int) -> list[Sequence]:
        """Admit new sequences of so many blocks, as if the model had computed them."""
        sequences = self.prompts(num_sequences, length)
        assert self.kv.allocate(sequences), "the device is large enough"
        self.settle()
        for sequence in sequences:
            sequence.kv_state.num_computed_tokens = length * BLOCK_SIZE
        return sequences

    def prompts(self, num_sequences: int, length: int) -> list[Sequence]:
        """New sequences of so many blocks and a token."""
        size = length * BLOCK_SIZE + 1
        return [
            Sequence(self._random.integers(0, 1 << 20, size, np.int32))
            for _ in range(num_sequences)
        ]

    def stored(self, num_sequences: int, length: int) -> list[Sequence]:
        """Sequences whose blocks are on the host and nowhere else, not admitted."""
        sequences = self.computed(num_sequences, length)
        copies = [Sequence(sequence.token_ids) for sequence in sequences]
        self.offload(sequences)
        return copies

    def offload(self, sequences: list[Sequence]) -> None:
        """End sequences, until all of their blocks are on the host and none on the device."""
        self.offload_all(sequences)
        self.settle()
        self.drop(sequences)

    def offload_all(self, sequences: list[Sequence]) -> list[Sequence]:
        """Offer what sequences have computed, copy it, report that; returns them."""
        tier = self.kv.tier
        assert tier is not None, "the bench has one"
        for sequence in sequences:
            tier.offload(sequence)
        self.settle()
        return sequences

    def load(self, sequences: list[Sequence]) -> list[Sequence]:
        """Admit sequences and load what the host has of them; returns them."""
        assert self.kv.allocate(sequences), "the device is large enough"
        self.settle()
        assert all(sequence.kv_state.num_loaded_tokens for sequence in sequences), "all are stored"
        return sequences

    def admit(self, sequences: list[Sequence]) -> list[Sequence]:
        """Admit sequences; plans loads, but starts none. Returns them."""
        assert self.kv.allocate(sequences), "the device is large enough"
        return sequences

    def settle(self) -> None:
        """Move on until nothing is under way; waiting takes no processor time."""
        tier = self.kv.tier
        while tier is not None and not tier.is_idle:
            self.kv.pump_tier(_DRIVER)
            assert tier.link.copier is not None, "it is connected"
            tier.link.copier.wait_idle()

    def drop(self, sequences: list[Sequence]) -> None:
        """Let sequences go, and nothing of them be found on the device."""
        self.kv.deallocate_without_cache(sequences)
        self.settle()


def make_config(num_host_blocks: int | None) -> PoolConfig:
    """Of a rank with tiny blocks, and a host tier if blocks are given."""
    values: dict[str, Any] = {
        "num_blocks": 4 * BATCH,
        "block_size": BLOCK_SIZE,
        "memory": _TINY,
        "enable_prefix_cache": True,
    }
    if num_host_blocks is not None:
        values["host"] = {"num_blocks": num_host_blocks}
    return PoolConfig(**values).with_seed()


def rows(num_host_blocks: int = NUM_HOST_BLOCKS, num_runs: int = 100) -> Iterator[Row]:
    """Offloads and loads per block, then admissions per sequence."""
    with TierBench(num_host_blocks) as bench, TierBench(None) as plain:
        for num_sequences in (1, 8, 32):
            length = BATCH // num_sequences
            yield measure(
                f"offload {num_sequences} x {length} blocks, per block", "RankTier",
                bench.offload_all,
                prepare=lambda n=num_sequences, k=length: bench.computed(n, k),  # type: ignore[misc]
                after=bench.drop, num_runs=num_runs, num_calls=BATCH,
                target_us=OFFLOAD_TARGET_US, clock=time.thread_time_ns,
            )  # fmt: skip
        for num_sequences in (1, 8, 32):
            length = BATCH // num_sequences
            yield measure(
                f"admit and load {num_sequences} x {length} blocks, per block", "RankTier",
                bench.load,
                prepare=lambda n=num_sequences, k=length: bench.stored(n, k),  # type: ignore[misc]
                after=bench.drop, num_runs=num_runs, num_calls=BATCH,
                clock=time.thread_time_ns,
            )  # fmt: skip
        for name, one, prepare in (
            ("no host tier", plain, plain.prompts),
            ("the host has nothing", bench, bench.prompts),
            ("the host has it: a load is planned", bench, bench.stored),
        ):
            yield measure(
                f"admit 64 blocks, {name}", "RankKV", one.admit,
                prepare=lambda make=prepare: make(1, 64),  # type: ignore[misc]
                after=one.drop, num_runs=num_runs, clock=time.thread_time_ns,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Messages:
    """What one ``pool.allocate`` sends over messages, as Ray carries them.

    Attributes:
        num_sequences: sequences of the list.
        num_planned: those for which a load was planned.
        num_calls: calls of the rank.
        num_exchanges: messages from the rank to its tier, within the call.
        num_exchanges_in_all: the same until the loads were over and reported.
        max_exchanges: what ``num_exchanges`` should not be above.
    """

    num_sequences: int
    num_planned: int
    num_calls: int
    num_exchanges: int
    num_exchanges_in_all: int
    max_exchanges: int = MAX_EXTRA_EXCHANGES

    def as_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)


def messages(num_sequences: int, length: int = 8) -> Messages:
    """Count the messages of an allocation whose prompts are all on the host.

    Args:
        num_sequences: sequences of one list.
        length: blocks of each.
    """
    config = make_config(2 + num_sequences * length)
    with loopback_pool(config) as pool:
        assert isinstance(pool, HierarchyBlockManagerPool), "it has a host"
        tier = CountingTier(TierHost(config))
        pool.use_tiers([tier], [0])
        try:
            return _count(pool, tier, num_sequences, length)
        finally:
            tier.close()


def _count(
    pool: HierarchyBlockManagerPool, tier: CountingTier, num_sequences: int, length: int
) -> Messages:
    rng = np.random.default_rng(0)
    size = length * BLOCK_SIZE + 1
    prompts = rng.integers(0, 1 << 20, (num_sequences, size), np.int32)
    sequences = [Sequence(prompt) for prompt in prompts]
    assert pool.allocate(sequences), "the device is large enough"
    _settle(pool)
    for sequence in sequences:
        sequence.kv_state.num_computed_tokens = length * BLOCK_SIZE
    pool.deallocate(sequences)
    _settle(pool)
    _evict_all(pool)
    [rank] = pool.ranks
    assert isinstance(rank, RemoteRank), "a loopback rank is remote"
    calls: list[Call] = []
    send = rank.send

    def record(call: Call) -> Reply[Answer]:
        calls.append(call)
        return send(call)

    rank.send = record  # type: ignore[method-assign]
    again = [Sequence(prompt) for prompt in prompts]
    before = tier.counts["exchange"]
    assert pool.allocate(again), "the device is large enough"
    num_calls, num_exchanges = len(calls), tier.counts["exchange"] - before
    num_planned = sum(sequence.is_loading for sequence in again)
    _settle(pool)
    in_all = tier.counts["exchange"] - before
    pool.deallocate_without_cache(again)
    return Messages(num_sequences, num_planned, num_calls, num_exchanges, in_all)


def _settle(pool: HierarchyBlockManagerPool) -> None:
    """Wait until nothing is under way; without an engine, transfers move by being asked for."""
    while pool.transfer_blocks().num_loading or pool.has_transfers:
        time.sleep(0.001)


def _evict_all(pool: HierarchyBlockManagerPool) -> None:
    """Fill the device with something else, so that nothing is found there."""
    filler = Sequence(np.full((pool.config.num_blocks - 1) * BLOCK_SIZE, 7, np.int32))
    assert pool.allocate(filler), "everything cached can be evicted"
    pool.deallocate_without_cache(filler)
    _settle(pool)
