"""The folder in which models that raykv makes or fetches are kept: whole ones, made once."""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from raykv.errors import ConfigError

OnProgress = Callable[[str, float | None], None]
"""Called with a message and the fraction of that step done, or None where nobody can tell."""

_MANIFEST = "raykv-manifest.json"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One model's place in the cache.

    Attributes:
        name: what users call it.
        folder: name of its folder in the cache.
        stamp: what it was made from, as the manifest keeps it; a folder of another stamp is made
            anew.
        disk_bytes: free space that making it needs.
        extras: modules that making it needs.
    """

    name: str
    folder: str
    stamp: Mapping[str, str]
    disk_bytes: int
    extras: tuple[str, ...]

    def ensure(
        self, cache_dir: Path | None, report: OnProgress, make: Callable[[Path, Path], None]
    ) -> Path:
        """Return the model's folder, making it when it is not there yet.

        Safe to call from several processes at once: one works, the others wait for it. An
        interrupted one leaves no half-made folder.

        Args:
            cache_dir: where model folders live; ``default_cache_dir()`` if None.
            report: told about each step.
            make: called with a scratch folder, which is there, and with the folder to make, which
                is not.

        Raises:
            ConfigError: a package is missing, the disk is too full, or nothing can be written.
        """
        root = default_cache_dir() if cache_dir is None else cache_dir
        target = root / self.folder
        if self._is_complete(target):
            return target
        try:
            root.mkdir(parents=True, exist_ok=True)
            with _locked(root / f".{self.folder}.lock", report):
                if not self._is_complete(target):
                    self._check_extras()
                    self._build(target, make)
        except OSError as error:
            raise ConfigError(
                f"cannot write the model {self.name!r} below {root}: {error}; "
                "free the disk, or point cache_dir or XDG_CACHE_HOME to a writable folder"
            ) from error
        report(f"{self.name} is ready in {target}", 1.0)
        return target

    def _is_complete(self, target: Path) -> bool:
        """Say whether the folder holds every file, at its size, and was made from this stamp."""
        try:
            manifest = json.loads((target / _MANIFEST).read_text())
            return all(manifest[key] == value for key, value in self.stamp.items()) and all(
                (target / file).stat().st_size == size
                for file, size in manifest["file_bytes"].items()
            )
        except (OSError, ValueError, KeyError):
            return False

    def _check_extras(self) -> None:
        missing = []
        for module in self.extras:
            try:
                __import__(module)
            except ImportError:
                missing.append(module)
        if missing:
            raise ConfigError(
                f"the model {self.name!r} needs {', '.join(missing)}, not installed here; "
                "run: pip install 'raykv[model]'"
            )

    def _build(self, target: Path, make: Callable[[Path, Path], None]) -> None:
        """Make the model's folder beside its final place, then move it there in one step."""
        prefix = f".{self.folder}-build-"
        # We hold the lock, so a build folder found here belongs to a process that was killed.
        for stale in target.parent.glob(f"{prefix}*"):
            shutil.rmtree(stale, ignore_errors=True)
        free_bytes = shutil.disk_usage(target.parent).free
        if free_bytes < self.disk_bytes:
            raise ConfigError(
                f"making {self.name} needs {self.disk_bytes / 1e9:.1f} GB, but {target.parent} has "
                f"{free_bytes / 1e9:.1f} GB free; free some, or point cache_dir or XDG_CACHE_HOME "
                "to a larger disk"
            )
        with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as scratch:
            work = Path(scratch)
            done = work / self.folder
            make(work, done)
            sizes = {file.name: file.stat().st_size for file in done.iterdir()}
            manifest = {**self.stamp, "file_bytes": sizes}
            (done / _MANIFEST).write_text(json.dumps(manifest, indent=1))
            if target.exists():  # incomplete, or of another stamp
                target.rename(work / "replaced")
            done.replace(target)


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/raykv/models``, or the same below ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "raykv" / "models"  # noqa: PTH117


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' bars, logs and warnings within this block only."""
    from transformers.utils import logging  # noqa: PLC0415 - an extra

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _locked(path: Path, report: OnProgress) -> Iterator[None]:
    """Hold an exclusive lock that the kernel releases should this process die."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that makes the same model", None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
