"""Ranks on two nodes: one node goes, and another one takes over its rank."""

from __future__ import annotations

from pathlib import Path

from .conftest import run_cluster

SCRIPT = Path(__file__).with_name("two_raylets.py")
BOUND_S = 240


def test_a_rank_and_a_node_may_go_and_a_new_node_takes_the_rank_over(tiny_model):
    found = run_cluster(SCRIPT, tiny_model, bound_s=BOUND_S)
    far = found.pop("far")
    near = 1 - far
    went_on = {
        "outputs": [near], "failed_over": [1], "near_failed_over": [0], "sequence_went_to": near,
    }  # fmt: skip
    assert found == {
        "local": [0, 1],
        "killed": went_on,
        "restarted": [far],
        "removed": went_on,
        "alone": [near],
        "far_is_lost": True,
        "moved": [far],
        "moved_to_the_new_node": True,
        "used_blocks": [0, 0],
    }
