"""Short names for token prefixes, for use outside the manager that caches them.

Matching never depends on these: the prefix cache compares tokens. Where a prefix must be named
elsewhere (checkpoints, host tiers, routing, events), two 64-bit lanes of a keyed multilinear hash
serve: lane(prefix) = sum over positions i of key[i] * (token[i] + 1) modulo 2**64.

For keys that an attacker does not know, two different prefixes of equal length collide in one
lane with probability at most 2**-33: a token difference d < 2**32 has at most 31 factors of two,
so key * d takes each of its values for at most 2**31 of the 2**64 keys. Both lanes together:
at most 2**-66 per pair. Tokens count from one and the length enters the finaliser, so a prefix and
the same prefix followed by zeros differ.
See Lemire and Kaser, "Strongly universal string hashing is fast", 2014.
"""

import hashlib
import os
import sys

import numpy as np
from numpy.typing import NDArray

from .namespace import DEFAULT, Namespace
from .tokens import TokenIds, as_tokens

_NUM_LANES = 2
_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)
_SHIFT = np.uint64(32)
_MIX_ONE: list[int] = _MIX.tolist()
_MASK = (1 << 64) - 1


class PrefixHasher:
    """Names every full block's prefix; equal in each process that has the same seed.

    Args:
        block_size: tokens per block.
        seed: the pool's secret; None draws a random one.
    """

    def __init__(self, block_size: int, seed: bytes | None = None) -> None:
        self.block_size = block_size
        self._seed = os.urandom(16) if seed is None else seed
        self._keys = np.empty((_NUM_LANES, 0), np.uint64)

    def hashes(self, token_ids: TokenIds, *, namespace: Namespace = DEFAULT) -> NDArray[np.uint64]:
        """Return uint64 [n, 2]: row i names tokens [0, (i + 1) * block_size) in the namespace."""
        tokens = as_tokens(token_ids)
        num_blocks = len(tokens) // self.block_size
        num_tokens = num_blocks * self.block_size
        if num_blocks == 0:
            return np.empty((0, _NUM_LANES), np.uint64)
        sums = self.block_sums(tokens[:num_tokens], namespace)
        return _finish(np.cumsum(sums, axis=1), np.arange(1, num_blocks + 1, dtype=np.uint64))

    def names(self, token_ids: TokenIds, *, namespace: Namespace = DEFAULT) -> list[bytes]:
        """The same as 16 bytes per full block."""
        raw = self.hashes(token_ids, namespace=namespace).tobytes()
        return [raw[i : i + 16] for i in range(0, len(raw), 16)]

    def name(self, token_ids: TokenIds, *, namespace: Namespace = DEFAULT) -> bytes:
        """The last of ``names``: that of all full blocks of the tokens, of which there is one."""
        name: bytes = self.hashes(token_ids, namespace=namespace)[-1].tobytes()
        return name

    def block_sums(
        self, tokens: NDArray[np.int32], namespace: Namespace, start: int = 0
    ) -> NDArray[np.uint64]:
        """What each full block adds to the lanes, uint64 [2, n].

        Args:
            tokens: of whole blocks.
            namespace: whose they are.
            start: the position of the first, a multiple of the block size.
        """
        stop = start + len(tokens)
        self._grow_keys(stop)
        values = (tokens.astype(np.int64) + 1).view(np.uint64)
        products = self._keys[:, start:stop] * values
        sums: NDArray[np.uint64] = products.reshape(_NUM_LANES, -1, self.block_size).sum(axis=2)
        if start == 0:
            sums[:, 0] += self._digest(b"namespace", repr(namespace.root).encode())
        for index, (offset, content) in enumerate(namespace.multimodal):
            if start <= offset < stop:
                item = repr((index, offset, content)).encode()
                sums[:, (offset - start) // self.block_size] += self._digest(b"item", item)
        return sums

    def _grow_keys(self, num_tokens: int) -> None:
        have = self._keys.shape[1]
        if have >= num_tokens:
            return
        # Philox counts, so a longer draw starts with the shorter one; its raw stream is stable
        # between NumPy versions, unlike the distributions built on it.
        length = max(1024, 1 << (num_tokens - 1).bit_length())
        self._keys = np.stack(
            [
                np.random.Philox(
                    key=int.from_bytes(self._derive(b"lane%d" % lane), "little")
                ).random_raw(length)
                for lane in range(_NUM_LANES)
            ]
        )

    def _derive(self, purpose: bytes) -> bytes:
        key = hashlib.blake2b(self._seed, digest_size=32, person=b"raykv.prefix").digest()
        return hashlib.blake2b(purpose, key=key, digest_size=16).digest()

    def _digest(self, purpose: bytes, data: bytes) -> NDArray[np.uint64]:
        return np.frombuffer(self._derive(purpose + b":" + data), np.uint64)


class GrowingName:
    """The name of a prefix that grows: only what is new is read.

    Args:
        hasher: whose names they are.
        namespace: whose tokens.
    """

    def __init__(self, hasher: PrefixHasher, namespace: Namespace = DEFAULT) -> None:
        self._hasher = hasher
        self._namespace = namespace
        self._num_tokens = 0
        self._lanes = np.zeros(_NUM_LANES, np.uint64)

    def of(self, token_ids: NDArray[np.int32], num_tokens: int) -> bytes:
        """The name of the first tokens, the same as ``names`` gives.

        Args:
            token_ids: int32, no fewer than those; what was named before must not have changed.
            num_tokens: how many, whole blocks and at least one; fewer than before reads them anew.
        """
        size = self._hasher.block_size
        assert num_tokens > 0, "only blocks have names"
        assert num_tokens % size == 0, "only full blocks have names"
        if num_tokens < self._num_tokens:
            self._num_tokens, self._lanes = 0, np.zeros(_NUM_LANES, np.uint64)
        start = self._num_tokens
        if start < num_tokens:
            new = self._hasher.block_sums(token_ids[start:num_tokens], self._namespace, start)
            self._lanes = self._lanes + new.sum(axis=1)
            self._num_tokens = num_tokens
        return b"".join(_finish_one(lane, num_tokens // size) for lane in self._lanes.tolist())


def _finish_one(lane: int, number: int) -> bytes:
    """The same as ``_finish`` for one lane; NumPy takes ten times as long for so little."""
    lane = (lane + number * _MIX_ONE[1]) & _MASK
    lane = ((lane ^ (lane >> 32)) * _MIX_ONE[0]) & _MASK
    return (lane ^ (lane >> 32)).to_bytes(8, sys.byteorder)


def _finish(lanes: NDArray[np.uint64], numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hashes [n, 2] from lanes [2, n] at the ends of blocks, of these ``numbers``."""
    lanes = lanes + numbers * _MIX[1]
    lanes = (lanes ^ (lanes >> _SHIFT)) * _MIX[0]  # spreads the weak low bits upwards
    lanes ^= lanes >> _SHIFT
    return np.ascontiguousarray(lanes.T)
