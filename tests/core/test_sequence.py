"""Sequences: tokens that grow, blocks that map them to slots."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.core import DEFAULT, KVCacheState, Namespace, Request, Sequence

from .strategies import wide_tokens


def held(num_tokens, block_ids, block_size):
    """A sequence as it stands after an allocation."""
    sequence = Sequence(range(num_tokens))
    sequence.kv_state = KVCacheState(block_size=block_size, block_ids=np.array(block_ids, np.int32))
    return sequence


def test_tokens_are_int32_and_copied_in():
    prompt = np.array([1, 2, 3], np.int32)
    sequence = Sequence(prompt)
    prompt[:] = 9
    assert sequence.token_ids.tolist() == [1, 2, 3]
    assert sequence.token_ids.dtype == np.int32
    assert sequence.num_tokens == 3


def test_token_ids_cannot_be_written_through():
    sequence = Sequence([1, 2, 3])
    with pytest.raises(ValueError):
        sequence.token_ids[0] = 9


def test_token_ids_read_before_growth_keep_their_content():
    sequence = Sequence([1, 2, 3])
    before = sequence.token_ids
    for token in range(100):
        sequence.append(token)
    assert before.tolist() == [1, 2, 3]


@given(prompt=wide_tokens, pieces=st.lists(wide_tokens, max_size=5))
def test_append_and_extend_grow_the_tokens(prompt, pieces):
    one, other = Sequence(prompt), Sequence(prompt)
    expected = list(prompt)
    for piece in pieces:
        one.extend(piece)
        for token in piece:
            other.append(token)
        expected += piece
        for sequence in (one, other):
            assert sequence.token_ids.tolist() == expected
            assert sequence.num_tokens == len(expected)


def test_extend_takes_arrays_and_iterables():
    sequence = Sequence([1])
    sequence.extend(np.array([2, 3], np.int32))
    sequence.extend(iter([4, 5]))
    assert sequence.token_ids.tolist() == [1, 2, 3, 4, 5]


def test_a_sequence_may_start_empty():
    sequence = Sequence([])
    sequence.append(7)
    assert sequence.token_ids.tolist() == [7]


@pytest.mark.parametrize("bad", [[1.5], ["a"], [[1, 2]], [2**31]])
def test_what_are_no_token_ids_is_refused(bad):
    with pytest.raises(ValueError):
        Sequence(bad)
    sequence = Sequence([1])
    with pytest.raises(ValueError):
        sequence.extend(bad)
    assert sequence.token_ids.tolist() == [1]


def test_appending_what_does_not_fit_int32_is_refused_and_changes_nothing():
    sequence = Sequence([1])
    with pytest.raises((ValueError, OverflowError)):
        sequence.append(2**31)
    assert sequence.token_ids.tolist() == [1]


def test_sequence_ids_are_drawn_apart_or_given():
    assert len({Sequence([1]).seq_id for _ in range(20)}) == 20
    assert Sequence([1], seq_id="mine").seq_id == "mine"


def test_the_namespace_and_the_limit_are_kept():
    sequence = Sequence([1])
    assert (sequence.namespace, sequence.max_new_tokens) == (DEFAULT, None)
    namespace = Namespace(tenant="a")
    sequence = Sequence([1], namespace=namespace, max_new_tokens=4)
    assert (sequence.namespace, sequence.max_new_tokens) == (namespace, 4)


def test_a_new_sequence_holds_nothing():
    sequence = Sequence([1, 2])
    assert sequence.dp_rank is sequence.single_block_id is sequence.linear_state_slot is None
    for state in (sequence.kv_state, sequence.host_kv_state):
        assert state.block_ids.tolist() == []
        assert state.block_ids.dtype == np.int32
        assert state.num_shared_blocks == state.num_computed_tokens == 0
        assert state.composite_block_ids == []
    assert sequence.kv_state is not sequence.host_kv_state


def test_slot_ids_follow_the_seeds_formula():
    sequence = held(10, block_ids=[5, 2, 9], block_size=4)
    expected = [20, 21, 22, 23, 8, 9, 10, 11, 36, 37]
    assert sequence.slot_ids().tolist() == expected
    assert sequence.slot_ids().dtype == np.int64
    for start in range(11):
        assert sequence.slot_ids(start).tolist() == expected[start:]
        for stop in range(start, 11):
            assert sequence.slot_ids(start, stop).tolist() == expected[start:stop]


@given(
    block_ids=st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=6),
    block_size=st.integers(1, 64),
)
def test_slot_ids_do_not_overflow(block_ids, block_size):
    num_tokens = len(block_ids) * block_size
    slots = held(num_tokens, block_ids, block_size).slot_ids()
    expected = [block_ids[i // block_size] * block_size + i % block_size for i in range(num_tokens)]
    assert slots.tolist() == expected


def test_slots_beyond_the_blocks_are_refused():
    sequence = held(10, block_ids=[5, 2], block_size=4)
    with pytest.raises(ValueError, match="8"):
        sequence.slot_ids(0, 9)
    for start, stop in ((-1, 4), (5, 4), (9, 9)):
        with pytest.raises(ValueError):
            sequence.slot_ids(start, stop)


def test_a_sequence_without_blocks_has_no_slots():
    sequence = Sequence([1, 2, 3])
    assert sequence.slot_ids().tolist() == []
    with pytest.raises(ValueError):
        sequence.slot_ids(0, 1)


def test_reset_forgets_blocks_slots_and_rank_and_keeps_the_tokens():
    sequence = held(6, block_ids=[5, 2], block_size=4)
    sequence.dp_rank, sequence.single_block_id, sequence.linear_state_slot = 1, 2, 3
    sequence.kv_state.num_shared_blocks = 1
    sequence.kv_state.num_computed_tokens = 6
    sequence.kv_state.composite_block_ids.append(np.array([1], np.int32))
    sequence.host_kv_state.block_ids = np.array([7], np.int32)
    sequence.append(8)
    name = sequence.seq_id
    sequence.reset()
    assert sequence.token_ids.tolist() == [0, 1, 2, 3, 4, 5, 8]
    assert sequence.seq_id == name
    assert sequence.dp_rank is sequence.single_block_id is sequence.linear_state_slot is None
    for state in (sequence.kv_state, sequence.host_kv_state):
        assert len(state.block_ids) == state.num_shared_blocks == state.num_computed_tokens == 0
        assert state.composite_block_ids == []
    assert sequence.slot_ids().tolist() == []


def test_states_of_two_sequences_are_apart():
    one, other = Sequence([1]), Sequence([1])
    one.kv_state.composite_block_ids.append(np.array([1], np.int32))
    assert other.kv_state.composite_block_ids == []


def test_a_request_lists_its_sequences():
    sequences = [Sequence([1]), Sequence([2])]
    assert Request(sequences).sequences == sequences
