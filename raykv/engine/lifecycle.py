"""One rank's weights versions and its sleep: what changes between two engine steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raykv.errors import NotSupportedError, RaykvError, RequestError
from raykv.rank import RankKV

from .weights import (
    ReloadableRunner,
    SleepTag,
    StagedWeights,
    UpdateMode,
    Weights,
    WeightsStatus,
    checked_tags,
    checked_version,
)

if TYPE_CHECKING:
    from .engine import Engine


class Reading:
    """Weights that a thread of its own reads, while the rank goes on serving.

    Attributes:
        staged: what was read, once it is there.
        error: why it cannot be had.
    """

    def __init__(self, read: Callable[[], StagedWeights]) -> None:
        self.staged: StagedWeights | None = None
        self.error: Exception | None = None
        self._read = read
        self._thread = threading.Thread(target=self._run, name="raykv-weights", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.staged = self._read()
        except RaykvError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001 - whoever waits must hear of it
            self.error = RequestError(f"cannot read weights: {type(error).__name__}: {error}")


@dataclass(slots=True)
class _Update:
    """A new version on its way: read and checked first, then used once the rank is ready.

    Attributes:
        version: the new one.
        reading: its weights; None if only the version changes.
        mode: what becomes of requests.
        is_due: whether it is to happen as soon as ``mode`` allows.
    """

    version: int
    reading: Reading | None
    mode: UpdateMode
    is_due: bool = False

    @property
    def is_staged(self) -> bool:
        """Whether nothing can fail any more."""
        return self.reading is None or self.reading.staged is not None


class Lifecycle:
    """Weights versions and sleep of one rank. Called by the thread that owns the rank.

    An update has two halves, so that over all ranks it happens everywhere or nowhere:
    ``prepare_weights`` reads and checks while requests go on, ``apply_weights`` exchanges.

    Args:
        kv: the rank's KV.
        engine: what serves requests there; None where a scheduler of the user's own does.

    Attributes:
        asleep: what sleeps: ``kv_cache``, ``weights``, both, or nothing.
    """

    def __init__(self, kv: RankKV, engine: Engine | None = None) -> None:
        self.asleep: set[SleepTag] = set()
        self._kv = kv
        self._engine = engine
        self._update: _Update | None = None
        self._waking: Reading | None = None
        self._error: Exception | None = None  # of waking up

    # -- weights versions -----------------------------------------------------------------------

    def prepare_weights(self, version: int, weights: Weights, mode: UpdateMode = "wait") -> None:
        """Begin to read and check new weights; see ``weights_status`` for how it went.

        Args:
            version: greater than the one that is served.
            weights: see ``weights.Weights``.
            mode: what is to become of requests; see ``BlockManagerPool.update_weights``.

        Raises:
            RequestError: the version is not greater, another change is under way, or requests that
                are to end under the present version sleep.
            NotSupportedError: there is no model whose weights could be changed.
        """
        version, serves = checked_version(version), self._kv.weights_version
        if version <= serves:
            raise RequestError(
                f"weights version {version} is not greater than {serves}, which rank "
                f"{self._kv.dp_rank} serves: versions only grow"
            )
        self._check_idle()
        engine = self._engine
        if engine is not None and mode == "wait" and self.asleep and engine.scheduler.has_started:
            raise RequestError(
                f"rank {self._kv.dp_rank} sleeps with requests under way, so they cannot end "
                "under the present weights: wake it up first, or use mode 'keep' or 'abort'"
            )
        reading = None
        if weights is not None:
            runner = self._runner("change weights")
            reading = Reading(lambda: runner.stage(weights))
        self._error = None
        self._update = _Update(version, reading, mode)

    def apply_weights(self, version: int) -> None:
        """Use prepared weights as soon as the update's mode allows.

        Raises:
            RequestError: they are not prepared.
        """
        update, engine = self._update, self._engine
        if update is None or update.version != version or not update.is_staged:
            raise RequestError(f"weights version {version} is not prepared: prepare it first")
        if engine is not None:
            if update.mode == "abort":
                engine.abort_all()
            engine.scheduler.is_draining = update.mode == "wait"
        update.is_due = True
        self.advance()

    def cancel_weights(self, version: int) -> None:
        """Give up an update that has not happened yet; another version's is left alone."""
        if self._update is not None and self._update.version == version:
            self._update = None
            if self._engine is not None:
                self._engine.scheduler.is_draining = False

    def weights_status(self) -> WeightsStatus:
        """Which version is served, and how far a change is."""
        self.advance()
        update = self._update
        failed = None if update is None or update.reading is None else update.reading.error
        return WeightsStatus(
            version=self._kv.weights_version,
            pending=None if update is None else update.version,
            is_staged=update is not None and update.is_staged,
            error=self._error or failed,
            asleep=tuple(sorted(self.asleep)),
        )

    def retire(self, version: int) -> int:
        """See BlockManager.retire."""
        version = checked_version(version)
        if self._kv.linear_state is not None:
            self._kv.linear_state.retire(version)
        return self._kv.block_manager.retire(version)

    # -- sleep ----------------------------------------------------------------------------------

    def sleep(self, level: int, *, check_only: bool = False) -> None:
        """Give up KV memory, at level 2 the weights as well; see ``BlockManagerPool.sleep``.

        Args:
            level: 1 or 2.
            check_only: change nothing, only raise what would be in the way.

        Raises:
            RequestError: the level is unknown, sequences of another scheduler hold memory, or a
                change of the weights is under way.
            NotSupportedError: the model cannot give its memory back.
        """
        if level not in {1, 2}:
            raise RequestError(f"sleep level is {level!r}: use 1 (KV) or 2 (KV and weights)")
        engine, kv = self._engine, self._kv
        sleepy: set[SleepTag] = {"kv_cache"}
        if level == 2 and engine is not None:
            sleepy.add("weights")
        sleepy -= self.asleep
        if not sleepy:
            return
        self._check_idle()
        runner = None
        if engine is not None and (kv.buffers is not None or "weights" in sleepy):
            runner = self._runner("sleep")
        if "kv_cache" in sleepy:
            own = () if engine is None else engine.scheduler.running
            kv.check_unused({task.sequence for task in own})
        if check_only:
            return
        if "kv_cache" in sleepy:
            self._sleep_kv(runner)
        if "weights" in sleepy:
            assert runner is not None, "weights sleep where a model is"
            runner.drop()
        self.asleep |= sleepy

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take KV memory again, and begin to read the weights again, as far as they sleep.

        Raises:
            RequestError: a tag is unknown, or the weights cannot be read again.
            ConfigError: the KV memory does not fit any more.
        """
        wanted = self.asleep & set(checked_tags(tags))
        engine, kv = self._engine, self._kv
        if "weights" in wanted:
            runner = self._runner("wake up")
            if not runner.can_reload:
                raise RequestError(
                    f"rank {kv.dp_rank} cannot read its weights again, for they came as arrays: "
                    "call wake_up(tags=['kv_cache']), then update_weights with mode 'keep'"
                )
        if "kv_cache" in wanted:
            kv.wake_up()
            if engine is not None and kv.buffers is not None:
                self._runner("wake up").bind(kv.buffers, kv.state_buffers)
            self.asleep.discard("kv_cache")
        if "weights" in wanted and self._waking is None:
            self._error = None
            self._waking = Reading(runner.reload)

    # -- between steps --------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether something waits for ``advance``."""
        waking, update = self._waking, self._update
        is_read = waking is not None and waking.staged is not None
        return is_read or (update is not None and update.is_due)

    def advance(self) -> None:
        """Do what has become possible; between two steps."""
        waking, update = self._waking, self._update
        if waking is not None and (waking.staged or waking.error) is not None:
            self._waking, self._error = None, waking.error
            if waking.staged is not None:
                waking.staged.apply()
                self.asleep.discard("weights")
        if update is not None and update.is_due and not self._must_wait(update):
            self._switch(update)

    def _must_wait(self, update: _Update) -> bool:
        engine = self._engine
        return engine is not None and update.mode == "wait" and engine.scheduler.has_started

    def _switch(self, update: _Update) -> None:
        if update.reading is not None:
            assert update.reading.staged is not None, "applied only once it is staged"
            update.reading.staged.apply()
            self.asleep.discard("weights")
            self._waking = None  # what it reads is out of date
        self._kv.begin_version(update.version)
        if self._engine is not None:
            self._engine.begin_version(update.version)
        self._update = self._error = None

    def _sleep_kv(self, runner: ReloadableRunner | None) -> None:
        if self._engine is not None:
            self._engine.scheduler.preempt_all()
        if runner is not None:
            runner.unbind()
        try:
            self._kv.sleep()
        except RequestError:
            if runner is not None:
                assert self._kv.buffers is not None, "a runner has buffers"
                runner.bind(self._kv.buffers, self._kv.state_buffers)
            raise

    def _check_idle(self) -> None:
        update = self._update
        if self._waking is not None:
            raise RequestError(f"rank {self._kv.dp_rank} is waking up: wait for it")
        if update is not None and (update.reading is None or update.reading.error is None):
            raise RequestError(
                f"rank {self._kv.dp_rank} is changing to weights version {update.version}: wait "
                "for it"
            )

    def _runner(self, what: str) -> ReloadableRunner:
        runner: object = None if self._engine is None else self._engine.model
        if isinstance(runner, ReloadableRunner):
            return runner
        why = "has no engine" if runner is None else f"runs a {type(runner).__name__}"
        raise NotSupportedError(
            f"rank {self._kv.dp_rank} {why}, so raykv cannot {what}: set `model` in its "
            "configuration, or give its runner the methods of ReloadableRunner"
        )
