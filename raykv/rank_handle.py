"""How a pool talks to a rank: one small interface, whatever lies between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Generic, NoReturn, Protocol, TypeVar

from raykv.core.explain import MissReport
from raykv.core.kv_cache_manager import RankStats, Room
from raykv.core.sequence import Sequence
from raykv.engine.params import EngineLimits, GenerationRequest, TokenDelta
from raykv.engine.weights import SleepTag, UpdateMode, Weights, WeightsStatus
from raykv.host.handle import TierHandle
from raykv.transfer_report import TransferReport

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Reply(Protocol[T_co]):
    """An answer that may still be on its way."""

    def result(self) -> T_co:
        """Wait for it; raises what the rank raised."""
        ...


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """A reply that is there."""

    value: T

    def result(self) -> T:
        """The value."""
        return self.value


@dataclass(frozen=True, slots=True)
class Failed:
    """A reply that is an error: calls raise only here, so that those to other ranks go on.

    Attributes:
        error: what ``result`` raises.
    """

    error: Exception

    def result(self) -> NoReturn:
        """Raise it."""
        raise self.error


class RankHandle(ABC):
    """One dp_rank as the pool sees it. Calls start at once; replies are waited for separately.

    Attributes:
        dp_rank: the rank's number.
        limits: what its engine serves; None without one.
        lost: why nothing can be had from it now; None while it is there.
        session: counts how often it was lost: what was sent in an earlier one is given up.
        welcome: called with a rank that answers again, before it is used again; may take its time,
            and raise if the rank cannot be used.
    """

    dp_rank: int
    limits: EngineLimits | None
    lost: str | None = None
    session: int = 0
    welcome: Callable[[RankHandle], object] = staticmethod(lambda _: None)

    def beat(self) -> None:  # noqa: B027 - a rank in this process needs none
        """Look whether the rank lives, and take it back if it does again; never waits."""

    def take_lost(self, sequence: Sequence) -> bool:  # noqa: ARG002
        """Whether the sequence's blocks went when the rank was lost; says so once."""
        return False

    @property
    @abstractmethod
    def stats(self) -> RankStats:
        """The rank's counters as of its last reply."""

    @property
    def room(self) -> Room:
        """What routing looks at: of the counters, those that are cheap to read."""
        return self.stats.room

    @abstractmethod
    def allocate(self, sequences: list[Sequence], num_tokens: list[int]) -> Reply[bool]:
        """See KVCacheManager.allocate; all or nothing over the list."""

    @abstractmethod
    def allocate_shared(self, sequence: Sequence) -> Reply[None]:
        """See KVCacheManager.allocate_shared."""

    @abstractmethod
    def cache(self, sequence: Sequence, num_tokens: int | None) -> Reply[None]:
        """See KVCacheManager.cache."""

    @abstractmethod
    def release(self, sequences: list[Sequence], *, publish: bool) -> Reply[None]:
        """See KVCacheManager.deallocate and deallocate_without_cache."""

    @abstractmethod
    def undo(self, sequences: list[Sequence], num_blocks: list[int | None]) -> Reply[None]:
        """Take an allocation back: to ``num_blocks`` blocks each, None for none and no row."""

    @abstractmethod
    def fork(self, parent: Sequence, child: Sequence) -> Reply[None]:
        """See KVCacheManager.fork."""

    @abstractmethod
    def explain(self, sequence: Sequence) -> Reply[MissReport]:
        """See KVCacheManager.explain."""

    @abstractmethod
    def take_swaps(self) -> Reply[list[tuple[int, int]]]:
        """See KVCacheManager.get_swap_block_transfer_infos."""

    @abstractmethod
    def ack_swaps(self) -> Reply[None]:
        """See KVCacheManager.ack_swaps."""

    @abstractmethod
    def take_state_copies(self) -> Reply[list[tuple[int, int]]]:
        """See KVCacheManager.get_state_transfer_infos."""

    @abstractmethod
    def ack_state_copies(self) -> Reply[None]:
        """See KVCacheManager.ack_state_transfers."""

    @abstractmethod
    def connect_tier(self, tier: TierHandle, *, is_back: bool = False) -> Reply[None]:
        """Let the rank use a host tier; see RankKV.connect_tier."""

    @abstractmethod
    def transfer(self) -> Reply[TransferReport]:
        """Start what is queued to and from the host; see RankKV.transfer."""

    @abstractmethod
    def begin_epoch(self, epoch: int) -> Reply[None]:
        """See RankKV.begin_epoch."""

    @abstractmethod
    def reset_prefix_cache(self) -> Reply[int]:
        """See BlockManager.reset_prefix_cache."""

    @abstractmethod
    def check_integrity(self) -> Reply[None]:
        """Recompute the rank's books."""

    @abstractmethod
    def refresh(self) -> Reply[None]:
        """Bring ``stats`` up to date."""

    @abstractmethod
    def submit(self, requests: SequenceOf[GenerationRequest]) -> Reply[None]:
        """Hand requests to the rank's engine, all or none."""

    @abstractmethod
    def abort(self, request_ids: SequenceOf[str]) -> Reply[None]:
        """End requests of the rank's engine; those that are over already are passed by."""

    @abstractmethod
    def poll(self, wait_s: float) -> list[TokenDelta]:
        """What the engine produced for this driver since; waits up to ``wait_s`` seconds."""

    @abstractmethod
    def prepare_weights(self, version: int, weights: Weights, mode: UpdateMode) -> Reply[None]:
        """See Lifecycle.prepare_weights."""

    @abstractmethod
    def apply_weights(self, version: int) -> Reply[None]:
        """See Lifecycle.apply_weights; the rank hears first what this driver has computed."""

    @abstractmethod
    def cancel_weights(self, version: int) -> Reply[None]:
        """See Lifecycle.cancel_weights."""

    @abstractmethod
    def weights_status(self) -> Reply[WeightsStatus]:
        """See Lifecycle.weights_status."""

    @abstractmethod
    def retire(self, version: int) -> Reply[int]:
        """See BlockManager.retire."""

    @abstractmethod
    def sleep(self, level: int, *, check_only: bool) -> Reply[None]:
        """See Lifecycle.sleep."""

    @abstractmethod
    def wake_up(self, tags: SequenceOf[SleepTag]) -> Reply[None]:
        """See Lifecycle.wake_up."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the rank; idempotent."""


def results(replies: SequenceOf[Reply[T]]) -> list[T]:
    """What all replies say, in order; raises the first error once every reply was read.

    So it does when it is interrupted: a reply that nobody reads is a copy out of date.
    """
    values: list[T] = []
    errors: list[BaseException] = []
    for reply in replies:
        try:
            values.append(reply.result())
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
    raise_first(errors)
    return values


def raise_first(errors: SequenceOf[BaseException]) -> None:
    """Raise the first error, if there is one; an interrupt before all others."""
    for error in sorted(errors, key=lambda error: isinstance(error, Exception)):
        raise error
