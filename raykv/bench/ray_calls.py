"""What the pool adds to an actor call, and how long a lost rank goes unnoticed.

A decode step of n running sequences through ``pool.allocate`` beside the very same call, packed
beforehand, to an actor of the same kind: the difference is what the driver does, which is to find
out what is new, to pack, to unpack, and to keep its copies. The two take turns.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from raykv.config import PoolConfig, RayConfig
from raykv.core import Sequence
from raykv.messages import Answer, Call
from raykv.rank_handle import Reply
from raykv.remote_rank import RemoteRank

from .managers import BLOCK_SIZE, NUM_BLOCKS, Workbench
from .timing import Row, row_of

if TYPE_CHECKING:
    from raykv.pool import BlockManagerPool

POOL, BARE, NOTHING = "Ray pool", "bare actor call, same work", "bare actor call, no work"
_BATCHES = (16, 64, 256)
_WAIT_S = 60.0


def rows(num_runs: int = 200) -> Iterator[Row]:
    """Steps of several sizes, then losses."""
    from raykv.actors import launch  # noqa: PLC0415 - seconds to import

    for num_seqs in _BATCHES:
        with launch(_config(1)) as pool:
            yield from _step_rows(pool, num_seqs, num_runs)
    for name, number in (("SIGKILL", signal.SIGKILL), ("SIGSTOP", signal.SIGSTOP)):
        with launch(_config(2)) as pool:
            yield from _loss_rows(pool, name, number)


def _config(dp_size: int) -> PoolConfig:
    return PoolConfig(
        dp_size=dp_size,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=512,
        max_model_len=32_768,
        ray=RayConfig(num_cpus=0),
    )


def _step_rows(pool: BlockManagerPool, num_seqs: int, num_runs: int) -> Iterator[Row]:
    from raykv.actors.bare import BareRank  # noqa: PLC0415 - likewise

    [rank] = pool.ranks
    assert isinstance(rank, RemoteRank), "ranks over Ray are remote"
    calls: list[Call] = []
    send = rank.send

    def record(call: Call) -> Reply[Answer]:
        calls.append(call)
        return send(call)

    rank.send = record  # type: ignore[method-assign]
    bench = Workbench()
    sequences = [Sequence(bench.prompt(16 + index * 3 % 512)) for index in range(num_seqs)]
    assert pool.allocate(sequences), "the pool is large enough"
    times: dict[str, list[float]] = {POOL: [], BARE: [], NOTHING: []}
    with BareRank(pool.config) as bare:
        bare.call(bare.pack(calls.pop()))
        for _ in range(num_runs + 5):
            for sequence in sequences:
                sequence.kv_state.num_computed_tokens = sequence.num_tokens
                sequence.append(1)
            times[POOL].append(_seconds(lambda: pool.allocate(sequences)))
            parts = bare.pack(calls.pop())
            answer = b""

            def call(parts: list[bytes] = parts) -> None:
                nonlocal answer
                answer = bare.call(parts)

            times[BARE].append(_seconds(call))
            num_bytes = len(answer)
            times[NOTHING].append(
                _seconds(lambda parts=parts, size=num_bytes: bare.echo(parts, size))  # type: ignore[misc]
            )
    workload = f"decode step, {num_seqs} sequences"
    for level, seconds in times.items():
        yield row_of(workload, level, np.array(seconds[5:]) * 1e6)


def _loss_rows(pool: BlockManagerPool, name: str, number: int) -> Iterator[Row]:
    """How long until a lost rank is given up, its sequences are elsewhere, and it is back."""
    noticed, served, back = [], [], []
    rank = pool.ranks[0]
    assert isinstance(rank, RemoteRank), "ranks over Ray are remote"
    for index in range(5):
        sequence = Sequence(range(1000 * index, 1000 * index + 100))
        sequence.dp_rank = 0
        pool.allocate(sequence)
        session, pid = rank.session, rank.info.pid
        start = time.perf_counter()
        os.kill(pid, number)
        _wait_until(lambda session=session: rank.session > session)  # type: ignore[misc]
        noticed.append(time.perf_counter() - start)
        sequence.append(1)
        pool.allocate(sequence)
        served.append(time.perf_counter() - start)
        if number == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
        _wait_until(lambda: rank.lost is None)
        back.append(time.perf_counter() - start)
        pool.deallocate_without_cache(sequence)
    for what, seconds in (
        (f"{name}: until it is noticed", noticed),
        (f"{name}: until its sequence has blocks elsewhere", served),
        (f"{name}: until the rank is back", back),
    ):
        yield row_of(what, POOL, np.array(seconds) * 1e6)


def _seconds(operation: Callable[[], object]) -> float:
    start = time.perf_counter()
    operation()
    return time.perf_counter() - start


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.perf_counter() + _WAIT_S
    while not holds():
        assert time.perf_counter() < deadline, "the rank neither went nor came back"
        time.sleep(0.002)
