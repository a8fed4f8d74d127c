"""What the host tier's tests share: KV that names its tokens, and pools of both kinds over a tier.

The KV of a token is a function of all tokens up to it and of their namespace, as a model's is. So
whoever reads another sequence's block, or half a block, or a block of other weights, is found out.
"""

from __future__ import annotations

import contextlib
import hashlib
import time

import numpy as np

from raykv import Namespace, PoolConfig, Sequence
from raykv.hierarchy import HierarchyBlockManagerPool
from raykv.testing import MortalHost, loopback_driver
from raykv.testing_tiers import FaultyTier

WAIT_S = 20  # what takes this long never comes
SIZE = 2
SETTINGS = {
    "num_blocks": 10, "block_size": SIZE, "num_single_blocks": 9,
    "memory": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "device": "cpu"},
}  # fmt: skip


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def make_config(host=None, **settings):
    host = {"num_blocks": 33, "timeout_s": 0.2} | (host or {})
    return PoolConfig(**SETTINGS | settings, host=host).with_seed()


def wait_until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.001)


def token_kv(tokens, namespace, position):
    """float32 [2, 8]: K and V of the token at a position."""
    key = repr((namespace.tenant, namespace.lora, namespace.weights_version)).encode()
    digest = hashlib.sha512(key + np.asarray(tokens[: position + 1], np.int32).tobytes()).digest()
    return np.frombuffer(digest, np.uint32).astype(np.float32).reshape(2, 8)


class World:
    """A pool whose computed KV is checked.

    Args:
        kind: ``local`` or ``loopback``.
        tier: the host tier; None makes one.
        host: settings of it.
        num_drivers: drivers over the same ranks.
        **settings: of the pool.
    """

    def __init__(
        self, kind, *, tier=None, host=None, copy_faults=None, num_drivers=1, clock=None, **settings
    ):
        self.config = make_config(host, **settings)
        clock = {} if clock is None else {"clock": clock}
        self.tier = FaultyTier(self.config, **clock) if tier is None else tier
        self.tier.copy_faults = copy_faults
        self.hosts = []
        if kind == "local":
            self.pools = [HierarchyBlockManagerPool.local(self.config, [self.tier])]
        else:
            self.hosts = [MortalHost(self.config, rank) for rank in range(self.config.dp_size)]
            self.pools = [
                loopback_driver(self.hosts, f"driver {index}", [self.tier])
                for index in range(num_drivers)
            ]
        self.pool = self.pools[0]
        self.num_computed = 0

    # -- what is inside -------------------------------------------------------------------------

    def kv_of(self, rank=0):
        """A rank's RankKV."""
        return self.hosts[rank].host._kv if self.hosts else self.pool.ranks[rank].kv

    @property
    def books(self):
        """The tier's HostTier; None before a rank has joined."""
        books = self.tier.host._books
        return None if books is None else books.blocks

    @property
    def link(self):
        """Rank 0's line to the tier."""
        return self.kv_of().tier.link

    def totals(self, rank=0):
        """What became of blocks, by kind."""
        return self.kv_of(rank).tier.totals

    # -- sequences ------------------------------------------------------------------------------

    def write(self, sequence, num_tokens=None):
        """Compute as a model does, up to this many tokens."""
        state = sequence.kv_state
        stop = sequence.num_tokens if num_tokens is None else num_tokens
        buffers = self.kv_of(sequence.dp_rank).buffers
        for position in range(state.num_computed_tokens, stop):
            k_and_v = token_kv(sequence.token_ids, sequence.namespace, position)
            block, offset = divmod(position, state.block_size)
            for name, value in zip("kv", k_and_v, strict=True):
                buffers.view(0, name)[state.block_ids[block], offset, 0] = value
        self.num_computed += max(0, stop - state.num_computed_tokens)
        state.num_computed_tokens = max(stop, state.num_computed_tokens)

    def find_wrong(self, sequence):
        """Positions of computed tokens whose KV is another's."""
        state = sequence.kv_state
        if not state.num_computed_tokens:
            return []
        buffers = self.kv_of(sequence.dp_rank).buffers
        slots = sequence.slot_ids(0, state.num_computed_tokens)
        read = np.stack([buffers.read_slots(0, name, slots)[:, 0] for name in "kv"], axis=1)
        return [
            position
            for position in range(state.num_computed_tokens)
            if not np.array_equal(read[position], token_kv(sequence.token_ids, sequence.namespace,
                                                           position))
        ]  # fmt: skip

    def check(self, *sequences):
        for sequence in sequences:
            assert self.find_wrong(sequence) == []
        if self.tier.is_frozen or self.tier.is_dead:
            for rank in range(self.config.dp_size):
                self.kv_of(rank).check_integrity()
        else:
            for pool in self.pools:
                pool.check_integrity()

    def admit(self, tokens, *, pool=None, namespace=None, rank=None):
        """A sequence that was allocated."""
        sequence = Sequence(tokens, namespace=namespace or Namespace())
        sequence.dp_rank = rank
        assert (pool or self.pool).allocate(sequence)
        return sequence

    def live(self, tokens, *, pool=None, **options):
        """A whole life: admit, load, compute, check, give back. Returns what it found."""
        pool = pool or self.pool
        sequence = self.admit(tokens, pool=pool, **options)
        pool.transfer_blocks([sequence], wait_s=WAIT_S)
        assert not sequence.is_loading
        num_found = sequence.kv_state.num_computed_tokens
        self.check(sequence)
        self.write(sequence)
        pool.deallocate(sequence)
        return num_found

    def settle(self):
        """Until nothing is on its way."""
        for pool in self.pools:
            wait_until(lambda pool=pool: pool.transfer_blocks().is_idle)
            pool.transfer_blocks()  # says what has ended just then
            wait_until(lambda pool=pool: all(self._is_idle(rank.dp_rank) for rank in pool.ranks))

    def forget_device(self, rank=0):
        """Only the host has it from now on."""
        self.settle()
        self.kv_of(rank).block_manager.reset_prefix_cache()

    def store(self, tokens, **options):
        """Let the host have a prompt, and no device. Returns how many blocks it has."""
        self.live(tokens, **options)
        self.forget_device(options.get("rank") or 0)
        return len(tokens) // SIZE

    def rejoin(self):
        """Until all ranks use the tier again."""

        def is_back(kv):
            kv.pump_tier()
            return kv.tier.link.is_up

        for kv in map(self.kv_of, range(self.config.dp_size)):
            wait_until(lambda kv=kv: is_back(kv))

    def _is_idle(self, rank):
        kv = self.kv_of(rank)
        if kv.tier is not None and not kv.tier.is_idle:
            kv.pump_tier()
            return False
        return True

    # -- the end --------------------------------------------------------------------------------

    def drain(self):
        """Nothing may be left, on the devices nor in the tier."""
        self.tier.thaw()
        if self.tier.is_dead:
            self.tier.restart()
        for pool in self.pools:
            for rank in range(self.config.dp_size):
                kv = self.kv_of(rank)
                pool.deallocate([held for _, held in kv._rows.held() if held.owner is pool])
        self.settle()
        for pool in self.pools:
            pool.get_swap_block_transfer_infos()
            pool.ack_swaps()
        for rank in range(self.config.dp_size):
            kv = self.kv_of(rank)
            for _, held in list(kv._rows.held()):
                kv.deallocate_without_cache(held)
            kv.pump_tier()
            kv.check_integrity()
            stats = kv.rank_stats()
            assert stats.num_used_blocks == 0
            assert stats.num_available_blocks == stats.num_total_blocks
            assert stats.num_loading_sequences == stats.num_offloading_blocks == 0
        self.check_tier_drained()

    def check_tier_drained(self):
        if self.books is None:
            return
        self.rejoin()
        self.tier.host.check_integrity()
        stats = self.tier.host.stats()
        num_corrupt = len(self.books.blocks.corrupt)
        assert (stats.storing, stats.pinned, stats.quarantined) == (0, 0, num_corrupt)
        assert stats.free + stats.cached + num_corrupt == stats.blocks

    def close(self):
        for pool in self.pools:
            with contextlib.suppress(Exception):
                pool.close()
        self.tier.close()
