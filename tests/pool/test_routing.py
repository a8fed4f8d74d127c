"""The router alone: what it charges ranks with, what it believes of them, whom it sends where."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from raykv import Namespace, PoolConfig, SamplingParams, Sequence
from raykv.core.kv_cache_manager import NO_ROOM, Room
from raykv.engine import GenerationRequest, TokenOutput
from raykv.errors import ConfigError, IntegrityError
from raykv.routing import Router
from raykv.routing_policy import RoutingPolicy

SIZE = 16
EMPTY = Room(1000, 1000, 64)
AWARE = {"policy": "cache_aware"}


class AffinityPolicy(RoutingPolicy):
    """Where most is cached, whatever else waits there."""

    wants_hits = True

    def choose(self, ranks, wanted):
        return max(ranks, key=lambda view: view.num_hit_tokens).rank


class StrayPolicy(RoutingPolicy):
    def choose(self, ranks, wanted):
        return len(ranks)


def own(policy):
    return f"{__name__}:{policy.__name__}"


def make_router(policy="cache_aware", num_ranks=2, **config):
    values = {"num_blocks": 1001, "block_size": SIZE, "hash_seed": b"seed", **config}
    return Router(PoolConfig(routing={"policy": policy}, **values), num_ranks)


def tokens_of(num_tokens, seed=0):
    return np.random.default_rng(seed).integers(0, 1000, num_tokens, dtype=np.int32)


def make_request(tokens, max_tokens=16, namespace=None):
    return GenerationRequest(
        "r", tokens, SamplingParams(max_tokens=max_tokens), namespace or Namespace()
    )


def output_of(*token_ids, cached=0, stop_reason="length"):
    return TokenOutput("r", token_ids, num_cached_tokens=cached, stop_reason=stop_reason)


def send(router, tokens, max_tokens=16, rooms=None, namespace=None):
    """What ``Generations`` does for one request: a rank, and its charge."""
    prompt = router.read(tokens, namespace or Namespace())
    rank = router.choose(rooms or [EMPTY] * len(router.debits), prompt, max_tokens)
    charge = router.charge(rank, prompt, max_tokens)
    router.check_integrity()
    return charge


def hits_of(router, tokens):
    """Tokens of a prompt that each rank is believed to have."""
    prompt = router.read(tokens, Namespace())
    return [router._num_hits(rank, prompt) * SIZE for rank in range(len(router.debits))]


# -- who goes where: the two cases that cache-aware routing is for --------------------------------


def prefilled(charges, prompts):
    """Tokens that the ranks compute, given what each of them got before: no digest involved."""
    total, had = 0, [set() for _ in range(4)]
    for charge, tokens in zip(charges, prompts, strict=True):
        names = [bytes(tokens[:stop]) for stop in range(SIZE, len(tokens), SIZE)]
        total += len(tokens) - SIZE * len(had[charge.rank].intersection(names))
        had[charge.rank].update(names)
    return total


@pytest.mark.parametrize(
    ("policy", "stays"),
    [("cache_aware", True), (own(AffinityPolicy), True), ("available_blocks", False)],
)
def test_equal_prompts_stay_together(policy, stays):
    router = make_router(policy, num_ranks=2)
    prompts = [tokens_of(1000)] * 8
    charges = [send(router, tokens) for tokens in prompts]
    assert (prefilled(charges, prompts) <= 1.1 * 1000) == stays


@pytest.mark.parametrize(
    ("policy", "spreads", "hits"),
    [
        ("cache_aware", True, True),
        (own(AffinityPolicy), False, True),
        ("available_blocks", True, True),
    ],
)
def test_a_shared_prefix_spreads_and_still_hits(policy, spreads, hits):
    router = make_router(policy, num_ranks=4)
    shared = tokens_of(512)
    prompts = [np.concatenate((shared, tokens_of(64, seed))) for seed in range(1, 65)]
    charges = [send(router, tokens) for tokens in prompts]
    loads = [0] * 4
    for charge, tokens in zip(charges, prompts, strict=True):
        loads[charge.rank] += len(tokens) + 16
    assert (max(loads) <= 1.3 * np.mean(loads)) == spreads
    num_hits = sum(map(len, prompts)) - prefilled(charges, prompts)
    assert (num_hits >= 0.9 * 63 * 512) == hits


@pytest.mark.parametrize(("num_new", "chosen"), [(159, 0), (160, 0), (161, 1)])
def test_an_imbalance_is_worth_twice_what_the_hit_saves(num_new, chosen):
    router = make_router()
    prefix = tokens_of(160)
    router.charge(0, router.read(prefix, Namespace()), num_new)
    assert router.work == [160 + num_new, 0]
    follower = np.concatenate((prefix, tokens_of(50, 7)))
    # A tie goes to the rank with most blocks to give.
    assert send(router, follower, rooms=[EMPTY, Room(900, 900, 64)]).rank == chosen


# -- the books ------------------------------------------------------------------------------------


def test_a_request_is_credited_as_it_goes_on():
    router = make_router()
    charge = send(router, tokens_of(100), max_tokens=30)
    assert (router.debits, router.work) == ([9, 0], [130, 0])
    router.credit(charge, 1, is_last=False)
    assert (router.debits, router.work) == ([0, 0], [29, 0])
    router.credit(charge, 3, is_last=False)
    assert router.work == [26, 0]
    router.credit(charge, 1, is_last=True)
    assert router.work == [0, 0]
    router.check_integrity()


def test_what_hits_is_neither_promised_nor_work():
    router = make_router()
    send(router, tokens_of(100), max_tokens=30)
    debits, work = router.debits[0], router.work[0]
    again = send(router, tokens_of(100), max_tokens=30)
    assert again.num_hit_tokens == 96
    assert (router.debits[0] - debits, router.work[0] - work) == (9 - 6, 4 + 30)


def test_a_hit_leaves_a_token_to_compute():
    router = make_router()
    send(router, tokens_of(96))
    assert send(router, tokens_of(96)).num_hit_tokens == 80


def test_samples_follow_the_first_of_their_prompt_and_a_given_rank_holds_for_all():
    router = make_router("available_blocks", num_ranks=3)
    requests = [
        replace(make_request(tokens_of(20, prompt)), sample_index=sample)
        for prompt in range(2)
        for sample in range(3)
    ]

    def ranks_of(requests, rank):
        charges = router.place(requests, router.read_all(requests), [EMPTY] * 3, rank)
        return [charge.rank for charge in charges]

    assert ranks_of(requests, None) == [0, 0, 0, 1, 1, 1]
    assert ranks_of(requests[1:], None) == [2, 2, 2, 2, 2], "the first one left may be no first"
    assert ranks_of(requests, 1) == [1] * 6


def test_where_the_policy_fails_nothing_is_charged():
    router, rooms = make_router("available_blocks"), [EMPTY] * 2
    requests = [make_request(tokens_of(20))] * 3
    answers = iter([0, 1])
    router.policy.choose = lambda ranks, wanted: next(answers)
    with pytest.raises(StopIteration):
        router.place(requests, router.read_all(requests), rooms, None)
    assert router.debits == router.work == [0, 0]
    router.check_integrity()


def test_no_more_is_charged_than_a_sequence_can_hold():
    router = make_router(max_model_len=200)
    charge = send(router, tokens_of(150), max_tokens=10**9)
    assert (charge.num_blocks, charge.num_new_tokens) == (13, 50)
    assert router.charge(1, router.read(tokens_of(300), Namespace()), 5).num_new_tokens == 0
    router.check_integrity()


def test_a_policy_hears_what_is_wanted():
    router, heard = make_router("available_blocks", max_model_len=200), []
    router.policy.choose = lambda ranks, wanted: heard.append(wanted) or ranks[0].rank
    send(router, tokens_of(150), max_tokens=10**9)
    send(router, tokens_of(50), max_tokens=31)
    router.begin([EMPTY] * 2).take(Sequence(tokens_of(20)), 33)
    assert [(w.num_tokens, w.num_blocks, w.can_wait) for w in heard] == [
        (200, 13, True),
        (81, 6, True),
        (33, 3, False),
    ]


def test_books_that_do_not_add_up_are_found():
    router = make_router()
    send(router, tokens_of(20))
    router.work[1] += 1
    with pytest.raises(IntegrityError, match="work"):
        router.check_integrity()


# -- which ranks are asked about ------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["available_blocks", "free_blocks", "cache_aware"])
def test_ranks_that_can_admit_nothing_are_passed_by_unless_all_are(policy):
    router = make_router(policy, num_ranks=3)
    full, roomy = Room(900, 900, 0), Room(5, 5, 1)
    assert send(router, tokens_of(20), rooms=[full, NO_ROOM, roomy]).rank == 2
    assert send(router, tokens_of(20), rooms=[NO_ROOM, full, full]).rank == 1
    assert send(router, tokens_of(20), rooms=[NO_ROOM] * 3).rank == 0
    sequences = [Sequence(tokens_of(20, seed)) for seed in range(4)]
    choice = router.begin([NO_ROOM, Room(900, 900, 2), roomy])
    assert [choice.take(s, 20) for s in sequences] == [1, 1, 2, 1], "what it gave away counts"


def test_a_lost_ranks_cache_attracts_nobody_and_is_gone_when_it_returns():
    router = make_router(num_ranks=3)
    send(router, tokens_of(100))
    assert send(router, tokens_of(100, 1), rooms=[NO_ROOM, EMPTY, EMPTY]).rank == 1
    assert hits_of(router, tokens_of(100)) == [0, 0, 0]


def test_a_policy_that_chooses_no_rank_is_named():
    router = make_router(own(StrayPolicy))
    with pytest.raises(ConfigError, match=r"StrayPolicy chose rank 2, but ranks are 0\.\.1"):
        send(router, tokens_of(20))


# -- allocations of a scheduler of one's own -----------------------------------------------------


def allocate(router, rooms, *rows):
    choice = router.begin(rooms)
    ranks = [choice.take(Sequence(row), len(row)) for row in rows]
    choice.settle()
    return ranks


def test_an_allocation_follows_what_was_allocated_before():
    router = make_router()
    assert allocate(router, [EMPTY] * 2, tokens_of(160)) == [0]
    rooms = [Room(991, 990, 63), Room(1000, 1000, 64)]
    assert allocate(router, rooms, tokens_of(320)) == [0]
    assert allocate(router, rooms, tokens_of(160, 1)) == [1]
    router.begin(rooms).take(Sequence(tokens_of(160, 2)), 160)
    assert hits_of(router, tokens_of(160, 2)) == [0, 0], "it came to nothing, so nothing is noted"


def test_used_blocks_are_work_and_so_is_what_the_list_took():
    router = make_router()
    allocate(router, [EMPTY] * 2, tokens_of(160))
    shared = tokens_of(160)[:128]
    rows = [np.concatenate((shared, tokens_of(64, seed))) for seed in range(1, 13)]
    # The hit of 8 blocks is worth 16 blocks of imbalance; each member takes 4, or 12 elsewhere.
    rooms = [Room(992, 992, 60), Room(1000, 1000, 64)]
    assert allocate(router, rooms, *rows) == [0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0]


# -- what ranks are believed to have --------------------------------------------------------------


def test_a_finished_output_is_believed_to_be_cached():
    router = make_router()
    prompt, produced = tokens_of(40), tokens_of(40, 1)
    charge = send(router, prompt)
    router.credit(charge, 1, is_last=True)
    assert hits_of(router, tokens_of(40)) == [32, 0]
    router.learn(charge, make_request(prompt), output_of(*produced))
    turn = np.concatenate((prompt, produced, tokens_of(50, 2)))
    assert len(prompt) + len(produced) == 80
    assert hits_of(router, turn) == [64, 0], "the last token's KV was not computed"
    assert send(router, turn).rank == 0


def test_an_output_that_hit_less_than_expected_puts_it_right():
    router = make_router()
    shared = tokens_of(64)
    rows = [np.concatenate((shared, tokens_of(64, seed))) for seed in range(1, 4)]
    for row in rows:
        router.note(0, router.read(row, Namespace()))
    charge = router.charge(0, router.read(rows[0], Namespace()), 1)
    assert charge.num_hit_tokens == 112
    router.learn(charge, make_request(rows[0]), output_of(5, cached=48))
    assert [hits_of(router, row)[0] for row in rows] == [112, 64, 64]
    as_expected = router.charge(0, router.read(rows[1], Namespace()), 1)
    router.learn(as_expected, make_request(rows[1]), output_of(5, cached=64))
    assert [hits_of(router, row)[0] for row in rows] == [112, 112, 64]


def test_an_aborted_request_says_nothing_of_the_cache():
    router = make_router()
    shared = tokens_of(64)
    rows = [np.concatenate((shared, tokens_of(64, seed))) for seed in (1, 2)]
    for row in rows:
        router.note(0, router.read(row, Namespace()))
    charge = router.charge(0, router.read(rows[0], Namespace()), 1)
    router.learn(charge, make_request(rows[0]), output_of(stop_reason="abort"))
    assert [hits_of(router, row)[0] for row in rows] == [112, 112]


def test_a_rank_that_lost_its_cache_is_believed_to_have_nothing():
    router = make_router()
    charge = send(router, tokens_of(100))
    router.forget(0)
    assert hits_of(router, tokens_of(100)) == [0, 0]
    router.learn(charge, make_request(tokens_of(100)), output_of(5))
    assert hits_of(router, tokens_of(100)) == [0, 0], "it was on its way when the cache was lost"


def test_namespaces_are_told_apart():
    router = make_router()
    send(router, tokens_of(100), namespace=Namespace(tenant="a"))
    assert send(router, tokens_of(100)).rank == 1
    assert send(router, tokens_of(100), namespace=Namespace(tenant="a")).rank == 0


def test_no_more_is_believed_than_a_rank_can_hold():
    router = make_router(num_blocks=4)
    send(router, tokens_of(100))
    assert len(router._digests[0]) == 3


@pytest.mark.parametrize(
    "settings", [{"policy": "available_blocks"}, {"enable_prefix_cache": False}]
)
def test_nothing_is_hashed_where_hits_are_not_wanted_or_cannot_be(settings, monkeypatch):
    router = make_router(**settings)
    monkeypatch.setattr(router, "_hasher", None)
    charge = send(router, tokens_of(100))
    router.learn(charge, make_request(tokens_of(100)), output_of(5))
    assert allocate(router, [EMPTY] * 2, tokens_of(100))
    assert hits_of(router, tokens_of(100)) == [0, 0]


def test_a_prompt_is_hashed_once_for_all_ranks_and_samples(monkeypatch):
    router = make_router(num_ranks=4)
    hashed = []
    names = router._hasher.names
    monkeypatch.setattr(
        router._hasher, "names", lambda row, **rest: hashed.append(len(row)) or names(row, **rest)
    )
    row, other = tokens_of(100), tokens_of(100)
    requests = [make_request(row)] * 3 + [make_request(other)]
    tenant = make_request(other, namespace=Namespace(tenant="a"))
    prompts = router.read_all([*requests, tenant])
    router.place([*requests, tenant], prompts, [EMPTY] * 4, None)
    assert hashed == [100] * 3
    assert prompts[0] is prompts[2]
    assert prompts[3].names == prompts[0].names != prompts[4].names
