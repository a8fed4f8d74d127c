"""Which checkpoints sequences leave behind, and when they leave none.

Each test runs with live states in slots, and with live states apart from compressed checkpoints.
"""

from __future__ import annotations

import pytest

from .state_world import RULES, SIZE, checkpoints, only, text

# -- when checkpoints are taken -------------------------------------------------------------------


def test_every_stride(make_world):
    world = make_world(stride_tokens=2 * SIZE, **only("at_stride"))
    sequence = world.admit(text(18))
    assert sequence.kv_state.checkpoint_stops == ()
    seen = []
    while (stop := world.kv.next_checkpoint(sequence)) is not None:
        seen.append(stop)
        world.compute(sequence, stop - sequence.kv_state.num_computed_tokens)
        world.kv.cache(sequence)
        world.copy()
    assert seen == checkpoints(world) == [8, 16]
    world.compute(sequence)
    world.decode(sequence, text(9))
    assert checkpoints(world) == [8, 16, 24], "generation passes boundaries, too"


@pytest.mark.parametrize(
    ("num_tokens", "stops"), [(3, ()), (4, (4,)), (5, (4,)), (8, (4, 8)), (11, (8,)), (12, (8, 12))]
)
def test_at_the_end_of_a_prompt(make_world, num_tokens, stops):
    """The last boundary that an equal prompt can use, and the last that a longer one can."""
    world = make_world(**only("at_prompt_end"))
    sequence = world.admit(text(num_tokens))
    assert sequence.kv_state.checkpoint_stops == stops
    world.prefill(sequence)
    assert tuple(checkpoints(world)) == stops
    world.decode(sequence, text(9))
    world.release(sequence)
    assert tuple(checkpoints(world)) == stops


def test_where_a_prompt_branches_off(make_world):
    """The second sequence that shares a prefix leaves what the third one uses."""
    world = make_world(match="deepest", **only("at_branch"))
    prefix = text(9)
    assert world.serve([*prefix, *text(7, 100)]) == 0
    assert checkpoints(world) == []
    second = world.admit([*prefix, *text(7, 200)])
    assert second.kv_state.num_computed_tokens == 0
    assert second.kv_state.checkpoint_stops == (8,)
    world.prefill(second)
    world.release(second)
    assert checkpoints(world) == [8]
    third = world.admit([*prefix, *text(7, 300)])
    assert third.kv_state.num_computed_tokens == 8
    assert third.kv_state.checkpoint_stops == ()
    world.prefill(third)


def test_at_the_end_of_what_was_generated(make_world):
    world = make_world(match="deepest", **only("at_generation_end"))
    world.serve(text(6), text(7, 50))
    assert checkpoints(world) == [12], "of 13 tokens"
    assert world.hit([*text(6), *text(7, 50), 1, 2]) == 12


@pytest.mark.parametrize(
    ("rule", "made"),
    [
        (None, [8, 12, 16, 20, 28]),
        ("at_stride", [8, 12, 20, 28]),
        ("at_prompt_end", [8, 16, 28]),
        ("at_generation_end", [8, 12, 16, 20]),
        ("at_branch", [12, 16, 20, 28]),
    ],
)
def test_each_rule_can_be_switched_off(make_world, rule, made):
    """Two prompts of 13 and 22 tokens with 9 in common; the second one generates 9."""
    rules = only(*set(RULES) - {rule})
    world = make_world(match="deepest", stride_tokens=4 * SIZE, **rules)
    world.serve([*text(9), *text(4, 50)])
    world.serve([*text(9), *text(13, 100)], text(9, 200))
    assert checkpoints(world) == made


def test_none_at_all(make_world):
    world = make_world(**only())
    sequence = world.admit(text(16))
    assert world.kv.next_checkpoint(sequence) is None
    world.prefill(sequence)
    world.decode(sequence, text(8))
    world.release(sequence)
    assert checkpoints(world) == []
    assert world.kv.linear_state.num_committed_total == 0


def test_what_a_resumed_sequence_began_with_is_not_saved_again(make_world):
    world = make_world()
    world.serve(text(8))
    total = world.kv.linear_state.num_committed_total
    sequence = world.admit(text(9))
    assert sequence.kv_state.num_computed_tokens == 8
    world.copy()
    world.kv.cache(sequence)
    assert world.copy() == []
    world.release(sequence)
    assert world.kv.linear_state.num_committed_total == total


def test_equal_prefixes_are_saved_once(make_world):
    """Two that compute the same side by side; the second one's copy is not even asked for."""
    world = make_world(**only("at_prompt_end"))
    pair = [world.admit(text(6)) for _ in range(2)]
    for one in pair:
        world.compute(one, 4)
    for one in pair:
        world.kv.cache(one)
    assert len(world.copy()) == 1
    assert world.kv.linear_state.num_coalesced_total == 1
    world.kv.cache(pair[1])
    assert world.copy() == []
    assert checkpoints(world) == [4]


# -- when none is taken ---------------------------------------------------------------------------


def test_a_copy_that_is_fetched_too_late_makes_no_checkpoint(make_world):
    world = make_world(**only("at_prompt_end"))
    sequence = world.admit(text(10))
    world.compute(sequence, 8)
    world.kv.cache(sequence)
    assert world.kv.linear_state.num_pending == 1
    world.compute(sequence, 1, how="late")
    assert world.take() == [], "the state has moved on"
    assert world.kv.linear_state.num_pending == 0
    world.acknowledge()
    assert checkpoints(world) == []


def test_nothing_is_found_before_the_copy_is_acknowledged(make_world):
    world = make_world(match="deepest", **only("at_prompt_end"))
    sequence = world.admit(text(10))
    world.compute(sequence, 8)
    world.kv.cache(sequence)
    assert world.hit(text(10), driver="other") == 0, "it is due"
    world.take()
    assert world.hit(text(10), driver="other") == 0, "it is under way"
    world.execute()
    assert world.hit(text(10), driver="other") == 0, "nobody said that it is done"
    world.acknowledge()
    assert world.hit(text(10), driver="other") == 8


def test_not_at_a_place_that_is_no_boundary(make_world):
    world = make_world()
    sequence = world.admit(text(10))
    for count in (3, 2, 2):
        world.compute(sequence, count)
        world.kv.cache(sequence)
        assert world.copy() == []
    assert checkpoints(world) == []


@pytest.mark.parametrize("rule", RULES)
def test_not_by_a_sequence_that_runs_across_a_reset(make_world, rule):
    world = make_world(match="deepest", **only(rule))
    sequence = world.admit(text(17))
    world.compute(sequence, 4)
    world.kv.cache(sequence)
    world.reset()
    assert world.kv.next_checkpoint(sequence) is None
    world.copy()
    world.prefill(sequence)
    world.decode(sequence, text(3))
    world.release(sequence)
    assert checkpoints(world) == []
    assert world.hit(text(17)) == 0


def test_nor_by_its_forks(make_world):
    world = make_world()
    parent = world.admit(text(8))
    world.compute(parent, 5)
    world.reset()
    child = world.fork(parent)
    world.prefill(child)
    world.prefill(parent)
    world.decode(child, text(4))
    for one in (parent, child):
        world.release(one)
    assert checkpoints(world) == []


def test_nothing_of_before_a_reset_is_ever_matched(make_world):
    """Pending, rolling and pinned ones included."""
    world = make_world()
    world.serve(text(12))
    reader = world.admit(text(13))
    assert reader.kv_state.num_computed_tokens == 12
    pending = world.admit(text(9, 100))
    world.compute(pending, 8)
    world.kv.cache(pending)
    world.take()
    world.execute()
    world.reset()
    world.acknowledge()
    assert checkpoints(world) == []
    assert world.hit(text(13)) == world.hit(text(9, 100)) == 0


def test_not_under_weights_that_changed_meanwhile(make_world):
    world = make_world(match="deepest")
    sequence = world.admit(text(13))
    world.compute(sequence, 4)
    world.kv.cache(sequence)
    world.copy()
    assert checkpoints(world) == [4]
    world.kv.begin_version(1)
    assert world.kv.next_checkpoint(sequence) is None
    world.prefill(sequence)
    world.decode(sequence, text(3))
    world.release(sequence)
    assert checkpoints(world) == [4], "only what the earlier weights computed"
    assert world.hit([*text(13), *text(3)]) == 0


def test_not_without_a_prefix_cache(make_world):
    world = make_world(enable_prefix_cache=False)
    sequence = world.admit(text(8))
    assert world.kv.next_checkpoint(sequence) is None
    world.prefill(sequence)
    world.decode(sequence, text(4))
    assert sequence.kv_state.num_computed_tokens == 12
    world.release(sequence)
    cache = world.kv.linear_state
    assert cache.num_checkpoints == cache.num_committed_total == cache.num_pending == 0


def test_not_of_what_was_aborted(make_world):
    world = make_world(match="deepest", **only("at_generation_end"))
    sequence = world.admit(text(6))
    world.prefill(sequence)
    world.decode(sequence, text(6))
    world.release(sequence, publish=False)
    assert checkpoints(world) == []
    assert world.kv.linear_state.num_free_slots == world.kv.linear_state.num_total_slots


def test_where_all_slots_are_live_saves_are_skipped_and_counted(make_world):
    world = make_world(num_slots=3, max_num_seqs=2)
    first, second = (world.admit(text(10, 100 * i)) for i in range(2))
    world.prefill(first)
    stats = world.kv.rank_stats()
    assert stats.state_skipped_total == 2
    assert stats.num_checkpoints == stats.state_checkpoints_total == 0
    world.release(second, publish=False)
    again = world.admit(text(10))
    assert again.kv_state.num_computed_tokens == 0
    report = world.kv.explain(again)
    assert (report.reason, report.num_hit_tokens, report.token_position) == ("no_state_slot", 0, 8)


def test_a_copy_that_failed_makes_no_checkpoint(make_world):
    world = make_world(**only("at_prompt_end"))
    sequence = world.admit(text(10))
    world.compute(sequence, 8)
    world.kv.cache(sequence)
    assert len(world.kv.take_state_saves("")) == 1
    world.kv.fail_state_transfers("")
    cache = world.kv.linear_state
    assert cache.num_pending == cache.num_checkpoints == 0
    assert cache.num_skipped_total == 1
    world.kv.cache(sequence)
    world.copy()
    assert checkpoints(world) == [8], "the next attempt is another one"


def test_a_copy_for_a_fork_waits_while_saves_are_fetched(make_world):
    """Saves may fail; a sequence whose state was not copied must not go on."""
    world = make_world()
    parent = world.admit(text(8))
    world.compute(parent, 4)
    child = world.fork(parent)
    world.kv.cache(parent)
    saves = world.kv.take_state_saves("")
    assert [source for source, _ in saves] == [world.address(parent)]
    assert world.address(child) not in {target for _, target in saves}
    world.kv.fail_state_transfers("")
    assert world.take() == [(world.address(parent), world.address(child))]
    world.execute()
    world.check()


def test_contiguous_keeps_nothing_that_it_could_not_use(make_world):
    """No checkpoint off the stride, so no slot and no cut for one."""
    world = make_world(match="contiguous", stride_tokens=2 * SIZE)
    first = world.admit(text(14))
    assert first.kv_state.checkpoint_stops == ()
    world.prefill(first)
    world.decode(first, text(7))
    assert world.kv.linear_state.num_pending == 0
    world.release(first)
    assert checkpoints(world) == [8, 16]
    second = world.admit([*text(14), 99, 98])
    assert second.kv_state.num_computed_tokens == 8
    world.prefill(second)
