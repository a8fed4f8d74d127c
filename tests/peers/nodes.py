"""Nodes with real books, slabs and servers, in one process; each prompt's KV is its own.

A block's content follows from all tokens up to its end, so that a wrong one is told.
"""

from __future__ import annotations

import asyncio
from zlib import crc32

import numpy as np

from raykv.core import Namespace
from raykv.host.block_source import Prompt
from raykv.host.host_tier import HostTier
from raykv.host.peer_source import PeerSource
from raykv.host.tickets import LoadOutcome, Offer, StoreResult
from raykv.host.transport import TcpServer, TcpTransport
from raykv.memory.checksums import block_checksums
from raykv.memory.host_slab import HostSlab

SECRET = b"a secret of twenty bytes"
BLOCK_SIZE, BLOCK_BYTES, NUM_BLOCKS = 4, 5000, 33
SPACE = Namespace()


def content(tokens, namespace, block):
    """uint8 [block_bytes], of one block of a prompt."""
    head = np.asarray(tokens[: (block + 1) * BLOCK_SIZE], np.int32)
    seed = crc32(head.tobytes(), crc32(repr(namespace).encode()))
    return np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, np.uint8)


def prompt(name, num_blocks, tokens_per_s=0.0, namespace=SPACE):
    """Prompts of one name begin alike."""
    tokens = np.random.default_rng(name).integers(0, 1000, 200 * BLOCK_SIZE, np.int32)
    return Prompt(tokens[: num_blocks * BLOCK_SIZE], namespace, tokens_per_s)


def num_right(rows, row_ids, prompt, first_block, num):
    """How many of the first rows hold the KV of the prompt's blocks."""
    for at in range(num):
        right = content(prompt.tokens, prompt.namespace, first_block + at)
        if not (rows[row_ids[at]] == right).all():
            return at
    return num


class Node:
    """A node's tier, and the handle that another node has of it.

    Attributes:
        delay_s: seconds that each question takes.
        error: raised by each question.
        reports: outcomes that were reported.
        num_lost_reports: reports that fail before one gets through.
    """

    def __init__(self, name="node"):
        self.name = name
        self.slab = HostSlab.create(NUM_BLOCKS, BLOCK_BYTES)
        self.books = HostTier(NUM_BLOCKS, BLOCK_SIZE, self.slab.generations, lease_s=1e9)
        self.server = TcpServer(self.slab, SECRET)
        self.delay_s = 0.0
        self.error = None
        self.reports = []
        self.num_lost_reports = 0
        self.num_asked = 0
        for client in ("rank", "other node"):
            self.books.join(client, 1, 0.0)

    @property
    def address(self):
        return self.server.address

    @property
    def num_pinned(self):
        return len(self.books.clients.find("other node").loads)

    def store(self, prompt):
        num_blocks = len(prompt.tokens) // BLOCK_SIZE
        offer = Offer(prompt.tokens, prompt.namespace, num_blocks)
        (ticket,) = self.books.offer("rank", [offer])
        for at, row in enumerate(ticket.host_ids.tolist()):
            block = ticket.first_block + at
            self.slab.blocks[row] = content(prompt.tokens, prompt.namespace, block)
        checksums = block_checksums(self.slab.blocks[ticket.host_ids])
        if ticket.id:
            self.books.stored("rank", [StoreResult(ticket.id, len(checksums), checksums)])

    async def find(self, want):
        self.num_asked += 1
        if self.error is not None:
            raise self.error
        (ticket,) = self.books.find("other node", [want])
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        return ticket

    async def loaded(self, result):
        if self.num_lost_reports:
            self.num_lost_reports -= 1
            raise ConnectionError("lost")
        self.reports.append([LoadOutcome(outcome).name for outcome in result.outcomes])
        self.books.loaded("other node", [result])

    def close(self):
        self.server.close()
        self.books.check_integrity()
        self.slab.close()


def run(nodes, use, **options):
    """Use a source over nodes, and close it."""

    async def main():
        source = PeerSource(
            lambda: nodes,
            options.pop("transport", None) or TcpTransport(SECRET, timeout_s=1.0),
            block_size=BLOCK_SIZE,
            block_bytes=BLOCK_BYTES,
            **{"find_timeout_s": 5.0, **options},
        )
        try:
            return await use(source)
        finally:
            source.check_integrity()
            await source.close()
            source.check_integrity()
            assert not source._tasks

    return asyncio.run(main())


async def until(condition):
    """Wait for what happens in the background."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.001)


class Target:
    """Rows to read into."""

    def __init__(self, num=20):
        self.rows = np.full((40, BLOCK_BYTES), 7, np.uint8)
        self.row_ids = np.random.default_rng(9).permutation(np.arange(1, 40))[:num]
        self.reported = []

    async def read(self, source, prompt, first_block=0):
        num = await source.read(prompt, first_block, self.rows, self.row_ids, self.reported.append)
        assert num_right(self.rows, self.row_ids, prompt, first_block, num) == num
        return num
