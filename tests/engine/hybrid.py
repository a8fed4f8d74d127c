"""Runs sequences of a hybrid model over shuffled blocks and slots, as a scheduler would."""

import copy
from dataclasses import dataclass

import numpy as np

from raykv.memory.state_buffers import StateBuffers

from .test_hf_runner import Paged

BLOCK = 4
NUM_SLOTS = 16
VOCAB = 256


@dataclass
class Checkpoint:
    """A state that was kept, and the blocks of the tokens before it."""

    slot: int
    blocks: list[int]
    length: int


class Hybrid(Paged):
    """Sequences with a live state each; where nothing was written yet, states are all NaN."""

    def __init__(self, model, checkpoint_dtype="float32"):
        self.checkpoint_dtype = checkpoint_dtype
        self.live = {}
        self.free_slots = list(range(1, NUM_SLOTS))
        self.free_rows = list(range(1, NUM_SLOTS))
        super().__init__(copy.deepcopy(model), BLOCK, 400)

    def make_states(self):
        self.states = StateBuffers(
            self.runner.state_spec,
            NUM_SLOTS,
            num_rows=NUM_SLOTS,
            checkpoint_dtype=self.checkpoint_dtype,
            device="cpu",
        )
        self.states.slots[1:] = self.states.live[1:] = 0xFF
        return self.states

    def address(self, name):
        if name not in self.live:
            pair = self.free_slots.pop(), self.free_rows.pop()
            self.live[name] = self.states.live_address(*pair)
        return self.live[name]

    def state_slots(self, names):
        return np.array([self.address(name) for name in names], np.int64) - self.states.live_base

    def checkpoint(self, name):
        slot = self.free_slots.pop()
        self.runner.copy_states([self.address(name)], [slot])
        return Checkpoint(slot, list(self.blocks[name]), self.lengths[name])

    def resume(self, name, checkpoint, slot=None):
        """Begin a sequence behind a checkpoint, or with the state of another slot."""
        assert checkpoint.length % self.block_size == 0, "the last block would be written by two"
        self.blocks[name] = list(checkpoint.blocks)
        self.lengths[name] = checkpoint.length
        source = checkpoint.slot if slot is None else slot
        self.runner.copy_states([source], [self.address(name)])

    def drop(self, name):
        """Give a live state back, and hand it out next, as it is."""
        assert self.checkpoint_dtype == "float32"
        self.free_slots.append(self.live.pop(name))

    def greedy(self, last, count):
        """The next tokens of each sequence, from {sequence: logits of its last token}."""
        said = {name: [int(logits.argmax())] for name, logits in last.items()}
        for _ in range(count - 1):
            for name, logits in self.step({name: [ids[-1]] for name, ids in said.items()}).items():
                said[name].append(int(logits[-1].argmax()))
        return said


def prefill(hybrid, name, tokens, cuts=()):
    """Compute a prompt in pieces; logits of all tokens, and a checkpoint at every cut."""
    seen, kept = [], {}
    for piece in np.split(tokens, cuts):
        if hybrid.lengths.get(name):
            kept[hybrid.lengths[name]] = hybrid.checkpoint(name)
        seen.append(hybrid.step({name: piece})[name])
    return np.concatenate(seen), kept
