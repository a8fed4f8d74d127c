"""How much shared memory there is, and which kind: refusals, huge pages, fall-backs."""

import os
from types import SimpleNamespace

import pytest

from raykv.errors import ConfigError
from raykv.memory import shared_region
from raykv.memory.host_slab import HostSlab

from .peers import num_open_files

NUM_BLOCKS, BLOCK_BYTES = 9, 5000


def test_a_slab_that_does_not_fit_is_refused_with_numbers():
    with pytest.raises(
        ConfigError,
        match=r"1048576 host blocks of 1073741824 bytes need 1048576\.02 GiB of shared memory,"
        r" but \d+\.\d\d GiB are available: ask for fewer host blocks",
    ):
        HostSlab.create(1 << 20, 1 << 30)


def test_the_limit_is_what_is_available(monkeypatch):
    needed = 4096 + NUM_BLOCKS * BLOCK_BYTES
    monkeypatch.setattr(shared_region, "_on_huge_pages", lambda *_: None)
    monkeypatch.setattr(shared_region, "available_bytes", lambda: needed)
    HostSlab.create(NUM_BLOCKS, BLOCK_BYTES).close()
    monkeypatch.setattr(shared_region, "available_bytes", lambda: needed - 1)
    with pytest.raises(ConfigError, match="are available"):
        HostSlab.create(NUM_BLOCKS, BLOCK_BYTES)


@pytest.mark.parametrize("num_blocks", [1 << 32, 1 << 62])
def test_what_fails_unforeseen_is_a_config_error(monkeypatch, num_blocks):
    monkeypatch.setattr(shared_region, "available_bytes", lambda: None)
    before = num_open_files()
    with pytest.raises(ConfigError, match=r"failed: .*free memory"):
        HostSlab.create(num_blocks, 1 << 20)
    assert num_open_files() == before


def test_other_systems_are_told(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ConfigError, match="needs Linux"):
        HostSlab.create(NUM_BLOCKS, BLOCK_BYTES)


@pytest.fixture
def huge_pages(monkeypatch):
    """Says how many huge pages there are, and how regions are made of them; notes attempts."""
    world = SimpleNamespace(meminfo="", made=[], make=shared_region._made)

    def make(name, num_bytes, flags):
        world.made.append((num_bytes, flags))
        return world.make(name, num_bytes, flags)

    monkeypatch.setattr(shared_region, "_made", make)
    monkeypatch.setattr(
        shared_region, "Path",
        lambda path: SimpleNamespace(read_text=lambda **_: world.meminfo if "mem" in path else ""),
    )  # fmt: skip

    def set_pages(free, reserved, kib):
        world.meminfo = (
            f"HugePages_Total:  99\nHugePages_Free:  {free}\nHugePages_Rsvd:  {reserved}\n"
            f"Hugepagesize:  {kib} kB\n"
        )

    world.set = set_pages
    return world


def test_huge_pages_that_cannot_be_had_fall_back(huge_pages):
    huge_pages.set(3, 0, kib=1 << 30)  # no system has so large ones
    with HostSlab.create(NUM_BLOCKS, BLOCK_BYTES) as slab:
        assert not slab.blocks.any()
        assert slab.page_kind == "small"
    huge, small = huge_pages.made
    assert huge == (1 << 40, os.MFD_HUGETLB)
    assert small[1] == 0


@pytest.mark.parametrize(
    ("free", "reserved", "tried"), [(12, 0, True), (12, 1, False), (13, 1, True)]
)
def test_free_huge_pages_count_less_what_is_promised(huge_pages, free, reserved, tried):
    huge_pages.set(free, reserved, kib=4)  # 4 KiB of header and 45,000 bytes are 12 of them
    HostSlab.create(NUM_BLOCKS, BLOCK_BYTES).close()
    assert (os.MFD_HUGETLB in [flags for _, flags in huge_pages.made]) == tried


def test_a_slab_on_huge_pages(huge_pages, monkeypatch):
    real = huge_pages.make
    huge_pages.make = lambda name, num_bytes, _: real(name, num_bytes, 0)
    huge_pages.set(1, 0, kib=64)
    monkeypatch.setattr(shared_region, "available_bytes", lambda: 0)  # they are not part of it
    with HostSlab.create(NUM_BLOCKS, BLOCK_BYTES) as slab:
        assert huge_pages.made == [(1 << 16, os.MFD_HUGETLB)]
        slab.blocks[8] = 3
        slab.check_integrity()


def smaps(address, page_kib, pmd_kib):
    entry = (
        "{:x}-{:x} rw-s 0 00:01 9  /memfd:x\nKernelPageSize: {} kB\nShmemPmdMapped: {} kB\n"
        "VmFlags: rd\n"
    )
    other = entry.format(0x1000, 0x2000, 64, 64)
    return other + entry.format(address, address + 8192, page_kib, pmd_kib) + other


@pytest.mark.parametrize(
    ("page_kib", "pmd_kib", "kind"),
    [(4, 0, "small"), (4, 2048, "transparent"), (2048, 0, "hugetlb")],
)
def test_page_kinds(monkeypatch, page_kib, pmd_kib, kind):
    address = 0x7F0000000000
    text = smaps(address, page_kib, pmd_kib)
    monkeypatch.setattr(
        shared_region, "Path", lambda _: SimpleNamespace(read_text=lambda **_: text)
    )
    assert shared_region.page_kind(address) == kind
