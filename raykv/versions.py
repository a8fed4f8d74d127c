"""The driver's end of weights versions and sleep: over all ranks at once, or not at all."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from raykv.config import PoolConfig
from raykv.engine.weights import (
    UpdateMode,
    Weights,
    WeightsStatus,
    checked_tags,
    checked_version,
    pack,
)
from raykv.errors import RankUnavailableError, RequestError
from raykv.lost_replies import answers_of_all
from raykv.rank_handle import RankHandle, Reply, results

_MODES: tuple[UpdateMode, ...] = get_args(UpdateMode)
_MAX_ATTEMPTS = 3
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.001, 0.1


class VersionedRanks:
    """What a pool does with the weights and the memory of its ranks; a part of BlockManagerPool.

    Attributes:
        config: what the ranks were made from.
        ranks: one handle per dp_rank, in order.
    """

    config: PoolConfig
    ranks: list[RankHandle]
    _latest: tuple[int, Weights] | None = None  # what this driver brought the ranks to
    _sleep_level = 0

    def update_weights(
        self,
        version: int,
        weights: str | Path | Mapping[str, Any] | None = None,
        *,
        mode: UpdateMode = "wait",
        timeout_s: float = 600.0,
    ) -> None:
        """Serve under new weights; returns when every rank does.

        First all ranks read and check them while requests go on, then all change, each between two
        steps; where one cannot, none changes. KV of one version is never found under another: what
        is computed now is published under its own version, and sequences that run on, which depend
        on it, publish nothing more until they are computed anew. For a scheduler of your own the
        same holds for sequences that it holds now; put the new version into the namespaces of
        later ones.

        Args:
            version: greater than what the ranks serve (0 at first).
            weights: a folder or safetensors file as ``save_pretrained`` writes it, which every
                rank can read, and the faster way by far; or arrays or tensors by parameter name.
                None changes the version only.
            mode: what becomes of requests. ``wait`` admits nobody new until those that run have
                ended under the old weights, ``abort`` ends all, running and waiting (stop reason
                ``abort``), ``keep`` lets those that run go on, under the new weights, with the KV
                they have. Each token says which version it came from.
            timeout_s: seconds that it may take; what has not changed by then stays as it is.

        Raises:
            RequestError: the version is not greater, or the weights cannot be read or do not fit
                the model; nothing changed.
            NotSupportedError: there are weights, but no model.
            RankUnavailableError: no rank is left, one is and losses are reported, or it took too
                long. Call again, with the same version, to bring the other ranks to it.

        A rank that is lost meanwhile is brought to the version when it is back, by the driver that
        made the update.
        """
        if mode not in _MODES:
            raise RequestError(f"mode is {mode!r}: choose one of {', '.join(_MODES)}")
        version = checked_version(version)
        packed = pack(weights)
        deadline = time.monotonic() + timeout_s
        for attempt in range(_MAX_ATTEMPTS):
            there = self._there()
            sessions = [rank.session for rank in there]
            try:
                self._update(there, version, packed, mode, deadline)
                break
            except RankUnavailableError as error:
                lost_one = sessions != [rank.session for rank in there]
                if not (self._fails_over and lost_one) or attempt + 1 == _MAX_ATTEMPTS:
                    raise RankUnavailableError(
                        f"{error}; once the ranks are back, update_weights to {version} again"
                    ) from error
                time.sleep(_LONGEST_WAIT_S)
        self._latest = version, packed

    def _update(
        self,
        ranks: list[RankHandle],
        version: int,
        weights: Weights,
        mode: UpdateMode,
        deadline: float,
    ) -> None:
        serves = [status.version for status in _statuses(ranks)]
        # Some may have it from an update that failed elsewhere: calling again brings the others.
        behind = [rank for rank, served in zip(ranks, serves, strict=True) if served < version]
        if max(serves) > version or (not behind and len(ranks) == len(self.ranks)):
            raise RequestError(
                f"weights version {version} is not greater than what the ranks serve, {serves}: "
                f"versions only grow, so use {max(serves) + 1} or more"
            )
        prepared: list[RankHandle] = []
        try:
            replies = [rank.prepare_weights(version, weights, mode) for rank in behind]
            results([_Noted(*each, prepared) for each in zip(replies, behind, strict=True)])
            _wait(behind, lambda status: status.is_staged, deadline, "read the weights")
            results([rank.apply_weights(version) for rank in behind])
            _wait(behind, lambda status: status.version == version, deadline, "change weights")
        except BaseException:
            _cancel(prepared, version)
            raise

    def bring_up_to_date(self, rank: RankHandle) -> None:
        """Let a rank that was lost serve what the others do; see RankHandle.welcome."""
        if self._latest is not None and rank.weights_status().result().version < self._latest[0]:
            deadline = time.monotonic() + self.config.ray.start_timeout_s
            self._update([rank], *self._latest, "keep", deadline)
        if self._sleep_level:
            rank.sleep(self._sleep_level, check_only=False).result()

    @property
    def _fails_over(self) -> bool:
        return self.config.ray.on_rank_loss == "fail_over"

    def _there(self) -> list[RankHandle]:
        """The ranks to change: those that are not lost, if others may be."""
        there = [rank for rank in self.ranks if rank.lost is None]
        return there if there and self._fails_over else self.ranks

    def weights_version(self) -> list[int]:
        """The version of the weights that each rank serves; -1 for a lost one."""
        replies = [rank.weights_status() for rank in self.ranks]
        gone = WeightsStatus(-1)
        found = answers_of_all(replies, gone, fails_over=self._fails_over)
        return [status.version for status in found]

    def retire(self, version: int) -> list[int]:
        """Evict what these weights computed before all else; how much that is now, per rank.

        Holds for good, also for blocks that are released later, and under every eviction policy.
        """
        replies = [rank.retire(version) for rank in self.ranks]
        return answers_of_all(replies, 0, fails_over=self._fails_over)

    def sleep(self, level: int = 1) -> None:
        """Give up memory until ``wake_up``; idempotent.

        Requests under way lose their KV and go on after waking, with the same outputs; new ones
        wait. All cached prefixes are forgotten.

        Args:
            level: 1 gives up the KV memory, 2 the model's weights as well.

        Raises:
            RequestError: sequences of your own scheduler hold blocks, or an update is under way;
                nothing changed.
            NotSupportedError: a model that raykv did not load cannot give its memory back.
        """
        for check_only in (True, False):
            results([rank.sleep(level, check_only=check_only) for rank in self._there()])
        self._sleep_level = max(level, self._sleep_level)

    def wake_up(self, tags: Iterable[str] | None = None, *, timeout_s: float = 600.0) -> None:
        """Take back what ``sleep`` gave up; returns when it is there. Idempotent.

        Weights are read from where they came last, whatever lies there now: do not overwrite a
        folder whose weights sleep.

        Args:
            tags: ``weights``, ``kv_cache`` or both; None for all.
            timeout_s: seconds that it may take.

        Raises:
            RequestError: the weights cannot be read again, such as those that came as arrays: wake
                ``kv_cache`` and update them instead.
            ConfigError: the KV memory does not fit any more, or the model's folder is gone.
            RankUnavailableError: a rank is gone, or it took too long.
        """
        wanted = checked_tags(tags)
        deadline = time.monotonic() + timeout_s
        there = self._there()
        results([rank.wake_up(wanted) for rank in there])
        _wait(there, lambda status: not set(wanted) & set(status.asleep), deadline, "wake up")
        if "kv_cache" in wanted:
            self._sleep_level = 0  # a rank that is restarted has all its weights


@dataclass(frozen=True, slots=True)
class _Noted:
    """A reply that notes its rank if all went well."""

    reply: Reply[None]
    rank: RankHandle
    noted: list[RankHandle]

    def result(self) -> None:
        self.reply.result()
        self.noted.append(self.rank)


def _statuses(ranks: Sequence[RankHandle]) -> list[WeightsStatus]:
    """How far each rank is, in order."""
    return results([rank.weights_status() for rank in ranks])


def _wait(
    ranks: Sequence[RankHandle],
    is_done: Callable[[WeightsStatus], bool],
    deadline: float,
    what: str,
) -> None:
    """Ask all ranks until each is done; raises what one of them failed with."""
    wait_s = _FIRST_WAIT_S
    while True:
        found = _statuses(ranks)
        left = [
            (rank, status) for rank, status in zip(ranks, found, strict=True) if not is_done(status)
        ]
        for _, status in left:
            if status.error is not None:
                raise status.error
        if not left:
            return
        if time.monotonic() > deadline:
            raise RankUnavailableError(
                f"ranks {[rank.dp_rank for rank, _ in left]} did not {what} in time; the versions "
                f"served are {[status.version for status in found]}: allow more with timeout_s, "
                "and call again"
            )
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def _cancel(ranks: Sequence[RankHandle], version: int) -> None:
    """Let ranks that have not changed yet stay as they are; lost ones cannot be asked."""
    for reply in [rank.cancel_weights(version) for rank in ranks]:
        with contextlib.suppress(RankUnavailableError):
            reply.result()
