"""Hypothesis strategies for the core's tests.

Everything is tiny on purpose: with two tokens, blocks of one to four tokens and a pool of a few
blocks, prefixes collide, pools run full and chains are evicted within a handful of steps.
"""

from __future__ import annotations

from hypothesis import strategies as st

from raykv.core import Namespace

from .reference import NamespaceFields

MAX_TOKENS = 20

tokens = st.lists(st.integers(0, 1), max_size=MAX_TOKENS)
# Long runs of one token make chains that grow in place; the tail makes them branch.
chains = st.builds(
    lambda head, tail: [0] * head + tail,
    st.integers(0, MAX_TOKENS),
    st.lists(st.integers(0, 2), max_size=6),
)
token_ids = st.one_of(tokens, chains)
more_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=8)

any_int32 = st.integers(-(2**31), 2**31 - 1)
wide_tokens = st.lists(st.one_of(any_int32, st.integers(0, 2)), max_size=MAX_TOKENS)

num_blocks = st.integers(2, 24)
block_size = st.integers(1, 4)
hash_seeds = st.binary(min_size=1, max_size=32)

_images = st.lists(
    st.tuples(st.integers(0, 11), st.sampled_from([b"cat", b"dog"])),
    max_size=2,
    unique_by=lambda item: item[0],
).map(lambda items: tuple(sorted(items)))

namespace_fields = st.one_of(
    st.just(NamespaceFields()),
    st.just(NamespaceFields()),
    st.sampled_from(
        [
            NamespaceFields(tenant="a"),
            NamespaceFields(lora="a"),
            NamespaceFields(weights_version=1),
        ]
    ),
    st.builds(NamespaceFields, multimodal=_images),
)


def real_namespace(fields: NamespaceFields) -> Namespace:
    """The real manager's namespace for the reference's."""
    return Namespace(
        tenant=fields.tenant,
        lora=fields.lora,
        weights_version=fields.weights_version,
        multimodal=fields.multimodal,
    )
