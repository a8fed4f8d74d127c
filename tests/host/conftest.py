"""What the host tier's tests share."""

from __future__ import annotations

import pytest

from .host_world import World


@pytest.fixture(params=["lru", "lrfu"])
def world(request):
    world = World(9, 2, eviction=request.param)
    yield world
    world.check()
    world.drain()


@pytest.fixture
def one(world):
    return world.start()


@pytest.fixture
def other(world):
    return world.start()
