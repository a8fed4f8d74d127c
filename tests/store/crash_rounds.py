"""Kill writers of one disk store again and again, and look what is left each time.

Usage: crash_rounds.py FOLDER SECONDS SEED [--lie]

Prints one JSON object: rounds, keys confirmed, keys confirmed in the round that were not found
(lost), tails that were torn. With --lie, writers confirm before they write: such keys get lost.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from raykv.store import DiskStore

MAX_BYTES, SEGMENT_BYTES = 8 << 20, 1 << 20


def value_of(name):
    seed = random.Random(name)
    return seed.randbytes(1000) * seed.randint(1, 150)


def key_of(name):
    return b"key %d" % name


def open_store(folder):
    return DiskStore(folder, MAX_BYTES, segment_bytes=SEGMENT_BYTES)


async def write(folder, first, pipe, *, lies):
    store = open_store(folder)
    for name in range(first, first + 100_000, 3):
        names = range(name, name + 3)
        report = "".join(f"{each}\n" for each in names).encode()
        if lies:
            os.write(pipe, report)
        assert (
            await store.put_many([(key_of(each), value_of(each)) for each in names]) == [True] * 3
        )
        if not lies:
            os.write(pipe, report)


async def missing(folder, names):
    """Which of the names are not there; a wrong value ends all."""
    store = open_store(folder)
    values = [value_of(name) for name in names]
    into = [bytearray(len(value)) for value in values]
    hits = await store.get_many([key_of(name) for name in names], into)
    for value, target, is_hit in zip(values, into, hits, strict=True):
        assert target == (value if is_hit else bytes(len(value))), "a wrong value"
    store.check_integrity()
    assert store.stats().corrupt == 0, "something else than a tail was damaged"
    await store.close()
    return [name for name, is_hit in zip(names, hits, strict=True) if not is_hit]


def one_round(folder, first, wait_s, *, lies):
    """Returns the names confirmed before the kill."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        asyncio.run(write(folder, first, writer, lies=lies))
        os._exit(1)
    os.close(writer)
    time.sleep(wait_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as lines:
        return [int(line) for line in lines.read().splitlines()]


def main():
    folder, seconds, seed = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    draw = random.Random(seed)
    result = {"rounds": 0, "confirmed": 0, "lost": 0, "torn": 0}
    end = time.monotonic() + seconds
    first = 0
    while time.monotonic() < end:
        names = one_round(folder, first, draw.uniform(0.002, 0.05), lies="--lie" in sys.argv)
        before = sum(path.stat().st_size for path in folder.glob("*.kv"))
        # Of a long round only the last 40 values are sure not to have been pushed out.
        lost = asyncio.run(missing(folder, names[-40:]))
        after = sum(path.stat().st_size for path in folder.glob("*.kv"))
        first += 1_000_000
        result["rounds"] += 1
        result["confirmed"] += len(names)
        result["lost"] += len(lost)
        result["torn"] += after < before
    print(json.dumps(result))  # noqa: T201 - what it is for


if __name__ == "__main__":
    main()
