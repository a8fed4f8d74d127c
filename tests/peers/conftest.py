"""What the tests of peers share."""

from __future__ import annotations

import pytest

from .nodes import Node


@pytest.fixture
def nodes():
    nodes = [Node("a"), Node("b")]
    yield nodes
    for node in nodes:
        assert node.num_pinned == 0, "a ticket was not given back"
        node.close()


@pytest.fixture
def node(nodes):
    return nodes[0]
