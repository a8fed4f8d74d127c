"""The cache of recurrent states in step with the reference, over random histories.

After every step the slots' states, all counters, what can be matched and ``check_integrity()`` are
compared. Teardown lets everything go and requires that no slot was lost.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raykv.core import Blocks, CheckedPrefix, LinearStatePrefixCache, Namespace, Sequence
from raykv.core.linear_state import Reservation
from raykv.errors import DoubleFreeError, RequestError

from .state_reference import Label, Saved, StateModel, is_same

MAX_HELD = 5
names = st.sampled_from([b"a", b"b", b"c", b"d"])
labels = st.one_of(
    st.just(("one", 0)), st.sampled_from([None, ("one", 0), ("one", 1), ("other", 0), ("two", 2)])
)
picks = st.integers(0, 11)


def prefix_of(label: Label) -> CheckedPrefix | None:
    """Made anew each time, so that nothing is equal for being the same object."""
    if label is None:
        return None
    tokens = np.array([len(label[0]), ord(label[0][1])], np.int32).tobytes()
    return CheckedPrefix(tokens, 2, Namespace(weights_version=label[1]))


@dataclass
class Running:
    """A sequence, and the handle of its slot where it was not detached."""

    sequence: Sequence
    handle: Blocks | None

    @property
    def slot(self) -> int:
        return self.sequence.linear_state_slot


@dataclass
class Reserved:
    real: Reservation
    claim: Saved | None  # None: it existed
    label: Label


class States(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.running: list[Running] = []
        self.reserved: list[Reserved] = []
        self.pins: list[tuple[Blocks, int]] = []
        self.done: list[Reservation] = []

    @initialize(num_slots=st.integers(2, 7))
    def start(self, num_slots):
        self.real = LinearStatePrefixCache(num_slots)
        self.model = StateModel(num_slots)

    # -- helpers -------------------------------------------------------------------------------

    def run_sequence(self, slot, handle):
        self.model.live.add(slot)
        sequence = Sequence([1])
        sequence.linear_state_slot = slot
        self.running.append(Running(sequence, handle))

    def keep_pin(self, real: Blocks, slot):
        assert real.ids.tolist() == [slot]
        self.model.pins[slot] += 1
        self.pins.append((real, slot))
        if len(self.pins) > MAX_HELD:
            self.unpin(0)

    # -- live slots ----------------------------------------------------------------------------

    @rule(keep=st.booleans())
    def acquire(self, keep):
        handle = self.real.acquire_live_slot()
        if not self.model.can_take():
            assert handle is None
            return
        slot = int(handle.ids[0])
        self.model.take(slot)
        if not keep:
            handle.detach()
        self.run_sequence(slot, handle if keep else None)
        if len(self.running) > MAX_HELD:
            self.release_live(0)

    @rule(num_slots=st.integers(0, 4), keep=st.booleans())
    def acquire_several(self, num_slots, keep):
        handle = self.real.acquire_live_slots(num_slots)
        if not self.model.can_take(num_slots):
            assert handle is None
            return
        slots = handle.ids.tolist()
        # Those that were free lie in no order among the others.
        for slot in sorted(slots, key=lambda slot: slot not in self.model.free):
            self.take_one_of(slot, slots)
        if not keep and slots:
            handle.detach()
        for slot in slots:
            self.run_sequence(slot, handle if keep else None)

    def take_one_of(self, slot, slots):
        """Reclaimed ones come in the order of their use, whatever the handle's."""
        if slot not in self.model.free:
            slot = next(iter(self.model.victims() & set(slots)))
        self.model.take(slot)

    @precondition(lambda self: self.running)
    @rule(index=picks)
    def release_live(self, index):
        running = self.running.pop(index % len(self.running))
        self.model.release_live(running.slot)
        self.real.release_live_slot(running.sequence)
        assert running.sequence.linear_state_slot is None
        self.real.release_live_slot(running.sequence)

    @precondition(lambda self: any(running.handle for running in self.running))
    @rule(index=picks, in_cycle=st.booleans())
    def let_a_handle_go(self, index, in_cycle):
        """With it go all slots that it lists."""
        handles = [running.handle for running in self.running if running.handle is not None]
        handle = handles[index % len(handles)]
        slots = handle.ids.tolist()
        del handles
        self.running = [running for running in self.running if running.handle is not handle]
        if in_cycle:
            cycle = [handle]
            cycle.append(cycle)
            del handle, cycle
            gc.collect(0)
        else:
            handle.release()
        for slot in slots:
            self.model.release_live(slot)

    @precondition(lambda self: any(running.handle for running in self.running))
    @rule(index=picks)
    def pin_live(self, index):
        handles = [running.handle for running in self.running if running.handle is not None]
        handle = handles[index % len(handles)]
        self.keep_pin(handle[:1].pin(), int(handle.ids[0]))

    # -- checkpoints ---------------------------------------------------------------------------

    @rule(name=names, label=labels, is_spare=st.booleans())
    def reserve(self, name, label, is_spare):
        real = self.real.reserve_checkpoint(name, prefix=prefix_of(label), is_speculative=is_spare)
        there = self.model.saved.get(name)
        if self.model.collides(name, label):
            assert real is None
        elif there is not None:
            assert (real.existing, real.slot) == (True, there.slot)
            if not is_spare:
                self.model.prove(there)
            self.reserved.append(Reserved(real, None, label))
        elif self.model.claim(name) is not None:
            assert real is None
            self.model.totals["coalesced"] += 1
        elif not self.model.can_take():
            assert real is None
            self.model.skip(name)
        else:
            assert not real.existing
            self.model.take(real.slot)
            claim = Saved(name, real.slot, label, is_spare=is_spare)
            self.model.pending.append(claim)
            self.reserved.append(Reserved(real, claim, label))
        if len(self.reserved) > MAX_HELD:
            self.drop_reservation(0, in_cycle=False)

    @precondition(lambda self: self.reserved)
    @rule(index=picks, in_cycle=st.booleans())
    def drop_reservation(self, index, in_cycle):
        reserved = self.reserved.pop(index % len(self.reserved))
        if reserved.claim is not None:
            self.model.drop_reservation(reserved.claim)
        if in_cycle:
            cycle = [reserved]
            cycle.append(cycle)
            del reserved, cycle
            gc.collect(0)
        else:
            reserved.real.release()
            self.done.append(reserved.real)

    @precondition(lambda self: self.reserved)
    @rule(index=picks)
    def commit(self, index):
        reserved = self.reserved.pop(index % len(self.reserved))
        if reserved.claim is None:
            expected = self.model.commit_existing(reserved.real.prefix_hash, reserved.label)
        else:
            expected = self.model.commit(reserved.claim)
        assert self.real.commit(reserved.real) == expected
        self.done.append(reserved.real)

    @precondition(lambda self: self.done)
    @rule()
    def commit_again(self):
        for reservation in self.done:
            with pytest.raises(DoubleFreeError):
                self.real.commit(reservation)
            reservation.release()
        self.done.clear()

    @rule(name=names, label=labels)
    def match(self, name, label):
        real = self.real.match(name, prefix=prefix_of(label))
        there = self.model.saved.get(name)
        if there is None or self.model.collides(name, label):
            assert real is None
        else:
            self.model.totals["hits"] += 1
            self.model.prove(there)
            self.keep_pin(real, there.slot)

    @precondition(lambda self: self.pins)
    @rule(index=picks)
    def share_a_pin(self, index):
        real, slot = self.pins[index % len(self.pins)]
        self.keep_pin(real.share(), slot)

    @precondition(lambda self: self.pins)
    @rule(index=picks)
    def unpin(self, index):
        real, slot = self.pins.pop(index % len(self.pins))
        real.release()
        self.model.unpin(slot)

    @precondition(lambda self: self.pins)
    @rule(index=picks)
    def drop_a_pin(self, index):
        _, slot = self.pins.pop(index % len(self.pins))
        self.model.unpin(slot)

    @precondition(lambda self: self.running)
    @rule(index=picks, name=names, label=labels, final=st.booleans())
    def promote(self, index, name, label, final):
        running = self.running[index % len(self.running)]
        live, there = running.slot, self.model.saved.get(name)
        pin = self.real.promote(running.sequence, name, final=final, prefix=prefix_of(label))
        fresh = running.slot
        if self.model.collides(name, label):
            assert pin is None
            self.end_if(final, running, live)
        elif there is not None:
            self.model.prove(there)
            self.keep_pin(pin, there.slot)
            self.end_if(final, running, live)
        elif not final and not self.model.can_take():
            assert (pin, fresh) == (None, live)
            self.model.skip(name)
        else:
            if final:
                self.running.remove(running)
            else:
                self.model.take(fresh)
                self.model.live.add(fresh)
            self.model.live.remove(live)
            self.model.save(Saved(name, live, label))
            self.keep_pin(pin, live)
        assert (fresh is None) == final
        if running.handle is not None:
            listed = {each.slot for each in self.running if each.handle is running.handle}
            assert set(running.handle.ids.tolist()) == listed

    def end_if(self, final, running, live):
        if final:
            self.running.remove(running)
            self.model.release_live(live)
        else:
            assert running.slot == live

    @rule(slot=st.integers(-1, 8))
    def use_what_is_not_live(self, slot):
        if slot in self.model.live:
            return
        sequence = Sequence([1])
        sequence.linear_state_slot = slot
        with pytest.raises(RequestError):
            self.real.promote(sequence, b"a")
        with pytest.raises(DoubleFreeError):
            self.real.release_live_slot(sequence)

    @rule()
    def clear(self):
        assert self.real.clear() == self.model.clear()

    @rule(version=st.integers(0, 2))
    def retire(self, version):
        assert self.real.retire(version) == self.model.retire(version)

    # -- after each step -----------------------------------------------------------------------

    @invariant()
    def the_slots_are_in_step(self):
        if not hasattr(self, "real"):
            return
        real, model = self.real, self.model
        real.check_integrity()
        committed = {each.slot for each in model.saved.values()}
        pending = [each.slot for each in model.pending]
        states = [*model.free, *model.live, *committed, *pending, *model.lingering()]
        assert sorted(states) == list(range(1, model.num_slots))
        assert sorted(running.slot for running in self.running) == sorted(model.live)
        assert (
            real.num_free_slots,
            real.num_live_slots,
            real.num_pending,
            real.num_checkpoints,
            real.num_reclaimable,
            real.num_lingering_slots,
        ) == (
            len(model.free),
            len(model.live),
            len(pending),
            len(committed),
            len(model.reclaimable()),
            len(model.lingering()),
        )
        assert {
            name: getattr(real, f"num_{name}_total")
            for name in ("committed", "hits", "skipped", "coalesced", "collisions", "reclaimed")
        } == {
            name: model.totals[name]
            for name in ("committed", "hits", "skipped", "coalesced", "collisions", "reclaimed")
        }

    @invariant()
    def the_names_are_in_step(self):
        if not hasattr(self, "real"):
            return
        for name in (b"a", b"b", b"c", b"d"):
            there = self.model.saved.get(name)
            assert self.real.contains(name) == (there is not None)
            assert self.real.was_skipped(name) == (name in self.model.skipped)
            for label in (None, ("one", 0), ("one", 1), ("other", 0)):
                expected = there is not None and is_same(there.label, label)
                assert self.real.verify(name, prefix_of(label)) == expected
            if there is not None:
                assert self.real.slots.hash_of(there.slot) == name

    def teardown(self):
        if not hasattr(self, "real"):
            return
        while self.running:
            self.release_live(0)
        while self.reserved:
            self.drop_reservation(0, in_cycle=False)
        while self.pins:
            self.unpin(0)
        self.the_slots_are_in_step()
        self.clear()
        self.the_slots_are_in_step()
        assert self.real.num_free_slots == self.model.num_slots - 1


TestStates = States.TestCase
TestStates.settings = settings(max_examples=150, stateful_step_count=60)


@pytest.mark.nightly
class TestLongStates(States.TestCase):
    settings = settings(max_examples=2000, stateful_step_count=150)
