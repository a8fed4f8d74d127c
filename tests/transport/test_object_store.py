"""Reads through a function that carries arrays, which may do anything."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from raykv.host.transport import ObjectStoreTransport, object_store, take_rows
from raykv.memory.host_slab import HostSlab

from .slabs import CORRUPT, FAILED, OK, STALE, filled_slab, num_ok, overwrite, request_for

NUM_BLOCKS, BLOCK_BYTES = 20, 1000
IDS = np.random.default_rng(4).permutation(np.arange(1, NUM_BLOCKS))
PLACES = np.random.default_rng(5).permutation(np.arange(1, NUM_BLOCKS))


@pytest.fixture
def source():
    with filled_slab(NUM_BLOCKS, BLOCK_BYTES) as slab:
        yield slab


@pytest.fixture
def target():
    with HostSlab.create(NUM_BLOCKS, BLOCK_BYTES) as slab:
        yield slab


@pytest.fixture
def few_at_a_time(monkeypatch):
    monkeypatch.setattr(object_store, "_OBJECT_BYTES", 4 * BLOCK_BYTES)


def read(fetch, request, target, on_blocks=lambda num: None, **options):
    async def main():
        transport = ObjectStoreTransport(fetch, **options)
        outcomes = await transport.read_rows("there", request, target.blocks, PLACES, on_blocks)
        await transport.close()
        return outcomes.tolist(), transport

    return asyncio.run(main())


def carrier(slab):
    """Carries faithfully."""

    async def fetch(address, request):
        assert address == "there"
        return take_rows(slab, request)

    return fetch


def test_every_block(source, target, few_at_a_time):
    reported = []
    outcomes, transport = read(carrier(source), request_for(source, IDS), target, reported.append)
    assert outcomes == [OK] * len(IDS)
    assert reported == [4, 8, 12, 16, 19]
    assert (target.blocks[PLACES] == source.blocks[IDS]).all()
    assert not (target.blocks[PLACES] == source.blocks[np.roll(IDS, 1)]).all(axis=1).any()
    assert transport.stats() == {"rows": 19, "bytes": 19_000, "last_error": None}


def test_all_at_once(source, target):
    reported = []
    outcomes, _ = read(carrier(source), request_for(source, IDS), target, reported.append)
    assert outcomes == [OK] * len(IDS)
    assert reported == [19]


@pytest.mark.parametrize("at", [0, 3, 4, 18])
def test_a_row_that_has_changed(source, target, few_at_a_time, at):
    request = request_for(source, IDS, with_checksums=False)
    overwrite(source, IDS[at])
    outcomes, transport = read(carrier(source), request, target)
    assert outcomes[: at + 1] == [OK] * at + [STALE]
    assert num_ok(outcomes) == at
    assert transport.stats()["stale"] == 1


@pytest.mark.parametrize("at", [0, 3, 4, 18])
def test_a_damaged_row(source, target, few_at_a_time, at):
    source.blocks[IDS[at], 999] ^= 1
    outcomes, transport = read(carrier(source), request_for(source, IDS), target)
    assert outcomes[: at + 1] == [OK] * at + [CORRUPT]
    assert transport.stats()["corrupt"] == 1


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (lambda rows: [rows.astype(np.int8)], "int8"),
        (lambda rows: [rows[:, :-1]], "999"),
        (lambda rows: [rows[0]], "shape"),
        (lambda rows: [rows, rows[:1]], "1 blocks came where 0"),
        (lambda rows: [b"rows"], "AttributeError"),
        (lambda rows: None, "TypeError"),
    ],
)
def test_what_is_not_what_was_asked_for(source, target, said, message):
    async def fetch(address, request):
        return said(source.blocks[request.ids])

    outcomes, transport = read(fetch, request_for(source, IDS), target)
    num = num_ok(outcomes)
    assert num in {0, 19}, "what came before the rubbish is good"
    assert (target.blocks[PLACES[:num]] == source.blocks[IDS[:num]]).all()
    assert message in transport.stats()["last_error"]
    assert transport.stats()["broken"] == 1


def test_several_arrays_and_empty_ones(source, target):
    async def fetch(address, request):
        rows = source.blocks[request.ids]
        return [rows[:5], rows[:0], rows[5:6], rows[6:]]

    reported = []
    outcomes, _ = read(fetch, request_for(source, IDS), target, reported.append)
    assert outcomes == [OK] * 19
    assert reported == [5, 6, 19]
    assert (target.blocks[PLACES] == source.blocks[IDS]).all()


@pytest.mark.parametrize("error", [OSError("gone"), KeyError("lost"), asyncio.CancelledError()])
def test_what_carries_fails(source, target, few_at_a_time, error):
    num_calls = 0

    async def fetch(address, request):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise error
        return take_rows(source, request)

    outcomes, transport = read(fetch, request_for(source, IDS), target)
    assert outcomes == [OK] * 8 + [FAILED] * 11
    assert transport.last_error is not None


def test_what_carries_hangs(source, target):
    async def fetch(address, request):
        await asyncio.Event().wait()

    outcomes, transport = read(fetch, request_for(source, IDS), target, timeout_s=0.02)
    assert outcomes == [FAILED] * 19
    assert "did not deliver 19 blocks" in str(transport.last_error)


def test_cancelled(source, target):
    """What comes late goes nowhere, though the carrier does not let itself be cancelled."""

    async def main():
        may_go_on, has_ended = asyncio.Event(), asyncio.Event()

        async def fetch(address, request):
            while not may_go_on.is_set():
                try:
                    await may_go_on.wait()
                except asyncio.CancelledError:
                    continue
            has_ended.set()
            return take_rows(source, request)

        transport = ObjectStoreTransport(fetch)
        request = request_for(source, IDS)
        task = asyncio.create_task(
            transport.read_rows("there", request, target.blocks, PLACES, lambda num: None)
        )
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_go_on.set()
        await has_ended.wait()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert not target.blocks.any()


def test_rows_that_are_not_there_are_refused(source):
    request = request_for(source, [1, 2])
    request.ids[1] = NUM_BLOCKS
    with pytest.raises(ValueError, match=r"must lie in \[0, 20\)"):
        take_rows(source, request)
