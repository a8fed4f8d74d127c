"""A host tier in this process with a rank that computes blocks, and an event loop beside it.

A block's bytes follow from its namespace and all tokens up to its end, so whoever reads one knows
whether it is the right one.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time

import numpy as np

from raykv.core import Namespace
from raykv.host.block_source import Prompt
from raykv.host.host_tier import HostTier
from raykv.host.tickets import NO_TICKET, LoadOutcome, LoadResult, Offer, StoreResult, Want
from raykv.memory.checksums import block_checksums
from raykv.memory.host_slab import HostSlab

from .helpers import value_of

BLOCK_SIZE = 2
BLOCK_BYTES = 64
RANK = "rank"


def tokens_of(*marks):
    """Tokens of one block per mark."""
    return np.repeat(np.array(marks, np.int32), BLOCK_SIZE)


def prompt_of(*marks, namespace=None):
    return Prompt(tokens_of(*marks), namespace or Namespace())


def content_of(tokens, index, namespace):
    """What block ``index`` of these tokens holds, uint8 [BLOCK_BYTES]."""
    upto = np.asarray(tokens)[: (index + 1) * BLOCK_SIZE].tolist()
    return np.frombuffer(value_of((namespace, upto), BLOCK_BYTES), np.uint8)


def until(condition):
    """Wait for what another thread brings about."""
    until_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until_s, "it did not come to pass"
        time.sleep(0.002)


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def call(self, coroutine, timeout_s=30):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def close(self):
        self.call(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(30)
        self.loop.close()


class Tier:
    def __init__(self, num_blocks=17):
        self.slab = HostSlab.create(num_blocks, BLOCK_BYTES)
        self.books = HostTier(num_blocks, BLOCK_SIZE, self.slab.generations, lease_s=60.0)
        self.lock = threading.RLock()
        self.books.join(RANK, os.getpid(), time.monotonic())

    def offer(self, *marks, namespace=None):
        namespace = namespace or Namespace()
        offer = Offer(tokens_of(*marks), namespace, len(marks))
        with self.lock:
            (ticket,) = self.books.offer(RANK, [offer])
        return ticket

    def compute(self, *marks, namespace=None):
        """Store a prompt's blocks as a rank does; what there is room for."""
        namespace = namespace or Namespace()
        ticket = self.offer(*marks, namespace=namespace)
        for at, row in enumerate(ticket.host_ids.tolist()):
            index = ticket.first_block + at
            self.slab.blocks[row] = content_of(tokens_of(*marks), index, namespace)
        self.report(ticket, len(ticket.host_ids))
        return ticket

    def report(self, ticket, num_ok):
        ids = ticket.host_ids[:num_ok]
        self.slab.checksums[ids] = block_checksums(self.slab.blocks[ids])
        if ticket.id != NO_TICKET:
            result = StoreResult(ticket.id, num_ok, self.slab.checksums[ids])
            with self.lock:
                self.books.stored(RANK, [result])

    def num_ready(self, *marks, namespace=None):
        with self.lock:
            return self.books.num_ready(tokens_of(*marks), namespace or Namespace())

    def num_right(self, *marks, namespace=None):
        """Blocks that a rank loads and that pass their checksums; a wrong one fails the test."""
        namespace = namespace or Namespace()
        tokens = np.append(tokens_of(*marks), np.int32(0))
        with self.lock:
            (ticket,) = self.books.find(RANK, [Want(tokens, namespace, 0)])
        if ticket.id == NO_TICKET:
            return 0
        copies = self.slab.blocks[ticket.host_ids]
        assert (self.slab.generations[ticket.host_ids] == ticket.generations).all()
        assert (self.slab.checksums[ticket.host_ids] == ticket.checksums).all()
        is_right = block_checksums(copies) == ticket.checksums
        outcomes = np.where(is_right, LoadOutcome.OK, LoadOutcome.CORRUPT).astype(np.uint8)
        with self.lock:
            self.books.loaded(RANK, [LoadResult(ticket.id, outcomes)])
        for index in np.flatnonzero(is_right):
            assert (copies[index] == content_of(tokens, index, namespace)).all(), "a wrong block"
        return len(is_right) if is_right.all() else int(is_right.argmin())

    def row_of(self, *marks):
        """The host block of the last mark."""
        return int(self.books.manager.matching_ids(tokens_of(*marks))[-1])

    def damage(self, row):
        self.slab.blocks[row, 3] ^= 1

    def reset(self):
        with self.lock:
            self.books.reset()

    def check(self):
        with self.lock:
            self.books.check_integrity()
            self.slab.check_integrity()
