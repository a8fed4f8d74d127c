"""The pool for asynchronous code: nothing here blocks the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from raykv.core.kv_cache_manager import Sequences, flatten
from raykv.core.sequence import Sequence
from raykv.engine.params import GenerationRequest, SamplingParams, TokenDelta, TokenOutput
from raykv.generation import Batch

if TYPE_CHECKING:
    from raykv.pool import BlockManagerPool
    from raykv.prompts import Prompts

_THREADED = (
    "abort", "ack_state_transfers", "ack_swaps", "allocate_shared", "cache", "check_integrity",
    "close", "deallocate", "deallocate_without_cache", "explain", "fork",
    "get_state_transfer_infos", "get_swap_block_transfer_infos", "kv_cache_utilization",
    "num_available_blocks", "num_blocks_in_prefix_cache", "num_free_blocks", "num_used_blocks",
    "reset_prefix_cache", "retire", "select_rank", "sleep", "stats", "update_weights", "wake_up",
    "weights_version", "num_free_host_blocks", "num_blocks_in_host_prefix_cache", "host_stats",
    "host_state_stats", "transfer_blocks", "prefetch_from_storage", "update_prefetch_result",
    "wait_for_transfers",
)  # fmt: skip


class AsyncPool:
    """Coroutines named and meant like the pool's methods; get it as ``pool.aio``.

    Short calls run on a worker thread. Cancelling a task that awaits ``generate`` or iterates over
    ``stream`` aborts its requests; cancelling one that awaits ``allocate`` gives back what new
    sequences get.
    """

    def __init__(self, pool: BlockManagerPool) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name not in _THREADED:
            raise AttributeError(f"the pool has no coroutine {name!r}")
        method = getattr(self._pool, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.to_thread(method, *args, **kwargs)

        call.__name__, call.__doc__ = name, method.__doc__
        return call

    async def allocate(
        self, sequences: Sequences, num_tokens: int | Iterable[int] | None = None
    ) -> bool:
        """See BlockManagerPool.allocate."""
        members = flatten(sequences)
        new = [sequence for sequence in members if sequence.single_block_id is None]
        call = asyncio.ensure_future(asyncio.to_thread(self._pool.allocate, members, num_tokens))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            # The call goes on in its thread, and what it takes would be nobody's.
            loop = asyncio.get_running_loop()
            call.add_done_callback(
                lambda _: loop.run_in_executor(None, self._pool.deallocate_without_cache, new)
            )
            raise

    async def try_allocate(self, sequence: Sequence) -> bool:
        """See BlockManagerPool.try_allocate."""
        return await self.allocate(sequence)

    async def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | None = None,
        *,
        dp_rank: int | None = None,
        **options: Any,
    ) -> list[TokenOutput]:
        """See BlockManagerPool.generate; ``options`` are its other keywords."""
        requests = await self._requests(prompts, params, options)
        outputs: dict[str, TokenOutput] = {}
        async for delta in self._deltas(requests, dp_rank):
            if delta.output is not None:
                outputs[delta.request_id] = delta.output
        done = [outputs[request.request_id] for request in requests]
        return await asyncio.to_thread(self._pool.with_text, prompts, done)

    async def stream(
        self,
        prompt: Prompts,
        params: SamplingParams | None = None,
        *,
        dp_rank: int | None = None,
        **options: Any,
    ) -> AsyncIterator[TokenDelta]:
        """Yield tokens as they come; the last delta of each request carries its output."""
        requests = await self._requests(prompt, params, options)
        async for delta in self._deltas(requests, dp_rank):
            yield delta

    async def _requests(
        self, prompts: Prompts, params: SamplingParams | None, options: dict[str, Any]
    ) -> list[GenerationRequest]:
        return await asyncio.to_thread(self._pool.make_requests, prompts, params, **options)

    async def _deltas(
        self, requests: list[GenerationRequest], dp_rank: int | None
    ) -> AsyncIterator[TokenDelta]:
        pool, loop = self._pool, asyncio.get_running_loop()
        queue: asyncio.Queue[TokenDelta] = asyncio.Queue()

        def listen(delta: TokenDelta) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(queue.put_nowait, delta)

        batch = Batch(requests, [listen] * len(requests), dp_rank)
        left = {request.request_id for request in requests}
        try:
            await asyncio.to_thread(pool.generations.start, batch)
            while left:
                delta = await queue.get()
                if delta.error is not None:
                    raise delta.error
                if delta.is_last:
                    left.discard(delta.request_id)
                yield delta
        finally:
            # Closing the iterator or cancelling the task must not wait for the ranks.
            if left:
                batch.is_abandoned = True  # in case it is only about to start
                loop.run_in_executor(None, pool.generations.abandon, batch)
