"""A rank whose sequences have recurrent state, and a memory that says what lies at each address.

``StateWorld`` plays the workers: it computes, does the copies that the rank asks for, and
overwrites whatever nobody holds. What must lie at an address is known from tokens and weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from raykv.config import PoolConfig
from raykv.core import Namespace, Sequence
from raykv.core.ledger import FREE
from raykv.rank import RankKV

SIZE = 4
RULES = ("at_stride", "at_prompt_end", "at_generation_end", "at_branch")


def make_rank(num_blocks=40, block_size=SIZE, num_slots=12, max_num_seqs=4, dp_rank=0, **settings):
    """A rank that keeps books only; what RankKV does not know is a setting of linear_state."""
    known = PoolConfig.model_fields
    states = {key: value for key, value in settings.items() if key not in known}
    others = {key: value for key, value in settings.items() if key in known}
    states.setdefault("stride_tokens", block_size)
    states.setdefault("match", "contiguous" if states.get("at_stride", True) else "deepest")
    config = PoolConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        linear_state={"num_slots": num_slots, **states},
        **others,
    )
    return RankKV(config, dp_rank)


def cells(tokens, namespace, start, stop, version, num_resets):
    """What tokens [start, stop) put into a state."""
    root, images = namespace.root, namespace.multimodal
    return tuple(
        (int(tokens[i]), root, tuple(m for m in images if m[0] == i), version, num_resets)
        for i in range(start, stop)
    )


class SplitBuffers:
    """As StateBuffers whose checkpoints are compressed: live states lie apart, one per row."""

    checkpoint_dtype = "bfloat16"
    checkpoint_bytes = 4

    def __init__(self, num_slots):
        self.live_base = num_slots

    def live_address(self, _slot, row):
        """The address of a row."""
        return self.live_base + row


@dataclass
class Worker:
    """What one driver's worker does: copies, in batches, as they were handed out."""

    batches: list[list[tuple[int, int]]] = field(default_factory=list)


class StateWorld:
    """See the module.

    A state is a tuple with an entry for each token that went into it: the token, whose it is, and
    with which weights and after how many resets it was computed.
    """

    def __init__(self, kv, *, split=False):
        self.kv = kv
        self.split = split
        if split:
            kv.states.buffers = SplitBuffers(kv.config.linear_state.num_slots)
        self.memory = {}
        self.expected = {}  # by sequence: what its live address must hold
        self.workers = {}
        self.num_resets = 0
        self.overwrite()

    # -- states ---------------------------------------------------------------------------------

    def cells(self, sequence, start, stop):
        """The state's entries for some tokens of a sequence, as computed now."""
        now = self.kv.weights_version, self.num_resets
        return cells(sequence.token_ids, sequence.namespace, start, stop, *now)

    def address(self, sequence):
        return self.kv.states._address(sequence)

    def worker(self, name=""):
        return self.workers.setdefault(name, Worker())

    def held(self):
        return [sequence for _, sequence in self.kv._rows.held()]

    def owed(self):
        """Addresses that a copy has yet to fill."""
        due = {t for owed in self.kv.states._copies._owed.values() for t in owed.copies._due}
        for worker in self.workers.values():
            due |= {target for batch in worker.batches for _, target in batch}
        return due

    # -- what happens ---------------------------------------------------------------------------

    def admit(self, tokens, namespace=None, driver="", num_tokens=None):
        """A new sequence, or None if there was no room."""
        if namespace is None:
            namespace = Namespace(weights_version=self.kv.weights_version)
        sequence = Sequence(tokens, namespace=namespace)
        sequence.driver_id = driver
        return sequence if self.allocate([sequence], num_tokens) else None

    def allocate(self, sequences, num_tokens=None):
        new = [one for one in sequences if one.single_block_id is None]
        if not self.kv.allocate(sequences, num_tokens):
            return False
        for one in new:
            self.begin(one)
        self.overwrite()
        return True

    def begin(self, sequence):
        """What a sequence found is what its own tokens make, under its weights, since the reset."""
        num_hit = sequence.kv_state.num_computed_tokens
        assert sequence.namespace.weights_version == self.kv.weights_version
        self.expected[sequence] = self.cells(sequence, 0, num_hit)

    def take(self, driver=""):
        """Fetch copies; they wait for ``execute``."""
        copies = self.kv.take_state_copies(driver)
        if copies:
            targets = [target for _, target in copies]
            assert len(set(targets)) == len(targets)
            assert 0 not in targets
            self.worker(driver).batches.append(copies)
        return copies

    def execute(self, driver=""):
        """Do what was fetched: of each batch, all sources are read before a target is written."""
        worker = self.worker(driver)
        for batch in worker.batches:
            contents = [self.memory.get(source) for source, _ in batch]
            for (_, target), content in zip(batch, contents, strict=True):
                self.memory[target] = content
        worker.batches.clear()

    def acknowledge(self, driver=""):
        assert not self.worker(driver).batches, "only what was done is acknowledged"
        self.kv.ack_state_transfers(driver)

    def fail_save(self, driver=""):
        """What the engine does after a step: saves alone, and the device fails."""
        if self.worker(driver).batches or self.kv.states._copies._owed.get(driver) is None:
            return
        self.acknowledge(driver)
        self.kv.take_state_saves(driver)
        self.kv.fail_state_transfers(driver)

    def copy(self, driver=""):
        """Fetch, do and acknowledge, as a worker does before each step."""
        self.kv.take_swaps(driver)
        self.kv.ack_swaps(driver)
        copies = self.take(driver)
        self.execute(driver)
        self.acknowledge(driver)
        return copies

    def compute(self, sequence, count=None, *, how="copy"):
        """Compute the next tokens.

        Before that the worker copies: all there is ("copy"), without saying so ("unsaid"), or only
        what it fetched already ("late"), unless its own state is still to be copied, or a fork's
        from it.
        """
        driver, state = sequence.driver_id, sequence.kv_state
        if how == "copy":
            self.copy(driver)
        elif how == "unsaid" or self.must_copy(sequence):
            self.take(driver)
        self.execute(driver)
        start = state.num_computed_tokens
        left = sequence.num_tokens - start
        stop = start + (left if count is None else min(count, left))
        address = self.address(sequence)
        before = self.memory[address] if start else ()
        assert before == self.expected[sequence]
        self.expected[sequence] += self.cells(sequence, start, stop)
        self.memory[address] = self.expected[sequence]
        state.num_computed_tokens = stop

    def must_copy(self, sequence):
        """Whether copies are due without which its state, or a fork's, would be lost."""
        owed = self.kv.states._copies._owed.get(sequence.driver_id)
        due = {} if owed is None else owed.copies._due
        return any(
            self.address(sequence) in (target, one.source) and target not in owed.due
            for target, one in due.items()
        )

    def prefill(self, sequence, *, ack=True):
        """Compute all that is there, stopping for each checkpoint; publish at each stop."""
        state = sequence.kv_state
        while state.num_computed_tokens < sequence.num_tokens:
            stop = self.kv.next_checkpoint(sequence) or sequence.num_tokens
            stop = min(stop, sequence.num_tokens)
            self.compute(sequence, stop - state.num_computed_tokens)
            self.kv.cache(sequence)
            if ack:
                self.copy(sequence.driver_id)

    def decode(self, sequence, tokens):
        """Grow by each token, compute it, and let boundaries be saved."""
        for token in tokens:
            sequence.append(token)
            assert self.allocate([sequence])
            self.compute(sequence)
            self.kv.cache(sequence)
            self.copy(sequence.driver_id)

    def serve(self, tokens, generated=(), **kwargs):
        """A whole life; returns the hit in tokens."""
        sequence = self.admit(tokens, **kwargs)
        assert sequence is not None
        num_hit = sequence.kv_state.num_computed_tokens
        self.prefill(sequence)
        self.decode(sequence, generated)
        self.release(sequence)
        return num_hit

    def hit(self, tokens, **kwargs):
        """Tokens that a sequence would reuse now."""
        sequence = self.admit(tokens, **kwargs)
        num_hit = sequence.kv_state.num_computed_tokens
        self.compute(sequence, 0)
        self.release(sequence, publish=False)
        return num_hit

    def fork(self, parent):
        child = Sequence(parent.token_ids, namespace=parent.namespace)
        child.driver_id = parent.driver_id
        self.kv.fork(parent, child)
        if child.single_block_id is not None:
            self.expected[child] = self.expected[parent]
            self.overwrite()
        return child

    def release(self, sequence, *, publish=True):
        kv = self.kv
        (kv.deallocate if publish else kv.deallocate_without_cache)(sequence)
        self.expected.pop(sequence, None)
        self.overwrite()

    def reset(self):
        self.kv.reset_prefix_cache()
        self.num_resets += 1

    def forget_driver(self, driver):
        """The driver is dead, and its worker with it."""
        for sequence in [one for one in self.held() if one.driver_id == driver]:
            self.release(sequence, publish=False)
        self.kv.forget_driver(driver)
        self.workers.pop(driver, None)

    def overwrite(self):
        """What nobody holds may hold anything."""
        slots = self.kv.linear_state.slots
        slots.settle()
        for slot in np.flatnonzero(slots._ledger.counts == FREE).tolist():
            self.memory[slot] = object()
        if self.split:
            singles = self.kv.single_block_manager
            singles.check_integrity()  # settles what was dropped
            base = self.kv.config.linear_state.num_slots
            for row in np.flatnonzero(singles._ledger.counts == FREE).tolist():
                self.memory[base + row] = object()

    # -- what must hold -------------------------------------------------------------------------

    def check(self):
        """Books, live states and checkpoints."""
        self.kv.check_integrity()
        self.overwrite()
        owed = self.owed()
        for sequence in self.held():
            if sequence.kv_state.num_computed_tokens and self.address(sequence) not in owed:
                assert self.memory[self.address(sequence)] == self.expected[sequence]
        for checkpoint in self.kv.linear_state.slots.committed.values():
            prefix, namespace = checkpoint.prefix, checkpoint.prefix.namespace
            tokens = np.frombuffer(prefix.tokens, np.int32)
            now = namespace.weights_version, self.num_resets
            wanted = cells(tokens, namespace, 0, prefix.num_tokens, *now)
            assert self.memory[checkpoint.slot] == wanted
            named = tokens[: prefix.num_tokens]
            hasher = self.kv.block_manager.hasher
            assert checkpoint.prefix_hash == hasher.name(named, namespace=namespace)
            assert prefix.num_tokens % self.kv.block_size == 0

    def check_drained(self):
        """Nothing is held any more but what can be reclaimed."""
        self.kv.check_integrity()
        cache, kv = self.kv.linear_state, self.kv
        assert cache.num_live_slots == cache.num_pending == cache.num_lingering_slots == 0
        assert cache.num_free_slots + cache.num_reclaimable == cache.num_total_slots
        assert kv.single_block_manager.num_free_blocks == kv.single_block_manager.num_total_blocks
        stats = kv.rank_stats()
        assert stats.num_used_blocks == stats.num_pending_blocks == 0
        assert not kv.states._plans


def only(*rules):
    """Settings under which these rules alone make checkpoints."""
    return {rule: rule in rules for rule in RULES}


def text(num_tokens, first=0):
    return list(range(first, first + num_tokens))


def checkpoints(world):
    """Tokens of each prefix that has a checkpoint."""
    return sorted(one.prefix.num_tokens for one in world.kv.linear_state.slots.committed.values())


def forget_checkpoint(world, num_tokens):
    """As if its slot had been reclaimed."""
    slots = world.kv.linear_state.slots
    [name] = [k for k, one in slots.committed.items() if one.prefix.num_tokens == num_tokens]
    one = slots.committed.pop(name)
    del slots._queue(one)[one.slot], slots._checkpoints[one.slot]
    slots._unproven.discard(one.slot)
    slots._ledger.give_back_one(one.slot)
    world.overwrite()


def books(world):
    """Everything that a refused call must leave as it was, the orders of eviction included."""
    kv = world.kv
    slots, order = kv.linear_state.slots, kv.block_manager._cache._order
    return (
        kv.rank_stats(),
        slots._ledger.counts.tolist(),
        list(slots._recent),
        list(slots._spare),
        list(slots.committed),
        kv.block_manager._ledger.counts.tolist(),
        [(run.index, run.length) for run in order._queue],
        list(order._stamps),
        kv.single_block_manager._ledger.counts.tolist(),
    )


def is_blank(sequence):
    return (
        sequence.dp_rank is sequence.single_block_id is sequence.linear_state_slot is None
        and sequence.kv_state.num_blocks == sequence.kv_state.num_computed_tokens == 0
        and sequence.kv_state.checkpoint_stops == ()
    )


def fill(world, count=None):
    """Running sequences that share nothing, until no more are admitted."""
    made = []
    while count is None or len(made) < count:
        sequence = world.admit(text(2, 1000 + 10 * len(world.held())))
        if sequence is None:
            return made
        made.append(sequence)
    return made
