"""Worlds that are drained and checked when a test is over."""

from __future__ import annotations

import pytest

from .tier_world import World


@pytest.fixture(params=["local", "loopback"])
def kind(request):
    return request.param


@pytest.fixture
def make_world(kind):
    """Makes worlds of both kinds."""
    made = []

    def make(**settings):
        made.append(World(kind, **settings))
        return made[-1]

    yield make
    for world in made:
        world.drain()
        world.close()


@pytest.fixture
def world(make_world):
    return make_world()
