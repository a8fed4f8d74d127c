"""What a container may still take, by both versions of control groups."""

import pytest

from raykv.memory import cgroup, room

MIB = 1 << 20


@pytest.fixture
def system(monkeypatch, tmp_path):
    """Writes files of a made-up system; returns the room that is found."""
    monkeypatch.setattr(cgroup, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(cgroup, "_MOUNT", tmp_path / "mount")

    def room_of(groups, **files):
        (tmp_path / "groups").write_text(groups)
        for name, text in files.items():
            path = tmp_path / "mount" / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return cgroup.cgroup_room_bytes()

    return room_of


def version_2(folder, most, used, droppable=0):
    return {
        f"{folder}memory_DOT_max": most,
        f"{folder}memory_DOT_current": used,
        f"{folder}memory_DOT_stat": f"anon 5\ninactive_file {droppable}\nactive_file 9",
    }


def version_1(folder, most, used, droppable=0):
    return {
        f"memory__{folder}memory_DOT_limit_in_bytes": most,
        f"memory__{folder}memory_DOT_usage_in_bytes": used,
        f"memory__{folder}memory_DOT_stat": f"inactive_file 3\ntotal_inactive_file {droppable}",
    }


def test_version_2(system):
    assert system("0::/job\n", **version_2("job__", 100 * MIB, 60 * MIB, 7 * MIB)) == 47 * MIB


def test_version_1(system):
    groups = "5:cpu,cpuacct:/\n4:memory:/job\n"
    assert system(groups, **version_1("job__", 100 * MIB, 60 * MIB, 7 * MIB)) == 47 * MIB


def test_the_tightest_group_above_counts(system):
    files = (
        version_2("a__b__c__", "max", 1)
        | version_2("a__b__", 90 * MIB, 80 * MIB)
        | version_2("a__", 99 * MIB, 90 * MIB)
    )
    assert system("0::/a/b/c\n", **files) == 9 * MIB


def test_in_a_container_the_root_is_its_own_group(system):
    groups = "4:memory:/outside/path\n0::/\n"
    assert system(groups, **version_1("", 50 * MIB, 60 * MIB)) == 0


def test_no_limit(system):
    assert system("0::/job\n", **version_2("job__", "max", 5)) is None
    assert system("4:memory:/\n", **version_1("", 0x7FFFFFFFFFFFF000, 5)) is None


def test_without_control_groups(system, monkeypatch, tmp_path):
    assert system("5:cpu:/\n") is None
    monkeypatch.setattr(cgroup, "_GROUPS", tmp_path / "nothing")
    assert cgroup.cgroup_room_bytes() is None


@pytest.mark.parametrize(
    ("machine_kib", "container", "expected"),
    [(64, 1 << 20, 64 << 10), (64, 10, 10), (64, None, 64 << 10), (None, 10, 10),
     (None, None, None)],
)  # fmt: skip
def test_the_smaller_room_counts(monkeypatch, tmp_path, machine_kib, container, expected):
    meminfo = tmp_path / "meminfo"
    if machine_kib is not None:
        meminfo.write_text(f"MemAvailable: {machine_kib} kB\n")
    monkeypatch.setattr(room, "_MEMINFO", meminfo)
    monkeypatch.setattr(room, "cgroup_room_bytes", lambda: container)
    assert room.available_bytes() == expected
