"""Forks and explanations through a pool: the driver's copies are what the ranks hold."""

from __future__ import annotations

import numpy as np
import pytest

from raykv import Namespace, Sequence
from raykv.core.explain import MissReport
from raykv.core.retention import Retention
from raykv.errors import RequestError

SIZE = 4


def start(pool, num_tokens, first=0, rank=None, **kwargs):
    sequence = Sequence(np.arange(first, first + num_tokens), **kwargs)
    sequence.dp_rank = rank
    assert pool.allocate(sequence)
    sequence.kv_state.num_computed_tokens = num_tokens
    return sequence


def grow(pool, *sequences, token=7):
    for sequence in sequences:
        sequence.append(token)
    return pool.allocate(sequences)


def ids(sequence):
    return sequence.kv_state.block_ids.tolist()


def state(sequence):
    kv = sequence.kv_state
    return (
        ids(sequence),
        kv.num_shared_blocks,
        kv.num_computed_tokens,
        kv.block_size,
        sequence.single_block_id,
        sequence.dp_rank,
    )


def check_mirror(pool, *sequences):
    """The driver's copies say what the ranks hold, as far as a test can look into them."""
    pool.check_integrity()
    for sequence in sequences:
        rank = pool.ranks[sequence.dp_rank]
        kv = rank.kv if hasattr(rank, "kv") else getattr(getattr(rank, "host", None), "_kv", None)
        if kv is not None:
            theirs = kv._rows.sequences[sequence.single_block_id]
            assert state(theirs) == state(sequence)
            assert theirs.token_ids.tolist() == sequence.token_ids.tolist()
            assert theirs.retention == sequence.retention
        assert not sequence.kv_state.block_ids.flags.writeable


def drained(pool):
    total = pool.stats().total
    pool.check_integrity()
    return total.num_used_blocks == total.num_pending_blocks == 0


def test_a_fork_shares_on_the_rank_and_in_the_drivers_copy(make_pool):
    pool = make_pool(dp_size=2)
    parent = start(pool, 10, rank=1, retention=Retention(3))
    child = parent.fork()
    assert ids(child) == ids(parent) == [1, 2, 3]
    assert (child.dp_rank, child.single_block_id) == (1, 2)
    assert child.kv_state.num_computed_tokens == 10
    assert child.owner is parent.owner is pool
    assert child.slot_ids().tolist() == parent.slot_ids().tolist()
    assert pool.num_used_blocks() == [0, 3]
    check_mirror(pool, parent, child)
    stats = pool.stats().total
    assert stats.num_admissions_total == 1
    assert stats.prefix_cache_queries_total == 10
    pool.deallocate([parent, child])
    assert drained(pool)


def test_only_what_the_driver_says_is_computed_is_shared(make_pool):
    pool = make_pool()
    parent = start(pool, 16)
    parent.kv_state.num_computed_tokens = 6
    child = parent.fork()
    assert ids(child) == [1, 2]
    assert child.kv_state.num_computed_tokens == 6
    check_mirror(pool, parent, child)


def test_tokens_that_the_rank_has_not_seen_travel_with_a_fork(make_pool):
    pool = make_pool()
    parent = start(pool, 6)
    parent.append(50)
    child = parent.fork()
    child.append(60)
    assert pool.allocate([parent, child])
    assert parent.token_ids.tolist() == [*range(6), 50]
    assert child.token_ids.tolist() == [*range(6), 50, 60]
    check_mirror(pool, parent, child)
    for sequence in (parent, child):
        sequence.extend([1, 2, 3])
        assert pool.allocate(sequence)
        sequence.kv_state.num_computed_tokens = sequence.num_tokens
    tokens = child.token_ids.copy()
    pool.deallocate([child, parent])
    again = Sequence(tokens)
    assert pool.allocate(again)
    assert again.kv_state.num_computed_tokens == 8, "the child's own tokens were published"


@pytest.mark.parametrize("num_tokens", [1, 6, 7, 8, 9])
def test_the_drivers_copies_mirror_the_replaced_block_exactly(make_pool, num_tokens):
    pool = make_pool(num_blocks=30)
    parent = start(pool, num_tokens)
    family = [parent, parent.fork(), parent.fork()]
    before = ids(parent)
    index = num_tokens // SIZE
    for writer in (1, 0, 2):
        kept = [ids(sequence) for sequence in family]
        family[writer].extend(range(SIZE + 1))  # more blocks, too
        assert pool.allocate(family[writer])
        check_mirror(pool, *family)
        others = [i for i in range(3) if i != writer]
        assert [ids(family[i]) for i in others] == [kept[i] for i in others]
        new = ids(family[writer])
        assert len(new) == -(-family[writer].num_tokens // SIZE)
        assert new[:index] == before[:index]
        if num_tokens % SIZE == 0:
            assert pool.get_swap_block_transfer_infos() == [[]]
        elif writer == 2:
            assert new[index] == before[index], "the last one writes in place"
            assert pool.get_swap_block_transfer_infos() == [[]]
        else:
            assert new[index] not in before
            assert pool.get_swap_block_transfer_infos() == [[(before[index], new[index])]]
        pool.ack_swaps()
    tables = [set(ids(sequence)[index:]) for sequence in family]
    assert len(set.union(*tables)) == sum(map(len, tables)), "no block is written by two"
    for sequence in family:
        sequence.kv_state.num_computed_tokens = sequence.num_tokens
        grow(pool, sequence)
    assert pool.get_swap_block_transfer_infos() == [[]]
    check_mirror(pool, *family)


def test_the_slots_of_a_copied_block_are_the_new_ones(make_pool):
    pool = make_pool()
    parent = start(pool, 6)
    child = parent.fork()
    assert grow(pool, child)
    assert child.slot_ids().tolist() == [4, 5, 6, 7, 12, 13, 14]
    assert parent.slot_ids().tolist() == [4, 5, 6, 7, 8, 9]


def test_swap_lists_are_per_rank(make_pool):
    pool = make_pool(dp_size=2)
    parents = [start(pool, 6, 100 * rank, rank) for rank in (0, 1)]
    children = [parent.fork() for parent in parents]
    assert [child.dp_rank for child in children] == [0, 1]
    assert grow(pool, children[1])
    assert pool.get_swap_block_transfer_infos() == [[], [(2, 3)]]
    assert grow(pool, children[0], parents[1])
    assert pool.get_swap_block_transfer_infos() == [[(2, 3)], []]
    pool.deallocate_without_cache([*parents, *children])
    assert [rank.num_pending_blocks for rank in pool.stats().ranks] == [2, 2]
    pool.ack_swaps()
    assert drained(pool)


def test_two_branches_in_one_list_over_two_ranks(make_pool):
    pool = make_pool(dp_size=2)
    families = []
    for rank in (0, 1):
        parent = start(pool, 6, 100 * rank, rank)
        families.append([parent, parent.fork()])
    (a, b), (c, d) = families
    assert grow(pool, a, c, b, d)
    assert pool.get_swap_block_transfer_infos() == [[(2, 3)], [(2, 3)]]
    assert [ids(sequence) for sequence in (a, b, c, d)] == [[1, 3], [1, 2]] * 2
    check_mirror(pool, a, b, c, d)
    pool.ack_swaps()


def test_a_refused_list_with_forks_changes_nothing(make_pool):
    pool = make_pool(num_blocks=4)
    parent = start(pool, 6)
    child = parent.fork()
    for sequence in (parent, child):
        sequence.append(7)
    newcomer = Sequence(range(50, 54))
    before = pool.stats(), state(parent), state(child)
    assert not pool.allocate([parent, child, newcomer])
    assert (pool.stats(), state(parent), state(child)) == before
    assert pool.get_swap_block_transfer_infos() == [[]]
    assert pool.allocate([parent, child])
    assert pool.get_swap_block_transfer_infos() == [[(2, 3)]]
    check_mirror(pool, parent, child)


def test_a_refusal_by_another_rank_leaves_branches_intact(make_pool):
    """What was copied on write stays copied, for it would have to be before the next write."""
    pool = make_pool(dp_size=2)
    parent = start(pool, 6, rank=0)
    child = parent.fork()
    blocker, refused = start(pool, 36, 100, rank=1), Sequence(range(200, 204))
    refused.dp_rank = 1
    child.append(7)
    assert not pool.allocate([child, refused])
    check_mirror(pool, parent, child)
    assert ids(parent) == [1, 2]
    assert ids(child)[0] == 1
    assert len(ids(child)) == 2
    copies = pool.get_swap_block_transfer_infos()[0]
    assert copies == ([] if ids(child)[1] == 2 else [(2, ids(child)[1])])
    pool.ack_swaps()
    pool.deallocate(blocker)
    assert pool.allocate([child, refused])
    assert ids(child)[1] != 2
    check_mirror(pool, parent, child, refused)
    pool.deallocate([child, parent, refused])
    pool.get_swap_block_transfer_infos()
    pool.ack_swaps()
    assert drained(pool)


def test_copies_outlive_their_branches_until_they_are_done(make_pool):
    pool = make_pool()
    parent = start(pool, 6)
    child = parent.fork()
    assert grow(pool, child)
    pool.deallocate_without_cache([parent, child])
    assert pool.num_used_blocks() == [0]
    assert pool.stats().total.num_pending_blocks == 2
    assert not pool.allocate(Sequence(range(100, 132)))
    assert pool.get_swap_block_transfer_infos() == [[(2, 3)]]
    assert pool.stats().total.num_pending_blocks == 2
    pool.ack_swaps()
    assert drained(pool)


def test_without_a_free_row_a_fork_is_allocated_later(make_pool):
    pool = make_pool(num_single_blocks=2)
    parent = start(pool, 6)
    child = parent.fork()
    assert child.dp_rank is child.single_block_id is None
    assert ids(child) == []
    check_mirror(pool, parent)
    pool.deallocate(parent)
    assert pool.allocate(child)
    assert child.kv_state.num_computed_tokens == SIZE
    check_mirror(pool, child)
    assert pool.stats().total.num_admissions_total == 2


def test_forks_of_what_holds_nothing_are_plain(make_pool):
    pool = make_pool(num_blocks=3)
    running, refused = start(pool, 8), Sequence(range(50, 54))
    refused.dp_rank = 0
    assert not pool.allocate(refused)
    children = [Sequence([1]).fork(), refused.fork()]
    assert all(child.single_block_id is child.dp_rank is None for child in children)
    pool.deallocate(running)
    children.append(running.fork())
    for child in children:
        assert pool.allocate(child)
        check_mirror(pool, child)
        pool.deallocate(child)


def test_forks_of_forks_and_a_reset(make_pool):
    pool = make_pool(num_blocks=20)
    parent = start(pool, 6)
    child = parent.fork()
    grandchild = child.fork()
    assert grow(pool, child, grandchild)
    check_mirror(pool, parent, child, grandchild)
    assert len(pool.get_swap_block_transfer_infos()[0]) == 2
    pool.ack_swaps()
    pool.deallocate(child)
    assert (child.dp_rank, child.owner, ids(child)) == (None, None, [])
    assert ids(parent) == [1, 2]
    check_mirror(pool, parent, grandchild)


def test_what_branches_hold_at_a_reset_is_never_published(make_pool):
    pool = make_pool()
    parent = start(pool, 2)
    child = parent.fork()
    pool.reset_prefix_cache()
    for sequence in (child, parent):
        sequence.extend([7, 8, 9])
        assert pool.allocate(sequence)
        pool.get_swap_block_transfer_infos()
        pool.ack_swaps()
        sequence.kv_state.num_computed_tokens = 5
    pool.deallocate([parent, child])
    assert pool.num_blocks_in_prefix_cache() == [0]


# -- explain ---------------------------------------------------------------------------------------


def text(*marks):
    return [10 * mark + i for mark in marks for i in range(SIZE)]


def admit(pool, tokens, rank=None, **kwargs):
    sequence = Sequence(tokens, **kwargs)
    sequence.dp_rank = rank
    assert pool.allocate(sequence)
    return sequence


def publish(pool, tokens, **kwargs):
    sequence = admit(pool, tokens, **kwargs)
    sequence.kv_state.num_computed_tokens = len(tokens)
    pool.deallocate(sequence)


def ask(pool, tokens, **kwargs):
    sequence = admit(pool, tokens, **kwargs)
    report = pool.explain(sequence)
    assert report.num_hit_tokens == sequence.kv_state.num_computed_tokens
    check_mirror(pool, sequence)
    pool.deallocate_without_cache(sequence)
    return report


def test_every_reason_comes_through(make_pool):
    pool = make_pool()
    space = Namespace(tenant="a", multimodal=((1, b"cat"),))
    publish(pool, text(1, 2, 3))
    publish(pool, text(7), namespace=space)
    assert ask(pool, [*text(1), 5]) == MissReport("complete", 4, 4)
    assert ask(pool, text(1, 2)) == MissReport("last_token_kept", 4, 4)
    assert ask(pool, [*text(9), 5]) == MissReport("never_seen", 0, 0)
    assert ask(pool, [*text(1), 20, 21, 0, 0, 0]) == MissReport("diverged", 4, 6, (22, 23), (0, 0))
    mine = Namespace(multimodal=((1, b"cat"),))
    assert ask(pool, [*text(7), 5], namespace=mine) == MissReport(
        "other_namespace", 0, 0, namespace=space
    )
    leader = admit(pool, text(1, 2, 3, 4), seq_id="leader")
    assert ask(pool, [*text(1, 2, 3, 4), 0]) == MissReport(
        "not_computed_yet", 12, 12, seq_id="leader"
    )
    pool.deallocate_without_cache(leader)
    pool.deallocate_without_cache(admit(pool, text(*range(50, 58))))
    assert ask(pool, [*text(1, 2), 0]) == MissReport("evicted", 4, 4)


def test_without_a_cache_it_says_so(make_pool):
    assert ask(make_pool(enable_prefix_cache=False), text(1, 2)).reason == "cache_off"


def test_each_rank_explains_its_own(make_pool):
    pool = make_pool(dp_size=2)
    publish(pool, text(1, 2), rank=1)
    assert ask(pool, [*text(1, 2), 5], rank=0).reason == "never_seen"
    assert ask(pool, [*text(1, 2), 5], rank=1).reason == "complete"


def test_tokens_appended_since_do_not_count(make_pool):
    pool = make_pool()
    publish(pool, text(1, 2))
    sequence = admit(pool, [*text(1), 20])
    sequence.extend([21, 22, 23, 24])
    assert pool.explain(sequence) == MissReport("complete", 4, 4)
    assert pool.allocate(sequence)
    check_mirror(pool, sequence)


@pytest.mark.parametrize("rank", [None, 0])
def test_what_holds_no_blocks_is_not_explained_and_not_harmed(make_pool, rank):
    pool = make_pool()
    sequence = Sequence(text(1, 2))
    sequence.dp_rank = rank
    with pytest.raises(RequestError, match="holds no blocks"):
        pool.explain(sequence)
    assert pool.allocate(sequence)
    assert pool.explain(sequence).reason == "never_seen"
    pool.deallocate(sequence)
    with pytest.raises(RequestError, match="holds no blocks"):
        pool.explain(sequence)
