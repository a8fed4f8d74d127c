"""A store as a source of blocks: what it counts, and what it reads where."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from raykv.core import Namespace
from raykv.host.store_source import StoreSource, leading

from .sources import KEYS, fill
from .tier_world import BLOCK_BYTES, content_of, prompt_of, tokens_of

LONG = range(40)  # more than one call reads


@pytest.fixture
def source(disk):
    return StoreSource(disk, KEYS)


def read(loop, source, prompt, first, num_blocks):
    """Into rows from the last one down; returns what is said, and the rows in order of blocks."""
    rows = np.full((num_blocks, BLOCK_BYTES), 0xEE, np.uint8)
    row_ids = np.arange(num_blocks)[::-1]
    progress = []
    num_read = loop.call(source.read(prompt, first, rows, row_ids, progress.append))
    assert progress == sorted(progress)
    assert (progress or [0])[-1] == num_read
    return num_read, rows[::-1], progress


def test_it_counts_what_lies_without_a_gap_from_a_block_on(loop, disk, source):
    fill(loop, disk, *LONG, but=(7, 30))
    counts = [loop.call(source.count(prompt_of(*LONG), first)) for first in (0, 5, 7, 8, 31, 40)]
    assert counts == [7, 2, 0, 22, 9, 0]
    assert loop.call(source.count(prompt_of(*LONG, 99), 31)) == 9
    assert loop.call(source.count(prompt_of(*range(1, 40)), 0)) == 0


def test_long_prompts_are_looked_up_in_several_calls(loop, disk, source):
    marks = range(600)
    fill(loop, disk, *marks)
    assert loop.call(source.count(prompt_of(*marks), 0)) == 600


def test_it_reads_each_block_to_its_row(loop, disk, source):
    fill(loop, disk, *LONG)
    num_read, rows, progress = read(loop, source, prompt_of(*LONG), 3, 37)
    assert (num_read, progress) == (37, [16, 32, 37])
    for at, row in enumerate(rows):
        assert (row == content_of(tokens_of(*LONG), 3 + at, Namespace())).all()
    assert not (rows[0] == content_of(tokens_of(*LONG), 4, Namespace())).all()


def test_it_stops_at_the_first_miss(loop, disk, source):
    fill(loop, disk, *LONG, but=(20,))
    num_read, rows, progress = read(loop, source, prompt_of(*LONG), 0, 40)
    assert (num_read, progress) == (20, [16, 20])
    assert (rows[32:] == 0xEE).all()  # the call after the miss was not made
    stats = source.stats()
    assert (stats["blocks_read"], stats["reads_cut_short"]) == (20, 1)


def test_namespaces_do_not_mix_and_later_weights_are_not_asked_for(loop, disk, source):
    fill(loop, disk, 1, 2)
    fill(loop, disk, 1, 2, namespace=Namespace(weights_version=1))
    tenant, later = Namespace(tenant="a"), Namespace(weights_version=1)
    assert loop.call(source.count(prompt_of(1, 2), 0)) == 2
    assert loop.call(source.count(prompt_of(1, 2, namespace=tenant), 0)) == 0
    assert loop.call(source.count(prompt_of(1, 2, namespace=later), 0)) == 0
    assert read(loop, source, prompt_of(1, 2, namespace=later), 0, 2)[0] == 0


@pytest.mark.parametrize("fault", ["fails", "hangs"])
def test_a_store_that_fails_has_nothing_and_is_reported(loop, disk, source, fault):
    fill(loop, disk, 1, 2)
    setattr(disk.faults, fault, 1.0)
    for _ in range(3):
        assert loop.call(source.count(prompt_of(1, 2), 0)) == 0
    num_calls = disk.faults.counts[fault]
    assert read(loop, source, prompt_of(1, 2), 0, 2)[0] == 0
    assert disk.faults.counts[fault] == num_calls  # it is left alone
    stats = source.stats()
    assert not stats["is_available"]
    assert stats["last_error"]
    assert stats["store"]["errors"] == 3


def test_a_read_that_is_cancelled_ends_and_touches_nothing_more(loop, disk, source):
    fill(loop, disk, 1, 2)
    disk.faults.is_slow, disk.faults.slow_s = 1.0, 0.2
    rows = np.zeros((2, BLOCK_BYTES), np.uint8)

    async def cancel():
        read = source.read(prompt_of(1, 2), 0, rows, np.arange(2), lambda _: None)
        task = asyncio.ensure_future(read)
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        rows[:] = 7
        await asyncio.sleep(0.3)
        return task.cancelled()

    assert loop.call(cancel())
    assert (rows == 7).all()


def test_leading():
    assert [leading(flags) for flags in ([], [True, True], [True, False, True], [False])] == [
        0, 2, 1, 0,
    ]  # fmt: skip
