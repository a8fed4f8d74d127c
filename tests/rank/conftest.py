"""What tests of a rank share."""

from __future__ import annotations

import pytest

from .state_world import StateWorld, make_rank


@pytest.fixture(params=[False, True], ids=["exact", "split"])
def make_world(request):
    """Makes worlds that are checked, emptied and checked again when the test is over."""
    made = []

    def make(**settings):
        made.append(StateWorld(make_rank(**settings), split=request.param))
        return made[-1]

    yield make
    for world in made:
        world.check()
        for sequence in world.held():
            world.release(sequence)
        for driver in list(world.kv.states._copies._owed):
            world.copy(driver)
        world.check()
        world.check_drained()
