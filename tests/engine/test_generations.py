"""The driver's end of generation: giving up, ids, faults of callers; over local pools."""

import asyncio
import threading
import time
from collections import UserDict

import pytest

from raykv import BlockManagerPool, Namespace, PoolConfig, SamplingParams
from raykv.engine import Engine
from raykv.engine.worker import RankWorker
from raykv.errors import RequestError
from raykv.generation import Batch
from raykv.local_rank import LocalRank
from raykv.rank import RankKV

from .test_engine import HashModel

LONG = SamplingParams(max_tokens=40, ignore_eos=True)


class SlowModel(HashModel):
    def forward(self, batch):
        time.sleep(0.01)
        return super().forward(batch)


@pytest.fixture
def pool():
    config = PoolConfig(num_blocks=64, block_size=4, max_num_seqs=8)
    kv = RankKV(config)
    with BlockManagerPool(config, [LocalRank(kv, RankWorker(Engine(SlowModel(), kv)))]) as made:
        yield made
        made.check_integrity()
        assert made.num_used_blocks() == [0]
        assert made.generations._pending == [{}]
        assert made.generations._router.debits == made.generations._router.work == [0]


def in_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    return thread, found


def wait_until(condition, limit_s=10):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("prompt", [[4], [], [10**6]])
def test_a_refused_request_leaves_others_alone(pool, prompt):
    thread, found = in_thread(lambda: pool.generate([1, 2, 3], LONG, request_id="x"))
    wait_until(lambda: pool.generations._pending[0])
    with pytest.raises(RequestError):
        pool.generate([[4], prompt] if prompt != [4] else prompt, LONG, request_id="x")
    thread.join()
    assert found[0][0].stop_reason == "length"


def test_abort_means_a_call_a_prompt_or_a_sample_and_no_namesake(pool):
    thread, found = in_thread(lambda: pool.generate([[1], [2]], LONG, request_id="u"))
    other, kept = in_thread(lambda: pool.generate([3], LONG, request_id="u/7"))
    wait_until(lambda: len(pool.generations._pending[0]) == 3)
    pool.abort("u")
    thread.join()
    other.join()
    assert [output.stop_reason for output in found[0]] == ["abort", "abort"]
    assert kept[0][0].stop_reason == "length"


def test_drawn_ids_avoid_those_of_the_caller(pool):
    thread, _ = in_thread(lambda: pool.generate([1], LONG, request_id="request-0"))
    wait_until(lambda: pool.generations._pending[0])
    assert pool.generate([2], SamplingParams(max_tokens=1))[0].stop_reason == "length"
    thread.join()


def test_a_batch_given_up_before_it_starts_is_not_served(pool):
    requests = pool.make_requests([[1, 2], [3]], LONG)
    heard = []
    batch = Batch(requests, [heard.append] * 2)
    pool.generations.abandon(batch)
    pool.generations.start(batch)
    wait_until(lambda: not pool.generations._pending[0])
    assert {delta.output.stop_reason for delta in heard if delta.is_last} == {"abort"}


def test_cancelling_many_requests_takes_one_call(pool):
    calls = []
    abort = pool.ranks[0].abort
    pool.ranks[0].abort = lambda ids: calls.append(len(ids)) or abort(ids)

    async def give_up():
        task = asyncio.create_task(pool.aio.generate([[1, 2, 3]] * 300, LONG))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    assert len(calls) == 1
    assert calls[0] > 200
    wait_until(lambda: not pool.generations._pending[0])


def test_a_listener_that_fails_stops_nobody(pool, caplog):
    def fail(delta):
        raise ZeroDivisionError

    pool.start(pool.make_requests([5, 6], SamplingParams(max_tokens=3)), [fail])
    assert pool.generate([1], SamplingParams(max_tokens=3))[0].stop_reason in {"length", "stop"}
    wait_until(lambda: not pool.generations._pending[0])
    assert "listener" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((None,), {}, "prompts is a NoneType"),
        ((5,), {}, "prompts is a int"),
        (([],), {}, "no prompt"),
        (([1], {"max_tokens": 2}), {}, "params is a dict"),
        (([1],), {"namespace": "x"}, "Namespace"),
        (([1],), {"namespace": None}, "Namespace"),
        (([1],), {"request_id": threading.Lock()}, "request_id"),
        (([1],), {"dp_rank": "0"}, "dp_rank"),
        (([1],), {"dp_rank": 1}, "dp_rank"),
    ],
)
def test_wrong_arguments_are_refused_and_the_rank_lives(pool, arguments, options, words):
    with pytest.raises(RequestError, match=words):
        pool.generate(*arguments, **options)
    assert pool.generate([1], SamplingParams(max_tokens=1))


def test_a_fault_of_the_routing_policy_leaves_nothing_behind(pool):
    def fail(ranks, wanted):
        if wanted.num_tokens > 43:
            raise ZeroDivisionError("no rank")
        return 0

    pool.generations._router.policy.choose = fail
    with pytest.raises(ZeroDivisionError, match="no rank"):
        pool.generate([[1, 2, 3], [1, 2, 3, 4]], LONG, request_id="x")
    assert pool.generations._pending == [{}]
    assert pool.generate([1, 2, 3], LONG, request_id="x")[0].stop_reason == "length"


def test_what_a_tokenizer_returns_is_a_prompt(pool):
    params = SamplingParams(max_tokens=4)
    expected = pool.generate([5, 6, 7], params)[0].token_ids
    encoding = UserDict(input_ids=[5, 6, 7], attention_mask=[1, 1, 1])
    assert pool.generate(encoding, params)[0].token_ids == expected
    assert [out.token_ids for out in pool.generate([encoding] * 2, params)] == [expected] * 2
    with pytest.raises(RequestError, match="neither text nor token ids"):
        pool.generate({"messages": []}, params)


def test_a_fault_at_admission_fails_that_request_only(pool):
    kv = pool.ranks[0].kv
    allocate = kv.allocate

    def fail_for_tenant(sequences, num_tokens=None):
        members = sequences if isinstance(sequences, list) else [sequences]
        if any(sequence.namespace.tenant for sequence in members):
            raise ZeroDivisionError("no luck")
        return allocate(sequences, num_tokens)

    kv.allocate = fail_for_tenant
    thread, found = in_thread(lambda: pool.generate([1, 2, 3], LONG))
    with pytest.raises(Exception, match="no luck"):
        pool.generate([1], LONG, namespace=Namespace(tenant="t"))
    thread.join()
    assert found[0][0].stop_reason == "length"
