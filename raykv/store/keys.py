"""Names of KV blocks that outlive the pool: equal in every process and every run.

Within a pool prefixes have short names under a secret seed (``raykv.core.prefix_hash``), and tokens
are compared besides. A store outlives any secret and keeps no tokens, so nothing but the key says
that a value is the right one. Hence a cryptographic digest: nobody can find two prefixes with one
key (2**128 tries), whatever he sends.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Iterable
from typing import Final

import numpy as np

from raykv.core.namespace import DEFAULT, MultimodalItems, Namespace
from raykv.core.tokens import TokenIds, as_tokens
from raykv.errors import ConfigError
from raykv.memory.spec import KVSpec

KEY_BYTES: Final = 32

# Part of every key: another way to derive keys or to lay out blocks must get another number.
_FORMAT = b"1"
_LENGTH = struct.Struct("<Q")


class KVKeys:
    """Names every full block by all that its KV depends on.

    key(i) = blake2b(key(i - 1), tokens of block i, multimodal items that begin in block i), and
    key(-1) is a digest of the fingerprint, the block size, the tenant, the LoRA and the weights
    version. Each part has its tag or its fixed length, so different inputs are never spelled alike.

    Args:
        model_fingerprint: names the weights and the layout of a block; see ``model_fingerprint``.
        block_size: tokens per block.

    Raises:
        ConfigError: the fingerprint is empty or no bytes, or the block size is not positive.
    """

    def __init__(self, model_fingerprint: bytes, block_size: int) -> None:
        if not isinstance(model_fingerprint, bytes) or not model_fingerprint:
            raise ConfigError(
                f"model_fingerprint is {model_fingerprint!r}, but must be bytes that name the"
                " model: without, KV of one model would be taken for another's"
            )
        if not isinstance(block_size, int) or block_size < 1:
            raise ConfigError(f"block_size is {block_size!r} tokens, but must be at least 1")
        self.block_size = block_size
        self._model = _fields(
            ("format", _FORMAT), ("model", model_fingerprint), ("block_size", _number(block_size))
        )
        self._salt = b""

    def renew(self) -> None:
        """Name everything otherwise from now on: nothing that was stored before is found here.

        Who makes keys anew, such as a pool that is started later, finds what was stored before, and
        not what was stored under these.
        """
        self._salt = _fields(("salt", secrets.token_bytes(16)))

    def keys(self, token_ids: TokenIds, namespace: Namespace = DEFAULT) -> list[bytes]:
        """One key of 32 bytes per full block: key i names tokens [0, (i + 1) * block_size).

        ``namespace.weights_version`` counts updates within one pool. Whoever changes weights under
        a store that outlives the pool takes another fingerprint as well.

        Raises:
            ValueError: the token ids are no row of integers that fit int32.
        """
        tokens = as_tokens(token_ids).astype("<i4", copy=False)
        step = self.block_size * tokens.itemsize
        data = tokens[: len(tokens) // self.block_size * self.block_size].tobytes()
        items = self._items(namespace.multimodal)
        blake2b = hashlib.blake2b
        key, keys = self._root(namespace), []
        for index, start in enumerate(range(0, len(data), step)):
            block = key + data[start : start + step]
            if index in items:
                block += items[index]
            key = blake2b(block, digest_size=KEY_BYTES, person=b"raykv.block").digest()
            keys.append(key)
        return keys

    def _root(self, namespace: Namespace) -> bytes:
        fields = _fields(
            ("tenant", _text(namespace.tenant)),
            ("lora", _text(namespace.lora)),
            ("weights_version", _number(namespace.weights_version)),
        )
        return _digest(self._model + fields + self._salt, b"raykv.root")

    def _items(self, items: MultimodalItems) -> dict[int, bytes]:
        """By block, what the items that begin in it add; their order within a block counts."""
        added: dict[int, bytes] = {}
        for offset, content in items:
            match content:
                case str():
                    field = ("text", _text(content))
                case bytes():
                    field = ("bytes", content)
                case _:
                    field = ("number", _number(content))
            index = offset // self.block_size
            added[index] = added.get(index, b"") + _fields(("offset", _number(offset)), field)
        return added


def is_storable(namespace: Namespace) -> bool:
    """Whether keys name the weights of this namespace for everybody.

    A fingerprint names the weights that a pool begins with, version 0. Later versions are numbers
    that the pool counts: another pool means other weights by the same one.
    """
    return namespace.weights_version == 0


def layout_name(spec: KVSpec) -> bytes:
    """What a block's bytes mean: layers, tensors, block size and dtype, spelled out."""
    shapes = [
        [(tensor.name, tuple(map(int, tensor.shape))) for tensor in layer.tensors]
        for layer in spec.layers
    ]
    return _text(repr((shapes, int(spec.block_size), spec.dtype)))


def model_fingerprint(layout: bytes, weights: bytes) -> bytes:
    """Name a model and the layout of its KV blocks, in 32 bytes.

    Args:
        layout: what a block's bytes mean; see ``layout_name``.
        weights: names the very weights, such as a digest of the checkpoint's files. Two runs that
            train from one checkpoint do not have the same weights.

    Raises:
        ConfigError: one of them is empty.
    """
    if not layout:
        raise ConfigError("layout is empty: give bytes that say what a block's bytes mean")
    if not weights:
        raise ConfigError("weights is empty: give bytes that name the weights, such as a digest")
    return _digest(_fields(("layout", layout), ("weights", weights)), b"raykv.model")


def _digest(data: bytes, person: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES, person=person).digest()


def _fields(*fields: tuple[str, bytes]) -> bytes:
    """Spell named values so that no other fields are spelled alike."""
    return b"".join(map(_sized, _flatten(fields)))


def _flatten(fields: Iterable[tuple[str, bytes]]) -> Iterable[bytes]:
    for name, value in fields:
        yield name.encode()
        yield value


def _sized(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # a lone surrogate is a name like any other


def _number(number: int | np.integer) -> bytes:
    return b"%d" % number
