"""A pool over two raylets of one machine, of which one goes and another comes.

A script, for a process can be connected to one Ray at a time. Prints what it found as JSON.

Usage: two_raylets.py MODEL TEMP_DIR
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time

import ray
from ray.cluster_utils import Cluster

from raykv import BlockManagerPool, PoolConfig, SamplingParams, Sequence
from raykv.actors import launch

PROMPTS = [[7, 8, 9, i] for i in range(6)]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_tokens=250, ignore_eos=True, temperature=1.0, seed=4)
BOUND_S = 60.0
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


def main(model, folder):
    config = PoolConfig(
        dp_size=2,
        num_blocks=2000,
        block_size=4,
        max_num_seqs=8,
        model={"path": model},
        ray={"placement_strategy": "STRICT_SPREAD"},
    )
    with BlockManagerPool.local(config) as local:
        expected = tokens(local.generate(PROMPTS, PARAMS))
        expected_long = tokens(local.generate(PROMPTS, LONG))
    cluster = Cluster()
    try:
        head = cluster.add_node(include_dashboard=False, temp_dir=folder, **NODE)
        second = cluster.add_node(**NODE)
        ray.init(cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        found = {}
        with launch(config) as pool:
            nodes = nodes_of(pool)
            assert set(nodes) == {head.node_id, second.node_id}
            lost = nodes.index(second.node_id)
            outputs = pool.generate(PROMPTS, PARAMS)
            found["lost"] = lost
            found["ranks"] = sorted({output.dp_rank for output in outputs})
            found["equals_local"] = tokens(outputs) == expected
            found |= lose_a_node(pool, cluster, second, lost, expected_long)
            found |= get_a_node(pool, cluster, lost, expected)
            pool.check_integrity()
            found["used_blocks"] = pool.num_used_blocks()
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps(found))


def lose_a_node(pool, cluster, node, lost, expected):
    """Requests are under way on both ranks as the raylet of one is killed."""
    held = Sequence(range(50, 70))
    held.dp_rank = lost
    assert pool.allocate(held)
    outputs = []
    halves = ((0, PROMPTS[:3]), (1, PROMPTS[3:]))
    threads = [
        threading.Thread(
            target=lambda r=rank, p=part: outputs.append((r, pool.generate(p, LONG, dp_rank=r)))
        )
        for rank, part in halves
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(used > 20 for used in pool.num_used_blocks()))
    start = time.monotonic()
    cluster.remove_node(node, allow_graceful=False)
    wait_until(lambda: pool.ranks[lost].lost is not None)
    noticed_s = time.monotonic() - start
    for thread in threads:
        thread.join(BOUND_S)
    found = [output for _, part in sorted(outputs, key=lambda pair: pair[0]) for output in part]
    allocated = pool.allocate(held)
    rank = held.dp_rank
    pool.deallocate(held)
    return {
        "noticed_s": noticed_s,
        "long_equals_local": tokens(found) == expected,
        "long_ranks": [output.dp_rank for output in found],
        "failed_over": [output.num_failed_over for output in found],
        "sequence_went_to": rank if allocated else None,
        "alone": sorted({output.dp_rank for output in pool.generate(PROMPTS, PARAMS)}),
    }


def get_a_node(pool, cluster, lost, expected):
    """Another raylet joins, and Ray starts the rank there."""
    before = pool.ranks[lost].info.epoch
    start = time.monotonic()
    node = cluster.add_node(**NODE)
    wait_until(lambda: pool.ranks[lost].lost is None)
    outputs = pool.generate(PROMPTS, PARAMS, dp_rank=lost)
    return {
        "back_s": time.monotonic() - start,
        "is_later_epoch": pool.ranks[lost].info.epoch > before,
        "back_ranks": sorted({output.dp_rank for output in outputs}),
        "back_equals_local": tokens(outputs) == expected,
        "is_on_the_new_node": nodes_of(pool)[lost] == node.node_id,
    }


def nodes_of(pool):
    """Ray's ids of the nodes that the ranks run on."""
    return [ray.get(rank._actor.ready.remote(), timeout=BOUND_S)[1] for rank in pool.ranks]


def tokens(outputs):
    return [output.token_ids for output in outputs]


def wait_until(holds):
    deadline = time.monotonic() + BOUND_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


if __name__ == "__main__":
    main(*sys.argv[1:])
