"""Two drivers on two ranks, and all that can go wrong between them, in every order.

What the machine checks, after each step: a rank's books are right; nobody reads KV that was not
computed for exactly his tokens, nor goes on from another state than theirs, where there is
recurrent state; a driver that hears from its ranks lists what they hold for it; an
error is a RankUnavailableError, and only when the driver has no rank left. At the end, with the
faults over, all memory is back.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import raykv.remote_rank
from raykv import PoolConfig, Sequence
from raykv.errors import RankUnavailableError
from raykv.testing import CALL_FAULTS, Faults, MortalHost, inject, loopback_driver

LEASE_S = 5.0

tokens = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=8),
    st.builds(lambda n, tail: [0] * n + tail, st.integers(1, 7), st.lists(st.integers(0, 1))),
)
index = st.integers(0, 10**6)
which = st.integers(0, 1)


@pytest.fixture(scope="module", autouse=True)
def _quick_and_quiet():
    """A call whose answer was lost is sent again at once; nobody reads of each loss."""
    before, raykv.remote_rank._RESEND_S = raykv.remote_rank._RESEND_S, 0.0
    logging.getLogger("raykv.monitor").setLevel(logging.ERROR)
    yield
    raykv.remote_rank._RESEND_S = before
    logging.getLogger("raykv.monitor").setLevel(logging.NOTSET)


@dataclass
class Driver:
    """A driver, and what it believes.

    Attributes:
        last_reset: when it last reset the prefix caches; it must not hit what is older.
    """

    name: str
    pool: object
    sequences: list[Sequence] = field(default_factory=list)
    last_reset: int = 0

    def pick(self, number):
        return self.sequences[number % len(self.sequences)]

    def pick_some(self, numbers):
        return list({id(one): one for one in map(self.pick, numbers)}.values())


class FaultsMachine(RuleBasedStateMachine):
    """The memory of the ranks is a dict: of what prefix a slot holds the last token's KV."""

    @initialize(
        num_blocks=st.integers(3, 12),
        block_size=st.integers(1, 3),
        num_single_blocks=st.integers(2, 6),
        num_more_slots=st.none() | st.integers(0, 4),
        seed=st.integers(0, 2**32),
    )
    def start(self, seed, num_more_slots, **values):
        self.now = 100.0
        self.num_events = 0
        if num_more_slots is not None:
            values["linear_state"] = {
                "num_slots": values["num_single_blocks"] + num_more_slots,
                "stride_tokens": values["block_size"],
                "match": "deepest",
            }
        config = PoolConfig(
            dp_size=2, hash_seed=b"seed", ray={"lease_s": LEASE_S, "ramp_s": 0}, **values
        )
        self.max_tokens = config.max_tokens_per_sequence
        self.hosts = [MortalHost(config, rank, clock=lambda: self.now) for rank in range(2)]
        # (epoch, slot) -> (the tokens up to there, when the oldest of them was computed)
        self.memory = {}
        self.states = {}  # (epoch, address) -> the tokens that went into the state there
        self.faults = Faults(random.Random(seed))
        self.drivers = []
        for name in ("one", "two"):
            pool = loopback_driver(self.hosts, name)
            for rank, host in zip(pool.ranks, self.hosts, strict=True):
                inject(rank, self.faults, host.kill)
            first = [Sequence(([0] * n)[: self.max_tokens]) for n in (1, 4)]
            self.drivers.append(Driver(name, pool, first))
        self.is_calm = True

    def teardown(self):
        if not hasattr(self, "drivers"):
            return
        self.calm_down()
        for driver in self.drivers:
            driver.pool.deallocate(driver.sequences)
            driver.pool.get_swap_block_transfer_infos()
            driver.pool.ack_swaps()
            driver.pool.get_state_transfer_infos()
            driver.pool.ack_state_transfers()
        for host in self.hosts:
            cache = host.host._kv.linear_state
            if cache is not None:
                assert cache.num_live_slots == cache.num_pending == cache.num_lingering_slots == 0
                assert cache.num_reclaimable == cache.num_checkpoints
            stats = host.host._kv.rank_stats()
            assert stats.num_used_blocks == 0
            assert stats.num_available_blocks == stats.num_total_blocks
            host.host._service.check_integrity()
            held = [lease.sequences.by_id for lease in host.host._service.leases.all()]
            assert not any(held)
        for driver in self.drivers:
            for rank in driver.pool.ranks:
                assert not rank._mirror._held
                assert not rank._mirror._gone
            driver.pool.close()

    # -- what a driver does ------------------------------------------------------------------------

    def do(self, driver, function):
        """Run something of the driver's; whether it could be done."""
        try:
            return function()
        except RankUnavailableError:
            assert all(rank.lost for rank in driver.pool.ranks), "a rank was left to serve it"
            return None

    @rule(who=which, token_ids=tokens)
    def arrive(self, who, token_ids):
        self.drivers[who].sequences.append(Sequence(token_ids[: self.max_tokens]))

    @rule(who=which, number=index)
    def leave(self, who, number):
        """A sequence that is over: nothing of it is kept by name."""
        driver = self.drivers[who]
        if driver.sequences:
            sequence = driver.pick(number)
            self.deallocate(who=who, numbers=[number], keep=True)
            driver.sequences.remove(sequence)

    @rule(who=which, numbers=st.lists(index, min_size=1, max_size=5), token=st.none() | which)
    def allocate(self, who, numbers, token):
        driver = self.drivers[who]
        if not driver.sequences:
            return
        members = driver.pick_some(numbers)
        for sequence in members:
            if token is not None and sequence.single_block_id is not None:
                self.append(sequence, token)
        self.admit(driver, members)

    def append(self, sequence, token):
        if sequence.num_tokens < self.max_tokens:
            sequence.append(token)

    @rule(who=which, number=index, rank=which)
    def allocate_on(self, who, number, rank):
        """The caller chose the rank."""
        driver = self.drivers[who]
        if driver.sequences:
            sequence = driver.pick(number)
            if sequence.single_block_id is None:
                sequence.dp_rank = rank
            self.admit(driver, [sequence])

    @rule(who=which, number=index)
    def allocate_shared(self, who, number):
        driver = self.drivers[who]
        if driver.sequences:
            sequence = driver.pick(number)
            is_new = sequence.single_block_id is None
            self.do(driver, lambda: driver.pool.allocate_shared(sequence))
            if is_new:
                self.check_hit(driver, sequence)

    def admit(self, driver, members):
        held = {id(one): self.place_of(driver, one) for one in members}
        done = self.do(driver, lambda: driver.pool.allocate(members))
        for sequence in members:
            if done:
                state = sequence.kv_state
                assert state.num_blocks * state.block_size >= sequence.num_tokens
            if self.place_of(driver, sequence) != held[id(sequence)]:
                self.check_hit(driver, sequence)
        return done

    def place_of(self, driver, sequence):
        """Where a sequence lives; another one, and what it has computed came from a cache."""
        rank = sequence.dp_rank
        if sequence.single_block_id is None or self.is_lost(driver, sequence):
            return None
        return rank, driver.pool.ranks[rank].session, sequence.single_block_id

    def check_hit(self, driver, sequence):
        """Nothing from before the driver's reset is found any more."""
        if self.place_of(driver, sequence) is None:
            return
        slots = sequence.slot_ids(0, sequence.kv_state.num_computed_tokens)
        epoch = driver.pool.ranks[sequence.dp_rank].info.epoch
        for slot in slots.tolist():
            assert self.memory[epoch, slot][1] > driver.last_reset

    @rule(who=which, num_tokens=st.integers(2, 8), rank=which)
    def serve(self, who, num_tokens, rank):
        """A whole request, which leaves its blocks to be hit."""
        driver = self.drivers[who]
        sequence = Sequence([0] * min(num_tokens, self.max_tokens))
        sequence.dp_rank = rank
        driver.sequences.append(sequence)
        self.admit(driver, [sequence])
        number = len(driver.sequences) - 1
        self.compute(who=who, number=number, share=1)
        self.leave(who=who, number=number)

    @rule(who=which, number=index, share=st.sampled_from([0.3, 0.6, 1.0, 1.0]))
    def compute(self, who, number, share):
        """What a worker beside the rank does: owed copies first, then the next tokens."""
        driver = self.drivers[who]
        if not driver.sequences:
            return
        sequence = driver.pick(number)
        if sequence.single_block_id is None or not self.admit(driver, [sequence]):
            return
        if not self.copy(driver):
            return
        if sequence.single_block_id is None or self.is_lost(driver, sequence):
            return
        state = sequence.kv_state
        count = int((sequence.num_tokens - state.num_computed_tokens) * share)
        stop = state.num_computed_tokens + count
        if self.is_held(driver, sequence):
            self.write(driver, sequence, state.num_computed_tokens, stop)
        state.num_computed_tokens = stop

    def copy(self, driver):
        copies = self.do(driver, driver.pool.get_swap_block_transfer_infos)
        if copies is None:
            return False
        size = driver.pool.config.block_size
        for rank, pairs in zip(driver.pool.ranks, copies, strict=True):
            for source, target in pairs:
                for offset in range(size):
                    content = self.memory.get((rank.info.epoch, source * size + offset))
                    self.memory[rank.info.epoch, target * size + offset] = content
        if not self.do(driver, lambda: driver.pool.ack_swaps() or True):
            return False
        copies = self.do(driver, driver.pool.get_state_transfer_infos)
        if copies is None:
            return False
        for rank, pairs in zip(driver.pool.ranks, copies, strict=True):
            read = [self.states.get((rank.info.epoch, source)) for source, _ in pairs]
            for (_, target), content in zip(pairs, read, strict=True):
                self.states[rank.info.epoch, target] = content
        return self.do(driver, lambda: driver.pool.ack_state_transfers() or True)

    def write(self, driver, sequence, start, stop):
        epoch = driver.pool.ranks[sequence.dp_rank].info.epoch
        slots, text = sequence.slot_ids(0, stop).tolist(), tuple(sequence.token_ids.tolist())
        self.num_events += 1
        if sequence.linear_state_slot is not None:
            address = epoch, sequence.linear_state_slot
            assert not start or self.states[address] == text[:start]
            self.states[address] = text[:stop]
        for position in range(start, stop):
            before = self.memory[epoch, slots[position - 1]][1] if position else self.num_events
            content = text[: position + 1], min(before, self.num_events)
            self.memory[epoch, slots[position]] = content

    @rule(who=which, number=index, num_tokens=st.none() | st.integers(0, 10))
    def cache(self, who, number, num_tokens):
        driver = self.drivers[who]
        if driver.sequences:
            self.do(driver, lambda: driver.pool.cache(driver.pick(number), num_tokens))

    @rule(who=which, numbers=st.lists(index, min_size=1, max_size=4), keep=st.booleans())
    def deallocate(self, who, numbers, keep):
        driver = self.drivers[who]
        if not driver.sequences:
            return
        members = driver.pick_some(numbers)
        pool = driver.pool
        # Giving back never fails: what a lost rank held is gone.
        (pool.deallocate if keep else pool.deallocate_without_cache)(members)
        for sequence in members:
            assert sequence.single_block_id is None
            assert sequence.dp_rank is None

    @rule(who=which, number=index, token=st.none() | which)
    def fork(self, who, number, token):
        driver = self.drivers[who]
        if not driver.sequences or len(driver.sequences) > 12:
            return
        parent = driver.pick(number)
        child = self.do(driver, parent.fork)
        if child is None:
            return
        driver.sequences.append(child)
        if token is not None:
            self.append(child, token)
            self.admit(driver, [child])

    @rule(who=which)
    def reset_prefix_cache(self, who):
        driver = self.drivers[who]
        if self.do(driver, driver.pool.reset_prefix_cache) is not None:
            driver.last_reset = self.num_events

    @rule(who=which)
    def look(self, who):
        driver = self.drivers[who]
        self.do(driver, driver.pool.stats)
        self.do(driver, driver.pool.check_integrity)

    # -- what happens to it ------------------------------------------------------------------------

    @rule(rank=which, how=st.sampled_from(["kill", "freeze", "thaw", "restart"]))
    def strike(self, rank, how):
        if how != "restart" or self.hosts[rank].is_dead:
            getattr(self.hosts[rank], how)()
            self.is_calm = False

    @rule(kinds=st.dictionaries(st.sampled_from(CALL_FAULTS), st.floats(0.02, 0.4), max_size=3))
    def disturb(self, kinds):
        for kind in CALL_FAULTS:
            setattr(self.faults, kind, kinds.get(kind, 0.0))
        self.is_calm = self.is_calm and not kinds

    @rule(seconds=st.floats(0, 2 * LEASE_S), ranks=st.sets(which))
    def wait(self, seconds, ranks):
        """Time passes, and some of the ranks look at their leases."""
        self.now += seconds
        for rank in ranks:
            if self.hosts[rank]._failure is None:
                self.hosts[rank].host.expire()
        self.is_calm = False

    @rule(who=which)
    def beat(self, who):
        self.drivers[who].pool.monitor.beat()

    @rule()
    def calm_down(self):
        """The faults are over, and every driver has heard from every rank."""
        self.disturb({})
        for host in self.hosts:
            host.thaw()
            if host.is_dead:
                host.restart()
        for driver in self.drivers:
            # A death may be noticed, what is late may arrive, and the rank be taken back.
            for _ in range(3):
                driver.pool.monitor.beat()
                self.do(driver, driver.pool.stats)
            assert [rank.lost for rank in driver.pool.ranks] == [None, None]
        self.is_calm = True

    # -- what must hold ----------------------------------------------------------------------------

    def is_lost(self, driver, sequence):
        return any(id(sequence) in rank._mirror._gone for rank in driver.pool.ranks)

    def copy_on_rank(self, driver, sequence):
        """The rank's copy of a sequence, if it has one for this session of the driver."""
        rank = driver.pool.ranks[sequence.dp_rank]
        lease = self.hosts[sequence.dp_rank].host._service.leases._open.get(driver.name)
        if lease is None or lease.session != rank.session:
            return None
        return lease.sequences.by_id.get(sequence.seq_id)

    def is_held(self, driver, sequence):
        host = self.hosts[sequence.dp_rank]
        is_same = driver.pool.ranks[sequence.dp_rank].info.epoch == host.host._service.epoch
        return not host.is_dead and is_same and self.copy_on_rank(driver, sequence) is not None

    @invariant()
    def the_books_are_right(self):
        for host in getattr(self, "hosts", ()):
            if not host.is_dead:
                host.host._service.check_integrity()

    @invariant()
    def everyone_reads_his_own_tokens(self):
        for host in getattr(self, "hosts", ()):
            if host.is_dead:
                continue
            kv, epoch = host.host._kv, host.host._service.epoch
            owed = {
                target * kv.block_size + offset
                for swaps in kv._copies.owed.values()
                for target in swaps._due
                for offset in range(kv.block_size)
            }
            writable = []
            for sequence in kv._rows.sequences:
                if sequence is None:
                    continue
                num_computed = sequence.kv_state.num_computed_tokens
                text = tuple(sequence.token_ids.tolist())
                for position, slot in enumerate(sequence.slot_ids(0, num_computed).tolist()):
                    assert slot in owed or self.memory[epoch, slot][0] == text[: position + 1]
                first = -(-num_computed // kv.block_size)
                writable += sequence.kv_state.block_ids[first:].tolist()
            assert len(writable) == len(set(writable)), "a block is two sequences' to write"

    @invariant()
    def checkpoints_are_what_they_name(self):
        for host in getattr(self, "hosts", ()):
            kv, epoch = host.host._kv, host.host._service.epoch
            if host.is_dead or kv.linear_state is None:
                continue
            for checkpoint in kv.linear_state.slots.committed.values():
                prefix = checkpoint.prefix
                tokens = np.frombuffer(prefix.tokens, np.int32)[: prefix.num_tokens]
                assert self.states[epoch, checkpoint.slot] == tuple(tokens.tolist())

    @invariant()
    def a_driver_that_hears_lists_what_is_held(self):
        if not getattr(self, "is_calm", False):
            return
        for driver in self.drivers:
            for sequence in driver.sequences:
                if sequence.single_block_id is None or self.is_lost(driver, sequence):
                    continue
                theirs = self.copy_on_rank(driver, sequence)
                assert theirs is not None
                assert theirs.single_block_id == sequence.single_block_id
                assert theirs.linear_state_slot == sequence.linear_state_slot
                mine = sequence.kv_state
                assert theirs.kv_state.block_ids.tolist() == mine.block_ids.tolist()
                text = sequence.token_ids.tolist()
                assert theirs.token_ids.tolist() == text[: theirs.num_tokens]
        for rank, host in enumerate(self.hosts):
            for lease in host.host._service.leases.all():
                driver = next(one for one in self.drivers if one.name == lease.driver_id)
                known = {
                    sequence.seq_id
                    for sequence in driver.sequences
                    if sequence.dp_rank == rank and sequence.single_block_id is not None
                }
                assert lease.sequences.by_id.keys() <= known, "the rank holds what nobody knows of"


TestFaultsMachine = FaultsMachine.TestCase
TestFaultsMachine.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
class TestLongFaultsMachine(FaultsMachine.TestCase):
    settings = settings(max_examples=2500, stateful_step_count=80, deadline=None)
