"""Pools of every kind for one and the same test."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import time

import pytest

from raykv import BlockManagerPool, PoolConfig
from raykv.errors import RankUnavailableError
from raykv.hierarchy import HierarchyBlockManagerPool
from raykv.testing import loopback_pool

KINDS = [
    "local", "loopback", "ray", "hierarchy", "loopback-hierarchy",
    pytest.param("ray-hierarchy", marks=pytest.mark.nightly),
]  # fmt: skip
MEMORY = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "device": "cpu"}
SETTINGS = {"num_blocks": 10, "block_size": 4, "num_single_blocks": 9}


def transfer_after_release(pool):
    """What a scheduler does between its steps, here until nothing is pinned any more."""
    release = pool._release

    def release_and_transfer(*args, **kwargs):
        try:
            release(*args, **kwargs)
        finally:
            with contextlib.suppress(RankUnavailableError):  # the pool was closed
                while not pool.transfer_blocks().is_idle:
                    time.sleep(0.0005)

    pool._release = release_and_transfer


MAKERS = {
    "local": BlockManagerPool.local,
    "loopback": loopback_pool,
    "hierarchy": HierarchyBlockManagerPool.local,
    "loopback-hierarchy": loopback_pool,
}


@pytest.fixture(scope="module")
def _ray():
    """A local Ray. Its directory has a short name, for sockets lie in it."""
    import ray  # noqa: PLC0415 - for Ray's variants only

    folder = tempfile.mkdtemp(prefix="rk", dir="/tmp")
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        _node_ip_address="127.0.0.1",
        _temp_dir=folder,
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=KINDS)
def kind(request):
    if request.param.startswith("ray"):
        request.getfixturevalue("_ray")
    return request.param


@pytest.fixture
def make_pool(kind):
    """Makes pools whose books are checked when the test is over."""
    made = []

    def make(**settings):
        if "hierarchy" in kind:
            if not settings.get("enable_prefix_cache", True):
                pytest.skip("without a cache there is no host tier")
            settings = {"memory": MEMORY, "host": {"num_blocks": 65}} | settings
        config = PoolConfig(**SETTINGS | settings)
        if kind.startswith("ray"):
            from raykv.actors import launch  # noqa: PLC0415 - for Ray's variants only

            pool = launch(config)
        else:
            pool = MAKERS[kind](config)
        if "hierarchy" in kind:
            transfer_after_release(pool)
        made.append(pool)
        return pool

    yield make
    for pool in made:
        pool.check_integrity()
        pool.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The folder of a random Llama, without tokenizer."""
    import torch  # noqa: PLC0415 - seconds
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("tiny")
    with torch.random.fork_rng():
        torch.manual_seed(20)
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=1024,
                initializer_range=0.2,
            )
        ).save_pretrained(folder)  # fmt: skip
    return str(folder)
