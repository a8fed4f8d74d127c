"""What the command line writes while it works: progress on stderr, results on stdout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

Update = Callable[[float | None, str], None]
"""Called with the fraction done, None where nobody can tell, and a note."""


class Steps:
    """Shows one step of work at a time, and a line for each that is over; use it with ``with``.

    Without a terminal there are only the lines, so that logs stay readable.

    Args:
        console: where to write; stderr unless given.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = Console(stderr=True, highlight=False) if console is None else console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}", style="dim", markup=False),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    @contextmanager
    def step(self, text: str) -> Iterator[Update]:
        """Show a step while it runs; its last note stays behind with the time it took."""
        began, last = time.perf_counter(), ""
        task = self._progress.add_task(text, total=None, note="")

        def update(fraction: float | None, note: str) -> None:
            nonlocal last
            last = note
            total = None if fraction is None else 1.0
            self._progress.update(task, total=total, completed=fraction or 0.0, note=note)

        try:
            yield update
        except BaseException:
            self._progress.remove_task(task)
            raise
        self._progress.remove_task(task)
        seconds = time.perf_counter() - began
        line = Text.assemble(
            ("done", "green"), f" {seconds:6.1f} s  {text}", f": {last}" if last else ""
        )
        self.console.print(line, soft_wrap=True)
