"""A job's outputs, one JSON object a line, in a file that a later run continues."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from raykv.errors import ConfigError

_START = b'{"id"'  # of every line


class OutputFile:
    """Adds lines to a file, each written whole. Use it with ``with``.

    Opened again, it knows the lines that were done, cuts off a last line that is torn (the process
    ended in its midst), and drops the lines that report an error: these are to be tried again. One
    process at a time can have it open.

    Args:
        path: the file, which need not exist.

    Attributes:
        done: the ids, as JSON, of the lines that have their output.
        num_torn_bytes: length of the torn line that was cut off.
        num_dropped: lines with an error that were dropped.

    Raises:
        ConfigError: it cannot be written, is in use, or holds what is no output of a job; then it
            was not changed.
    """

    def __init__(self, path: Path) -> None:
        self.done: set[str] = set()
        self.num_torn_bytes = self.num_dropped = 0
        self._path = path
        self._files = contextlib.ExitStack()
        if path.exists() and not path.is_file():
            raise ConfigError(f"the output {path} is no file, but must be: it is read, too")
        with self._files, self._explained():
            self._file = self._open(path)
            self._read()
            if self.num_dropped:
                self._file = self._without_errors()
            self._files = self._files.pop_all()

    def write(self, record: Mapping[str, Any]) -> None:
        """Add one line; ``record`` begins with its id.

        Raises:
            ConfigError: it cannot be written.
        """
        # As ASCII: text may hold what other readers take for the end of a line, such as U+2028.
        line = json.dumps(record).encode() + b"\n"
        assert line.startswith(_START), "that is how a torn line is told from another's file"
        with self._explained():
            self._file.write(line)
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._explained():
            self._files.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"cannot write the output {self._path}: {error.strerror}; free the disk, or pass a "
                "file that can be written"
            ) from error

    def _open(self, path: Path) -> IO[bytes]:
        file = self._files.enter_context(path.open("ab+"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"the output {self._path} is in use by another job: wait for it, or pass another"
            ) from None
        return file

    def _read(self) -> None:
        """Learn what is there, and cut off a torn line."""
        self._file.seek(0)
        end = 0
        for number, raw in enumerate(self._file, 1):
            if not raw.endswith(b"\n") and raw[: len(_START)] == _START[: len(raw)]:
                self.num_torn_bytes = len(raw)
                break
            record = self._record(raw, number)
            end += len(raw)
            if "error" in record:
                self.num_dropped += 1
            else:
                self.done.add(json.dumps(record["id"]))
        if self.num_torn_bytes:
            self._file.truncate(end)

    def _record(self, raw: bytes, number: int) -> dict[str, Any]:
        try:
            record = json.loads(raw)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or "id" not in record or not raw.endswith(b"\n"):
            raise ConfigError(
                f"the output {self._path} holds something else at line {number}: pass another file"
            )
        return record

    def _without_errors(self) -> IO[bytes]:
        """Replace the file by one without errors; an interruption leaves either."""
        draft = self._path.with_name(f"{self._path.name}.draft")
        draft.unlink(missing_ok=True)
        file = self._open(draft)
        self._file.seek(0)
        file.writelines(raw for raw in self._file if "error" not in json.loads(raw))
        file.flush()
        os.chmod(draft, os.fstat(self._file.fileno()).st_mode & 0o7777)  # noqa: PTH101
        draft.replace(self._path)
        # The old file stays open with its lock: whoever opened it meanwhile must not get that.
        return file
