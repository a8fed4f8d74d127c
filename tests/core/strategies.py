"""Hypothesis strategies for the core's tests.

Everything is tiny on purpose: with two tokens, blocks of one to four tokens and a pool of a few
blocks, prefixes collide, pools run full and chains are evicted within a handful of steps.
"""

from __future__ import annotations

from hypothesis import strategies as st

from raykv.core import Namespace

from .reference import NamespaceFields

MAX_TOKENS = 14

# Long runs of one token make chains that grow in place; the tail makes them branch.
chains = st.builds(
    lambda head, tail: [0] * head + tail,
    st.integers(0, MAX_TOKENS),
    st.lists(st.integers(0, 1), max_size=5),
)
token_ids = st.one_of(chains, chains, st.lists(st.integers(0, 1), max_size=MAX_TOKENS))
more_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=8)

any_int32 = st.integers(-(2**31), 2**31 - 1)
wide_tokens = st.lists(st.one_of(any_int32, st.integers(0, 2)), max_size=MAX_TOKENS)

num_blocks = st.one_of(st.integers(2, 24), st.integers(8, 24))
block_size = st.integers(1, 4)
hash_seeds = st.binary(min_size=1, max_size=32)

_images = st.lists(
    st.tuples(st.integers(0, 11), st.sampled_from([b"cat", b"dog"])),
    max_size=2,
    unique_by=lambda item: item[0],
).map(lambda items: tuple(sorted(items)))

# Mostly the default one, or chains of different namespaces would seldom meet.
namespace_fields = st.one_of(
    st.sampled_from(
        [
            *[NamespaceFields()] * 6,
            NamespaceFields(tenant="a"),
            NamespaceFields(lora="a"),
            *[NamespaceFields(weights_version=1)] * 2,
            NamespaceFields(multimodal=((5, b"cat"),)),
            NamespaceFields(multimodal=((5, b"dog"),)),
        ]
    ),
    st.sampled_from([NamespaceFields()]),
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
