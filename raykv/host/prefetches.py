"""Reads what prompts need from stores and other nodes into host blocks while they wait.

A prompt's blocks are asked of one source after the other: what the first lacks, the next may have.
They arrive in steps. Each step is a store of the books like a rank's: what has arrived is found
at once, and what has not takes no host memory yet.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from raykv.core import Namespace
from raykv.errors import IntegrityError
from raykv.host.block_source import BlockSource, Prompt
from raykv.host.host_tier import HostTier
from raykv.host.tickets import NO_TICKET, Offer, StoreResult, StoreTicket
from raykv.memory.checksums import block_checksums
from raykv.memory.host_slab import HostSlab

# Blocks that are asked for in one call, and that a slow source keeps from others.
_STEP_BLOCKS = 32
_MAX_AT_ONCE = 4
_MAX_UNDER_WAY = 256
# How long a source that had nothing more for a prompt is not asked for it again.
_KNOWN_S = 1.0
_MAX_KNOWN = 4096
# For a cancelled read to end. A source that keeps to its contract ends at once.
_END_S = 1.0

_Key: TypeAlias = tuple[Namespace, bytes]


class _Outcome(NamedTuple):
    """How a prefetch ended: when, what the host had then, and whether that is all there was."""

    time_s: float
    num_ready: int
    is_complete: bool


@dataclass(slots=True, eq=False)
class _Fetch:
    """A prefetch under way.

    Attributes:
        prompt: of which; its tokens are a copy.
        key: its name.
        epoch: how many resets there were when it began.
        num_blocks: of the prompt.
        num_said: leading blocks that host and sources have, by what they said.
        ticket_id: of the step under way.
        is_over: set once nothing of it will be written any more.
        is_complete: whether all that was said to be there had arrived then.
        task: runs it, once the loop has begun.
    """

    prompt: Prompt
    key: _Key
    epoch: int
    num_blocks: int
    num_said: int = 0
    ticket_id: int = NO_TICKET
    is_over: threading.Event = field(default_factory=threading.Event)
    is_complete: bool = False
    task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """Stop it; in the loop's thread."""
        if self.task is not None:
            self.task.cancel()


class Prefetches:
    """All prefetches of a host tier.

    Methods may be called from any thread but the loop's; ``wait`` and ``close`` wait for the loop,
    so not with the lock held. A few prefetches run at a time, the others wait in line.

    Args:
        books: of the host tier.
        slab: its memory.
        lock: held around every use of the books, and of what is kept here.
        sources: in the order in which to ask them; not closed with this.
        loop: runs in a thread of its own; ends after ``close``.
        client_id: the name under which to be a client of the books.
        with_checksums: whether readers compare checksums.
        clock: the seconds of the books' leases.
    """

    def __init__(
        self,
        books: HostTier,
        slab: HostSlab,
        lock: threading.RLock,
        sources: Sequence[BlockSource],
        *,
        loop: asyncio.AbstractEventLoop,
        client_id: str,
        with_checksums: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._books = books
        self._slab = slab
        self._lock = lock
        self._sources = tuple(sources)
        self._loop = loop
        self._client_id = client_id
        self._with_checksums = with_checksums
        self._clock = clock
        self._turns = asyncio.Semaphore(_MAX_AT_ONCE)
        self._fetches: dict[_Key, _Fetch] = {}
        self._known: OrderedDict[_Key, _Outcome] = OrderedDict()  # the oldest first
        self._counts: Counter[str] = Counter()
        self._last_error: str | None = None
        self._epoch = 0
        self._is_closed = False

    # -- for the ranks --------------------------------------------------------------------------

    def start(self, prompt: Prompt) -> bool:
        """Begin to read what the host lacks of a prompt; never blocks. Idempotent.

        Equal prompts share one prefetch.

        Returns:
            Whether one is under way now. False where the host has all, where a moment ago nothing
            more was to be had, where too many are in line, and after ``close``.
        """
        key, num_blocks = _key(prompt), len(prompt.tokens) // self._books.manager.block_size
        with self._lock:
            if key in self._fetches:
                return True
            if self._is_closed or not self._sources:
                return False
            num_ready = self._books.num_ready(prompt.tokens, prompt.namespace)
            known = self._recent(key)
            if num_ready >= num_blocks or (known is not None and num_ready >= known.num_ready):
                return False
            if len(self._fetches) >= _MAX_UNDER_WAY:
                self._counts["turned_away"] += 1
                return False
            # A view of a message would keep all of it alive.
            prompt = Prompt(prompt.tokens.copy(), prompt.namespace, prompt.prefill_tokens_per_s)
            fetch = self._fetches[key] = _Fetch(prompt, key, self._epoch, num_blocks)
            self._counts["started"] += 1
            self._loop.call_soon_threadsafe(self._begin, fetch)
        return True

    def is_running(self, prompt: Prompt) -> bool:
        """Whether more of a prompt may be on its way."""
        with self._lock:
            return _key(prompt) in self._fetches

    def give_up(self, prompt: Prompt) -> None:
        """Read no more of a prompt; what has arrived stays. Never blocks.

        Of the step that is cut short, what had arrived is found a moment later.
        """
        with self._lock:
            fetch = self._fetches.get(_key(prompt))
            if fetch is not None:
                self._loop.call_soon_threadsafe(fetch.cancel)

    def wait(self, prompt: Prompt, timeout_s: float) -> bool:
        """Wait for a prompt's prefetch, then give up the rest (the seed's update_prefetch_result).

        All that has arrived can be found then.

        Args:
            prompt: for which ``start`` was called.
            timeout_s: seconds to wait.

        Returns:
            Whether all that the sources said they have is on the host. Where no prefetch is known,
            whether the host has the whole prompt.
        """
        key = _key(prompt)
        with self._lock:
            fetch = self._fetches.get(key)
            if fetch is None:
                num_ready = self._books.num_ready(prompt.tokens, prompt.namespace)
                known = self._recent(key)
                if known is not None:
                    return known.is_complete and num_ready >= known.num_ready
                return num_ready >= len(prompt.tokens) // self._books.manager.block_size
        if not fetch.is_over.wait(timeout_s):
            self._loop.call_soon_threadsafe(fetch.cancel)
            fetch.is_over.wait(_END_S)
        return fetch.is_complete

    def reset(self) -> None:
        """The books were reset: what is under way is of before, and is dropped. Never blocks."""
        with self._lock:
            self._epoch += 1
            self._known.clear()
            for fetch in self._fetches.values():
                self._loop.call_soon_threadsafe(fetch.cancel)

    def stats(self) -> dict[str, Any]:
        """Counters since the start.

        Returns:
            Prefetches: ``under_way`` (now, those in line too), ``started``, ``completed`` (all that
            was said to be there came), ``cut_short`` (a source came up short, or the host had no
            room), ``given_up``, ``failed`` (an error that no source should raise; see
            ``last_error``), ``turned_away`` (the line was full). ``blocks``: that arrived;
            ``no_room``: steps that ended since the host had none. ``sources``: theirs, by name.
        """
        names = (
            *("started", "completed", "cut_short", "given_up", "failed", "turned_away"),
            *("blocks", "no_room"),
        )
        with self._lock:
            return {
                "under_way": len(self._fetches),
                **{name: self._counts[name] for name in names},
                "last_error": self._last_error,
                "sources": {source.name: source.stats() for source in self._sources},
            }

    def close(self) -> None:
        """Give up all that is under way and leave the books; idempotent."""
        with self._lock:
            self._is_closed = True
            fetches = list(self._fetches.values())
            for fetch in fetches:
                self._loop.call_soon_threadsafe(fetch.cancel)
        until_s = time.monotonic() + _END_S
        for fetch in fetches:
            fetch.is_over.wait(max(0.0, until_s - time.monotonic()))
        with self._lock:
            self._books.leave(self._client_id)

    def check_integrity(self) -> None:
        """Compare what is under way with the books.

        Raises:
            IntegrityError: a store of the books belongs to no prefetch, two share one, or a bound
                or a count is wrong.
        """
        with self._lock:
            client = self._books.clients.find(self._client_id)
            stores = set() if client is None else set(client.stores)
            tickets = [fetch.ticket_id for fetch in self._fetches.values() if fetch.ticket_id]
            if not stores <= set(tickets) or len(set(tickets)) < len(tickets):
                raise IntegrityError(f"prefetches write {tickets}, but the books say {stores}")
            if len(tickets) > _MAX_AT_ONCE or len(self._known) > _MAX_KNOWN:
                raise IntegrityError(f"{len(tickets)} read, {len(self._known)} are remembered")
            if any(fetch.is_over.is_set() for fetch in self._fetches.values()):
                raise IntegrityError("a prefetch that is over is listed as under way")
            ended = sum(
                self._counts[how] for how in ("completed", "cut_short", "given_up", "failed")
            )
            if self._counts["started"] != ended + len(self._fetches):
                raise IntegrityError(
                    f"{self._counts['started']} prefetches were started, but {ended} ended and"
                    f" {len(self._fetches)} are under way"
                )

    # -- in the loop's thread -------------------------------------------------------------------

    def _begin(self, fetch: _Fetch) -> None:
        fetch.task = asyncio.ensure_future(self._run(fetch))
        # Not at the end of the coroutine: one that is cancelled before it began never gets there.
        fetch.task.add_done_callback(lambda task: self._end(fetch, task))

    async def _run(self, fetch: _Fetch) -> None:
        """Ask the sources in turn until none has more."""
        async with self._turns:
            num_asked = 0
            for source in itertools.cycle(self._sources):
                num_asked = 1 if await self._take(fetch, source) else num_asked + 1
                if num_asked == len(self._sources):
                    return

    async def _take(self, fetch: _Fetch, source: BlockSource) -> int:
        """Read what one source has beyond the host's; returns how many blocks came."""
        with self._lock:
            at = self._books.num_ready(fetch.prompt.tokens, fetch.prompt.namespace)
        fetch.num_said = max(fetch.num_said, at)
        if at >= fetch.num_blocks:
            return 0
        end = min(at + await source.count(fetch.prompt, at), fetch.num_blocks)
        fetch.num_said = max(fetch.num_said, end)
        num_read = 0
        while at < end:
            stop = min(at + _STEP_BLOCKS, end)
            ticket = self._offer(fetch, stop)
            if ticket.id == NO_TICKET and ticket.first_block >= stop:
                at = stop  # somebody else is storing these
                continue
            if ticket.id == NO_TICKET:
                self._counts["no_room"] += 1
                break
            if ticket.first_block < at:  # what the host had was reset or evicted meanwhile
                self._publish(fetch, ticket, 0)
                break
            num_ok = await self._fill(fetch, source, ticket)
            num_read += num_ok
            at = ticket.first_block + num_ok
            if num_ok < len(ticket.host_ids):
                break
        return num_read

    def _offer(self, fetch: _Fetch, num_blocks: int) -> StoreTicket:
        """Host blocks for what comes next.

        Raises:
            CancelledError: there was a reset since the sources were asked.
        """
        prompt = fetch.prompt
        offer = Offer(prompt.tokens, prompt.namespace, num_blocks)
        with self._lock:
            if fetch.epoch != self._epoch:
                raise asyncio.CancelledError
            self._books.join(self._client_id, os.getpid(), self._clock())
            (ticket,) = self._books.offer(self._client_id, [offer])
            fetch.ticket_id = ticket.id
        return ticket

    async def _fill(self, fetch: _Fetch, source: BlockSource, ticket: StoreTicket) -> int:
        """Read the blocks of one step; returns how many leading ones are right."""
        num_ok = 0

        def note(num_blocks: int) -> None:
            nonlocal num_ok
            num_ok = num_blocks

        try:
            row_ids = ticket.host_ids.astype(np.intp)
            num_ok = await source.read(
                fetch.prompt, ticket.first_block, self._slab.blocks, row_ids, note
            )
        finally:
            # After a cancellation too: the read has ended, so what had arrived stays as it is.
            self._publish(fetch, ticket, num_ok)
        return num_ok

    def _publish(self, fetch: _Fetch, ticket: StoreTicket, num_ok: int) -> None:
        """Let the leading blocks of a step be found, and take back the others."""
        checksums = None
        if self._with_checksums:
            ids = ticket.host_ids[:num_ok]
            checksums = block_checksums(self._slab.blocks[row] for row in ids)
            self._slab.checksums[ids] = checksums
        with self._lock:
            fetch.ticket_id = NO_TICKET
            self._counts["blocks"] += num_ok
            self._books.stored(self._client_id, [StoreResult(ticket.id, num_ok, checksums)])

    def _end(self, fetch: _Fetch, task: asyncio.Task[None]) -> None:
        with self._lock:
            del self._fetches[fetch.key]
            num_ready = self._books.num_ready(fetch.prompt.tokens, fetch.prompt.namespace)
            if task.cancelled():
                self._counts["given_up"] += 1
            else:
                error = task.exception()
                fetch.is_complete = error is None and num_ready >= fetch.num_said
                if error is not None:
                    self._counts["failed"] += 1
                    self._last_error = f"{type(error).__name__}: {error}"
                else:
                    self._counts["completed" if fetch.is_complete else "cut_short"] += 1
                outcome = _Outcome(self._clock(), num_ready, fetch.is_complete)
                self._known[fetch.key] = outcome
                self._known.move_to_end(fetch.key)
                if len(self._known) > _MAX_KNOWN:
                    self._known.popitem(last=False)
        fetch.is_over.set()

    def _recent(self, key: _Key) -> _Outcome | None:
        """How the prompt's last prefetch ended, if that was just now."""
        known = self._known.get(key)
        if known is not None and self._clock() - known.time_s > _KNOWN_S:
            del self._known[key]
            return None
        return known


def _key(prompt: Prompt) -> _Key:
    # The tokens themselves can be half a megabyte, and outcomes are kept by it.
    tokens = np.ascontiguousarray(prompt.tokens)
    return prompt.namespace, hashlib.blake2b(tokens.data, digest_size=16).digest()
