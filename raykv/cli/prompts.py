"""Prompts of a growing conversation, so that each begins with all the tokens before it.

Text that was produced token by token need not encode to the same tokens again, and one changed
token ends the shared prefix. So the answers stay as tokens, and only what the chat template puts
around them is encoded.
"""

from __future__ import annotations

from typing import Any

from .conversations import Conversation

_MARK = "rAyKv"  # stands for an answer; no template strips or changes it
_PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ':\n' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
)

Message = dict[str, str]


class ChatFormat:
    """A tokenizer's chat template with a system prompt.

    Args:
        tokenizer: a Hugging Face tokenizer; without a chat template, roles are written as plain
            text.
        system: the system prompt; it goes into the first message where the template has no room
            for it.

    Attributes:
        is_exact: whether a prompt can go on with the tokens of the one before. False for templates
            that change earlier answers; then each prompt is encoded anew.
    """

    def __init__(self, tokenizer: Any, system: str) -> None:
        self._tokenizer = tokenizer
        self._template = None if getattr(tokenizer, "chat_template", None) else _PLAIN_TEMPLATE
        self._system = system
        self._has_system_role = True
        try:
            opening = self._render([_user("a")])
        except Exception as error:
            if "TemplateError" not in {kind.__name__ for kind in type(error).__mro__}:
                raise
            self._has_system_role = False
            opening = self._render([_user("a")])
        self._opening = opening
        self.is_exact = self._render(_exchange("b")).startswith(opening + _MARK)

    def opening(self, text: str) -> list[int]:
        """Token ids of the first prompt: system prompt, the user's message, room for an answer."""
        return self.encode(self._render([_user(text)]))

    def continuation(self, text: str, last_token: int | None) -> list[int]:
        """Token ids between an answer and the next one: the end of the turn, the next message.

        Args:
            text: the user's next message.
            last_token: the answer's last; if it is the end of the turn, it is not repeated.
        """
        ids = self.encode(self._render(_exchange(text))[len(self._opening) + len(_MARK) :])
        return ids[1:] if ids and ids[0] == last_token else ids

    def whole(self, messages: list[Message]) -> list[int]:
        """Token ids of a whole conversation, encoded anew."""
        return self.encode(self._render(messages))

    def most_tokens(self, conversation: Conversation, max_tokens: int) -> int:
        """Tokens that a conversation has at its end, if each answer has ``max_tokens``."""
        first, *later = conversation.turns
        rest = sum(len(self.continuation(text, None)) for text in later)
        return len(self.opening(first)) + rest + max_tokens * len(conversation.turns)

    def encode(self, text: str) -> list[int]:
        """Token ids of text in which the template has written all special tokens."""
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    def decode(self, token_ids: list[int]) -> str:
        """The text of an answer."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def _render(self, messages: list[Message]) -> str:
        if self._has_system_role:
            messages = [{"role": "system", "content": self._system}, *messages]
        else:
            first = _user(f"{self._system}\n\n{messages[0]['content']}")
            messages = [first, *messages[1:]]
        extra = {} if self._template is None else {"chat_template": self._template}
        return str(
            self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **extra
            )
        )


class Transcript:
    """One conversation as it goes: ask for a prompt, give the answer, ask again.

    Args:
        chat: the template.
        conversation: whose messages are asked, in order.
    """

    def __init__(self, chat: ChatFormat, conversation: Conversation) -> None:
        self._chat = chat
        self._turns = iter(conversation.turns)
        self._messages: list[Message] = []
        self._tokens: list[int] = []
        self._last: int | None = None

    def ask(self) -> list[int]:
        """The next prompt, as token ids; StopIteration when the user has said everything."""
        text = next(self._turns)
        if not self._messages:
            self._tokens = self._chat.opening(text)
        elif self._chat.is_exact:
            self._tokens = self._tokens + self._chat.continuation(text, self._last)
        self._messages.append(_user(text))
        if not self._chat.is_exact:
            self._tokens = self._chat.whole(self._messages)
        return list(self._tokens)

    def answer(self, token_ids: list[int]) -> None:
        """Add what the model said."""
        self._tokens = self._tokens + token_ids
        self._last = token_ids[-1] if token_ids else None
        self._messages.append({"role": "assistant", "content": self._chat.decode(token_ids)})


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _exchange(text: str) -> list[Message]:
    return [_user("a"), {"role": "assistant", "content": _MARK}, _user(text)]
