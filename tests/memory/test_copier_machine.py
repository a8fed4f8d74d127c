"""Random batches, reassignments, faults and cancellations against a model of single blocks."""

from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from raykv.memory.block_copier import BlockCopier
from raykv.memory.copy_batches import BlockOutcome, Ticket
from raykv.memory.host_slab import HostSlab

from .copier_parts import (
    BLOCK_BYTES,
    NUM_ROWS,
    NUM_SLAB_BLOCKS,
    WAIT_S,
    Gate,
    as_bytes,
    device_rows,
)  # fmt: skip

faults = st.sampled_from([None, None, "fail"])
rows = st.integers(0, NUM_ROWS - 1)
blocks = st.integers(0, NUM_SLAB_BLOCKS - 1)
target_rows = st.lists(st.integers(1, NUM_ROWS - 1), unique=True, min_size=1)
target_blocks = st.lists(st.integers(1, NUM_SLAB_BLOCKS - 1), unique=True, min_size=1)


@dataclass
class Pending:
    ticket: Ticket
    fault: str | None


class CopierMachine(RuleBasedStateMachine):
    """The copier waits before each batch while the rules run; ``drain`` lets it go on."""

    def __init__(self):
        super().__init__()
        self.slab = HostSlab.create(NUM_SLAB_BLOCKS, BLOCK_BYTES)
        self.memory = device_rows()
        self.pending = []
        self.faults = {}
        self.gate = Gate(lambda batch: self.faults[id(batch)])
        self.copier = BlockCopier(self.slab, faults=self.gate)
        # The model: bytes, and what was summed where; None is no checksum.
        self.device = as_bytes(self.memory).copy()
        self.host = self.slab.blocks.copy()
        self.summed = [None] * NUM_SLAB_BLOCKS

    def teardown(self):
        self.drain()
        self.copier.close()
        self.copier.check_integrity()
        self.slab.close()

    def submit(self, direction, row_ids, block_ids, generations, with_checksums, fault):
        ticket = self.copier.submit(
            direction, self.memory, row_ids, block_ids,
            generations=generations, with_checksums=with_checksums,
        )  # fmt: skip
        self.faults[id(ticket.batch)] = fault  # nobody asks before the gate opens
        if not self.pending:
            assert self.gate.reached.wait(WAIT_S), "the first one starts"
        self.pending.append(Pending(ticket, fault))

    @rule(data=st.data(), to=target_blocks, sums=st.booleans(), fault=faults)
    def offload(self, data, to, sums, fault):
        source = data.draw(st.lists(rows, min_size=len(to), max_size=len(to)))
        generations = self.slab.reassign(to)
        for block in to:
            self.summed[block] = None
        self.submit("offload", source, to, generations, sums, fault)

    @rule(data=st.data(), to=target_rows, sums=st.booleans(), fault=faults)
    def load(self, data, to, sums, fault):
        source = data.draw(st.lists(blocks, min_size=len(to), max_size=len(to)))
        self.submit("load", to, source, self.slab.generations[source], sums, fault)

    @rule(ids=target_blocks)
    def reassign(self, ids):
        """Batches that wait for these blocks become stale."""
        self.slab.reassign(ids)
        for block in ids:
            self.summed[block] = None

    @rule(block=st.integers(1, NUM_SLAB_BLOCKS - 1), at=st.integers(0, BLOCK_BYTES - 1))
    def damage(self, block, at):
        """A zombie writes, between batches."""
        self.drain()
        self.slab.blocks[block, at] ^= 4
        self.host[block, at] ^= 4

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def cancel(self, data):
        pending = data.draw(st.sampled_from(self.pending))
        has_started = pending is self.pending[0]
        assert pending.ticket.cancel() != has_started
        if not has_started:
            self.called_off(pending)

    @rule(direction=st.sampled_from([None, "offload", "load"]))
    def cancel_queued(self, direction):
        cancelled = self.copier.cancel_queued(direction)
        expected = [
            pending
            for pending in self.pending[1:]
            if direction in {None, pending.ticket.batch.direction}
        ]
        assert cancelled == [pending.ticket for pending in expected]
        for pending in expected:
            self.called_off(pending)

    def called_off(self, pending):
        result = pending.ticket.wait(0)
        assert set(result.outcomes.tolist()) == {BlockOutcome.CANCELLED}
        self.pending.remove(pending)

    @rule()
    def drain(self):
        self.gate.opened.set()
        assert self.copier.wait_idle(WAIT_S)
        self.gate.opened.clear()
        self.gate.reached.clear()
        for pending in self.pending:
            batch = pending.ticket.batch
            expected = self.model(batch, pending.fault)
            assert pending.ticket.result.outcomes.tolist() == expected
        self.pending.clear()
        self.faults.clear()
        np.testing.assert_array_equal(as_bytes(self.memory), self.device)
        np.testing.assert_array_equal(self.slab.blocks, self.host)
        assert [bool(total) for total in self.slab.checksums] == [
            content is not None for content in self.summed
        ]

    def model(self, batch, fault):
        return [
            self.model_block(batch, row, block, generation, fault)
            for row, block, generation in zip(
                batch.device_ids.tolist(), batch.slab_ids.tolist(), batch.generations, strict=True
            )
        ]

    def model_block(self, batch, row, block, generation, fault):
        if self.slab.generations[block] != generation:
            return BlockOutcome.STALE
        if batch.direction == "offload":
            self.summed[block] = None
        if fault == "fail":
            return BlockOutcome.FAILED
        if batch.direction == "offload":
            self.host[block] = self.device[row]
            if batch.with_checksums:
                self.summed[block] = self.host[block].tobytes()
        else:
            self.device[row] = self.host[block]
            if batch.with_checksums and self.summed[block] != self.host[block].tobytes():
                return BlockOutcome.CORRUPT
        return BlockOutcome.OK

    @invariant()
    def the_books_balance(self):
        self.copier.check_integrity()
        self.slab.check_integrity()


TestCopierMachine = CopierMachine.TestCase
TestCopierMachine.settings = settings(max_examples=40, stateful_step_count=30)
