"""Prefetches: what arrives on the host while a prompt waits."""

from __future__ import annotations

import numpy as np
import pytest

from raykv.core import Namespace
from raykv.host.store_source import StoreSource
from raykv.memory.checksums import NO_CHECKSUM

from .sources import KEYS, Clock, PatternSource, fill
from .tier_world import Tier, content_of, prompt_of, tokens_of, until

# -- what arrives ----------------------------------------------------------------------------------


def test_what_the_store_has_is_found_on_the_host(loop, tier, disk, begin):
    fill(loop, disk, *range(10))
    prefetches = begin(StoreSource(disk, KEYS))
    assert prefetches.start(prompt_of(*range(12)))
    assert prefetches.wait(prompt_of(*range(12)), 10)
    assert tier.num_right(*range(12)) == 10
    assert not prefetches.is_running(prompt_of(*range(12)))
    assert prefetches.stats()["completed"] == 1


def test_the_comparison_of_contents_can_fail(loop, tier, disk, begin):
    items = [(key, bytes(64)) for key in KEYS.keys(tokens_of(1, 2))]
    loop.call(disk.put_many(items))
    prefetches = begin(StoreSource(disk, KEYS))
    prefetches.start(prompt_of(1, 2))
    assert prefetches.wait(prompt_of(1, 2), 10)
    with pytest.raises(AssertionError, match="a wrong block"):
        tier.num_right(1, 2)


def test_only_what_the_host_lacks_is_read(loop, tier, disk, begin):
    tier.compute(0, 1, 2)
    fill(loop, disk, *range(6))
    source = StoreSource(disk, KEYS)
    prefetches = begin(source)
    assert not prefetches.start(prompt_of(0, 1))
    assert prefetches.wait(prompt_of(0, 1), 10)
    assert prefetches.start(prompt_of(*range(6)))
    assert prefetches.wait(prompt_of(*range(6)), 10)
    assert tier.num_right(*range(6)) == 6
    assert source.stats()["blocks_read"] == 3


def test_long_prompts_come_in_steps(loop, disk, begin):
    tier = Tier(num_blocks=101)
    fill(loop, disk, *range(90))
    prefetches = begin(StoreSource(disk, KEYS), on=tier)
    prefetches.start(prompt_of(*range(90)))
    assert prefetches.wait(prompt_of(*range(90)), 10)
    assert tier.num_right(*range(90)) == 90
    prefetches.close()
    tier.check()
    tier.slab.close()


def test_what_one_source_lacks_the_next_may_have_and_then_the_first_again(tier, begin):
    first, second = PatternSource(12, gap=(2, 3)), PatternSource(7, gap=(0,))
    prefetches = begin(first, second)
    prefetches.start(prompt_of(*range(14)))
    assert prefetches.wait(prompt_of(*range(14)), 10)
    assert tier.num_right(*range(14)) == 12
    assert (first.asked, second.asked) == ([0, 7], [2, 12])


def test_images_and_tenants_count(loop, tier, disk, begin):
    fill(loop, disk, 1, 2)
    prefetches = begin(StoreSource(disk, KEYS))
    for namespace in (Namespace(tenant="a"), Namespace(multimodal=((0, "cat"),))):
        prompt = prompt_of(1, 2, namespace=namespace)
        prefetches.start(prompt)
        assert prefetches.wait(prompt, 10)  # all there was: nothing
        assert tier.num_ready(1, 2, namespace=namespace) == 0


def test_checksums_are_as_readers_expect_them(loop, tier, disk, begin):
    fill(loop, disk, 1, 2)
    prefetches = begin(StoreSource(disk, KEYS), with_checksums=False)
    prefetches.start(prompt_of(1, 2))
    assert prefetches.wait(prompt_of(1, 2), 10)
    row = tier.row_of(1, 2)
    assert tier.slab.checksums[row] == tier.books.blocks.checksums[row] == NO_CHECKSUM


# -- resets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits_in", ["count", "read"])
def test_what_is_under_way_at_a_reset_is_never_found(tier, begin, waits_in):
    source = PatternSource(4)
    if waits_in == "count":
        source.is_counting = False
    else:
        source.is_open.clear()
        source.num_free = 2
    prefetches = begin(source)
    prefetches.start(prompt_of(*range(4)))
    until(lambda: source.asked)
    with tier.lock:
        tier.books.reset()
        prefetches.reset()
    source.is_counting = True
    source.is_open.set()
    until(lambda: not prefetches.stats()["under_way"])
    assert tier.num_ready(*range(4)) == 0
    # What begins now is of after it.
    assert prefetches.start(prompt_of(*range(4)))
    assert prefetches.wait(prompt_of(*range(4)), 10)
    assert tier.num_right(*range(4)) == 4


# -- sharing ---------------------------------------------------------------------------------------


def test_equal_prompts_share_one_prefetch(tier, begin):
    source = PatternSource(3)
    source.is_open.clear()
    prefetches = begin(source)
    assert all(prefetches.start(prompt_of(1, 2, 3)) for _ in range(3))
    assert prefetches.is_running(prompt_of(1, 2, 3))
    source.is_open.set()
    assert prefetches.wait(prompt_of(1, 2, 3), 10)
    stats = prefetches.stats()
    assert (stats["started"], stats["blocks"], stats["sources"]) == (
        1,
        3,
        {"pattern": {"asked": 1}},
    )


def test_prompts_that_share_a_prefix_read_each_block_once(tier, begin):
    source = PatternSource(8)
    source.is_open.clear()
    prefetches = begin(source)
    prompts = [(1, 2, 3), (1, 2, 3, 4), (1, 2), (1, 2, 5)]
    for marks in prompts:
        assert prefetches.start(prompt_of(*marks))
    until(lambda: tier.books.stats().storing == 5)
    source.is_open.set()
    for marks in prompts:
        prefetches.wait(prompt_of(*marks), 10)
        assert tier.num_right(*marks) == len(marks)
    assert prefetches.stats()["blocks"] == 5


def test_what_a_rank_is_storing_is_not_read(tier, begin):
    ticket = tier.offer(1, 2)
    source = PatternSource(4)
    prefetches = begin(source)
    prefetches.start(prompt_of(1, 2, 3, 4))
    assert not prefetches.wait(prompt_of(1, 2, 3, 4), 10)  # 1 and 2 are not there yet
    assert prefetches.stats()["blocks"] == 2
    for at, row in enumerate(ticket.host_ids.tolist()):
        tier.slab.blocks[row] = content_of(tokens_of(1, 2), at, Namespace())
    tier.report(ticket, 2)
    assert tier.num_right(1, 2, 3, 4) == 4


def test_where_a_rank_is_storing_all_of_it_nothing_is_read(tier, begin):
    ticket = tier.offer(1, 2)
    prefetches = begin(PatternSource(2))
    prefetches.start(prompt_of(1, 2))
    prefetches.wait(prompt_of(1, 2), 10)
    stats = prefetches.stats()
    assert (stats["blocks"], stats["no_room"]) == (0, 0)
    tier.report(ticket, 0)


# -- giving up -------------------------------------------------------------------------------------


def test_after_the_time_what_arrived_stays_and_the_rest_is_given_up(tier, begin):
    source = PatternSource(8)
    source.is_open.clear()
    source.num_free = 5
    prefetches = begin(source)
    prefetches.start(prompt_of(*range(8)))
    assert not prefetches.wait(prompt_of(*range(8)), 0.1)
    assert tier.num_right(*range(8)) == 5
    assert not prefetches.is_running(prompt_of(*range(8)))
    assert prefetches.stats()["given_up"] == 1
    assert tier.books.stats().free == 11
    source.is_open.set()
    assert prefetches.start(prompt_of(*range(8)))  # what was given up may be begun again
    assert prefetches.wait(prompt_of(*range(8)), 10)
    assert tier.num_right(*range(8)) == 8


def test_what_waits_in_line_can_be_given_up(tier, begin):
    source = PatternSource(1)
    source.is_open.clear()
    prefetches = begin(source)
    for mark in range(6):  # more than run at a time
        assert prefetches.start(prompt_of(mark))
    prefetches.give_up(prompt_of(5))
    assert not prefetches.wait(prompt_of(5), 10)
    assert not prefetches.wait(prompt_of(0), 0)
    prefetches.check_integrity()
    source.is_open.set()
    assert [prefetches.wait(prompt_of(mark), 10) for mark in range(1, 5)] == [True] * 4
    assert [tier.num_right(mark) for mark in range(6)] == [0, 1, 1, 1, 1, 0]


def test_a_full_line_turns_away(tier, begin, monkeypatch):
    monkeypatch.setattr("raykv.host.prefetches._MAX_UNDER_WAY", 3)
    source = PatternSource(1)
    source.is_open.clear()
    prefetches = begin(source)
    assert [prefetches.start(prompt_of(mark)) for mark in range(5)] == [True] * 3 + [False] * 2
    assert prefetches.stats()["turned_away"] == 2


def test_closing_gives_up_and_nothing_starts_again(tier, begin):
    source = PatternSource(2)
    source.is_open.clear()
    source.num_free = 1
    prefetches = begin(source)
    for first in range(6):
        prefetches.start(prompt_of(first, 7))
    until(lambda: tier.books.stats().storing == 8)
    prefetches.close()
    prefetches.close()
    assert not prefetches.start(prompt_of(1))
    assert prefetches.stats()["given_up"] == 6
    assert tier.books.stats().quarantined == 0


# -- what was asked for a moment ago ---------------------------------------------------------------


def test_what_nobody_has_is_not_asked_for_again_for_a_while(tier, begin):
    source, clock = PatternSource(0), Clock()
    prefetches = begin(source, clock=clock)
    assert prefetches.start(prompt_of(1))
    assert prefetches.wait(prompt_of(1), 10)
    assert not prefetches.start(prompt_of(1))
    clock.now_s = 10
    assert prefetches.start(prompt_of(1))
    prefetches.wait(prompt_of(1), 10)
    assert source.asked == [0, 0]


def test_what_was_evicted_since_is_asked_for_again(tier, begin):
    source = PatternSource(3)
    prefetches = begin(source)
    prefetches.start(prompt_of(1, 2, 3, 4))
    assert prefetches.wait(prompt_of(1, 2, 3, 4), 10)
    assert not prefetches.start(prompt_of(1, 2, 3, 4))
    tier.reset()
    assert not prefetches.wait(prompt_of(1, 2, 3, 4), 0)
    assert prefetches.start(prompt_of(1, 2, 3, 4))
    assert prefetches.wait(prompt_of(1, 2, 3, 4), 10)
    assert tier.num_right(1, 2, 3, 4) == 3


def test_what_is_remembered_is_bounded(tier, begin, monkeypatch):
    monkeypatch.setattr("raykv.host.prefetches._MAX_KNOWN", 5)
    prefetches = begin(PatternSource(0))
    for mark in range(9):
        prefetches.start(prompt_of(mark))
        prefetches.wait(prompt_of(mark), 10)
        prefetches.check_integrity()
    assert not prefetches.start(prompt_of(8))
    assert prefetches.start(prompt_of(0))


def test_a_prompt_of_which_nothing_is_known(tier, begin):
    tier.compute(1, 2)
    prefetches = begin(PatternSource(3))
    assert prefetches.wait(prompt_of(1, 2), 0)
    assert not prefetches.wait(prompt_of(1, 2, 3), 0)
    prefetches.give_up(prompt_of(1, 2, 3))
    assert not prefetches.start(prompt_of())
    assert not begin(client_id="none").start(prompt_of(9))  # no sources


def test_a_view_of_another_layout_is_the_same_prompt(tier, begin):
    prefetches = begin(PatternSource(2))
    prompt = prompt_of(1, 2)
    twice = np.repeat(prompt.tokens, 2)[::2]
    prefetches.start(type(prompt)(twice, prompt.namespace))
    assert prefetches.wait(prompt, 10)
    assert prefetches.stats()["started"] == 1
