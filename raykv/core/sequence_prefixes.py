"""Names of a sequence's prefixes, and the prefixes themselves to compare with, made when needed."""

from __future__ import annotations

from .checked_prefix import CheckedPrefix
from .prefix_hash import GrowingName, PrefixHasher
from .sequence import Sequence


class SequencePrefixes:
    """Those of one sequence, from its admission on.

    Args:
        sequence: the sequence.
        hasher: names prefixes.
    """

    def __init__(self, sequence: Sequence, hasher: PrefixHasher) -> None:
        self._sequence = sequence
        self._hasher = hasher
        self._prompt: list[bytes] | None = None
        self._tokens = b""
        self._growing: GrowingName | None = None

    @property
    def prompt_names(self) -> list[bytes]:
        """Names of the full blocks that it was admitted with."""
        if self._prompt is None:
            sequence = self._sequence
            prompt = sequence.token_ids[: sequence.kv_state.num_admitted_tokens]
            self._prompt = self._hasher.names(prompt, namespace=sequence.namespace)
        return self._prompt

    def name(self, num_tokens: int) -> bytes:
        """The name of its first tokens, whole blocks."""
        sequence = self._sequence
        if num_tokens <= sequence.kv_state.num_admitted_tokens:
            return self.prompt_names[num_tokens // self._hasher.block_size - 1]
        if self._growing is None:
            self._growing = GrowingName(self._hasher, sequence.namespace)
        return self._growing.of(sequence.token_ids, num_tokens)

    def checked(self, num_tokens: int) -> CheckedPrefix:
        """Its first tokens. Those of prompts share one snapshot."""
        sequence, num_prompt = self._sequence, self._sequence.kv_state.num_admitted_tokens
        if num_tokens > num_prompt:
            tokens = sequence.token_ids[:num_tokens].tobytes()
        else:
            self._tokens = self._tokens or sequence.token_ids[:num_prompt].tobytes()
            tokens = self._tokens
        return CheckedPrefix(tokens, num_tokens, sequence.namespace)
