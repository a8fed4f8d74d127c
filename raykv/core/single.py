"""One id per sequence: rows of the block table, state slots (the seed's section 6)."""

from .base import LedgerBlockManager


class SingleBlockManager(LedgerBlockManager):
    """Hands out single ids 1..num_blocks-1; id 0 is padding, and there is no prefix cache.

    The id released last is handed out next, so that the rows in use stay few and warm.

    Args:
        num_blocks: ids, the padding id included.
        resource_name: what an id stands for, for messages.
    """

    def __init__(self, num_blocks: int, *, resource_name: str = "single block") -> None:
        super().__init__(num_blocks, block_size=1)
        self.resource_name = resource_name

    def __repr__(self) -> str:
        return (
            f"<SingleBlockManager {self.resource_name}: {self.num_used_blocks} of "
            f"{self.num_total_blocks} used>"
        )
