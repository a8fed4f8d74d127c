"""Versions and sleep of a rank without engine, as its life cycle is asked for them."""

from __future__ import annotations

import gc
import weakref

import pytest

from raykv.core import Sequence
from raykv.engine.lifecycle import Lifecycle
from raykv.errors import NotSupportedError, RequestError

from .test_versions import MEMORY, World, make_rank


@pytest.fixture
def world():
    world = World(make_rank())
    yield world
    world.kv.check_integrity()


# -- over the life cycle ---------------------------------------------------------------------------


def test_versions_only_grow(world):
    cycle = Lifecycle(world.kv)
    for version in (3, 7):
        cycle.prepare_weights(version, None)
        assert cycle.weights_status().version < version
        cycle.apply_weights(version)
        assert cycle.weights_status().version == world.kv.weights_version == version
    for version in (7, 6, 0, -1, 8.0, "8", None):
        with pytest.raises(RequestError, match="version"):
            cycle.prepare_weights(version, None)
    with pytest.raises(RequestError, match="not prepared"):
        cycle.apply_weights(8)
    assert world.kv.weights_version == 7


def test_an_update_given_up_changes_nothing(world):
    cycle = Lifecycle(world.kv)
    cycle.prepare_weights(2, None)
    with pytest.raises(RequestError, match="changing to weights version 2"):
        cycle.prepare_weights(3, None)
    with pytest.raises(RequestError, match="changing to weights version 2"):
        cycle.sleep(1)
    cycle.cancel_weights(3)
    assert cycle.weights_status().pending == 2
    cycle.cancel_weights(2)
    with pytest.raises(RequestError, match="not prepared"):
        cycle.apply_weights(2)
    cycle.prepare_weights(1, None)
    cycle.apply_weights(1)
    assert world.kv.weights_version == 1


def test_a_rank_without_engine_has_no_weights(world):
    with pytest.raises(NotSupportedError, match="no engine"):
        Lifecycle(world.kv).prepare_weights(1, {})
    assert Lifecycle(world.kv).weights_status().pending is None


# -- sleep -----------------------------------------------------------------------------------------


def test_sleep_gives_the_memory_back_and_forgets_everything():
    kv = make_rank(memory=MEMORY)
    cycle, world = Lifecycle(kv), World(kv)
    sequence = world.admit(range(13))
    world.compute(sequence)
    kv.deallocate(sequence)
    buffers, storage = kv.buffers, weakref.ref(kv.buffers.storage)
    storage()[:] = 1
    cycle.sleep(2)
    assert storage() is None
    assert kv.buffers is buffers
    assert buffers.nbytes == 0
    stats = kv.rank_stats()
    assert stats.num_free_blocks == stats.num_total_blocks == 19
    assert stats.num_blocks_in_prefix_cache == 0
    assert cycle.weights_status().asleep == ("kv_cache",), "there are no weights here"
    for call in (kv.allocate, kv.allocate_shared):
        with pytest.raises(RequestError, match="wake_up"):
            call(Sequence([1, 2]))
    cycle.sleep(1)
    cycle.wake_up(["weights"])
    assert kv.is_asleep
    for _ in range(2):
        cycle.wake_up()
    assert cycle.weights_status().asleep == ()
    assert buffers.storage.shape == (20, buffers.spec.block_elements)
    assert not buffers.storage.any()
    assert world.num_found(range(13), 0) == 0


def test_waking_twice_keeps_what_was_written_between():
    kv = make_rank(memory=MEMORY)
    cycle = Lifecycle(kv)
    cycle.sleep(1)
    cycle.wake_up()
    kv.buffers.storage[3] = 7
    cycle.wake_up()
    assert (kv.buffers.storage[3] == 7).all()


def held_by_a_sequence(world):
    sequence = world.admit(range(9))
    return lambda: world.kv.deallocate_without_cache(sequence)


def held_by_a_row(world):
    sequence = Sequence(range(9))
    world.kv.allocate_shared(sequence)
    return lambda: world.kv.deallocate_without_cache(sequence)


def held_by_a_handle(world):
    return world.kv.block_manager.allocate(3).release


def held_by_a_copy(world):
    parent = world.admit(range(6))
    world.compute(parent)
    child = parent.fork()
    child.append(1)
    assert world.kv.allocate(child)
    world.kv.deallocate_without_cache([parent, child])
    return world.copy


@pytest.mark.parametrize(
    ("hold", "words"),
    [
        (held_by_a_sequence, "1 sequences of your scheduler hold 3 blocks.*deallocate"),
        (held_by_a_row, "1 sequences of your scheduler hold 0 blocks.*deallocate"),
        (held_by_a_handle, "hold 3 blocks.*release"),
        (held_by_a_copy, "hold 2 blocks.*ack_swaps"),
    ],
)
def test_whoever_holds_blocks_keeps_the_rank_awake(world, hold, words):
    cycle = Lifecycle(world.kv)
    known = world.admit(range(50, 59))
    world.compute(known)
    world.kv.deallocate(known)
    let_go = hold(world)
    before = world.kv.rank_stats()
    with pytest.raises(RequestError, match=words):
        cycle.sleep(1)
    assert world.kv.rank_stats() == before
    assert not cycle.asleep
    let_go()
    cycle.sleep(1)
    assert world.kv.num_free_blocks() == [19]


@pytest.mark.parametrize("level", [0, 3, "1", None, 1.5])
def test_an_unknown_level_is_refused(world, level):
    with pytest.raises(RequestError, match="level"):
        Lifecycle(world.kv).sleep(level)


@pytest.mark.parametrize("tags", [["kv"], "cache", ["weights", "x"]])
def test_an_unknown_tag_is_refused(world, tags):
    with pytest.raises(RequestError, match="tags"):
        Lifecycle(world.kv).wake_up(tags)


def test_many_rounds_leak_nothing():
    kv = make_rank(memory=MEMORY)
    cycle, world = Lifecycle(kv), World(kv)
    seen = []
    for number in range(200):
        sequence = world.admit(range(number, number + 13))
        world.compute(sequence)
        kv.deallocate(sequence)
        seen.append(weakref.ref(kv.buffers.storage))
        cycle.sleep(1)
        assert kv.num_free_blocks() == [19]
        cycle.wake_up()
    gc.collect()
    assert not any(ref() is not None for ref in seen)
    kv.check_integrity()
    assert kv.block_manager.num_blocks_in_prefix_cache == 0
