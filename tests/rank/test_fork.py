"""Forks on one rank: what branches share, and that none ever writes into another's content.

``World`` plays the worker: it keeps one number per slot, does the copies of the swap list before it
writes, and overwrites whatever is free. What must be there is known from the tokens alone.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raykv.config import PoolConfig
from raykv.core import Namespace, Sequence
from raykv.core.copy_on_write import SwapList
from raykv.core.ledger import FREE
from raykv.core.retention import Retention
from raykv.rank import RankKV

SIZE = 4
GARBAGE = -1


@pytest.fixture(params=[False, True], ids=["impl", "concurrent"])
def make_rank(request):
    """Makes ranks whose books are checked when the test is over."""
    made = []

    def make(num_blocks=20, block_size=SIZE, **config):
        config = {"disagg_pd": request.param, **config}
        made.append(RankKV(PoolConfig(num_blocks=num_blocks, block_size=block_size, **config)))
        return made[-1]

    yield make
    for kv in made:
        kv.check_integrity()


def start(kv, num_tokens, num_computed=None, first=0, **kwargs):
    """A running sequence."""
    sequence = Sequence(np.arange(first, first + num_tokens), **kwargs)
    assert kv.allocate(sequence)
    computed = num_tokens if num_computed is None else num_computed
    sequence.kv_state.num_computed_tokens = computed
    return sequence


def grow(kv, *sequences, token=7):
    for sequence in sequences:
        sequence.append(token)
    return kv.allocate(sequences)


def ids(sequence):
    return sequence.kv_state.block_ids.tolist()


def swaps(kv):
    [due] = kv.get_swap_block_transfer_infos()
    return due


def uses(kv, sequence):
    return kv.block_manager.use_counts(sequence.kv_state.block_ids).tolist()


def refs(kv, block_ids):
    return kv.block_manager.ref_counts(np.asarray(block_ids, np.int64)).tolist()


def books(kv, *sequences):
    """Everything that a refused call must leave as it was."""
    return (
        kv.rank_stats(),
        kv.tables.table.tolist(),
        [(ids(s), s.single_block_id, s.kv_state.num_computed_tokens) for s in sequences],
        kv.block_manager._ledger.counts.tolist(),
        [(name, list(each._due)) for name, each in kv._copies.owed.items()],
    )


def is_blank(sequence):
    return (
        sequence.dp_rank is sequence.single_block_id is sequence.linear_state_slot is None
        and sequence.owner is None
        and ids(sequence) == []
        and sequence.kv_state.num_computed_tokens == 0
    )


def assert_drained(kv):
    kv.check_integrity()
    stats = kv.rank_stats()
    assert stats.num_used_blocks == stats.num_pending_blocks == 0
    assert stats.num_available_blocks == stats.num_total_blocks
    assert kv.single_block_manager.num_used_blocks == 0
    assert not kv.tables.table.any()


# -- what a fork holds -----------------------------------------------------------------------------


def test_a_fork_shares_the_computed_blocks_and_has_a_row_of_its_own(make_rank):
    kv = make_rank()
    space = Namespace(tenant="a")
    parent = start(
        kv, 10, namespace=space, max_new_tokens=5, retention=Retention(priority=7), seq_id="p"
    )
    used = kv.block_manager.num_used_blocks
    child = parent.fork()
    assert child.token_ids.tolist() == parent.token_ids.tolist()
    assert ids(child) == ids(parent) == [1, 2, 3]
    assert uses(kv, parent) == refs(kv, ids(parent)) == [2, 2, 2]
    assert kv.block_manager.num_used_blocks == used == 3
    assert child.single_block_id == 2
    assert parent.single_block_id == 1
    assert child.dp_rank == parent.dp_rank == 0
    assert child.owner is parent.owner
    assert child.seq_id != parent.seq_id
    assert child.namespace == space
    assert child.retention == Retention(priority=7)
    assert child.max_new_tokens == 5
    assert child.num_prompt_tokens == 10
    assert child.linear_state_slot is None
    assert child.kv_state.num_computed_tokens == 10
    assert child.slot_ids().tolist() == parent.slot_ids().tolist()
    assert kv.tables.ids(2).tolist() == [1, 2, 3]


def test_the_tokens_of_the_branches_are_their_own(make_rank):
    kv = make_rank()
    parent = start(kv, 6)
    child = parent.fork()
    parent.append(50)
    child.append(60)
    assert parent.token_ids.tolist() == [*range(6), 50]
    assert child.token_ids.tolist() == [*range(6), 60]


@pytest.mark.parametrize(
    ("num_computed", "num_shared"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (11, 3)]
)
def test_blocks_that_hold_nothing_computed_are_not_shared(make_rank, num_computed, num_shared):
    kv = make_rank()
    parent = start(kv, 20, num_computed)
    child = parent.fork()
    assert ids(parent) == [1, 2, 3, 4, 5]
    assert ids(child) == ids(parent)[:num_shared]
    assert child.kv_state.num_computed_tokens == num_computed
    assert uses(kv, parent) == [2] * num_shared + [1] * (5 - num_shared)
    assert kv.allocate(child)
    assert len(ids(child)) == 5
    index = num_computed // SIZE  # a full block before it stays shared, the one it is in does not
    assert ids(child)[:index] == ids(parent)[:index]
    assert not set(ids(child)[index:]) & set(ids(parent)[index:])
    assert swaps(kv) == ([(index + 1, ids(child)[index])] if num_computed % SIZE else [])


def test_a_fork_of_a_sequence_without_blocks_is_plain(make_rank):
    kv = make_rank()
    fresh = Sequence([1, 2, 3, 4, 5])
    child = fresh.fork()
    assert is_blank(child)
    kv.allocate(fresh)
    kv.deallocate(fresh)
    again = fresh.fork()
    assert is_blank(again)
    assert again.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert kv.allocate(again)
    assert_one_admission_each(kv, 2)


def assert_one_admission_each(kv, count):
    assert kv.rank_stats().num_admissions_total == count


def test_a_fork_of_a_sequence_that_was_refused_is_plain(make_rank):
    kv = make_rank(num_blocks=3)
    running, refused = start(kv, 8), Sequence(range(4))
    assert not kv.allocate(refused)
    child = refused.fork()
    assert is_blank(child)
    kv.deallocate(running)
    assert kv.allocate(child)


def test_without_a_free_row_a_fork_holds_nothing_and_is_allocated_later(make_rank):
    kv = make_rank(num_single_blocks=3)
    parent, other = start(kv, 6), start(kv, 4, first=100)
    before = books(kv, parent)
    child = parent.fork()
    assert books(kv, parent) == before
    assert ids(child) == []
    assert child.single_block_id is child.dp_rank is None
    assert not kv.allocate(child)
    kv.deallocate(other)
    kv.cache(parent)
    assert kv.allocate(child)
    assert ids(child)[0] == ids(parent)[0], "found in the prefix cache like any new sequence"
    assert child.kv_state.num_computed_tokens == SIZE
    assert swaps(kv) == []
    assert kv.rank_stats().num_admissions_total == 3, "this one is an admission"


def test_forks_of_forks(make_rank):
    kv = make_rank()
    parent = start(kv, 6)
    child = parent.fork()
    grandchild = child.fork()
    assert ids(parent) == ids(child) == ids(grandchild)
    assert uses(kv, parent) == [3, 3]
    assert [s.single_block_id for s in (parent, child, grandchild)] == [1, 2, 3]
    assert grow(kv, child)
    assert swaps(kv) == [(2, 3)]
    kv.ack_swaps()
    child.kv_state.num_computed_tokens = 7
    late = child.fork()
    assert ids(late) == ids(child) == [1, 3]
    assert uses(kv, late) == [4, 2]
    assert ids(parent) == ids(grandchild) == [1, 2]


def test_reset_forgets_everything_and_leaves_the_other_alone(make_rank):
    kv = make_rank()
    parent = start(kv, 6)
    child = parent.fork()
    assert grow(kv, child)
    kept = ids(parent)
    kv.deallocate(child)
    assert is_blank(child)
    assert child.num_tokens == 7
    assert ids(parent) == kept
    assert uses(kv, parent) == [1, 1]
    assert kv.allocate(child), "and starts anew"
    assert ids(child)[0] == 1
    assert child.kv_state.num_computed_tokens == 4


def test_hit_statistics_know_nothing_of_forks(make_rank):
    kv = make_rank()
    kv.deallocate(start(kv, 8))
    parent = Sequence(range(10))
    assert kv.allocate(parent)
    parent.kv_state.num_computed_tokens = 10
    child = parent.fork()
    assert grow(kv, child)
    child.fork()
    kv.deallocate(child)
    assert kv.allocate(child), "not even when it comes back after preemption"
    stats = kv.rank_stats()
    assert stats.num_admissions_total == 2
    assert stats.prefix_cache_queries_total == 8 + 10
    assert stats.prefix_cache_hits_total == 8


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("keep", [True, False])
def test_any_order_of_release_ends_at_zero(make_rank, order, keep):
    kv = make_rank()
    parent = start(kv, 10)
    family = [parent, parent.fork()]
    family.append(family[1].fork())
    assert grow(kv, *family[1:])
    assert kv.block_manager.num_used_blocks == 2 + 3
    release = kv.deallocate if keep else kv.deallocate_without_cache
    for count, index in enumerate(order):
        release(family[index])
        assert kv.block_manager.num_used_blocks == (2 + 2 - count if count < 2 else 0)
    assert kv.rank_stats().num_pending_blocks == 3, "two copies of one block are still due"
    assert len(swaps(kv)) == 2
    kv.ack_swaps()
    assert_drained(kv)
    assert kv.block_manager.num_blocks_in_prefix_cache == (2 if keep else 0)


# -- copy on write ---------------------------------------------------------------------------------


def test_the_first_writer_copies_and_the_last_writes_in_place(make_rank):
    kv = make_rank()
    parent = start(kv, 6)
    family = [parent, parent.fork(), parent.fork()]
    for sequence, wanted in zip(family, ([(2, 3)], [(2, 4)], []), strict=True):
        assert grow(kv, sequence)
        assert swaps(kv) == wanted
        kv.ack_swaps()
    assert [ids(s) for s in family] == [[1, 3], [1, 4], [1, 2]]
    assert grow(kv, *family)
    assert swaps(kv) == [], "now everybody has a block of his own"


def test_branches_of_one_list_copy_all_but_the_last(make_rank):
    kv = make_rank()
    parent, other = start(kv, 6), start(kv, 7, first=100)
    family = [parent, parent.fork(), parent.fork()]
    others = [other, other.fork()]
    free = kv.block_manager.num_free_blocks
    assert grow(kv, family[1], others[0], family[0], others[1], family[2])
    due = swaps(kv)
    assert [source for source, _ in due] == [2, 4, 2]
    assert [target for _, target in due] == [ids(family[1])[1], ids(other)[1], ids(parent)[1]]
    assert ids(family[2]) == [1, 2]
    assert ids(others[1]) == [3, 4]
    assert kv.block_manager.num_free_blocks == free - 3
    assert len({target for _, target in due}) == 3


def test_a_branch_that_needs_a_copy_and_more_blocks_gets_both(make_rank):
    kv = make_rank()
    parent = start(kv, 6)
    child = parent.fork()
    child.extend(range(10))
    assert kv.allocate(child)
    assert len(ids(child)) == 4
    assert swaps(kv) == [(2, ids(child)[1])]
    assert ids(parent) == [1, 2]
    assert uses(kv, child) == [2, 1, 1, 1]


def test_a_block_that_is_full_is_never_copied(make_rank):
    kv = make_rank()
    parent = start(kv, 8)
    child = parent.fork()
    assert grow(kv, parent, child)
    assert swaps(kv) == []
    assert ids(parent)[:2] == ids(child)[:2] == [1, 2]
    assert ids(parent)[2] != ids(child)[2]


def test_blocks_shared_through_the_cache_are_never_copied(make_rank):
    kv = make_rank()
    parent = start(kv, 6)
    parent.fork()
    kv.cache(parent)
    twins = [start(kv, 12), start(kv, 12)]
    assert kv.block_manager.use_counts([1]).tolist() == [4]
    assert grow(kv, *twins)
    assert swaps(kv) == []


def test_a_chained_copy_takes_the_root_source(make_rank):
    kv = make_rank()
    parent = start(kv, 6)
    child = parent.fork()
    assert grow(kv, child)  # 2 to 3, not handed out
    grandchild = child.fork()
    assert ids(grandchild) == [1, 3]
    assert grow(kv, grandchild)
    assert swaps(kv) == [(2, 3), (2, 4)]
    late = grandchild.fork()  # 4 is being filled: what is handed out is done in order
    assert grow(kv, late)
    assert swaps(kv) == [(4, ids(late)[1])]
    kv.ack_swaps()


def test_copies_are_handed_out_once(make_rank):
    kv = make_rank()
    parent = start(kv, 6)
    child = parent.fork()
    assert grow(kv, child)
    assert kv.get_swap_block_transfer_infos() == [[(2, 3)]]
    assert kv.get_swap_block_transfer_infos() == [[]]
    kv.ack_swaps()
    assert kv.get_swap_block_transfer_infos() == [[]]


def test_source_and_target_outlive_their_branches_until_the_copy_is_done(make_rank):
    kv = make_rank(num_blocks=6)
    parent = start(kv, 6)
    child = parent.fork()
    assert grow(kv, child)
    assert refs(kv, [2, 3]) == [2, 2]
    kv.deallocate_without_cache([child, parent])
    assert kv.block_manager.num_used_blocks == 0
    assert refs(kv, [1, 2, 3]) == [0, 1, 1]
    assert kv.block_manager.num_free_blocks == 3
    assert not kv.allocate(Sequence(range(100, 116))), "not even for who needs them"
    kv.ack_swaps()
    assert refs(kv, [2, 3]) == [1, 1], "what was not handed out cannot be done"
    assert swaps(kv) == [(2, 3)]
    assert refs(kv, [2, 3]) == [1, 1]
    kv.ack_swaps()
    assert_drained(kv)
    assert kv.block_manager.num_free_blocks == 5


def test_without_memory_for_the_copy_nothing_changes(make_rank):
    kv = make_rank(num_blocks=4)
    parent = start(kv, 6)
    other = start(kv, 4, first=100)
    child = parent.fork()
    child.append(7)
    before = books(kv, parent, child, other)
    assert not kv.allocate(child)
    assert books(kv, parent, child, other) == before
    assert swaps(kv) == []
    kv.deallocate_without_cache(parent)
    assert kv.allocate(child), "alone it writes in place"
    assert swaps(kv) == []


def test_a_list_with_forks_is_all_or_nothing(make_rank):
    kv = make_rank(num_blocks=7)  # six blocks: three used, three free
    parent = start(kv, 6)
    family = [parent, parent.fork(), parent.fork()]
    newcomer, full = Sequence(range(100, 108)), start(kv, 4, first=200)
    for sequence in (*family, full):
        sequence.append(7)
    before = books(kv, *family, full, newcomer)
    assert not kv.allocate([*family, full, newcomer]), "two copies, one block and two for the new"
    assert books(kv, *family, full, newcomer) == before
    assert is_blank(newcomer)
    assert kv.allocate([*family, full])
    assert len(swaps(kv)) == 2
    assert kv.block_manager.num_free_blocks == 0


def test_the_copy_may_evict_what_is_cached(make_rank):
    kv = make_rank(num_blocks=4)
    kv.deallocate(start(kv, 4, first=100))
    parent = start(kv, 6)
    child = parent.fork()
    assert kv.block_manager.num_free_blocks == 0
    assert grow(kv, child)
    assert kv.block_manager.num_blocks_in_prefix_cache == 0
    assert swaps(kv) == [(ids(parent)[1], ids(child)[1])]


# -- what is published -----------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before the fork", "after the fork", "after the copy"])
@pytest.mark.parametrize("num_tokens", [2, 6])
def test_nothing_computed_before_a_reset_is_published_by_a_branch(make_rank, when, num_tokens):
    """A copy of a block is a fresh block with old content (vLLM 28827)."""
    kv = make_rank()
    parent = start(kv, num_tokens)
    if when == "before the fork":
        kv.reset_prefix_cache()
    child = parent.fork()
    if when == "after the fork":
        kv.reset_prefix_cache()
    family = [child, parent]
    for sequence in family:
        assert grow(kv, sequence)
        swaps(kv)
        kv.ack_swaps()
    if when == "after the copy":
        kv.reset_prefix_cache()
    family.append(child.fork())
    for sequence in family:
        sequence.extend(range(20))
        assert kv.allocate(sequence)
        sequence.kv_state.num_computed_tokens = sequence.num_tokens
        kv.deallocate(sequence)
    assert kv.block_manager.num_blocks_in_prefix_cache == 0
    kv.get_swap_block_transfer_infos()
    kv.ack_swaps()
    assert_drained(kv)
    fresh = start(kv, num_tokens + 3)
    assert fresh.kv_state.num_shared_blocks == 0
    kv.deallocate(fresh)
    assert kv.block_manager.num_blocks_in_prefix_cache > 0, "rows are not tainted for ever"


def test_what_starts_after_a_reset_is_published(make_rank):
    kv = make_rank()
    empty = Sequence(range(8))
    kv.allocate_shared(empty)  # a row, and no block
    kv.reset_prefix_cache()
    assert kv.allocate(empty)
    empty.kv_state.num_computed_tokens = 8
    child = empty.fork()
    kv.deallocate([empty, child])
    assert kv.block_manager.num_blocks_in_prefix_cache == 2


def test_retention_counts_from_the_publication_on_the_ranks_clock():
    now = [100.0]
    config = PoolConfig(num_blocks=9, block_size=SIZE, eviction="priority")
    kv = RankKV(config, clock=lambda: now[0])
    sequence = start(kv, 8, retention=Retention(priority=80, duration_s=10))
    now[0] = 130.0
    kv.cache(sequence, 4)
    [run] = kv.block_manager._cache.find(sequence.token_ids)[-1][:1]
    assert run.expires_s == 140.0


# -- every order, over content ---------------------------------------------------------------------


class World:
    """A rank, its memory, and up to a handful of branches of one prompt.

    Branches grow (append and allocate) at any time; ``work`` does the copies that are due, then
    writes what every branch has room for; ``ack`` says that the copies are done.
    """

    def __init__(self, kv: RankKV, num_tokens: int, num_branches: int = 1) -> None:
        self.kv = kv
        self.size = kv.block_size
        self.memory = np.full((kv.config.num_blocks, self.size), GARBAGE)
        self.tokens = itertools.count(1)
        self.handed: list[tuple[int, int]] = []
        self.due: dict[int, int] = {}  # target to root source, of what was not handed out
        self.histories: list[list[int]] = []
        parent = Sequence([next(self.tokens) for _ in range(num_tokens)])
        self.branches: list[Sequence | None] = [parent]
        self.covered = [0]
        assert kv.allocate(parent)
        self.covered[0] = num_tokens
        self.work()
        for _ in range(num_branches - 1):
            self.fork(0)

    def living(self) -> list[tuple[int, Sequence]]:
        return [(i, branch) for i, branch in enumerate(self.branches) if branch is not None]

    def fork(self, index: int) -> None:
        child = self.branches[index].fork()
        if child.single_block_id is not None:
            self.branches.append(child)
            self.covered.append(child.kv_state.num_computed_tokens)

    def grow(self, *indices: int) -> None:
        branches = [self.branches[i] for i in indices]
        for branch in branches:
            branch.append(next(self.tokens))
        before = books(self.kv, *branches)
        wanted = self.copies_wanted(branches)
        tables = {id(branch): ids(branch) for branch in branches}
        busy = {block for pair in (*self.handed, *self.due.items()) for block in pair}
        if not self.kv.allocate(branches):
            assert books(self.kv, *branches) == before
            return
        made = []
        for branch in branches:
            old, new = tables[id(branch)], ids(branch)
            replaced = [i for i, block in enumerate(old) if new[i] != block]
            assert replaced == wanted[id(branch)]
            made += [(old[i], new[i]) for i in replaced]
            fresh = set(new) - set(old)
            assert not fresh & busy, "handed out while a copy may still read or write it"
        assert len({target for _, target in made}) == len(made)
        for source, target in made:
            self.due[target] = self.due.get(source, source)
        for index, branch in zip(indices, branches, strict=True):
            self.covered[index] = branch.num_tokens

    def grow_all(self) -> None:
        self.grow(*(index for index, _ in self.living()))

    def copies_wanted(self, branches: list[Sequence]) -> dict[int, list[int]]:
        """By branch, the table index to be copied; read off the tables, not the counts."""
        tables = {id(branch): ids(branch) for _, branch in self.living()}
        wanted = {}
        for branch in branches:
            index = branch.kv_state.num_computed_tokens // self.size
            mine = tables[id(branch)]
            shared = index < len(mine) and any(
                mine[index] in table for key, table in tables.items() if key != id(branch)
            )
            wanted[id(branch)] = [index] if shared else []
            if shared:
                mine[index] = None
        return wanted

    def abort(self, index: int) -> None:
        branch = self.branches[index]
        self.histories.append(branch.token_ids.tolist())
        self.kv.deallocate(branch)
        self.branches[index] = None

    def work(self) -> None:
        [pairs] = self.kv.get_swap_block_transfer_infos()
        assert pairs == [(source, target) for target, source in self.due.items()]
        self.handed += pairs
        self.due.clear()
        for source, target in pairs:
            self.memory[target] = self.memory[source]
        for index, branch in self.living():
            computed = branch.kv_state.num_computed_tokens
            slots = branch.slot_ids(computed, self.covered[index])
            self.memory.reshape(-1)[slots] = branch.token_ids[computed : self.covered[index]]
            branch.kv_state.num_computed_tokens = self.covered[index]

    def ack(self) -> None:
        self.kv.ack_swaps()
        self.handed.clear()

    def can(self, operation: str, index: int | None) -> bool:
        if index is not None:
            branch = self.branches[index] if index < len(self.branches) else None
            limit = self.kv.config.max_tokens_per_sequence
            return branch is not None and (operation != "grow" or branch.num_tokens < limit)
        if operation == "ack":
            return bool(self.handed)
        if operation == "grow_all":
            return len(self.living()) > 1
        return bool(self.due) or any(
            self.covered[i] > branch.kv_state.num_computed_tokens for i, branch in self.living()
        )

    def check(self) -> None:
        counts = self.kv.block_manager._ledger.counts
        for pair in (*self.handed, *self.due.items()):
            assert (counts[list(pair)] != FREE).all()
            assert (self.kv.block_manager.ref_counts(np.array(pair)) > 0).all()
        self.memory[1:][counts[1:] == FREE] = GARBAGE
        for _, branch in self.living():
            positions = np.arange(branch.kv_state.num_computed_tokens)
            blocks = branch.kv_state.block_ids[positions // self.size]
            filled = ~np.isin(blocks, list(self.due))
            content = self.memory[blocks, positions % self.size]
            assert (content[filled] == branch.token_ids[positions][filled]).all()

    def end(self) -> None:
        """Finish and let go of everybody; what the cache gives afterwards is what was computed."""
        self.work()
        self.check()
        for index, _ in self.living():
            self.abort(index)
        self.ack()
        assert_drained(self.kv)
        for history in self.histories:
            found = Sequence([*history, 0])
            self.kv.allocate_shared(found)
            num_hit = found.kv_state.num_computed_tokens
            assert self.memory.reshape(-1)[found.slot_ids()].tolist() == history[:num_hit]
            self.kv.deallocate(found)


def play(make_world, operations):
    """Carry operations out; how many could be before one that made no sense."""
    world = make_world()
    for count, (operation, index) in enumerate(operations):
        if not world.can(operation, index):
            return count
        getattr(world, operation)(*([] if index is None else [index]))
        world.check()
    world.end()
    return len(operations)


def enumerate_orders(make_world, operations, depth):
    """All sequences of ``depth`` operations; those that begin with a senseless one are skipped."""
    played = 0
    dead: set[tuple] = set()
    for order in itertools.product(operations, repeat=depth):
        if any(order[:length] in dead for length in range(1, depth)):
            continue
        done = play(make_world, order)
        if done < depth:
            dead.add(order[: done + 1])
        played += done == depth
    return played


END = [("work", None), ("ack", None)]
THREE = [*itertools.product(["grow", "abort"], range(3)), *END]
FORKING = [("fork", 0), ("fork", 1), *THREE, ("grow_all", None)]
CONFIGS = {
    num_blocks: PoolConfig(
        num_blocks=num_blocks, block_size=2, max_num_seqs=4, max_model_len=(num_blocks - 1) * 2
    )
    for num_blocks in (5, 20)
}


@pytest.mark.parametrize(
    ("num_blocks", "num_tokens", "at_least"), [(5, 3, 800), (20, 3, 800), (5, 4, 700), (20, 4, 700)]
)
def test_all_orders_keep_every_branch_bit_identical(num_blocks, num_tokens, at_least):
    played = enumerate_orders(lambda: World(RankKV(CONFIGS[num_blocks]), num_tokens, 3), THREE, 4)
    assert played > at_least


@pytest.mark.parametrize("num_blocks", CONFIGS)
def test_all_orders_with_forks_and_lists_keep_every_branch_bit_identical(num_blocks):
    played = enumerate_orders(lambda: World(RankKV(CONFIGS[num_blocks]), 3, 2), FORKING, 4)
    assert played > 1000


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_blocks", CONFIGS)
@pytest.mark.parametrize(("operations", "num_branches", "depth"), [(THREE, 3, 6), (FORKING, 2, 5)])
def test_all_longer_orders_keep_every_branch_bit_identical(
    num_blocks, operations, num_branches, depth
):
    played = enumerate_orders(
        lambda: World(RankKV(CONFIGS[num_blocks]), 3, num_branches), operations, depth
    )
    assert played > 10_000


@pytest.mark.parametrize("tamper", ["no copies", "no pins", "in place"])
def test_what_goes_wrong_shows(tamper, monkeypatch):
    """The negative control of the test above."""
    if tamper == "no copies":
        monkeypatch.setattr(World, "work", _work_without_copies)
    elif tamper == "no pins":
        monkeypatch.setattr("raykv.core.copy_on_write.SwapList.add", _add_without_pin)
    else:
        monkeypatch.setattr("raykv.core.copy_on_write.CopyOnWrite.due", lambda self, running: [])
    with pytest.raises(AssertionError):
        enumerate_orders(lambda: World(RankKV(CONFIGS[20]), 3, 3), THREE, 4)


_work = World.work


def _work_without_copies(world):
    memory = world.memory.copy()
    world.memory, kept = memory, world.memory
    pairs = dict(world.due)
    _work(world)
    for target, source in pairs.items():
        held = world.memory[target] == kept[source]
        world.memory[target][held] = GARBAGE


_add = SwapList.add


def _add_without_pin(self, source, target, *pins):
    for pin in pins:
        pin.release()
    _add(self, source, target, *pins)


class Branches(RuleBasedStateMachine):
    """The same over any sizes, with forks at any time and lists."""

    @initialize(
        num_blocks=st.integers(6, 16),
        block_size=st.integers(1, 5),
        num_tokens=st.integers(1, 12),
        rows=st.integers(4, 8),
        cache=st.booleans(),
    )
    def begin(self, num_blocks, block_size, num_tokens, rows, cache):
        config = PoolConfig(
            num_blocks=num_blocks + 12 // block_size,
            block_size=block_size,
            num_single_blocks=rows,
            max_num_seqs=rows - 1,
            enable_prefix_cache=cache,
            max_model_len=(num_blocks + 12 // block_size - 1) * block_size,
        )
        self.world = World(RankKV(config), num_tokens)

    def some(self, number):
        living = self.world.living()
        return living[number % len(living)][0]

    def is_alive(self):
        return hasattr(self, "world") and bool(self.world.living())

    @precondition(is_alive)
    @rule(number=st.integers(0, 99), write=st.booleans())
    def fork(self, number, write):
        self.world.fork(self.some(number))
        if write:
            self.grow([-1])

    @precondition(is_alive)
    @rule(numbers=st.lists(st.integers(0, 99), min_size=1, max_size=4))
    def grow(self, numbers):
        limit = self.world.kv.config.max_tokens_per_sequence
        chosen = dict.fromkeys(self.some(number) for number in numbers)
        short = [i for i in chosen if self.world.branches[i].num_tokens < limit]
        if short:
            self.world.grow(*short)

    @precondition(is_alive)
    @rule(number=st.integers(0, 99))
    def abort(self, number):
        self.world.abort(self.some(number))

    @precondition(is_alive)
    @rule(number=st.integers(0, 99))
    def preempt(self, number):
        """It comes back without its blocks, and with what the cache still has."""
        world, index = self.world, self.some(number)
        branch = world.branches[index]
        world.abort(index)
        if world.kv.allocate(branch):
            world.branches[index] = branch
            world.covered[index] = branch.num_tokens

    @precondition(lambda self: hasattr(self, "world"))
    @rule()
    def work(self):
        self.world.work()

    @precondition(lambda self: hasattr(self, "world"))
    @rule()
    def ack(self):
        self.world.ack()

    @invariant()
    def content_is_right(self):
        if hasattr(self, "world"):
            self.world.kv.check_integrity()
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.end()


TestBranches = Branches.TestCase
TestBranches.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@pytest.mark.nightly
class TestLongBranches(Branches.TestCase):
    settings = settings(max_examples=2000, stateful_step_count=100, deadline=None)
