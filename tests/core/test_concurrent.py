"""The thread-safe manager: many threads, one truth; and the same thread may re-enter."""

from __future__ import annotations

import gc
import random
import sys
import threading

import pytest

from raykv.core import BlockManagerImpl, Blocks, ConcurrentBlockManagerImpl, Namespace

from .helpers import check_drained, counters, hit_ids, publish, run_of

NUM_THREADS = 8
NUM_OPERATIONS = 100_000


@pytest.fixture
def hasty_switches():
    """Threads are switched as often as possible."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def run_threads(work, num_threads=NUM_THREADS):
    """Runs ``work(index)`` in each thread; an error in any fails the test."""
    errors = []
    barrier = threading.Barrier(num_threads)

    def guarded(index):
        try:
            barrier.wait()
            work(index)
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_8_threads_and_100_000_operations_lose_no_id(hasty_switches):
    manager = ConcurrentBlockManagerImpl(257, 2)
    owners = [None] * 257
    done = [0] * NUM_THREADS

    def work(index):
        rng = random.Random(index)
        held = []
        count = 0
        while count < NUM_OPERATIONS // NUM_THREADS:
            tokens = rng.choices([0, 1], weights=[4, 1], k=2 * rng.randint(1, 8))
            hit = manager.allocate_shared(tokens)
            fresh = manager.allocate(len(tokens) // 2 - len(hit))
            count += 2
            if fresh is None:
                hit.release()
                held = held[1:]
                continue
            new = fresh.ids.tolist()
            for block_id in new:  # nobody else may have been given the same id
                assert owners[block_id] is None
                owners[block_id] = index
            blocks = Blocks.concat([hit, fresh])
            shared = blocks.share()
            for block_id in new:
                assert owners[block_id] == index
                owners[block_id] = None
            manager.cache(tokens, blocks)
            manager.deallocate(blocks)
            blocks.release()
            count += 4
            choice = rng.random()
            if choice < 0.5:
                held.append(shared)
            elif choice < 0.8:
                shared.release()
                count += 1
            del shared
            if len(held) > 3:
                held.pop(rng.randrange(4))
        done[index] = count

    run_threads(work)
    gc.collect()
    assert sum(done) >= NUM_OPERATIONS
    check_drained(manager)


def test_content_stays_true_under_threads(hasty_switches):
    """Each block remembers the prefix it was written for; a hit must never show another one."""
    manager = ConcurrentBlockManagerImpl(65, 1)
    written = [None] * 65

    def work(index):
        rng = random.Random(100 + index)
        for _ in range(400):
            tokens = tuple(rng.choices([0, 1, 2], k=rng.randint(1, 6)))
            hit = manager.allocate_shared(tokens)
            for position, block_id in enumerate(hit.ids.tolist()):
                assert written[block_id] == tokens[: position + 1]
            fresh = manager.allocate(len(tokens) - len(hit))
            if fresh is None:
                hit.release()
                continue
            for position, block_id in enumerate(fresh.ids.tolist(), start=len(hit)):
                written[block_id] = tokens[: position + 1]
            blocks = Blocks.concat([hit, fresh])
            manager.cache(tokens, blocks)
            for position, block_id in enumerate(blocks.ids.tolist()):
                assert written[block_id] == tokens[: position + 1]
            blocks.release()

    run_threads(work)
    check_drained(manager)


def test_counters_may_be_read_while_others_work(hasty_switches):
    manager = ConcurrentBlockManagerImpl(33, 2)
    stop = threading.Event()
    failures = []

    def watch():
        while not stop.is_set():
            seen = counters(manager)
            if not all(0 <= value <= 32 for value in seen.values()):
                failures.append(seen)
            if not 0 <= manager.kv_cache_utilization <= 1:
                failures.append(manager.kv_cache_utilization)
            manager.check_integrity()

    watcher = threading.Thread(target=watch)
    watcher.start()

    def work(index):
        for step in range(100):
            publish(manager, run_of(2, index % 3, step % 5))

    run_threads(work, num_threads=3)
    stop.set()
    watcher.join()
    assert failures == []
    check_drained(manager)


def test_resets_among_running_threads_leave_no_stale_entry(hasty_switches):
    manager = ConcurrentBlockManagerImpl(65, 1)
    generation = [0]
    written = [None] * 65
    lock = threading.Lock()

    def work(index):
        rng = random.Random(index)
        for step in range(200):
            if index == 0 and step % 10 == 0:
                with lock:  # nobody matches while the generation changes
                    manager.reset_prefix_cache()
                    generation[0] += 1
                continue
            tokens = rng.choices([0, 1], k=rng.randint(1, 5))
            with lock:
                hit = manager.allocate_shared(tokens)
                for block_id in hit.ids.tolist():
                    assert written[block_id] == generation[0]
                fresh = manager.allocate(len(tokens) - len(hit))
                for block_id in [] if fresh is None else fresh.ids.tolist():
                    written[block_id] = generation[0]
            if fresh is not None:
                blocks = Blocks.concat([hit, fresh])
                manager.cache(tokens, blocks)
                blocks.release()

    run_threads(work, num_threads=4)
    check_drained(manager)


def test_every_sharer_may_release_in_its_own_thread(hasty_switches):
    manager = ConcurrentBlockManagerImpl(9, 2)
    for _ in range(50):
        blocks = manager.allocate(8)
        sharers = [blocks.share() for _ in range(NUM_THREADS - 1)] + [blocks]

        def work(index, sharers=sharers):
            if index % 2:
                manager.deallocate(sharers[index])
            sharers[index].release()

        run_threads(work)
        assert (manager.num_used_blocks, manager.num_free_blocks) == (0, 8)
    manager.check_integrity()


def test_one_handle_released_by_all_threads_at_once_is_released_once(hasty_switches):
    manager = ConcurrentBlockManagerImpl(9, 2)
    for _ in range(50):
        blocks = manager.allocate(4)
        keeper = blocks.share()
        run_threads(lambda _, blocks=blocks: blocks.release())
        assert keeper.ref_counts.tolist() == [1] * 4
        keeper.release()
        assert manager.num_free_blocks == 8
    manager.check_integrity()


def locked_by(manager, call):
    """Whether ``call``, made in another thread, has to wait for this one."""
    done = threading.Event()
    thread = threading.Thread(target=lambda: (call(), done.set()))
    thread.start()
    waits = not done.wait(0.05)
    return waits, thread


@pytest.mark.parametrize(
    "name",
    [
        "allocate", "allocate_shared", "cache", "free", "reset_prefix_cache", "check_integrity",
        "deallocate", "release", "share", "pin", "slice", "num_free_blocks", "num_used_blocks",
        "num_evictable_blocks", "num_available_blocks", "num_blocks_in_prefix_cache",
        "ref_counts", "kv_cache_utilization",
    ],
)  # fmt: skip
def test_no_operation_enters_while_another_thread_is_inside(name, monkeypatch):
    manager = ConcurrentBlockManagerImpl(9, 2)
    blocks = manager.allocate(2)
    inside, go_on = threading.Event(), threading.Event()
    original = BlockManagerImpl._make_room

    def slow(self, num_blocks):
        inside.set()
        assert go_on.wait(10)
        return original(self, num_blocks)

    monkeypatch.setattr(BlockManagerImpl, "_make_room", slow)
    calls = {
        "allocate": lambda: manager.allocate(1),
        "allocate_shared": lambda: manager.allocate_shared([1, 1]),
        "cache": lambda: manager.cache([1, 1], blocks),
        "free": lambda: manager.free_many([]),
        "reset_prefix_cache": manager.reset_prefix_cache,
        "check_integrity": manager.check_integrity,
        "deallocate": lambda: manager.deallocate(blocks),
        "release": blocks.release,
        "share": blocks.share,
        "pin": blocks.pin,
        "slice": lambda: blocks[:1],
        "ref_counts": lambda: blocks.ref_counts,
    }
    call = calls.get(name, lambda: getattr(manager, name))
    first = threading.Thread(target=lambda: manager.allocate(1))
    first.start()
    assert inside.wait(10)
    waits, second = locked_by(manager, call)
    go_on.set()
    first.join()
    second.join()
    assert waits
    manager.check_integrity()


def test_the_same_thread_may_re_enter(monkeypatch):
    """Eviction inside allocate frees blocks; whatever that calls runs under the same lock."""
    manager = ConcurrentBlockManagerImpl(9, 2)
    publish(manager, run_of(2, 1, 2, 3, 4))
    held = manager.allocate(2)
    pins = [held.pin()]
    original = BlockManagerImpl._make_room
    seen = []

    def re_entering(self, num_blocks):
        monkeypatch.undo()
        seen.append(counters(self))
        pins.pop().release()
        with self.allocate_shared(run_of(2, 1, 2)) as hit, held.share() as again:
            seen.append((hit.ids.tolist(), again.ids.tolist()))
            self.check_integrity()
        return original(self, num_blocks)

    monkeypatch.setattr(BlockManagerImpl, "_make_room", re_entering)
    done = []
    thread = threading.Thread(target=lambda: done.append(manager.allocate(4)), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "the manager waits for itself"
    assert seen[1] == ([1, 2], [5, 6])
    assert len(done[0]) == 4
    held.release()
    manager.check_integrity()


def test_it_is_a_block_manager_with_the_same_settings():
    manager = ConcurrentBlockManagerImpl(9, 2, enable_prefix_cache=False, hash_seed=b"x")
    assert isinstance(manager, BlockManagerImpl)
    assert publish(manager, run_of(2, 1)) == [1]
    assert hit_ids(manager, run_of(2, 1)) == []
    plain = BlockManagerImpl(9, 2, hash_seed=b"x")
    space = Namespace(tenant="a")
    assert manager.prefix_hashes([1, 2], namespace=space) == plain.prefix_hashes(
        [1, 2], namespace=space
    )
