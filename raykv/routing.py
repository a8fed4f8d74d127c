"""Choosing a rank for a sequence, and the books that this takes (the seed's section 5.3)."""

from __future__ import annotations

import threading
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from raykv.config import PoolConfig
from raykv.core.kv_cache_manager import NO_ROOM, Room
from raykv.core.namespace import Namespace
from raykv.core.prefix_hash import PrefixHasher
from raykv.core.sequence import Sequence
from raykv.core.tokens import TokenIds, as_tokens
from raykv.engine.params import GenerationRequest, TokenOutput
from raykv.errors import ConfigError, IntegrityError
from raykv.prefix_digest import PrefixDigest
from raykv.routing_policy import RankView, RoutingPolicy, Wanted, make_policy


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as routing sees it, read once and then weighed against every rank.

    Attributes:
        num_tokens: its length.
        names: of its full blocks; none if the policy does not want hits.
        num_reusable_blocks: blocks that a hit can cover: at least one token is left to compute.
    """

    num_tokens: int
    names: SequenceOf[bytes]
    num_reusable_blocks: int


@dataclass(slots=True, eq=False)
class Charge:
    """What a request that is under way adds to its rank; falls to nothing as it goes on.

    Attributes:
        rank: the rank that it was sent to.
        num_blocks: blocks promised to it, until the rank's counters show them.
        num_prefill_tokens: tokens to compute before its first one.
        num_new_tokens: tokens that may still be produced.
        num_hit_tokens: tokens that the rank was believed to have cached.
        digest: what was believed of the rank: another one since, if its cache was lost since.
    """

    rank: int
    num_blocks: int
    num_prefill_tokens: int
    num_new_tokens: int
    num_hit_tokens: int
    digest: PrefixDigest


class Choice:
    """Ranks for the sequences of one call; what it gave away counts against the later ones.

    Args:
        router: whose policy decides.
        views: the ranks at the beginning of the call.
    """

    def __init__(self, router: Router, views: list[RankView]) -> None:
        self._router = router
        self._views = views
        self._num_singles = [view.room.num_free_single_blocks for view in views]
        self._usable = _usable(views, self._num_singles)
        self._taken: list[tuple[int, Prompt]] = []

    def take(self, sequence: Sequence, num_tokens: int) -> int:
        """The rank for one more sequence, which will hold ``num_tokens`` tokens."""
        router, size = self._router, self._router.block_size
        wanted = Wanted(num_tokens, size, can_wait=False)
        if router.counts_hits:
            prompt = router.read(sequence.token_ids, sequence.namespace)
            router.look_up(self._views, prompt)
        rank = router.ask(self._usable, wanted)
        view = self._views[rank]
        num_blocks = wanted.num_blocks
        if router.counts_hits:
            num_blocks -= view.num_hit_tokens // size
            self._taken.append((rank, prompt))
        view.num_promised_blocks += num_blocks
        view.num_work_tokens += num_blocks * size
        self._num_singles[rank] -= 1
        if self._num_singles[rank] == 0:
            self._usable = _usable(self._views, self._num_singles)
        return rank

    def settle(self) -> None:
        """The ranks took what was chosen for them: from now on they should have it cached."""
        for rank, prompt in self._taken:
            self._router.note(rank, prompt)


class Router:
    """Asks a policy for ranks, and keeps the books that it decides by. Safe from any thread.

    Args:
        config: the pool; its ``routing.policy`` is the policy.
        num_ranks: ranks to choose among.

    Attributes:
        policy: decides.
        block_size: tokens per block.
        counts_hits: whether it keeps account of what ranks have cached, since the policy asks.
        debits: per rank, blocks that were promised and do not show in the rank's counters yet.
        work: per rank, tokens of this driver's requests that are to be computed or produced.

    Raises:
        ConfigError: there is no such policy.
    """

    def __init__(self, config: PoolConfig, num_ranks: int) -> None:
        self.policy: RoutingPolicy = make_policy(config.routing.policy)
        self.block_size = config.block_size
        self.debits = [0] * num_ranks
        self.work = [0] * num_ranks
        self._num_total_blocks = config.num_blocks - 1
        self._max_tokens = config.max_tokens_per_sequence
        self._digests = [PrefixDigest(self._num_total_blocks) for _ in range(num_ranks)]
        self.counts_hits = self.policy.wants_hits and config.enable_prefix_cache
        self._hasher = PrefixHasher(config.block_size, config.hash_seed)
        self._open: set[Charge] = set()
        self._lock = threading.Lock()

    # -- your scheduler: allocations --------------------------------------------------------------

    def begin(self, rooms: SequenceOf[Room]) -> Choice:
        """Start choosing for one or more sequences, from what each rank has to give.

        Work is what is in use: a scheduler of one's own does not say what it computes.
        """
        total, size = self._num_total_blocks, self.block_size
        views = [
            RankView(rank, room, debit, (total - room.num_available_blocks + debit) * size)
            for rank, (room, debit) in enumerate(zip(rooms, self.debits, strict=True))
        ]
        return Choice(self, views)

    # -- our engine: requests under way -----------------------------------------------------------

    def read_all(self, requests: SequenceOf[GenerationRequest]) -> list[Prompt]:
        """The prompt of each request; that of several samples is read once."""
        prompts: list[Prompt] = []
        last: GenerationRequest | None = None
        for request in requests:
            if (
                last is not None
                and request.token_ids is last.token_ids
                and request.namespace == last.namespace
            ):
                prompts.append(prompts[-1])
            else:
                prompts.append(self.read(request.token_ids, request.namespace))
            last = request
        return prompts

    def place(
        self,
        requests: SequenceOf[GenerationRequest],
        prompts: SequenceOf[Prompt],
        rooms: SequenceOf[Room],
        rank: int | None,
    ) -> list[Charge]:
        """Choose a rank for each request, samples of one prompt together, and charge it there.

        Args:
            requests: what is sent.
            prompts: theirs; see ``read_all``.
            rooms: what each rank has to give.
            rank: where they are to go; None lets the policy choose.

        If the policy raises, nothing is charged.
        """
        charges: list[Charge] = []
        is_given = rank is not None
        try:
            for request, prompt in zip(requests, prompts, strict=True):
                num_new_tokens = request.params.max_tokens
                if rank is None or (request.sample_index == 0 and not is_given):
                    rank = self.choose(rooms, prompt, num_new_tokens)
                charges.append(self.charge(rank, prompt, num_new_tokens))
        except BaseException:
            for charge in charges:
                self.credit(charge, 0, is_last=True)
            raise
        return charges

    def choose(self, rooms: SequenceOf[Room], prompt: Prompt, num_new_tokens: int) -> int:
        """The rank for a request; ``charge`` it there before the next one is chosen for."""
        views = [
            RankView(rank, room, debit, work)
            for rank, (room, debit, work) in enumerate(
                zip(rooms, self.debits, self.work, strict=True)
            )
        ]
        if self.counts_hits:
            self.look_up(views, prompt)
        num_tokens = min(prompt.num_tokens + num_new_tokens, self._max_tokens)
        wanted = Wanted(num_tokens, self.block_size, can_wait=True)
        singles = [room.num_free_single_blocks for room in rooms]
        return self.ask(_usable(views, singles), wanted)

    def charge(self, rank: int, prompt: Prompt, num_new_tokens: int) -> Charge:
        """Note that a request goes to a rank, which will then have its prompt."""
        num_new_tokens = max(0, min(num_new_tokens, self._max_tokens - prompt.num_tokens))
        num_blocks = -(-(prompt.num_tokens + num_new_tokens) // self.block_size)
        with self._lock:
            digest = self._digests[rank]
            num_hits = self._num_hits(rank, prompt)
            num_hit_tokens = num_hits * self.block_size
            charge = Charge(
                rank,
                num_blocks - num_hits,
                prompt.num_tokens - num_hit_tokens,
                num_new_tokens,
                num_hit_tokens,
                digest,
            )
            digest.note(prompt.names)
            self.debits[rank] += charge.num_blocks
            self.work[rank] += charge.num_prefill_tokens + charge.num_new_tokens
            self._open.add(charge)
        return charge

    def credit(self, charge: Charge, num_tokens: int, *, is_last: bool) -> None:
        """A request produced tokens, its first ones or more, or has ended, however it did."""
        with self._lock:
            num_new = charge.num_new_tokens if is_last else min(num_tokens, charge.num_new_tokens)
            self.debits[charge.rank] -= charge.num_blocks  # its counters show its blocks now
            self.work[charge.rank] -= charge.num_prefill_tokens + num_new
            charge.num_blocks = charge.num_prefill_tokens = 0
            charge.num_new_tokens -= num_new
            if is_last:
                self._open.discard(charge)

    def learn(self, charge: Charge, request: GenerationRequest, output: TokenOutput) -> None:
        """A finished output tells what its rank had cached, and has now."""
        if not self.counts_hits or output.stop_reason == "abort":
            return
        # The KV of the last token was not computed.
        produced = as_tokens(output.token_ids[:-1])
        tokens = np.concatenate((as_tokens(request.token_ids), produced))
        names = self._hasher.names(tokens, namespace=request.namespace)
        with self._lock:
            if output.num_cached_tokens < charge.num_hit_tokens:
                charge.digest.trim(names, output.num_cached_tokens // self.block_size)
            charge.digest.note(names)

    # -- hits -------------------------------------------------------------------------------------

    def read(self, token_ids: TokenIds, namespace: Namespace) -> Prompt:
        """Name the blocks of a prompt, if the policy wants hits."""
        num_tokens = len(token_ids)
        if not self.counts_hits:
            return Prompt(num_tokens, (), 0)
        names = self._hasher.names(token_ids, namespace=namespace)
        return Prompt(num_tokens, names, max(0, num_tokens - 1) // self.block_size)

    def note(self, rank: int, prompt: Prompt) -> None:
        """A rank will have a prompt cached."""
        with self._lock:
            self._digests[rank].note(prompt.names)

    def forget(self, rank: int) -> None:
        """A rank has lost its cache, or was lost with it."""
        with self._lock:
            self._digests[rank] = PrefixDigest(self._num_total_blocks)

    def look_up(self, views: list[RankView], prompt: Prompt) -> None:
        """Fill in how much of a prompt each rank should have; what a lost rank had is gone."""
        with self._lock:
            for view in views:
                if view.room == NO_ROOM:
                    self._digests[view.rank] = PrefixDigest(self._num_total_blocks)
                view.num_hit_tokens = self._num_hits(view.rank, prompt) * self.block_size

    def ask(self, views: list[RankView], wanted: Wanted) -> int:
        """What the policy chooses.

        Raises:
            ConfigError: it chose a rank that does not exist.
        """
        rank = self.policy.choose(views, wanted)
        if not 0 <= rank < len(self.debits):
            raise ConfigError(
                f"routing.policy {type(self.policy).__name__} chose rank {rank!r}, but ranks are "
                f"0..{len(self.debits) - 1}: let it return the `rank` of a view that it was given"
            )
        return rank

    def check_integrity(self) -> None:
        """What ranks are charged with is what their open charges add up to.

        Raises:
            IntegrityError: it is not, or a digest is out of order.
        """
        with self._lock:
            debits, work = [0] * len(self.debits), [0] * len(self.work)
            for charge in self._open:
                debits[charge.rank] += charge.num_blocks
                work[charge.rank] += charge.num_prefill_tokens + charge.num_new_tokens
            if (debits, work) != (self.debits, self.work):
                raise IntegrityError(
                    f"router: debits {self.debits} and work {self.work}, but open charges add up "
                    f"to {debits} and {work}"
                )
            for digest in self._digests:
                digest.check_integrity()

    def _num_hits(self, rank: int, prompt: Prompt) -> int:
        return min(self._digests[rank].num_known(prompt.names), prompt.num_reusable_blocks)


def _usable(views: list[RankView], num_singles: list[int]) -> list[RankView]:
    """The ranks that can admit something, or else those that are not lost, or else all."""
    usable = [view for view, singles in zip(views, num_singles, strict=True) if singles > 0]
    return usable or [view for view in views if view.room != NO_ROOM] or views
