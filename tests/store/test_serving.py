"""A real model is served from a store: across restarts, and while the store dies or stalls."""

from __future__ import annotations

import threading
import time

import pytest

from raykv import BlockManagerPool, HierarchyBlockManagerPool, PoolConfig, SamplingParams, Sequence

BLOCK, WAIT_S = 4, 20
PROMPTS = [[3 + (7 * i + j * (i + 2)) % 90 for j in range(60)] for i in range(6)]
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A random Llama on disk, without tokenizer."""
    import torch  # noqa: PLC0415 - seconds, for those who need it
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.15,
    )
    folder = tmp_path_factory.mktemp("model") / "tiny"
    with torch.random.fork_rng():
        torch.manual_seed(4)
        LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def expected(model):
    """Outputs without any cache."""
    config = make_config(model, None, host=None, num_blocks=400, enable_prefix_cache=False)
    with BlockManagerPool.local(config) as pool:
        return [output.token_ids for output in pool.generate(PROMPTS, PARAMS)]


def make_config(model, store, **settings):
    settings = {"num_blocks": 40, "host": {"num_blocks": 200}, **settings}
    return PoolConfig(
        block_size=BLOCK, max_num_seqs=2, model={"path": model}, store=store, **settings
    )


def serve(pool):
    outputs = [pool.generate([prompt], PARAMS)[0] for prompt in PROMPTS]
    return [one.token_ids for one in outputs], [one.num_cached_tokens for one in outputs]


def drain(pool):
    """Wait until all that was computed is on the host, and in the store."""
    deadline = time.monotonic() + WAIT_S
    while pool.stats().total.num_offloading_blocks or not pool.ranks[0].kv.tier.is_idle:
        assert time.monotonic() < deadline, pool.stats()
        time.sleep(0.005)
    assert pool.tiers[0].drain(WAIT_S).result()


def test_a_pool_that_starts_again_finds_its_kv_in_the_store(model, expected, tmp_path):
    config = make_config(model, {"type": "disk", "path": str(tmp_path)})
    with HierarchyBlockManagerPool.local(config) as pool:
        assert serve(pool) == (expected, [0] * 6)
        drain(pool)
    with HierarchyBlockManagerPool.local(config) as pool:
        outputs, cached = serve(pool)
        assert outputs == expected
        assert cached == [56] * 6  # all full blocks, with a token left to compute
        pool.check_integrity()
        # After a reset nothing of before is found, not in the store either ...
        pool.reset_prefix_cache()
        assert serve(pool) == (expected, [0] * 6)
        drain(pool)
    # ... other weights have other names ...
    other = make_config(model, {"type": "disk", "path": str(tmp_path), "weights_id": "other"})
    with HierarchyBlockManagerPool.local(other) as pool:
        assert serve(pool) == (expected, [0] * 6)


def test_a_sequence_that_waits_has_its_kv_fetched(model, expected, tmp_path):
    config = make_config(model, {"type": "disk", "path": str(tmp_path)})
    with HierarchyBlockManagerPool.local(config) as pool:
        serve(pool)
        drain(pool)
    with HierarchyBlockManagerPool.local(config) as pool:
        known, unknown = Sequence(PROMPTS[0]), Sequence(range(70, 120))
        pool.prefetch_from_storage([known, unknown])
        assert pool.update_prefetch_result([known, unknown], WAIT_S)
        assert pool.num_blocks_in_host_prefix_cache() == [14]
        assert pool.allocate([known, unknown])
        pool.transfer_blocks([known, unknown], wait_s=WAIT_S)
        assert known.kv_state.num_computed_tokens == 56
        assert unknown.kv_state.num_computed_tokens == 0
        pool.deallocate([known, unknown])


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_requests_go_on_while_redis_is_gone(model, expected, own_redis, how):
    store = {"type": "redis", "url": own_redis.url, "timeout_s": 0.2, "prefetch_timeout_s": 0.2}
    # The host keeps two prompts, so that each round asks the store.
    config = make_config(model, store, host={"num_blocks": 36})
    with HierarchyBlockManagerPool.local(config) as pool:
        assert serve(pool)[0] == expected
        drain(pool)
        assert source_stats(pool)["store"]["stored"]
        threading.Timer(0.05, getattr(own_redis, how)).start()
        deadline = time.monotonic() + WAIT_S
        while source_stats(pool)["is_available"]:
            assert time.monotonic() < deadline, source_stats(pool)
            assert serve(pool)[0] == expected
        assert serve(pool)[0] == expected
        assert source_stats(pool)["last_error"]
        pool.check_integrity()
        assert pool.stats().total.num_used_blocks == 0


def test_another_pool_finds_what_is_in_redis(model, expected, own_redis):
    config = make_config(model, {"type": "redis", "url": own_redis.url})
    with HierarchyBlockManagerPool.local(config) as pool:
        serve(pool)
        drain(pool)
    with HierarchyBlockManagerPool.local(config) as pool:
        assert serve(pool) == (expected, [56] * 6)


def source_stats(pool):
    return pool.tiers[0].source_stats().result()["prefetches"]["sources"]["store"]
