"""The framing: what is packed is what is read, and anything else is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from raykv.errors import ConfigError, TransferError
from raykv.host.transport import wire

SECRET, OTHER = b"s" * 16, b"o" * 16
NUM_BLOCKS = 100

hellos = st.builds(
    wire.Hello,
    st.integers(2, 2**40),
    st.integers(1, 2**40),
    st.binary(min_size=8, max_size=8),
    st.binary(min_size=32, max_size=32),
)
ids = st.lists(st.integers(1, NUM_BLOCKS - 1), min_size=1, max_size=NUM_BLOCKS - 1)


@given(hellos)
def test_hello(hello):
    data = hello.pack()
    assert len(data) == wire.HELLO_BYTES
    assert wire.Hello.unpack(data) == hello


@given(st.binary(min_size=wire.HELLO_BYTES, max_size=wire.HELLO_BYTES))
def test_anything_else_is_no_hello(data):
    assume(not data.startswith(b"raykvtx1"))
    with pytest.raises(TransferError, match="no block server"):
        wire.Hello.unpack(data)


@given(hellos)
def test_who_knows_the_secret_is_welcome(hello):
    words = hello.pack()
    proof = wire.prove(SECRET, words)
    assert len(proof) == wire.PROOF_BYTES
    answer = wire.welcome(SECRET, words, proof)
    assert len(answer) == wire.WELCOME_BYTES
    wire.check_welcome(SECRET, words, proof, answer)


@given(hellos, st.data())
def test_a_changed_bit_is_not(hello, data):
    def flip(words):
        at = data.draw(st.integers(0, 8 * len(words) - 1))
        changed = bytearray(words)
        changed[at // 8] ^= 1 << at % 8
        return bytes(changed)

    words = hello.pack()
    proof = wire.prove(SECRET, words)
    answer = wire.welcome(SECRET, words, proof)
    for secret, said, proven in (
        (OTHER, words, proof),
        (SECRET, flip(words), proof),
        (SECRET, words, flip(proof)),
    ):
        with pytest.raises(TransferError, match="a reader does not know"):
            wire.welcome(secret, said, proven)
    for secret, said, proven, answered in (
        (OTHER, words, proof, answer),
        (SECRET, flip(words), proof, answer),
        (SECRET, words, proof, flip(answer)),
        (SECRET, words, proof, proof[32:]),  # its own words sent back
    ):
        with pytest.raises(TransferError, match="server does not know"):
            wire.check_welcome(secret, said, proven, answered)


def test_proofs_are_never_the_same():
    words = wire.Hello(2, 1, bytes(8), bytes(32)).pack()
    assert wire.prove(SECRET, words) != wire.prove(SECRET, words)


def test_a_short_secret_is_refused():
    wire.check_secret(bytes(16))
    with pytest.raises(ConfigError, match="has 15 bytes"):
        wire.check_secret(bytes(15))


@given(ids, st.data())
def test_request(ids, data):
    generations = data.draw(
        st.lists(st.integers(0, 2**64 - 1), min_size=len(ids), max_size=len(ids))
    )
    packed = wire.pack_request(np.array(ids), np.array(generations, np.uint64))
    head, body = packed[: wire.COUNT_BYTES], packed[wire.COUNT_BYTES :]
    assert wire.request_size(head, NUM_BLOCKS) == (len(ids), len(body))
    got_ids, got_generations = wire.unpack_request(body, NUM_BLOCKS)
    assert got_ids.tolist() == ids
    assert got_generations.tolist() == generations


@pytest.mark.parametrize("num", [0, NUM_BLOCKS, 2**32 - 1])
def test_a_request_of_nothing_or_too_much_is_refused(num):
    with pytest.raises(TransferError, match=f"of {num} rows"):
        wire.request_size(b"want" + num.to_bytes(4, "little"), NUM_BLOCKS)


@pytest.mark.parametrize("row", [0, NUM_BLOCKS, 2**32 - 1])
def test_a_request_of_rows_that_are_not_there_is_refused(row):
    packed = wire.pack_request(np.array([1, row, 2]), np.zeros(3, np.uint64))
    with pytest.raises(TransferError, match=f"of a slab of {NUM_BLOCKS}"):
        wire.unpack_request(packed[wire.COUNT_BYTES :], NUM_BLOCKS)


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_batch(num, most):
    head = wire.pack_batch(num)
    assert len(head) == wire.COUNT_BYTES
    if num <= most:
        assert wire.unpack_batch(head, most) == num
    else:
        with pytest.raises(TransferError, match=f"{num} rows where {most}"):
            wire.unpack_batch(head, most)


@given(st.binary(min_size=wire.COUNT_BYTES, max_size=wire.COUNT_BYTES))
def test_anything_else_is_no_head(head):
    assume(head[:4] not in {b"want", b"rows"})
    for read in (wire.request_size, wire.unpack_batch):
        with pytest.raises(TransferError, match="begins with"):
            read(head, NUM_BLOCKS)


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_generations(numbers):
    packed = wire.pack_generations(np.array(numbers, np.uint64))
    assert len(packed) == 8 * len(numbers)
    assert wire.unpack_generations(packed).tolist() == numbers
