"""The copies around a forward pass: blocks of forks, and states to and from checkpoints."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from raykv.core.sequence import Sequence
from raykv.rank import RankKV

from .batch import ModelRunner


class StepCopies:
    """Does what a rank's KV says is due for the engine's sequences.

    Args:
        kv: the rank's KV.
        owner: the name under which the engine's sequences owe copies; drivers have others.
    """

    def __init__(self, kv: RankKV, owner: str) -> None:
        self._kv = kv
        self._owner = owner

    def before(self, model: ModelRunner) -> None:
        """What must be there before the model writes: forks' own blocks, and resumed states."""
        kv, owner = self._kv, self._owner
        swaps = kv.take_swaps(owner)
        states = kv.take_state_copies(owner)
        try:
            if swaps:
                model.copy_blocks(*zip(*swaps, strict=True))
            if states:
                model.copy_states(*zip(*states, strict=True))
        except Exception:  # ends the step's sequences, so nothing else waits for these copies
            kv.ack_swaps(owner)
            kv.fail_state_transfers(owner)
            raise
        if swaps:
            kv.ack_swaps(owner)
        if states:
            kv.ack_state_transfers(owner)

    def save(self, model: ModelRunner, sequences: SequenceOf[Sequence] = ()) -> None:
        """Copy the states that are to be checkpoints; one that cannot be copied is none.

        Args:
            model: copies.
            sequences: some that may have reached a boundary, beside those that were published.
        """
        kv, owner = self._kv, self._owner
        if sequences:
            kv.checkpoint(sequences)
        # Forks' copies wait for ``before``: a failure of theirs must not go unnoticed.
        copies = kv.take_state_saves(owner)
        if copies:
            try:
                model.copy_states(*zip(*copies, strict=True))
            except Exception:  # noqa: BLE001 - the device's fault; requests need no checkpoints
                kv.fail_state_transfers(owner)
            else:
                kv.ack_state_transfers(owner)
