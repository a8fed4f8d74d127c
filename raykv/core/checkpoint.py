"""What a slot of recurrent state holds: the state behind one prefix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checked_prefix import CheckedPrefix
    from .tokens import Index

UNNAMED = b"a prefix that still grows "  # longer than hashes are, and not equal to any


@dataclass(slots=True, eq=False)  # not frozen: that takes three times as long to make
class Checkpoint:
    """A slot and the prefix whose state it holds, or will hold; never changed."""

    prefix_hash: bytes
    slot: int
    index: Index  # of the slot
    prefix: CheckedPrefix | None
    is_speculative: bool = False

    @property
    def is_unnamed(self) -> bool:
        """Whether the hash only tells reservations apart."""
        return self.prefix_hash.startswith(UNNAMED)
