"""Where a sequence with recurrent state can go on from: the checkpoint that its hit ends at."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from raykv.config import LinearStateConfig
from raykv.core.block_manager import BlockManagerImpl
from raykv.core.checked_prefix import CheckedPrefix
from raykv.core.explain import MissReason
from raykv.core.linear_state import LinearStatePrefixCache
from raykv.core.manager import AdmitRequest
from raykv.core.sequence_prefixes import SequencePrefixes
from raykv.core.tokens import as_tokens


class Resume(NamedTuple):
    """Where a new sequence goes on from.

    Attributes:
        num_blocks: leading blocks whose KV and state it reuses.
        num_kv_blocks: leading blocks whose KV is cached.
        name: of the checkpoint; None without one.
        num_tokens: tokens in those blocks that it reuses.
        is_crowded: whether it begins at the start since slots are too few to read a checkpoint.
    """

    num_blocks: int
    num_kv_blocks: int
    name: bytes | None = None
    num_tokens: int = 0
    is_crowded: bool = False


AT_START = Resume(0, 0)
ANYWHERE = Resume(-1, -1)
"""Of a sequence without recurrent state, which can go on from any cached block."""


def resumable(request: AdmitRequest, resume: Resume) -> AdmitRequest:
    """The request, less the cached blocks whose state nobody has."""
    if resume.num_blocks == resume.num_kv_blocks or request.token_ids is None:
        return request
    return request._replace(token_ids=request.token_ids[: resume.num_tokens])


class ResumePoints:
    """Finds them; only looks.

    Args:
        config: the policy, stride and rules.
        manager: the rank's KV blocks, which name prefixes, too.
        cache: the checkpoints.
    """

    def __init__(
        self, config: LinearStateConfig, manager: BlockManagerImpl, cache: LinearStatePrefixCache
    ) -> None:
        self._config = config
        self._manager = manager
        self._cache = cache
        self._block_size = manager.block_size

    def find(self, requests: SequenceOf[AdmitRequest], num_slots: int) -> list[Resume] | None:
        """Where new sequences can go on from.

        Args:
            requests: what each of them asks of the block manager.
            num_slots: live slots that can be had.

        Returns:
            None if there are fewer slots than sequences.
        """
        if len(requests) > num_slots:
            return None
        resumes = [self._find(request) for request in requests]
        read = {resume.name for resume in resumes if resume.name is not None}
        if len(requests) + sum(map(self._cache.can_reclaim, read)) > num_slots:
            # The last slots cannot be read and be written to at once: computing anew beats waiting.
            return [
                resume if resume.name is None else Resume(0, resume.num_kv_blocks, is_crowded=True)
                for resume in resumes
            ]
        return resumes

    def stops(self, num_tokens: int, resume: Resume) -> tuple[int, ...]:
        """Boundaries of a prompt, beside the stride's, at which checkpoints are due."""
        size, stops = self._block_size, set()
        if self._config.at_prompt_end:
            # The last that an equal prompt can use, for one token is left to compute; and the last
            # that a longer one can use.
            stops |= {(num_tokens - 1) // size * size, num_tokens // size * size}
        if self._config.at_branch:
            stops.add(resume.num_kv_blocks * size)
        return tuple(sorted(stop for stop in stops if stop > resume.num_blocks * size))

    def rests_on(self, prefixes: SequencePrefixes, num_tokens: int) -> list[bytes]:
        """Names of the checkpoints that a hit of a prompt's first tokens needs, the deepest first.

        Beside the one that it ends at: under ``deepest`` there are none.
        """
        if self._config.match == "deepest":
            return []
        step = self._config.stride_tokens // self._block_size
        return prefixes.prompt_names[step - 1 : num_tokens // self._block_size : step][::-1]

    def why_not_all(self, prefixes: SequencePrefixes, resume: Resume) -> MissReason:
        """Why it does not reuse all KV that is cached, as things are now."""
        if resume.is_crowded:
            return "no_state_slot"
        names = prefixes.prompt_names[resume.num_blocks : resume.num_kv_blocks]
        if self._config.match == "contiguous" and any(map(self._cache.contains, names)):
            return "stride"
        if any(map(self._cache.was_skipped, names)):
            return "no_state_slot"
        stride = self._config.stride_tokens // self._block_size
        is_between = resume.num_blocks // stride == resume.num_kv_blocks // stride
        return "stride" if self._config.at_stride and is_between else "no_checkpoint"

    def _find(self, request: AdmitRequest) -> Resume:
        if request.token_ids is None:
            return AT_START
        tokens = as_tokens(request.token_ids)[: request.num_blocks * self._block_size]
        namespace = request.namespace
        num_kv = self._manager.num_matching_blocks(tokens, namespace=namespace)
        if not num_kv:
            return AT_START
        names = self._manager.hasher.names(tokens[: num_kv * self._block_size], namespace=namespace)
        raw = tokens[: num_kv * self._block_size].tobytes()
        for index in self._eligible(names):
            prefix = CheckedPrefix(raw, (index + 1) * self._block_size, namespace)
            if self._cache.verify(names[index], prefix):
                return Resume(index + 1, num_kv, names[index], prefix.num_tokens)
        return Resume(0, num_kv)

    def _eligible(self, names: list[bytes]) -> list[int]:
        """Indices of blocks whose end has a checkpoint that may be used, the best first."""
        if self._config.match == "deepest":
            # Seldom more than a few are looked at: conversations end in a checkpoint.
            return [i for i in range(len(names) - 1, -1, -1) if self._cache.contains(names[i])]
        run: list[int] = []
        step = self._config.stride_tokens // self._block_size
        for index in range(step - 1, len(names), step):
            if not self._cache.contains(names[index]):
                break
            run.append(index)
        return run[::-1]
