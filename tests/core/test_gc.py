"""Handles dropped by the garbage collector lose nothing and corrupt nothing."""

from __future__ import annotations

import gc
import random
import sys
import threading

import pytest

from raykv.core import AdmitRequest, Blocks

from .helpers import check_drained, counters, hit_ids, num_pending, publish, run_of, start


class Node:
    """Something that refers to itself and to a handle."""

    def __init__(self, handle):
        self.handle = handle
        self.me = self


@pytest.fixture
def no_automatic_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_handle_in_a_cycle_is_held_until_it_is_collected(make_manager, no_automatic_collection):
    manager = make_manager(8, 4)
    Node(manager.allocate(3))
    assert (manager.num_used_blocks, manager.num_free_blocks) == (3, 4)
    gc.collect()
    assert (manager.num_used_blocks, manager.num_free_blocks) == (0, 7)
    check_drained(manager)


def test_deallocated_and_pinned_handles_in_cycles_return_their_blocks(
    make_manager, no_automatic_collection
):
    manager = make_manager(8, 4)
    blocks = manager.allocate(3)
    Node(blocks.pin())
    manager.deallocate(blocks)
    Node(blocks)
    del blocks
    assert num_pending(manager) == 3
    gc.collect()
    check_drained(manager)


def test_a_released_or_joined_handle_gives_nothing_back_a_second_time(make_manager):
    manager = make_manager(8, 4)
    keeper = manager.allocate(2)
    released, joined = keeper.share(), keeper.share()
    released.release()
    whole = Blocks.concat([joined])
    Node(released)
    Node(joined)
    del released, joined
    gc.collect()
    assert keeper.ref_counts.tolist() == [2, 2]
    whole.release()
    assert keeper.ref_counts.tolist() == [1, 1]


@pytest.mark.parametrize(
    "read",
    [
        "num_free_blocks",
        "num_used_blocks",
        "num_evictable_blocks",
        "num_available_blocks",
        "kv_cache_utilization",
    ],
)
def test_every_counter_sees_a_dropped_handle(make_manager, read):
    manager = make_manager(9, 2)
    publish(manager, run_of(2, 1, 2))
    expected = getattr(manager, read)
    blocks = manager.allocate_shared(run_of(2, 1, 2))
    more = manager.allocate(2)
    if read != "num_free_blocks":
        assert getattr(manager, read) != expected
    del blocks, more
    assert getattr(manager, read) == expected


def test_ref_counts_see_a_dropped_handle(make_manager):
    manager = make_manager(8, 2)
    blocks = manager.allocate(2)
    other = blocks.share()
    assert blocks.ref_counts.tolist() == [2, 2]
    del other
    assert blocks.ref_counts.tolist() == [1, 1]


def test_an_allocation_uses_what_a_dropped_handle_held(make_manager):
    manager = make_manager(4, 2)
    blocks = manager.allocate(3)
    assert manager.allocate(1) is None
    del blocks
    assert manager.allocate(3) is not None


def test_dropped_handles_count_as_released_in_the_order_of_their_drop(make_manager):
    manager = make_manager(4, 2)
    handles = []
    for mark in (1, 2, 3):
        handles.append(start(manager, run_of(2, mark)))
        manager.cache(run_of(2, mark), handles[-1])
    first = handles.pop(1)
    del first
    handles.pop(1).release()
    handles.clear()
    kept = [manager.allocate(1) for _ in range(3)]
    assert [int(block.ids[0]) for block in kept] == [2, 3, 1]


def test_reset_and_integrity_see_a_dropped_handle(make_manager):
    manager = make_manager(8, 2)
    blocks = start(manager, run_of(2, 1, 2))
    manager.cache(run_of(2, 1, 2), blocks)
    del blocks
    manager.check_integrity()
    blocks = manager.allocate_shared(run_of(2, 1, 2))
    del blocks
    assert manager.reset_prefix_cache() == 2
    assert manager.num_free_blocks == 7


def test_a_handle_may_outlive_every_other_name_of_its_manager(make_manager):
    blocks = make_manager(8, 2).allocate(2)
    gc.collect()
    assert blocks.share().ref_counts.tolist() == [2, 2]


def test_handles_dropped_in_other_threads_lose_nothing(make_manager):
    """The plain manager too: only the dropping happens elsewhere."""
    manager = make_manager(65, 2)
    tokens = run_of(2, *range(32))
    publish(manager, tokens)
    handles = [manager.allocate_shared(tokens[: 2 * (i % 32)]) for i in range(400)]
    handles += [manager.allocate(i % 2) for i in range(40)]

    def drop(mine):
        while mine:
            Node(mine.pop())  # in a cycle
            del mine[-1:]  # and at once

    shares = [handles[i::4] for i in range(4)]
    handles.clear()
    threads = [threading.Thread(target=drop, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        counters(manager)
        manager.allocate_shared(tokens).release()
    for thread in threads:
        thread.join()
    gc.collect()
    check_drained(manager)


def workload(manager, seed, num_steps):
    """Every operation, with cycles of handles left lying about."""
    rng = random.Random(seed)
    held = []
    for _ in range(num_steps):
        tokens = [0] * rng.randint(0, 12) + rng.choices([0, 1], k=rng.randint(0, 6))
        hit = manager.allocate_shared(tokens)
        fresh = manager.allocate(len(tokens) // manager.block_size - len(hit))
        if fresh is None:
            Node(hit)
            held = held[len(held) // 2 :]
            continue
        blocks = Blocks.concat([hit, fresh])
        Node(blocks.pin())
        manager.cache(tokens, blocks)
        Node(blocks[len(blocks) // 2 :])
        if rng.random() < 0.3:
            manager.deallocate(blocks)
        choice = rng.random()
        if choice < 0.4:
            held.append(blocks)
        elif choice < 0.6:
            held.append(Node(blocks.share()))
        elif choice < 0.8:
            Node(blocks)
        else:
            blocks.release()
        if rng.random() < 0.02:
            manager.reset_prefix_cache()
        if len(held) > 6:
            held.pop(rng.randrange(len(held)))


def test_collections_at_every_allocation_corrupt_nothing(make_manager):
    manager = make_manager(24, 2)
    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        workload(manager, seed=1, num_steps=150)
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    check_drained(manager)


TOKENS = run_of(2, 1, 2, 3)

# Each gets a manager whose cache holds TOKENS, and a handle that lists those blocks and one more.
OPERATIONS = {
    "allocate": lambda manager, blocks: manager.allocate(2),
    "allocate and evict": lambda manager, blocks: manager.allocate(manager.num_available_blocks),
    "allocate_shared": lambda manager, blocks: manager.allocate_shared(TOKENS),
    "admit": lambda manager, blocks: [
        manager.adopt(granted.block_ids)
        for granted in manager.admit([AdmitRequest(4, TOKENS), AdmitRequest(1)])
    ],
    "cache": lambda manager, blocks: manager.cache([*TOKENS, 4, 4], blocks),
    "deallocate": lambda manager, blocks: manager.deallocate(blocks),
    "release": lambda manager, blocks: blocks.release(),
    "share": lambda manager, blocks: blocks.share(),
    "pin": lambda manager, blocks: blocks.pin(),
    "slice": lambda manager, blocks: blocks[1:],
    "concat": lambda manager, blocks: Blocks.concat([blocks.share(), blocks.share()]),
    "ref_counts": lambda manager, blocks: blocks.ref_counts,
    "counters": lambda manager, blocks: counters(manager),
    "reset": lambda manager, blocks: manager.reset_prefix_cache(),
    "check_integrity": lambda manager, blocks: manager.check_integrity(),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_handles_dropped_before_any_line_of_an_operation_corrupt_nothing(make_manager, operation):
    """Exhaustive: the finalisers run before the first line, the second one, and so on."""
    line = 0
    dropped = True
    while dropped:  # until the operation has fewer lines than that
        line += 1
        manager = make_manager(16, 2)
        publish(manager, TOKENS)
        publish(manager, run_of(2, 1, 8, 9))
        blocks = start(manager, [*TOKENS, 4, 4])
        prepared = [manager.allocate_shared(TOKENS), manager.allocate(2), blocks.share()]
        seen = 0

        def trace(frame, event, arg, line=line, prepared=prepared):
            nonlocal seen
            if "raykv/core" not in frame.f_code.co_filename:
                return None
            seen += event == "line"
            if seen == line:
                prepared.clear()  # their last references: the finalisers run here
            return trace

        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            result = OPERATIONS[operation](manager, blocks)
        finally:
            sys.settrace(previous)
        dropped = not prepared
        manager.check_integrity()
        prepared.clear()
        del result, blocks
        check_drained(manager)
    assert line > 2


def test_a_finaliser_that_calls_the_manager_back_is_served(make_manager):
    """User code may release handles from its own finalisers, between two operations."""
    manager = make_manager(8, 2)

    class Owner:
        def __init__(self):
            self.blocks = manager.allocate(2)

        def __del__(self):
            self.blocks.release()

    for _ in range(5):
        Node(Owner())
        gc.collect()
        assert manager.num_used_blocks == 0
    assert hit_ids(manager, run_of(2, 1)) == []
    check_drained(manager)
