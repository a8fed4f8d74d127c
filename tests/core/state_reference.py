"""What the slots of recurrent state should be, told by names instead of books.

The model does not say which free slot is taken; it is told, and objects if it was not to be had.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

Label = tuple[str, int] | None  # tokens and weights version, or None for "not compared"


@dataclass(eq=False)
class Saved:
    """A checkpoint, or what a reservation is to become."""

    name: bytes
    slot: int
    label: Label
    used: int = 0
    is_spare: bool = False  # speculative, and nobody came back for it
    is_void: bool = False  # of a reservation: it can never be matched


def is_same(known: Label, asked: Label) -> bool:
    return asked is None or known == asked


class StateModel:
    def __init__(self, num_slots):
        self.num_slots = num_slots
        self.free = set(range(1, num_slots))
        self.live: set[int] = set()
        self.pins: Counter[int] = Counter()
        self.saved: dict[bytes, Saved] = {}
        self.pending: list[Saved] = []
        self.retired: set[int] = set()
        self.skipped: set[bytes] = set()
        self.totals: Counter[str] = Counter()
        self.clock = 0

    # -- taking and letting go -----------------------------------------------------------------

    def reclaimable(self) -> list[Saved]:
        return [each for each in self.saved.values() if not self.pins[each.slot]]

    def is_retired(self, saved: Saved) -> bool:
        return saved.label is not None and saved.label[1] in self.retired

    def victims(self) -> set[int]:
        """Slots that may be reclaimed next.

        The oldest of each retired version, else the oldest spare one, else the oldest.
        """
        candidates = sorted(self.reclaimable(), key=lambda saved: saved.used)
        oldest: dict[int, Saved] = {}
        for each in filter(self.is_retired, candidates):
            oldest.setdefault(each.label[1], each)
        if not oldest:
            return {each.slot for each in sorted(candidates, key=lambda s: not s.is_spare)[:1]}
        return {each.slot for each in oldest.values()}

    def can_take(self, num_slots=1) -> bool:
        return num_slots <= len(self.free) + len(self.reclaimable())

    def take(self, slot):
        if self.free:
            assert slot in self.free, f"{slot} was not free: {self.free}"
        else:
            assert slot in self.victims(), f"{slot} was not the next to go: {self.victims()}"
            gone = next(name for name, each in self.saved.items() if each.slot == slot)
            del self.saved[gone]
            self.totals["reclaimed"] += 1
        self.free.discard(slot)

    def use(self, saved: Saved):
        self.clock += 1
        saved.used = self.clock

    def prove(self, saved: Saved):
        """Somebody came back for it."""
        if saved.is_spare and not self.pins[saved.slot]:
            self.use(saved)
        saved.is_spare = False

    def let_go(self, slot):
        """Something that held a slot is gone."""
        if slot in self.live or self.pins[slot] or any(each.slot == slot for each in self.pending):
            return
        for saved in self.saved.values():
            if saved.slot == slot:
                self.use(saved)
                return
        self.free.add(slot)

    def unpin(self, slot):
        self.pins[slot] -= 1
        self.let_go(slot)

    def release_live(self, slot):
        self.live.remove(slot)
        self.let_go(slot)

    # -- checkpoints ---------------------------------------------------------------------------

    def claim(self, name) -> Saved | None:
        return next((c for c in self.pending if c.name == name and not c.is_void), None)

    def collides(self, name, label) -> bool:
        there = self.saved.get(name) or self.claim(name)
        collides = there is not None and not is_same(there.label, label)
        self.totals["collisions"] += collides
        return collides

    def skip(self, name):
        self.totals["skipped"] += 1
        self.skipped.add(name)

    def save(self, saved: Saved):
        self.saved[saved.name] = saved
        self.totals["committed"] += 1
        self.skipped.discard(saved.name)
        self.use(saved)

    def drop_reservation(self, claim: Saved):
        self.pending.remove(claim)
        self.let_go(claim.slot)

    def commit(self, claim: Saved) -> int:
        self.pending.remove(claim)
        if not claim.is_void and claim.name not in self.saved:
            self.save(Saved(claim.name, claim.slot, claim.label, is_spare=claim.is_spare))
            return claim.slot
        self.free.add(claim.slot)
        return 0 if claim.is_void else self.commit_existing(claim.name, claim.label)

    def commit_existing(self, name, label) -> int:
        there = self.saved.get(name)
        if there is None:
            return 0
        if not is_same(there.label, label):
            self.totals["collisions"] += 1
            return 0
        self.use(there)
        return there.slot

    def clear(self) -> int:
        num_forgotten = len(self.saved)
        self.free |= {each.slot for each in self.reclaimable()}
        self.saved.clear()
        self.skipped.clear()
        for claim in self.pending:
            claim.is_void = True
        return num_forgotten

    def retire(self, version) -> int:
        self.retired.add(version)
        return sum(each.label is not None and each.label[1] == version
                   for each in self.reclaimable())  # fmt: skip

    def lingering(self) -> set[int]:
        pinned = {slot for slot, count in self.pins.items() if count}
        return pinned - self.live - {each.slot for each in self.saved.values()}
