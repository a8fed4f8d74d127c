"""The scheduler over a real rank's books, without a model: computing is advancing a counter."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raykv.config import PoolConfig
from raykv.core import Sequence
from raykv.engine import GenerationRequest, SamplingParams, Scheduler
from raykv.engine.scheduler import _MAX_BYPASSES, _MAX_LOOKAHEAD, Task
from raykv.errors import IntegrityError
from raykv.rank import RankKV

SIZE = 4


class Bench:
    """A scheduler, its rank, and whoever plays the model."""

    def __init__(self, num_blocks=12, max_num_seqs=8, budget=100, block_size=SIZE, **config):
        self.kv = RankKV(
            PoolConfig(
                num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs, **config
            )
        )
        self.scheduler = Scheduler(
            self.kv, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
        )
        self.arrivals = itertools.count()

    def add(self, num_tokens, max_tokens=1, seed=None):
        """A task of a prompt that no other has, or of ``seed``'s."""
        arrival = next(self.arrivals)
        seed = 1000 + arrival if seed is None else seed
        tokens = np.random.default_rng(seed).integers(0, 9, num_tokens).astype(np.int32)
        request = GenerationRequest(str(arrival), tokens, SamplingParams(max_tokens=max_tokens))
        task = Task(request, "", arrival, Sequence(tokens), 0)
        self.scheduler.add(task)
        return task

    def step(self):
        """One step: {arrival: tokens computed}, in order."""
        step = self.scheduler.schedule()
        self.compute(step)
        self.check()
        return {task.arrival: count for task, count in step}

    def compute(self, step):
        """Advance; whoever knows no more gets a token, or is over. Returns those over."""
        over = []
        for task, count in step:
            task.sequence.kv_state.num_computed_tokens += count
            if count > 1:
                self.kv.cache(task.sequence)
            if task.num_remaining == 0:
                task.sequence.append(7)
                if len(task.produced) == task.request.params.max_tokens:
                    self.scheduler.remove(task)
                    over.append(task)
        return over

    def check(self):
        self.scheduler.check_integrity()
        self.kv.check_integrity()

    def drain(self, max_steps=2000):
        for _ in range(max_steps):
            if not self.scheduler.waiting and not self.scheduler.running:
                break
            self.step()
        self.check_drained()

    def check_drained(self):
        assert self.scheduler.waiting == self.scheduler.running == []
        stats = self.kv.rank_stats()
        assert stats.num_used_blocks == 0
        assert stats.num_available_blocks == stats.num_total_blocks

    def arrivals_of(self, line):
        return [task.arrival for task in getattr(self.scheduler, line)]


def eviction_order(kv):
    """Stamps and ids of all evictable stretches, next victim first."""
    cache = kv.block_manager._cache
    order = []
    for run, stamp in zip(cache._order._queue, cache._order._stamps, strict=True):
        end = run.length
        for start, tail_stamp in run.tails():
            if tail_stamp == stamp:
                order.append((stamp, run.ids[start:end].tolist()))
            end = start
    return order


# -- admission ------------------------------------------------------------------------------------


def test_the_oldest_is_admitted_first():
    bench = Bench(max_num_seqs=2)
    for _ in range(5):
        bench.add(3, max_tokens=2)
    assert bench.step() == {0: 3, 1: 3}
    assert bench.arrivals_of("waiting") == [2, 3, 4]
    assert bench.step() == {0: 1, 1: 1}
    assert bench.step() == {2: 3, 3: 3}
    bench.drain()


def test_max_num_seqs_is_never_exceeded():
    bench = Bench(num_blocks=100, max_num_seqs=3)
    for _ in range(7):
        bench.add(3, max_tokens=4)
    for _ in range(4):
        bench.step()
        assert len(bench.scheduler.running) <= 3
    bench.drain()


def test_a_step_computes_at_most_the_budget_and_prefills_in_chunks():
    bench = Bench(num_blocks=40, budget=10)
    for length in (23, 4, 9):
        bench.add(length, max_tokens=3)
    assert bench.step() == {0: 10}
    assert bench.step() == {0: 10}
    assert bench.step() == {0: 3, 1: 4, 2: 3}
    assert bench.step() == {0: 1, 1: 1, 2: 6}  # decodes first
    assert bench.step() == {0: 1, 1: 1, 2: 1}
    bench.drain()


def test_decodes_go_on_whatever_the_budget():
    bench = Bench(num_blocks=40, budget=2)
    for _ in range(4):
        bench.add(1, max_tokens=9)
    bench.step()
    assert bench.step() == {0: 1, 1: 1}  # no budget is left to admit anyone
    bench.drain()
    bench = Bench(num_blocks=40, budget=1)
    bench.add(3, max_tokens=2)
    assert [bench.step() for _ in range(4)] == [{0: 1}, {0: 1}, {0: 1}, {0: 1}]
    bench.check_drained()


def test_a_hit_shortens_the_prefill_and_counts_for_the_first_admission():
    bench = Bench(num_blocks=40)
    bench.add(18, seed=5)
    bench.step()
    task = bench.add(18, seed=5)
    assert bench.step() == {1: 2}
    assert task.num_cached_tokens == 16
    bench.check_drained()


# -- a blocked head -------------------------------------------------------------------------------


def blocked(bench, num_blocks):
    """Somebody else's memory: leaves ``num_blocks`` blocks."""
    free = bench.kv.num_free_blocks()[0]
    sequence = Sequence(np.ones((free - num_blocks) * SIZE, np.int32))
    assert bench.kv.allocate(sequence)
    return sequence


def test_a_blocked_head_is_bypassed_a_bounded_number_of_times():
    bench = Bench(num_blocks=12)
    other = blocked(bench, 3)
    head = bench.add(5 * SIZE)
    small = [bench.add(2) for _ in range(40)]
    over = []
    for _ in range(30):
        over += bench.compute(bench.scheduler.schedule())
        bench.check()
    assert [task.arrival for task in over] == [task.arrival for task in small[:_MAX_BYPASSES]]
    assert head.num_bypassed == _MAX_BYPASSES
    assert bench.scheduler.waiting[0] is head
    bench.kv.deallocate_without_cache(other)
    assert head.arrival in bench.step(), "the head is next once it fits"
    bench.drain()


def test_only_a_few_behind_the_head_are_looked_at():
    bench = Bench(num_blocks=12)
    blocked(bench, 3)
    for _ in range(1 + _MAX_LOOKAHEAD):
        bench.add(5 * SIZE)
    bench.add(2)
    assert bench.step() == {}
    assert bench.arrivals_of("waiting")[-1] == 1 + _MAX_LOOKAHEAD


def test_a_stream_of_small_requests_does_not_starve_a_large_one():
    bench = Bench(num_blocks=12, max_num_seqs=4)
    for _ in range(4):
        bench.add(8, max_tokens=8)
    large = bench.add(9 * SIZE, max_tokens=3)
    num_steps = 0
    while large not in bench.compute(bench.scheduler.schedule()):
        bench.check()
        while len(bench.scheduler.waiting) < 6:
            bench.add(6, max_tokens=4)
        num_steps += 1
        # At most 16 overtake it, for some four steps each; then it is its turn.
        assert num_steps < 60
    bench.drain()


def test_failed_retries_leave_the_eviction_order():
    bench = Bench(num_blocks=20)
    for seed in (1, 2, 3):
        bench.add(9, seed=seed)
        bench.step()
    before = eviction_order(bench.kv)
    assert [len(ids) for _, ids in before] == [2, 2, 2]
    other = Sequence(np.ones(13 * SIZE, np.int32))
    assert bench.kv.allocate(other)
    bench.add(12 * SIZE, seed=1)  # hits the oldest, and does not fit
    for _ in range(20):
        assert bench.step() == {}
        assert eviction_order(bench.kv) == before
    bench.kv.deallocate_without_cache(other)
    bench.drain()


# -- preemption -----------------------------------------------------------------------------------


def test_the_youngest_is_preempted_first_and_returns_to_its_place():
    bench = Bench(num_blocks=7, max_num_seqs=3)  # 6 blocks
    tasks = [bench.add(7, max_tokens=17) for _ in range(3)]
    later = bench.add(2, max_tokens=2)
    assert bench.step() == {0: 7, 1: 7, 2: 7}
    assert bench.step() == {0: 1, 1: 1, 2: 1}
    assert bench.step() == {0: 1, 1: 1}, "the youngest made room, and nobody was admitted"
    assert [task.num_preempted for task in tasks] == [0, 0, 1]
    assert bench.scheduler.num_preemptions == 1
    assert bench.scheduler.waiting == [tasks[2], later]
    assert tasks[2].sequence.num_tokens == 9
    assert tasks[2].produced == (7, 7)
    bench.drain()
    assert tasks[0].num_preempted == 0


def test_nobody_is_admitted_in_a_step_that_preempted():
    bench = Bench(num_blocks=7, max_num_seqs=8)
    for _ in range(2):
        bench.add(8, max_tokens=16)
    big = bench.add(7, max_tokens=16)
    bench.step()
    small = bench.add(1, max_tokens=1)
    bench.step()
    assert big.num_preempted == 1, "two blocks came free, one is needed twice"
    assert small in bench.scheduler.waiting
    bench.drain()


def test_a_preempted_sequence_finds_what_it_computed():
    bench = Bench(num_blocks=8, max_num_seqs=2)
    bench.add(11, max_tokens=12)
    young = bench.add(12, max_tokens=12)
    while not young.num_preempted:
        bench.step()
    num_tokens = young.sequence.num_tokens
    while young in bench.scheduler.waiting:
        bench.step()
    assert young.sequence.num_tokens in (num_tokens, num_tokens + 1)
    assert young.num_cached_tokens == 0, "that of the first admission"
    bench.drain()
    assert len(young.produced) == 12


def test_a_prefilling_sequence_is_preempted_too():
    bench = Bench(num_blocks=9, budget=5, max_num_seqs=4)
    bench.add(4, max_tokens=28)
    young = bench.add(24, max_tokens=2)
    while not young.num_preempted:
        bench.step()
    assert young.produced == ()
    bench.drain()
    assert len(young.produced) == 2


# -- taking out -----------------------------------------------------------------------------------


@pytest.mark.parametrize("publish", [True, False])
def test_remove_takes_a_task_out_of_either_line(publish):
    bench = Bench(num_blocks=20, max_num_seqs=1)
    running, waiting = bench.add(9, max_tokens=9), bench.add(9, max_tokens=9)
    step = bench.scheduler.schedule()
    assert [task for task, _ in step] == [running]
    running.sequence.kv_state.num_computed_tokens += 9
    bench.scheduler.remove(waiting, publish=publish)
    bench.scheduler.remove(running, publish=publish)
    bench.check()
    bench.check_drained()
    assert bench.kv.num_blocks_in_prefix_cache() == [2 if publish else 0]


def test_check_integrity_sees_tasks_in_the_wrong_line():
    bench = Bench()
    first, second = bench.add(3, max_tokens=9), bench.add(3, max_tokens=9)
    bench.scheduler.waiting.reverse()
    with pytest.raises(IntegrityError, match="order"):
        bench.scheduler.check_integrity()
    bench.scheduler.waiting.reverse()
    bench.scheduler.running.append(bench.scheduler.waiting.pop())
    with pytest.raises(IntegrityError, match="wrong line"):
        bench.scheduler.check_integrity()
    bench.scheduler.waiting.append(bench.scheduler.running.pop())
    bench.step()
    first.sequence.kv_state.num_computed_tokens = first.sequence.num_tokens
    with pytest.raises(IntegrityError, match="nothing to compute"):
        bench.scheduler.check_integrity()
    assert second.num_remaining == 1


# -- versions and sleep ---------------------------------------------------------------------------


def test_while_draining_only_those_are_admitted_that_were_before():
    bench = Bench(num_blocks=7)
    first, second = bench.add(8, 9), bench.add(8, 9)
    bench.step()
    bench.scheduler.preempt_all()
    assert bench.arrivals_of("waiting") == [0, 1]
    assert first.num_preempted == second.num_preempted == 1
    assert bench.kv.num_used_blocks() == [0]
    early = bench.add(4)
    early.arrival = -1
    bench.scheduler.waiting.sort(key=lambda task: task.arrival)
    bench.scheduler.is_draining = True
    assert bench.scheduler.has_started
    for _ in range(30):
        assert early.arrival not in bench.step()
    assert not bench.scheduler.has_started
    assert early.num_bypassed == 0
    bench.scheduler.begin_version(1)
    bench.drain()


def test_who_waits_takes_the_version_of_its_admission():
    bench = Bench(max_num_seqs=1)
    runs, waits = bench.add(8, 9), bench.add(8, 2)
    bench.step()
    bench.kv.begin_version(3)
    bench.scheduler.begin_version(3)
    late = bench.add(8, 2)
    versions = [task.sequence.namespace.weights_version for task in (runs, waits, late)]
    assert versions == [0, 3, 3]
    bench.scheduler.preempt_all()
    assert runs.sequence.namespace.weights_version == 3
    assert runs.request.namespace.weights_version == 0
    bench.drain()


# -- random histories -----------------------------------------------------------------------------


class Schedules(RuleBasedStateMachine):
    """Arrivals, aborts and ends in any order: bounded, fair, and nothing is lost."""

    @initialize(
        num_blocks=st.integers(8, 20),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 30),
        cache=st.booleans(),
    )
    def start(self, num_blocks, block_size, max_num_seqs, budget, cache):
        self.bench = Bench(num_blocks, max_num_seqs, budget, block_size, enable_prefix_cache=cache)
        self.limit = (num_blocks - 1) * block_size
        self.max_num_seqs, self.budget = max_num_seqs, budget
        self.live: list[Task] = []
        self.other: Sequence | None = None
        self.admitted: set[int] = set()
        allocate = self.bench.kv.allocate

        def watched(*args):
            before = eviction_order(self.bench.kv)
            done = allocate(*args)
            if not done:
                assert eviction_order(self.bench.kv) == before
            return done

        self.bench.kv.allocate = watched

    @rule(num_tokens=st.integers(1, 40), max_tokens=st.integers(1, 20), seed=st.integers(0, 3))
    def arrive(self, num_tokens, max_tokens, seed):
        num_tokens = min(num_tokens, self.limit - 1)
        if num_tokens < 1:
            return
        max_tokens = min(max_tokens, self.limit - num_tokens)
        self.live.append(self.bench.add(num_tokens, max_tokens, seed))

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 30), publish=st.booleans())
    def leave(self, index, publish):
        self.bench.scheduler.remove(self.live.pop(index % len(self.live)), publish=publish)

    @rule(count=st.integers(1, 5))
    def steps(self, count):
        for _ in range(count):
            self.one_step()

    @precondition(lambda self: self.other is None)
    @rule(num_tokens=st.integers(1, 40))
    def others_take_memory(self, num_tokens):
        sequence = Sequence(np.full(min(num_tokens, self.limit), 8, np.int32))
        if self.bench.kv.allocate(sequence):
            self.other = sequence

    @precondition(lambda self: self.other is not None)
    @rule()
    def others_give_it_back(self):
        self.bench.kv.deallocate(self.other)
        self.other = None

    @rule()
    def reset(self):
        self.bench.kv.reset_prefix_cache()

    def one_step(self):
        scheduler = self.bench.scheduler
        waiting, running = list(scheduler.waiting), list(scheduler.running)
        bypassed = {task: task.num_bypassed for task in waiting}
        step = scheduler.schedule()
        self.bench.check()
        preempted = [task for task in running if task in scheduler.waiting]
        admitted = [task for task in waiting if task in scheduler.running]
        # Bounds.
        assert len(scheduler.running) <= self.max_num_seqs
        tasks = [task for task, _ in step]
        assert len(set(tasks)) == len(tasks)
        assert set(tasks) <= set(scheduler.running)
        assert all(1 <= count <= task.num_remaining for task, count in step)
        decodes = [task for task in running if task.num_remaining == 1 and task not in preempted]
        assert set(decodes) <= set(tasks), "every running sequence that can decode does"
        assert sum(count for _, count in step) <= max(self.budget, len(decodes))
        # Every token of the step has a place.
        for task, count in step:
            state = task.sequence.kv_state
            assert state.num_computed_tokens + count <= state.num_blocks * state.block_size
        # The youngest go first, and nobody comes while somebody goes.
        stayed = [task for task in running if task not in preempted]
        assert all(a.arrival < b.arrival for a in stayed for b in preempted)
        assert not (preempted and admitted)
        # In line: only a blocked head is overtaken, each time counted, and boundedly.
        overtaken = [t for t in waiting if admitted and t.arrival < admitted[-1].arrival]
        skipped = [t for t in overtaken if t not in admitted]
        if skipped:
            assert skipped[0].num_bypassed > bypassed[skipped[0]]
        assert all(task.num_bypassed <= _MAX_BYPASSES for task in self.live)
        # Work is done whenever there is some, but for other people's memory.
        assert step or not self.live or self.other is not None
        for task in self.bench.compute(step):
            self.live.remove(task)

    @invariant()
    def books_balance(self):
        if hasattr(self, "bench"):
            self.bench.check()
            scheduler = self.bench.scheduler
            assert len(self.live) == len(scheduler.waiting) + len(scheduler.running)

    def teardown(self):
        if not hasattr(self, "bench"):
            return
        if self.other is not None:
            self.others_give_it_back()
        # Nothing starves: even alone, one after the other, these steps would do.
        work = sum(
            math.ceil(task.sequence.num_tokens / self.budget) + task.request.params.max_tokens
            for task in self.live
        )
        for _ in range(4 * work + 10):
            if not self.live:
                break
            self.one_step()
        assert not self.live, "a task starves"
        self.bench.check_drained()
        self.bench.check()


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
