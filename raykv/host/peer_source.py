"""Fetches blocks from other nodes' host tiers, where that is faster than to compute them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raykv.errors import IntegrityError, TransferError
from raykv.host.block_source import Prompt
from raykv.host.tickets import NO_TICKET, LoadOutcome, LoadResult, LoadTicket, Want
from raykv.host.transport import PeerLink, RowRequest, Transport
from raykv.host.transport.interface import num_leading_ok

# A report that is lost leaves blocks pinned at the peer.
_REPORT_TRIES = 3
_REPORT_TIMEOUT_S = 1.0


class PeerHandle(Protocol):
    """Another node's host tier, as a client of it sees it. Calls may raise, or never end.

    Attributes:
        name: its own, for people and counters.
        address: of its block server, for the transport.
    """

    @property
    def name(self) -> str:
        """See the class."""
        ...

    @property
    def address(self) -> str:
        """See the class."""
        ...

    async def find(self, want: Want) -> LoadTicket | None:
        """See ``HostTier.find``: what is found is pinned until it is reported. None: nothing."""
        ...

    async def loaded(self, result: LoadResult) -> None:
        """See ``HostTier.loaded``; to report twice changes nothing."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """A ticket, and whose."""

    peer: PeerHandle
    ticket: LoadTicket

    def __len__(self) -> int:
        return len(self.ticket.host_ids)


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """What ``count`` found, for the ``read`` that follows."""

    found: _Found
    timer: asyncio.TimerHandle


class PeerSource:
    """A ``BlockSource`` over the tiers of other nodes.

    ``count`` asks all peers side by side and keeps the best one's ticket for a while; all other
    tickets are given back. ``read`` takes that ticket, or asks anew. A peer is taken only if the
    copy will take less time than to compute the blocks, as far as both were measured. A peer that
    fails is left alone, for longer each time.

    Args:
        peers: who there is now, without this node itself; asked at each call.
        transport: reads their rows; closed with the source.
        block_size: tokens of a block.
        block_bytes: bytes of a block.
        find_timeout_s: seconds that peers have to answer; who is late counts as failing.
        keep_s: seconds for which a ticket is kept for a read.

    Attributes:
        name: see BlockSource.
        last_error: the last failure of a peer or of the transport; None if there was none.
    """

    def __init__(
        self,
        peers: Callable[[], Sequence[PeerHandle]],
        transport: Transport,
        *,
        block_size: int,
        block_bytes: int,
        find_timeout_s: float = 0.2,
        keep_s: float = 2.0,
    ) -> None:
        self.name = "peers"
        self.last_error: Exception | None = None
        self._peers = peers
        self._transport = transport
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._find_timeout_s = find_timeout_s
        self._keep_s = keep_s
        self._links: dict[str, PeerLink] = {}
        self._late: Counter[str] = Counter()  # questions that a peer has not answered in time
        self._kept: dict[Hashable, _Kept] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._counts: Counter[str] = Counter()
        self._is_closed = False

    async def count(self, prompt: Prompt, first_block: int) -> int:
        """See BlockSource; what is found stays pinned at the peer for ``keep_s``."""
        found = await self._find(prompt, first_block)
        if found is None:
            return 0
        key = _key(prompt)
        self._give_back(key)
        timer = asyncio.get_running_loop().call_later(self._keep_s, self._give_back, key)
        self._kept[key] = _Kept(found, timer)
        return len(found)

    async def read(
        self,
        prompt: Prompt,
        first_block: int,
        rows: NDArray[np.uint8],
        row_ids: NDArray[np.intp],
        on_blocks: Callable[[int], None],
    ) -> int:
        """See BlockSource."""
        if not len(row_ids):
            return 0
        found = self._take(prompt, first_block) or await self._find(prompt, first_block)
        if found is None:
            return 0
        ticket = found.ticket
        start = first_block - ticket.first_block
        num = min(len(row_ids), len(found) - start)
        part = slice(start, start + num)
        outcomes = np.full(len(found), LoadOutcome.CANCELLED, np.uint8)
        started_s = time.monotonic()
        try:
            request = RowRequest(ticket.host_ids, ticket.generations, ticket.checksums)[part]
            outcomes[part] = await self._transport.read_rows(
                found.peer.address, request, rows, row_ids[:num], on_blocks
            )
        except Exception as error:  # noqa: BLE001 - a transport that breaks the rules
            outcomes[part] = LoadOutcome.FAILED
            self.last_error = error
        finally:  # cancelled, too
            self._report(found, outcomes)
        return self._note(found.peer, outcomes[part], time.monotonic() - started_s)

    def stats(self) -> dict[str, Any]:
        """Questions, blocks by outcome, what is under way, the transport's counters, and links."""
        error = self.last_error
        return {
            **self._counts,
            "kept": len(self._kept),
            "last_error": None if error is None else f"{type(error).__name__}: {error}",
            "transport": self._transport.stats(),
            "peers": {
                name: {
                    "bytes_per_s": link.bytes_per_s,
                    "latency_s": link.latency_s,
                    "is_resting": link.is_resting,
                }
                for name, link in self._links.items()
            },
        }

    async def close(self) -> None:
        """Give back all tickets and close the transport, in bounded time; idempotent."""
        self._is_closed = True
        for key in list(self._kept):
            self._give_back(key)
        # Those that end late may have tickets to give back, which are new tasks.
        deadline_s = time.monotonic() + _REPORT_TIMEOUT_S
        while self._tasks and (left_s := deadline_s - time.monotonic()) > 0:
            await asyncio.wait(set(self._tasks), timeout=left_s)
        for task in self._tasks:
            task.cancel()
        await self._transport.close()

    def check_integrity(self) -> None:
        """Check that every kept ticket will be given back, and only open ones are.

        Raises:
            IntegrityError: something disagrees.
        """
        for kept in self._kept.values():
            if kept.timer.cancelled():
                raise IntegrityError("a kept ticket has no time limit: its blocks stay pinned")
        tickets = [(kept.found.peer.name, kept.found.ticket.id) for kept in self._kept.values()]
        if len(set(tickets)) != len(tickets):
            raise IntegrityError("a ticket is kept twice")

    # -- asking ---------------------------------------------------------------------------------

    async def _find(self, prompt: Prompt, first_block: int) -> _Found | None:
        """Ask all peers; the best answer that is worth a copy, pinned."""
        is_over = first_block * self._block_size >= len(prompt.tokens)
        peers = [] if is_over or self._is_closed else self._askable()
        if not peers:
            return None
        # Tiers leave the last token of a prompt to be computed: one is added for that.
        tokens = np.append(prompt.tokens, np.int32(0))
        want = Want(tokens, prompt.namespace, first_block)
        self._counts["asked"] += len(peers)
        tasks = {self._start(self._ask(peer, want)): peer for peer in peers}
        best = None
        try:
            done, late = await asyncio.wait(tasks, timeout=self._find_timeout_s)
            for task in late:
                self._note_late(task, tasks[task])
            best = self._choose(prompt, done)
        finally:  # cancelled, too
            for task in tasks:
                if task is not best:
                    task.add_done_callback(self._let_go)
        return None if best is None else best.result()

    def _askable(self) -> list[PeerHandle]:
        """Those who are not failing."""
        peers = list(self._peers())
        known = self._links
        self._links = {peer.name: known.get(peer.name) or PeerLink() for peer in peers}
        return [
            peer
            for peer in peers
            if not self._late[peer.name] and not self._links[peer.name].is_resting
        ]

    async def _ask(self, peer: PeerHandle, want: Want) -> _Found | None:
        started_s = time.monotonic()
        try:
            ticket = await peer.find(want)
        except Exception as error:  # noqa: BLE001 - whatever carries the call may raise anything
            self._fail(peer, error)
            return None
        self._link(peer).answered(time.monotonic() - started_s)
        if ticket is None or ticket.id == NO_TICKET:
            return None
        found = _Found(peer, ticket)
        most = (len(want.tokens) - 1) // self._block_size - want.num_device_blocks
        if ticket.first_block != want.num_device_blocks or not 0 < len(found) <= most:
            self._release(found)
            self._fail(
                peer,
                TransferError(
                    f"{peer.name} found {len(found)} blocks from {ticket.first_block} on, where at"
                    f" most {most} from {want.num_device_blocks} on were wanted"
                ),
            )
            return None
        return found

    def _choose(
        self, prompt: Prompt, done: set[asyncio.Task[_Found | None]]
    ) -> asyncio.Task[_Found | None] | None:
        """The answer that saves most time, if any does."""
        best, best_saved_s = None, 0.0
        best_size: tuple[int, float] = (0, 0.0)
        any_found = False
        for task in done:
            found = None if task.cancelled() else task.result()
            if found is None:
                continue
            any_found = True
            copy_s = self._link(found.peer).copy_s(len(found) * self._block_bytes)
            if prompt.prefill_tokens_per_s > 0:
                prefill_s = len(found) * self._block_size / prompt.prefill_tokens_per_s
                if prefill_s - copy_s > best_saved_s:
                    best, best_saved_s = task, prefill_s - copy_s
            elif (len(found), -copy_s) > best_size:
                best, best_size = task, (len(found), -copy_s)
        if any_found:
            self._counts["found" if best is not None else "not_worth"] += 1
        return best

    def _note_late(self, task: asyncio.Task[_Found | None], peer: PeerHandle) -> None:
        """Ask this peer nothing more until it has answered."""
        self._fail(peer, TimeoutError(f"{peer.name} did not answer in {self._find_timeout_s} s"))
        self._late[peer.name] += 1

        def answered(_: asyncio.Task[Any]) -> None:
            self._late[peer.name] -= 1
            self._late += Counter()  # drops who is at 0

        task.add_done_callback(answered)

    # -- tickets --------------------------------------------------------------------------------

    def _take(self, prompt: Prompt, first_block: int) -> _Found | None:
        """The ticket that was kept for this prompt, if it has this block."""
        kept = self._kept.get(_key(prompt))
        if kept is None:
            return None
        first = kept.found.ticket.first_block
        if not first <= first_block < first + len(kept.found):
            return None
        del self._kept[_key(prompt)]
        kept.timer.cancel()
        return kept.found

    def _give_back(self, key: Hashable) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            kept.timer.cancel()
            self._release(kept.found)

    def _let_go(self, task: asyncio.Task[_Found | None]) -> None:
        """Give back a ticket that was not chosen, or came too late."""
        if not task.cancelled() and (found := task.result()) is not None:
            self._release(found)

    def _release(self, found: _Found) -> None:
        self._report(found, np.full(len(found), LoadOutcome.CANCELLED, np.uint8))

    def _report(self, found: _Found, outcomes: NDArray[np.uint8]) -> None:
        """Tell the peer, without waiting for it."""
        self._start(self._tell(found.peer, LoadResult(found.ticket.id, outcomes)))

    async def _tell(self, peer: PeerHandle, result: LoadResult) -> None:
        for _ in range(_REPORT_TRIES):
            try:
                async with asyncio.timeout(_REPORT_TIMEOUT_S):
                    await peer.loaded(result)
            except Exception as error:  # noqa: BLE001 - whatever carries the call may raise anything
                self.last_error = error
            else:
                return
        self._counts["unreported"] += 1

    # -- the rest -------------------------------------------------------------------------------

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _link(self, peer: PeerHandle) -> PeerLink:
        return self._links.setdefault(peer.name, PeerLink())

    def _fail(self, peer: PeerHandle, error: Exception) -> None:
        self.last_error = error
        self._counts["failures"] += 1
        self._link(peer).failed()

    def _note(self, peer: PeerHandle, outcomes: NDArray[np.uint8], seconds: float) -> int:
        """Count what arrived; returns leading blocks that are right."""
        num_ok = num_leading_ok(outcomes)
        self._counts["blocks"] += num_ok
        self._counts["bytes"] += num_ok * self._block_bytes
        if num_ok == len(outcomes):
            self._link(peer).copied(num_ok * self._block_bytes, seconds)
            return num_ok
        outcome = LoadOutcome(outcomes[num_ok])
        self._counts[outcome.name.lower()] += 1
        if outcome == LoadOutcome.FAILED:
            self._counts["failures"] += 1
            self._link(peer).failed()
        return num_ok


def _key(prompt: Prompt) -> Hashable:
    return prompt.namespace, prompt.tokens.tobytes()
