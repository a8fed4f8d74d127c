"""The guard: whatever the store does, calls are answered in time and nothing is raised."""

from __future__ import annotations

import asyncio

import pytest

from raykv.errors import ConfigError, StoreError
from raykv.store import CircuitBreaker, GuardedStore, KVStore, StoreStats


class FakeStore(KVStore):
    """Does what the test says: answers, raises, hangs, or hangs on although it is cancelled."""

    def __init__(self):
        self.mood = "well"
        self.num_calls = 0
        self.num_ended = 0
        self.is_let_go = asyncio.Event()

    async def _act(self, count):
        self.num_calls += 1
        try:
            if self.mood == "failing":
                raise StoreError("no store")
            if self.mood == "buggy":
                raise KeyError("no idea")
            if self.mood == "hanging":
                await asyncio.Event().wait()
            while self.mood == "stubborn" and not self.is_let_go.is_set():
                try:
                    await self.is_let_go.wait()
                except asyncio.CancelledError:
                    continue
            return [True] * count
        finally:
            self.num_ended += 1

    async def put_many(self, items):
        return await self._act(len(items))

    async def get_many(self, keys, into):
        return await self._act(len(keys))

    async def contains_many(self, keys):
        return await self._act(len(keys))

    def stats(self):
        return StoreStats(hits=self.num_calls)

    async def close(self):
        await self._act(0)


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def guarded(scenario, *, timeout_s=0.05):
    async def run():
        store, clock = FakeStore(), Clock()
        guard = GuardedStore(
            store, timeout_s=timeout_s, max_failures=3, cooldown_s=5.0, clock=clock
        )
        await scenario(store, guard, clock)

    asyncio.run(run())


def calls(guard):
    yield lambda: guard.put_many([(b"k", b"v")])
    yield lambda: guard.get_many([b"k"], [bytearray(1)])
    yield lambda: guard.contains_many([b"k"])


@pytest.mark.parametrize(
    ("mood", "error", "timeouts"),
    [
        ("failing", "no store", 0),
        ("buggy", "KeyError.*no idea", 0),
        ("hanging", "within 0.05 s", 3),
    ],
)
def test_each_call_of_a_store_in_a_bad_mood_is_answered_and_counted(mood, error, timeouts):
    async def scenario(store, guard, clock):
        for call in calls(guard):
            assert await call() == [True]
        assert guard.last_error is None
        store.mood = mood
        for call in calls(guard):
            assert await call() == [False]
        assert store.num_calls == store.num_ended == 6
        stats = guard.stats()
        assert (stats.misses, stats.refused, stats.timeouts, stats.skipped) == (1, 1, timeouts, 0)
        assert stats.errors == (0 if mood == "failing" else 3)  # its own a store counts itself
        with pytest.raises(StoreError, match=error):
            raise guard.last_error

    guarded(scenario)


def test_after_some_failures_in_a_row_it_is_left_alone_then_probed():
    async def scenario(store, guard, clock):
        async def ask():
            return (await guard.contains_many([b"k"]))[0]

        for mood in ("failing", "failing", "well", "failing", "failing"):
            store.mood = mood
            assert await ask() == (mood == "well")
            assert guard.is_available
        assert not await ask()
        assert not guard.is_available
        for passed_s, num_calls in ((0, 6), (4.9, 6), (0.1, 7), (0, 7), (4.9, 7), (0.1, 8)):
            clock.now_s += passed_s
            assert not await ask()
            assert store.num_calls == num_calls
        assert guard.stats().skipped == 4
        store.mood = "well"
        assert not await ask()
        clock.now_s += 5
        assert await ask()
        assert guard.is_available
        assert await ask()

    guarded(scenario)


def test_one_probe_at_a_time():
    async def scenario(store, guard, clock):
        store.mood = "failing"
        for _ in range(3):
            await guard.contains_many([b"k"])
        clock.now_s += 5
        store.mood = "hanging"
        answers = await asyncio.gather(*(guard.contains_many([b"k"]) for _ in range(5)))
        assert answers == [[False]] * 5
        assert store.num_calls == 4

    guarded(scenario)


def test_a_probe_that_nobody_waits_for_makes_way_for_another():
    async def scenario(store, guard, clock):
        store.mood = "failing"
        for _ in range(3):
            await guard.contains_many([b"k"])
        clock.now_s += 5
        store.mood = "hanging"
        probe = asyncio.ensure_future(guard.contains_many([b"k"]))
        await asyncio.sleep(0)
        probe.cancel()
        with pytest.raises(asyncio.CancelledError):
            await probe
        store.mood = "well"
        assert await guard.contains_many([b"k"]) == [True]

    guarded(scenario)


def test_cancelling_ends_the_stores_call_first():
    async def scenario(store, guard, clock):
        store.mood = "hanging"
        for call in calls(guard):
            task = asyncio.ensure_future(call())
            await asyncio.sleep(0.01)
            assert store.num_calls == store.num_ended + 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert store.num_calls == store.num_ended  # so nobody holds the buffers any more
        assert guard.is_available
        assert guard.last_error is None

    guarded(scenario, timeout_s=60)


def test_a_store_that_goes_on_although_cancelled_gets_no_more_calls_until_it_has_ended():
    async def scenario(store, guard, clock):
        store.mood = "stubborn"
        assert await guard.contains_many([b"k"]) == [False]
        store.mood = "well"
        for call in calls(guard):
            assert await call() == [False]
        assert store.num_calls == 1
        store.is_let_go.set()
        await asyncio.sleep(0.01)
        for call in calls(guard):
            assert await call() == [True]

    guarded(scenario)


@pytest.mark.parametrize("mood", ["well", "failing", "buggy", "hanging", "stubborn"])
def test_closing_raises_nothing_and_ends(mood):
    async def scenario(store, guard, clock):
        store.mood = mood
        await guard.close()
        assert store.num_calls == 1
        assert (guard.last_error is None) == (mood == "well")
        store.is_let_go.set()
        await asyncio.sleep(0.01)

    guarded(scenario)


def test_bad_arguments_are_the_callers_fault_even_when_the_store_is_left_alone():
    async def scenario(store, guard, clock):
        store.mood = "failing"
        for _ in range(4):
            with pytest.raises(ValueError, match="must be a bytes object"):
                await guard.contains_many([b""])
            await guard.contains_many([b"k"])
        assert store.num_calls == 3

    guarded(scenario)


@pytest.mark.parametrize("options", [{"timeout_s": 0}, {"max_failures": 0}, {"cooldown_s": -1}])
def test_numbers_that_make_no_sense_are_refused(options):
    with pytest.raises(ConfigError):
        GuardedStore(None, **options)


def test_a_late_success_closes_an_open_breaker():
    breaker = CircuitBreaker(1, 5.0, Clock())
    assert breaker.admits()
    assert breaker.admits()
    breaker.fail()
    assert not breaker.admits()
    breaker.succeed()
    assert breaker.admits()
