"""RankKV directly: what a sequence gets, keeps and gives back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raykv.config import PoolConfig
from raykv.core import (
    DEFAULT,
    BlockManagerImpl,
    ConcurrentBlockManagerImpl,
    Namespace,
    Request,
    Sequence,
    SingleBlockManager,
)
from raykv.errors import IntegrityError, RequestError
from raykv.memory import KVSpec
from raykv.rank import RankKV

SIZE = 4


@pytest.fixture(params=[False, True], ids=["impl", "concurrent"])
def make_rank(request):
    """Makes ranks whose books are checked when the test is over."""
    made = []

    def make(num_blocks=20, block_size=SIZE, dp_rank=0, **config):
        config = {"disagg_pd": request.param, **config}
        made.append(
            RankKV(PoolConfig(num_blocks=num_blocks, block_size=block_size, **config), dp_rank)
        )
        return made[-1]

    yield make
    for rank in made:
        rank.check_integrity()


def tokens(length, seed=0):
    return np.random.default_rng(seed).integers(0, 100, length).astype(np.int32)


def computed(sequence, count=None):
    sequence.kv_state.num_computed_tokens = sequence.num_tokens if count is None else count
    return sequence


def publish(kv, length, seed):
    """A sequence's whole life; returns its ids, the full ones of which stay cached."""
    sequence = Sequence(tokens(length, seed))
    assert kv.allocate(sequence)
    ids = sequence.kv_state.block_ids.tolist()
    kv.deallocate(computed(sequence))
    return ids


def hit(kv, length, seed, namespace=DEFAULT):
    """Tokens that an admission would share now. Refreshes their recency."""
    sequence = Sequence(tokens(length, seed), namespace=namespace)
    kv.allocate_shared(sequence)
    count = sequence.kv_state.num_computed_tokens
    kv.deallocate_without_cache(sequence)
    return count


def books(kv, *sequences):
    """Everything that a refused call must leave as it was."""
    return (
        kv.rank_stats(),
        kv.tables.table.tolist(),
        [
            (
                s.dp_rank,
                s.single_block_id,
                s.kv_state.block_ids.tolist(),
                s.kv_state.num_shared_blocks,
                s.kv_state.num_computed_tokens,
                s.counted,
            )
            for s in sequences
        ],
        kv.block_manager._ledger.counts.tolist(),
        kv.single_block_manager._ledger._stack[: kv.single_block_manager.num_free_blocks].tolist(),
        [(run.index, run.length) for run in kv.block_manager._cache._order._queue],
        list(kv.block_manager._cache._order._stamps),
    )


def assert_drained(kv):
    kv.check_integrity()
    stats = kv.rank_stats()
    assert stats.num_used_blocks == stats.num_pending_blocks == 0
    assert stats.num_available_blocks == stats.num_total_blocks
    assert kv.single_block_manager.num_used_blocks == 0
    assert not kv.tables.table.any()


# -- construction ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("disagg_pd", "kind"), [(False, BlockManagerImpl), (True, ConcurrentBlockManagerImpl)]
)
def test_construction_chooses_the_managers_as_the_seed_does(disagg_pd, kind):
    kv = RankKV(PoolConfig(num_blocks=9, block_size=2, disagg_pd=disagg_pd, max_num_seqs=5), 3)
    assert type(kv.block_manager) is kind
    assert kv.block_manager.num_total_blocks == 8
    assert kv.block_manager.block_size == kv.block_size == 2
    assert type(kv.single_block_manager) is SingleBlockManager
    assert kv.single_block_manager.num_total_blocks == 5
    assert kv.dp_rank == 3
    assert kv.linear_state is None
    assert kv.tables.table.shape == (6, 8)


def test_buffers_are_made_from_the_configuration_or_a_spec():
    assert RankKV(PoolConfig(num_blocks=9)).buffers is None
    memory = {"device": "cpu", "num_layers": 3, "num_kv_heads": 2, "head_dim": 5}
    kv = RankKV(PoolConfig(num_blocks=9, block_size=2, memory=memory))
    assert kv.buffers.torch_view(2, "v").shape == (9, 2, 2, 5)
    spec = KVSpec.uniform(1, 1, 7, 2, "float16")
    kv = RankKV(PoolConfig(num_blocks=9, block_size=2, memory=memory), spec=spec)
    assert kv.buffers.torch_view(0, "k").shape == (9, 2, 1, 7)


def test_equal_seeds_name_prefixes_alike():
    names = [
        RankKV(PoolConfig(num_blocks=9, block_size=2, hash_seed=seed)).block_manager.prefix_hashes(
            [1, 2, 3, 4]
        )
        for seed in (b"a" * 16, b"a" * 16, b"b" * 16)
    ]
    assert names[0] == names[1] != names[2]


def test_the_table_is_as_wide_as_the_longest_sequence():
    kv = RankKV(PoolConfig(num_blocks=100, block_size=4, max_model_len=18))
    assert kv.tables.table.shape[1] == 5


# -- allocate -------------------------------------------------------------------------------------


def test_a_new_sequence_gets_rank_row_hit_and_missing_blocks(make_rank):
    kv = make_rank(dp_rank=2)
    cached = publish(kv, 13, seed=1)
    sequence = Sequence(np.concatenate([tokens(13, 1)[:9], tokens(6, 2)]))
    assert kv.allocate(sequence)
    state = sequence.kv_state
    assert sequence.dp_rank == 2
    assert sequence.single_block_id == 1
    assert state.block_ids.tolist()[:2] == cached[:2]
    assert state.num_blocks == 4
    assert state.num_shared_blocks == 2
    assert state.num_computed_tokens == 8
    assert state.block_size == SIZE
    assert kv.tables.table[1].tolist()[:5] == [*state.block_ids.tolist(), 0]
    assert kv.num_used_blocks() == [4]
    kv.deallocate(sequence)
    assert_drained(kv)


def test_fresh_ids_ascend_and_are_int32(make_rank):
    kv = make_rank()
    a, b = Sequence(tokens(9)), Sequence(tokens(9, 1))
    assert kv.allocate([a, b])
    assert a.kv_state.block_ids.tolist() == [1, 2, 3]
    assert b.kv_state.block_ids.tolist() == [4, 5, 6]
    assert a.kv_state.block_ids.dtype == np.int32
    assert not a.kv_state.block_ids.flags.writeable


@pytest.mark.parametrize(
    ("length", "want"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (16, 12)]
)
def test_a_whole_prompt_hit_leaves_a_token_to_compute(make_rank, length, want):
    kv = make_rank()
    publish(kv, 16, seed=1)
    sequence = Sequence(tokens(16, 1)[:length])
    assert kv.allocate(sequence)
    assert sequence.kv_state.num_computed_tokens == want
    assert sequence.kv_state.num_shared_blocks == want // SIZE
    kv.deallocate(sequence)
    assert_drained(kv)


def test_blocks_for_fewer_and_more_tokens_than_known(make_rank):
    kv = make_rank()
    publish(kv, 16, seed=1)
    few, more = Sequence(tokens(16, 1)), Sequence(tokens(5, 2))
    assert kv.allocate([few, more], [6, 17])
    assert few.kv_state.num_blocks == 2
    assert few.kv_state.num_shared_blocks == 2  # two of its three hits fit in the blocks asked for
    assert more.kv_state.num_blocks == 5
    assert kv.allocate([few, more], 9)
    assert [few.kv_state.num_blocks, more.kv_state.num_blocks] == [3, 5], "nothing shrinks"
    kv.deallocate_without_cache([few, more])


def test_growth_adds_blocks_only_behind_a_full_one(make_rank):
    kv = make_rank()
    sequence = Sequence(tokens(7))
    kv.allocate(sequence)
    seen = []
    for token in range(6):
        sequence.append(token)
        assert kv.allocate(sequence)
        seen.append(sequence.kv_state.num_blocks)
        assert kv.tables.ids(1).tolist() == sequence.kv_state.block_ids.tolist()
    assert seen == [2, 3, 3, 3, 3, 4]


def test_running_and_new_sequences_in_one_call(make_rank):
    kv = make_rank()
    publish(kv, 9, seed=3)
    running = [Sequence(tokens(4, seed)) for seed in (1, 2)]
    kv.allocate(running)
    for sequence in running:
        sequence.extend([1, 2, 3, 4, 5])
    new = Sequence(tokens(10, 3))
    assert kv.allocate([running[0], new, running[1]])
    assert [s.kv_state.num_blocks for s in (*running, new)] == [3, 3, 3]
    assert new.kv_state.num_shared_blocks == 2
    ids = np.concatenate([s.kv_state.block_ids for s in (*running, new)])
    assert len(set(ids.tolist())) == 9
    kv.deallocate(Request([*running, new]))
    assert_drained(kv)


def test_an_empty_list_is_fine(make_rank):
    kv = make_rank()
    assert kv.allocate([])
    kv.deallocate([])
    kv.deallocate_without_cache(Request([]))


def test_slot_ids_follow_the_seeds_formula(make_rank):
    kv = make_rank()
    other, sequence = Sequence(tokens(5, 9)), Sequence(tokens(11))
    kv.allocate([other, sequence])
    ids = sequence.kv_state.block_ids
    wanted = [int(ids[i // SIZE]) * SIZE + i % SIZE for i in range(11)]
    assert sequence.slot_ids().tolist() == wanted
    assert sequence.slot_ids(3, 9).tolist() == wanted[3:9]
    with pytest.raises(ValueError, match="allocate first"):
        sequence.slot_ids(0, 13)


def test_the_callers_array_is_its_own(make_rank):
    kv = make_rank()
    array = tokens(9, 1)
    sequence = Sequence(array)
    kv.allocate(sequence)
    array[:] = 0
    kv.deallocate(computed(sequence))
    array[:] = 1
    assert hit(kv, 9, 1) == 8


# -- failure --------------------------------------------------------------------------------------


def test_a_shortage_leaves_everything_as_it_was(make_rank):
    kv = make_rank(num_blocks=10)
    old, young = publish(kv, 9, seed=1), publish(kv, 9, seed=2)
    running = Sequence(tokens(8, 3))
    kv.allocate(running)
    running.extend([1, 2])
    new, big = Sequence(tokens(13, 1)), Sequence(tokens(30, 4))
    before = books(kv, running, new, big)
    for attempt in ([big], [new, big], [running, new, big], [big, running]):
        assert kv.allocate(attempt) is False
        assert books(kv, running, new, big) == before
    # Failed retries hit seed 1's blocks each time, and yet they are the first to go.
    taken = Sequence(tokens(16, 5))
    assert kv.allocate(taken)
    assert old[1] in taken.kv_state.block_ids
    assert old[0] not in taken.kv_state.block_ids
    assert hit(kv, 9, 2) == 8
    assert kv.block_manager.num_blocks_in_prefix_cache == 3
    assert young[0] not in taken.kv_state.block_ids
    kv.deallocate_without_cache(taken)
    assert kv.allocate([running, new]), "it can be tried again"


def test_a_failed_sequence_may_go_to_another_rank(make_rank):
    first, second = make_rank(num_blocks=3), make_rank(num_blocks=9, dp_rank=1)
    filler, sequence = Sequence(tokens(8)), Sequence(tokens(8, 1))
    assert first.allocate(filler)
    assert not first.allocate(sequence)
    assert sequence.dp_rank is None
    assert sequence.single_block_id is None
    assert second.allocate(sequence)
    assert sequence.dp_rank == 1


def test_a_shortage_of_rows_fails_the_list(make_rank):
    kv = make_rank(max_num_seqs=2)
    sequences = [Sequence(tokens(4, seed)) for seed in range(3)]
    before = books(kv, *sequences)
    assert not kv.allocate(sequences)
    assert books(kv, *sequences) == before
    assert kv.allocate(sequences[:2])
    assert not kv.allocate(sequences[2])
    kv.allocate_shared(sequences[2])
    assert sequences[2].single_block_id is None
    sequences[0].extend([1] * 8)
    assert kv.allocate(sequences[:2]), "running ones have their rows"


def test_hits_of_the_whole_list_are_held_before_anything_is_evicted(make_rank):
    kv = make_rank(num_blocks=6)
    publish(kv, 9, seed=1)
    publish(kv, 5, seed=2)
    # 2 free, 3 evictable. The first of the list could take the second's hit.
    big, hits = Sequence(tokens(12, 3)), Sequence(tokens(9, 1))
    assert not kv.allocate([big, hits])
    assert kv.rank_stats().num_evictable_blocks == 3
    small = Sequence(tokens(8, 3))
    assert kv.allocate([small, hits])
    assert hits.kv_state.num_shared_blocks == 2
    assert hit(kv, 5, 2) == 0, "the only one without use was evicted"


@pytest.mark.parametrize(("length", "target"), [(0, None), (77, None), (5, 77), (5, 0), (5, -3)])
def test_impossible_sizes_are_refused_with_their_numbers(make_rank, length, target):
    kv = make_rank()  # 19 blocks of 4: 76 tokens
    fine, bad = Sequence(tokens(4)), Sequence(tokens(length, 1), seq_id="the bad one")
    before = books(kv, fine, bad)
    with pytest.raises(RequestError) as caught:
        kv.allocate([fine, bad], None if target is None else [4, target])
    for word in ("the bad one", str(target if target is not None else length), "1 to 76", "19"):
        assert word in str(caught.value)
    assert books(kv, fine, bad) == before
    largest = Sequence(tokens(76))
    assert kv.allocate(largest)


def test_max_model_len_bounds_a_sequence(make_rank):
    kv = make_rank(max_model_len=10)
    with pytest.raises(RequestError, match="max_model_len 10"):
        kv.allocate(Sequence(tokens(11)))
    assert kv.allocate(Sequence(tokens(10)))


def test_foreign_sequences_are_refused_and_untouched(make_rank):
    here, there = make_rank(max_num_seqs=2), make_rank(max_num_seqs=9)
    elsewhere = make_rank(dp_rank=1)
    fillers = [Sequence(tokens(3, seed)) for seed in range(6)]
    for kv in (there, elsewhere):
        sequence = Sequence(tokens(6, 7))
        kv.allocate(fillers if kv is there else [])
        kv.allocate(sequence)
        before = books(kv, sequence), books(here, sequence)
        for use in (
            here.allocate, here.allocate_shared, here.cache, here.deallocate,
            here.deallocate_without_cache, lambda s: here.shrink(s, 1),
        ):  # fmt: skip
            with pytest.raises(RequestError, match="belongs to another pool or rank"):
                use(sequence)
        assert (books(kv, sequence), books(here, sequence)) == before
        kv.deallocate(sequence)


def test_a_sequence_listed_twice_is_refused(make_rank):
    kv = make_rank()
    sequence = Sequence(tokens(5))
    with pytest.raises(ValueError, match="twice"):
        kv.allocate([sequence, sequence])
    assert_drained(kv)


def test_one_token_count_per_sequence(make_rank):
    kv = make_rank()
    with pytest.raises(ValueError, match="1 token counts for 2"):
        kv.allocate([Sequence(tokens(5)), Sequence(tokens(5))], [4])
    assert_drained(kv)


# -- rows -----------------------------------------------------------------------------------------


def test_a_row_stays_for_life_and_the_last_one_released_is_next(make_rank):
    kv = make_rank()
    a, b, c, d = (Sequence(tokens(3, seed)) for seed in range(4))
    kv.allocate([a, b, c])
    assert [s.single_block_id for s in (a, b, c)] == [1, 2, 3]
    a.extend([1] * 10)
    kv.allocate(a)
    assert a.single_block_id == 1
    kv.deallocate([a, b])
    assert a.single_block_id is None
    kv.allocate(d)
    assert d.single_block_id == 2
    kv.allocate(a)
    assert a.single_block_id == 1
    kv.deallocate_without_cache([a, c, d])
    assert_drained(kv)


def test_freed_rows_and_blocks_carry_nothing_over(make_rank):
    kv = make_rank(enable_prefix_cache=False)
    first = Sequence(tokens(20))
    kv.allocate(computed(first))
    kv.deallocate(first)
    second = Sequence(tokens(2, 1))
    kv.allocate(second)
    assert kv.tables.table[second.single_block_id].tolist()[1:] == [0] * 18
    assert second.kv_state.num_computed_tokens == 0


# -- allocate_shared ------------------------------------------------------------------------------


def test_allocate_shared_gives_the_prefix_and_a_row_only(make_rank):
    kv = make_rank()
    cached = publish(kv, 13, seed=1)
    sequence = Sequence(tokens(13, 1))
    kv.allocate_shared(sequence)
    assert sequence.kv_state.block_ids.tolist() == cached[:3]
    assert sequence.kv_state.num_computed_tokens == 12
    assert sequence.single_block_id == 1
    publish(kv, 30, seed=2)
    kv.allocate_shared(sequence)
    assert sequence.kv_state.num_blocks == 3
    assert kv.allocate(sequence)
    assert sequence.kv_state.num_blocks == 4
    assert sequence.kv_state.num_shared_blocks == 3
    kv.deallocate(sequence)
    assert_drained(kv)


def test_allocate_shared_of_nothing_known_gives_a_row(make_rank):
    kv = make_rank()
    for sequence in (Sequence(tokens(9)), Sequence([])):
        kv.allocate_shared(sequence)
        assert sequence.kv_state.num_blocks == 0
        assert sequence.single_block_id is not None
    kv.check_integrity()
    publish(kv, 9, seed=5)
    late = Sequence(tokens(9, 5))
    kv.deallocate_without_cache(late)  # holds nothing: a no-op
    assert kv.num_used_blocks() == [0]


# -- cache and deallocate -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_computed", "num_tokens", "want"),
    [
        (0, None, 0),
        (3, None, 0),
        (4, None, 1),
        (11, None, 2),
        (12, None, 3),
        (12, 7, 1),
        (12, 8, 2),
        (7, 12, 1),
        (12, 999, 3),
        (12, 0, 0),
        (12, -5, 0),
    ],
)
def test_cache_clamps_to_computed_allocated_and_asked(make_rank, num_computed, num_tokens, want):
    kv = make_rank()
    sequence = Sequence(tokens(14, 1))
    kv.allocate(sequence)
    computed(sequence, num_computed)
    kv.cache(sequence, num_tokens)
    assert kv.num_blocks_in_prefix_cache() == [want]
    assert hit(kv, 14, 1) == want * SIZE
    kv.cache(sequence, num_tokens)
    assert kv.num_blocks_in_prefix_cache() == [want]
    kv.deallocate_without_cache(sequence)
    assert_drained(kv)


@pytest.mark.parametrize("num_computed", [-1, 15, 10**6])
def test_computed_tokens_that_do_not_exist_are_refused_and_nothing_is_kept(make_rank, num_computed):
    kv = make_rank()
    sequence = Sequence(tokens(14, 1))
    kv.allocate(sequence)
    computed(sequence, num_computed)
    with pytest.raises(RequestError, match=f"claims {num_computed} computed tokens"):
        kv.cache(sequence)
    with pytest.raises(RequestError, match="computed tokens"):
        kv.deallocate(sequence)
    assert kv.num_blocks_in_prefix_cache() == [0]
    assert_drained(kv)


@pytest.mark.parametrize("method", ["allocate", "allocate_shared"])
def test_a_failing_lookup_leaves_nothing_behind(make_rank, monkeypatch, method):
    kv = make_rank()
    sequence = Sequence(tokens(14, 1))
    sequence.namespace = "no namespace"
    with pytest.raises(AttributeError):
        getattr(kv, method)(sequence)
    assert_drained(kv)


def test_reset_gives_everything_back(make_rank):
    kv = make_rank()
    sequence = Sequence(tokens(14, 1))
    kv.allocate(sequence)
    kv.cache(computed(sequence))
    sequence.reset()
    assert sequence.num_tokens == 14
    assert sequence.single_block_id is None
    assert kv.num_blocks_in_prefix_cache() == [3]
    assert_drained(kv)


def test_cache_clamps_to_allocated_blocks(make_rank):
    kv = make_rank()
    sequence = Sequence(tokens(14, 1))
    kv.allocate(sequence, 6)
    kv.cache(computed(sequence))
    assert kv.num_blocks_in_prefix_cache() == [2]
    kv.cache(Sequence(tokens(9)))  # holds nothing
    kv.deallocate(sequence)
    assert_drained(kv)


def test_deallocate_publishes_what_is_computed_then_releases(make_rank):
    kv = make_rank()
    full, half, none = (Sequence(tokens(13, seed)) for seed in (1, 2, 3))
    kv.allocate([full, half, none])
    computed(full)
    computed(half, 9)
    kv.deallocate([full, half, none])
    assert [hit(kv, 13, seed) for seed in (1, 2, 3)] == [12, 8, 0]
    for sequence in (full, half, none):
        assert sequence.dp_rank is sequence.single_block_id is None
        assert sequence.kv_state.num_blocks == sequence.kv_state.num_computed_tokens == 0
        assert sequence.num_tokens == 13
    kv.deallocate([full, half])
    assert_drained(kv)


def test_deallocate_without_cache_publishes_nothing(make_rank):
    kv = make_rank()
    sequence = Sequence(tokens(13, 1))
    kv.allocate(sequence)
    kv.deallocate_without_cache(computed(sequence))
    assert hit(kv, 13, 1) == 0
    assert_drained(kv)


def test_lru_is_by_release_deepest_first(make_rank):
    kv = make_rank(num_blocks=8)
    first, second = publish(kv, 13, seed=1), publish(kv, 13, seed=2)
    assert hit(kv, 13, 1) == 12  # refreshed: 2 is now the oldest
    sequence = Sequence(tokens(12, 3))
    kv.allocate(sequence)
    fresh = sequence.kv_state.block_ids.tolist()
    assert fresh[:2] == [second[2], second[1]]
    assert hit(kv, 13, 1) == 12
    assert hit(kv, 13, 2) == 4
    assert not set(fresh) & set(first[:3])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_sharers_release_in_any_order(make_rank, order):
    kv = make_rank()
    publish(kv, 9, seed=1)
    sharers = [Sequence(np.append(tokens(8, 1), [seed, seed])) for seed in range(3)]
    kv.allocate(sharers)
    assert kv.num_used_blocks() == [2 + 3]
    for count, index in enumerate(order):
        kv.deallocate(computed(sharers[index]))
        kv.check_integrity()
        assert kv.num_used_blocks() == [0 if count == 2 else 2 + 2 - count]
    assert_drained(kv)


def test_equal_prompts_side_by_side_are_cached_once(make_rank):
    kv = make_rank()
    pair = [Sequence(tokens(13, 1)) for _ in range(2)]
    kv.allocate(pair)
    assert not set(pair[0].kv_state.block_ids.tolist()) & set(pair[1].kv_state.block_ids.tolist())
    pair[1].extend([5] * 7)
    kv.allocate(pair[1])
    kv.deallocate(computed(pair[0]))
    kv.deallocate(computed(pair[1]))
    assert kv.num_blocks_in_prefix_cache() == [5]
    assert_drained(kv)


def test_namespaces_do_not_share(make_rank):
    kv = make_rank(num_blocks=60)
    spaces = [
        DEFAULT,
        Namespace(tenant="x"),
        Namespace(lora="x"),
        Namespace(weights_version=1),
        Namespace(multimodal=((5, "cat"),)),
        Namespace(multimodal=((5, "dog"),)),
    ]
    for number, namespace in enumerate(spaces):
        sequence = Sequence(tokens(13, 1), namespace=namespace)
        kv.allocate(sequence)
        # An image that begins in the second block leaves the first one to everybody.
        assert sequence.kv_state.num_shared_blocks == (1 if number >= 4 else 0)
        kv.deallocate(computed(sequence))
        assert hit(kv, 13, 1, namespace) == 12
    assert_drained(kv)


# -- reset ----------------------------------------------------------------------------------------


def test_reset_forgets_all_and_sequences_in_flight_publish_nothing_from_before(make_rank):
    kv = make_rank()
    publish(kv, 13, seed=1)
    running = Sequence(tokens(9, 2))
    kv.allocate(running)
    kv.cache(computed(running))
    assert kv.reset_prefix_cache() == [5]
    assert hit(kv, 13, 1) == hit(kv, 9, 2) == 0
    running.extend(tokens(12, 4))
    assert kv.allocate(running)
    kv.cache(computed(running))
    assert kv.num_blocks_in_prefix_cache() == [0]
    kv.deallocate(running)
    assert_drained(kv)
    assert kv.num_blocks_in_prefix_cache() == [0]
    publish(kv, 13, seed=1)
    assert hit(kv, 13, 1) == 12, "what is computed afterwards is found"


# -- shrink ---------------------------------------------------------------------------------------


def test_shrink_takes_growth_back(make_rank):
    kv = make_rank()
    sequence = Sequence(tokens(8, 1))
    kv.allocate(computed(sequence))
    before = books(kv, sequence)
    sequence.extend([1] * 10)
    assert kv.allocate(sequence)
    assert sequence.kv_state.num_blocks == 5
    kv.shrink(sequence, 2)
    assert books(kv, sequence) == before
    kv.shrink(sequence, 3)
    kv.shrink(sequence, 2)
    assert books(kv, sequence) == before
    kv.shrink(Sequence([1]), 0)


def test_what_was_cut_off_counts_as_computed_no_more(make_rank):
    kv = make_rank()
    publish(kv, 13, seed=1)
    sequence = Sequence(tokens(20, 1)[:13])
    kv.allocate(sequence)
    computed(sequence)
    kv.shrink(sequence, 1)
    assert sequence.kv_state.num_computed_tokens == 4
    assert sequence.kv_state.num_shared_blocks == 1
    kv.reset_prefix_cache()
    kv.shrink(sequence, 0)
    assert kv.allocate(sequence)
    kv.deallocate(sequence)
    assert kv.num_blocks_in_prefix_cache() == [0], "nothing of it was computed again"
    assert_drained(kv)


# -- counters -------------------------------------------------------------------------------------


def test_counters_and_hit_statistics(make_rank):
    kv = make_rank(num_blocks=11, max_num_seqs=4)
    publish(kv, 9, seed=1)
    sequence = Sequence(tokens(10, 1))
    kv.allocate(sequence)
    stats = kv.rank_stats()
    assert kv.stats().ranks == (stats,)
    assert stats.num_total_blocks == 10
    assert [stats.num_free_blocks] == kv.num_free_blocks() == [7]
    assert [stats.num_used_blocks] == kv.num_used_blocks() == [3]
    assert [stats.num_available_blocks] == kv.num_available_blocks() == [7]
    assert [stats.num_blocks_in_prefix_cache] == kv.num_blocks_in_prefix_cache() == [2]
    assert stats.num_free_single_blocks == 3
    assert kv.kv_cache_utilization() == 0.3
    assert stats.num_admissions_total == 2
    assert stats.prefix_cache_queries_total == 9 + 10
    assert stats.prefix_cache_hits_total == 8
    # Neither a preempted sequence's return nor failed retries count again.
    kv.deallocate(computed(sequence))
    big = Sequence(tokens(40, 1))
    blocker = Sequence(tokens(4, 9))
    kv.allocate([sequence, blocker])
    for _ in range(3):
        assert not kv.allocate(big)
    stats = kv.rank_stats()
    assert stats.num_admissions_total == 3
    assert stats.prefix_cache_queries_total == 9 + 10 + 4
    assert stats.prefix_cache_hits_total == 8


def test_integrity_sees_rows_that_disagree(make_rank):
    def broken(change):
        kv = RankKV(PoolConfig(num_blocks=20, block_size=SIZE))
        sequence = Sequence(tokens(9))
        kv.allocate(sequence)
        kv.check_integrity()
        change(kv, sequence)
        with pytest.raises(IntegrityError):
            kv.check_integrity()

    def forget(kv, sequence):
        kv._rows.sequences[1] = None

    def other_ids(kv, sequence):
        sequence.kv_state.block_ids = np.array([1, 3, 2], np.int32)

    def other_row(kv, sequence):
        sequence.single_block_id = 2

    def lose_use(kv, sequence):
        kv.block_manager.adopt(np.array([2], np.int32)).release()

    def orphan(kv, sequence):
        kv.tables.append(3, np.array([5], np.int32))

    for change in (forget, other_ids, other_row, lose_use, orphan):
        broken(change)


# -- random histories -----------------------------------------------------------------------------


class Ranks(RuleBasedStateMachine):
    """Sequences come, grow, publish, fail and go; beside them, what each block must hold.

    ``content`` says per block id which computed prefix lies in it, ``published`` which prefixes
    were given to the cache since the last reset.
    """

    @initialize(
        num_blocks=st.integers(4, 24),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 6),
        cache=st.sampled_from([True, True, True, False]),
        disagg_pd=st.booleans(),
    )
    def start(self, num_blocks, block_size, max_num_seqs, cache, disagg_pd):
        self.size, self.cache_on = block_size, cache
        self.limit = (num_blocks - 1) * block_size
        self.kv = RankKV(
            PoolConfig(
                num_blocks=num_blocks,
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                enable_prefix_cache=cache,
                disagg_pd=disagg_pd,
            )
        )
        self.live: list[Sequence] = []
        self.stale: set[Sequence] = set()  # hold blocks from before a reset
        self.content: dict[int, tuple] = {}
        self.published: set[tuple] = set()
        self.was_short = False
        self.num_admitted = self.num_queried = self.num_hit = 0

    def prefix(self, sequence, num_blocks):
        return sequence.namespace, tuple(sequence.token_ids[: num_blocks * self.size].tolist())

    def longest_published(self, sequence, limit):
        count = 0
        while count < limit and self.prefix(sequence, count + 1) in self.published:
            count += 1
        return count

    def arrived(self, sequence, expected_hit, num_blocks):
        """A sequence has just got its row and blocks."""
        state = sequence.kv_state
        assert state.num_blocks == num_blocks if num_blocks is not None else True
        assert state.num_computed_tokens == state.num_shared_blocks * self.size
        assert state.num_computed_tokens < max(sequence.num_tokens, 1)
        if self.was_short:
            assert state.num_shared_blocks <= expected_hit
        else:
            assert state.num_shared_blocks == expected_hit
        for index, block_id in enumerate(state.block_ids.tolist()):
            if index < state.num_shared_blocks:
                assert self.content[block_id] == self.prefix(sequence, index + 1)
        self.fresh(sequence, state.num_shared_blocks)
        if not sequence.counted_here:
            sequence.counted_here = True
            self.num_admitted += 1
            self.num_queried += sequence.num_tokens
            self.num_hit += state.num_computed_tokens

    def fresh(self, sequence, start):
        """Blocks from ``start`` on are new: nobody else has them, and nothing lies in them."""
        others = {i for s in self.live if s is not sequence for i in s.kv_state.block_ids.tolist()}
        for block_id in sequence.kv_state.block_ids.tolist()[start:]:
            assert block_id not in others
            self.content.pop(block_id, None)

    @rule(
        length=st.integers(1, 20),
        tail=st.lists(st.integers(0, 1), max_size=3),
        namespace=st.sampled_from([DEFAULT, DEFAULT, Namespace(lora="l")]),
    )
    def create(self, length, tail, namespace):
        row = ([0] * length + tail)[: self.limit]
        sequence = Counted(row, namespace=namespace)
        self.live.append(sequence)
        if len(self.live) > 8:
            self.release(0, publish=False)

    @precondition(lambda self: self.live)
    @rule(picks=st.lists(st.integers(0, 7), min_size=1, max_size=4), more=st.integers(0, 6))
    def allocate(self, picks, more):
        chosen = list({id(s): s for s in (self.live[i % len(self.live)] for i in picks)}.values())
        for sequence in chosen:
            if sequence.single_block_id is not None:
                room = min(more, self.limit - sequence.num_tokens)
                sequence.extend([0] * room)
        new = [s for s in chosen if s.single_block_id is None]
        needs = {s: -(-s.num_tokens // self.size) for s in chosen}
        hits = {s: self.longest_published(s, (s.num_tokens - 1) // self.size) for s in new}
        held = {s: s.kv_state.num_blocks for s in chosen}
        before = books(self.kv, *chosen)
        wanted = sum(max(needs[s] - held[s] - hits.get(s, 0), 0) for s in chosen)
        short = wanted > self.kv.num_free_blocks()[0]
        rows = self.kv.rank_stats().num_free_single_blocks
        done = self.kv.allocate(chosen)
        if not done:
            assert books(self.kv, *chosen) == before
            assert short or len(new) > rows or self.was_short
            return
        assert len(new) <= rows
        self.was_short = self.was_short or short
        for sequence in chosen:
            if sequence in hits:
                self.arrived(sequence, hits[sequence], needs[sequence])
            else:
                assert sequence.kv_state.num_blocks == max(held[sequence], needs[sequence])
                self.fresh(sequence, held[sequence])

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 7))
    def share(self, index):
        sequence = self.live[index % len(self.live)]
        if sequence.single_block_id is not None:
            before = books(self.kv, sequence)
            self.kv.allocate_shared(sequence)
            assert books(self.kv, sequence) == before
            return
        expected = self.longest_published(sequence, (sequence.num_tokens - 1) // self.size)
        self.kv.allocate_shared(sequence)
        if sequence.single_block_id is not None:
            self.arrived(sequence, expected, None)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 7), count=st.integers(1, 12))
    def compute(self, index, count):
        sequence = self.live[index % len(self.live)]
        state = sequence.kv_state
        before = state.num_computed_tokens
        stop = min(before + count, sequence.num_tokens, state.num_blocks * self.size)
        if sequence.single_block_id is None or stop <= before:
            return
        state.num_computed_tokens = stop
        for block in range(before // self.size, stop // self.size):
            self.content[int(state.block_ids[block])] = self.prefix(sequence, block + 1)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 7), num_tokens=st.one_of(st.none(), st.integers(-1, 30)))
    def cache(self, index, num_tokens):
        sequence = self.live[index % len(self.live)]
        self.kv.cache(sequence, num_tokens)
        self.note_published(sequence, num_tokens)

    def note_published(self, sequence, num_tokens=None):
        stop = sequence.kv_state.num_computed_tokens
        stop = stop if num_tokens is None else min(stop, max(num_tokens, 0))
        if self.cache_on and sequence not in self.stale:
            for count in range(1, stop // self.size + 1):
                self.published.add(self.prefix(sequence, count))

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 7), publish=st.booleans())
    def release(self, index, publish):
        sequence = self.live.pop(index % len(self.live))
        if publish:
            self.note_published(sequence)
            self.kv.deallocate(sequence)
        else:
            self.kv.deallocate_without_cache(sequence)
        self.stale.discard(sequence)
        if publish:  # as a preempted one, it may come back
            self.live.append(sequence)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 7), num_blocks=st.integers(0, 6))
    def shrink(self, index, num_blocks):
        sequence = self.live[index % len(self.live)]
        held = sequence.kv_state.block_ids.tolist()
        self.kv.shrink(sequence, num_blocks)
        assert sequence.kv_state.block_ids.tolist() == held[:num_blocks]
        if not sequence.kv_state.num_blocks:
            self.stale.discard(sequence)

    @rule()
    def reset(self):
        self.kv.reset_prefix_cache()
        assert self.kv.num_blocks_in_prefix_cache() == [0]
        self.published.clear()
        self.was_short = False
        self.stale = {s for s in self.live if s.kv_state.num_blocks}

    @invariant()
    def books_balance(self):
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity()
        used = {i for s in self.live for i in s.kv_state.block_ids.tolist()}
        stats = self.kv.rank_stats()
        assert stats.num_used_blocks == len(used)
        rows = [s.single_block_id for s in self.live if s.single_block_id is not None]
        assert len(set(rows)) == len(rows) == self.kv.single_block_manager.num_used_blocks
        assert stats.num_admissions_total == self.num_admitted
        assert stats.prefix_cache_queries_total == self.num_queried
        assert stats.prefix_cache_hits_total == self.num_hit
        for sequence in self.live:  # nobody wrote into a computed block of another
            state = sequence.kv_state
            for block in range(state.num_computed_tokens // self.size):
                held = self.content.get(int(state.block_ids[block]))
                assert held == self.prefix(sequence, block + 1)

    def teardown(self):
        if hasattr(self, "kv"):
            self.kv.deallocate(self.live)
            assert_drained(self.kv)


class Counted(Sequence):
    """A sequence that the machine remembers to have counted."""

    __slots__ = ("counted_here",)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.counted_here = False


TestRanks = Ranks.TestCase
TestRanks.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


# -- speed ----------------------------------------------------------------------------------------


def test_speed_of_a_decode_step(benchmark):
    """Run with --benchmark-enable for figures; 32 sequences grow by one token."""
    kv = RankKV(PoolConfig(num_blocks=4000, max_num_seqs=32, max_model_len=1 << 15))
    sequences = [Sequence(tokens(200 + i, i)) for i in range(32)]
    kv.allocate(sequences)

    def step():
        for sequence in sequences:
            sequence.append(1)
        return kv.allocate(sequences)

    assert benchmark.pedantic(step, rounds=200)


def test_speed_of_an_8k_prompt(benchmark):
    kv = RankKV(PoolConfig(num_blocks=600, max_num_seqs=4))
    prompt = tokens(8192)

    def live():
        sequence = Sequence(prompt)
        assert kv.allocate(sequence)
        kv.deallocate(computed(sequence))

    benchmark.pedantic(live, rounds=100)
    assert hit(kv, 8192, 0) == 8176
