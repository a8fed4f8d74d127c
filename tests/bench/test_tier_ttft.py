"""Returning conversations are served alike, with host memory and without."""

from __future__ import annotations

import pytest

from raykv.bench import tier_ttft
from raykv.bench.tier_ttft import DEVICE_ONLY, HOST, STORE, Sizes, measure

SIZES = Sizes(
    num_conversations=4, num_first_tokens=96, num_new_tokens=8, num_answer_tokens=4, num_returns=2
)


@pytest.fixture(scope="module")
def turns(tiny_folder):
    return {one.variant: one for one in measure(SIZES, str(tiny_folder))}


def test_the_working_set_is_four_times_the_device():
    for sizes in (Sizes(), tier_ttft.QUICK, SIZES):
        assert sizes.num_working_blocks // 4 == sizes.num_device_blocks
        assert sizes.num_device_blocks * 16 >= sizes.num_tokens


def test_what_the_device_lost_comes_from_the_host(turns):
    device, host = turns[DEVICE_ONLY], turns[HOST]
    assert device.num_turns == host.num_turns == 8
    assert device.host_hit_tokens == 0 < host.host_hit_tokens
    assert device.device_hit_tokens + device.host_hit_tokens < host.host_hit_tokens
    assert turns[STORE].host_hit_tokens > device.device_hit_tokens
    # Of a turn, only what is new and the last block's rest is computed.
    computed = host.prompt_tokens - host.device_hit_tokens - host.host_hit_tokens
    assert computed <= 8 * (8 + 4 + 16)


def test_answers_are_equal(turns):
    assert all(one.outputs_equal for one in turns.values())
    assert turns[DEVICE_ONLY].speed_up == 1
    assert turns[HOST].speed_up > 0


def test_other_answers_are_noticed(tiny_folder, monkeypatch):
    serve = tier_ttft._Served.serve

    def spoil(self, prompt, num_tokens, *, is_return):
        if self.pool.config.host is not None and is_return:
            prompt = prompt[::-1]
        return serve(self, prompt, num_tokens, is_return=is_return)

    monkeypatch.setattr(tier_ttft._Served, "serve", spoil)
    found = {one.variant: one.outputs_equal for one in measure(SIZES, str(tiny_folder))}
    assert found == {DEVICE_ONLY: True, HOST: False, STORE: False}
