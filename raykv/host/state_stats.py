"""How many host slots of checkpoints are in which state, and what became of others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostStatesStats:
    """Counts of slots, now and since the start.

    Attributes:
        slots: that can be handed out: all but the padding slot.
        free: that hold nothing.
        cached: checkpoints that can be found, whether pinned or not.
        storing: that are being written.
        pinned: that must stay for loads under way.
        quarantined: that nobody gets, since a client that ended may write them or they were
            corrupt.
        stored_total: that were written and could be found then.
        orphaned: that were written, but had been reset meanwhile.
        hit: that were given to read.
        loaded_total: that were read well.
        evicted: that made room.
        corrupt: that were found corrupt.
        stale: that were reassigned, or seemed so, while they were read.
        refused: that were offered and found no room.
        expired: reports, not slots: those of tickets that were over.
    """

    slots: int
    free: int
    cached: int
    storing: int
    pinned: int
    quarantined: int
    stored_total: int
    orphaned: int
    hit: int
    loaded_total: int
    evicted: int
    corrupt: int
    stale: int
    refused: int
    expired: int
