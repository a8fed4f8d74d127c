"""Generation on Ray gives what a local pool gives."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from raykv import BlockManagerPool, PoolConfig, SamplingParams
from raykv.actors import launch
from raykv.errors import RequestError

from .conftest import rank_processes, wait_until

PREFIX = list(range(1, 40))
PROMPTS = [[*PREFIX, 50 + i, 60 + i] for i in range(6)] + [[5, 6, 7], [100]]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1)
LONG = SamplingParams(max_tokens=2000, ignore_eos=True)


@pytest.fixture(scope="module")
def config(tiny_model):
    return PoolConfig(
        dp_size=2,
        num_blocks=1500,
        block_size=4,
        max_num_seqs=8,
        model={"path": tiny_model},
        hash_seed=b"seed",
    )


@pytest.fixture(scope="module")
def pool(cluster, config):
    with launch(config) as pool:
        yield pool
    assert rank_processes() == []


@pytest.fixture(scope="module")
def local(config):
    import torch  # noqa: PLC0415 - after Ray, which does not need it

    before = torch.get_num_threads()
    with BlockManagerPool.local(config) as pool:
        yield pool
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _nothing_is_left(pool):
    yield
    wait_until(lambda: pool.num_used_blocks() == [0, 0])
    pool.check_integrity()


def plain(output):
    return replace(output, log_probs=(), queue_s=0, prefill_s=0, decode_s=0, request_id="")


def test_two_ranks_on_ray_give_a_local_pools_tokens(pool, local):
    theirs = pool.generate(PROMPTS, PARAMS)
    ours = local.generate(PROMPTS, PARAMS)
    assert [t.token_ids for t in theirs] == [o.token_ids for o in ours]
    assert {output.dp_rank for output in theirs} == {0, 1}
    for their, our in zip(theirs, ours, strict=True):
        assert their.log_probs == pytest.approx(our.log_probs, abs=1e-4)
        assert their.stop_reason == our.stop_reason == "length"
    assert len({t.token_ids for t in theirs}) > 4, "the prompts are told apart"


def test_a_later_turn_finds_its_prefix_on_the_rank_that_served_it(pool, local):
    turns = []
    for each in (pool, local):
        prompt = [9, *PREFIX]
        first = each.generate(prompt, PARAMS, dp_rank=1)[0]
        prompt += [*first.token_ids, 3, 4]
        turns.append((first, each.generate(prompt, PARAMS, dp_rank=first.dp_rank)[0]))
    for their, our in zip(*turns, strict=True):
        assert plain(their) == plain(our)
    assert turns[0][1].num_cached_tokens >= 48


def test_samples_are_repeatable_on_any_rank(pool, local):
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3, n=3, ignore_eos=True)
    outputs = [each.generate(PREFIX, params, dp_rank=rank) for each, rank in
               [(pool, 0), (pool, 1), (local, 0)]]  # fmt: skip
    tokens = [[output.token_ids for output in group] for group in outputs]
    assert tokens[0] == tokens[1] == tokens[2]
    assert len(set(tokens[0])) > 1


def test_a_request_that_cannot_be_served_harms_nobody(pool):
    with pytest.raises(RequestError, match="vocabulary"):
        pool.generate([[1, 2], [500]], PARAMS)
    with pytest.raises(RequestError, match="empty"):
        pool.generate([[]], PARAMS)
    with pytest.raises(RequestError, match="dp_rank"):
        pool.generate([1], PARAMS, dp_rank=2)
    assert len(pool.generate([1, 2], PARAMS)[0].token_ids) == 12


def test_coroutines_give_the_same(pool):
    async def use():
        outputs, streamed = await asyncio.gather(
            pool.aio.generate(PROMPTS[:3], PARAMS), collect(pool.aio.stream(PROMPTS[0], PARAMS))
        )
        return [output.token_ids for output in outputs], streamed

    tokens, streamed = asyncio.run(use())
    expected = [output.token_ids for output in pool.generate(PROMPTS[:3], PARAMS)]
    assert tokens == expected
    assert streamed == list(expected[0])


async def collect(stream):
    return [token async for delta in stream for token in delta.token_ids]


def test_cancelling_gives_the_memory_back(pool):
    async def use():
        task = asyncio.create_task(pool.aio.generate(PROMPTS, LONG))
        await asyncio.to_thread(wait_until, lambda: any(pool.num_used_blocks()))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stream = pool.aio.stream(PROMPTS[0], LONG)
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(use())  # the fixture sees that nothing is left


def test_aborting_ends_all_that_was_asked_for_together(pool):
    async def use():
        params = replace(LONG, n=2)
        task = asyncio.create_task(pool.aio.generate(PROMPTS[:4], params, request_id="mine"))
        other = asyncio.create_task(pool.aio.generate([1, 2, 3], PARAMS, request_id="mine2"))
        await asyncio.to_thread(wait_until, lambda: all(pool.num_used_blocks()))
        await pool.aio.abort("mine")
        return await task, await other

    aborted, [other] = asyncio.run(use())
    assert {output.stop_reason for output in aborted} == {"abort"}
    assert len(aborted) == 8
    assert other.stop_reason == "length"
