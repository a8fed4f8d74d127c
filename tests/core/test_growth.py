"""Long histories of conversations that grow, branch, shrink by eviction and grow again.

Hypothesis finds short surprises; these walks, drawn from a seed, reach old and crooked trees. They
run the state machine's own steps, so each is compared with the reference as well.
"""

from __future__ import annotations

import random

import pytest

from .reference import NamespaceFields
from .test_state_machine import ConcurrentManagers, Managers

IMAGE = NamespaceFields(multimodal=((9, b"cat"),))
OTHER_IMAGE = NamespaceFields(multimodal=((9, b"dog"),))


class Walk:
    """One seeded walk of the machine's rules."""

    def __init__(self, machine, seed, num_blocks, block_size):
        self.random = random.Random(seed)
        self.machine = machine
        machine.start(num_blocks=num_blocks, block_size=block_size)
        self.histories = [([], NamespaceFields())]

    def check(self):
        self.machine.books_balance()
        self.machine.counters_agree()
        self.machine.handles_agree()

    def prompt(self):
        """A cut of something said before, and some new tokens behind it."""
        history, namespace = self.random.choice(self.histories[-6:])
        kept = history[: self.random.randint(0, len(history))]
        tokens = (kept + self.random.choices([0, 1, 2], k=self.random.randint(1, 9)))[:36]
        if self.random.random() < 0.1:
            namespace = self.random.choice([NamespaceFields(), IMAGE, OTHER_IMAGE])
        self.histories.append((tokens, namespace))
        return {"tokens": tokens, "namespace": namespace}

    def step(self):
        machine, index = self.machine, self.random.randrange(12)
        steps = [(4, lambda: machine.start_sequence(**self.prompt()))]
        steps += [(1, lambda: machine.start_twins_side_by_side(**self.prompt()))]
        steps += [(1, lambda: machine.match(**self.prompt()))]
        if machine.sequences:
            more = self.random.choices([0, 1], k=self.random.randint(1, 6))
            num_tokens = self.random.randint(0, 40)
            orders = ["cache", "deallocate", "release"]
            self.random.shuffle(orders)
            steps += [
                (4, lambda: machine.generate(index=index, more=more, publish=index % 2)),
                (3, lambda: machine.publish(index=index, num_tokens=num_tokens)),
                (1, lambda: machine.extend_the_hit(index=index)),
                (1, lambda: machine.fork(index=index)),
                (2, lambda: machine.finish(index=index, order=orders)),
                (1, lambda: machine.abort(index=index)),
                (2, lambda: machine.cut(index=index, start=index % 5, stop=index % 7)),
                (1, lambda: machine.pin(index=index)),
            ]
        if machine.handles:
            steps += [
                (2, lambda: machine.release(index=index)),
                (1, lambda: machine.drop(index=index)),
                (1, lambda: machine.drop_in_a_cycle(index=index)),
                (1, lambda: machine.deallocate(index=index)),
                (1, lambda: machine.match_beyond_existing(index=index, **self.prompt())),
            ]
        # Shrinks runs from their ends: a few evictions, given back at once.
        steps += [(2, self.shrink)]
        if self.random.random() < 0.004:
            steps = [(1, machine.reset)]
        weights, calls = zip(*steps, strict=True)
        self.random.choices(calls, weights)[0]()

    def shrink(self):
        model = self.machine.model
        spare = self.random.randint(1, 4)
        wanted = min(len(model.free) + spare, len(model.free) + len(model.evictable()))
        pair = self.machine.allocate_pair(wanted)
        self.machine.release_pair(pair)


def walk(machine, seed, num_blocks, block_size, num_steps):
    steps = Walk(machine, seed, num_blocks, block_size)
    for _ in range(num_steps):
        steps.step()
        steps.check()
    machine.teardown()


@pytest.mark.parametrize(
    ("seed", "num_blocks", "block_size"),
    [(1, 48, 1), (2, 24, 1), (3, 32, 2), (4, 18, 2), (5, 24, 3), (6, 14, 4)],
)
def test_conversations_that_grow_branch_and_shrink(seed, num_blocks, block_size):
    walk(Managers(), seed, num_blocks, block_size, num_steps=1500)


def test_conversations_in_the_thread_safe_manager():
    walk(ConcurrentManagers(), 7, 32, 2, num_steps=1500)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_many_long_conversations():
    for seed in range(100, 300):
        walk(Managers(), seed, 16 + seed % 40, 1 + seed % 4, num_steps=5000)
