"""The bytes that a TCP block server and its readers exchange; pure, no sockets.

::

    server                                reader
    Hello        →                                   sizes, identity, a nonce
                           ←   Proof                 a nonce, and that it knows the secret
    Welcome      →                                   that the server knows it, too
                           ←   Request               n, then n ids, then n generations
    Batch        →                                   m ≤ n rows follow; 0: the next row has changed
    m rows       →
    m generations →                                  after the rows were sent
    ...                                              until all n, or a generation that differs

Then the next request. Both ends prove that they know the pool's secret, and neither sends it. What
is sent afterwards is neither encrypted nor signed: who can alter the traffic between nodes can
forge blocks.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raykv.errors import ConfigError, TransferError

NONCE_BYTES = 32
MAC_BYTES = 32
IDENTITY_BYTES = 8
MIN_SECRET_BYTES = 16

_HELLO = struct.Struct(f"<8sQQ{IDENTITY_BYTES}s{NONCE_BYTES}s")
_HELLO_MAGIC = b"raykvtx1"
_COUNT = struct.Struct("<4sI")
_REQUEST_MAGIC, _BATCH_MAGIC = b"want", b"rows"

HELLO_BYTES = _HELLO.size
PROOF_BYTES = NONCE_BYTES + MAC_BYTES
WELCOME_BYTES = MAC_BYTES
COUNT_BYTES = _COUNT.size
"""Of the head of a request or a batch."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What a server says first.

    Attributes:
        num_blocks: rows of its slab, the padding row 0 included.
        block_bytes: bytes of a row.
        identity: the server's own, so that another one at its port is not taken for it.
        nonce: of this connection.
    """

    num_blocks: int
    block_bytes: int
    identity: bytes
    nonce: bytes

    def pack(self) -> bytes:
        """As bytes."""
        return _HELLO.pack(
            _HELLO_MAGIC, self.num_blocks, self.block_bytes, self.identity, self.nonce
        )

    @classmethod
    def unpack(cls, data: bytes) -> Hello:
        """From HELLO_BYTES bytes.

        Raises:
            TransferError: it is no such message.
        """
        magic, *fields = _HELLO.unpack(data)
        if magic != _HELLO_MAGIC:
            raise TransferError(
                f"what answers is no block server of this version: it begins with {magic!r}"
            )
        return cls(*fields)


def check_secret(secret: bytes) -> None:
    """Refuse a secret that could be guessed.

    Raises:
        ConfigError: it is too short.
    """
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"the pool's secret has {len(secret)} bytes: give at least {MIN_SECRET_BYTES} random"
            " ones"
        )


def prove(secret: bytes, hello: bytes) -> bytes:
    """A reader's Proof, which answers a Hello."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + _mac(secret, b"reader", hello, nonce)


def welcome(secret: bytes, hello: bytes, proof: bytes) -> bytes:
    """A server's Welcome, which answers a Proof.

    Raises:
        TransferError: the reader does not know the secret.
    """
    nonce, mac = proof[:NONCE_BYTES], proof[NONCE_BYTES:]
    if not hmac.compare_digest(mac, _mac(secret, b"reader", hello, nonce)):
        raise TransferError("a reader does not know the pool's secret")
    return _mac(secret, b"server", hello, nonce)


def check_welcome(secret: bytes, hello: bytes, proof: bytes, answer: bytes) -> None:
    """Check a Welcome.

    Raises:
        TransferError: the server does not know the secret.
    """
    if not hmac.compare_digest(answer, _mac(secret, b"server", hello, proof[:NONCE_BYTES])):
        raise TransferError("the block server does not know the pool's secret")


def pack_request(ids: NDArray[np.integer], generations: NDArray[np.uint64]) -> bytes:
    """A Request."""
    return b"".join(
        (
            _COUNT.pack(_REQUEST_MAGIC, len(ids)),
            ids.astype("<u4").tobytes(),
            generations.astype("<u8").tobytes(),
        )
    )


def request_size(head: bytes, num_blocks: int) -> tuple[int, int]:
    """Read the head of a request to a slab of so many blocks.

    Returns:
        Rows that it asks for, and bytes that follow.

    Raises:
        TransferError: it is no such message, or asks for nothing or more than there is.
    """
    num = _count(head, _REQUEST_MAGIC)
    if not 0 < num < num_blocks:
        raise TransferError(f"a request is of {num} rows of a slab of {num_blocks}")
    return num, 12 * num


def unpack_request(body: bytes, num_blocks: int) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Read the body of a request to a slab of so many blocks.

    Returns:
        Ids int64 [n] and generations uint64 [n].

    Raises:
        TransferError: a row is padding, or not there.
    """
    num = len(body) // 12
    ids = np.frombuffer(body, "<u4", num).astype(np.int64)
    if ids.min() < 1 or ids.max() >= num_blocks:
        raise TransferError(
            f"a request is of rows {ids.min()} to {ids.max()} of a slab of {num_blocks}"
        )
    return ids, unpack_generations(body[4 * num :])


def pack_batch(num: int) -> bytes:
    """The head of a Batch."""
    return _COUNT.pack(_BATCH_MAGIC, num)


def unpack_batch(head: bytes, most: int) -> int:
    """How many rows follow.

    Raises:
        TransferError: it is no such message, or they are more than ``most``.
    """
    num = _count(head, _BATCH_MAGIC)
    if num > most:
        raise TransferError(f"a server begins to send {num} rows where {most} are left to send")
    return num


def pack_generations(generations: NDArray[np.uint64]) -> bytes:
    """What follows the rows of a Batch."""
    return generations.astype("<u8").tobytes()


def unpack_generations(data: bytes) -> NDArray[np.uint64]:
    """Read what ``pack_generations`` made."""
    return np.frombuffer(data, "<u8").astype(np.uint64)


def _count(head: bytes, wanted: bytes) -> int:
    magic, num = _COUNT.unpack(head)
    if magic != wanted:
        raise TransferError(f"a message begins with {magic!r} instead of {wanted!r}")
    return int(num)


def _mac(secret: bytes, who: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, who + hello + nonce, hashlib.sha256)
