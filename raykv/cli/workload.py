"""What the demo plays: which conversations, how many turns of each, how long the answers."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace

from raykv.engine.params import SamplingParams
from raykv.errors import ConfigError

from .conversations import Conversation, system_prompt
from .prompts import ChatFormat


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much the demo does.

    Attributes:
        num_conversations: conversations that are played at once.
        num_turns: messages of the user that are played of each.
        max_tokens: tokens that an answer has at most.
        num_first_token: prompts whose time to the first token is measured.
        num_generate: requests that are compared with transformers' generate().
    """

    num_conversations: int
    num_turns: int
    max_tokens: int
    num_first_token: int
    num_generate: int


FULL = Sizes(12, 5, 32, 6, 3)
QUICK = Sizes(4, 3, 12, 3, 1)


@dataclass(frozen=True, slots=True)
class Workload:
    """Everything that decides what the demo computes.

    Attributes:
        model: the model's name, as the user gave it.
        system: the system prompt that all conversations share.
        conversations: what the users say.
        sizes: how much of it is played.
    """

    model: str
    system: str
    conversations: tuple[Conversation, ...]
    sizes: Sizes

    @property
    def params(self) -> SamplingParams:
        """How answers are chosen: the likeliest token, so that runs can be compared."""
        return SamplingParams(max_tokens=self.sizes.max_tokens, temperature=0.0)

    @property
    def sha256(self) -> str:
        """Names this workload: equal whenever the same work is asked for again."""
        what = {
            "model": self.model,
            "system": self.system,
            "conversations": [conversation.turns for conversation in self.conversations],
            "max_tokens": self.sizes.max_tokens,
        }
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()

    def check(self, chat: ChatFormat, max_tokens_per_sequence: int) -> None:
        """Refuse conversations that cannot fit, before anything is started.

        Raises:
            ConfigError: naming the conversation, its tokens and the limit.
        """
        for conversation in self.conversations:
            most = chat.most_tokens(conversation, self.sizes.max_tokens)
            if most > max_tokens_per_sequence:
                raise ConfigError(
                    f"{conversation.source}: prompt and answers can reach {most} tokens, but a "
                    f"rank has room for {max_tokens_per_sequence} per sequence: raise "
                    "--num-blocks, or shorten the conversation or --max-tokens"
                )


def make_workload(
    model: str, conversations: list[Conversation], *, quick: bool, max_tokens: int | None
) -> Workload:
    """Choose from the conversations what a full or a quick run plays.

    Raises:
        RequestError: ``max_tokens`` is impossible.
    """
    sizes = QUICK if quick else FULL
    if max_tokens is not None:
        sizes = replace(sizes, max_tokens=max_tokens)
    chosen = tuple(
        Conversation(conversation.turns[: sizes.num_turns], conversation.source)
        for conversation in conversations[: sizes.num_conversations]
    )
    workload = Workload(model, system_prompt(), chosen, sizes)
    _ = workload.params  # refuses a bad max_tokens
    return workload
