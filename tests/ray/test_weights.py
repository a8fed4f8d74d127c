"""New weights and sleep on Ray: what ranks in other processes serve is what a local pool serves."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import LlamaForCausalLM

from raykv import BlockManagerPool, SamplingParams, Sequence
from raykv.errors import RequestError

PROMPTS = [list(range(i, i + 21)) for i in range(4)]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def newer(tiny_model, tmp_path_factory):
    """A folder with other weights for the same model."""
    model = LlamaForCausalLM.from_pretrained(tiny_model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    folder = tmp_path_factory.mktemp("newer")
    model.save_pretrained(folder)
    return str(folder)


def test_weights_change_and_sleep_on_ray(make_pool, tiny_model, newer):
    pool = make_pool(dp_size=2, num_blocks=300, model={"path": tiny_model})
    answers = {}
    before = torch.get_num_threads()
    for path in (tiny_model, newer):
        config = pool.config.model_copy(
            update={"dp_size": 1, "model": pool.config.model.model_copy(update={"path": path})}
        )
        with BlockManagerPool.local(config) as local:
            answers[path] = [output.token_ids for output in local.generate(PROMPTS, PARAMS)]
    torch.set_num_threads(before)

    def check(path, version):
        outputs = pool.generate(PROMPTS, PARAMS)
        assert [output.token_ids for output in outputs] == answers[path]
        assert {output.weights_versions for output in outputs} == {(version,) * 8}
        assert {output.dp_rank for output in outputs} == {0, 1}

    check(tiny_model, 0)
    with pytest.raises(RequestError, match="unknown"):
        pool.update_weights(1, {"x": torch.zeros(2)})
    check(tiny_model, 0)
    pool.update_weights(1, dict(LlamaForCausalLM.from_pretrained(newer).state_dict()))
    check(newer, 1)
    pool.update_weights(2, tiny_model)
    check(tiny_model, 2)
    assert all(count > 0 for count in pool.retire(1))

    held = Sequence(range(9))
    assert pool.allocate(held)
    with pytest.raises(RequestError, match="1 sequences"):
        pool.sleep(2)
    pool.deallocate(held)

    async def sleep_while_it_runs():
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        tokens, stream = [], pool.aio.stream(PROMPTS[0], params, dp_rank=0)
        async for delta in stream:
            tokens += delta.token_ids
            if len(tokens) == 3:
                await pool.aio.sleep(2)
                assert await pool.aio.num_free_blocks() == [299, 299]
                await pool.aio.wake_up()
        return tuple(tokens)

    slept = asyncio.run(sleep_while_it_runs())
    [alone] = pool.generate(PROMPTS[0], SamplingParams(max_tokens=60, ignore_eos=True), dp_rank=1)
    assert slept == alone.token_ids
    check(tiny_model, 2)
