"""What the tests of the copier share: patterned memory, scripted faults, a gate."""

import threading
import time

import numpy as np

BLOCK_BYTES = 520
NUM_ROWS, NUM_SLAB_BLOCKS = 9, 13
WAIT_S = 60  # a batch that takes this long never comes


def wait_until(condition):
    """Whether a condition came true in time."""
    deadline = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def pattern(*key):
    """The bytes of one block, its own for each key."""
    return np.random.default_rng(key).integers(0, 256, BLOCK_BYTES, np.uint8)


def device_rows(num_rows=NUM_ROWS, key=0):
    """Memory as KVBuffers has it: rows of elements, here of two bytes."""
    rows = np.stack([pattern(key, row) for row in range(num_rows)])
    rows[0] = 0
    return rows.view(np.uint16)


def as_bytes(rows):
    return rows.reshape(len(rows), -1).view(np.uint8)


class Script:
    """Faults in order, one a batch; then none."""

    def __init__(self, *faults):
        self.faults = list(faults)

    def on_copy(self, batch):
        return self.faults.pop(0) if self.faults else None


class Gate:
    """Holds the copier before each batch until it is opened."""

    def __init__(self, fault_of=lambda _: None):
        self.opened = threading.Event()
        self.reached = threading.Event()
        self.fault_of = fault_of

    def on_copy(self, batch):
        self.reached.set()
        assert self.opened.wait(WAIT_S)
        return self.fault_of(batch)


def offload(copier, memory, rows, blocks, **options):
    generations = copier.slab.reassign(blocks)
    return copier.submit("offload", memory, rows, blocks, generations=generations, **options)


def load(copier, memory, rows, blocks, **options):
    generations = copier.slab.generations[list(blocks)]
    return copier.submit("load", memory, rows, blocks, generations=generations, **options)


def outcomes(ticket):
    result = ticket.wait(WAIT_S)
    assert ticket.is_done
    assert ticket.result is result
    return result.outcomes.tolist()
