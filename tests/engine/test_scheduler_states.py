"""The scheduler where sequences have recurrent state: prefills stop where checkpoints are due."""

from __future__ import annotations

import itertools

import numpy as np

from raykv.config import PoolConfig
from raykv.core import Sequence
from raykv.engine import GenerationRequest, SamplingParams, Scheduler
from raykv.engine.scheduler import Task
from raykv.rank import RankKV

SIZE, STRIDE = 4, 16


class Bench:
    """A scheduler over a rank's books, and whoever plays model and copies."""

    def __init__(self, budget=100, **states):
        values = {"num_slots": 32, "stride_tokens": STRIDE, "match": "deepest", **states}
        config = PoolConfig(num_blocks=200, block_size=SIZE, max_num_seqs=8, linear_state=values)
        self.kv = RankKV(config)
        self.scheduler = Scheduler(
            self.kv, max_num_seqs=8, max_num_batched_tokens=budget, keeps_state=True
        )
        self.arrivals = itertools.count()

    def add(self, tokens):
        arrival = next(self.arrivals)
        tokens = np.array(tokens, np.int32)
        request = GenerationRequest(str(arrival), tokens, SamplingParams(max_tokens=1))
        task = Task(request, "", arrival, Sequence(tokens), 0)
        self.scheduler.add(task)
        return task

    def step(self):
        self.kv.take_state_copies("")
        self.kv.ack_state_transfers()
        step = self.scheduler.schedule()
        for task, count in step:
            task.sequence.kv_state.num_computed_tokens += count
            self.kv.cache(task.sequence)
        self.kv.take_state_copies("")
        self.kv.ack_state_transfers()
        for task, _ in step:
            if task.num_remaining == 0:
                self.scheduler.remove(task)
        self.scheduler.check_integrity()
        self.kv.check_integrity()
        return {task.arrival: count for task, count in step}

    def drain(self):
        steps = []
        while self.scheduler.waiting or self.scheduler.running:
            steps.append(self.step())
        return steps


def test_a_prefill_stops_at_strides_and_at_its_last_block():
    bench = Bench()
    bench.add(range(46))
    assert [step[0] for step in bench.drain()] == [16, 16, 12, 2]
    assert bench.kv.linear_state.num_checkpoints == 3


def test_a_budget_cuts_earlier_and_checkpoints_stand_where_they_must():
    bench = Bench(budget=10)
    bench.add(range(46))
    assert [step[0] for step in bench.drain()] == [10, 6, 10, 6, 10, 2, 2]
    names = bench.kv.block_manager.prefix_hashes(range(46))
    found = [index for index, name in enumerate(names) if bench.kv.linear_state.contains(name)]
    assert found == [3, 7, 10]


def test_without_rules_nothing_stops_a_prefill():
    bench = Bench(at_stride=False, at_prompt_end=False, at_branch=False)
    bench.add(range(46))
    assert [step[0] for step in bench.drain()] == [46]


def test_equal_prompts_are_prefilled_once():
    bench = Bench()
    for _ in range(4):
        bench.add(range(46))
    steps = bench.drain()
    assert sum(count for step in steps for count in step.values()) == 46 + 3 * 2


def test_nobody_waits_for_a_checkpoint_that_the_prompts_do_not_share():
    bench = Bench()
    bench.add(range(60))
    bench.add([*range(20), *range(100, 140)])  # they part at token 20, behind the first stride
    steps = bench.drain()
    assert steps[0] == {0: 16}
    assert steps[1] == {0: 16, 1: 16}, "it goes on from the stride they share, at once"


def test_a_branch_leaves_what_the_third_one_uses():
    bench = Bench(at_stride=False, at_prompt_end=False)
    prompts = [[*range(40), *range(seed, seed + 20)] for seed in (100, 200, 300)]
    computed = []
    for prompt in prompts:
        bench.add(prompt)
        computed.append([count for step in bench.drain() for count in step.values()])
    assert computed == [[60], [40, 20], [20]]
