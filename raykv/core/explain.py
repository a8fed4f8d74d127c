"""Why a hit went no further: the prefix cache's answer for one prompt."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .namespace import Namespace
from .prefix_cache import path_length
from .runs import Run

if TYPE_CHECKING:
    from .prefix_cache import PrefixCache


class TokenRow(Protocol):
    """What is asked of a running sequence."""

    seq_id: Hashable
    namespace: Namespace

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Its tokens, int32 [n]."""


MissReason: TypeAlias = Literal[
    "complete", "last_token_kept", "not_computed_yet", "evicted", "diverged", "other_namespace",
    "never_seen", "cache_off",
]  # fmt: skip

_NUM_SHOWN = 8  # tokens on each side of a divergence
_MAX_NEIGHBOURS = 10_000


@dataclass(frozen=True, slots=True)
class MissReport:
    """Why the prefix cache gave no more.

    Attributes:
        reason: ``complete``: every full block was hit; ``last_token_kept``: the last block was
            there, but one token must be computed; ``not_computed_yet``: a running sequence is
            about to compute it; ``evicted``: it was cached and had to go; ``diverged``: the cached
            text goes on otherwise; ``other_namespace``: it is cached, for somebody else;
            ``never_seen``; ``cache_off``.
        num_hit_tokens: tokens that were hit.
        token_position: the first token at which prompt and cache differ; for the other reasons the
            first token that was not hit.
        cached_tokens: for ``diverged``, what the cache has from there on.
        prompt_tokens: what the prompt has from there on.
        namespace: for ``other_namespace``, whose it is.
        seq_id: for ``not_computed_yet``, who is about to compute it.
    """

    reason: MissReason
    num_hit_tokens: int
    token_position: int
    cached_tokens: tuple[int, ...] = ()
    prompt_tokens: tuple[int, ...] = ()
    namespace: Namespace | None = None
    seq_id: Hashable = None

    def __str__(self) -> str:
        return f"hit {self.num_hit_tokens} tokens: " + _TEXTS[self.reason].format(
            at=self.token_position,
            cached=list(self.cached_tokens),
            prompt=list(self.prompt_tokens),
            namespace=self.namespace,
            who="another sequence" if self.seq_id is None else f"sequence {self.seq_id!r}",
        )


_TEXTS: dict[MissReason, str] = {
    "complete": "all full blocks",
    "last_token_kept": "all but the last block, since one token must be computed",
    "not_computed_yet": "{who} was computing the next block just then",
    "evicted": "the next block was cached, but had to make room",
    "diverged": "at token {at} the cache goes on with {cached}, the prompt with {prompt}",
    "other_namespace": "more is cached in {namespace}, which must not be shared",
    "never_seen": "what follows was never cached, or so long ago that it is forgotten",
    "cache_off": "the prefix cache is switched off",
}


def explain(
    cache: PrefixCache,
    tokens: NDArray[np.int32],
    namespace: Namespace,
    num_hit_blocks: int,
    others: Iterable[TokenRow] = (),
) -> MissReport:
    """Say why a prompt's hit ended after ``num_hit_blocks`` blocks.

    Args:
        cache: where it was looked up.
        tokens: int32 [n], the prompt.
        namespace: whose it is.
        num_hit_blocks: blocks that it was given.
        others: running sequences that may be computing the same text.
    """
    size, hit = cache.block_size, num_hit_blocks * cache.block_size
    if num_hit_blocks >= (len(tokens) - 1) // size:
        kept = len(tokens) % size == 0
        return MissReport("last_token_kept" if kept else "complete", hit, hit)
    following = tokens[: hit + size]
    for other in others:
        if _is_computing(other, following, namespace):
            return MissReport("not_computed_yet", hit, hit, seq_id=other.seq_id)
    path = cache.find(tokens[:hit], namespace)
    run, at = path[-1] if path else (cache.roots.get(namespace.root), 0)
    if run is not None and path_length(path) == num_hit_blocks:
        if cache.was_evicted(run, at, following[hit:], namespace.items(hit, hit + size)):
            return MissReport("evicted", hit, hit)
        report = _divergence(run, at, tokens[hit : hit + size], hit)
        if report is not None:
            return report
    return _elsewhere(cache, tokens, hit) or MissReport("never_seen", hit, hit)


def _is_computing(other: TokenRow, following: NDArray[np.int32], namespace: Namespace) -> bool:
    stop = len(following)
    return (
        other.namespace.root == namespace.root
        and len(other.token_ids) >= stop
        and other.namespace.items(0, stop) == namespace.items(0, stop)
        and np.array_equal(other.token_ids[:stop], following)
    )


def _divergence(run: Run, at: int, prompt: NDArray[np.int32], hit: int) -> MissReport | None:
    """The cached neighbour that shares most tokens with the prompt's next block."""
    best, common = None, -1
    for block in _next_blocks(run, at, len(prompt)):
        same = int((block != prompt).argmax()) if (block != prompt).any() else len(prompt)
        if same > common:
            best, common = block, same
    # Right at the root everything else is a neighbour; that says nothing unless tokens are shared.
    if best is None or (hit == 0 and common == 0):
        return None
    if common == len(prompt):  # published since
        return MissReport("not_computed_yet", hit, hit)
    return MissReport(
        "diverged",
        hit,
        hit + common,
        cached_tokens=tuple(best[common : common + _NUM_SHOWN].tolist()),
        prompt_tokens=tuple(prompt[common : common + _NUM_SHOWN].tolist()),
    )


def _next_blocks(run: Run, at: int, size: int) -> Iterator[NDArray[np.int32]]:
    """What the cache has behind the first ``at`` blocks of a run."""
    if at < run.length:
        yield np.frombuffer(bytes(run.tokens[4 * at * size : 4 * (at + 1) * size]), np.int32)
    for (offset, first, _), _ in zip(run.children, range(_MAX_NEIGHBOURS), strict=False):
        if offset == at:
            yield np.frombuffer(first, np.int32)


def _elsewhere(cache: PrefixCache, tokens: NDArray[np.int32], hit: int) -> MissReport | None:
    for root in cache.roots:
        other = Namespace(*root)
        if path_length(cache.find(tokens, other)) * cache.block_size > hit:
            return MissReport("other_namespace", hit, hit, namespace=other)
    return None
