"""Which prefixes are the same state, and which only look alike."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from raykv.core import CheckedPrefix, Namespace
from raykv.core.checked_prefix import same_prefix

TOKENS = [5, 6, 7, 8]


def prefix(num_tokens=4, tokens=TOKENS, **namespace):
    return CheckedPrefix(np.array(tokens, np.int32).tobytes(), num_tokens, Namespace(**namespace))


def test_the_tokens_behind_the_prefix_do_not_count():
    assert prefix(3).equals(prefix(3, [5, 6, 7, 99]))
    assert prefix(3).equals(prefix(3, [5, 6, 7]))
    assert prefix(3, [5, 6, 7]).equals(prefix(3))


@pytest.mark.parametrize(
    "other",
    [
        prefix(3),
        prefix(4, [5, 6, 7, 9]),
        prefix(4, [0, 6, 7, 8]),
        prefix(tenant="x"),
        prefix(lora="x"),
        prefix(weights_version=1),
        prefix(multimodal=((1, "cat"),)),
    ],
)
def test_another_length_token_or_namespace_is_another_prefix(other):
    assert not prefix().equals(other)
    assert not other.equals(prefix())
    assert other.equals(other)


def test_an_image_counts_only_inside_the_prefix():
    cat, dog = (prefix(2, multimodal=((3, name),)) for name in ("cat", "dog"))
    assert cat.equals(dog)
    assert cat.equals(prefix(2))
    assert not prefix(4, multimodal=((3, "cat"),)).equals(prefix(4, multimodal=((3, "dog"),)))


def test_trailing_zeros_are_tokens():
    assert not prefix(2, [5, 0]).equals(prefix(1, [5, 0]))
    assert not prefix(1, [5]).equals(prefix(2, [5, 0]))


def test_what_is_not_asked_is_not_checked_and_what_is_not_known_is_not_believed():
    assert same_prefix(prefix(), None)
    assert same_prefix(None, None)
    assert same_prefix(prefix(), prefix())
    assert not same_prefix(None, prefix())
    assert not same_prefix(prefix(3), prefix())


@pytest.mark.parametrize("num_tokens", [-1, 5])
def test_a_snapshot_shorter_than_the_prefix_is_refused(num_tokens):
    with pytest.raises(ValueError, match="16 bytes"):
        prefix(num_tokens)


def test_it_pickles():
    copy = pickle.loads(pickle.dumps(prefix(3, tenant="x")))  # noqa: S301 - our own bytes
    assert copy.equals(prefix(3, tenant="x"))
