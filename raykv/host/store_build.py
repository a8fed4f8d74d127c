"""Makes the store behind a host tier from its configuration, and names the weights in it."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Final

from raykv.config_host import StoreConfig
from raykv.errors import ConfigError
from raykv.store import DiskStore, GuardedStore, KVStore

_WEIGHT_FILES: Final = ("*.safetensors", "*.bin")


async def make_store(config: StoreConfig, folder_name: str) -> GuardedStore:
    """Open the store.

    A Redis server is not spoken to before the first call: if it is not there, that is counted and
    reported like any later failure.

    Args:
        config: what to open.
        folder_name: of this tier within ``config.path``, for a disk store: each has one process.

    Raises:
        ConfigError: redis-py is not installed, or a setting makes no sense.
        StoreError: the folder cannot be used, or another process uses it.
    """
    return GuardedStore(
        await _bare(config, folder_name),
        timeout_s=config.timeout_s,
        max_failures=config.max_failures,
        cooldown_s=config.cooldown_s,
    )


async def _bare(config: StoreConfig, folder_name: str) -> KVStore:
    if config.type == "redis":
        # The extra ``redis``: only who asks for it needs it.
        from raykv.store.redis_store import RedisStore  # noqa: PLC0415

        assert config.url is not None, "StoreConfig checks it"
        return RedisStore(config.url, config.ttl_s, timeout_s=config.timeout_s)
    assert config.path is not None, "StoreConfig checks it"
    path = Path(config.path) / folder_name
    return await asyncio.to_thread(DiskStore, path, config.max_bytes)  # it reads what is there


def weights_name(config: StoreConfig, model_folder: Path | None) -> bytes:
    """What names the very weights in keys: ``config.weights_id``, else a digest of the files.

    Args:
        config: of the store.
        model_folder: where the model's files are; None if there is no model here.

    Raises:
        ConfigError: neither is given, or the folder holds no weights.
    """
    if config.weights_id is not None:
        return b"id:" + config.weights_id.encode("utf-8", "surrogatepass")
    if model_folder is None:
        raise ConfigError(
            "store.weights_id is not given, and there is no folder of a model to take a digest of:"
            " name the weights, for KV of other weights under the same name would be served"
        )
    return b"files:" + weights_digest(model_folder)


def weights_digest(folder: Path) -> bytes:
    """A digest of a model's files, 32 bytes; reads all of them, at about a gigabyte per second.

    Of names, sizes and contents of ``config.json`` and the weights (``*.safetensors``, ``*.bin``).

    Raises:
        ConfigError: the folder holds no weights, or a file cannot be read.
    """
    weights = sorted(file for kind in _WEIGHT_FILES for file in folder.glob(kind))
    if not weights:
        raise ConfigError(
            f"{folder} holds no weights ({' or '.join(_WEIGHT_FILES)}) to take a digest of: give"
            " store.weights_id"
        )
    digest = hashlib.blake2b(digest_size=32, person=b"raykv.weights")
    try:
        for path in [folder / "config.json", *weights]:
            if path.exists():
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, hashlib.blake2b).digest()
                name = path.name.encode("utf-8", "surrogateescape")
                digest.update(b"%d:%s:%d:" % (len(name), name, path.stat().st_size) + content)
    except OSError as error:
        raise ConfigError(
            f"the weights in {folder} cannot be read to name them ({error}): make them readable, or"
            " give store.weights_id"
        ) from None
    return digest.digest()
