"""Writes what ranks stored on the host to a KV store behind it, some time later."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raykv.core import Namespace
from raykv.errors import IntegrityError
from raykv.host.host_tier import HostTier
from raykv.host.tickets import NO_TICKET, LoadOutcome, LoadResult, LoadTicket, Want
from raykv.memory.checksums import NO_CHECKSUM, block_checksums
from raykv.memory.host_slab import HostSlab
from raykv.store import GuardedStore, KVKeys, is_storable

_MAX_NOTES = 256
# One put: so much memory is taken besides the slab.
_PUT_BYTES = 32 << 20
_PUT_BLOCKS = 16
_LOOK_BLOCKS = 256
# How long a block that was seen in the store is taken to be there still, and how many are known.
_KNOWN_S = 60.0
_MAX_KNOWN = 1 << 16
_END_S = 1.0


class _Note(NamedTuple):
    """Blocks that may be on the host. One token more than theirs, as ``find`` leaves one."""

    tokens: NDArray[np.int32]
    namespace: Namespace
    num_blocks: int


class StoreWriter:
    """Puts blocks of the host into a store, behind everybody's back.

    Blocks are copied from the slab and compared with their checksums first, and the copy is put:
    so a slow store keeps nothing on the host, and nothing damaged gets into it. Notes wait in a
    bounded line; if the store cannot keep up, the newest are dropped and counted, and the
    conversation's next turn notes the same blocks again. Nothing of later weights versions is
    stored; see ``is_storable``.

    Methods may be called from any thread but the loop's; ``drain`` and ``close`` wait for the loop,
    so not with the lock held.

    Args:
        books: of the host tier.
        slab: its memory.
        lock: held around every use of the books.
        store: where to put; not closed with this.
        keys: names the blocks.
        loop: runs in a thread of its own; ends after ``close``.
        client_id: the name under which to be a client of the books.
        clock: the seconds of the books' leases.
    """

    def __init__(
        self,
        books: HostTier,
        slab: HostSlab,
        lock: threading.RLock,
        store: GuardedStore,
        keys: KVKeys,
        *,
        loop: asyncio.AbstractEventLoop,
        client_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._books = books
        self._slab = slab
        self._lock = lock
        self._store = store
        self._keys = keys
        self._loop = loop
        self._client_id = client_id
        self._clock = clock
        self._put_blocks = min(_PUT_BLOCKS, max(1, _PUT_BYTES // slab.block_bytes))
        self._known: OrderedDict[bytes, float] = OrderedDict()  # keys, when seen; oldest first
        self._counts: Counter[str] = Counter()  # changed in the loop's thread, but for notes
        self._last_error: str | None = None
        self._guard = threading.Lock()  # of the line, and whether somebody serves it
        self._line: deque[_Note] = deque()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    # -- for the tier ---------------------------------------------------------------------------

    def note(self, tokens: NDArray[np.int32], namespace: Namespace, num_blocks: int) -> None:
        """Say that blocks were stored on the host; never blocks.

        Args:
            tokens: int32 [n], from the root on; copied.
            namespace: whose they are.
            num_blocks: leading full blocks that may be on the host.

        Raises:
            ValueError: there are fewer full blocks than that.
        """
        num_tokens = num_blocks * self._books.manager.block_size
        if not 0 <= num_tokens <= len(tokens):
            raise ValueError(
                f"{num_blocks} blocks of {len(tokens)} tokens cannot be stored: a block has"
                f" {self._books.manager.block_size}"
            )
        if not num_blocks or not is_storable(namespace):
            return
        row = np.append(tokens[:num_tokens], np.int32(0))
        with self._guard:
            self._counts["notes"] += 1
            if self._is_closed or len(self._line) >= _MAX_NOTES:
                self._counts["notes_dropped"] += 1
                return
            self._line.append(_Note(row, namespace, num_blocks))
            if self._is_idle.is_set():
                self._is_idle.clear()
                self._loop.call_soon_threadsafe(self._begin)

    def drain(self, timeout_s: float) -> bool:
        """Wait until all that was noted has had its turn; whether that took no longer than this."""
        return self._is_idle.wait(timeout_s)

    def stats(self) -> dict[str, Any]:
        """Counters since the start.

        Returns:
            ``in_line``: notes that wait now; ``notes``, ``notes_dropped``: as the line was full.
            Blocks: ``put``; ``there``: that the store had already; ``gone``: that were not on the
            host any more, or behind such; ``corrupt``: that were found damaged; ``refused``: that
            the store did not take, or behind such; ``failed``: notes that ended in an error, see
            ``last_error``.
        """
        names = ("notes", "notes_dropped", "put", "there", "gone", "corrupt", "refused", "failed")
        with self._guard:
            return {
                "in_line": len(self._line),
                **{name: self._counts[name] for name in names},
                "last_error": self._last_error,
            }

    def close(self) -> None:
        """Drop what waits, end what is under way, and leave the books; idempotent."""
        with self._guard:
            self._is_closed = True
            self._counts["notes_dropped"] += len(self._line)
            self._line.clear()
            if not self._is_idle.is_set():
                self._loop.call_soon_threadsafe(self._cancel)
        self._is_idle.wait(_END_S)
        with self._lock:
            self._books.leave(self._client_id)

    def check_integrity(self) -> None:
        """Check what is kept, and that at most one load of the books is under way.

        Raises:
            IntegrityError: something disagrees.
        """
        with self._lock, self._guard:
            client = self._books.clients.find(self._client_id)
            num_loads = 0 if client is None else len(client.loads)
            is_idle = self._is_idle.is_set()
            if client is not None and client.stores:
                raise IntegrityError("the writer of the store stores on the host")
            if num_loads > (0 if is_idle else 1) or (is_idle and self._line):
                raise IntegrityError(
                    f"{num_loads} loads and {len(self._line)} notes, with the writer"
                    f" {'idle' if is_idle else 'busy'}"
                )
            if len(self._line) > _MAX_NOTES or len(self._known) > _MAX_KNOWN:
                raise IntegrityError(f"{len(self._line)} notes wait, {len(self._known)} are known")

    # -- in the loop's thread -------------------------------------------------------------------

    def _begin(self) -> None:
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # else it said so itself, and the next one may be under way
            self._is_idle.set()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while (note := self._next()) is not None:
            try:
                await self._write(note)
            except Exception as error:  # noqa: BLE001 - the next note may do better
                self._count(failed=1)
                self._last_error = f"{type(error).__name__}: {error}"

    def _next(self) -> _Note | None:
        with self._guard:
            if self._line:
                return self._line.popleft()
            # Here, not when the task has ended: a note that comes in between would wait for ever.
            self._is_idle.set()
            return None

    async def _write(self, note: _Note) -> None:
        keys = self._keys.keys(note.tokens, note.namespace)[: note.num_blocks]
        missing = await self._missing(keys)
        while missing:
            if not self._store.is_available:
                self._count(refused=len(missing))
                return
            first = missing[0]
            chunk = [at for at in missing if at < first + self._put_blocks]
            values = self._copy(note, first, chunk[-1] + 1)
            items = [(keys[at], values[at - first]) for at in chunk if at - first < len(values)]
            confirmed = await self._store.put_many(items)
            for (key, _), is_there in zip(items, confirmed, strict=True):
                if is_there:
                    self._know(key)
            num_put = sum(confirmed)
            self._count(put=num_put, refused=len(items) - num_put)
            if num_put < len(chunk):
                # Nobody would find what lies behind a gap.
                why = "gone" if len(items) < len(chunk) else "refused"
                self._count(**{why: len(missing) - len(items)})
                return
            missing = missing[len(chunk) :]

    async def _missing(self, keys: list[bytes]) -> list[int]:
        """Places of the keys that the store is not known to have, ascending."""
        now_s = self._clock()
        seen_s = [self._known.get(key) for key in keys]
        unknown = [at for at, s in enumerate(seen_s) if s is None or now_s - s > _KNOWN_S]
        missing = []
        for start in range(0, len(unknown), _LOOK_BLOCKS):
            places = unknown[start : start + _LOOK_BLOCKS]
            there = await self._store.contains_many([keys[at] for at in places])
            for at, is_there in zip(places, there, strict=True):
                if is_there:
                    self._know(keys[at])
                else:
                    missing.append(at)
        self._count(there=len(keys) - len(missing))
        return missing

    def _copy(self, note: _Note, first: int, stop: int) -> NDArray[np.uint8]:
        """Copies of the blocks [first, stop) of a note, as far as they are on the host and right.

        Returns:
            uint8 [n, block_bytes].
        """
        tokens = note.tokens[: stop * self._books.manager.block_size + 1]
        with self._lock:
            self._books.join(self._client_id, os.getpid(), self._clock())
            (ticket,) = self._books.find(self._client_id, [Want(tokens, note.namespace, first)])
        if ticket.id == NO_TICKET:
            return np.empty((0, self._slab.block_bytes), np.uint8)
        outcomes = np.full(len(ticket.host_ids), LoadOutcome.FAILED, np.uint8)
        try:
            copies = self._slab.blocks[ticket.host_ids]
            outcomes[:] = self._outcomes(ticket, copies)
        finally:
            with self._lock:
                self._books.loaded(self._client_id, [LoadResult(ticket.id, outcomes)])
        is_right = outcomes == LoadOutcome.OK
        self._count(corrupt=int(np.count_nonzero(outcomes == LoadOutcome.CORRUPT)))
        return copies if is_right.all() else copies[: int(is_right.argmin())]

    def _outcomes(self, ticket: LoadTicket, copies: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """What became of each block of a load; without a checksum it is taken to be right."""
        has_none = ticket.checksums == NO_CHECKSUM
        is_right = has_none.all() or has_none | (block_checksums(copies) == ticket.checksums)
        is_fresh = self._slab.generations[ticket.host_ids] == ticket.generations
        right_or_not = np.where(is_right, LoadOutcome.OK, LoadOutcome.CORRUPT)
        return np.where(is_fresh, right_or_not, LoadOutcome.STALE).astype(np.uint8)

    def _know(self, key: bytes) -> None:
        self._known[key] = self._clock()
        self._known.move_to_end(key)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    def _count(self, **counts: int) -> None:
        with self._guard:
            self._counts.update(counts)
