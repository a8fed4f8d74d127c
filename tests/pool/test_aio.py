"""Coroutines: cancelling one leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from raykv import Sequence

SOON_S = 20


def wait_until(holds):
    deadline = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.005)


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_cancelling_an_allocation_gives_back_what_new_sequences_get(
    make_pool, monkeypatch, is_cancelled
):
    pool = make_pool()
    running, new = Sequence(np.arange(4)), Sequence(np.arange(10, 18))
    assert pool.allocate(running)
    running.append(1)
    entered, go_on, done = threading.Event(), threading.Event(), threading.Event()
    allocate = pool.allocate

    def slow(*args):
        entered.set()
        assert go_on.wait(SOON_S)
        try:
            return allocate(*args)
        finally:
            done.set()

    monkeypatch.setattr(pool, "allocate", slow)

    async def run():
        task = asyncio.create_task(pool.aio.allocate([running, new]))
        await asyncio.to_thread(entered.wait, SOON_S)
        if is_cancelled:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        go_on.set()
        await asyncio.to_thread(done.wait, SOON_S)
        if not is_cancelled:
            assert await task
            return
        while new.single_block_id is not None or pool.num_used_blocks() != [2]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), SOON_S))
    wait_until(lambda: pool.num_used_blocks() == ([2] if is_cancelled else [4]))
    assert running.kv_state.num_blocks == 2, "what runs keeps what it has"
    monkeypatch.undo()
    pool.deallocate([running, new])
    assert pool.num_used_blocks() == [0]
