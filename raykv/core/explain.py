"""Why a hit went no further: the prefix cache's answer for one prompt."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .namespace import MultimodalItems, Namespace
from .runs import Root, Run, path_length

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
    "never_seen", "cache_off", "no_checkpoint", "no_state_slot", "stride",
    "host_unavailable", "host_stale", "host_corrupt", "host_failed", "host_cancelled",
    "host_load_late",
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
            ``never_seen``; ``cache_off``. Of models with recurrent state, where KV is cached up to
            ``token_position``: ``no_checkpoint``: no checkpoint stands there; ``no_state_slot``:
            no slot was to be had; ``stride``: the policy may not use what stands there, or
            checkpoints are further apart. Of the host tier, from whose blocks on the prompt was
            computed: ``host_unavailable``: it did not answer in time; ``host_corrupt``: a checksum
            did not fit; ``host_stale``: the block was given to somebody else meanwhile;
            ``host_failed``, ``host_cancelled``, ``host_load_late``: its copy did so.
        num_hit_tokens: tokens that were hit.
        token_position: the first token at which prompt and cache differ, in tokens or images; for
            the other reasons the first token that was not hit, or whose KV is not cached.
        cached_tokens: for ``diverged``, what the cache has from there on in its block.
        prompt_tokens: what the prompt has from there on.
        namespace: for ``other_namespace``, whose it is.
        seq_id: for ``not_computed_yet``, who is about to compute it.
        num_host_tokens: of the tokens that were hit, those that came from the host.
    """

    reason: MissReason
    num_hit_tokens: int
    token_position: int
    cached_tokens: tuple[int, ...] = ()
    prompt_tokens: tuple[int, ...] = ()
    namespace: Namespace | None = None
    seq_id: Hashable = None
    num_host_tokens: int = 0

    def __str__(self) -> str:
        text = _TEXTS[self.reason]
        if self.reason == "diverged" and self.cached_tokens[:1] == self.prompt_tokens[:1]:
            text = "at token {at} the same tokens stand for another image"
        host = f" ({self.num_host_tokens} from the host)" if self.num_host_tokens else ""
        return f"hit {self.num_hit_tokens} tokens{host}: " + text.format(
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
    "no_checkpoint": "KV is cached up to token {at}, but no checkpoint of the state behind the hit",
    "no_state_slot": "KV is cached up to token {at}, but no slot was to be had for the state; "
    "linear_state.num_slots says how many there are",
    "stride": "KV is cached up to token {at}, but no checkpoint behind the hit may be used yet: "
    "they are linear_state.stride_tokens apart, and linear_state.match says which",
    "host_unavailable": "the host tier did not answer in time, so the rest was computed",
    "host_stale": "the host block at token {at} was given to others while it was read",
    "host_corrupt": "the checksum of the host block at token {at} did not fit",
    "host_failed": "the copy of the host block at token {at} failed",
    "host_cancelled": "the copy from the host was called off",
    "host_load_late": "the copy from the host took too long",
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
    following = tokens[: hit + size]
    if len(following) < hit + size:
        return MissReport("complete", hit, hit)
    is_cached = path_length(cache.find(following, namespace)) > num_hit_blocks
    if is_cached and len(following) == len(tokens):
        return MissReport("last_token_kept", hit, hit)
    for other in others:
        if _is_computing(other, following, namespace):
            return MissReport("not_computed_yet", hit, hit, seq_id=other.seq_id)
    if is_cached:  # published since
        return MissReport("not_computed_yet", hit, hit)
    return (
        _nearby(cache, following, namespace, num_hit_blocks)
        or _elsewhere(cache, tokens, namespace, hit)
        or MissReport("never_seen", hit, hit)
    )


def _is_computing(other: TokenRow, following: NDArray[np.int32], namespace: Namespace) -> bool:
    stop = len(following)
    return (
        other.namespace.root == namespace.root
        and len(other.token_ids) >= stop
        and other.namespace.items(0, stop) == namespace.items(0, stop)
        and np.array_equal(other.token_ids[:stop], following)
    )


def _nearby(
    cache: PrefixCache, following: NDArray[np.int32], namespace: Namespace, num_hit_blocks: int
) -> MissReport | None:
    """What happened right behind the hit, or stands there instead."""
    size, hit = cache.block_size, num_hit_blocks * cache.block_size
    path = cache.find(following[:hit], namespace)
    if path_length(path) < num_hit_blocks:
        return None  # what was hit is gone itself
    run: Run  # a tree without runs is forgotten, but not what was evicted from it
    run, at = path[-1] if path else (cache.roots.get(namespace.root) or Root(namespace.root), 0)
    prompt, items = following[hit:], namespace.items(hit, hit + size)
    if cache.was_evicted(run, at, prompt, items):
        return MissReport("evicted", hit, hit)
    return _divergence(run, at, prompt, items, hit)


def _divergence(
    run: Run, at: int, prompt: NDArray[np.int32], items: MultimodalItems, hit: int
) -> MissReport | None:
    """The cached neighbour that shares most tokens with the prompt's next block."""
    size = len(prompt)
    blocks = list(_next_blocks(run, at, hit, size))
    if not blocks:
        return None
    rows = np.frombuffer(b"".join(tokens for tokens, _ in blocks), np.int32).reshape(-1, size)
    differs = rows != prompt
    num_equal = np.where(differs.any(axis=1), differs.argmax(axis=1), size)
    # Right at the root everything else is a neighbour; that says nothing unless tokens are shared.
    if hit == 0 and not num_equal.any():
        return None
    common = np.array([_first_difference(items, theirs, hit + size) - hit for _, theirs in blocks])
    common = np.minimum(common, num_equal)
    best = int((common * (size + 1) + num_equal).argmax())
    first = int(common[best])
    return MissReport(
        "diverged",
        hit,
        hit + first,
        cached_tokens=tuple(rows[best, first : first + _NUM_SHOWN].tolist()),
        prompt_tokens=tuple(prompt[first : first + _NUM_SHOWN].tolist()),
    )


def _next_blocks(
    run: Run, at: int, start: int, size: int
) -> Iterator[tuple[bytes, MultimodalItems]]:
    """What the cache has behind the first ``at`` blocks of a run: tokens and items."""
    if at < run.length:
        items = tuple(item for item in run.items if start <= item[0] < start + size)
        yield run.block(at), items
    for offset, first, items in islice(run.children, _MAX_NEIGHBOURS):
        if offset == at:
            yield first, items


def _first_difference(ours: MultimodalItems, theirs: MultimodalItems, stop: int) -> int:
    """The first token offset at which items differ, ``stop`` if they do not."""
    for mine, other in zip_longest(ours, theirs, fillvalue=(stop, 0)):
        if mine != other:
            return min(mine[0], other[0])
    return stop


def _elsewhere(
    cache: PrefixCache, tokens: NDArray[np.int32], namespace: Namespace, hit: int
) -> MissReport | None:
    for root in cache.roots:
        other = Namespace(*root, multimodal=namespace.multimodal)
        if path_length(cache.find(tokens, other)) * cache.block_size > hit:
            return MissReport("other_namespace", hit, hit, namespace=other)
    return None
