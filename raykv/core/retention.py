"""How dearly a sequence's cached blocks are kept."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retention:
    """A wish to the eviction policy "priority"; others ignore it.

    Attributes:
        priority: 0 to 100; blocks of low priority go first. 100 pins: such blocks go last, but
            still before an allocation fails.
        duration_s: seconds after which the priority falls back to the default, counted from each
            publication; None for never.

    Raises:
        ValueError: a value is out of range.
    """

    priority: int = 50
    duration_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.priority <= 100:
            raise ValueError(f"retention priority is {self.priority}, but must be 0 to 100")
        if self.duration_s is not None and not self.duration_s > 0:
            raise ValueError(f"retention duration is {self.duration_s} s, but must be above 0")


DEFAULT_RETENTION = Retention()
