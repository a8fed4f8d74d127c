"""A pool over two raylets of one machine: KV computed on one node serves the other.

A script, for a process can be connected to one Ray at a time. The last line is what it found, as
JSON.

Usage: two_tiers.py MODEL TEMP_DIR TRANSPORT
"""

from __future__ import annotations

import json
import logging
import sys
import time

import ray
from ray.cluster_utils import Cluster

from raykv import BlockManagerPool, PoolConfig, SamplingParams
from raykv.actors import launch

PROMPT = [3 + i % 90 for i in range(400)]
OTHER = [3 + i % 89 for i in range(400)]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
NODE = {"num_cpus": 1, "memory": 2**30, "object_store_memory": 80 * 2**20}


def main(model, folder, transport):
    config = PoolConfig(
        dp_size=2,
        num_blocks=400,
        block_size=4,
        max_num_seqs=4,
        model={"path": model},
        host={"num_blocks": 400, "transport": transport},
        ray={"placement_strategy": "STRICT_SPREAD"},
    )
    with BlockManagerPool.local(config.model_copy(update={"host": None, "dp_size": 1})) as local:
        expected = [generate(local, prompt, 0).token_ids for prompt in (PROMPT, OTHER)]
    cluster = Cluster()
    try:
        cluster.add_node(include_dashboard=False, temp_dir=folder, **NODE)
        cluster.add_node(**NODE)
        ray.init(cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        with launch(config) as pool:
            first = generate(pool, PROMPT, 0)
            wait_offloaded(pool, 0)
            second = generate(pool, PROMPT, 1)  # its node never saw this prompt
            other = generate(pool, OTHER, 1)
            pool.check_integrity()
            peers = pool.tiers[1].source_stats().result()["prefetches"]["sources"]["peers"]
            found = {
                "num_tiers": len(pool.tiers),
                "equal": [one.token_ids for one in (first, second, other)]
                == [expected[0], expected[0], expected[1]],
                "cached": [one.num_cached_tokens for one in (first, second, other)],
                "from_host": second.miss.num_host_tokens,
                "pinned": [stats.pinned for stats in pool.host_stats()],
                "peers": {name: str(value) for name, value in peers.items()},
            }
    finally:
        ray.shutdown()
        cluster.shutdown()
    sys.stdout.write(json.dumps(found) + "\n")


def generate(pool, prompt, dp_rank):
    [output] = pool.generate([prompt], PARAMS, dp_rank=dp_rank)
    return output


def wait_offloaded(pool, tier):
    deadline = time.monotonic() + 20
    while pool.num_blocks_in_host_prefix_cache()[tier] < len(PROMPT) // 4:
        assert time.monotonic() < deadline, pool.host_stats()
        time.sleep(0.01)


main(*sys.argv[1:])
