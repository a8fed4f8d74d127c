"""Memory that several processes map: Linux frees it when the last of them is gone, however it went.

It is an unnamed file in memory (memfd). No name means that nothing is left behind after SIGKILL,
and the limits of /dev/shm do not count; those of the process's control group do.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
from pathlib import Path
from typing import Literal

from raykv.errors import ConfigError, TransferError
from raykv.memory.room import available_bytes

PageKind = Literal["hugetlb", "transparent", "small"]

_GIB = 1 << 30
# Nobody can cut the file short, which would kill whoever reads behind its end.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; Python's mmap does not name it
_REMEDY = "ask for fewer host blocks, or free memory"


class SharedRegion:
    """A stretch of shared memory, mapped into this process.

    The file stays open as long as this object is, so that other processes can open it through
    this one. The mapping lives until the last view of ``memory`` is gone.

    Attributes:
        memory: The mapping; a new region is all zeros.
        fd: The file descriptor; -1 after ``close``.

    Args:
        fd: Of the file; taken over, unless mapping it fails.
        num_bytes: Its size.

    Raises:
        OSError: It cannot be mapped.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.memory = mmap.mmap(fd, num_bytes)
        self.fd = fd
        # A crash must not write gigabytes of shared memory into a core file.
        for advice in (mmap.MADV_DONTDUMP, mmap.MADV_HUGEPAGE):
            with contextlib.suppress(OSError):
                self.memory.madvise(advice)

    @classmethod
    def create(cls, name: str, num_bytes: int, *, what: str) -> SharedRegion:
        """Make a new region, on reserved huge pages if there are enough.

        Args:
            name: Shown in /proc, for people and to be checked by ``open``.
            num_bytes: Its size, rounded up to whole pages.
            what: What needs the memory, numbers included, for messages; a plural.

        Raises:
            ConfigError: It does not fit, or the system knows no such memory.
        """
        if not hasattr(os, "memfd_create"):
            raise ConfigError("this system has no memfd_create: the host tier needs Linux")
        need = f"{what} need {num_bytes / _GIB:.2f} GiB of shared memory"
        region = _on_huge_pages(name, num_bytes)
        if region is not None:
            return region
        available = available_bytes()
        if available is not None and num_bytes > available:
            raise ConfigError(f"{need}, but {available / _GIB:.2f} GiB are available: {_REMEDY}")
        try:
            return _made(name, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, 0)
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigError(f"{need}, but making it failed: {error}: {_REMEDY}") from None

    @classmethod
    def open(cls, pid: int, fd: int, name: str) -> SharedRegion:
        """Map a region that another process has open.

        Whoever calls this still has to check that the content is what it looks for.

        Args:
            pid: The process, on this machine and of the same user.
            fd: Its file descriptor.
            name: What the region was created as.

        Raises:
            TransferError: The process is gone, does not have it, or may not be asked.
        """
        path = Path(f"/proc/{pid}/fd/{fd}")
        remedy = "ask a living process for a new descriptor, on the same node and as the same user"
        fault = f"process {pid} does not hold shared memory {name!r} as descriptor {fd}"
        try:
            # Looked at before it is opened: opening what a reused pid has there may do harm.
            found = str(path.readlink())
            if found != f"/memfd:{name} (deleted)":
                raise TransferError(f"{fault}, but {found}: {remedy}")
            own = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise TransferError(f"{fault} ({error}): {remedy}") from None
        try:
            if fcntl.fcntl(own, fcntl.F_GET_SEALS) & _SEALS == _SEALS:
                return cls(own, os.fstat(own).st_size)
            cause = "its size may change"
        except (OSError, ValueError) as error:
            cause = str(error)
        os.close(own)
        raise TransferError(f"mapping shared memory {name!r} of process {pid} failed: {cause}")

    @property
    def nbytes(self) -> int:
        """Bytes that are mapped."""
        return len(self.memory)

    def populate(self) -> None:
        """Take and map all pages now; where the kernel cannot, they come with their first use.

        Raises:
            OSError: There is no memory for them.
        """
        try:
            self.memory.madvise(_POPULATE_WRITE)
        except OSError as error:
            if error.errno != 22:  # EINVAL: a kernel that does not know it
                raise

    def close(self) -> None:
        """Close the file; idempotent. The mapping stays for whoever still has views of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def page_kind(address: int) -> PageKind:
    """The kind of page that the kernel uses for a region, told by its first page.

    Args:
        address: Where the mapping starts; that page was written before.
    """
    try:
        text = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "small"
    _, _, entry = text.partition(f"\n{address:08x}-")
    entry = entry.split("VmFlags", 1)[0]
    lines = re.findall(r"^(\w+):\s+(\d+) kB$", entry, re.MULTILINE)
    sizes = {key: int(value) for key, value in lines}
    if sizes.get("KernelPageSize", 0) * 1024 > mmap.PAGESIZE:
        return "hugetlb"
    return "transparent" if sizes.get("ShmemPmdMapped", 0) else "small"


def _made(name: str, num_bytes: int, flags: int) -> SharedRegion:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return SharedRegion(fd, num_bytes)
    except BaseException:
        os.close(fd)
        raise


def _on_huge_pages(name: str, num_bytes: int) -> SharedRegion | None:
    """A region on pages that the administrator reserved; None if there are too few."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    numbers = dict(re.findall(r"^(Huge\w+):\s+(\d+)", text, re.MULTILINE))
    page_bytes = int(numbers.get("Hugepagesize", 0)) * 1024
    num_free = int(numbers.get("HugePages_Free", 0)) - int(numbers.get("HugePages_Rsvd", 0))
    if not page_bytes or num_bytes > num_free * page_bytes:
        return None
    region = None
    try:
        # Mapping reserves the pages. Taking them at once turns a limit of the control group into
        # an error here; later it would be a fatal signal.
        region = _made(name, -(-num_bytes // page_bytes) * page_bytes, os.MFD_HUGETLB)
        region.populate()
    except (OSError, ValueError):
        if region is not None:
            region.close()
        return None
    return region
