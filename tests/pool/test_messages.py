"""Each call is applied once, and only by the rank and the epoch it was meant for."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from raykv import PoolConfig, Sequence
from raykv.errors import NotSupportedError, RankUnavailableError, RequestError
from raykv.messages import Call
from raykv.rank_host import RankHost
from raykv.testing import LoopbackRank


class RecordingRank(LoopbackRank):
    """Keeps the calls it carried, and the answers."""

    def __init__(self, host, driver_id="driver"):
        super().__init__(host, driver_id)
        self.calls, self.replies = [], []

    def send(self, call):
        self.calls.append(call)
        self.replies.append(super().send(call))
        return self.replies[-1]


@pytest.fixture
def host():
    return RankHost(PoolConfig(num_blocks=100, block_size=4).with_seed(), 0, epoch=7)


@pytest.fixture
def rank(host):
    return RecordingRank(host)


def make_sequence(num_tokens, first=0, **kwargs):
    return Sequence(np.arange(first, first + num_tokens), **kwargs)


def copied(message):
    return pickle.loads(pickle.dumps(message))  # noqa: S301 - our own bytes


def test_a_repeated_call_is_applied_once_and_answered_from_memory(host, rank):
    sequence = make_sequence(10)
    assert rank.allocate([sequence], [10]).result()
    again = host.call(rank.calls[0])
    assert host.info().stats.num_used_blocks == 3
    assert again.states.block_ids.tolist() == sequence.kv_state.block_ids.tolist()
    rank.release([sequence], publish=False).result()
    with pytest.raises(RankUnavailableError, match="settled the calls up to 1"):
        host.call(rank.calls[0])
    assert host.info().stats.num_used_blocks == 0, "it is not applied again"


def test_a_late_call_is_refused(host, rank):
    for _ in range(70):
        rank.refresh().result()
    late = replace(rank.calls[0], operation="reset_prefix_cache")
    with pytest.raises(RankUnavailableError, match="refuses call 1"):
        host.call(late)
    assert host.call(rank.calls[-1]).number == 70


def test_a_call_that_was_overtaken_is_applied_once(host, rank):
    sequence = make_sequence(10)
    rank.allocate([sequence], [10]).result()
    overtaken = replace(rank.calls[0], number=2, updates=None)
    host.call(replace(overtaken, number=3, operation="refresh"))
    overtaken = replace(overtaken, operation="reset_prefix_cache")
    first = host.call(overtaken)
    assert first.value == 0
    assert host.call(overtaken) is first


def test_a_call_of_another_epoch_is_refused(host, rank):
    sequence = make_sequence(4)
    rank.allocate([sequence], [4]).result()
    for epoch in (6, 8):
        with pytest.raises(RankUnavailableError, match="restarted"):
            host.call(replace(rank.calls[0], epoch=epoch, number=99))
    assert host.info().stats.num_used_blocks == 1


def test_drivers_do_not_share_names_or_numbers(host):
    one, two = RecordingRank(host, "one"), RecordingRank(host, "two")
    a, b = make_sequence(8, seq_id="s"), make_sequence(4, 100, seq_id="s")
    assert one.allocate([a], [8]).result()
    assert two.allocate([b], [4]).result()
    assert (a.single_block_id, b.single_block_id) == (1, 2)
    assert one.calls[0].number == two.calls[0].number == 1
    one.release([a], publish=False).result()
    assert host.info().stats.num_used_blocks == 1


def test_only_what_is_new_travels(host, rank):
    sequence = make_sequence(196)
    rank.allocate([sequence], [sequence.num_tokens]).result()
    for token in range(4):
        sequence.append(token)
        rank.allocate([sequence], [sequence.num_tokens]).result()
    sizes = [len(call.updates.token_ids) for call in rank.calls]
    assert sizes == [196, 1, 1, 1, 1]
    answers = [reply.result() for reply in rank.replies]
    assert [len(answer.states.block_ids) for answer in answers] == [49, 1, 0, 0, 0]
    theirs = host._kv._rows.sequences[sequence.single_block_id]
    assert theirs.token_ids.tolist() == sequence.token_ids.tolist()


def test_tokens_appended_while_a_call_is_under_way_are_sent_with_the_next(host, rank):
    sequence = make_sequence(4)
    reply = rank.allocate([sequence], [4])
    sequence.append(77)
    reply.result()
    rank.allocate([sequence], [5]).result()
    theirs = host._kv._rows.sequences[sequence.single_block_id]
    assert theirs.token_ids.tolist() == [0, 1, 2, 3, 77]


def test_deltas_that_overlap_add_each_token_once(host, rank):
    sequence = make_sequence(4)
    rank.allocate([sequence], [4]).result()
    replies = []
    for token in (77, 78):
        sequence.append(token)
        replies.append(rank.allocate([sequence], [sequence.num_tokens]))
    assert [len(call.updates.token_ids) for call in rank.calls] == [4, 1, 2]
    for reply in reversed(replies):
        reply.result()
    rank.allocate([sequence], [6]).result()
    theirs = host._kv._rows.sequences[sequence.single_block_id]
    assert theirs.token_ids.tolist() == [0, 1, 2, 3, 77, 78]


def test_a_refused_growth_does_not_lose_tokens(host, rank):
    sequence = make_sequence(392)
    rank.allocate([sequence], [392]).result()
    sequence.extend(range(8))
    with pytest.raises(RequestError):
        rank.allocate([sequence], [sequence.num_tokens]).result()
    assert rank.allocate([sequence], [396]).result()
    theirs = host._kv._rows.sequences[sequence.single_block_id]
    assert theirs.token_ids.tolist() == sequence.token_ids.tolist()


def test_calls_and_answers_pickle(host, rank):
    sequence = make_sequence(10)
    rank.allocate([sequence], [10]).result()
    for message in (rank.calls[0], host.call(rank.calls[0]), host.info()):
        copy = copied(message)
        assert repr(copy) == repr(message)


def test_an_error_is_an_answer_and_changes_nothing(host):
    answer = host.call(Call("driver", 0, 1, 7, "submit", None, []))
    assert isinstance(answer.error, NotSupportedError)
    assert isinstance(copied(answer).error, NotSupportedError)
    unknown = host.call(Call("driver", 0, 2, 7, "fly", None, None))
    assert isinstance(unknown.error, NotSupportedError)


def test_a_rank_without_engine_has_nothing_to_poll(rank):
    with pytest.raises(NotSupportedError, match="no engine"):
        rank.poll(0.0)


def test_answers_are_remembered_until_their_calls_are_settled(host, rank):
    first = rank.refresh()
    for _ in range(200):
        rank.refresh().result()
    lease = host._service.leases.find("driver", 0)[0]
    assert lease is not None
    assert len(lease.answers) == 201, "the first one was not read, and may be asked for again"
    assert host.call(rank.calls[0]).number == 1
    first.result()
    rank.refresh().result()
    assert len(lease.answers) == 1
    with pytest.raises(RankUnavailableError, match="settled the calls up to 201"):
        host.call(rank.calls[0])
