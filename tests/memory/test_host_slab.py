"""The slab between processes, and its refusals."""

import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from raykv.errors import ConfigError, IntegrityError, TransferError
from raykv.memory.host_slab import HostSlab, _name

from .peers import attach, descriptor_of, holders, num_open_files

NUM_BLOCKS, BLOCK_BYTES = 9, 5000


@pytest.fixture
def slab():
    with HostSlab.create(NUM_BLOCKS, BLOCK_BYTES) as slab:
        yield slab


# -- one process -----------------------------------------------------------------------------------


def test_layout(slab):
    assert slab.blocks.shape == (NUM_BLOCKS, BLOCK_BYTES)
    assert slab.blocks.dtype == np.uint8
    assert slab.blocks.flags.c_contiguous
    assert slab.blocks.ctypes.data % 4096 == 0
    assert slab.nbytes == NUM_BLOCKS * BLOCK_BYTES
    for array in (slab.generations, slab.checksums):
        assert array.shape == (NUM_BLOCKS,)
        assert array.dtype == np.uint64
    assert not slab.blocks.any()
    assert not slab.generations.any()
    assert not slab.checksums.any()
    assert slab.page_kind in {"hugetlb", "transparent", "small"}


def test_nothing_overlaps(slab):
    slab.blocks[1:] = np.arange(1, NUM_BLOCKS, dtype=np.uint8)[:, None]
    slab.generations[1:] = 7
    slab.checksums[1:] = np.iinfo(np.uint64).max
    assert (slab.blocks[1:] == np.arange(1, NUM_BLOCKS)[:, None]).all()
    assert (slab.generations[1:] == 7).all()
    assert (slab.checksums[1:] == np.iinfo(np.uint64).max).all()
    slab.check_integrity()


def test_reassigning_raises_generations_and_drops_checksums(slab):
    slab.checksums[1:] = 5
    assert slab.reassign([3, 1]).tolist() == [1, 1]
    assert slab.reassign([3]).tolist() == [2]
    assert slab.reassign([]).size == 0
    assert slab.generations.tolist() == [0, 1, 0, 2, 0, 0, 0, 0, 0]
    assert slab.checksums.tolist() == [0, 0, 5, 0, 5, 5, 5, 5, 5]


@pytest.mark.parametrize(
    ("ids", "message"), [([0], "padding"), ([9], "spans 9"), ([2, 2], "block 2 2 times")]
)
def test_bad_ids_reassign_nothing(slab, ids, message):
    with pytest.raises(ValueError, match=message):
        slab.reassign(ids)
    assert not slab.generations.any()


def test_populate_changes_no_content(slab):
    slab.blocks[3] = 4
    slab.populate()
    assert (slab.blocks[3] == 4).all()
    assert not slab.blocks[4:].any()


@pytest.mark.parametrize("what", ["blocks", "generations", "checksums"])
def test_a_written_padding_block_is_found(slab, what):
    slab.check_integrity()
    getattr(slab, what)[0] = 1
    with pytest.raises(IntegrityError, match="padding block"):
        slab.check_integrity()


def test_a_written_header_is_found(slab):
    slab._region.memory[0] = 0
    with pytest.raises(IntegrityError, match="header"):
        slab.check_integrity()


def test_close_lets_go_and_leaves_views_alone():
    slab = HostSlab.create(NUM_BLOCKS, BLOCK_BYTES)
    name = _name(slab.descriptor.token)
    view = slab.blocks[3]
    for _ in range(2):
        slab.close()
        assert slab.is_closed
        assert slab.nbytes == slab.generations.size == slab.checksums.size == 0
    view[:] = 7
    assert view.sum() == 7 * BLOCK_BYTES
    assert holders(name) == {os.getpid()}
    del view
    assert holders(name) == set()
    for use in (
        lambda: slab.descriptor,
        lambda: slab.reassign([1]),
        slab.populate,
        slab.check_integrity,
        lambda: slab.register_pinned(np),
    ):
        with pytest.raises(TransferError, match=r"closed.*attach"):
            use()


@pytest.mark.parametrize(
    ("num_blocks", "block_bytes", "message"),
    [(1, 8, r"host\.num_blocks is 1.*at least 2"), (2, 0, "has 0 bytes.*at least 1")],
)
def test_impossible_sizes_are_refused(num_blocks, block_bytes, message):
    with pytest.raises(ConfigError, match=message):
        HostSlab.create(num_blocks, block_bytes)


# -- several processes -----------------------------------------------------------------------------


def test_all_processes_see_the_same(slab, new_peer):
    peer = new_peer()
    attach(peer, slab.descriptor)
    slab.blocks[3] = 7
    assert peer.run("answer = slab.blocks[3].tolist()") == [7] * BLOCK_BYTES
    peer.run("slab.blocks[8, -1] = 9; slab.reassign([4]); slab.checksums[4] = 11")
    assert slab.blocks[8, -1] == 9
    assert (slab.generations[4], slab.checksums[4]) == (1, 11)
    peer.run("slab.close()")
    assert slab.blocks[8, -1] == 9


def test_the_slab_outlives_its_creator(new_peer):
    owner, reader, late = new_peer(), new_peer(), new_peer()
    owner.run("slab = HostSlab.create(9, 5000); slab.blocks[5] = 42")
    first = descriptor_of(owner)
    attach(reader, first)
    owner.kill()
    assert reader.run("answer = slab.blocks[5].tolist()") == [42] * BLOCK_BYTES
    reader.run("slab.blocks[6] = 43")
    with pytest.raises(RuntimeError, match=rf"TransferError: process {first.pid} does not hold"):
        attach(late, first)
    attach(late, descriptor_of(reader))
    assert late.run("answer = int(slab.blocks[6, 0])") == 43


def test_nothing_is_left_after_sigkill_of_all(new_peer):
    owner, reader = new_peer(), new_peer()
    owner.run("slab = HostSlab.create(9, 5000); slab.blocks[5] = 42")
    descriptor = descriptor_of(owner)
    name = _name(descriptor.token)
    attach(reader, descriptor)
    assert holders(name) == {owner.process.pid, reader.process.pid}
    owner.kill()
    assert holders(name) == {reader.process.pid}
    reader.kill()
    assert holders(name) == set()


def test_a_pid_that_was_used_again_fools_nobody(slab, new_peer):
    """Another slab lies where the descriptor points, of the same size, even of the same name."""
    peer = new_peer()
    peer.run("slab = HostSlab.create(9, 5000)")
    other = descriptor_of(peer)
    wanted = slab.descriptor
    fake = replace(other, token=wanted.token)
    with pytest.raises(TransferError, match=r"does not hold.*but /memfd:raykv.*new descriptor"):
        HostSlab.attach(fake)
    same_name = replace(other, token=other.token[:4] + wanted.token[4:])
    with pytest.raises(TransferError, match=r"is not the slab.*9 blocks of 5000 bytes"):
        HostSlab.attach(same_name)
    HostSlab.attach(other).close()


@pytest.mark.parametrize(
    "changes", [{"num_blocks": 8}, {"num_blocks": 1 << 40}, {"block_bytes": 4096}]
)
def test_other_sizes_are_refused(slab, changes):
    before = num_open_files()
    with pytest.raises(TransferError, match="is not the slab"):
        HostSlab.attach(replace(slab.descriptor, **changes))
    assert num_open_files() == before


def test_what_is_no_slab_is_not_opened(slab, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    fd = os.open(pipe, os.O_RDWR)
    try:
        with pytest.raises(TransferError, match=r"does not hold.*but .*pipe"):
            HostSlab.attach(replace(slab.descriptor, fd=fd))
    finally:
        os.close(fd)
    with pytest.raises(TransferError, match="No such file"):
        HostSlab.attach(replace(slab.descriptor, fd=1 << 20))


def test_memory_that_may_shrink_is_refused(slab):
    token = slab.descriptor.token
    fd = os.memfd_create(_name(token))
    try:
        os.ftruncate(fd, 1 << 20)
        before = num_open_files()
        with pytest.raises(TransferError, match="its size may change"):
            HostSlab.attach(replace(slab.descriptor, fd=fd))
        assert num_open_files() == before
    finally:
        os.close(fd)
    with pytest.raises(PermissionError):
        os.ftruncate(slab.descriptor.fd, 0)


def test_the_token_is_not_shown(slab):
    assert slab.descriptor.token.hex()[8:] not in repr(slab.descriptor)
    assert repr(slab.descriptor.token) not in repr(slab.descriptor)


# -- pinned ----------------------------------------------------------------------------------------


def fake_cuda(*, works=True):
    calls = []

    def register(address, num_bytes, flags):
        if not works:
            raise RuntimeError("no memory")
        calls.append(("register", address, num_bytes, flags))

    runtime = SimpleNamespace(
        hostRegister=register, hostUnregister=lambda address: calls.append(("undo", address))
    )
    return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)), calls


def test_pinning_is_done_once_and_undone(slab):
    xp, calls = fake_cuda()
    address = slab.blocks.ctypes.data
    assert slab.register_pinned(xp)
    assert slab.register_pinned(xp)
    slab.close()
    slab.close()
    assert calls == [("register", address, NUM_BLOCKS * BLOCK_BYTES, 1), ("undo", address)]


def test_without_pinning_the_slab_works(slab):
    assert not slab.register_pinned(np)
    xp, calls = fake_cuda(works=False)
    assert not slab.register_pinned(xp)
    slab.close()
    assert calls == []
