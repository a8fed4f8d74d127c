"""Host tiers of two nodes: what one computed serves the other, and the copy is chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import run_cluster

SCRIPT = Path(__file__).with_name("two_tiers.py")
BOUND_S = 200


@pytest.mark.parametrize("transport", ["tcp", "object_store"])
def test_kv_of_one_node_serves_the_other(tiny_model, transport):
    found = run_cluster(SCRIPT, tiny_model, transport, bound_s=BOUND_S)
    assert found["equal"], found
    # All full blocks, with one token left to compute; of the other prompt 22 blocks are the same.
    assert found["cached"] == [0, 396, 88], found
    assert found["from_host"] == 396, found
    assert found["num_tiers"] == 2
    assert found["pinned"] == [0, 0]
