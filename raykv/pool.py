"""The pool: routes sequences to ranks, batches calls, generates (the seed's section 5)."""

from __future__ import annotations

import queue
import secrets
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from raykv.aio import AsyncPool
from raykv.config import PoolConfig
from raykv.core.explain import MissReport
from raykv.core.kv_cache_manager import (
    KVCacheManager,
    PoolStats,
    RankStats,
    Sequences,
    flatten,
    token_targets,
)
from raykv.core.namespace import DEFAULT, Namespace, require_namespace
from raykv.core.retention import DEFAULT_RETENTION, Retention
from raykv.core.sequence import Sequence
from raykv.engine.build import build_rank, load_tokenizer
from raykv.engine.params import GenerationRequest, SamplingParams, TokenDelta, TokenOutput
from raykv.engine.worker import RankWorker
from raykv.errors import NotSupportedError, RankUnavailableError, RequestError
from raykv.generation import Batch, Generations, Listener, collect, sample_id
from raykv.local_rank import LocalRank
from raykv.monitor import Monitor
from raykv.prompts import Prompts, token_rows
from raykv.rank_handle import RankHandle, Reply, raise_first, results
from raykv.routing import Router

T = TypeVar("T")


class BlockManagerPool(KVCacheManager):
    """All ranks as one KV cache manager. Make one with ``local`` or ``raykv.actors.launch``.

    Args:
        config: what the ranks were made from.
        ranks: one handle per dp_rank, in order.

    Attributes:
        num_lost_sequences: sequences whose blocks went with a rank that was lost.
        monitor: heartbeats; runs by itself over Ray.
        generations: requests of this driver that are under way.
    """

    def __init__(self, config: PoolConfig, ranks: list[RankHandle]) -> None:
        self.config = config
        self.ranks = ranks
        self.num_lost_sequences = 0
        self._router = Router(config.routing, len(ranks))
        self.generations = Generations(ranks, self._router, config)
        self.monitor = Monitor(ranks, config.ray.heartbeat_s)
        self._tokenizer: Any = None

    @classmethod
    def local(cls, config: PoolConfig | str | Path) -> Self:
        """A pool whose ranks live in this process, without Ray.

        Raises:
            ConfigError: the model or the memory cannot be had.
        """
        config = PoolConfig.of(config).with_seed()
        ranks: list[RankHandle] = []
        for dp_rank in range(config.dp_size):
            kv, engine = build_rank(config, dp_rank)
            ranks.append(LocalRank(kv, None if engine is None else RankWorker(engine)))
        return cls(config, ranks)

    # -- your scheduler -------------------------------------------------------------------------

    def allocate(self, sequences: Sequences, num_tokens: int | Iterable[int] | None = None) -> bool:
        """See KVCacheManager. One call per rank, all ranks at once.

        A sequence whose rank was lost begins anew on another one: its ``num_computed_tokens`` is
        what that one has cached.

        Raises:
            RankUnavailableError: no rank is left, or one was lost and ``on_rank_loss`` says
                ``report``; nothing new is held.
        """
        members = flatten(sequences)
        targets = token_targets(members, num_tokens)
        return self._over_losses(lambda: self._allocate(members, targets))

    def _allocate(self, members: list[Sequence], targets: list[int]) -> bool:
        groups: dict[int, tuple[list[Sequence], list[int]]] = {}
        for rank, sequence, target in zip(
            self._select(members, targets), members, targets, strict=True
        ):
            if rank not in groups:
                groups[rank] = ([], [])
            groups[rank][0].append(sequence)
            groups[rank][1].append(target)
            if sequence.single_block_id is None:
                sequence.owner = self
        if len(groups) == 1:
            return self.ranks[rank].allocate(*groups[rank]).result()
        return self._allocate_over_ranks(groups)

    def deallocate(self, sequences: Sequences) -> None:
        """See KVCacheManager."""
        self._release(sequences, publish=True)

    def deallocate_without_cache(self, sequences: Sequences) -> None:
        """See KVCacheManager."""
        self._release(sequences, publish=False)

    def allocate_shared(self, sequence: Sequence) -> None:
        """See KVCacheManager."""

        def allocate() -> None:
            rank = self.select_rank(sequence)
            if sequence.single_block_id is None:
                sequence.owner = self
            self.ranks[rank].allocate_shared(sequence).result()

        self._over_losses(allocate)

    def cache(self, sequence: Sequence, num_tokens: int | None = None) -> None:
        """See KVCacheManager; what went with a lost rank is not published."""

        def cache() -> None:
            rank = self._rank_of(sequence)
            if rank is not None:
                self.ranks[rank].cache(sequence, num_tokens).result()

        self._over_losses(cache)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """See KVCacheManager; of a parent that went with a lost rank, the child holds nothing."""

        def fork() -> None:
            rank = self._rank_of(parent)
            if rank is not None:
                child.owner = self
                self.ranks[rank].fork(parent, child).result()

        self._over_losses(fork)

    def get_swap_block_transfer_infos(self) -> list[list[tuple[int, int]]]:
        """See KVCacheManager."""
        return self._of_all([rank.take_swaps() for rank in self.ranks], [])

    def ack_swaps(self) -> None:
        """See KVCacheManager."""
        self._of_all([rank.ack_swaps() for rank in self.ranks], None)

    def explain(self, sequence: Sequence) -> MissReport:
        """See KVCacheManager."""
        rank = self._rank_of(sequence)
        if rank is None:
            raise RequestError(f"{sequence!r} holds no blocks: explain it while it is allocated")
        return self.ranks[rank].explain(sequence).result()

    def select_rank(self, sequence: Sequence) -> int:
        """The rank that holds the sequence, or the one that ``allocate`` would choose now."""
        return self._select([sequence], [sequence.num_tokens])[0]

    # -- our engine -----------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer.

        Raises:
            NotSupportedError: the pool has no model, or its model no tokenizer.
        """
        if self.config.model is None:
            raise NotSupportedError("the pool has no model, so no tokenizer: pass token ids")
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.config.model.path)
        if self._tokenizer is None:
            raise NotSupportedError(
                f"model {self.config.model.path} has no tokenizer: pass token ids"
            )
        return self._tokenizer

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        namespace: Namespace = DEFAULT,
        dp_rank: int | None = None,
        retention: Retention = DEFAULT_RETENTION,
    ) -> list[TokenOutput]:
        """Continue prompts; the outputs come in order, ``params.n`` per prompt.

        Args:
            prompts: one or several, as text or token ids.
            params: how to continue them.
            request_id: a name to ``abort`` by; prompt i of several is ``request_id/i``.
            namespace: with whom their KV may be shared.
            dp_rank: the rank to use, such as the one that served the last turn of a conversation
                (``TokenOutput.dp_rank``) and holds its KV; None lets the pool choose.
            retention: how dearly their cached blocks are kept.

        Raises:
            RequestError: a prompt is empty, too long or holds unknown tokens; none was started.
            RankUnavailableError: a rank went away.
        """
        requests = self.make_requests(prompts, params, request_id, namespace, retention)
        deltas: queue.SimpleQueue[TokenDelta] = queue.SimpleQueue()
        batch = Batch(requests, [deltas.put] * len(requests), dp_rank)
        self.generations.start(batch)
        try:
            outputs = collect(deltas, len(requests))
        except BaseException:
            self.generations.abandon(batch)
            raise
        return self.with_text(prompts, [outputs[request.request_id] for request in requests])

    def with_text(self, prompts: Prompts, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """The outputs with their text, if the prompts came as text."""
        first = prompts if isinstance(prompts, str) else next(iter(prompts), None)
        if not isinstance(first, str):
            return outputs
        decode = self.tokenizer.decode
        return [
            replace(output, text=decode(output.token_ids, skip_special_tokens=True))
            for output in outputs
        ]

    def abort(self, request_id: str) -> None:
        """End a request that is under way; its output says ``abort``. Unknown ids are passed by."""
        self.generations.abort(request_id)

    def make_requests(
        self,
        prompts: Prompts,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        namespace: Namespace = DEFAULT,
        retention: Retention = DEFAULT_RETENTION,
    ) -> list[GenerationRequest]:
        """Turn prompts into requests: one per prompt and sample."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"params is a {type(params).__name__}: pass raykv.SamplingParams(max_tokens=...)"
            )
        require_namespace(namespace)
        name = self.generations.new_id() if request_id is None else request_id
        if not isinstance(name, str):
            raise RequestError(f"request_id is {name!r}, but must be text")
        rows = token_rows(
            prompts, lambda text: self.tokenizer.encode(text, add_special_tokens=False)
        )
        names = [name] if len(rows) == 1 else [sample_id(name, i) for i in range(len(rows))]
        return [
            GenerationRequest(
                request_id=row_name if params.n == 1 else sample_id(row_name, index),
                token_ids=row,
                params=params,
                namespace=namespace,
                sample_index=index,
                prompt_id=row_name,
                call_id=name,
                retention=retention,
                seed=secrets.randbits(63),
            )
            for row_name, row in zip(names, rows, strict=True)
            for index in range(params.n)
        ]

    def start(
        self,
        requests: SequenceOf[GenerationRequest],
        listeners: SequenceOf[Listener],
        dp_rank: int | None = None,
    ) -> None:
        """Submit requests and return; each listener hears of its own, on a thread of the pool."""
        self.generations.start(Batch(requests, listeners, dp_rank))

    @property
    def aio(self) -> AsyncPool:
        """The same methods as coroutines, and ``stream``."""
        return AsyncPool(self)

    # -- counters -------------------------------------------------------------------------------

    def num_free_blocks(self) -> list[int]:
        """See KVCacheManager."""
        return [rank.num_free_blocks for rank in self._rank_stats()]

    def num_used_blocks(self) -> list[int]:
        """See KVCacheManager."""
        return [rank.num_used_blocks for rank in self._rank_stats()]

    def num_available_blocks(self) -> list[int]:
        """See KVCacheManager."""
        return [rank.num_available_blocks for rank in self._rank_stats()]

    def num_blocks_in_prefix_cache(self) -> list[int]:
        """See KVCacheManager."""
        return [rank.num_blocks_in_prefix_cache for rank in self._rank_stats()]

    def kv_cache_utilization(self) -> float:
        """See KVCacheManager."""
        stats = self._rank_stats()
        return sum(rank.kv_cache_usage_perc for rank in stats) / len(stats)

    def reset_prefix_cache(self) -> list[int]:
        """See KVCacheManager."""
        return self._of_all([rank.reset_prefix_cache() for rank in self.ranks], 0)

    def stats(self) -> PoolStats:
        """See KVCacheManager."""
        return PoolStats(tuple(self._rank_stats()))

    def check_integrity(self) -> None:
        """See KVCacheManager."""
        self._of_all([rank.check_integrity() for rank in self.ranks], None)

    def close(self) -> None:
        """Let go of all ranks; idempotent. Requests under way fail."""
        self.monitor.stop()
        self.generations.close()
        for rank in self.ranks:
            rank.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- details --------------------------------------------------------------------------------

    @property
    def _fails_over(self) -> bool:
        return self.config.ray.on_rank_loss == "fail_over"

    def _over_losses(self, function: Callable[[], T]) -> T:
        """Do it, and again where a rank turned out to be lost and the others can go on."""
        for _ in range(len(self.ranks)):
            try:
                return function()
            except RankUnavailableError:
                if not self._fails_over or all(rank.lost for rank in self.ranks):
                    raise
        return function()

    def _rank_of(self, sequence: Sequence) -> int | None:
        """The rank that holds a sequence, or that its caller chose; None if another may."""
        rank = sequence.dp_rank
        if rank is not None and not 0 <= rank < len(self.ranks):
            raise RequestError(
                f"{sequence!r} belongs to another pool, for this one's ranks are "
                f"0..{len(self.ranks) - 1}: deallocate it there first"
            )
        if rank is not None and self._fails_over:
            if self.ranks[rank].take_lost(sequence):
                self.num_lost_sequences += 1
                sequence.forget()
                return None
            if self.ranks[rank].lost is not None and sequence.single_block_id is None:
                return None
        return rank

    def _rank_stats(self) -> list[RankStats]:
        self._of_all([rank.refresh() for rank in self.ranks], None)
        return [rank.stats for rank in self.ranks]

    def _of_all(self, replies: SequenceOf[Reply[T]], if_lost: T) -> list[T]:
        """What all ranks say; ``if_lost`` for a lost one, as long as another one is there."""
        found = [_OrLost(reply) for reply in replies]
        values = results(found)
        lost = [one.error for one in found if one.error is not None]
        if lost and (not self._fails_over or len(lost) == len(found)):
            raise lost[0]
        return [if_lost if value is None else value for value in values]

    def _select(self, members: list[Sequence], targets: list[int]) -> list[int]:
        """A rank per sequence; what the list itself takes counts against its later members."""
        choice = None
        ranks = []
        for sequence, target in zip(members, targets, strict=True):
            rank = self._rank_of(sequence)
            if rank is None:
                if choice is None:
                    choice = self._router.begin([handle.room for handle in self.ranks])
                rank = choice.take(-(-target // self.config.block_size))
            ranks.append(rank)
        return ranks

    def _allocate_over_ranks(self, groups: dict[int, tuple[list[Sequence], list[int]]]) -> bool:
        """Allocate on several ranks at once; if one is short, take back what the others gave."""
        before = {
            rank: [s.kv_state.num_blocks if s.single_block_id else None for s in members]
            for rank, (members, _) in groups.items()
        }
        preset = [(s, s.dp_rank) for members, _ in groups.values() for s in members]
        replies = {
            rank: self.ranks[rank].allocate(members, targets)
            for rank, (members, targets) in groups.items()
        }
        done: list[int] = []
        errors: list[BaseException] = []
        for rank, reply in replies.items():
            try:
                if reply.result():
                    done.append(rank)
            except BaseException as error:  # noqa: BLE001 - raised below, once all ranks answered
                errors.append(error)
        if len(done) == len(groups):
            return True
        results([self.ranks[rank].undo(groups[rank][0], before[rank]) for rank in done])
        for sequence, dp_rank in preset:
            sequence.dp_rank = dp_rank  # what the caller chose outlasts the refusal
        raise_first(errors)
        return False

    def _release(self, sequences: Sequences, *, publish: bool) -> None:
        groups: dict[int, list[Sequence]] = {}
        for sequence in flatten(sequences):
            rank = self._rank_of(sequence)
            if rank is None:
                sequence.forget()
            else:
                groups.setdefault(rank, []).append(sequence)
        replies = [
            (group, self.ranks[rank].release(group, publish=publish))
            for rank, group in groups.items()
        ]
        results([_Forgetting(reply, group, self) for group, reply in replies])


@dataclass(frozen=True, slots=True)
class _Forgetting:
    """A release that also succeeds on a lost rank, where there is nothing left to release."""

    reply: Reply[None]
    sequences: list[Sequence]
    pool: BlockManagerPool

    def result(self) -> None:
        try:
            self.reply.result()
        except RankUnavailableError:
            for sequence in self.sequences:
                self.pool.ranks[sequence.dp_rank or 0].take_lost(sequence)
                sequence.forget()
            self.pool.num_lost_sequences += len(self.sequences)


@dataclass(slots=True)
class _OrLost(Generic[T]):
    """A reply that a lost rank need not give."""

    reply: Reply[T]
    error: RankUnavailableError | None = None

    def result(self) -> T | None:
        try:
            return self.reply.result()
        except RankUnavailableError as error:
            self.error = error
            return None
