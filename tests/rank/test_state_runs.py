"""Hits that rest on a run of checkpoints: which of them make room for others, and which stay.

Each test runs with live states in slots, and with live states apart from compressed checkpoints.
"""

from __future__ import annotations

import pytest

from raykv.rank_states import RankStates

from .state_world import checkpoints, fill, only, text


def hits_among_others(world):
    """What a prefix that is used again and again hits, while others come once."""
    world.serve(text(24))
    hits = []
    for i in range(1, 10):
        hits.append(world.hit(text(25)))
        world.serve(text(9, 1000 * i))
    return hits


@pytest.mark.parametrize("match", ["contiguous", "deepest"])
def test_a_prefix_that_is_in_use_keeps_what_its_hits_rest_on(make_world, match):
    """Under contiguous that is every checkpoint from its start, though only the last is read."""
    assert hits_among_others(make_world(num_blocks=200, match=match)) == [24] * 9


def test_without_refreshing_all_of_them_it_would_lose_its_start(make_world, monkeypatch):
    monkeypatch.setattr(RankStates, "_refresh", lambda *_: None)
    assert hits_among_others(make_world(num_blocks=200))[-1] == 0


def test_of_a_run_of_checkpoints_the_deepest_go_first(make_world):
    world = make_world(num_slots=8, **only("at_stride"))
    world.serve(text(24))
    assert checkpoints(world) == [4, 8, 12, 16, 20, 24]
    fill(world, 3)
    assert checkpoints(world) == [4, 8, 12, 16]


def test_a_prompt_with_more_strides_than_slots_keeps_its_start(make_world):
    world = make_world(num_slots=6, **only("at_stride"))
    world.serve(text(40))
    assert checkpoints(world)[:3] == [4, 8, 12]
    assert world.hit(text(40)) == 12
