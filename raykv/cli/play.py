"""Playing conversations on a pool: all turns t together, each back on the rank that knows it."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raykv.core.kv_cache_manager import RankStats
from raykv.engine.params import GenerationRequest, SamplingParams, TokenDelta, TokenOutput
from raykv.hierarchy import HierarchyBlockManagerPool
from raykv.host.state_stats import HostStatesStats
from raykv.host.stats import HostTierStats
from raykv.pool import BlockManagerPool

from .console import Update
from .prompts import ChatFormat, Transcript
from .workload import Workload

_DRAIN_S = 30.0  # until what is on its way to the host must be there


@dataclass(frozen=True, slots=True)
class Served:
    """One request and what came of it.

    Attributes:
        conversation: which conversation, by position in the workload.
        turn: which of its turns, from 0.
        prompt: int32 [n], all of it, what the cache supplied included.
        output: the answer.
    """

    conversation: int
    turn: int
    prompt: NDArray[np.int32]
    output: TokenOutput

    @property
    def name(self) -> str:
        """For people."""
        return f"conversation {self.conversation}, turn {self.turn}"


@dataclass(slots=True)
class Phase:
    """All conversations, played once.

    Attributes:
        served: the requests, turn by turn.
        wall_s: seconds from the first submission to the last answer.
        peak: per rank, its counters when it used most blocks.
        drained: per rank, its counters after the last answer, and what it sent on the way.
        hosts: likewise per host tier; none without.
        host_states: likewise, of its checkpoints of recurrent state; none without.
    """

    served: list[Served] = field(default_factory=list)
    wall_s: float = 0.0
    peak: list[RankStats] = field(default_factory=list)
    drained: list[RankStats] = field(default_factory=list)
    hosts: list[HostTierStats] = field(default_factory=list)
    host_states: list[HostStatesStats] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(served.prompt) for served in self.served)

    @property
    def num_hit_tokens(self) -> int:
        """Prompt tokens that the prefix cache supplied."""
        return sum(served.output.num_cached_tokens for served in self.served)

    @property
    def num_host_hit_tokens(self) -> int:
        """Those of the hit tokens that came from host memory."""
        misses = (served.output.miss for served in self.served)
        return sum(miss.num_host_tokens for miss in misses if miss is not None)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were not computed again, 0 to 1."""
        return self.num_hit_tokens / max(self.num_prompt_tokens, 1)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(served.output.token_ids) for served in self.served)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per wall second; prefills, queueing and rounds' ends included."""
        return self.num_generated_tokens / self.wall_s

    @property
    def num_leaked_blocks(self) -> int:
        """Blocks and live state slots that are still held although everything was answered."""
        return sum(
            rank.num_used_blocks + rank.num_pending_blocks + rank.num_live_state_slots
            for rank in self.drained
        )

    @property
    def num_leaked_host_blocks(self) -> int:
        """Host blocks and slots that somebody still holds, and what on the ranks waits for them."""
        waiting = (rank.num_loading_sequences + rank.num_offloading_blocks for rank in self.drained)
        blocks = (host.storing + host.pinned + host.quarantined for host in self.hosts)
        slots = (host.storing + host.pinned + host.quarantined for host in self.host_states)
        return sum(waiting) + sum(blocks) + sum(slots)


class Player:
    """Plays rounds of requests on a pool and counts as they come in.

    Args:
        pool: where to play.
        params: how answers are chosen.
        num_requests: all requests of the phase, for the progress shown.
        update: told about progress.
    """

    def __init__(
        self, pool: BlockManagerPool, params: SamplingParams, num_requests: int, update: Update
    ) -> None:
        self.phase = Phase(peak=[rank.stats for rank in pool.ranks])
        self._pool = pool
        self._params = params
        self._num_requests = num_requests
        self._update = update
        self._num_tokens = 0
        self._began = time.perf_counter()

    def play(self, turn: int, rows: Sequence[tuple[int, list[int], int | None]]) -> list[Served]:
        """Serve one round: (conversation, prompt, dp_rank or None) each, all submitted at once."""
        deltas: queue.SimpleQueue[TokenDelta] = queue.SimpleQueue()
        requests: dict[str, tuple[int, GenerationRequest]] = {}
        by_rank: dict[int | None, list[GenerationRequest]] = {}
        for conversation, prompt, dp_rank in rows:
            [request] = self._pool.make_requests(prompt, self._params)
            requests[request.request_id] = (conversation, request)
            by_rank.setdefault(dp_rank, []).append(request)
        served: dict[str, Served] = {}
        try:
            for dp_rank, group in by_rank.items():
                self._pool.start(group, [deltas.put] * len(group), dp_rank)
            while len(served) < len(requests):
                delta = deltas.get()
                if delta.error is not None:
                    raise delta.error  # noqa: TRY301 - whatever comes, the others are aborted
                self._num_tokens += len(delta.token_ids)
                if delta.output is not None:
                    conversation, request = requests[delta.request_id]
                    one = Served(conversation, turn, request.token_ids, delta.output)
                    served[delta.request_id] = one
                    self.phase.served.append(one)
                self._show()
        except BaseException:
            for name in requests.keys() - served.keys():
                self._pool.abort(name)
            raise
        in_order = [served[name] for name in requests]
        self.phase.served[-len(in_order) :] = in_order
        return in_order

    def finish(self) -> Phase:
        """Stop the clock, let the ranks check their books, and take their last counters.

        Raises:
            IntegrityError: a rank's books do not balance.
        """
        self.phase.wall_s = time.perf_counter() - self._began
        if isinstance(self._pool, HierarchyBlockManagerPool):
            self._pool.wait_for_transfers(_DRAIN_S)
            self.phase.hosts = self._pool.host_stats()
            self.phase.host_states = self._pool.host_state_stats()
        self.phase.drained = list(self._pool.stats().ranks)
        self._pool.check_integrity()
        self._show()
        return self.phase

    def _show(self) -> None:
        """Keep the fullest moment of each rank and report."""
        phase = self.phase
        for index, rank in enumerate(self._pool.ranks):
            if rank.stats.num_used_blocks > phase.peak[index].num_used_blocks:
                phase.peak[index] = rank.stats
        seconds = phase.wall_s or time.perf_counter() - self._began
        self._update(
            len(phase.served) / self._num_requests,
            f"{len(phase.served)}/{self._num_requests} answers, "
            f"{self._num_tokens / seconds:.1f} tokens/s, hit rate {phase.hit_rate:.0%}",
        )


def converse(pool: BlockManagerPool, chat: ChatFormat, workload: Workload, update: Update) -> Phase:
    """Play conversations: the pool places the first turn, later ones follow to the same rank."""
    transcripts = [Transcript(chat, conversation) for conversation in workload.conversations]
    num_turns = [len(conversation.turns) for conversation in workload.conversations]
    ranks: dict[int, int] = {}
    player = Player(pool, workload.params, sum(num_turns), update)
    for turn in range(max(num_turns)):
        rows = [
            (index, transcript.ask(), ranks.get(index))
            for index, transcript in enumerate(transcripts)
            if turn < num_turns[index]
        ]
        for served in player.play(turn, rows):
            ranks[served.conversation] = served.output.dp_rank
            transcripts[served.conversation].answer(list(served.output.token_ids))
    return player.finish()


def replay(pool: BlockManagerPool, phase: Phase, params: SamplingParams, update: Update) -> Phase:
    """Serve the very prompts of a phase again, in the same rounds and on the same ranks."""
    player = Player(pool, params, len(phase.served), update)
    for turn in range(1 + max(served.turn for served in phase.served)):
        rows = [
            (served.conversation, served.prompt.tolist(), served.output.dp_rank)
            for served in phase.served
            if served.turn == turn
        ]
        player.play(turn, rows)
    return player.finish()
