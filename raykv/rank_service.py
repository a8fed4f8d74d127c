"""The rank's end of the messages: keeps the drivers' sequences, applies each call once."""

from __future__ import annotations

import time
from collections.abc import Callable

from raykv.core.sequence import Sequence
from raykv.engine.engine import Engine
from raykv.engine.lifecycle import Lifecycle
from raykv.errors import NotSupportedError, RankUnavailableError
from raykv.leases import Lease, Leases
from raykv.messages import Answer, Call
from raykv.rank import RankKV


class RankService:
    """Applies calls to one rank. Called by the thread that owns the rank.

    Args:
        kv: the rank.
        epoch: tells this start of the rank from earlier ones.
        engine: the rank's engine, if it has one.
        clock: seconds, for leases.
        on_end: called with the name of a session that ended.

    Attributes:
        leases: the drivers' sessions; ``leases.renew`` may be called from any thread.
    """

    def __init__(
        self,
        kv: RankKV,
        epoch: int,
        engine: Engine | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_end: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.kv = kv
        self._on_end = on_end
        self.epoch = epoch
        self._engine = engine
        self._lifecycle = Lifecycle(kv) if engine is None else engine.lifecycle
        self._updating: tuple[str, int] | None = None  # who prepared weights last, and which
        self.leases = Leases(f"rank {kv.dp_rank}", kv.config.ray.lease_s, clock)

    def apply(self, call: Call) -> Answer:
        """Apply a call, or repeat the answer if it was applied before.

        Calls of one session may overtake each other: sequences that are used in several calls at a
        time are their driver's to keep apart.

        Raises:
            RankUnavailableError: the call is from before the rank's restart, of a session that is
                over, or so late that its answer is forgotten; nothing changed.
        """
        if call.epoch != self.epoch:
            raise RankUnavailableError(
                f"rank {self.kv.dp_rank} restarted (epoch {self.epoch}, the call is of epoch "
                f"{call.epoch}): its sequences are gone, send them again"
            )
        lease, older = self.leases.find(call.driver_id, call.session)
        if older is not None:
            self._end(older)
        if lease is None:
            lease = self.leases.open(call.driver_id, call.session)
        if call.number in lease.answers:
            return lease.answers[call.number]
        if call.number <= lease.forgotten:
            raise RankUnavailableError(
                f"rank {self.kv.dp_rank} refuses call {call.number}: its driver has settled the "
                f"calls up to {lease.forgotten}, so it may have been applied already"
            )
        answer = self._answer(call, lease)
        lease.remember(answer, call.settled)
        if call.operation == "leave":
            self._end(lease)
        return answer

    def expire(self) -> int:
        """Take back what drivers hold that were silent for too long; returns how many those are."""
        self.kv.pump_tier()  # what was copied is let go, though nobody calls
        expired = self.leases.expired()
        for lease in expired:
            self._end(lease)
        return len(expired)

    def _end(self, lease: Lease) -> None:
        """Everything of a session comes back; nothing of it is published any more."""
        if self._engine is not None:
            self._engine.drop(lease.name)
        if self._updating is not None and self._updating[0] == lease.driver_id:
            self._lifecycle.cancel_weights(self._updating[1])  # else nobody could update any more
        self.kv.deallocate_without_cache(lease.sequences.by_id.values())
        self.kv.forget_driver(lease.driver_id)
        self.leases.end(lease)
        self._on_end(lease.name)

    def check_integrity(self) -> None:
        """Check the rank's books; raises IntegrityError."""
        if self._engine is None:
            self.kv.check_integrity()
        else:
            self._engine.check_integrity()

    def _answer(self, call: Call, lease: Lease) -> Answer:
        value, error = None, None
        updates = call.updates
        before = [] if updates is None else lease.sequences.block_ids(updates)
        try:
            value = self._run(call, lease)
        except Exception as raised:  # noqa: BLE001 - it travels to the caller
            error = raised.with_traceback(None)  # its frames would keep what they held alive
        return Answer(
            number=call.number,
            epoch=self.epoch,
            value=value,
            error=error,
            states=None
            if updates is None
            else lease.sequences.states(
                updates, before, self.kv.block_size, has_tier=self.kv.tier is not None
            ),
            stats=self.kv.rank_stats(),
        )

    def _run(self, call: Call, lease: Lease) -> object:
        match call.operation:
            case "refresh" | "leave":
                pass
            case "check_integrity":
                self.check_integrity()
            case "reset_prefix_cache":
                return self.kv.reset_prefix_cache()[0]
            case "begin_epoch":
                self.kv.begin_epoch(call.argument)
            case "take_swaps" | "ack_swaps" | "take_state_copies" | "ack_state_copies":
                return self._run_copies(call)
            case "submit":
                self._running_engine().submit(call.argument, lease.name)
            case "abort":
                self._running_engine().abort(call.argument, lease.name)
            case (
                "prepare_weights"
                | "apply_weights"
                | "cancel_weights"
                | "weights_status"
                | "retire"
                | "sleep"
                | "wake_up"
            ):
                return self._run_lifecycle(call, lease)
            case _:
                return self._run_on_sequences(call, lease)
        return None

    def _run_on_sequences(self, call: Call, lease: Lease) -> object:
        sequences = [] if call.updates is None else lease.sequences.update(call.updates)
        try:
            match call.operation:
                case "transfer":
                    return self.kv.transfer(call.driver_id)
                case "allocate":
                    return self.kv.allocate(sequences, call.argument)
                case "allocate_shared":
                    self.kv.allocate_shared(sequences[0])
                case "cache":
                    self.kv.cache(sequences[0], call.argument)
                case "release":
                    kv = self.kv
                    (kv.deallocate if call.argument else kv.deallocate_without_cache)(sequences)
                case "fork":
                    self.kv.fork(*sequences)
                case "explain":
                    return self.kv.explain(sequences[0])
                case "undo":
                    undo(self.kv, sequences, call.argument)
                case _:
                    raise NotSupportedError(f"operation {call.operation!r} is not known")
        finally:
            lease.sequences.drop_empty(sequences)
        return True

    def _run_copies(self, call: Call) -> object:
        match call.operation:
            case "take_swaps":
                return self.kv.take_swaps(call.driver_id)
            case "ack_swaps":
                self.kv.ack_swaps(call.driver_id)
            case "take_state_copies":
                return self.kv.take_state_copies(call.driver_id)
            case _:
                self.kv.ack_state_transfers(call.driver_id)
        return None

    def _run_lifecycle(self, call: Call, lease: Lease) -> object:
        if call.updates is not None:  # what the driver has computed: an update publishes it
            lease.sequences.note_computed(call.updates)
        value = getattr(self._lifecycle, call.operation)(**call.argument)
        if call.operation == "prepare_weights":
            self._updating = call.driver_id, call.argument["version"]
        return value

    def _running_engine(self) -> Engine:
        if self._engine is None:
            raise NotSupportedError(
                f"rank {self.kv.dp_rank} has no engine: configure a model to generate"
            )
        return self._engine


def undo(kv: RankKV, sequences: list[Sequence], num_blocks: list[int | None]) -> None:
    """Take an allocation back: None releases a sequence, a number shrinks it to those blocks."""
    for sequence, count in zip(sequences, num_blocks, strict=True):
        if count is None:
            kv.deallocate_without_cache(sequence)
        else:
            kv.shrink(sequence, count)
