"""Checkpoints of one rank on their way to the tier behind it, and back.

Copies nothing: it says which slots are to be read or written, and keeps them as they are meanwhile.
The rows of ``StateBuffers.slots`` are what is copied, whatever their dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

from raykv.core.block_manager import BlockManagerImpl
from raykv.core.blocks import Blocks
from raykv.core.checked_prefix import CheckedPrefix, same_prefix
from raykv.core.namespace import Namespace
from raykv.core.reservation import Reservation
from raykv.core.sequence import Sequence
from raykv.core.sequence_prefixes import SequencePrefixes
from raykv.core.tokens import TokenIds, as_tokens
from raykv.rank_states import RankStates


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointPin:
    """A checkpoint on the device that stays as it is until it is released.

    Attributes:
        num_tokens: the boundary that it stands at.
        slot: the row of ``StateBuffers.slots`` that holds it.
        pin: of the slot.
    """

    num_tokens: int
    slot: int
    pin: Blocks

    def release(self) -> None:
        """Nobody reads it any more; idempotent."""
        self.pin.release()


@dataclass(frozen=True, slots=True, eq=False)
class StateLoadTarget:
    """Where on the device a checkpoint of the tier belongs.

    Who drops one gives its slot back, so keep it until the copy is over, whatever becomes of the
    sequence; then it goes to ``StateTiers.finish_load``.

    Attributes:
        num_tokens: the boundary that it stands at.
        reservation: of the slot.
        pin: where it is on the device already: keeps it there.
    """

    num_tokens: int
    reservation: Reservation
    pin: Blocks | None = None

    @property
    def slot(self) -> int:
        """The row of ``StateBuffers.slots`` to write to."""
        return self.reservation.slot

    @property
    def existing(self) -> bool:
        """Whether it is there already, and nothing is to be written."""
        return self.reservation.existing


class StateTiers:
    """Says what a rank could offload, and makes place for what it loads.

    Copies of a copier have a stream of their own on CUDA. Both an offload and a load must wait for
    an event that was recorded when the slot was given: the copies of states that were acknowledged
    before may still be under way on the device.

    Args:
        states: the rank's recurrent state.
        manager: the rank's KV blocks, which name prefixes, too.
    """

    def __init__(self, states: RankStates, manager: BlockManagerImpl) -> None:
        self._states = states
        self._cache = states.cache
        self._hasher = manager.hasher
        self._block_size = manager.block_size

    @property
    def step_tokens(self) -> int:
        """Checkpoints are of use at multiples of these.

        Under ``contiguous``, of the stride: a sequence goes on from one that it loads, since that
        is whole by itself, but others hit it only if the device has those before it, too.
        """
        config = self._states.config
        return config.stride_tokens if config.match == "contiguous" else self._block_size

    def pin_checkpoints(
        self, tokens: TokenIds, namespace: Namespace, num_tokens: int | None = None
    ) -> list[CheckpointPin]:
        """Pin the checkpoints of a prompt's prefixes that are worth keeping.

        Meant for right after a sequence was released, which may leave one more. Speculative ones
        are passed by until somebody has resumed from them: a long prompt leaves dozens, and they
        would cost the host's slots and the way there. Under ``contiguous`` none is speculative:
        other prompts that leave this one earlier need those at each stride.

        Args:
            tokens: the prompt, and what was generated.
            namespace: whose it is.
            num_tokens: only as far as these; None for all.

        Returns:
            The deepest first. Released, they are the most recently used ones.
        """
        row = as_tokens(tokens)[:num_tokens]
        raw, names = row.tobytes(), self._hasher.names(row, namespace=namespace)
        slots, size, pins = self._cache.slots, self._block_size, []
        slots.settle()
        for index in range(len(names) - 1, -1, -1):
            known = slots.committed.get(names[index])
            if known is None or slots.is_unproven(known):
                continue
            prefix = CheckedPrefix(raw, (index + 1) * size, namespace)
            if same_prefix(known.prefix, prefix):
                pins.append(CheckpointPin(prefix.num_tokens, known.slot, slots.hold(known)))
        return pins

    def begin_load(self, sequence: Sequence, num_tokens: int) -> StateLoadTarget | None:
        """Make place for the checkpoint of a sequence's first tokens, be it admitted or not.

        Returns:
            Where to; ``existing`` if it is on the device already. None if no slot is to be had, or
            if somebody is saving or loading just that one.

        Raises:
            ValueError: no sequence could go on from there; nothing changed.
        """
        step = self.step_tokens
        if not 0 < num_tokens < sequence.num_tokens or num_tokens % step:
            raise ValueError(
                f"{sequence!r} cannot go on from a checkpoint at {num_tokens}: load one at a"
                f" multiple of {step} tokens that leaves it a token to compute"
            )
        prefixes = SequencePrefixes(sequence, self._hasher)
        reservation = self._cache.reserve_checkpoint(
            prefixes.name(num_tokens), prefix=prefixes.checked(num_tokens)
        )
        if reservation is None:
            return None
        pin = self._cache.slots.hold(reservation.claim) if reservation.existing else None
        return StateLoadTarget(num_tokens, reservation, pin)

    def finish_load(self, sequence: Sequence | None, target: StateLoadTarget, *, ok: bool) -> bool:
        """A load is over; if it went well, its checkpoint can be found from now on.

        Args:
            sequence: that is to go on from it if it still can, and whose blocks hold the KV of all
                tokens before it; None for nobody.
            target: as ``begin_load`` gave it; not to be used again.
            ok: whether the slot holds the checkpoint; true where it is existing.

        Returns:
            Whether the sequence goes on from there. Its ``num_computed_tokens`` says so then, and
            a copy of the state is due before it computes.
        """
        resumes = False
        if ok and self._cache.commit(target.reservation) and sequence is not None:
            resumes = self.resume(sequence, target.num_tokens)
        target.reservation.release()
        if target.pin is not None:
            target.pin.release()
        return resumes

    def can_resume_at(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether it is not too late for a sequence; see ``RankStates.can_restart``.

        Nothing may be computing it at the moment, which only the caller knows.
        """
        return self._states.can_restart(sequence, num_tokens)

    def resume(self, sequence: Sequence, num_tokens: int) -> bool:
        """Let a sequence go on from a checkpoint that was loaded; see ``RankStates.restart``."""
        return self._states.restart(sequence, num_tokens)
