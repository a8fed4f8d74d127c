"""What holds for a pool holds whatever carries it: in process, over messages, over Ray."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from raykv import Namespace, Request, Sequence
from raykv.errors import RankUnavailableError, RequestError

TOTAL = 9
SIZE = 4


def make_sequence(num_tokens, first=0, **kwargs):
    return Sequence(np.arange(first, first + num_tokens), **kwargs)


def compute(sequence, num_tokens=None):
    """What your worker does: KV of the first tokens is there now."""
    num_tokens = sequence.num_tokens if num_tokens is None else num_tokens
    sequence.kv_state.num_computed_tokens = num_tokens


def ids(sequence):
    return sequence.kv_state.block_ids.tolist()


def publish(pool, num_tokens, first=0, **kwargs):
    """A whole life: admit, compute, give back. Returns the ids it had."""
    sequence = make_sequence(num_tokens, first, **kwargs)
    assert pool.allocate(sequence)
    compute(sequence)
    held = ids(sequence)
    pool.deallocate(sequence)
    return held


def is_blank(sequence):
    return (
        sequence.dp_rank is sequence.single_block_id is None
        and ids(sequence) == []
        and sequence.kv_state.num_computed_tokens == 0
    )


def counters(pool):
    return pool.stats()


def check_mirror(pool, *sequences):
    """The driver's copies say what the ranks hold, as far as a test can look into them."""
    pool.check_integrity()
    for sequence in sequences:
        rank = pool.ranks[sequence.dp_rank]
        if hasattr(rank, "host"):
            theirs = rank.host._kv._rows.sequences[sequence.single_block_id]
            assert theirs.kv_state.block_ids.tolist() == ids(sequence)
            assert theirs.seq_id == sequence.seq_id
        if hasattr(rank, "kv"):
            assert rank.kv._rows.sequences[sequence.single_block_id] is sequence


# -- allocation ---------------------------------------------------------------------------------


def test_a_sequence_gets_a_rank_a_single_block_and_its_blocks(make_pool):
    pool = make_pool()
    sequence = make_sequence(10)
    assert pool.try_allocate(sequence)
    assert (sequence.dp_rank, sequence.single_block_id) == (0, 1)
    assert ids(sequence) == [1, 2, 3]
    assert sequence.kv_state.num_computed_tokens == sequence.kv_state.num_shared_blocks == 0
    assert sequence.kv_state.block_ids.dtype == np.int32
    check_mirror(pool, sequence)
    assert pool.num_used_blocks() == [3]
    assert pool.num_free_blocks() == pool.num_available_blocks() == [TOTAL - 3]
    assert pool.kv_cache_utilization() == pytest.approx(3 / TOTAL)
    assert sequence.slot_ids().tolist() == list(range(4, 14))
    assert sequence.slot_ids().dtype == np.int64
    pool.deallocate(sequence)
    assert is_blank(sequence)
    assert pool.num_free_blocks() == [TOTAL], "nothing was computed, so nothing is cached"
    assert pool.num_blocks_in_prefix_cache() == [0]


def test_slot_ids_follow_blocks_that_are_out_of_order(make_pool):
    pool = make_pool()
    first, second = make_sequence(4), make_sequence(4, 100)
    pool.allocate([first, second])
    pool.deallocate(first)
    second.extend(range(200, 205))
    assert pool.allocate(second)
    blocks = ids(second)
    assert blocks[0] == 2
    assert second.slot_ids().tolist() == [
        blocks[i // SIZE] * SIZE + i % SIZE for i in range(second.num_tokens)
    ]


def test_num_tokens_limits_what_is_covered(make_pool):
    pool = make_pool()
    sequences = [make_sequence(12), make_sequence(12, 100)]
    assert pool.allocate(sequences, [4, 9])
    assert [len(ids(sequence)) for sequence in sequences] == [1, 3]
    assert pool.allocate(sequences[0], 5)
    assert len(ids(sequences[0])) == 2
    assert pool.allocate(sequences[0], 1), "never less than it has"
    assert len(ids(sequences[0])) == 2
    check_mirror(pool, *sequences)


def test_a_sequence_grows_as_it_decodes(make_pool):
    pool = make_pool()
    sequences = [make_sequence(3), make_sequence(6, 100)]
    assert pool.allocate(sequences)
    for token in range(10):
        before = [ids(sequence) for sequence in sequences]
        for sequence in sequences:
            compute(sequence)
            sequence.append(1000 + token)
        assert pool.allocate(sequences)
        for sequence, kept in zip(sequences, before, strict=True):
            assert ids(sequence)[: len(kept)] == kept
            assert len(ids(sequence)) == -(-sequence.num_tokens // SIZE)
    check_mirror(pool, *sequences)
    tokens = sequences[0].token_ids.copy()
    pool.deallocate(sequences)
    again = Sequence(tokens)
    assert pool.allocate(again)
    assert again.kv_state.num_computed_tokens == 12, "decoded tokens travelled to the rank"


def test_a_request_is_its_sequences(make_pool):
    pool = make_pool()
    request = Request([make_sequence(4), make_sequence(8, 100)])
    other = make_sequence(4, 200)
    assert pool.allocate([request, other])
    assert [ids(sequence) for sequence in [*request.sequences, other]] == [[1], [2, 3], [4]]
    assert pool.num_used_blocks() == [4]
    pool.deallocate([other, request])
    assert pool.num_used_blocks() == [0]
    assert all(map(is_blank, [*request.sequences, other]))


def test_the_single_block_released_last_is_handed_out_next(make_pool):
    pool = make_pool()
    a, b, c = (make_sequence(4, 100 * i) for i in range(3))
    for sequence in (a, b, c):
        pool.allocate(sequence)
    assert [s.single_block_id for s in (a, b, c)] == [1, 2, 3]
    pool.deallocate(a)
    pool.deallocate(b)
    later = [make_sequence(4, 1000 + 100 * i) for i in range(3)]
    for sequence in later:
        pool.allocate(sequence)
    assert [s.single_block_id for s in later] == [2, 1, 4]
    check_mirror(pool, c, *later)


def test_without_a_single_block_nothing_is_admitted(make_pool):
    pool = make_pool(num_single_blocks=3)
    sequences = [make_sequence(4, 100 * i) for i in range(3)]
    assert pool.allocate(sequences[:2])
    before = counters(pool)
    assert not pool.allocate(sequences[2])
    assert is_blank(sequences[2])
    assert counters(pool) == before
    pool.deallocate(sequences[0])
    assert pool.allocate(sequences[2])


# -- a full pool --------------------------------------------------------------------------------


def test_what_does_not_fit_is_rolled_back_and_can_be_tried_again(make_pool):
    pool = make_pool()
    publish(pool, 8)
    running = make_sequence(24, 100)
    assert pool.allocate(running)
    blocked = Sequence([*range(8), *range(500, 512)])
    before = counters(pool)
    assert not pool.allocate(blocked)
    assert is_blank(blocked)
    assert counters(pool) == before, "its hit was given back, and nothing was evicted for it"
    pool.deallocate(running)
    assert pool.allocate(blocked)
    assert blocked.kv_state.num_computed_tokens == 8
    check_mirror(pool, blocked)


def test_a_running_sequence_that_cannot_grow_keeps_what_it_has(make_pool):
    pool = make_pool()
    sequence, other = make_sequence(20), make_sequence(16, 100)
    assert pool.allocate([sequence, other])
    kept, row = ids(sequence), sequence.single_block_id
    compute(sequence)
    sequence.append(7)
    assert not pool.allocate(sequence)
    assert (ids(sequence), sequence.single_block_id, sequence.dp_rank) == (kept, row, 0)
    assert sequence.kv_state.num_computed_tokens == 20
    pool.deallocate(other)
    assert pool.allocate(sequence)
    assert ids(sequence)[:-1] == kept
    check_mirror(pool, sequence)


def test_a_list_is_all_or_nothing(make_pool):
    pool = make_pool()
    running = make_sequence(16)
    assert pool.allocate(running)
    kept = ids(running)
    running.append(7)
    newcomers = [make_sequence(8, 100), make_sequence(12, 200)]
    before = counters(pool)
    assert not pool.allocate([running, *newcomers])
    assert counters(pool) == before
    assert ids(running) == kept
    assert all(map(is_blank, newcomers))
    assert pool.allocate([running, newcomers[0]])
    check_mirror(pool, running, newcomers[0])


def test_a_list_is_all_or_nothing_over_ranks(make_pool):
    pool = make_pool(dp_size=2)
    running = make_sequence(4)
    running.dp_rank = 1
    pool.allocate(running)
    kept = ids(running)
    running.extend(range(4))
    newcomers = [make_sequence(8, 100), make_sequence(36, 200), make_sequence(32, 300)]
    for sequence, rank in zip(newcomers, [1, 0, 0], strict=True):
        sequence.dp_rank = rank
    before = counters(pool)
    assert not pool.allocate([running, *newcomers])
    after = counters(pool)
    assert [r.num_free_blocks for r in after.ranks] == [r.num_free_blocks for r in before.ranks]
    assert [r.num_free_single_blocks for r in after.ranks] == [
        r.num_free_single_blocks for r in before.ranks
    ]
    assert ids(running) == kept
    assert all(sequence.single_block_id is None for sequence in newcomers)
    assert [s.dp_rank for s in newcomers] == [1, 0, 0], "what the caller chose outlasts a refusal"
    check_mirror(pool, running)
    assert pool.allocate([running, *newcomers[:2]])
    assert [s.dp_rank for s in (running, *newcomers[:2])] == [1, 1, 0]
    check_mirror(pool, running, *newcomers[:2])


def test_allocation_evicts_what_nobody_uses(make_pool):
    pool = make_pool()
    publish(pool, 16)
    publish(pool, 16, 100)
    assert pool.num_available_blocks() == [TOTAL]
    assert pool.num_free_blocks() == [1]
    assert pool.allocate(make_sequence(12, 200))
    assert pool.num_blocks_in_prefix_cache() == [6], "just enough went"
    again = make_sequence(24, 100)
    assert pool.allocate(again)
    assert again.kv_state.num_computed_tokens == 16, "the younger chain stayed"


def test_what_can_never_fit_is_an_error_and_harms_nobody(make_pool):
    pool = make_pool()
    running = make_sequence(8)
    pool.allocate(running)
    before = counters(pool)
    for bad in (make_sequence(37, 100), make_sequence(0)):
        with pytest.raises(RequestError):
            pool.allocate(bad)
        with pytest.raises(RequestError):
            pool.allocate([make_sequence(4, 300), bad])
        assert is_blank(bad)
    assert counters(pool) == before
    compute(running)
    running.append(1)
    assert pool.allocate(running)
    check_mirror(pool, running)


# -- hits ---------------------------------------------------------------------------------------


def test_a_hit_leaves_at_least_one_token_to_compute(make_pool):
    pool = make_pool()
    assert publish(pool, 12) == [1, 2, 3]
    for num_tokens, num_hit in [(4, 0), (5, 1), (8, 1), (12, 2), (13, 3), (20, 3)]:
        sequence = make_sequence(num_tokens)
        assert pool.allocate(sequence)
        state = sequence.kv_state
        assert (state.num_shared_blocks, state.num_computed_tokens) == (num_hit, SIZE * num_hit)
        assert ids(sequence)[:num_hit] == [1, 2, 3][:num_hit]
        check_mirror(pool, sequence)
        pool.deallocate(sequence)


def test_only_computed_tokens_are_published(make_pool):
    pool = make_pool()
    sequence = make_sequence(16)
    pool.allocate(sequence)
    compute(sequence, 7)
    pool.cache(sequence)
    assert pool.num_blocks_in_prefix_cache() == [1]
    compute(sequence, 15)
    pool.cache(sequence, 8)
    assert pool.num_blocks_in_prefix_cache() == [2]
    other = make_sequence(16)
    pool.allocate(other)
    assert ids(other)[:2] == ids(sequence)[:2], "shared while the first one runs"
    pool.deallocate(sequence)
    assert pool.num_blocks_in_prefix_cache() == [3], "how far it was computed travelled along"
    pool.deallocate_without_cache(other)
    assert pool.num_used_blocks() == [0]


def test_allocate_shared_takes_the_hit_and_nothing_else(make_pool):
    pool = make_pool()
    publish(pool, 8)
    sequence = make_sequence(12)
    pool.allocate_shared(sequence)
    assert ids(sequence) == [1, 2]
    assert sequence.kv_state.num_computed_tokens == 8
    assert sequence.single_block_id is not None
    pool.allocate_shared(sequence)
    assert ids(sequence) == [1, 2]
    assert pool.allocate(sequence)
    assert ids(sequence)[:2] == [1, 2]
    assert len(ids(sequence)) == 3
    check_mirror(pool, sequence)


def test_hit_statistics_count_an_admission_once(make_pool):
    pool = make_pool(num_single_blocks=2)
    publish(pool, 8)
    sequence, other = make_sequence(12), make_sequence(4, 100)
    pool.allocate(other)
    for _ in range(3):
        assert not pool.allocate(sequence)
    pool.deallocate(other)
    for _ in range(3):
        assert pool.allocate(sequence)
        pool.deallocate_without_cache(sequence)
    total = pool.stats().total
    assert total.num_admissions_total == 3
    assert total.prefix_cache_queries_total == 8 + 4 + 12
    assert total.prefix_cache_hits_total == 8


def test_namespaces_never_match_each_other(make_pool):
    pool = make_pool()
    spaces = [
        Namespace(),
        Namespace(tenant="x"),
        Namespace(lora="x"),
        Namespace(weights_version=1),
        Namespace(multimodal=((1, b"cat"),)),
    ]
    for space in spaces:
        publish(pool, 5, namespace=space)
    assert pool.num_blocks_in_prefix_cache() == [len(spaces)]
    hits = []
    for space in spaces:
        sequence = make_sequence(5, namespace=space)
        pool.allocate(sequence)
        hits.append(ids(sequence)[0])
        assert sequence.kv_state.num_shared_blocks == 1
        pool.deallocate(sequence)
    assert len(set(hits)) == len(spaces)
    stranger = make_sequence(5, namespace=Namespace(multimodal=((1, b"dog"),)))
    pool.allocate(stranger)
    assert stranger.kv_state.num_shared_blocks == 0


def test_after_a_reset_nothing_older_is_ever_matched(make_pool):
    pool = make_pool()
    publish(pool, 4, 300)
    running = make_sequence(8)
    pool.allocate(running)
    compute(running)
    pool.cache(running)
    kept = ids(running)
    assert pool.reset_prefix_cache() == [3]
    assert ids(running) == kept
    running.extend(range(8, 16))
    assert pool.allocate(running)
    compute(running)
    pool.deallocate(running)
    assert pool.num_blocks_in_prefix_cache() == [0]
    fresh = make_sequence(9)
    pool.allocate(fresh)
    assert fresh.kv_state.num_shared_blocks == 0
    compute(fresh)
    pool.deallocate(fresh)
    again = make_sequence(9)
    pool.allocate(again)
    assert again.kv_state.num_shared_blocks == 2


def test_without_a_prefix_cache_nothing_is_shared(make_pool):
    pool = make_pool(enable_prefix_cache=False)
    publish(pool, 12)
    sequence = make_sequence(12)
    assert pool.allocate(sequence)
    assert sequence.kv_state.num_shared_blocks == 0
    assert pool.num_blocks_in_prefix_cache() == [0]


# -- ranks --------------------------------------------------------------------------------------


def test_the_rank_with_most_blocks_to_give_is_chosen_and_kept(make_pool):
    pool = make_pool(dp_size=2)
    first, second, third = make_sequence(8), make_sequence(4, 100), make_sequence(4, 200)
    assert pool.select_rank(first) == 0, "the lowest number wins a tie"
    for sequence in (first, second, third):
        assert pool.allocate(sequence)
    assert [s.dp_rank for s in (first, second, third)] == [0, 1, 1]
    assert pool.num_used_blocks() == [2, 2]
    assert pool.kv_cache_utilization() == pytest.approx(2 / TOTAL)
    second.extend(range(20))
    assert pool.select_rank(second) == 1, "kept once set"
    assert pool.allocate(second)
    pool.deallocate(first)
    assert first.dp_rank is None
    assert pool.select_rank(first) == 0
    check_mirror(pool, second, third)
    spread = [make_sequence(4, 1000 + 100 * i) for i in range(4)]
    assert pool.allocate(spread)
    assert [s.dp_rank for s in spread] == [0, 0, 0, 0]


def test_a_list_is_spread_by_what_it_takes_itself(make_pool):
    pool = make_pool(dp_size=2)
    sequences = [make_sequence(n, 100 * i) for i, n in enumerate([12, 8, 4, 4])]
    assert pool.allocate(sequences)
    assert [s.dp_rank for s in sequences] == [0, 1, 1, 0]
    check_mirror(pool, *sequences)
    pool.deallocate(sequences)
    assert pool.num_used_blocks() == [0, 0]


@pytest.mark.parametrize(("policy", "chosen"), [("available_blocks", 0), ("free_blocks", 1)])
def test_idle_cache_counts_as_room_unless_the_policy_is_the_seeds(make_pool, policy, chosen):
    pool = make_pool(dp_size=2, routing={"policy": policy})
    cached = make_sequence(24)
    cached.dp_rank = 0
    pool.allocate(cached)
    compute(cached)
    pool.deallocate(cached)
    running = make_sequence(12, 100)
    running.dp_rank = 1
    pool.allocate(running)
    assert pool.num_free_blocks() == [3, 6]
    assert pool.num_available_blocks() == [9, 6]
    sequence = make_sequence(8, 200)
    assert pool.select_rank(sequence) == chosen
    pool.allocate(sequence)
    assert sequence.dp_rank == chosen


def test_cache_aware_routing_returns_to_the_prefix_until_the_rank_is_full(make_pool):
    pool = make_pool(dp_size=2, routing={"policy": "cache_aware"})
    publish(pool, 4, 300)
    publish(pool, 20)
    first, second, third = (make_sequence(21) for _ in range(3))
    assert [pool.allocate(s) for s in (first, second)] == [True, True]
    assert [s.dp_rank for s in (first, second)] == [0, 0]
    assert second.kv_state.num_computed_tokens == 20
    other = make_sequence(12, 100)
    other.dp_rank = 0
    pool.deallocate([second])
    assert pool.allocate(other)
    assert pool.allocate(third), "the rank with its prefix has no block left"
    assert (third.dp_rank, third.kv_state.num_computed_tokens) == (1, 0)
    check_mirror(pool, first, other, third)


def test_a_refused_allocation_attracts_nobody(make_pool):
    pool = make_pool(dp_size=2, routing={"policy": "cache_aware"})
    small, large = make_sequence(4, 100), make_sequence(8, 200)
    small.dp_rank, large.dp_rank = 0, 1
    assert pool.allocate([small, large])
    sequence = make_sequence(36)
    assert pool.select_rank(sequence) == 0
    assert not pool.allocate(sequence)
    pool.deallocate(large)
    assert pool.select_rank(sequence) == 1
    assert pool.allocate(sequence)
    check_mirror(pool, small, sequence)


# -- ends and errors ----------------------------------------------------------------------------


def test_a_sequence_can_be_given_up_in_any_state(make_pool):
    pool = make_pool()
    publish(pool, 8)
    new, shared, allocated, computed = (make_sequence(9) for _ in range(4))
    pool.allocate_shared(shared)
    pool.allocate(allocated)
    pool.allocate(computed)
    compute(computed)
    for give_up in (pool.deallocate, pool.deallocate_without_cache):
        for sequence in (new, shared, allocated, computed):
            give_up(sequence)
            assert is_blank(sequence)
    assert pool.num_used_blocks() == [0]
    assert pool.num_available_blocks() == [TOTAL]
    assert pool.stats().total.num_free_single_blocks == 8
    preset = make_sequence(4)
    preset.dp_rank = 0
    pool.deallocate(preset)
    assert is_blank(preset)


def test_a_preset_rank_outlasts_a_refusal(make_pool):
    pool = make_pool(dp_size=2)
    running, sequence = make_sequence(36), make_sequence(8, 100)
    running.dp_rank = sequence.dp_rank = 1
    assert pool.allocate(running)
    assert not pool.allocate(sequence)
    assert sequence.dp_rank == 1


def test_a_foreign_sequence_is_refused(make_pool):
    pool, other = make_pool(), make_pool(dp_size=2)
    theirs = make_sequence(8, seq_id="s")
    ours = make_sequence(4, 100, seq_id="s")
    beyond = make_sequence(8, 200, seq_id="t")
    beyond.dp_rank = 1
    assert other.allocate([theirs, beyond])
    assert pool.allocate(ours)
    before = counters(pool), counters(other)
    calls = [pool.allocate, pool.deallocate, pool.deallocate_without_cache, pool.cache]
    for foreign in (theirs, beyond):
        kept = ids(foreign)
        compute(foreign)
        for call in calls:
            with pytest.raises(RequestError, match="another pool"):
                call(foreign)
        assert ids(foreign) == kept
    assert (counters(pool), counters(other)) == before
    check_mirror(other, theirs, beyond)
    check_mirror(pool, ours)
    other.deallocate([theirs, beyond])
    pool.deallocate(ours)


def test_a_sequence_listed_twice_is_refused(make_pool):
    pool = make_pool()
    sequence = make_sequence(4)
    with pytest.raises(ValueError, match="twice"):
        pool.allocate([sequence, sequence])
    assert is_blank(sequence)
    assert pool.num_used_blocks() == [0]
    with pytest.raises(TypeError):
        pool.allocate(["a sequence"])


def test_an_id_in_use_is_refused(make_pool, kind):
    if kind in {"local", "hierarchy"}:
        pytest.skip("sequences in this process are told apart without their ids")
    pool = make_pool()
    sequence, twin = make_sequence(8, seq_id="s"), make_sequence(4, 100, seq_id="s")
    with pytest.raises(RequestError, match="in use"):
        pool.allocate([sequence, twin])
    assert is_blank(sequence)
    assert pool.allocate(sequence)
    for refused in (pool.allocate, pool.allocate_shared):
        with pytest.raises(RequestError, match="in use"):
            refused(twin)
    assert is_blank(twin)
    compute(sequence)
    sequence.append(1)
    assert pool.allocate(sequence)
    check_mirror(pool, sequence)
    pool.deallocate(sequence)
    assert pool.allocate(twin)


def test_a_failed_call_leaves_no_copy_out_of_date(make_pool):
    pool = make_pool(dp_size=2)
    a, b, c = (make_sequence(4, 100 * i) for i in range(3))
    for sequence, rank in ((a, 0), (b, 0), (c, 1)):
        sequence.dp_rank = rank
        assert pool.allocate(sequence)
    stranger = make_sequence(4, 900)
    stranger.dp_rank, stranger.single_block_id = 0, 5
    with pytest.raises(RequestError):
        pool.deallocate([stranger, a, c])
    assert is_blank(c), "the other rank's part was done, and its answer read"
    check_mirror(pool, a, b)
    pool.deallocate([a, b])
    assert pool.num_used_blocks() == [0, 0]


def test_the_same_as_coroutines(make_pool):
    pool = make_pool()

    async def use():
        sequence = make_sequence(8)
        assert await pool.aio.allocate(sequence)
        compute(sequence)
        await pool.aio.deallocate(sequence)
        return await pool.aio.num_blocks_in_prefix_cache()

    assert asyncio.run(use()) == [2]


def test_thread_safe_managers_behave_the_same(make_pool):
    pool = make_pool(disagg_pd=True)
    assert publish(pool, 12) == [1, 2, 3]
    sequence = make_sequence(12)
    assert pool.allocate(sequence)
    assert sequence.kv_state.num_shared_blocks == 2
    check_mirror(pool, sequence)


def test_a_closed_pool_says_so(make_pool, kind):
    pool = make_pool()
    sequence = make_sequence(4)
    pool.allocate(sequence)
    pool.check_integrity()
    pool.close()
    pool.close()
    with pytest.raises(RankUnavailableError, match="closed"):
        pool.allocate(sequence)
    pool.deallocate(sequence)  # there is nothing left to give back: counted, and reset
    assert pool.num_lost_sequences == 1
    assert sequence.dp_rank is sequence.single_block_id is None
    with pytest.raises(RankUnavailableError, match="closed"):
        pool.stats()
    pool.check_integrity = lambda: None  # the fixture's last look
