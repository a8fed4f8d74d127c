"""Eviction as a policy: what each one keeps, and what holds whatever it wants."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import settings

from raykv.core import BlockManagerImpl
from raykv.core.eviction import POLICIES, EvictionPolicy, LrfuPolicy
from raykv.core.retention import Retention
from raykv.errors import ConfigError

from .helpers import check_drained, counters, hit_ids, publish, run_of, start
from .test_growth import walk
from .test_state_machine import LONG, SHORT, ConcurrentManagers, Managers

LOW, HIGH, PIN = Retention(10), Retention(90), Retention(100)


class ShallowFirst(EvictionPolicy):
    """Wants parents gone before their children: always in the way of closure."""

    def scores(self, released):
        return released.depths.astype(float)


class AnyOrder(EvictionPolicy):
    """Scores by chance, now this way, now that way."""

    def __init__(self):
        self.random = np.random.default_rng(0)

    def scores(self, released):
        return self.random.integers(-3, 3, len(released.stamps)).astype(float)


class Forgetful(LrfuPolicy):
    """LRFU with a short memory."""

    def __init__(self):
        super().__init__(half_life=1e-4)


class Elephant(LrfuPolicy):
    """LRFU with a long memory."""

    def __init__(self):
        super().__init__(half_life=1e6)


class Recorder(EvictionPolicy):
    """Notes what it is shown."""

    shown: tuple = ()

    def scores(self, released):
        Recorder.shown += (released,)
        return np.zeros(len(released.stamps))


def own(policy) -> str:
    return f"{__name__}:{policy.__name__}"


EVERY = ["lru", *POLICIES, own(ShallowFirst), own(AnyOrder), own(Forgetful)]


@pytest.fixture
def make(request):
    """Makes managers of 12 blocks of 2 tokens, and audits them at the end."""
    made = []

    def make(eviction, num_blocks=13):
        made.append(BlockManagerImpl(num_blocks, 2, eviction=eviction))
        return made[-1]

    yield make
    for manager in made:
        manager.check_integrity()


def keep(manager, mark, retention=None) -> int:
    """Caches one block of its own; returns its id."""
    blocks = start(manager, run_of(2, mark))
    options = {} if retention is None else {"retention": retention}
    manager.cache(run_of(2, mark), blocks, **options)
    block_id = blocks.ids[0]
    blocks.release()
    return int(block_id)


def victims(manager) -> list[int]:
    """All cached blocks in the order in which they go."""
    held, order = [manager.allocate(manager.num_free_blocks)], []
    while manager.num_evictable_blocks:
        held.append(manager.allocate(1))
        order += held[-1].ids.tolist()
        manager.check_integrity()
    for blocks in held:
        blocks.release()
    return order


# -- the choice of a policy -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "eviction",
    [
        "mru", "", "LRU", "no.such.module:Policy", "raykv.core.eviction:NoSuchPolicy",
        "raykv.core.eviction:EvictionPolicy", "raykv.core.namespace:Namespace", ":", "json:dumps",
    ],
)  # fmt: skip
def test_an_unknown_policy_is_refused(eviction):
    with pytest.raises(ConfigError, match="eviction"):
        BlockManagerImpl(8, 2, eviction=eviction)


def test_a_policy_of_ones_own_is_shown_what_was_released(make):
    Recorder.shown = ()
    manager = make(own(Recorder))
    first = start(manager, run_of(2, 1, 2, 3))
    manager.cache(run_of(2, 1, 2), first, retention=HIGH)
    first.release()
    branch = start(manager, run_of(2, 1, 4))
    manager.cache(run_of(2, 1, 4), branch)
    branch.release()
    assert len(victims(manager)) == 3
    (one, two) = Recorder.shown  # the first run a second time, in a round of its own
    assert one.depths.tolist() == [0, 1]
    assert two.depths.tolist() == [0]
    assert one.priorities.tolist() == [90, 50]
    assert one.turnovers.tolist() == [2 / 13, 3 / 13]
    assert two.turnovers.tolist() == [3 / 13]
    assert one.last_scores.tolist() == [-math.inf, -math.inf]
    assert two.last_scores.tolist() == [0.0]
    assert one.stamps[0] < one.stamps[1] < two.stamps[0]


# -- LRFU -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("policy", [LrfuPolicy, Elephant])
def test_lrfu_evicts_by_the_sum_of_faded_uses(make, seed, policy):
    rng = random.Random(seed)
    manager = make("lrfu" if policy is LrfuPolicy else own(policy), num_blocks=33)
    uses: dict[int, list[float]] = {}  # turnovers at each release
    block_of, published, last_use = {}, 0, []
    for _ in range(200):
        mark = rng.randrange(24)
        published += mark not in block_of
        block_of.setdefault(mark, keep(manager, mark))
        uses.setdefault(mark, []).append(published / 33)
        last_use = [other for other in last_use if other != mark] + [mark]
    now, half_life = published / 33, policy().half_life
    weight = {m: sum(2 ** ((t - now) / half_life) for t in uses[m]) for m in uses}
    mark_of = {block_id: mark for mark, block_id in block_of.items()}
    order = [mark_of[i] for i in victims(manager)]
    for first, second in itertools.pairwise(order):
        assert weight[first] <= weight[second] * (1 + 1e-9)
        if uses[first] == uses[second]:
            assert last_use.index(first) < last_use.index(second)
    assert sorted(order) == sorted(uses)


def test_lrfu_keeps_what_was_used_often_and_lru_does_not(make):
    for eviction, survives in (("lrfu", True), ("lru", False)):
        manager = make(eviction)
        for _ in range(3):
            keep(manager, 0)
        for mark in range(1, 13):
            publish(manager, run_of(2, mark))
        assert bool(hit_ids(manager, run_of(2, 0))) is survives


def test_a_short_memory_is_lru_and_a_long_one_lfu(make):
    plan = [1, 1, 1, 2, 2, 3, 4, 4, 4, 4, 5, 3]
    orders = {}
    for name, eviction in [("lru", "lru"), ("short", own(Forgetful)), ("long", own(Elephant))]:
        manager = make(eviction)
        mark_of = {keep(manager, mark): mark for mark in plan}
        orders[name] = [mark_of[i] for i in victims(manager)]
    assert orders["short"] == orders["lru"] == [1, 2, 4, 5, 3]
    assert orders["long"] == [5, 2, 3, 1, 4]


# -- priorities -----------------------------------------------------------------------------------


def test_low_priorities_go_first_and_lru_rules_among_equals(make):
    manager = make("priority")
    plan = [HIGH, None, LOW, PIN, LOW, None, HIGH]
    ids = [keep(manager, mark, retention) for mark, retention in enumerate(plan)]
    assert victims(manager) == [ids[i] for i in (2, 4, 1, 5, 0, 6, 3)]


@pytest.mark.parametrize("eviction", ["lru", "lrfu"])
def test_other_policies_ignore_priorities_and_their_ends(make, eviction):
    orders = []
    for retentions in ([None] * 4, [PIN, LOW, Retention(90, 1.0), HIGH]):
        manager = make(eviction)
        ids = [keep(manager, mark, wish) for mark, wish in enumerate(retentions)]
        manager.set_time(5.0)
        keep(manager, 0, retentions[0])
        orders.append([ids.index(i) for i in victims(manager)])
    assert orders[0] == orders[1] == [1, 2, 3, 0]


def test_pins_go_last_but_never_make_an_allocation_fail(make):
    manager = make("priority")
    pinned = [keep(manager, mark, PIN) for mark in range(4)]
    rest = [keep(manager, mark) for mark in range(4, 12)]
    with manager.allocate(8) as taken:
        assert sorted(taken.ids.tolist()) == sorted(rest)
    with manager.allocate(12) as everything:
        assert set(pinned) <= set(everything.ids.tolist())
    check_drained(manager)


def test_a_priority_ends_with_its_time(make):
    manager = make("priority")
    manager.set_time(100.0)
    short, plain, long = (
        keep(manager, mark, retention)
        for mark, retention in enumerate([Retention(90, 5.0), None, Retention(90, 50.0)])
    )
    manager.set_time(104.9)
    blocks = manager.allocate(manager.num_free_blocks + 1)
    assert plain in blocks.ids.tolist()
    blocks.release()
    manager.set_time(105.0)
    plain = keep(manager, 1)
    assert victims(manager) == [short, plain, long]


def test_a_low_priority_ends_as_well(make):
    """Its old, low score must not count any more."""
    manager = make("priority")
    plain, low = keep(manager, 1), keep(manager, 2, Retention(10, 5.0))
    lowest = keep(manager, 3, Retention(0))
    with manager.allocate(manager.num_free_blocks + 1) as taken:  # everything is scored now
        assert lowest in taken.ids.tolist()
    manager.set_time(6.0)
    assert victims(manager) == [plain, low]


def test_what_was_wished_last_for_a_run_counts(make):
    manager = make("priority")
    tokens = run_of(2, 1, 2, 3)
    blocks = start(manager, tokens)
    manager.cache(tokens[:2], blocks, retention=PIN)
    manager.cache(tokens, blocks, retention=LOW)  # the run goes on
    ids = blocks.ids.tolist()
    blocks.release()
    assert victims(manager)[:3] == ids[::-1]
    other = keep(manager, 9)
    assert victims(manager) == [other]


# -- what holds under every policy ----------------------------------------------------------------


@pytest.mark.parametrize("eviction", EVERY)
def test_exactly_enough_goes_children_first_and_a_failure_costs_nothing(make, eviction):
    manager = make(eviction)
    trunk = publish(manager, run_of(2, 1, 2, 3))
    left = publish(manager, run_of(2, 1, 2, 3, 4, 5))[3:]
    right = publish(manager, run_of(2, 1, 2, 6, 7))[2:]
    held = manager.allocate_shared(run_of(2, 1, 2, 6))
    before = counters(manager)
    assert manager.allocate(before["num_available_blocks"] + 1) is None
    assert counters(manager) == before
    assert before["num_evictable_blocks"] == 4
    order = victims(manager)
    assert len(order) == 4
    assert order.index(left[1]) < order.index(left[0]) < order.index(trunk[2])
    assert right[1] in order
    assert hit_ids(manager, run_of(2, 1, 2, 6)) == [*trunk[:2], right[0]]
    held.release()
    check_drained(manager)


@pytest.mark.parametrize("eviction", EVERY)
def test_a_reset_starts_the_order_afresh(make, eviction):
    manager = make(eviction)
    for mark in range(5):
        keep(manager, mark, HIGH)
    assert manager.reset_prefix_cache() == 5
    ids = [keep(manager, mark) for mark in range(5, 9)]
    assert sorted(victims(manager)) == sorted(ids)
    check_drained(manager)


class Wishful(Managers):
    """Publishes with changing priorities, while time goes on."""

    num_published = 0
    wishes = (Retention(), LOW, Retention(90, 4.0), PIN, Retention(10, 2.0), Retention(100, 1.0))

    def publish_real(self, tokens, blocks, namespace):
        self.num_published += 1
        self.real.set_time(self.num_published // 2)
        wish = self.wishes[self.num_published * 7 % 11 % len(self.wishes)]
        return self.real.cache(tokens, blocks, namespace=namespace, retention=wish)


MACHINES = {
    name: type(f"{name}Managers", (base,), {"eviction": eviction})
    for name, base, eviction in [
        ("Lrfu", Managers, "lrfu"),
        ("Priority", Wishful, "priority"),
        ("PriorityConcurrent", type("Both", (Wishful, ConcurrentManagers), {}), "priority"),
        ("ShallowFirst", Managers, own(ShallowFirst)),
        ("AnyOrder", Wishful, own(AnyOrder)),
    ]
}  # fmt: skip

for _name, _machine in MACHINES.items():
    globals()[f"Test{_name}"] = pytest.mark.timeout(1200)(_machine.TestCase)
    _machine.TestCase.settings = settings(SHORT, max_examples=40)
    _long = type(f"Long{_name}", (_machine,), {}).TestCase
    globals()[f"TestLong{_name}"] = pytest.mark.nightly(pytest.mark.timeout(3600)(_long))
    _long.settings = settings(LONG, max_examples=1000)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize(("seed", "num_blocks", "block_size"), [(1, 48, 1), (2, 24, 2)])
def test_conversations_that_grow_branch_and_shrink(name, seed, num_blocks, block_size):
    walk(MACHINES[name](), seed, num_blocks, block_size, num_steps=500)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", MACHINES)
def test_many_long_conversations(name):
    for seed in range(40):
        walk(MACHINES[name](), seed, 16 + seed % 40, 1 + seed % 4, num_steps=5000)


def test_no_policy_changes_what_is_found(make):
    """Prefixes are found or not; a policy decides only what is still there."""
    found = []
    for eviction in EVERY:
        manager = make(eviction, num_blocks=64)
        for marks in ([1, 2, 3], [1, 2, 4], [5], [1, 6, 7]):
            publish(manager, run_of(2, *marks))
        found.append([len(hit_ids(manager, run_of(2, *m))) for m in ([1, 2, 4], [5, 1], [6], [1])])
    assert found == [[3, 1, 0, 1]] * len(EVERY)
