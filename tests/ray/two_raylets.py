"""A pool over two raylets of one machine: a rank is killed, then its raylet; another raylet comes.

A script, for a process can be connected to one Ray at a time. The last line is what it found, as
JSON.

Usage: two_raylets.py MODEL TEMP_DIR
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time

import ray
from ray.cluster_utils import Cluster

from raykv import BlockManagerPool, PoolConfig, SamplingParams, Sequence
from raykv.actors import launch

PROMPTS = [[7, 8, 9, i] for i in range(6)]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_tokens=500, ignore_eos=True, temperature=1.0, seed=4)
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
        expected = [tokens(local.generate(PROMPTS, params)) for params in (PARAMS, LONG)]
    cluster = Cluster()
    try:
        head = cluster.add_node(include_dashboard=False, temp_dir=folder, **NODE)
        second = cluster.add_node(**NODE)
        ray.init(cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        with launch(config) as pool:
            nodes = nodes_of(pool)
            far = nodes.index(second.node_id)
            assert nodes[1 - far] == head.node_id
            found = {"far": far, "local": check(pool.generate(PROMPTS, PARAMS), expected[0])}
            found["killed"] = lose(
                pool, far, expected[1], lambda: os.kill(pool.ranks[far].info.pid, signal.SIGKILL)
            )
            await_return(pool, far)
            found["restarted"] = check(pool.generate(PROMPTS, PARAMS, dp_rank=far), expected[0])
            found["removed"] = lose(
                pool, far, expected[1], lambda: cluster.remove_node(second, allow_graceful=False)
            )
            # No other node has room for the rank: what there is serves everything.
            found["alone"] = check(pool.generate(PROMPTS, PARAMS), expected[0])
            found["far_is_lost"] = pool.ranks[far].lost is not None
            third = cluster.add_node(**NODE)
            await_return(pool, far)
            found["moved"] = check(pool.generate(PROMPTS, PARAMS, dp_rank=far), expected[0])
            found["moved_to_the_new_node"] = nodes_of(pool)[far] == third.node_id
            pool.check_integrity()
            found["used_blocks"] = pool.num_used_blocks()
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps(found))  # noqa: T201 - whoever runs it reads this


def lose(pool, far, expected, how):
    """What becomes of requests under way on both ranks, and of a sequence, if one rank goes."""
    held = Sequence(range(50, 70))
    held.dp_rank = far
    assert pool.allocate(held)
    outputs = [[], []]

    def generate(rank):
        outputs[rank] = pool.generate(PROMPTS[3 * rank : 3 * rank + 3], LONG, dp_rank=rank)

    threads = [threading.Thread(target=generate, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(used > 10 for used in pool.num_used_blocks()))
    session = pool.ranks[far].session
    how()
    wait_until(lambda: pool.ranks[far].session > session)
    assert pool.allocate(held)
    went_to = held.dp_rank
    pool.deallocate(held)
    for thread in threads:
        thread.join(BOUND_S)
        assert not thread.is_alive(), "requests went on within bounds"
    failed_over = [sorted({output.num_failed_over for output in part}) for part in outputs]
    return {
        "outputs": check([*outputs[0], *outputs[1]], expected),
        "failed_over": failed_over[far],
        "near_failed_over": failed_over[1 - far],
        "sequence_went_to": went_to,
    }


def await_return(pool, rank):
    wait_until(lambda: pool.ranks[rank].lost is None)


def check(outputs, expected):
    """Which ranks served it, if the tokens are right."""
    assert tokens(outputs) == expected
    return sorted({output.dp_rank for output in outputs})


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
