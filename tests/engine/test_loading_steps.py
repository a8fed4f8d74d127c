"""An engine over a host tier: when loads start, and that they bring what was computed."""

from __future__ import annotations

import time

import numpy as np
import pytest

from raykv.config import PoolConfig
from raykv.engine.build import build_rank
from raykv.engine.params import GenerationRequest, SamplingParams
from raykv.host.handle import LocalTier
from raykv.host.tier_host import TierHost

PROMPT = np.arange(3, 83, dtype=np.int32)
WAIT_S = 30.0


@pytest.fixture
def engine(tiny_llama, tmp_path):
    tiny_llama.save_pretrained(tmp_path)
    config = PoolConfig(
        num_blocks=13,
        block_size=8,
        max_model_len=96,
        memory={"device": "cpu"},
        model={"path": str(tmp_path)},
        host={"num_blocks": 40},
    ).with_seed()
    kv, engine = build_rank(config, 0)
    host = TierHost(config)
    kv.connect_tier(LocalTier(host))
    yield engine
    engine.check_integrity()
    host.check_integrity()
    kv.close_tier()
    host.close()


def submit(engine, prompt, name):
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    engine.submit([GenerationRequest(name, np.asarray(prompt, np.int32), params)])


def serve(engine):
    """The next output, once nothing is on its way any more."""
    outputs = []
    deadline = time.monotonic() + WAIT_S
    while engine.has_work:
        outputs += [delta.output for _, delta in engine.step() if delta.output is not None]
        assert time.monotonic() < deadline
    [output] = outputs
    return output


def test_a_load_starts_in_the_step_that_admits(engine):
    submit(engine, PROMPT, "first")
    first = serve(engine)
    submit(engine, PROMPT[::-1], "other")
    serve(engine)  # takes the blocks of the first
    tier = engine.kv.tier
    assert tier.totals["loads_started"] == 0
    submit(engine, PROMPT, "again")
    engine.step()
    assert tier.totals["loads_started"] > 0
    again = serve(engine)
    assert again.miss.num_host_tokens == 8 * tier.totals["loads_started"]
    assert again.token_ids == first.token_ids
