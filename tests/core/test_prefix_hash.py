"""Short names of prefixes: equal in every process, different for whatever differs."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.core import BlockManagerImpl, Namespace, PrefixHasher
from raykv.core.prefix_hash import GrowingName

from .helpers import hit_ids, publish, run_of
from .strategies import block_size, hash_seeds, wide_tokens

IMAGE = Namespace(multimodal=((3, "cat"),))


def test_names_are_16_bytes_one_per_full_block():
    hasher = PrefixHasher(4, b"seed")
    assert hasher.names([]) == hasher.names([1, 2, 3]) == []
    for num_tokens in range(4, 20):
        names = hasher.names(range(num_tokens))
        assert len(names) == num_tokens // 4
        assert {len(name) for name in names} == {16}
        assert {type(name) for name in names} == {bytes}


@given(tokens=wide_tokens, more=wide_tokens, size=block_size, seed=hash_seeds)
def test_the_name_of_a_block_depends_on_the_tokens_up_to_its_end_only(tokens, more, size, seed):
    whole = PrefixHasher(size, seed).names([*tokens, *more])
    prefix = PrefixHasher(size, seed).names(tokens)
    assert whole[: len(prefix)] == prefix


@given(tokens=wide_tokens, others=wide_tokens, size=block_size)
def test_different_prefixes_have_different_names(tokens, others, size):
    hasher = PrefixHasher(size, b"seed")
    named = {}
    for row in (tokens, others):
        for index, name in enumerate(hasher.names(row)):
            named.setdefault(name, set()).add(tuple(row[: (index + 1) * size]))
    assert all(len(prefixes) == 1 for prefixes in named.values())


@given(tokens=wide_tokens, size=block_size, filler=st.sampled_from([0, -1]))
def test_a_prefix_and_the_same_prefix_followed_by_zeros_differ(tokens, size, filler):
    hasher = PrefixHasher(size, b"seed")
    names = hasher.names([*tokens, *[filler] * (8 * size)])
    assert len(set(names)) == len(names)


def test_zeros_alone_of_every_length_differ():
    names = PrefixHasher(1, b"seed").names(np.zeros(5000, np.int32))
    assert len(set(names)) == 5000


@pytest.mark.parametrize("position", range(12))
def test_one_changed_token_changes_its_block_and_all_later_ones(position):
    hasher = PrefixHasher(3, b"seed")
    tokens = np.arange(12, dtype=np.int32)
    changed = tokens.copy()
    changed[position] += 1
    equal = [a == b for a, b in zip(hasher.names(tokens), hasher.names(changed), strict=True)]
    assert equal == [block < position // 3 for block in range(4)]


def test_swapped_tokens_and_swapped_blocks_have_other_names():
    hasher = PrefixHasher(2, b"seed")
    rows = [(1, 2, 3, 4), (2, 1, 3, 4), (3, 4, 1, 2), (1, 3, 2, 4), (4, 3, 2, 1)]
    assert len({hasher.names(row)[-1] for row in rows}) == len(rows)


def test_names_differ_between_seeds_and_an_unset_seed_is_drawn():
    tokens = range(8)
    names = [PrefixHasher(4, seed).names(tokens)[-1] for seed in (b"a", b"b", b"", None, None)]
    assert len(set(names)) == 5


def test_managers_of_one_seed_agree_and_others_do_not():
    tokens = range(8)
    ours, theirs = (BlockManagerImpl(8, 4, hash_seed=b"pool") for _ in range(2))
    assert ours.prefix_hashes(tokens) == theirs.prefix_hashes(tokens)
    strangers = [
        BlockManagerImpl(8, 4),
        BlockManagerImpl(8, 4),
        BlockManagerImpl(8, 4, hash_seed=b"x"),
    ]
    assert len({m.prefix_hashes(tokens)[0] for m in [ours, *strangers]}) == 4


def test_names_do_not_depend_on_what_was_hashed_before():
    """The keys grow with the longest prompt; growing them must not change them."""
    grown = PrefixHasher(16, b"seed")
    short = grown.names(range(64))
    long = grown.names(range(5000))
    fresh = PrefixHasher(16, b"seed")
    assert fresh.names(range(5000)) == long
    assert fresh.names(range(64)) == grown.names(range(64)) == short == long[:4]


def test_names_are_equal_in_every_process():
    program = """
from raykv.core import BlockManagerImpl, Namespace
manager = BlockManagerImpl(8, 4, hash_seed=b"pool")
for namespace in (Namespace(), Namespace("a", "b", 3, ((5, "cat"), (9, b"dog"), (10, 7)))):
    print(*[name.hex() for name in manager.prefix_hashes(range(2000), namespace=namespace)])
"""
    outputs = {
        subprocess.run(  # noqa: S603 - our own program
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "4711")
    }
    assert len(outputs) == 1
    manager = BlockManagerImpl(8, 4, hash_seed=b"pool")
    first = outputs.pop().splitlines()[0].split()
    assert first == [name.hex() for name in manager.prefix_hashes(range(2000))]


def test_names_are_pinned_so_that_versions_agree():
    """Processes of two versions may meet in one pool: these names must not change unnoticed."""
    names = PrefixHasher(2, b"seed").names([1, 2, 3, 4], namespace=Namespace(tenant="t"))
    assert [name.hex() for name in names] == [
        "6d507d86cbee331f96578bfb6bd5176d",
        "d61af0e0810c78740e5ab32ed9b2593a",
    ]


def test_an_image_changes_the_names_from_its_block_on():
    hasher = PrefixHasher(2, b"seed")
    plain = hasher.names(range(8))
    image = hasher.names(range(8), namespace=IMAGE)
    assert [a == b for a, b in zip(plain, image, strict=True)] == [True, False, False, False]


def test_images_at_other_offsets_of_one_block_have_other_names():
    hasher = PrefixHasher(4, b"seed")
    names = {
        hasher.names(range(8), namespace=Namespace(multimodal=items))[0]
        for items in [((0, "cat"),), ((1, "cat"),), ((1, "dog"),), ((0, "cat"), (1, "dog"))]
    }
    assert len(names) == 4


def test_tokens_may_be_any_integer_row():
    hasher = PrefixHasher(2, b"seed")
    rows = [
        [5, 6, 7, 8],
        (5, 6, 7, 8),
        range(5, 9),
        np.arange(5, 9),
        np.arange(5, 9, dtype=np.int32),
    ]
    assert len({tuple(hasher.names(row)) for row in rows}) == 1


def test_extreme_token_ids_have_names_of_their_own():
    hasher = PrefixHasher(1, b"seed")
    extremes = [-(2**31), -(2**31) + 1, -2, -1, 0, 1, 2**31 - 2, 2**31 - 1]
    assert len({hasher.names([token])[0] for token in extremes}) == len(extremes)


def test_a_forced_collision_of_the_prefix_hash_gives_a_miss(monkeypatch):
    def collide(self, token_ids, **kwargs):
        return np.zeros((len(token_ids) // self.block_size, 2), np.uint64)

    monkeypatch.setattr(PrefixHasher, "hashes", collide)
    manager = BlockManagerImpl(16, 2)
    ids = publish(manager, run_of(2, 1, 2, 3))
    assert len(set(manager.prefix_hashes(run_of(2, 1, 2, 3)))) == 1
    assert hit_ids(manager, run_of(2, 7, 8, 9)) == []
    assert hit_ids(manager, run_of(2, 1, 2, 9)) == ids[:2]
    assert hit_ids(manager, run_of(2, 1, 2, 3), Namespace(tenant="a")) == []
    assert publish(manager, run_of(2, 7, 8, 9)) == [4, 5, 6]
    manager.check_integrity()


STRUCTURED = {
    "counting up": lambda: np.arange(16 * 4096),
    "all the same": lambda: np.full(16 * 4096, 7),
    "two tokens in turn": lambda: np.arange(16 * 4096) % 2,
    "powers of two": lambda: 1 << (np.arange(16 * 4096) % 30),
    "high halves only": lambda: (np.arange(16 * 4096) % 2**15) << 16,
}


@pytest.mark.parametrize("tokens", STRUCTURED.values(), ids=STRUCTURED)
@pytest.mark.parametrize("lane", [0, 1])
@pytest.mark.parametrize("shift", [0, 8, 28, 48, 56])
def test_any_eight_bits_of_the_names_are_spread_evenly(tokens, lane, shift):
    """Chi-square over 256 bins, 4,096 prefixes: 255 degrees of freedom, mean 255, deviation 23."""
    hashes = PrefixHasher(16, b"seed").hashes(tokens())
    bins = (hashes[:, lane] >> np.uint64(shift)) & np.uint64(255)
    counts = np.bincount(bins.astype(np.int64), minlength=256)
    chi_square = ((counts - 16) ** 2 / 16).sum()
    assert 150 < chi_square < 390


def test_the_lanes_are_independent_and_neighbours_differ_in_half_their_bits():
    hashes = PrefixHasher(16, b"seed").hashes(np.arange(16 * 4096))
    bits = np.unpackbits(np.ascontiguousarray(hashes).view(np.uint8), axis=1)
    for first, second in [(bits[:, :64], bits[:, 64:]), (bits[1:], bits[:-1])]:
        differing = (first != second).mean(axis=0)
        assert 0.45 < differing.min() <= differing.max() < 0.55


def test_matching_never_depends_on_the_hash(monkeypatch):
    """One history with names as they are and with one name for everything: equal hits."""

    def play() -> list[list[int]]:
        rng = np.random.default_rng(0)
        manager, hits = BlockManagerImpl(24, 2), []
        for _ in range(300):
            tokens = rng.integers(0, 2, rng.integers(1, 16)).tolist()
            hits.append(hit_ids(manager, tokens))
            publish(manager, tokens)
            manager.prefix_hashes(tokens)
        manager.check_integrity()
        return hits

    expected = play()
    assert sum(map(len, expected)) > 300
    constant = lambda self, tokens, **_: np.zeros((len(tokens) // self.block_size, 2), np.uint64)  # noqa: E731
    monkeypatch.setattr(PrefixHasher, "hashes", constant)
    assert play() == expected


# -- names that grow -------------------------------------------------------------------------------


@given(
    tokens=wide_tokens, size=block_size, stops=st.lists(st.integers(1, 40), max_size=6),
    namespace=st.sampled_from([Namespace(), IMAGE, Namespace("someone", multimodal=((0, "x"),))]),
)  # fmt: skip
def test_a_growing_name_is_that_of_the_whole_prefix(tokens, size, stops, namespace):
    hasher = PrefixHasher(size, b"seed")
    names = hasher.names(tokens, namespace=namespace)
    growing = GrowingName(hasher, namespace)
    array = np.array(tokens, np.int64).astype(np.int32)
    for stop in stops:  # in any order: a preempted sequence has fewer blocks again
        if stop <= len(names):
            assert growing.of(array, stop * size) == names[stop - 1]


def test_a_growing_name_reads_only_what_is_new(monkeypatch):
    hasher, read = PrefixHasher(4, b"seed"), []
    sums = PrefixHasher.block_sums

    def count(self, tokens, namespace, start=0):
        read.append((start, len(tokens)))
        return sums(self, tokens, namespace, start)

    monkeypatch.setattr(PrefixHasher, "block_sums", count)
    growing, tokens = GrowingName(hasher), np.arange(100, dtype=np.int32)
    assert growing.of(tokens, 40) == growing.of(tokens, 40)
    growing.of(tokens, 48)
    assert read == [(0, 40), (40, 8)]
