"""Write-behind: what reaches the store, and what must not."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from raykv.core import Namespace
from raykv.errors import IntegrityError
from raykv.host.store_source import StoreSource
from raykv.host.store_writer import StoreWriter
from raykv.host.tickets import Want
from raykv.memory.checksums import NO_CHECKSUM
from raykv.store import GuardedStore
from raykv.store.redis_store import RedisStore

from .helpers import value_of
from .sources import KEYS, Clock, fill
from .tier_world import BLOCK_BYTES, Tier, content_of, prompt_of, tokens_of, until


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def begin(loop, clock):
    """Make writers; closed and checked at the end."""
    made = []

    def begin(tier, store):
        made.append(
            StoreWriter(
                *(tier.books, tier.slab, tier.lock, store, KEYS),
                loop=loop.loop,
                client_id=f"writer-{len(made)}",
                clock=clock,
            )
        )
        return made[-1]

    yield begin
    for writer in made:
        writer.check_integrity()
        writer.close()
        writer.check_integrity()


@pytest.fixture
def writer(begin, tier, disk):
    return begin(tier, disk)


def write(writer, *marks, namespace=None):
    writer.note(tokens_of(*marks), namespace or Namespace(), len(marks))
    assert writer.drain(20)


def num_stored(loop, store, *marks, namespace=None):
    """Leading blocks that the store has; a wrong one fails the test."""
    prompt = prompt_of(*marks, namespace=namespace)
    rows = np.zeros((len(marks), BLOCK_BYTES), np.uint8)
    read = StoreSource(store, KEYS).read(prompt, 0, rows, np.arange(len(marks)), lambda _: None)
    num_read = loop.call(read)
    for at in range(num_read):
        assert (rows[at] == content_of(prompt.tokens, at, prompt.namespace)).all(), "a wrong block"
    return num_read


def counts(writer, *names):
    return tuple(writer.stats()[name] for name in names)


# -- what is put -----------------------------------------------------------------------------------


def test_what_the_host_got_is_in_the_store(loop, tier, disk, writer):
    tier.compute(1, 2, 3)
    write(writer, 1, 2, 3)
    assert num_stored(loop, disk, 1, 2, 3) == 3
    tier.compute(1, 2, 3, namespace=(tenant := Namespace(tenant="a")))
    write(writer, 1, 2, 3, namespace=tenant)
    assert num_stored(loop, disk, 1, 2, 3, namespace=tenant) == 3
    assert counts(writer, "put", "there", "gone") == (6, 0, 0)


def test_the_comparison_of_contents_can_fail(loop, disk):
    fill(loop, disk, 1, 2)
    keys = KEYS.keys(tokens_of(1, 3))
    loop.call(disk.put_many([(keys[1], value_of("wrong", BLOCK_BYTES))]))
    assert num_stored(loop, disk, 1, 2) == 2
    with pytest.raises(AssertionError, match="a wrong block"):
        num_stored(loop, disk, 1, 3)


def test_each_turn_of_a_conversation_puts_what_is_new(loop, tier, disk, writer, clock):
    puts = []
    for num_blocks in (3, 5, 5, 8):
        tier.compute(*range(num_blocks))
        write(writer, *range(num_blocks))
        puts.append(counts(writer, "put")[0])
    assert puts == [3, 5, 5, 8]
    assert num_stored(loop, disk, *range(8)) == 8


def test_what_the_store_has_from_elsewhere_is_not_put(loop, tier, disk, writer):
    fill(loop, disk, *range(6), but=(2, 4))
    tier.compute(*range(6))
    write(writer, *range(6))
    assert counts(writer, "put", "there") == (2, 4)
    assert num_stored(loop, disk, *range(6)) == 6


def test_what_is_known_is_not_looked_up_and_not_for_ever(loop, tier, disk, writer, clock):
    tier.compute(1, 2)
    write(writer, 1, 2)
    disk.faults.misses = 1.0  # as if the store had dropped all
    write(writer, 1, 2)
    assert counts(writer, "put", "refused") == (2, 0)
    clock.now_s = 100.0
    write(writer, 1, 2)
    assert counts(writer, "put", "refused") == (2, 2)


def test_long_prompts_go_in_several_calls(loop, disk, begin):
    tier = Tier(num_blocks=101)
    tier.compute(*range(90))
    writer = begin(tier, disk)
    write(writer, *range(90))
    assert num_stored(loop, disk, *range(90)) == 90
    writer.close()
    tier.check()
    tier.slab.close()


# -- what is not put -------------------------------------------------------------------------------


def test_a_damaged_block_is_not_put_nor_found_again(loop, tier, disk, writer):
    tier.compute(1, 2, 3)
    tier.damage(tier.row_of(1, 2))
    write(writer, 1, 2, 3)
    assert counts(writer, "put", "corrupt") == (1, 1)
    assert num_stored(loop, disk, 1, 2, 3) == 1
    assert tier.num_ready(1, 2, 3) == 1
    assert tier.books.stats().corrupt == 1


def test_without_checksums_damage_passes(loop, tier, disk, writer):
    tier.compute(1)
    row = tier.row_of(1)
    tier.slab.checksums[row] = tier.books.blocks.checksums[row] = NO_CHECKSUM
    tier.damage(row)
    write(writer, 1)
    with pytest.raises(AssertionError, match="a wrong block"):
        num_stored(loop, disk, 1)


def test_what_changes_while_a_slow_store_takes_it_is_put_as_it_was(loop, tier, disk, writer):
    """The put is of a copy: it holds nothing on the host, and reads nothing of it."""
    tier.compute(1, 2)
    disk.faults.is_slow, disk.faults.slow_s = 1.0, 0.15
    writer.note(tokens_of(1, 2), Namespace(), 2)
    until(lambda: tier.books.stats().hit == 2)
    until(lambda: tier.books.stats().pinned == 0)
    assert not writer.drain(0)
    for row in (tier.row_of(1), tier.row_of(1, 2)):
        tier.damage(row)
    assert writer.drain(20)
    disk.faults.is_slow = 0.0
    assert num_stored(loop, disk, 1, 2) == 2
    tier.reset()


def test_what_the_host_has_no_more_is_not_put(loop, tier, disk, writer):
    tier.compute(1, 2)
    write(writer, 1, 2, 3)
    assert counts(writer, "put", "gone") == (2, 1)
    tier.compute(4, 5)
    tier.reset()
    write(writer, 4, 5)
    assert counts(writer, "put", "gone") == (2, 3)
    assert num_stored(loop, disk, 4, 5) == 0


def test_what_is_being_stored_is_not_put(loop, tier, disk, writer):
    ticket = tier.offer(1, 2)
    write(writer, 1, 2)
    assert num_stored(loop, disk, 1, 2) == 0
    tier.report(ticket, 0)


def test_nothing_of_later_weights_is_put(loop, tier, disk, writer):
    later = Namespace(weights_version=1)
    tier.compute(1, namespace=later)
    write(writer, 1, namespace=later)
    assert counts(writer, "notes", "put") == (0, 0)
    assert loop.call(disk.contains_many(KEYS.keys(tokens_of(1), later))) == [False]


# -- stores in trouble -----------------------------------------------------------------------------


def test_behind_a_block_that_was_refused_nothing_is_put(loop, tier, disk, writer):
    tier.compute(1, 2)
    disk.faults.misses = 1.0
    write(writer, 1, 2)
    assert counts(writer, "put", "refused") == (0, 2)
    disk.faults.misses = 0.0
    write(writer, 1, 2)
    assert num_stored(loop, disk, 1, 2) == 2


def test_a_line_that_is_full_drops_and_counts(tier, disk, writer, monkeypatch):
    monkeypatch.setattr("raykv.host.store_writer._MAX_NOTES", 3)
    disk.faults.is_slow, disk.faults.slow_s = 1.0, 0.1
    for mark in range(12):
        writer.note(tokens_of(mark), Namespace(), 1)
        writer.check_integrity()
    notes, dropped, waiting = counts(writer, "notes", "notes_dropped", "in_line")
    assert (notes, waiting) == (12, 3)
    assert dropped >= 8
    writer.close()
    writer.note(tokens_of(1), Namespace(), 1)
    assert counts(writer, "in_line", "notes_dropped") == (0, dropped + 4)
    assert writer.drain(0)


def test_closing_ends_what_hangs(tier, disk, writer):
    tier.compute(1)
    disk.faults.hangs = 1.0
    writer.note(tokens_of(1), Namespace(), 1)
    until(lambda: disk.faults.counts["hangs"])
    assert not writer.drain(0)
    writer.close()
    writer.close()
    assert writer.drain(0)


def test_known_blocks_are_bounded(tier, disk, writer, monkeypatch):
    monkeypatch.setattr("raykv.host.store_writer._MAX_KNOWN", 4)
    tier.compute(*range(6))
    write(writer, *range(6))
    assert len(writer._known) == 4


def test_more_blocks_than_there_are_tokens_is_an_error(writer):
    with pytest.raises(ValueError, match="3 blocks of 4 tokens cannot be stored"):
        writer.note(tokens_of(1, 2), Namespace(), 3)
    with pytest.raises(ValueError, match="-1 blocks"):
        writer.note(tokens_of(1, 2), Namespace(), -1)


def test_a_bug_costs_the_note_only(loop, tier, disk, writer, monkeypatch):
    tier.compute(1)
    tier.compute(2)
    with monkeypatch.context() as patch:
        patch.setattr(KEYS, "keys", lambda *_: 1 / 0)
        write(writer, 1)
    assert counts(writer, "failed", "last_error") == (1, "ZeroDivisionError: division by zero")
    write(writer, 2)
    assert num_stored(loop, disk, 2) == 1


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "frozen"])
def test_a_dead_or_frozen_server_holds_nothing_and_is_written_again_later(
    loop, tier, own_redis, begin, is_killed
):
    store = GuardedStore(
        RedisStore(own_redis.url, timeout_s=30), timeout_s=0.3, max_failures=2, cooldown_s=0.3
    )
    writer = begin(tier, store)
    for mark in range(8):
        tier.compute(mark)
    own_redis.kill() if is_killed else own_redis.freeze()
    for mark in range(8):
        write(writer, mark)
    assert counts(writer, "put", "refused") == (0, 8)
    assert store.stats().errors == 2
    assert not store.is_available
    assert tier.books.stats().pinned == 0
    own_redis.start() if is_killed else own_redis.thaw()
    time.sleep(0.4)
    for mark in range(8):
        write(writer, mark)
    assert counts(writer, "put") == (8,)
    assert [num_stored(loop, store, mark) for mark in range(8)] == [1] * 8
    loop.call(store.close())


def test_the_audit_notices(tier, writer):
    tier.compute(1)
    with tier.lock:
        tier.books.join("writer-0", os.getpid(), 0.0)
        tier.books.find("writer-0", [Want(np.append(tokens_of(1), 0), Namespace(), 0)])
    with pytest.raises(IntegrityError, match="1 loads and 0 notes"):
        writer.check_integrity()
    writer.close()
