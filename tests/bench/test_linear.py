"""What checkpoints are worth: replays keep to what must hold, and the other parts run."""

from __future__ import annotations

import json

import numpy as np
import pytest

from raykv.bench import linear_hits, linear_ops, linear_plot, linear_steps, linear_ttft, visits
from raykv.bench.linear_hits import BLOCK_SIZE, RULES, Replay, Setting
from raykv.bench.visits import Visit
from raykv.errors import ConfigError

PLENTY = 4096


@pytest.fixture(scope="module")
def made_up():
    return visits.make_up(20, 6)


def tokens(first, count):
    return np.arange(first, first + count, dtype=np.int32)


def hit_rate(served, setting):
    return Replay(served, setting, num_running=4).run().hit_rate


def parting(*, num_common=100, count=3):
    """Prompts that part after so many tokens."""
    common = tokens(0, num_common)
    rest = [tokens(1000 * number, 60) for number in range(1, count + 1)]
    return [Visit(np.concatenate((common, each)), each[:5]) for each in rest]


# -- hits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [16, 256, 512])
def test_contiguous_reaches_no_deeper_than_deepest_and_neither_than_the_kv(made_up, stride):
    contiguous = hit_rate(made_up, Setting("contiguous", stride, PLENTY))
    deepest = hit_rate(made_up, Setting("deepest", stride, PLENTY))
    ceiling = hit_rate(made_up, Setting(match=None))
    assert 0 < contiguous <= deepest <= ceiling < 1
    if stride == 512:
        assert contiguous < deepest < ceiling
    if stride == BLOCK_SIZE:  # wherever there are K and V, there is a state
        assert contiguous == deepest == ceiling


def test_without_rules_nothing_is_hit(made_up):
    found = Replay(made_up, Setting(without=RULES)).run()
    assert (found.hit_rate, found.num_checkpoints) == (0, 0)


def test_the_rule_for_branches_serves_the_third_that_parts():
    """The first leaves K and V only, the second has to compute them again, and stops there."""
    served = parting()
    no_stride = Setting(without=("at_stride",), num_slots=64)
    neither = Setting(without=("at_stride", "at_branch"), num_slots=64)
    assert hit_rate(served[:2], no_stride) == 0
    assert hit_rate(served, no_stride) == pytest.approx(96 / (3 * 160))
    assert hit_rate(served, neither) == 0


def test_a_conversation_goes_on_from_the_end_of_what_was_generated():
    first = Visit(tokens(0, 40), tokens(100, 60))
    history = np.concatenate((first.prompt, first.reply))
    second = Visit(np.concatenate((history, tokens(900, 30))), tokens(0, 4), after=0)
    setting = Setting(without=("at_stride",), num_slots=64)
    # 99 of 100 tokens were computed: six blocks.
    assert hit_rate([first, second], setting) == pytest.approx(96 / 170, abs=1e-4)
    without = Setting(without=("at_stride", "at_generation_end"), num_slots=64)
    assert hit_rate([first, second], without) == pytest.approx(32 / 170, abs=1e-4)


def test_who_continues_another_waits_for_its_end():
    first = Visit(tokens(0, 40), tokens(100, 60))
    replay = Replay([first, Visit(first.prompt, first.reply, after=0)], Setting())
    replay._serve(0)
    replay._serve(1)
    assert [number for number, _ in replay._running] == [1]


def test_few_slots_cost_hits_and_reclaim(made_up):
    few, plenty = (Replay(made_up, Setting(num_slots=number)).run() for number in (24, PLENTY))
    assert few.hit_rate < plenty.hit_rate
    assert few.num_reclaimed > 0 == plenty.num_reclaimed


def test_little_kv_costs_hits(made_up):
    scarce, ample = (
        Replay(made_up, Setting(match=None, is_kv_scarce=is_scarce), num_running=4).run()
        for is_scarce in (True, False)
    )
    assert scarce.num_blocks < ample.num_blocks
    assert scarce.hit_rate < ample.hit_rate
    assert scarce.num_visits == ample.num_visits == len(made_up)


@pytest.mark.parametrize("setting", linear_hits.settings(num_slots=(24, 64), strides=(512, 16)))
def test_every_setting_serves_all_and_leaves_nothing(made_up, setting):
    replay = Replay(made_up, setting)
    found = replay.run("work")
    assert found.num_visits == len(made_up)
    assert found.num_tokens == sum(len(visit.prompt) for visit in made_up)
    assert json.loads(json.dumps(found.as_json()))["workload"] == "work"
    replay.kv.check_integrity()
    assert replay.kv.block_manager.num_used_blocks == 0
    cache = replay.kv.linear_state
    if cache is not None:
        assert cache.num_live_slots == cache.num_pending == 0
        assert cache.num_checkpoints == found.num_checkpoints - found.num_reclaimed


def test_settings_differ_and_have_names():
    compared = linear_hits.settings()
    assert len(set(compared)) == len(compared)
    names = {setting.name for setting in compared}
    assert {"K and V alone", "deepest, every 512", "contiguous, every 16"} <= names
    assert {
        "deepest, no stride",
        "deepest, every 512, no branch",
        "K and V alone, little KV",
    } <= names


# -- the other parts -------------------------------------------------------------------------------


def test_steps_and_operations_run():
    rows = [*linear_steps.rows(3, 40), *linear_ops.measure(40, 3)]
    assert len({(row.workload, row.level) for row in rows}) == len(rows)
    assert all(0 < row.min_us <= row.median_us for row in rows)


@pytest.mark.parametrize("stride", [16, 512])
def test_sixteen_sequences_checkpoint_each_step(stride):
    bench = linear_steps.Workbench(stride, 40)
    for _ in range(40):
        bench.grow()
        at_boundary = bench.compute()
        assert len(at_boundary) == linear_steps.NUM_AT_BOUNDARY
        bench.kv.checkpoint(at_boundary)
        assert len(bench.kv.take_state_copies("")) == linear_steps.NUM_AT_BOUNDARY
        bench.kv.ack_state_transfers()
    bench.kv.check_integrity()


def test_a_prefix_with_a_checkpoint_is_not_computed_again():
    pytest.importorskip("torch")
    [found] = linear_ttft.measure(["qwen3_5-tiny"], [64], num_runs=1)
    assert (found.num_prefix_tokens, found.num_reused_tokens) == (64, 64)
    assert min(found.with_ms, found.without_ms) > 0
    assert json.loads(json.dumps(found.as_json()))["model"] == "qwen3_5-tiny"


def test_the_picture_is_drawn_for_each_workload(made_up, tmp_path):
    pytest.importorskip("matplotlib")
    compared = linear_hits.settings(num_slots=(24, 64), strides=(512,))
    hits = [
        one
        for name in ("these", "those")
        for one in linear_hits.measure(name, made_up[:10], compared)
    ]
    path = tmp_path / "hits.svg"
    linear_plot.draw(hits, path)
    assert path.read_text().count("<svg") == 1
    linear_plot.draw(hits, tmp_path / "again.svg")
    assert path.read_bytes() == (tmp_path / "again.svg").read_bytes()
    with pytest.raises(ConfigError, match="cannot be written"):
        linear_plot.draw(hits, tmp_path / "hits.nonsense")
    with pytest.raises(ConfigError, match="cannot be written"):
        linear_plot.draw(hits, tmp_path / "no" / "hits.svg")
