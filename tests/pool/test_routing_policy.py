"""Policies alone: views in, a rank out."""

from __future__ import annotations

import pytest

from raykv import BlockManagerPool, PoolConfig
from raykv.core.kv_cache_manager import Room
from raykv.errors import ConfigError
from raykv.routing_policy import (
    AvailableBlocksPolicy,
    CacheAwarePolicy,
    FreeBlocksPolicy,
    RankView,
    RoutingPolicy,
    Wanted,
    make_policy,
)


def views(*rows):
    """Each as available and free blocks, promised ones, work and hit in tokens."""
    return [
        RankView(rank, Room(available, free, 5), *rest)
        for rank, (available, free, *rest) in enumerate(rows)
    ]


WANTED = Wanted(num_tokens=64, block_size=16, can_wait=True)


@pytest.mark.parametrize(
    ("policy", "rows", "chosen"),
    [
        (AvailableBlocksPolicy, [(9, 3), (6, 6)], 0),
        (AvailableBlocksPolicy, [(9, 9, 4), (6, 6)], 1),
        (AvailableBlocksPolicy, [(6, 6), (6, 6)], 0),
        (AvailableBlocksPolicy, [(6, 6, 0, 999, 0), (6, 6, 0, 0, 64), (7, 7)], 2),
        (FreeBlocksPolicy, [(9, 3), (6, 6)], 1),
        (FreeBlocksPolicy, [(9, 3), (6, 6, 4)], 0),
        (FreeBlocksPolicy, [(9, 3), (9, 3)], 0),
        # hit, less half of the work that the least busy rank has not
        (CacheAwarePolicy, [(9, 9, 0, 100, 0), (6, 6, 0, 100, 16)], 1),
        (CacheAwarePolicy, [(9, 9, 0, 100, 0), (6, 6, 0, 131, 16)], 1),
        (CacheAwarePolicy, [(9, 9, 0, 100, 0), (6, 6, 0, 133, 16)], 0),
        (CacheAwarePolicy, [(6, 6, 0, 50, 48), (9, 9, 0, 0, 0), (9, 9, 0, 40, 48)], 2),
        # ties: most available blocks, then the lowest number
        (CacheAwarePolicy, [(6, 6, 0, 132, 16), (9, 9, 0, 100, 0)], 1),
        (CacheAwarePolicy, [(6, 6), (9, 9, 4), (7, 7), (7, 7)], 2),
    ],
)
def test_what_is_chosen(policy, rows, chosen):
    assert policy().choose(views(*rows), WANTED) == chosen
    some = views((0, 0), *rows)[1:]
    assert policy().choose(some, WANTED) == chosen + 1, "views may be a part of the ranks"


def test_what_cannot_wait_goes_where_it_fits_if_anywhere():
    policy = CacheAwarePolicy()
    wanted = Wanted(num_tokens=80, block_size=16, can_wait=False)
    full = (1, 1, 0, 0, 48)  # the hit leaves two blocks to be found
    assert policy.choose(views(full, (9, 9, 4)), wanted) == 1
    assert policy.choose(views(full, (9, 9, 5)), wanted) == 0, "it fits nowhere"
    assert policy.choose(views((2, 2, 0, 0, 48), (9, 9)), wanted) == 0
    assert policy.choose(views(full, (9, 9, 4)), wanted._replace(can_wait=True)) == 0


# -- by name --------------------------------------------------------------------------------------


class LastPolicy(RoutingPolicy):
    def choose(self, ranks, wanted):
        return ranks[-1].rank


def own(policy):
    return f"{__name__}:{policy.__name__}"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("available_blocks", AvailableBlocksPolicy),
        ("free_blocks", FreeBlocksPolicy),
        ("cache_aware", CacheAwarePolicy),
        (own(LastPolicy), LastPolicy),
    ],
)
def test_a_policy_is_found_by_its_name(name, kind):
    assert type(make_policy(name)) is kind
    PoolConfig(num_blocks=8, routing={"policy": name})


BAD = [
    "no.such.module:Policy", "raykv.routing_policy:NoSuchPolicy",
    "raykv.routing_policy:RoutingPolicy", "raykv.core.namespace:Namespace", ":", "json:dumps",
]  # fmt: skip


@pytest.mark.parametrize("name", [*BAD, "", "round_robin", "Cache_Aware"])
def test_an_unknown_policy_is_refused(name):
    with pytest.raises(ConfigError, match=r"routing\.policy"):
        make_policy(name)


@pytest.mark.parametrize("name", BAD)
def test_a_pool_with_an_unknown_policy_starts_no_rank(name, monkeypatch):
    monkeypatch.setattr("raykv.pool.build_rank", None)
    with pytest.raises(ConfigError, match=r"routing\.policy"):
        BlockManagerPool.local(PoolConfig(num_blocks=8, routing={"policy": name}))
