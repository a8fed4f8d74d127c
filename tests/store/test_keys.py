"""Keys that outlive the pool: equal everywhere, different for whatever differs."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.core import Namespace
from raykv.errors import ConfigError
from raykv.memory.spec import KVSpec
from raykv.store import KVKeys, is_storable, layout_name, model_fingerprint

KEYS = KVKeys(b"model", 4)
FIRST = "a818de28a99bf7aef6a8d55a7a1ebdcd9a0ed0ade005af421db0143301a24272"
SECOND = "b5f8a30db6bbd7c06f0f4f0bf30c6c74acdcff8feb82c5da17228bd55c376f83"
FINGERPRINT = "2bc5182ff7e32d8e408d6a22a5a0973e136446daa88cce9226ac2657db7be4ad"

tokens = st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 2), max_size=20)


def test_there_is_one_key_of_32_bytes_per_full_block():
    for num_tokens in range(20):
        keys = KEYS.keys(range(num_tokens))
        assert len(keys) == num_tokens // 4
        assert all(isinstance(key, bytes) and len(key) == 32 for key in keys)


@given(first=tokens, more=tokens, size=st.integers(1, 5))
def test_a_key_depends_on_the_tokens_up_to_its_blocks_end_only(first, more, size):
    keys = KVKeys(b"model", size)
    prefix = keys.keys(first)
    assert keys.keys([*first, *more])[: len(prefix)] == prefix


@given(first=tokens, second=tokens, size=st.integers(1, 5))
def test_different_prefixes_have_different_keys(first, second, size):
    named = {}
    for row in (first, second, [*first, 0, 0, 0, 0, 0], second[1:]):
        for index, key in enumerate(KVKeys(b"model", size).keys(row)):
            named.setdefault(key, set()).add(tuple(row[: (index + 1) * size]))
    assert all(len(prefixes) == 1 for prefixes in named.values())


def test_keys_stay_what_they_are_for_ever():
    """A change here makes every store's content worthless: change the format's number, too."""
    namespace = Namespace("x", "y", 7, ((1, "cat"), (5, b"dog"), (5, 3)))
    assert KEYS.keys(range(4))[0].hex() == FIRST
    assert KEYS.keys(range(8), namespace)[1].hex() == SECOND


def test_keys_are_equal_in_every_process():
    code = "from raykv.store import KVKeys; print(KVKeys(b'model', 4).keys(range(8))[1].hex())"
    for hash_seed in ("1", "2"):
        done = subprocess.run(  # noqa: S603 - our own command line
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == KEYS.keys(range(8))[1].hex()


def test_lists_and_arrays_of_any_kind_have_equal_keys():
    row = [0, 1, 2**31 - 1, -1] * 2
    forms = [row, tuple(row), np.array(row), np.array(row, np.int32), np.array(row, ">i4")]
    forms.append(np.repeat(np.array(row, np.int32), 2)[::2])
    assert len({tuple(KEYS.keys(form)) for form in forms}) == 1


def test_whatever_kv_depends_on_is_in_the_key():
    namespaces = [
        Namespace(),
        Namespace(tenant="x"),
        Namespace(lora="x"),
        Namespace(tenant="x", lora="x"),
        Namespace(tenant="xx"),
        Namespace(tenant="a", lora="bloracc"),  # spelled alike without lengths
        Namespace(tenant="alorab", lora="cc"),
        Namespace(tenant="\ud800"),
        Namespace(weights_version=1),
        Namespace(weights_version=-1),
        Namespace(weights_version=2**70),
        *(Namespace(multimodal=items) for items in MULTIMODAL),
    ]
    keys = [KEYS.keys(range(8), namespace)[1] for namespace in namespaces]
    keys += [KVKeys(name, 4).keys(range(8))[1] for name in (b"another", b"model1", b"m")]
    keys += [KVKeys(b"model", 8).keys(range(8))[0], KVKeys(b"model", 2).keys(range(8))[3]]
    assert len(set(keys)) == len(keys)


MULTIMODAL = [
    ((0, "1"),),
    ((0, b"1"),),
    ((0, 1),),
    ((1, "1"),),
    ((0, "1"), (0, "2")),
    ((0, "2"), (0, "1")),
    ((0, "12"),),
    ((0, "1"), (1, "2")),
    ((4, "1"),),
    ((0, "1"), (4, "1")),
]


def test_an_image_counts_from_its_block_on_and_only_in_full_blocks():
    plain = KEYS.keys(range(14))
    image = KEYS.keys(range(14), Namespace(multimodal=((6, "cat"), (12, "tail"))))
    assert [a == b for a, b in zip(plain, image, strict=True)] == [True, False, False]


def test_items_cannot_be_spelled_in_tokens():
    """The bytes of an item, as tokens of a longer row, lead to another key."""
    one = KVKeys(b"model", 1)
    keys = set(one.keys([7], Namespace(multimodal=((0, "x"),))))
    extra = one._items(((0, "x"),))[0]
    rows = [np.frombuffer(extra[i : i + len(extra) // 4 * 4 - 4], "<i4") for i in range(4)]
    assert not keys & {key for row in rows for key in one.keys([7, *row.tolist()])}


def test_fingerprints_tell_layouts_and_weights_apart():
    specs = [
        KVSpec.uniform(2, 2, 4, 16, "float32"),
        KVSpec.uniform(2, 4, 2, 16, "float32"),
        KVSpec.uniform(3, 2, 4, 16, "float32"),
        KVSpec.uniform(2, 2, 4, 8, "float32"),
        KVSpec.uniform(2, 2, 4, 16, "bfloat16"),
    ]
    names = [
        model_fingerprint(layout_name(spec), weights) for spec in specs for weights in (b"a", b"b")
    ]
    assert len(set(names)) == len(names)
    again = layout_name(KVSpec.uniform(2, 2, 4, 16, "float32"))
    assert model_fingerprint(again, b"a") == names[0]
    assert model_fingerprint(again, b"a").hex() == FINGERPRINT


def test_renewed_keys_are_others_for_good():
    keys, same = KVKeys(b"m", 4), KVKeys(b"m", 4)
    before = keys.keys(range(8))
    keys.renew()
    renewed = keys.keys(range(8))
    assert not set(renewed) & set(before)
    assert keys.keys(range(8)) == renewed
    keys.renew()
    assert not set(keys.keys(range(8))) & {*before, *renewed}
    assert same.keys(range(8)) == before


@pytest.mark.parametrize("arguments", [(b"", 4), ("model", 4), (b"model", 0), (b"model", 1.5)])
def test_what_names_no_model_is_refused(arguments):
    with pytest.raises(ConfigError):
        KVKeys(*arguments)


def test_weights_and_layouts_without_a_name_are_refused():
    with pytest.raises(ConfigError, match="weights is empty"):
        model_fingerprint(b"layout", b"")
    with pytest.raises(ConfigError, match="layout is empty"):
        model_fingerprint(b"", b"weights")


def test_only_the_weights_that_a_pool_begins_with_have_a_name_for_others():
    assert is_storable(Namespace("x", "y"))
    assert not is_storable(Namespace("x", "y", weights_version=1))


def test_token_ids_that_are_none_are_refused():
    with pytest.raises(ValueError, match="int32"):
        KEYS.keys([2**31, 1, 1, 1])
