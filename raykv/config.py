"""The configuration of a pool: YAML in, frozen models out, unknown keys refused."""

from __future__ import annotations

import os
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, field_validator, model_validator

from raykv.config_host import HostConfig, StoreConfig
from raykv.config_model import FrozenModel
from raykv.errors import ConfigError

Dtype = Literal["float32", "float16", "bfloat16"]

EVICTION_POLICIES = ("lru", "lrfu", "priority")
ROUTING_POLICIES = ("available_blocks", "free_blocks", "cache_aware")

_LATER = {
    "manager_types": "composite managers",
    "xtensor": "xtensor managers",
}


class RoutingConfig(FrozenModel):
    """How the pool chooses a rank for a sequence.

    Attributes:
        policy: ``available_blocks`` counts free and evictable blocks; ``free_blocks`` is the
            seed's rule, which sees a rank full of idle cache as full; ``cache_aware`` weighs the
            prefix that a rank has cached against the work that waits there; or ``module:Class``,
            see raykv.routing_policy.
    """

    policy: str = "available_blocks"

    @field_validator("policy")
    @classmethod
    def _policy_is_known(cls, policy: str) -> str:
        if policy not in ROUTING_POLICIES and ":" not in policy:
            known = ", ".join(map(repr, ROUTING_POLICIES))
            raise ValueError(f"must be {known} or module:Class, got {policy!r}")
        return policy


class MemoryConfig(FrozenModel):
    """The KV buffers of each rank.

    Attributes:
        device: ``auto`` takes CUDA through CuPy where it is usable, else the CPU.
        dtype: element type of K and V.
        num_layers: layers that keep K and V; leave out with a model, which knows its own shape.
        num_kv_heads: key/value heads per layer.
        head_dim: elements per head.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Dtype = "float32"
    num_layers: int | None = Field(None, ge=1, le=1 << 20)
    num_kv_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _shape_is_whole(self) -> Self:
        shape = (self.num_layers, self.num_kv_heads, self.head_dim)
        if any(shape) and not all(shape):
            raise ValueError(
                f"num_layers, num_kv_heads, head_dim are {shape}: give all three, or none"
            )
        return self

    @property
    def has_shape(self) -> bool:
        """Whether buffers can be made from this section alone."""
        return self.num_layers is not None


class LinearStateConfig(FrozenModel):
    """The recurrent state of a hybrid model's sequences, and the checkpoints that prefixes need.

    Attributes:
        enable: False is the same as leaving the section out.
        num_slots: state slots per rank, the padding slot 0 included: one for each running sequence
            and one for each checkpoint.
        match: how far a prefix may be reused. ``contiguous`` is the seed's rule (section 7.2): the
            run of multiples of ``stride_tokens`` from the start that all have a checkpoint, so
            there are no others; ``deepest``: the last block boundary that has one.
        stride_tokens: a prefill leaves a checkpoint at each multiple; a multiple of block_size.
        checkpoint_dtype: how checkpoints keep the recurrent state: ``float32`` as it was computed,
            ``bfloat16`` and ``int8`` in a half or a quarter of that, rounded.
        at_stride: whether there are checkpoints every ``stride_tokens``. With ``deepest`` they are
            reclaimed before all others until somebody resumes from them.
        at_prompt_end: whether there is one at the last full block of a prompt (``deepest`` only).
        at_generation_end: whether there is one at the last full block of what was generated; with
            ``contiguous`` only where that ends at a multiple of ``stride_tokens``.
        at_branch: whether there is one where cached KV went further than the deepest checkpoint,
            so that the third sequence with a prefix finds what the second one lacked
            (``deepest`` only).
    """

    enable: bool = True
    num_slots: int = Field(ge=2, lt=2**31)
    match: Literal["contiguous", "deepest"] = "contiguous"
    stride_tokens: int = Field(512, ge=1)
    checkpoint_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    at_stride: bool = True
    at_prompt_end: bool = True
    at_generation_end: bool = True
    at_branch: bool = True

    @model_validator(mode="before")
    @classmethod
    def _off_needs_nothing(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("enable") is False:
            return {"num_slots": 2, **values}
        return values


class ModelConfig(FrozenModel):
    """The language model that each rank serves with the built-in engine.

    Attributes:
        path: ``smollm2``, a local Hugging Face folder, a hub id, or the name of a hybrid of random
            weights: ``qwen3_5-tiny``, ``qwen3_next-tiny`` or ``qwen3_5-50m``.
        max_num_batched_tokens: tokens that one step computes at most; longer prompts are
            prefilled in chunks.
        num_threads: torch threads per rank; more than one per core slows every rank down.
    """

    path: str
    max_num_batched_tokens: int = Field(512, ge=1)
    num_threads: int = Field(1, ge=1)


class RayConfig(FrozenModel):
    """Resources and time limits of the rank actors.

    Attributes:
        num_cpus: CPUs that each rank actor reserves.
        num_gpus: GPUs that each rank actor reserves; may be a fraction.
        placement_strategy: how the ranks spread over nodes (a Ray placement group's strategy).
        start_timeout_s: seconds that all ranks may take to start and load their model.
        call_timeout_s: seconds that one call to a rank may take.
        on_rank_loss: ``fail_over`` serves what a lost rank held on the others, and uses the rank
            again once it is back; ``report`` raises RankUnavailableError.
        max_restarts: how often Ray restarts a rank that died; -1 for any number of times.
        heartbeat_s: seconds between two heartbeats of a driver to each rank.
        silence_s: seconds of silence after which a rank counts as lost; four times as many for one
            on the driver's machine whose process is seen to run, for it may be busy.
        stuck_timeout_s: seconds that one step of a rank's engine may take until its process ends
            itself.
        lease_s: seconds of silence after which a rank takes back what a driver holds.
        failover_timeout_s: seconds that a request waits for another rank once its own is lost.
        ramp_s: seconds over which a rank that is back gets its share of new sequences again.
    """

    num_cpus: float = Field(default=1.0, ge=0)
    num_gpus: float = Field(default=0.0, ge=0)
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    start_timeout_s: float = Field(default=180.0, gt=0)
    call_timeout_s: float = Field(default=60.0, gt=0)
    on_rank_loss: Literal["fail_over", "report"] = "fail_over"
    max_restarts: int = Field(default=-1, ge=-1)
    heartbeat_s: float = Field(default=0.25, gt=0)
    silence_s: float = Field(default=2.5, gt=0)
    stuck_timeout_s: float = Field(default=120.0, gt=0)
    lease_s: float = Field(default=10.0, gt=0)
    failover_timeout_s: float = Field(default=60.0, gt=0)
    ramp_s: float = Field(default=5.0, ge=0)

    @model_validator(mode="after")
    def _hears_in_time(self) -> Self:
        for name in ("silence_s", "lease_s"):
            if getattr(self, name) < 2 * self.heartbeat_s:
                raise ValueError(
                    f"{name} is {getattr(self, name):g} with a heartbeat_s of {self.heartbeat_s:g}:"
                    " one lost heartbeat would count as a death; give at least twice as much"
                )
        return self


class PoolConfig(FrozenModel):
    """Everything that a pool is made from.

    Attributes:
        dp_size: data-parallel ranks.
        num_blocks: KV blocks per rank, the padding block 0 included.
        block_size: tokens per block.
        enable_prefix_cache: False computes every prompt from its first token.
        max_num_seqs: sequences that a rank holds at a time.
        num_single_blocks: rows of the block table, the padding row 0 included; by default
            ``max_num_seqs + 1``.
        max_model_len: tokens that one sequence may reach; by default what the model or the pool
            allows.
        hash_seed: the secret behind prefix hashes; drawn at launch if left out.
        eviction: which cached blocks go first: ``lru``, ``lrfu``, ``priority`` or ``module:Class``;
            see raykv.core.eviction.
        disagg_pd: True makes every manager thread-safe (ConcurrentBlockManagerImpl).
        linear_state: state slots and checkpoints for hybrid models; None for models whose layers
            all keep K and V.
        host: memory of the nodes behind the devices'; None for none.
        store: what keeps KV across restarts, behind ``host``; None for none.
        routing: how a rank is chosen.
        memory: the KV buffers; None keeps books only.
        model: the model to serve; None for a scheduler of your own.
        ray: resources and time limits of the rank actors.

    Raises:
        ConfigError: an unknown key, or a value that is impossible or contradicts another.
    """

    dp_size: int = Field(1, ge=1, le=1 << 20)
    num_blocks: int = Field(ge=2, lt=2**31)  # ids are int32
    block_size: int = Field(16, ge=1, le=1 << 20)
    enable_prefix_cache: bool = True
    max_num_seqs: int = Field(256, ge=1, le=1 << 20)
    num_single_blocks: int = Field(default=257, ge=2, le=1 << 21)
    max_model_len: int | None = Field(None, ge=1)
    hash_seed: bytes | None = Field(default=None, min_length=1, repr=False)
    eviction: str = "lru"
    disagg_pd: bool = False
    linear_state: LinearStateConfig | None = None
    manager_types: Any = None
    xtensor: Any = None
    host: HostConfig | None = None
    store: StoreConfig | None = None
    routing: RoutingConfig = RoutingConfig()
    memory: MemoryConfig | None = None
    model: ModelConfig | None = None
    ray: RayConfig = RayConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        if isinstance(values, dict):
            values = dict(values)
            rows, seqs = values.get("num_single_blocks"), values.get("max_num_seqs")
            # Only what is given derives the other; what is no count gets the field's own error.
            if rows is None:
                values.pop("num_single_blocks", None)
                if isinstance(seqs, Integral):
                    values["num_single_blocks"] = max(int(seqs), 1) + 1
            elif seqs is None:
                values.pop("max_num_seqs", None)
                if isinstance(rows, Integral):
                    values["max_num_seqs"] = max(int(rows) - 1, 1)
            if values.get("model") is not None and values.get("memory") is None:
                values["memory"] = {}
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key, what in _LATER.items():
            value = getattr(self, key)
            if value is not None:
                raise ValueError(
                    f"{key}: {what} is not part of this version, got {value!r}; leave it out"
                )
        if self.eviction not in EVICTION_POLICIES and ":" not in self.eviction:
            known = ", ".join(map(repr, EVICTION_POLICIES))
            raise ValueError(f"eviction: must be {known} or module:Class, got {self.eviction!r}")
        if self.num_single_blocks <= self.max_num_seqs:
            raise ValueError(
                f"num_single_blocks is {self.num_single_blocks} for max_num_seqs "
                f"{self.max_num_seqs}, but row 0 is padding: {self.max_num_seqs + 1} are needed"
            )
        self._check_linear_state()
        self._check_host()
        if self.memory is not None and self.model is None and not self.memory.has_shape:
            raise ValueError(
                "memory: num_layers, num_kv_heads and head_dim are needed when no model is given; "
                "give all three, or leave memory out to keep books only"
            )
        if self.model is not None and self.memory is not None and self.memory.has_shape:
            memory = self.memory
            raise ValueError(
                f"memory: num_layers {memory.num_layers}, num_kv_heads {memory.num_kv_heads} and "
                f"head_dim {memory.head_dim} are given, but model {self.model.path} knows its own; "
                "leave them out"
            )
        return self

    def _check_linear_state(self) -> None:
        states = self.linear_state
        if states is None or not states.enable:
            return
        if states.stride_tokens % self.block_size:
            below = states.stride_tokens - states.stride_tokens % self.block_size
            raise ValueError(
                f"linear_state.stride_tokens is {states.stride_tokens}, but checkpoints stand at "
                f"ends of blocks: give a multiple of block_size {self.block_size}, such as "
                f"{below or self.block_size}"
            )
        if states.match == "contiguous" and not states.at_stride:
            raise ValueError(
                "linear_state.match is contiguous, which uses checkpoints at the stride alone, but "
                "at_stride is False, so nothing would be reused: choose match deepest, or leave "
                "at_stride out"
            )
        if states.num_slots <= self.max_num_seqs:
            raise ValueError(
                f"linear_state.num_slots is {states.num_slots} for max_num_seqs "
                f"{self.max_num_seqs}, but slot 0 is padding and each running sequence takes one: "
                f"give at least {self.max_num_seqs + 1}, and one more for each checkpoint"
            )

    def _check_host(self) -> None:
        if self.store is not None and self.host is None:
            raise ValueError(
                "store is given, but host is not: blocks reach a store through host memory, so "
                "give host.num_blocks too"
            )
        if self.host is None:
            return
        if not self.enable_prefix_cache:
            raise ValueError(
                "host is given, but enable_prefix_cache is False, so nothing could be found there: "
                "leave one of them out"
            )
        if self.memory is None:
            raise ValueError(
                "host is given, but neither memory nor model is, so there is nothing to copy: give "
                "one, or leave host out"
            )
        if self.store is not None and self.has_linear_state:
            raise ValueError(
                "store is given beside linear_state, but stores keep KV only, of no use without "
                "the recurrent state: leave store out"
            )
        if self.host.eviction not in EVICTION_POLICIES and ":" not in self.host.eviction:
            known = ", ".join(map(repr, EVICTION_POLICIES))
            raise ValueError(
                f"host.eviction: must be {known} or module:Class, got {self.host.eviction!r}"
            )

    @property
    def has_linear_state(self) -> bool:
        """Whether sequences have recurrent state."""
        return self.linear_state is not None and self.linear_state.enable

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Read a YAML file.

        Raises:
            ConfigError: the file is missing, is no YAML mapping, or holds a bad setting.
        """
        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"cannot read {path}: {error.strerror}; pass a readable file"
            ) from None
        except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:
            problem = " ".join(str(error).split())
            raise ConfigError(f"{path} is not valid YAML: {problem}") from None
        if not isinstance(values, dict):
            found = "nothing" if values is None else f"a value of type {type(values).__name__}"
            raise ConfigError(
                f"{path} must hold settings, such as 'num_blocks: 1024', but holds {found}"
            )
        sections = [values, *(value for value in values.values() if isinstance(value, dict))]
        for name in (name for section in sections for name in section):
            if not isinstance(name, str):
                raise ConfigError(f"{path}: {name!r} is no name of a setting; names are text")
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def of(cls, config: object) -> Self:
        """A configuration, given as one or as the path of a YAML file.

        Raises:
            ConfigError: it is neither.
        """
        if isinstance(config, cls):
            return config
        if isinstance(config, str | Path):
            return cls.from_yaml(config)
        raise ConfigError(
            f"the configuration is a {type(config).__name__}: pass a PoolConfig, or a YAML path"
        )

    @property
    def max_tokens_per_sequence(self) -> int:
        """Tokens that one sequence can reach: the model's limit or the whole pool."""
        pool = (self.num_blocks - 1) * self.block_size
        return pool if self.max_model_len is None else min(pool, self.max_model_len)

    def with_seed(self) -> Self:
        """The same configuration with a hash seed drawn, so that all ranks share it."""
        if self.hash_seed is not None:
            return self
        return self.model_copy(update={"hash_seed": os.urandom(16)})
