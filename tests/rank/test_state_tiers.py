"""Checkpoints that a rank offloads and loads: pins, places to load to, who goes on from them."""

from __future__ import annotations

import gc

import pytest

from raykv.core import Namespace, Sequence
from raykv.tiering.state_tiers import StateTiers

from .state_world import (
    SIZE,
    StateWorld,
    cells,
    checkpoints,
    fill,
    forget_checkpoint,
    make_rank,
    only,
    text,
)

SPACE = Namespace()


@pytest.fixture(params=[False, True], ids=["slots", "split"])
def make_world(request):
    worlds = []

    def make(**settings):
        worlds.append(StateWorld(make_rank(**settings), split=request.param))
        return worlds[-1]

    yield make
    for world in worlds:
        gc.collect()
        world.check()


def tiers_of(world):
    return StateTiers(world.kv.states, world.kv.block_manager)


def pinned(world, tokens, num_tokens=None):
    """The boundaries that a rank would offload, which are those of right states."""
    pins = tiers_of(world).pin_checkpoints(tokens, SPACE, num_tokens)
    for one in pins:
        assert world.memory[one.slot] == cells(tokens, SPACE, 0, one.num_tokens, 0, 0)
        one.release()
    return [one.num_tokens for one in pins]


def load(world, target, tokens):
    """What the copier does: the state of a sequence's first tokens comes into the slot."""
    world.memory[target.slot] = cells(tokens, SPACE, 0, target.num_tokens, 0, 0)


def served(world, num_tokens=17):
    """A rank that has the KV of a prompt, and no checkpoint."""
    world.serve(text(num_tokens))
    for end in checkpoints(world):
        forget_checkpoint(world, end)


def begin(world, num_tokens=17, at=16):
    sequence = world.admit(text(num_tokens))
    return sequence, tiers_of(world).begin_load(sequence, at)


def finish(world, sequence, target, *, ok=True):
    """As the engine does, its sequence's KV being there; what it then must hold is known."""
    goes_on = tiers_of(world).finish_load(sequence, target, ok=ok)
    if goes_on:
        world.begin(sequence)
    world.overwrite()
    return goes_on


# -- what is worth offloading ----------------------------------------------------------------------


def test_ends_are_and_strides_are_not_until_somebody_has_resumed_from_them(make_world):
    world = make_world(match="deepest")
    world.serve(text(14), [50, 51, 52])
    tokens = [*text(14), 50, 51, 52, 53]
    assert checkpoints(world) == [4, 8, 12, 16]
    assert pinned(world, tokens) == [16, 12]
    assert pinned(world, tokens, 15) == [12]
    assert world.hit([*text(8), 99]) == 8
    assert pinned(world, tokens) == [16, 12, 8]
    assert pinned(world, [*text(9), 99, 99, 99]) == [8]
    assert pinned(world, text(8, 100)) == pinned(world, []) == []


def test_contiguous_hits_need_all_strides(make_world):
    world = make_world(match="contiguous")
    world.serve(text(14))
    assert pinned(world, text(14)) == [12, 8, 4]


def test_what_a_release_leaves_is_among_them(make_world):
    """The slot itself at a boundary, else the copy of the last one."""
    world = make_world(match="deepest", **only("at_generation_end"))
    for generated in (3, 4):
        world.serve(text(5), text(generated, 50))
        assert pinned(world, [*text(5), *text(generated, 50)]) == [8]
        forget_checkpoint(world, 8)


def test_another_namespace_and_an_equal_name_are_not(make_world, monkeypatch):
    world = make_world(match="deepest")
    world.serve(text(8))
    tiers = tiers_of(world)
    assert tiers.pin_checkpoints(text(8), Namespace(tenant="a")) == []
    [name] = [
        name
        for name, one in world.kv.linear_state.slots.committed.items()
        if one.prefix.num_tokens == 8
    ]
    monkeypatch.setattr(type(tiers._hasher), "names", lambda *_, **__: [b"", name])
    assert [one.num_tokens for one in tiers.pin_checkpoints(text(8), SPACE)] == [8]
    assert tiers.pin_checkpoints(text(8, 100), SPACE) == []


def test_a_pinned_checkpoint_stays_as_it_is(make_world):
    world = make_world(num_slots=4, max_num_seqs=3, match="deepest", **only("at_prompt_end"))
    world.serve(text(5))
    [pin] = tiers_of(world).pin_checkpoints(text(5), SPACE)
    running = fill(world)
    assert len(running) == 2
    assert world.memory[pin.slot] == cells(text(5), SPACE, 0, 4, 0, 0)
    pin.release()
    pin.release()
    assert len(fill(world)) == 1
    assert checkpoints(world) == []


# -- loading ---------------------------------------------------------------------------------------


def test_a_sequence_goes_on_from_what_was_loaded_and_so_do_others(make_world):
    world = make_world(match="deepest")
    served(world)
    sequence, target = begin(world)
    assert sequence.kv_state.num_computed_tokens == 0
    assert world.kv.explain(sequence).reason == "no_checkpoint"
    assert not target.existing
    load(world, target, text(17))
    assert checkpoints(world) == [], "it cannot be found before"
    assert finish(world, sequence, target)
    assert sequence.kv_state.num_computed_tokens == 16
    assert world.kv.explain(sequence).reason != "no_checkpoint"
    world.check()
    world.compute(sequence)  # compares the state that it begins with
    world.release(sequence)
    assert world.hit(text(17)) == 16
    world.check_drained()


def test_a_wrong_state_shows(make_world):
    """The comparison above can fail."""
    world = make_world(match="deepest")
    served(world)
    sequence, target = begin(world)
    load(world, target, text(17, 100))
    assert finish(world, sequence, target)
    with pytest.raises(AssertionError):
        world.compute(sequence)
    load(world, target, text(17))  # or the world's check at the end fails, too
    world.memory[world.address(sequence)] = world.memory[target.slot]
    world.compute(sequence)


def test_it_takes_the_place_of_a_copy_that_is_due(make_world):
    world = make_world(match="deepest")
    world.serve(text(17))
    for end in (8, 12, 16):
        forget_checkpoint(world, end)
    sequence, target = begin(world)
    assert sequence.kv_state.num_computed_tokens == 4
    load(world, target, text(17))
    assert finish(world, sequence, target)
    assert world.take() == [(target.slot, world.address(sequence))]
    world.execute()
    world.acknowledge()
    world.compute(sequence)


def test_while_a_copy_is_under_way_it_is_too_late_and_then_it_is_not(make_world):
    world = make_world(match="deepest")
    world.serve(text(17))
    for end in (8, 12, 16):
        forget_checkpoint(world, end)
    sequence, target = begin(world)
    world.take()
    load(world, target, text(17))
    tiers = tiers_of(world)
    assert not tiers.can_resume_at(sequence, 16)
    assert not finish(world, sequence, target)
    assert sequence.kv_state.num_computed_tokens == 4
    assert checkpoints(world) == [4, 16], "it is there for others"
    world.execute()
    world.acknowledge()
    assert tiers.can_resume_at(sequence, 16)
    assert tiers.resume(sequence, 16)
    world.begin(sequence)
    world.compute(sequence)
    assert not tiers.can_resume_at(sequence, 16), "it has computed"


def test_who_has_computed_or_is_gone_does_not_go_on_from_it(make_world):
    world = make_world(match="deepest")
    served(world)
    sequence, target = begin(world)
    world.compute(sequence, 4)
    load(world, target, text(17))
    assert not finish(world, sequence, target)
    assert sequence.kv_state.num_computed_tokens == 4
    world.compute(sequence)
    world.release(sequence, publish=False)
    assert checkpoints(world) == [16]
    assert not tiers_of(world).can_resume_at(sequence, 16)
    assert world.hit(text(17)) == 16


def test_nor_does_who_has_no_blocks_for_its_kv(make_world):
    world = make_world(match="deepest")
    world.serve(text(9))
    sequence = Sequence(text(17))
    world.kv.allocate_shared(sequence)
    assert sequence.kv_state.num_blocks == 2
    world.begin(sequence)
    target = tiers_of(world).begin_load(sequence, 16)
    load(world, target, text(17))
    assert not finish(world, sequence, target)
    assert world.allocate([sequence])
    assert tiers_of(world).resume(sequence, 16)
    world.begin(sequence)
    world.compute(sequence)


def test_a_load_that_failed_or_was_dropped_leaves_nothing(make_world):
    world = make_world(match="deepest")
    served(world)
    for drop in (False, True):
        sequence, target = begin(world)
        assert world.kv.linear_state.num_pending == 1
        if drop:
            del target
            gc.collect()
        else:
            assert not finish(world, sequence, target, ok=False)
        assert world.kv.linear_state.num_pending == 0
        world.prefill(sequence)
        world.release(sequence, publish=False)
        for end in checkpoints(world):
            forget_checkpoint(world, end)


def test_it_outlives_the_sequence_that_it_is_for(make_world):
    world = make_world(num_slots=4, max_num_seqs=3, match="deepest", **only("at_prompt_end"))
    served(world)
    sequence, target = begin(world)
    world.release(sequence, publish=False)
    assert len(fill(world)) == 2, "its slot goes to nobody"
    load(world, target, text(17))
    assert not finish(world, None, target)
    assert checkpoints(world) == [16]


def test_one_that_waits_in_line_is_loaded_for_too(make_world):
    world = make_world(match="deepest")
    served(world)
    target = tiers_of(world).begin_load(Sequence(text(17)), 16)
    load(world, target, text(17))
    assert not finish(world, None, target)
    assert world.hit(text(17)) == 16


def test_what_is_there_is_not_loaded_and_stays_there(make_world):
    world = make_world(num_slots=4, max_num_seqs=3, match="deepest", **only("at_prompt_end"))
    world.serve(text(17))
    sequence = Sequence(text(17))
    target = tiers_of(world).begin_load(sequence, 16)
    assert target.existing
    assert len(fill(world)) == 2
    assert checkpoints(world) == [16]
    assert not finish(world, None, target)
    assert len(fill(world)) == 1


def test_none_where_there_is_no_slot_or_somebody_is_at_it(make_world):
    world = make_world(num_slots=4, max_num_seqs=3, match="deepest")
    tiers = tiers_of(world)
    sequence, target = begin(world)
    assert tiers.begin_load(Sequence(text(17)), 16) is None, "it is being loaded"
    fill(world)
    assert tiers.begin_load(Sequence(text(17)), 12) is None, "there is no slot"
    assert not finish(world, sequence, target, ok=False)
    assert tiers.begin_load(Sequence(text(17)), 12) is not None


def test_a_reset_meanwhile_leaves_nothing(make_world):
    world = make_world(match="deepest")
    served(world)
    sequence, target = begin(world)
    load(world, target, text(17))
    world.reset()
    assert not finish(world, sequence, target)
    assert sequence.kv_state.num_computed_tokens == 0
    assert checkpoints(world) == []
    assert world.kv.linear_state.num_pending == 0


def test_a_fork_of_who_goes_on_from_elsewhere_keeps_its_own_state(make_world):
    """The child's copy is of the state that its parent had when it was forked."""
    world = make_world(match="deepest")
    world.serve(text(17))
    for end in (8, 12, 16):
        forget_checkpoint(world, end)
    parent, target = begin(world)
    world.copy()
    child = world.fork(parent)
    load(world, target, text(17))
    assert finish(world, parent, target)
    late = world.fork(parent)
    world.copy()
    for one, num_computed in ((parent, 16), (child, 4), (late, 16)):
        assert one.kv_state.num_computed_tokens == num_computed
        world.compute(one)


def test_contiguous_loads_at_strides_and_hits_need_those_before(make_world):
    world = make_world(match="contiguous", stride_tokens=2 * SIZE)
    served(world)
    tiers = tiers_of(world)
    assert tiers.step_tokens == 8
    with pytest.raises(ValueError, match="a multiple of 8 tokens"):
        tiers.begin_load(Sequence(text(17)), 12)
    sequence, target = begin(world)
    load(world, target, text(17))
    assert finish(world, sequence, target)
    world.compute(sequence)
    world.release(sequence)
    assert world.hit(text(17)) == 0, "the run has a gap at 8"
    target = tiers.begin_load(Sequence(text(17)), 8)
    load(world, target, text(17))
    assert not finish(world, None, target)
    assert world.hit(text(17)) == 16


@pytest.mark.parametrize("num_tokens", [0, -4, 6, 8, 12])
def test_a_token_is_left_and_blocks_are_whole(make_world, num_tokens):
    world = make_world(match="deepest")
    with pytest.raises(ValueError, match=f"at {num_tokens}: load one at a multiple of 4"):
        tiers_of(world).begin_load(Sequence(text(8)), num_tokens)
