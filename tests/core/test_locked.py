"""Whatever of the thread-safe manager looks at its books holds the lock."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from raykv.core import BlockManagerImpl, ConcurrentBlockManagerImpl
from raykv.core.manager import AdmitRequest

from .helpers import publish, run_of


def free_the_padding(manager):
    with pytest.raises(ValueError):
        manager.free(0)


CALLS = {
    "admit": lambda m: m.admit([AdmitRequest(1)]),
    "adopt": None,  # makes a handle of what the caller owns; touches no book
    "allocate": lambda m: m.allocate(1),
    "allocate_shared": lambda m: m.allocate_shared([1, 2]),
    "cache": lambda m: m.cache([1, 2], m.allocate(1)),
    "check_integrity": lambda m: m.check_integrity(),
    "deallocate": lambda m: m.deallocate(m.allocate(1)),
    "drop": lambda m: m.allocate(1).release(),
    "explain": lambda m: m.explain([1, 2, 3], 0),
    "forget": lambda m: m.forget([1]),
    "free": free_the_padding,
    "free_many": lambda m: m.free_many([]),
    "hash_of": lambda m: m.hash_of(1),
    "is_cached": lambda m: m.is_cached(np.array([1])),
    "make_handle": lambda m: m.allocate(1).share(),
    "matching_ids": lambda m: m.matching_ids([1, 2]),
    "pin": lambda m: m.pin(m.allocate(1).index),
    "num_matching_blocks": lambda m: m.num_matching_blocks([1, 2]),
    "prefix_hashes": lambda m: m.prefix_hashes([1, 2]),
    "ref_counts": lambda m: m.ref_counts(np.array([1])),
    "reset_prefix_cache": lambda m: m.reset_prefix_cache(),
    "retire": lambda m: m.retire(0),
    "set_time": None,  # one assignment
    "use_counts": lambda m: m.use_counts(np.array([1])),
}
ATTRIBUTES = {"num_total_blocks"}  # never changes


class RecordingLock:
    """Counts who enters."""

    def __init__(self):
        self.lock, self.count = threading.RLock(), 0

    def __enter__(self):
        self.count += 1
        return self.lock.__enter__()

    def __exit__(self, *error):
        return self.lock.__exit__(*error)


@pytest.fixture
def locked():
    manager = ConcurrentBlockManagerImpl(16, 2)
    publish(manager, run_of(2, 1, 2))
    manager._lock = RecordingLock()
    return manager


def public(kind):
    return {
        name
        for name in dir(BlockManagerImpl)
        if not name.startswith("_") and isinstance(getattr(BlockManagerImpl, name), kind)
    }


def test_every_public_method_is_thought_of():
    assert public(type(publish)) == set(CALLS)


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call])
def test_a_method_holds_the_lock(locked, name):
    CALLS[name](locked)
    assert locked._lock.count > 0


@pytest.mark.parametrize("name", sorted(public(property) - ATTRIBUTES))
def test_a_counter_holds_the_lock(locked, name):
    getattr(locked, name)
    assert locked._lock.count > 0
