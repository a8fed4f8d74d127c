"""Faults of the copier: what does not arrive as it was is a miss, and is said to be one."""

import signal

import numpy as np
import pytest

from raykv.memory import block_transfer
from raykv.memory.checksums import NO_CHECKSUM
from raykv.memory.copy_batches import BlockOutcome

from .copier_parts import (
    WAIT_S,
    Gate,
    Script,
    as_bytes,
    device_rows,
    load,
    offload,
    outcomes,
    pattern,
)
from .peers import attach

OK, STALE, CORRUPT, FAILED = (
    BlockOutcome.OK, BlockOutcome.STALE, BlockOutcome.CORRUPT, BlockOutcome.FAILED,
)  # fmt: skip
checksums_or_none = pytest.mark.parametrize("with_checksums", [True, False])


def test_a_block_without_a_checksum_is_not_loaded_as_checked(make_copier):
    copier, memory = make_copier(), device_rows()
    offload(copier, memory, [1], [5], with_checksums=False)
    assert outcomes(load(copier, memory, [2], [5])) == [CORRUPT]
    assert outcomes(load(copier, memory, [2], [6])) == [CORRUPT]


def test_a_checksum_goes_with_the_content_that_it_was_of(slab, make_copier):
    copier, memory = make_copier(), device_rows()
    offload(copier, memory, [1], [5]).wait(WAIT_S)
    again = {"generations": slab.generations[[5]], "with_checksums": False}
    copier.submit("offload", memory, [2], [5], **again).wait(WAIT_S)
    assert slab.checksums[5] == NO_CHECKSUM


@checksums_or_none
def test_a_damaged_block_is_found_by_its_checksum_alone(slab, make_copier, with_checksums):
    copier, memory = make_copier(), device_rows()
    offload(copier, memory, [1, 2, 3], [5, 6, 7]).wait(WAIT_S)
    slab.blocks[6, 100] ^= 1
    ticket = load(copier, memory, [4, 5, 6], [5, 6, 7], with_checksums=with_checksums)
    assert outcomes(ticket) == ([OK, CORRUPT, OK] if with_checksums else [OK] * 3)
    assert ticket.result.error is None


@checksums_or_none
@pytest.mark.parametrize("direction", ["offload", "load"])
def test_damage_on_the_way_is_found(make_copier, direction, with_checksums):
    """The negative control is the same without checksums: the changed bytes pass."""
    copier = make_copier(Script("corrupt") if direction == "offload" else Script(None, "corrupt"))
    memory, target = device_rows(), device_rows(key=1)
    offload(copier, memory, [1, 2, 3], [5, 6, 7], with_checksums=with_checksums)
    got = outcomes(load(copier, target, [4, 5, 6], [5, 6, 7], with_checksums=with_checksums))
    assert got == ([OK, CORRUPT, OK] if with_checksums else [OK] * 3)
    arrived = [bool((as_bytes(target)[3 + row] == pattern(0, row)).all()) for row in (1, 2, 3)]
    assert arrived == [True, False, True]


def tear(monkeypatch, change):
    """Let something happen in the middle of each copy."""

    def copy(_, target, source):
        half = target.shape[1] // 2
        target[:, :half] = source[:, :half]
        change()
        target[:, half:] = source[:, half:]

    monkeypatch.setattr(block_transfer.HostChannel, "copy", copy)


def test_a_source_that_changes_under_the_copy_is_never_valid(slab, make_copier, monkeypatch):
    copier, memory = make_copier(), device_rows()

    def change():
        as_bytes(memory)[1] = pattern(9, 9)

    with monkeypatch.context() as patch:
        tear(patch, change)
        offload(copier, memory, [1, 2], [5, 6]).wait(WAIT_S)
    mixed = slab.blocks[5]
    assert (mixed != pattern(0, 1)).any()
    assert (mixed != pattern(9, 9)).any()
    assert outcomes(load(copier, memory, [3, 4], [5, 6])) == [CORRUPT, OK]


def test_a_slab_block_that_changes_under_a_load_is_found(slab, make_copier, monkeypatch):
    copier, memory = make_copier(), device_rows()
    offload(copier, memory, [1], [5]).wait(WAIT_S)

    def change():
        slab.blocks[5] = pattern(9, 9)

    tear(monkeypatch, change)
    assert outcomes(load(copier, memory, [3], [5])) == [CORRUPT]


@checksums_or_none
def test_a_generation_that_changes_under_the_copy_is_stale(
    slab, make_copier, monkeypatch, with_checksums
):
    copier, memory = make_copier(), device_rows()
    offload(copier, memory, [1, 2], [5, 8], with_checksums=with_checksums).wait(WAIT_S)
    with monkeypatch.context() as patch:
        tear(patch, lambda: slab.reassign([5]))
        got = outcomes(load(copier, memory, [3, 4], [5, 8], with_checksums=with_checksums))
        assert got == [STALE, OK]
        tear(patch, lambda: slab.reassign([6]))
        got = outcomes(offload(copier, memory, [1, 2], [6, 9], with_checksums=with_checksums))
        assert got == [STALE, OK]
    assert slab.checksums[6] == NO_CHECKSUM
    assert (slab.checksums[9] != NO_CHECKSUM) == with_checksums


@checksums_or_none
def test_what_is_stale_before_is_left_alone(slab, make_copier, with_checksums):
    copier, memory = make_copier(), device_rows()
    offload(copier, memory, [1, 2, 3], [5, 6, 7], with_checksums=with_checksums).wait(WAIT_S)
    told = slab.generations[[5, 6, 7]]
    slab.reassign([6])
    slab.checksums[6] = 77
    before = slab.blocks.copy(), as_bytes(memory).copy()
    options = {"generations": told, "with_checksums": with_checksums}
    got = outcomes(copier.submit("load", memory, [6, 7, 8], [5, 6, 7], **options))
    assert got == [OK, STALE, OK]
    np.testing.assert_array_equal(as_bytes(memory)[7], before[1][7])
    got = outcomes(copier.submit("offload", memory, [1, 8, 3], [5, 6, 7], **options))
    assert got == [OK, STALE, OK]
    np.testing.assert_array_equal(slab.blocks, before[0])
    assert slab.checksums[6] == 77


@checksums_or_none
def test_a_failed_copy_is_a_failed_result_and_the_next_one_works(make_copier, with_checksums):
    copier, memory = make_copier(Script("fail", None, "fail")), device_rows()
    options = {"with_checksums": with_checksums}
    ticket = offload(copier, memory, [1, 2], [5, 6], **options)
    assert outcomes(ticket) == [FAILED] * 2
    assert "OSError: the copy was made to fail" in ticket.result.error
    assert not copier.slab.blocks.any()
    assert outcomes(offload(copier, memory, [1, 2], [5, 6], **options)) == [OK] * 2
    before = memory.copy()
    assert outcomes(load(copier, memory, [3, 4], [5, 6], **options)) == [FAILED] * 2
    np.testing.assert_array_equal(memory, before)
    assert outcomes(load(copier, memory, [3, 4], [5, 6], **options)) == [OK] * 2


@checksums_or_none
def test_of_a_short_copy_only_whole_blocks_count(slab, make_copier, with_checksums):
    copier, memory = make_copier(Script("short", None, "short")), device_rows()
    options = {"with_checksums": with_checksums}
    rows, blocks = [1, 3, 5, 7], [5, 7, 9, 11]  # each a stretch of its own
    ticket = offload(copier, memory, rows, blocks, **options)
    assert outcomes(ticket) == [OK, OK, FAILED, FAILED]
    assert "made to short" in ticket.result.error
    assert slab.blocks[9].any()
    assert (slab.blocks[9] != as_bytes(memory)[5]).any()
    assert (slab.checksums[blocks] != NO_CHECKSUM).tolist() == [with_checksums] * 2 + [False] * 2
    if with_checksums:
        assert outcomes(load(copier, memory, [2, 4, 6], [5, 9, 11])) == [OK, CORRUPT, CORRUPT]
    else:
        offload(copier, memory, rows, blocks, **options).wait(WAIT_S)
    assert outcomes(load(copier, memory, [2, 4], [5, 7], **options)) == [OK, FAILED]


@pytest.mark.parametrize("error", [MemoryError("none left"), ZeroDivisionError("odd")])
def test_no_error_kills_the_thread(make_copier, monkeypatch, error):
    copier, memory = make_copier(), device_rows()

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(block_transfer, "block_checksum", fail)
        ticket = offload(copier, memory, [1], [5])
        assert outcomes(ticket) == [FAILED]
    assert ticket.result.error == f"{type(error).__name__}: {error}"
    with monkeypatch.context() as patch:
        patch.setattr(block_transfer.Transfer, "run", fail)
        assert outcomes(offload(copier, memory, [1], [5])) == [FAILED]
    with monkeypatch.context() as patch:
        patch.setattr(block_transfer.HostChannel, "finish", fail)
        assert outcomes(offload(copier, memory, [1], [5])) == [FAILED]
    assert copier.slab.checksums[5] == NO_CHECKSUM
    copier.check_integrity()
    assert outcomes(offload(copier, memory, [1], [5])) == [OK]


def test_faults_that_raise_are_one_more_fault(make_copier):
    copier, memory = make_copier(Gate(lambda _: 1 // 0)), device_rows()
    copier._faults.opened.set()
    ticket = offload(copier, memory, [1], [5])
    assert outcomes(ticket) == [FAILED]
    assert "ZeroDivisionError" in ticket.result.error


DIES_IN_MID_COPY = """
import os, signal
import numpy as np
from raykv.memory.block_copier import BlockCopier
from raykv.memory.block_transfer import HostChannel

memory = np.frombuffer({content!r}, np.uint8).reshape(2, -1).repeat(2, axis=0)
copier = BlockCopier(slab)
copier.submit("offload", memory, [2], [5], generations=slab.generations[[5]]).wait()

def copy(_, target, source):
    half = target.shape[1] // 2
    target[:, :half] = source[:, :half]
    os.kill(os.getpid(), signal.SIGKILL)

HostChannel.copy = copy
copier.submit("offload", memory, [2], [6], generations=slab.generations[[6]]).wait()
"""


@checksums_or_none
def test_what_a_killed_process_left_half_written_is_no_data(
    slab, make_copier, new_peer, with_checksums
):
    """The negative control is the same without checksums: half a block passes for one."""
    slab.reassign([5, 6])
    peer = new_peer()
    attach(peer, slab.descriptor)
    content = np.stack([pattern(1), pattern(2)])
    peer.start(DIES_IN_MID_COPY.format(content=content.tobytes()))
    assert peer.process.wait(WAIT_S) == -signal.SIGKILL
    memory = device_rows()
    ticket = load(make_copier(), memory, [3, 4], [5, 6], with_checksums=with_checksums)
    assert outcomes(ticket) == ([OK, CORRUPT] if with_checksums else [OK, OK])
    np.testing.assert_array_equal(as_bytes(memory)[3], pattern(2))
    assert (as_bytes(memory)[4] == pattern(2)).sum() >= memory.shape[1]
    assert (as_bytes(memory)[4] != pattern(2)).any()
