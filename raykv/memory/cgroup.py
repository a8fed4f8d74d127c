"""How much memory the control group of this process still has: a container's limit."""

import re
from pathlib import Path

_GROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
# Version 1 says "no limit" by a number near 2**63.
_NO_LIMIT = 1 << 62


def cgroup_room_bytes() -> int | None:
    """Bytes that this process can take before a limit of its control groups stops it.

    All groups above its own count too. Cached files that the kernel would drop first are room. Both
    versions of control groups are looked at.

    Returns:
        The smallest room; None where nothing is limited, or Linux does not say.
    """
    rooms = [room for group in _groups() if (room := _room(group)) is not None]
    return min(rooms, default=None)


def _groups() -> list[Path]:
    """The folders of this process's memory groups and of all above them."""
    try:
        lines = _GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _MOUNT / "memory" if controllers else _MOUNT
        # In a container the path may be one outside of it. What is not there is passed by, and the
        # root then is the container's own group.
        folder = root / path.lstrip("/")
        folders += [folder, *(above for above in folder.parents if above.is_relative_to(root))]
    return folders


def _room(group: Path) -> int | None:
    for limit, usage, droppable in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most = int((group / limit).read_text(encoding="ascii"))
            used = int((group / usage).read_text(encoding="ascii"))
            stat = (group / "memory.stat").read_text(encoding="ascii")
        except (OSError, ValueError):  # not this version; or "max"
            continue
        found = re.search(rf"^{droppable} (\d+)$", stat, re.MULTILINE)
        if most < _NO_LIMIT:
            return max(0, most - used + (int(found[1]) if found else 0))
    return None
