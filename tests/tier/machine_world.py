"""A world for random histories: copies move when they are told to, and KV knows its era."""

from __future__ import annotations

import random
import threading
import time

import numpy as np

from raykv.testing_tiers import TierFaults

from .tier_world import WAIT_S, World, token_kv, wait_until


class Turnstile:
    """Lets one rank's copies through one by one, each with its fault."""

    def __init__(self):
        self.is_open = False
        self.num_waiting = 0
        self._changed = threading.Condition()
        self._faults = []

    def enter(self):
        with self._changed:
            self.num_waiting += 1
            self._changed.notify_all()
            passed = self._changed.wait_for(lambda: self.is_open or self._faults, WAIT_S)
            self.num_waiting -= 1
            assert passed
            return self._faults.pop(0) if self._faults else None

    def let_one_through(self, fault):
        with self._changed:
            self._faults.append(fault)
            self._changed.notify_all()

    def open(self, *, is_open=True):
        with self._changed:
            self.is_open = is_open
            self._changed.notify_all()


class MachineWorld(World):
    """A World in which resets and updates begin eras, and each era's KV is another.

    So whoever is given KV from before a reset is found out.
    """

    def __init__(self, kind, seed, *, word_faults=0.0, **settings):
        self.offset_s = 0.0
        self.era = 0
        self.sequences = []
        self.born = {}  # the era of its admission, by identity
        self.eras = {}  # the era of each computed token, None where it was loaded across one
        self.asked = set()  # whose loads may have been started
        host = {"timeout_s": 100.0, "lease_s": 1e7} | settings.pop("host")
        super().__init__(kind, copy_faults=self, host=host, **settings)
        self.stiles = [Turnstile() for _ in range(self.config.dp_size)]
        for rank in range(self.config.dp_size):
            tier = self.kv_of(rank).tier
            tier._clock = tier._loads._clock = tier.link._clock = self.clock
        if word_faults:
            rng = random.Random(seed)
            self.tier.faults = TierFaults(rng, lost_call=word_faults, lost_reply=word_faults)

    def clock(self):
        return self.offset_s + time.monotonic()

    # -- copies ---------------------------------------------------------------------------------

    def on_copy(self, batch):
        for rank, stile in enumerate(self.stiles):
            if self.kv_of(rank).buffers.storage is batch.memory:
                return stile.enter()
        raise AssertionError("a copy of memory that is gone")

    def copy(self, rank, fault):
        """Let the next copy of a rank happen, if there is one."""
        copier = self.kv_of(rank).tier.link.copier
        num_held = 0 if copier is None else len(copier._held)
        if copier is None or not (copier.num_queued or copier.num_running > num_held):
            return
        stile, before = self.stiles[rank], copier.num_finished
        wait_until(lambda: stile.num_waiting)
        stile.let_one_through(fault)
        wait_until(lambda: copier.num_finished > before or len(copier._held) > num_held)
        wait_until(lambda: copier._running is None or stile.num_waiting)

    def open(self, *, is_open=True):
        for stile in self.stiles:
            stile.open(is_open=is_open)

    # -- sequences ------------------------------------------------------------------------------

    def note(self, sequence):
        """What it has computed without writing came from a cache."""
        eras = self.eras.setdefault(id(sequence), [])
        born = self.born.setdefault(id(sequence), self.era)
        came = born if born == self.era else None
        eras += [came] * (sequence.kv_state.num_computed_tokens - len(eras))

    def forget(self, sequence):
        self.sequences = [one for one in self.sequences if one is not sequence]
        for books in (self.born, self.eras):
            books.pop(id(sequence), None)
        self.asked.discard(id(sequence))

    def kv(self, sequence, position, era):
        return token_kv(sequence.token_ids, sequence.namespace, position) + era

    def write(self, sequence, num_tokens=None):
        self.note(sequence)
        state = sequence.kv_state
        before, stop = state.num_computed_tokens, num_tokens
        buffers = self.kv_of(sequence.dp_rank).buffers
        for position in range(before, stop):
            block, offset = divmod(position, state.block_size)
            value = self.kv(sequence, position, self.era)
            for name, part in zip("kv", value, strict=True):
                buffers.view(0, name)[state.block_ids[block], offset, 0] = part
        self.eras[id(sequence)] += [self.era] * (stop - before)
        state.num_computed_tokens = stop

    def find_wrong(self, sequence):
        self.note(sequence)
        state = sequence.kv_state
        if not state.num_computed_tokens:
            return []
        buffers = self.kv_of(sequence.dp_rank).buffers
        slots = sequence.slot_ids(0, state.num_computed_tokens)
        read = np.stack([buffers.read_slots(0, name, slots)[:, 0] for name in "kv"], axis=1)
        born = self.born[id(sequence)]
        return [
            position
            for position, era in enumerate(self.eras[id(sequence)][: state.num_computed_tokens])
            if not any(
                np.array_equal(read[position], self.kv(sequence, position, each))
                for each in ([era] if era is not None else range(born, self.era + 1))
            )
        ]

    def swap(self):
        """Carry out the copies that forks owe."""
        for pool in self.pools:
            for rank, pairs in enumerate(pool.get_swap_block_transfer_infos()):
                storage = self.kv_of(rank).buffers.storage
                for source, target in pairs:
                    storage[target] = storage[source]
            pool.ack_swaps()

    def check(self, *sequences):
        super().check(*sequences)
        for rank in range(self.config.dp_size):
            link = self.kv_of(rank).tier.link
            if link.copier is not None:
                link.copier.check_integrity()

    def drain(self):
        self.tier.faults = None
        self.open()
        super().drain()
