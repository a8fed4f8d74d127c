"""Checkpoints of a real hybrid model on their way to the host and to another rank.

Logits of a sequence that goes on from a checkpoint that was loaded are those of the plain model of
transformers, run over the sequence in one piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from raykv.core import Namespace, Sequence
from raykv.engine import random_models
from raykv.host.host_states import HostStates
from raykv.host.state_tickets import StateOffer
from raykv.host.tickets import LoadOutcome
from raykv.memory.block_copier import BlockCopier
from raykv.memory.host_slab import HostSlab
from raykv.tiering.state_tiers import StateTiers

from .test_hybrid_engine import BLOCK, CLEAR, ROUNDING, Serving, draw

NUM_HOST_SLOTS, WAIT_S = 6, 60
PROMPT, SPACE = draw(20, 75), Namespace()


@pytest.fixture(scope="module")
def model():
    return random_models.build("qwen3_5-tiny")


@dataclass
class Host:
    """What a node keeps: checkpoints in a slab with their books, and the KV of the prompt."""

    slab: HostSlab
    copier: BlockCopier
    books: HostStates
    kv: np.ndarray | None = None
    with_checksums: bool = True

    def copy(self, direction, buffers, slots, tickets):
        """Copy rows of a rank's checkpoints; what became of each."""
        copy = self.copier.submit(
            direction,
            buffers.slots,
            slots,
            [ticket.host_slot for ticket in tickets],
            generations=np.array([ticket.generation for ticket in tickets], np.uint64),
            with_checksums=self.with_checksums,
        )
        return copy.wait(WAIT_S).outcomes.tolist()

    def offload(self, serving, tokens):
        """All checkpoints of a rank that are worth it, and the KV; the boundaries."""
        kv = serving.kv
        pins = StateTiers(kv.states, kv.block_manager).pin_checkpoints(tokens, SPACE)
        slots = {pin.num_tokens: pin.slot for pin in pins}
        [tickets] = self.books.offer(
            "a", [StateOffer(np.array(tokens, np.int32), SPACE, tuple(slots))]
        )
        outcomes = self.copy(
            "offload", kv.state_buffers, [slots[ticket.num_tokens] for ticket in tickets], tickets
        )
        self.books.stored(
            "a",
            [
                (ticket.id, outcome == LoadOutcome.OK, int(self.slab.checksums[ticket.host_slot]))
                for ticket, outcome in zip(tickets, outcomes, strict=True)
            ],
        )
        for pin in pins:
            pin.release()
        with kv.block_manager.allocate_shared(np.array(tokens, np.int32)) as blocks:
            self.kv = kv.buffers.storage[blocks.index].copy()
        return list(slots)

    def load(self, serving, sequence, *, goes_on):
        """The deepest checkpoint for a sequence; what became of it, and whether it goes on."""
        kv = serving.kv
        tiers = StateTiers(kv.states, kv.block_manager)
        ticket = self.books.find(
            "b", sequence.token_ids, SPACE, step_tokens=tiers.step_tokens,
            min_tokens=sequence.kv_state.num_computed_tokens,
        )  # fmt: skip
        target = tiers.begin_load(sequence, ticket.num_tokens)
        assert not target.existing
        [outcome] = self.copy("load", kv.state_buffers, [target.slot], [ticket])
        self.books.loaded("b", [(ticket.id, outcome)])
        is_ok = outcome == LoadOutcome.OK
        if is_ok and self.with_checksums:
            there = self.slab.blocks[ticket.host_slot]
            assert np.array_equal(kv.state_buffers.slots[target.slot], there)
            assert there.any()
        started = tiers.finish_load(sequence if goes_on else None, target, ok=is_ok)
        return ticket.num_tokens, outcome, started


@pytest.fixture
def make_host():
    made = []

    def make(serving, **options):
        slab = HostSlab.create(NUM_HOST_SLOTS, serving.kv.state_buffers.checkpoint_bytes)
        books = HostStates(NUM_HOST_SLOTS, BLOCK, slab.generations)
        made.append(Host(slab, BlockCopier(slab), books, **options))
        return made[-1]

    yield make
    for host in made:
        host.books.check_integrity()
        host.copier.close()
        host.slab.close()


def offloaded(model, make_host, *, with_checksums=True, **states):
    """A rank that has served the prompt, and a host that has what it left."""
    first = Serving(model, **states)
    first.submit({"p": PROMPT})
    first.run()
    [output] = first.outputs.values()
    host = make_host(first, with_checksums=with_checksums)
    return first, host, host.offload(first, [*PROMPT, *output.token_ids])


def prepare_in_line(serving, host):
    """KV and state are loaded while the request waits; then it finds both in the cache."""
    manager, num_blocks = serving.kv.block_manager, len(PROMPT) // BLOCK
    with manager.allocate(num_blocks) as blocks:
        serving.kv.buffers.storage[blocks.index] = host.kv[:num_blocks]
        manager.cache(np.array(PROMPT[: num_blocks * BLOCK], np.int32), blocks)
    return host.load(serving, Sequence(PROMPT), goes_on=False)


def load_on_admission(serving, host, loads):
    """The request is admitted first, and goes on from what is loaded into its blocks."""
    allocate = serving.kv.allocate

    def admit_and_load(sequences, num_tokens=None):
        is_new = isinstance(sequences, Sequence) and sequences.single_block_id is None
        if not allocate(sequences, num_tokens):
            return False
        if is_new:
            ids = sequences.kv_state.block_ids[: len(PROMPT) // BLOCK]
            serving.kv.buffers.storage[ids] = host.kv[: len(ids)]
            loads.append(host.load(serving, sequences, goes_on=True))
        return True

    serving.kv.allocate = admit_and_load


def serve_again(model, host, way, tamper=lambda _: None, **states):
    """Another rank serves the prompt from what the host has."""
    second, loads = Serving(model, **states), []
    tamper(host)
    if way == "in line":
        loads.append(prepare_in_line(second, host))
    else:
        load_on_admission(second, host, loads)
    second.submit({"p": PROMPT})
    second.run()
    [output] = second.outputs.values()
    [load] = loads
    return second, load, output.num_cached_tokens


WAYS = pytest.mark.parametrize("way", ["in line", "on admission"])


@WAYS
@pytest.mark.parametrize("match", ["deepest", "contiguous"])
def test_another_rank_goes_on_from_what_the_host_has(model, make_host, way, match):
    _, host, boundaries = offloaded(model, make_host, match=match)
    assert boundaries == ([80, 72] if match == "deepest" else [64, 32])
    at = 72 if match == "deepest" else 64
    second, load, num_cached = serve_again(model, host, way, match=match)
    assert load == (at, LoadOutcome.OK, way == "on admission")
    # Others hit under contiguous only if the device has those before it, too.
    assert num_cached == (0 if (way, match) == ("in line", "contiguous") else at)
    worst, num_rows = second.worst({"p": PROMPT})
    assert num_rows == 12
    assert worst < ROUNDING


def zeroed(host):
    host.slab.blocks[1:] = 0


def exchanged(host):
    host.slab.blocks[[1, 2]] = host.slab.blocks[[2, 1]]


@WAYS
@pytest.mark.parametrize("tamper", [zeroed, exchanged])
def test_a_wrong_state_shows(model, make_host, way, tamper):
    """Negative control: without checksums, the state of no prefix or of another one."""
    _, host, _ = offloaded(model, make_host, with_checksums=False)
    second, load, num_cached = serve_again(model, host, way, tamper)
    assert load[:2] == (72, LoadOutcome.OK)
    assert num_cached == 72
    assert second.worst({"p": PROMPT})[0] > CLEAR


@WAYS
@pytest.mark.parametrize("tamper", [zeroed, exchanged])
def test_checksums_see_it_and_the_prompt_is_computed(model, make_host, way, tamper):
    _, host, _ = offloaded(model, make_host)
    second, load, num_cached = serve_again(model, host, way, tamper)
    assert load == (72, LoadOutcome.CORRUPT, False)
    assert num_cached == 0
    assert second.worst({"p": PROMPT})[0] < ROUNDING
    assert host.books.stats().corrupt == 1
    limits = {"min_tokens": 71, "max_tokens": 72}
    assert host.books.find("b", np.array(PROMPT, np.int32), SPACE, **limits) is None


@WAYS
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_fewer_bits_travel_as_they_are(model, make_host, way, dtype):
    """The other rank gets the logits that the first one itself gets from its checkpoint."""
    first, host, _ = offloaded(model, make_host, checkpoint_dtype=dtype)
    first.submit({"p": PROMPT}, prefix="again ")
    first.run()
    second, load, num_cached = serve_again(model, host, way, checkpoint_dtype=dtype)
    assert load[:2] == (72, LoadOutcome.OK)
    assert num_cached == 72
    position = len(PROMPT)
    own, other = first.engine.seen["again p", 0, position], second.engine.seen["p", 0, position]
    assert np.abs(own - other).max() < ROUNDING
    computed = first.engine.seen["p", 0, position]
    assert np.abs(computed - other).max() > ROUNDING, "it was rounded, so it did come from there"
