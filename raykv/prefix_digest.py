"""What a driver believes a rank to have in its prefix cache: an estimate, kept without asking it.

A wrong one costs speed, never correctness: the rank compares tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from raykv.errors import IntegrityError


class PrefixDigest:
    """A bounded set of prefix names (``PrefixHasher.names``), the least recently noted go first.

    A name counts only as long as that of the block before it does. Of one row of names the
    deepest goes first, as in the rank's own cache, so dropping keeps to that by itself. What
    ``trim`` cuts off is followed by names of other prompts that it does not know; they are told by
    their age: a block that is noted again is younger than all that was noted behind it before.

    Args:
        capacity: names that it keeps, the blocks of the rank.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._births: OrderedDict[bytes, int] = OrderedDict()  # least recently noted first
        self._now = 0

    def __len__(self) -> int:
        return len(self._births)

    def note(self, names: Sequence[bytes]) -> None:
        """The rank will have these: one prompt's blocks, from its first one on."""
        names = names[: self._capacity]
        self._now += 1
        births = self._births
        for name in names[self.num_known(names) :]:
            births[name] = self._now
        for name in reversed(names):
            births.move_to_end(name)
        while len(births) > self._capacity:
            births.popitem(last=False)

    def num_known(self, names: Sequence[bytes]) -> int:
        """How many of a prompt's blocks, from its first one on, the rank should have."""
        parent = 0
        # Walked, not halved: names behind a gap may be there, left of what was trimmed.
        for index, name in enumerate(names):
            birth = self._births.get(name, -1)
            if birth < parent:
                return index
            parent = birth
        return len(names)

    def trim(self, names: Sequence[bytes], num_blocks: int) -> None:
        """The rank had only the first ``num_blocks`` of these, and nothing that follows others."""
        for name in names[num_blocks:]:
            self._births.pop(name, None)

    def check_integrity(self) -> None:
        """Raises IntegrityError if it holds too much, or what is to be noted yet."""
        if len(self._births) > self._capacity:
            raise IntegrityError(f"digest: {len(self._births)} names, but {self._capacity} blocks")
        if not all(0 < birth <= self._now for birth in self._births.values()):
            raise IntegrityError("digest: a name's birth lies outside the past")
