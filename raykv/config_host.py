"""The configuration of host memory and of stores behind it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from raykv.config_model import FrozenModel


class HostConfig(FrozenModel):
    """Host memory behind the device's: KV that falls out of the one is kept in the other.

    Attributes:
        num_blocks: host blocks of each tier, the padding block 0 included.
        num_state_slots: checkpoints of recurrent state that each tier keeps, the padding slot 0
            included; by default as many as a rank has slots. Of no use without linear_state.
        scope: ``node``: the ranks of a node share a tier; ``rank``: each has its own.
        eviction: which host blocks go first; see PoolConfig.eviction.
        checksum_rate: share of the loads whose checksums are compared, 0 to 1; with 0 none are
            computed either.
        timeout_s: seconds that a rank waits for its tier; then it computes, and goes on without.
        lease_s: seconds that a rank may be silent until what it was writing is set aside.
        populate: take all of the memory at the start, not as blocks are first written.
        peers: whether blocks are also fetched from other nodes' tiers.
        transport: how: ``tcp`` streams, or through Ray's ``object_store``.
    """

    num_blocks: int = Field(ge=2, lt=2**31)
    num_state_slots: int | None = Field(None, ge=2, lt=2**31)
    scope: Literal["node", "rank"] = "node"
    eviction: str = "lru"
    checksum_rate: float = Field(1.0, ge=0, le=1)
    timeout_s: float = Field(1.0, gt=0)
    lease_s: float = Field(10.0, gt=0)
    populate: bool = False
    peers: bool = True
    transport: Literal["tcp", "object_store"] = "tcp"


class StoreConfig(FrozenModel):
    """A store behind the host tier, which keeps KV across restarts (the seed's kvcache_store).

    Attributes:
        type: ``disk`` or ``redis``.
        path: the folder of a disk store, made where missing; each tier makes one of its own in it.
        url: of a Redis server.
        max_bytes: what a disk store may hold.
        ttl_s: seconds after which a Redis server forgets a block; None for never.
        weights_id: names the very weights, so that restarted pools find their KV; None takes a
            digest of the model's files, so without a model it has to be given.
        timeout_s: seconds that one call to the store may take.
        prefetch_timeout_s: seconds that a prompt waits for what the store has of it.
        max_failures: calls that fail in a row until the store is left alone for a while.
        cooldown_s: for how long.
    """

    type: Literal["disk", "redis"]
    path: str | None = Field(None, min_length=1)
    url: str | None = Field(None, min_length=1)
    max_bytes: int = Field(10 * 2**30, ge=2**20)
    ttl_s: float | None = Field(None, gt=0)
    weights_id: str | None = Field(None, min_length=1)
    timeout_s: float = Field(2.0, gt=0)
    prefetch_timeout_s: float = Field(1.0, ge=0)
    max_failures: int = Field(3, ge=1)
    cooldown_s: float = Field(10.0, ge=0)

    @model_validator(mode="after")
    def _has_place(self) -> Self:
        key = "path" if self.type == "disk" else "url"
        if getattr(self, key) is None:
            raise ValueError(f"type is {self.type!r}, which needs {key}")
        return self
