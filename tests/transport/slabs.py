"""Slabs whose blocks all differ, and servers of them: in other processes, and dishonest."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import secrets
import signal
import subprocess
import sys

import numpy as np

from raykv.host.tickets import LoadOutcome
from raykv.host.transport import RowRequest, TcpTransport, wire
from raykv.host.transport.interface import rows_per_batch
from raykv.memory.checksums import block_checksums
from raykv.memory.host_slab import HostSlab

SECRET = b"the secret of this pool, 32 byte"
OK, STALE, CORRUPT, FAILED = (
    LoadOutcome.OK,
    LoadOutcome.STALE,
    LoadOutcome.CORRUPT,
    LoadOutcome.FAILED,
)

PROGRAM = """
import pickle, sys
from raykv.memory.host_slab import HostSlab
from raykv.host.transport import TcpServer
descriptor, secret = pickle.loads(bytes.fromhex(sys.argv[1]))
with HostSlab.attach(descriptor) as slab:
    server = TcpServer(slab, secret)
    print(server.address, flush=True)
    sys.stdin.read()
    server.close()
"""


def filled_slab(num_blocks, block_bytes, seed=0):
    """A slab of random blocks, with checksums and generations that are not all the same."""
    slab = HostSlab.create(num_blocks, block_bytes)
    random = np.random.default_rng(seed)
    slab.blocks[1:] = random.integers(0, 256, (num_blocks - 1, block_bytes), np.uint8)
    slab.generations[1:] = random.integers(1, 2**60, num_blocks - 1)
    slab.checksums[1:] = block_checksums(slab.blocks[1:])
    return slab


def request_for(slab, ids, *, with_checksums=True):
    ids = np.asarray(ids)
    checksums = slab.checksums[ids] if with_checksums else np.zeros(len(ids), np.uint64)
    return RowRequest(ids, slab.generations[ids], checksums)


def overwrite(slab, row, content=0xEE):
    """Give a block to another writer, which writes."""
    slab.reassign([row])
    slab.blocks[row] = content


def read(address, request, target, row_ids, on_blocks=lambda num: None, **options):
    """One read by a transport of its own; returns outcomes as a list, and the last error."""

    async def main():
        transport = TcpTransport(options.pop("secret", SECRET), **options)
        try:
            outcomes = await transport.read_rows(
                address, request, target.blocks, np.asarray(row_ids), on_blocks
            )
        finally:
            await transport.close()
        return outcomes.tolist(), transport.last_error

    return asyncio.run(main())


def num_ok(outcomes):
    """Leading rows that are OK."""
    return next((at for at, outcome in enumerate(outcomes) if outcome != OK), len(outcomes))


class Served:
    """A slab served by another process, which can be killed and frozen."""

    def __init__(self, slab, secret=SECRET):
        argument = pickle.dumps((slab.descriptor, secret)).hex()
        self.process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-c", PROGRAM, argument],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.address = self.process.stdout.readline().strip()

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def freeze(self):
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def thaw(self):
        os.kill(self.process.pid, signal.SIGCONT)

    def close(self):
        self.process.stdin.close()  # which ends it
        self.process.wait(60)
        self.process.stdout.close()


@contextlib.asynccontextmanager
async def liar(answer, *, num_blocks=9, block_bytes=64, hello=None, answer_proof=None):
    """A server that speaks the protocol up to the welcome, then says what ``answer`` returns.

    Args:
        answer: is given the request's body, and returns bytes, after which the connection is
            closed, or an async iterator of them.
        hello: said instead of all that.
        answer_proof: said instead of the welcome.
    """
    identity = secrets.token_bytes(wire.IDENTITY_BYTES)
    attending = []

    async def speak(reader, writer):
        if hello is not None:
            writer.write(hello)
            return
        words = wire.Hello(num_blocks, block_bytes, identity, bytes(32)).pack()
        writer.write(words)
        proof = await reader.readexactly(wire.PROOF_BYTES)
        writer.write(answer_proof or wire.welcome(SECRET, words, proof))
        _, num_bytes = wire.request_size(await reader.readexactly(wire.COUNT_BYTES), num_blocks)
        said = answer(await reader.readexactly(num_bytes))
        if isinstance(said, bytes):
            writer.write(said)
            return
        async for each in said:
            writer.write(each)
            await writer.drain()

    async def attend(reader, writer):
        attending.append(asyncio.current_task())
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            try:
                await speak(reader, writer)
            finally:
                writer.close()
                await writer.wait_closed()

    server = await asyncio.start_server(attend, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"127.0.0.1:{port}/{identity.hex()}"
        server.close()
        await asyncio.sleep(0.001)  # whoever was accepted begins
        await asyncio.wait_for(asyncio.gather(*attending), 30)


def honest_answer(slab, body):
    """What an honest server would say to this request."""
    ids, wanted = wire.unpack_request(body, slab.num_blocks)
    said, step = b"", rows_per_batch(slab.block_bytes)
    for at in range(0, len(ids), step):
        part = ids[at : at + step]
        assert (slab.generations[part] == wanted[at : at + step]).all()
        said += wire.pack_batch(len(part)) + slab.blocks[part].tobytes()
        said += wire.pack_generations(slab.generations[part])
    return said
