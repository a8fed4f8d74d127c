"""Copies that forked sequences owe before they may write."""

from __future__ import annotations

from .base import LedgerBlockManager
from .blocks import Blocks
from .tokens import as_index


class SwapList:
    """Block copies due before the next write.

    Sources and targets stay referenced until the copy is acknowledged, whatever becomes of the
    sequences.

    Args:
        manager: whose blocks they are.
    """

    def __init__(self, manager: LedgerBlockManager) -> None:
        self._manager = manager
        self._due: list[tuple[int, int]] = []
        self._roots: dict[int, int] = {}  # target to source, of the copies that are due
        self._due_pins: list[Blocks] = []
        self._handed_pins: list[Blocks] = []

    def add(self, source: int, target: int) -> None:
        """Owe a copy. A source that is itself still a target stands for its own source."""
        source = self._roots.get(source, source)
        self._roots[target] = source
        self._due.append((source, target))
        self._due_pins.append(self._manager.pin(as_index([source, target])))

    def take(self) -> list[tuple[int, int]]:
        """Hand out the copies that are due, in order; each is handed out once."""
        due, self._due = self._due, []
        self._handed_pins += self._due_pins
        self._due_pins = []
        self._roots.clear()
        return due

    def acknowledge(self) -> None:
        """All copies that were handed out are done."""
        for pin in self._handed_pins:
            pin.release()
        self._handed_pins.clear()
