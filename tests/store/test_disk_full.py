"""A full disk refuses values and damages nothing."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess

import pytest

from raykv.errors import StoreError
from raykv.store import DiskStore
from raykv.store.segment import Segment

from .helpers import names_found, put_names

RECORD_BYTES = 192


class FakeDisk:
    """Takes so many more bytes, then raises."""

    def __init__(self, monkeypatch, room, code=errno.ENOSPC):
        self.room, self.code = room, code
        self.pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", self.write)

    def write(self, handle, data, offset):
        if not self.room:
            raise OSError(self.code, os.strerror(self.code))
        done = self.pwrite(handle, data[: min(self.room, 50)], offset)  # short writes, too
        self.room -= done
        return done


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_what_does_not_fit_is_refused_wherever_the_disk_ends(tmp_path, monkeypatch, code):
    async def scenario(room):
        store = DiskStore(tmp_path / str(room), 1 << 20)
        with monkeypatch.context() as patch:
            FakeDisk(patch, room, code)
            fits = room // RECORD_BYTES
            stored = await put_names(store, range(4))
            assert stored == [name < fits for name in range(4)]
            assert store.stats().refused == 4 - fits
            assert store.stats().errors == 0
            store.check_integrity()
        assert await names_found(store, range(4)) == list(range(fits))
        assert await put_names(store, range(4)) == [True] * 4  # there is room again
        store.check_integrity()
        await store.close()
        store = DiskStore(tmp_path / str(room), 1 << 20)
        assert await names_found(store, range(4)) == list(range(4))
        await store.close()

    for room in (0, 1, 47, 48, 80, 191, 192, 193, 300, 383, 384, 500):
        asyncio.run(scenario(room))


def test_a_tail_that_cannot_be_cut_off_is_written_over(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(errno.EIO, "no disk")

    async def scenario():
        store = DiskStore(tmp_path, 1 << 20)
        await put_names(store, [0])
        with monkeypatch.context() as patch:
            FakeDisk(patch, 100)
            patch.setattr(Segment, "cut", fail)
            assert await put_names(store, [1]) == [False]
        assert await put_names(store, [2]) == [True]
        assert await names_found(store, range(3)) == [0, 2]
        store.check_integrity()
        await store.close()

    asyncio.run(scenario())


def test_a_broken_disk_is_an_error_and_what_was_there_stays(tmp_path, monkeypatch):
    async def scenario():
        store = DiskStore(tmp_path, 1 << 20)
        await put_names(store, [0])
        with monkeypatch.context() as patch:
            FakeDisk(patch, 250, errno.EIO)
            with pytest.raises(StoreError, match="cannot be written"):
                await put_names(store, [1, 2, 3])
        assert store.stats().errors == 1
        assert await names_found(store, range(4)) == [0, 1]
        await store.close()

    asyncio.run(scenario())


def test_no_room_for_a_new_segment_is_refused(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(errno.ENOSPC, "full")

    async def scenario():
        store = DiskStore(tmp_path, 1 << 20, segment_bytes=RECORD_BYTES)
        await put_names(store, [0])
        with monkeypatch.context() as patch:
            patch.setattr(Segment, "create", fail)
            assert await put_names(store, [1]) == [False]
        assert await put_names(store, [1]) == [True]
        assert await names_found(store, [0, 1]) == [0, 1]
        await store.close()

    asyncio.run(scenario())


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "raykv-test", str(folder)]
    done = subprocess.run(mount, capture_output=True, check=False)  # noqa: S603
    if done.returncode:
        pytest.skip("a small file system cannot be mounted: run as root to have this test")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)  # noqa: S603, S607


def test_a_real_disk_that_is_full(small_disk):
    async def scenario():
        store = DiskStore(small_disk, 1 << 20, segment_bytes=60_000)
        stored = []
        for start in range(0, 60, 5):
            names = range(start, start + 5)
            stored += [
                name
                for name, is_in in zip(names, await put_names(store, names, 8000), strict=True)
                if is_in
            ]
        assert 20 <= len(stored) <= 32
        assert store.stats().refused == 60 - len(stored)
        store.check_integrity()
        assert await names_found(store, range(60), 8000) == stored
        await store.close()
        # Opened again with a lower limit, it makes room for itself and goes on.
        store = DiskStore(small_disk, 130_000, segment_bytes=60_000)
        assert await put_names(store, range(100, 110), 8000) == [True] * 10
        assert await names_found(store, range(100, 110), 8000) == list(range(100, 110))
        store.check_integrity()
        await store.close()

    asyncio.run(scenario())
