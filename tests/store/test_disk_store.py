"""The disk store's own: folders, room, threads, and whose buffers are whose."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading

import pytest

from raykv.errors import ConfigError, IntegrityError, StoreError
from raykv.store import DiskStore
from raykv.store.segment import Segment

from .helpers import get_one, key_of, names_found, put_names, value_of

RECORD_BYTES = 192  # of a value of 100 bytes under a key of 32


def run_with(store, scenario):
    async def run():
        try:
            return await scenario(store)
        finally:
            await store.close()

    return asyncio.run(run())


# -- folders ---------------------------------------------------------------------------------------


def test_values_are_there_when_it_is_opened_again(tmp_path):
    for start in range(0, 60, 20):  # over several segments, the last of which goes on
        store = DiskStore(tmp_path, 1 << 20, segment_bytes=1500)

        async def scenario(store, start=start):
            assert await names_found(store, range(start)) == list(range(start))
            await put_names(store, range(start, start + 20))
            store.check_integrity()

        run_with(store, scenario)
    assert len(list(tmp_path.glob("*.kv"))) == -(-60 // 7)


def test_one_store_at_a_time_uses_a_folder(tmp_path):
    store = DiskStore(tmp_path, 1 << 20)
    with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
        DiskStore(tmp_path, 1 << 20)
    code = f"from raykv.store import DiskStore; DiskStore({str(tmp_path)!r}, 1 << 20)"
    done = subprocess.run(  # noqa: S603 - our own command line
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert f"in use by process {os.getpid()}" in done.stderr
    asyncio.run(store.close())
    asyncio.run(DiskStore(tmp_path, 1 << 20).close())


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "1-2.kv").write_text("no segment's name")
    store = DiskStore(tmp_path, 4000, segment_bytes=2000)
    run_with(store, lambda store: put_names(store, range(100)))
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "1-2.kv").exists()


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file cannot hold a KV store"):
        DiskStore(tmp_path / "file", 1 << 20)


def test_a_failed_opening_lets_go_of_the_folder(tmp_path, monkeypatch):
    def fail(self, path):
        raise OSError(errno.EIO, "no disk")

    Segment.create(tmp_path, 1).close()
    with monkeypatch.context() as patch:
        patch.setattr(Segment, "__init__", fail)
        with pytest.raises(StoreError, match="no disk"):
            DiskStore(tmp_path, 1 << 20)
    asyncio.run(DiskStore(tmp_path, 1 << 20).close())


@pytest.mark.parametrize(
    ("max_bytes", "segment_bytes"), [(100, 51), (0, None), (100, 0), (7, None)]
)
def test_sizes_that_make_no_sense_are_refused(tmp_path, max_bytes, segment_bytes):
    with pytest.raises(ConfigError, match="two segments must fit"):
        DiskStore(tmp_path, max_bytes, segment_bytes=segment_bytes)


def test_a_closed_store_says_so(tmp_path):
    store = DiskStore(tmp_path, 1 << 20)

    async def scenario(store):
        await store.close()
        for call in (put_names(store, [1]), get_one(store, b"k"), store.contains_many([b"k"])):
            with pytest.raises(StoreError, match="is closed"):
                await call

    run_with(store, scenario)


# -- room ------------------------------------------------------------------------------------------


def test_the_oldest_segment_goes_whole(tmp_path):
    store = DiskStore(tmp_path, 8 * RECORD_BYTES, segment_bytes=2 * RECORD_BYTES)

    async def scenario(store):
        await put_names(store, range(8))
        assert await names_found(store, range(8)) == list(range(8))
        await put_names(store, [8])
        assert await names_found(store, range(9)) == list(range(2, 9))
        assert store.stats().bytes == 7 * RECORD_BYTES
        store.check_integrity()

    run_with(store, scenario)


def test_a_value_that_was_written_anew_outlives_its_old_segment(tmp_path):
    store = DiskStore(tmp_path, 4 * RECORD_BYTES, segment_bytes=2 * RECORD_BYTES)

    async def scenario(store):
        await put_names(store, [0, 1, 2])
        store._log._index.pop(key_of(0))  # as if it had been found damaged
        await put_names(store, [0])
        await put_names(store, [3])  # the first segment goes
        assert await names_found(store, range(4)) == [0, 2, 3]

    run_with(store, scenario)


def test_a_value_that_is_there_is_not_written_again(tmp_path):
    store = DiskStore(tmp_path, 1 << 20)

    async def scenario(store):
        await put_names(store, [1, 1, 2])
        await put_names(store, [1, 2])
        assert store.stats().bytes == 2 * RECORD_BYTES

    run_with(store, scenario)


def test_a_value_larger_than_a_segment_is_refused_and_others_are_not(tmp_path):
    store = DiskStore(tmp_path, 4000, segment_bytes=RECORD_BYTES)

    async def scenario(store):
        items = [(key_of(i), value_of(i, size)) for i, size in enumerate((100, 113, 100))]
        assert await store.put_many(items) == [True, False, True]
        assert store.stats().refused == 1
        assert await names_found(store, range(3)) == [0, 2]

    run_with(store, scenario)


def test_a_batch_larger_than_the_store_leaves_its_end(tmp_path):
    store = DiskStore(tmp_path, 4 * RECORD_BYTES, segment_bytes=2 * RECORD_BYTES)

    async def scenario(store):
        await put_names(store, range(50))
        assert await names_found(store, range(50)) == list(range(46, 50))
        store.check_integrity()

    run_with(store, scenario)


def test_a_smaller_limit_takes_effect_at_the_next_opening(tmp_path):
    run_with(
        DiskStore(tmp_path, 1 << 20, segment_bytes=10 * RECORD_BYTES),
        lambda store: put_names(store, range(95)),
    )

    async def scenario(store):
        assert await names_found(store, range(95)) == list(range(70, 95))
        await put_names(store, range(100, 200))
        store.check_integrity()

    run_with(DiskStore(tmp_path, 25 * RECORD_BYTES, segment_bytes=RECORD_BYTES), scenario)
    run_with(DiskStore(tmp_path, 2 * RECORD_BYTES, segment_bytes=RECORD_BYTES), scenario_empty)
    assert sum(path.stat().st_size for path in tmp_path.glob("*.kv")) <= 2 * RECORD_BYTES


async def scenario_empty(store):
    store.check_integrity()


def test_the_check_of_the_books_can_fail(tmp_path):
    store = DiskStore(tmp_path, 1 << 20)

    async def scenario(store):
        await put_names(store, range(3))
        index = store._log._index
        index[key_of(1)], index[key_of(2)] = index[key_of(2)], index[key_of(1)]
        with pytest.raises(IntegrityError, match="is not at"):
            store.check_integrity()
        assert await names_found(store, range(3)) == [0]  # a record says whose it is

    run_with(store, scenario)


# -- fsync -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fsync", [False, True])
def test_with_fsync_a_value_is_on_the_disk_before_it_is_confirmed(tmp_path, monkeypatch, fsync):
    synced = []
    monkeypatch.setattr(os, "fdatasync", lambda handle: synced.append(os.fstat(handle).st_size))
    store = DiskStore(tmp_path, 1 << 20, segment_bytes=2 * RECORD_BYTES, fsync=fsync)

    async def scenario(store):
        await put_names(store, range(3))  # two segments
        assert sorted(synced) == ([RECORD_BYTES, 2 * RECORD_BYTES] if fsync else [])

    run_with(store, scenario)


def test_what_could_not_be_synced_is_not_confirmed(tmp_path, monkeypatch):
    def fail(handle):
        raise OSError(errno.EIO, "no disk")

    store = DiskStore(tmp_path, 1 << 20, fsync=True)

    async def scenario(store):
        await put_names(store, [1])
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            with pytest.raises(StoreError, match="no disk"):
                await put_names(store, [2])
        assert await names_found(store, [1, 2]) == [1]
        assert await put_names(store, [2]) == [True]
        assert await names_found(store, [1, 2]) == [1, 2]
        assert store.stats().errors == 1
        assert len(list(tmp_path.glob("*.kv"))) == 2  # the doubtful one takes nothing more

    run_with(store, scenario)


# -- threads and buffers ---------------------------------------------------------------------------


class Gate:
    """Stops a thread within a method of all segments, after or before its work."""

    def __init__(self, monkeypatch, name, *, first):
        self.reached, self.is_open = threading.Event(), threading.Event()
        original = getattr(Segment, name)

        def gated(*args):
            result = original(*args) if first else None
            self.reached.set()
            assert self.is_open.wait(30)
            return result if first else original(*args)

        monkeypatch.setattr(Segment, name, gated)

    async def reach(self):
        # On the event loop, which is free meanwhile: a worker thread could be a stuck one.
        while not self.reached.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def test_a_late_read_writes_into_nobodys_buffer(tmp_path, monkeypatch):
    store = DiskStore(tmp_path, 1 << 20)

    async def scenario(store):
        await put_names(store, [1, 2])
        into = [bytearray(100), bytearray(100)]
        gate = Gate(monkeypatch, "read", first=True)
        call = asyncio.ensure_future(store.get_many([key_of(1), key_of(2)], into))
        await gate.reach()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        gate.is_open.set()
        store._readers.shutdown()
        assert into == [bytes(100), bytes(100)]

    run_with(store, scenario)


def test_a_late_write_stores_nothing_of_a_buffer_that_has_changed(tmp_path, monkeypatch):
    store = DiskStore(tmp_path, 1 << 20)

    async def scenario(store):
        values = [bytearray(value_of(name)) for name in (1, 2)]
        gate = Gate(monkeypatch, "append", first=False)
        call = asyncio.ensure_future(
            store.put_many([(key_of(name), values[name - 1]) for name in (1, 2)])
        )
        await gate.reach()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        for value in values:
            value[:] = bytes(100)  # somebody else's by now
        gate.is_open.set()
        await put_names(store, [3])
        assert await names_found(store, [1, 2, 3]) == [1, 3]

    run_with(store, scenario)


def test_a_dropped_segment_stays_readable_for_who_reads_it(tmp_path, monkeypatch):
    store = DiskStore(tmp_path, 4 * RECORD_BYTES, segment_bytes=2 * RECORD_BYTES)

    async def scenario(store):
        await put_names(store, [1])
        with monkeypatch.context() as patch:
            gate = Gate(patch, "read", first=False)
            call = asyncio.ensure_future(get_one(store, key_of(1)))
            await gate.reach()
            await put_names(store, range(2, 8))
            assert await store.contains_many([key_of(1)]) == [False]
            gate.is_open.set()
            assert await call == value_of(1)
        store.check_integrity()

    run_with(store, scenario)


def test_reads_do_not_wait_for_writes(tmp_path, monkeypatch):
    store = DiskStore(tmp_path, 1 << 20)

    async def scenario(store):
        await put_names(store, [1])
        gate = Gate(monkeypatch, "append", first=False)
        call = asyncio.ensure_future(put_names(store, [2]))
        await gate.reach()
        assert await names_found(store, [1, 2]) == [1]
        gate.is_open.set()
        assert await call == [True]

    run_with(store, scenario)


def test_a_value_that_cannot_be_read_is_a_counted_miss(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(errno.EIO, "bad sector")

    store = DiskStore(tmp_path, 1 << 20)

    async def scenario(store):
        await put_names(store, [1, 2])
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", fail)
            assert await get_one(store, key_of(1)) is None
        assert store.stats().errors == 1
        assert await names_found(store, [1, 2]) == [2]
        await put_names(store, [1])
        assert await names_found(store, [1, 2]) == [1, 2]

    run_with(store, scenario)
