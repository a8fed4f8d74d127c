"""The host tier as a whole: who may use it, what is said in which order, who has died."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from raykv import Namespace
from raykv.errors import ConfigError, IntegrityError, RankUnavailableError
from raykv.host.messages import Ask, BlockKind, TierCall
from raykv.host.tickets import NO_TICKET, LoadResult, Offer, StoreResult, Want
from raykv.host.tier_host import TierHost
from raykv.memory.host_slab import HostSlab

from .tier_world import make_config, wait_until

TOKENS = np.arange(9, dtype=np.int32)

KIND = BlockKind(64, b"layout")


@pytest.fixture
def host():
    host = TierHost(make_config({"lease_s": 1000.0}))
    yield host
    host.check_integrity()
    host.close()


def join(host, name="one", **options):
    return host.join(name, os.getpid(), KIND, **options)


def say(host, info, name="one", **parts):
    return host.exchange(TierCall(name, info.epoch, **parts))


def offer(num_blocks=4):
    return Offer(TOKENS, Namespace(), num_blocks)


def ask():
    return Ask(Want(TOKENS, Namespace(), 0), is_final=True)


def test_what_is_stored_and_reported_is_found(host):
    info = join(host)
    [ticket] = say(host, info, offers=[offer()]).stores
    assert len(ticket.host_ids) == 4
    [load] = say(host, info, asks=[ask()]).loads
    assert load.id == NO_TICKET, "it is not written yet"
    answer = say(host, info, stored=[StoreResult(ticket.id, 3, None)], asks=[ask()])
    assert answer.loads[0].host_ids.tolist() == ticket.host_ids[:3].tolist()
    say(host, info, loaded=[LoadResult(answer.loads[0].id, np.zeros(3, np.uint8))])
    stats = host.stats()
    assert (stats.cached, stats.pinned, stats.loaded_total) == (3, 0, 3)


def test_calls_of_an_earlier_epoch_report_but_get_nothing(host):
    info = join(host)
    [ticket] = say(host, info, offers=[offer()]).stores
    epoch, count = host.reset()
    assert (epoch, count) == (info.epoch + 1, 4)
    answer = say(
        host, info, stored=[StoreResult(ticket.id, 4, None)], offers=[offer()], asks=[ask()]
    )
    assert answer.epoch == epoch
    assert [one.id for one in [*answer.stores, *answer.loads]] == [NO_TICKET] * 2
    stats = host.stats()
    assert (stats.cached, stats.storing, stats.orphaned, stats.free) == (0, 0, 4, 32)


def test_a_tier_that_starts_again_counts_on(host):
    epoch = host.reset()[0]
    time.sleep(0.001)
    again = TierHost(host.config)
    assert again.epoch > epoch
    again.close()


def test_the_memory_is_there_with_the_first_rank(host):
    assert host.stats().blocks == 0
    assert host.state_stats() is None
    with pytest.raises(RankUnavailableError, match="no memory yet"):
        host.lend("other", Want(np.arange(9, dtype=np.int32), Namespace(), 0))
    info = join(host)
    assert info.blocks.num_blocks == 33
    with HostSlab.attach(info.blocks) as slab:
        assert slab.block_bytes == 64
    assert join(host, "two").blocks == info.blocks


def test_blocks_of_another_size_are_refused(host):
    join(host)
    with pytest.raises(ConfigError, match="128 bytes"):
        host.join("two", os.getpid(), BlockKind(128, b"layout"))


def test_strangers_are_told_to_join(host):
    info = join(host)
    with pytest.raises(RankUnavailableError, match="join again"):
        say(host, info, "two")
    assert not host.renew("two")
    host.unmapped("two")


def test_a_new_name_takes_over_from_the_old_one(host):
    info = join(host)
    say(host, info, offers=[offer()])
    join(host, "two", replaces="one")
    assert not host.renew("one")
    stats = host.stats()
    assert (stats.storing, stats.quarantined, stats.free) == (0, 0, 32)
    join(host, "two", replaces="one")


def test_who_is_silent_loses_its_lease_by_itself():
    host = TierHost(make_config({"lease_s": 0.05}))
    info = join(host)
    say(host, info, offers=[offer()])
    wait_until(lambda: host.stats().quarantined == 4)
    with pytest.raises(RankUnavailableError):
        say(host, info)
    host.unmapped("one")
    assert host.stats().free == 32
    host.close()


def test_what_a_dead_process_left_comes_back(host):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    info = host.join("theirs", process.pid, KIND)
    say(host, info, "theirs", offers=[offer()])
    [client] = host._books.blocks.clients
    host._books.blocks.leave("theirs")  # it was silent first
    assert host.stats().quarantined == 4
    assert client.pid == process.pid
    process.kill()
    process.communicate()
    wait_until(lambda: host.stats().quarantined == 0)
    assert host._processes == {}


def test_a_process_that_died_before_it_was_watched_is_no_error(host):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    host.join("theirs", process.pid, KIND)


def test_a_header_that_was_overwritten_is_noticed(host):
    join(host)
    host._books.slab.blocks[0, 0] = 1
    with pytest.raises(IntegrityError, match="padding"):
        host.check_integrity()
    host._books.slab.blocks[0, 0] = 0


def test_a_closed_tier_says_so():
    host = TierHost(make_config())
    info = join(host)
    with HostSlab.attach(info.blocks) as slab:
        host.close()
        host.close()
        assert slab.blocks.shape == (33, 64), "who has it mapped keeps it"
    for call in (host.stats, lambda: say(host, info), lambda: join(host, "two")):
        with pytest.raises(RankUnavailableError, match="closed"):
            call()
