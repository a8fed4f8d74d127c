"""Prefetches: what a host, a store or a source in trouble costs."""

from __future__ import annotations

import time

import pytest

from raykv.errors import IntegrityError
from raykv.host.prefetches import _Fetch, _key
from raykv.host.store_source import StoreSource
from raykv.store import GuardedStore
from raykv.store.redis_store import RedisStore

from .sources import KEYS, Clock, PatternSource, fill
from .tier_world import Tier, prompt_of, until


def test_a_full_host_takes_what_it_can(tier, begin):
    held = tier.offer(*range(100, 112))  # 12 of 16 blocks, and nobody may have them
    prefetches = begin(PatternSource(9))
    prefetches.start(prompt_of(*range(9)))
    assert not prefetches.wait(prompt_of(*range(9)), 10)
    assert tier.num_right(*range(9)) == 4
    assert prefetches.stats()["no_room"] == 1
    tier.report(held, 0)


def test_a_reset_ends_the_prefetch(tier, begin):
    source = PatternSource(40)
    source.is_open.clear()
    source.num_free = 2
    prefetches = begin(source)
    prefetches.start(prompt_of(*range(12)))
    until(lambda: tier.books.stats().storing == 12)
    tier.reset()
    source.is_open.set()
    assert not prefetches.wait(prompt_of(*range(12)), 10)
    assert tier.num_right(*range(12)) == 0
    assert tier.books.stats().orphaned == 12


def test_a_reset_between_two_steps_ends_the_prefetch_too(begin):
    tier = Tier(num_blocks=101)
    source = PatternSource(90)
    source.is_open.clear()
    source.num_free = 40
    prefetches = begin(source, on=tier)
    prefetches.start(prompt_of(*range(90)))
    until(lambda: tier.num_ready(*range(90)) == 32)
    with tier.lock:
        tier.reset()
        source.is_open.set()
    assert not prefetches.wait(prompt_of(*range(90)), 10)
    assert tier.num_right(*range(90)) == 0
    stats = tier.books.stats()
    assert (stats.storing, stats.free, stats.orphaned) == (0, 100, 32)
    prefetches.check_integrity()
    prefetches.close()
    tier.slab.close()


def test_a_lease_that_ran_out_costs_the_step_only(tier, begin):
    source, clock = PatternSource(4), Clock()
    source.is_open.clear()
    prefetches = begin(source, clock=clock)
    prefetches.start(prompt_of(*range(4)))
    until(lambda: tier.books.stats().storing == 4)
    with tier.lock:
        tier.books.expire(100.0)
        assert tier.books.stats().quarantined == 4
    source.is_open.set()
    assert not prefetches.wait(prompt_of(*range(4)), 10)
    assert tier.books.stats().quarantined == 0
    clock.now_s = 100.0
    assert prefetches.start(prompt_of(*range(4)))
    assert prefetches.wait(prompt_of(*range(4)), 10)
    assert tier.num_right(*range(4)) == 4


def test_a_source_with_a_bug_is_reported_and_costs_nothing_else(tier, begin):
    source = PatternSource(4)
    source.error = KeyError("oops")
    prefetches = begin(source)
    prefetches.start(prompt_of(1))
    assert not prefetches.wait(prompt_of(1), 10)
    assert prefetches.stats()["failed"] == 1
    assert "oops" in prefetches.stats()["last_error"]
    source.error = None
    prefetches.start(prompt_of(2))
    assert prefetches.wait(prompt_of(2), 10)


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "frozen"])
def test_a_dead_or_frozen_server_costs_the_timeout_and_is_reported(
    loop, tier, own_redis, begin, is_killed
):
    store = GuardedStore(
        RedisStore(own_redis.url, timeout_s=30), timeout_s=0.3, max_failures=2, cooldown_s=0.3
    )
    fill(loop, store, *range(8))
    source, clock = StoreSource(store, KEYS), Clock()
    prefetches = begin(source, clock=clock)
    own_redis.kill() if is_killed else own_redis.freeze()
    for mark in range(20, 30):
        prefetches.start(prompt_of(mark))
        prefetches.wait(prompt_of(mark), 10)
    prefetches.start(prompt_of(*range(8)))
    prefetches.wait(prompt_of(*range(8)), 10)
    assert tier.books.stats().free == 16
    stats = source.stats()
    assert not stats["is_available"]
    assert stats["last_error"]
    assert stats["store"]["errors"] == 2  # the others did not wait at all
    assert stats["store"]["skipped"] == 9
    own_redis.start() if is_killed else own_redis.thaw()
    time.sleep(0.4)
    clock.now_s = 10
    fill(loop, store, *range(8))  # one that was killed kept nothing
    assert prefetches.start(prompt_of(*range(8)))
    assert prefetches.wait(prompt_of(*range(8)), 10)
    assert tier.num_right(*range(8)) == 8
    loop.call(store.close())


def test_the_callers_array_is_its_own(tier, begin):
    source = PatternSource(3)
    source.is_open.clear()
    prefetches = begin(source)
    prompt = prompt_of(1, 2, 3)
    prefetches.start(prompt)
    prompt.tokens[:] = 9
    source.is_open.set()
    assert prefetches.wait(prompt_of(1, 2, 3), 10)
    assert tier.num_right(1, 2, 3) == 3


def test_the_audit_notices(tier, begin):
    prefetches = begin(PatternSource(3))
    prefetches.start(prompt_of(1, 2, 3))
    prefetches.wait(prompt_of(1, 2, 3), 10)
    prefetches._counts["started"] += 1
    with pytest.raises(IntegrityError, match="2 prefetches were started"):
        prefetches.check_integrity()
    prefetches._counts["started"] -= 1
    ticket = prefetches._offer(fetch := _fetch_of(prefetches, 4, 5), 2)
    with pytest.raises(IntegrityError, match="but the books say"):
        prefetches.check_integrity()
    prefetches._publish(fetch, ticket, 0)


def _fetch_of(prefetches, *marks):
    prompt = prompt_of(*marks)
    return _Fetch(prompt, _key(prompt), 0, len(marks))
