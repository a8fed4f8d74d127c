"""The copier: what arrives, in which order, what is called off and what is refused."""

import gc
import threading
import weakref

import numpy as np
import pytest

from raykv.errors import IntegrityError, TransferError
from raykv.memory.block_copier import BlockCopier
from raykv.memory.buffers import KVBuffers
from raykv.memory.checksums import NO_CHECKSUM, block_checksum
from raykv.memory.copy_batches import BlockOutcome
from raykv.memory.host_slab import HostSlab
from raykv.memory.spec import KVSpec

from .copier_parts import (
    BLOCK_BYTES,
    NUM_ROWS,
    WAIT_S,
    Gate,
    Script,
    as_bytes,
    device_rows,
    load,
    offload,
    outcomes,
    pattern,
    wait_until,
)

OK, FAILED, CANCELLED = BlockOutcome.OK, BlockOutcome.FAILED, BlockOutcome.CANCELLED
STALE = BlockOutcome.STALE
checksums_or_none = pytest.mark.parametrize("with_checksums", [True, False])


# -- what arrives ----------------------------------------------------------------------------------


@checksums_or_none
def test_every_block_arrives_where_it_should_and_nowhere_else(slab, make_copier, with_checksums):
    copier = make_copier()
    source, target = device_rows(), device_rows(key=1)
    rows, blocks = [3, 4, 5, 8, 1], [7, 8, 9, 2, 12]
    before = slab.blocks.copy()
    ticket = offload(copier, source, rows, blocks, with_checksums=with_checksums)
    assert outcomes(ticket) == [OK] * 5
    assert ticket.result.error is None
    assert ticket.result.is_ok.all()
    assert ticket.result.count(OK) == 5
    before[blocks] = as_bytes(source)[rows]
    np.testing.assert_array_equal(slab.blocks, before)
    np.testing.assert_array_equal(as_bytes(source), as_bytes(device_rows()))

    to, taken = [8, 7, 1, 2], [7, 12, 2, 9]
    expected = as_bytes(target).copy()
    expected[to] = [pattern(0, row) for row in (3, 1, 8, 5)]
    assert outcomes(load(copier, target, to, taken, with_checksums=with_checksums)) == [OK] * 4
    np.testing.assert_array_equal(as_bytes(target), expected)
    np.testing.assert_array_equal(slab.blocks, before)
    sums = [block_checksum(block) if with_checksums else NO_CHECKSUM for block in before[blocks]]
    assert slab.checksums[blocks].tolist() == sums


def test_real_buffers(make_copier):
    spec = KVSpec.uniform(5, 1, 13, 2, "float16")
    buffers = KVBuffers(spec, NUM_ROWS, device="cpu")
    assert spec.block_bytes == BLOCK_BYTES
    buffers.storage[:] = device_rows().view(np.float16)
    copier = make_copier()
    assert outcomes(offload(copier, buffers.storage, [2, 3], [5, 4])) == [OK, OK]
    assert outcomes(load(copier, buffers.storage, [7, 8], [4, 5])) == [OK, OK]
    for row, source in ((7, 3), (8, 2)):
        np.testing.assert_array_equal(as_bytes(buffers.storage)[row], pattern(0, source))


def test_one_block_may_be_loaded_to_many_rows(make_copier):
    copier, memory = make_copier(), device_rows()
    assert outcomes(offload(copier, memory, [3], [6])) == [OK]
    assert outcomes(load(copier, memory, [1, 2, 5], [6, 6, 6])) == [OK] * 3
    for row in (1, 2, 5):
        np.testing.assert_array_equal(as_bytes(memory)[row], pattern(0, 3))


def test_an_empty_batch_is_done(make_copier):
    copier = make_copier()
    assert outcomes(offload(copier, device_rows(), [], [])) == []
    assert outcomes(load(copier, device_rows(), [], [])) == []


def test_batches_go_in_order(make_copier):
    gate = Gate()
    copier = make_copier(gate)
    memory = device_rows()
    tickets = []
    for step in range(1, 60):  # 1 -> 2 -> ... -> 8 -> 1, through the slab
        source, target = (step - 1) % 8 + 1, step % 8 + 1
        block = step % 12 + 1
        generations = copier.slab.reassign([block]) if step <= 12 else [1]
        for direction, row in (("offload", source), ("load", target)):
            tickets.append(
                copier.submit(direction, memory, [row], [block], generations=generations)
            )
    assert copier.num_queued + copier.num_running == len(tickets)
    gate.opened.set()
    assert copier.wait_idle(WAIT_S)
    assert all(outcomes(ticket) == [OK] for ticket in tickets)
    assert copier.num_finished == len(tickets)
    assert (as_bytes(memory)[1:] == pattern(0, 1)).all(), "all are what the first one was"


def test_the_callers_arrays_are_its_own_again(make_copier):
    gate = Gate()
    copier, memory = make_copier(gate), device_rows()
    rows, blocks = np.array([3]), np.array([6])
    generations = copier.slab.reassign(blocks)
    ticket = copier.submit("offload", memory, rows, blocks, generations=generations)
    rows[:], blocks[:], generations[:] = 1, 2, 99
    gate.opened.set()
    assert outcomes(ticket) == [OK]
    np.testing.assert_array_equal(copier.slab.blocks[6], pattern(0, 3))


def test_a_copier_that_waits_keeps_no_memory(make_copier):
    copier, memory = make_copier(), device_rows()
    storage = weakref.ref(memory)
    assert outcomes(offload(copier, memory, [1], [5])) == [OK]
    assert copier.wait_idle(WAIT_S)
    del memory
    gc.collect()
    assert wait_until(lambda: storage() is None)


# -- late and called off ---------------------------------------------------------------------------


def test_a_late_batch_comes_after_the_next_one(slab, make_copier):
    copier, memory = make_copier(Script("late")), device_rows()
    late = offload(copier, memory, [1], [5])
    assert late.wait(0.05) is None
    assert not late.is_done
    assert not late.cancel(), "it has started: nobody knows what it has touched"
    assert not copier.wait_idle(0.01)
    assert copier.num_running == 1
    copier.check_integrity()
    np.testing.assert_array_equal(slab.blocks[5], 0)
    assert outcomes(offload(copier, memory, [2], [6])) == [OK]
    assert outcomes(late) == [OK]
    assert copier.wait_idle(WAIT_S)


def test_a_late_batch_may_be_stale_when_it_comes(slab, make_copier):
    copier, memory = make_copier(Script("late")), device_rows()
    late = offload(copier, memory, [1], [5])
    assert outcomes(offload(copier, memory, [2], [5])) == [OK]
    assert outcomes(late) == [STALE]
    np.testing.assert_array_equal(slab.blocks[5], pattern(0, 2))


def test_closing_carries_out_what_is_late(make_copier):
    copier, memory = make_copier(Script("late")), device_rows()
    late = offload(copier, memory, [1], [5])
    assert late.wait(0.05) is None
    copier.close()
    assert outcomes(late) == [OK]


def test_what_has_not_started_can_be_called_off(slab, make_copier):
    gate = Gate()
    copier, memory = make_copier(gate), device_rows()
    running, first, second, third = (
        offload(copier, memory, [row], [row + 2]) for row in (1, 2, 3, 4)
    )
    assert gate.reached.wait(WAIT_S)
    assert not running.cancel()
    assert second.cancel()
    assert outcomes(second) == [CANCELLED]
    assert second.result.error is None
    assert not second.cancel(), "once"
    assert (copier.num_running, copier.num_queued, copier.num_cancelled) == (1, 2, 1)
    copier.check_integrity()
    gate.opened.set()
    assert [outcomes(ticket) for ticket in (running, first, third)] == [[OK]] * 3
    assert not third.cancel()
    assert not slab.blocks[5].any()


def test_offloads_can_be_called_off_alone(make_copier):
    gate = Gate()
    copier, memory = make_copier(gate), device_rows()
    running = offload(copier, memory, [1], [5])
    assert gate.reached.wait(WAIT_S)
    loading = load(copier, memory, [6], [5])
    waiting = [offload(copier, memory, [row], [row + 5]) for row in (2, 3)]
    assert copier.cancel_queued("offload") == waiting
    assert not loading.is_done
    gate.opened.set()
    assert outcomes(loading) == outcomes(running) == [OK]
    assert copier.cancel_queued() == []


def test_close_finishes_what_runs_and_calls_off_the_rest(slab, make_copier):
    gate = Gate()
    copier, memory = make_copier(gate), device_rows()
    running = offload(copier, memory, [1], [5])
    assert gate.reached.wait(WAIT_S)
    waiting = offload(copier, memory, [2], [6])
    closing = threading.Thread(target=copier.close)
    closing.start()
    assert outcomes(waiting) == [CANCELLED]
    assert not running.is_done
    gate.opened.set()
    closing.join(WAIT_S)
    assert outcomes(running) == [OK]
    copier.close()
    with pytest.raises(TransferError, match="copier is closed"):
        offload(copier, memory, [1], [5])
    assert "raykv-copier" not in {thread.name for thread in threading.enumerate()}


def test_a_closed_slab_is_refused():
    slab = HostSlab.create(2, 8)
    slab.close()
    with pytest.raises(TransferError, match="slab is closed"):
        BlockCopier(slab)


def test_a_slab_closed_under_the_copier_fails_its_batches(make_copier):
    gate = Gate()
    copier, memory = make_copier(gate), device_rows()
    ticket = offload(copier, memory, [1], [5])
    blocks = copier.slab.blocks
    copier.slab.close()
    gate.opened.set()
    assert outcomes(ticket) == [FAILED]
    assert not blocks.any()


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("direction", "rows", "blocks", "generations", "message"),
    [
        ("offload", [1], [0], [0], "slab_ids holds 0, the padding"),
        ("load", [0], [1], [0], "device_ids holds 0, the padding"),
        ("offload", [1, 2], [3, 3], [0, 0], "slab_ids holds block 3 2 times"),
        ("load", [3, 3], [1, 2], [0, 0], "device_ids holds block 3 2 times"),
        ("offload", [9], [1], [0], "device_ids spans 9"),
        ("load", [1], [13], [0], "slab_ids spans 13"),
        ("offload", [1, 2], [1], [0], "2 device_ids, 1 slab_ids and 1 generations"),
        ("load", [1], [1], [0, 0], "1 device_ids, 1 slab_ids and 2 generations"),
        ("store", [1], [1], [0], "'store', not offload or load"),
    ],
)
def test_bad_batches_are_refused(make_copier, direction, rows, blocks, generations, message):
    copier = make_copier()
    with pytest.raises(ValueError, match=message):
        copier.submit(direction, device_rows(), rows, blocks, generations=generations)
    assert copier.num_queued == copier.num_running == copier.num_finished == 0


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ([[0] * BLOCK_BYTES] * 3, "is a builtins.list, but the copier needs a numpy.ndarray"),
        (np.zeros((9, 8), np.uint8), r"\(9, 8\) has 8 bytes in a row.* have 520"),
        (np.zeros((0, BLOCK_BYTES), np.uint8), "released memory has no rows"),
        (np.zeros((9, 2 * BLOCK_BYTES), np.uint8)[:, ::2], "must be contiguous"),
        (np.zeros(BLOCK_BYTES, np.uint8), r"must be contiguous \[rows"),
    ],
)
def test_memory_that_does_not_fit_is_refused(make_copier, memory, message):
    copier = make_copier()
    with pytest.raises(ValueError, match=message):
        copier.submit("load", memory, [1], [1], generations=[0])


@pytest.mark.parametrize("counter", ["num_finished", "num_cancelled", "_num_submitted"])
def test_books_that_do_not_balance_are_found(make_copier, counter):
    copier = make_copier()
    offload(copier, device_rows(), [1], [5]).wait(WAIT_S)
    assert copier.wait_idle(WAIT_S)
    copier.check_integrity()
    setattr(copier, counter, getattr(copier, counter) + 1)
    with pytest.raises(IntegrityError, match="batches were submitted"):
        copier.check_integrity()
    setattr(copier, counter, getattr(copier, counter) - 1)
