"""Equal tokens of another tenant, LoRA, weights version or image never match."""

from __future__ import annotations

import itertools
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.core import DEFAULT, BlockManagerImpl, Namespace

from .helpers import hit_ids, publish, run_of, start
from .strategies import namespace_fields, real_namespace

TOKENS = run_of(2, 1, 2, 3, 4)
OTHERS = {
    "default": DEFAULT,
    "tenant": Namespace(tenant="x"),
    "another tenant": Namespace(tenant="y"),
    "lora": Namespace(lora="x"),
    "tenant and lora": Namespace(tenant="x", lora="x"),
    "swapped": Namespace(tenant="x", lora="y"),
    "swapped back": Namespace(tenant="y", lora="x"),
    "weights version": Namespace(weights_version=1),
    "image at 0": Namespace(multimodal=((0, "cat"),)),
    "other image at 0": Namespace(multimodal=((0, "dog"),)),
    "image as bytes": Namespace(multimodal=((0, b"cat"),)),
    "image at 1": Namespace(multimodal=((1, "cat"),)),
    "two images": Namespace(multimodal=((0, "cat"), (1, "dog"))),
    "number as tenant": Namespace(tenant="1"),
    "number as lora": Namespace(lora="1"),
}
PAIRS = list(itertools.permutations(OTHERS, 2))


@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_equal_tokens_in_another_namespace_never_match(theirs, ours):
    manager = BlockManagerImpl(12, 2)
    publish(manager, TOKENS, OTHERS[theirs])
    assert hit_ids(manager, TOKENS, OTHERS[ours]) == []
    assert hit_ids(manager, TOKENS, OTHERS[theirs]) == [1, 2, 3, 4]
    manager.check_integrity()


@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_equal_tokens_in_another_namespace_have_other_hashes(theirs, ours):
    manager = BlockManagerImpl(12, 2, hash_seed=b"seed")
    names = {key: manager.prefix_hashes(TOKENS, namespace=OTHERS[key]) for key in (theirs, ours)}
    assert set(names[theirs]).isdisjoint(names[ours])


def test_lora_x_is_not_tenant_x():
    manager = BlockManagerImpl(8, 2)
    publish(manager, TOKENS[:4], Namespace(lora="x"))
    assert hit_ids(manager, TOKENS, Namespace(tenant="x")) == []
    assert Namespace(lora="x") != Namespace(tenant="x")


def test_names_that_concatenate_alike_are_told_apart():
    manager = BlockManagerImpl(8, 2)
    publish(manager, TOKENS[:4], Namespace(tenant="ab", lora="c"))
    assert hit_ids(manager, TOKENS, Namespace(tenant="a", lora="bc")) == []


@pytest.mark.parametrize("offset", range(8))
def test_an_image_in_the_middle_of_a_run_counts_from_its_block_on(offset):
    manager = BlockManagerImpl(24, 2)
    cat = Namespace(multimodal=((offset, "cat"),))
    dog = Namespace(multimodal=((offset, "dog"),))
    with_cat = publish(manager, TOKENS, cat)
    assert hit_ids(manager, TOKENS, dog) == with_cat[: offset // 2]
    assert hit_ids(manager, TOKENS) == with_cat[: offset // 2]
    assert hit_ids(manager, TOKENS, cat) == with_cat
    with_dog = publish(manager, TOKENS, dog)
    assert with_dog[: offset // 2] == with_cat[: offset // 2]
    assert set(with_dog[offset // 2 :]).isdisjoint(with_cat)
    assert hit_ids(manager, TOKENS, cat) == with_cat
    assert hit_ids(manager, TOKENS, dog) == with_dog
    manager.check_integrity()


@pytest.mark.parametrize("offset", range(8))
def test_an_image_in_the_middle_of_a_run_without_one_ends_the_match(offset):
    manager = BlockManagerImpl(24, 2)
    plain = publish(manager, TOKENS)
    cat = Namespace(multimodal=((offset, "cat"),))
    assert hit_ids(manager, TOKENS, cat) == plain[: offset // 2]


def test_the_second_of_two_images_counts_too():
    manager = BlockManagerImpl(24, 2)
    tokens = run_of(2, 1, 2, 3, 4, 5)
    cached = publish(manager, tokens, Namespace(multimodal=((3, "cat"), (6, "dog"))))
    assert hit_ids(manager, tokens, Namespace(multimodal=((3, "cat"), (6, "cow")))) == cached[:3]
    assert hit_ids(manager, tokens, Namespace(multimodal=((3, "cat"),))) == cached[:3]
    assert hit_ids(manager, tokens, Namespace(multimodal=((6, "dog"),))) == cached[:1]
    assert hit_ids(manager, tokens, Namespace(multimodal=((3, "cat"), (7, "dog")))) == cached[:3]


def test_an_image_beyond_the_tokens_does_not_count():
    manager = BlockManagerImpl(24, 2)
    cached = publish(manager, TOKENS)
    assert hit_ids(manager, TOKENS, Namespace(multimodal=((8, "cat"),))) == cached


def test_an_image_in_a_run_that_grew_piece_by_piece_counts():
    manager = BlockManagerImpl(24, 2)
    cat, dog = (Namespace(multimodal=((5, hash_),)) for hash_ in ("cat", "dog"))
    blocks = start(manager, TOKENS, cat)
    for num_tokens in (2, 4, 6, 8):
        manager.cache(TOKENS[:num_tokens], blocks, namespace=cat)
    assert hit_ids(manager, TOKENS, cat) == [1, 2, 3, 4]
    assert hit_ids(manager, TOKENS, dog) == [1, 2]


def test_an_image_cut_off_by_eviction_is_forgotten():
    manager = BlockManagerImpl(5, 2)
    cat = Namespace(multimodal=((5, "cat"),))
    publish(manager, TOKENS, cat)
    manager.allocate(2).release()  # evicts the block with the image and the one behind it
    assert hit_ids(manager, TOKENS, cat) == [1, 2]
    plain = publish(manager, TOKENS)
    assert hit_ids(manager, TOKENS) == plain
    assert hit_ids(manager, TOKENS, cat) == plain[:2]
    manager.check_integrity()


def test_images_may_come_in_any_order():
    one = Namespace(multimodal=((6, "dog"), (1, "cat")))
    other = Namespace(multimodal=((1, "cat"), (6, "dog")))
    assert one == other
    assert hash(one) == hash(other)


def test_namespaces_are_values():
    assert Namespace() == DEFAULT
    assert len({Namespace(tenant="a"), Namespace(tenant="a"), Namespace(lora="a")}) == 2
    for namespace in OTHERS.values():
        assert pickle.loads(pickle.dumps(namespace)) == namespace  # noqa: S301 - our own bytes
    with pytest.raises(AttributeError):
        DEFAULT.tenant = "x"


@pytest.mark.parametrize("items", [((-1, "cat"),), ((0, None),), ((0, 1.5),)])
def test_impossible_images_are_refused(items):
    with pytest.raises(ValueError):
        Namespace(multimodal=items)


@given(st.lists(namespace_fields, min_size=2, max_size=4, unique=True))
def test_whatever_the_namespaces_each_matches_only_what_it_published(fields):
    """Images apart, which share the blocks before them: see above."""
    roots = {(field.tenant, field.lora, field.weights_version) for field in fields}
    manager = BlockManagerImpl(40, 2)
    owned = {root: publish(manager, TOKENS, Namespace(*root)) for root in sorted(roots)}
    for root, ids in owned.items():
        assert hit_ids(manager, TOKENS, Namespace(*root)) == ids
    for field in fields:
        root = (field.tenant, field.lora, field.weights_version)
        hit = hit_ids(manager, TOKENS, real_namespace(field))
        first_image = min([offset for offset, _ in field.multimodal], default=len(TOKENS))
        assert hit == owned[root][: first_image // 2]
