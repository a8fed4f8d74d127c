"""Reading conversations: one JSON object a line, of which the user's messages are played."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from raykv.errors import ConfigError

_FORMATS = '{"turns": ["...", ...]} or {"messages": [{"role": "user", "content": "..."}, ...]}'


@dataclass(frozen=True, slots=True)
class Conversation:
    """What one user says, message by message; the answers come from the model.

    Attributes:
        turns: the user's messages, at least one.
        source: where it was read, for error messages.
    """

    turns: tuple[str, ...]
    source: str = ""


def load_conversations(path: Path | None = None) -> list[Conversation]:
    """Read a file of conversations, or those that come with raykv.

    Raises:
        ConfigError: the file cannot be read or is empty, or a line is no conversation.
    """
    if path is None:
        data = resources.files("raykv.cli") / "data" / "conversations.jsonl"
        return parse_conversations(data.read_text(encoding="utf-8"), "conversations.jsonl")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"cannot read the conversations {path}: {error.strerror}; pass a readable file"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the conversations {path} are not UTF-8 at byte {error.start}; convert the file"
        ) from None
    return parse_conversations(text, str(path))


def system_prompt() -> str:
    """The system prompt that all conversations of the demo share."""
    data = resources.files("raykv.cli") / "data" / "system_prompt.txt"
    return data.read_text(encoding="utf-8").strip()


def parse_conversations(text: str, name: str) -> list[Conversation]:
    """Read conversations from text; ``name`` stands in error messages, with the line number.

    Raises:
        ConfigError: there is none, or a line is no conversation.
    """
    found = [
        Conversation(_turns(line, f"{name}:{number}"), f"{name}:{number}")
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]
    if not found:
        raise ConfigError(
            f"{name} holds no conversations; write one JSON object a line: {_FORMATS}"
        )
    return found


def _turns(line: str, where: str) -> tuple[str, ...]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where}: not valid JSON: {error.msg} at column {error.colno}; "
            f"each line is one object, {_FORMATS}"
        ) from None
    except (ValueError, RecursionError) as error:  # absurd numbers, absurd depth
        raise ConfigError(f"{where}: cannot be read: {error}; each line is one object") from None
    if not isinstance(entry, dict) or ("turns" in entry) == ("messages" in entry):
        raise ConfigError(f"{where}: not a conversation; each line is one object, {_FORMATS}")
    turns = entry["turns"] if "turns" in entry else _user_messages(entry["messages"], where)
    if not isinstance(turns, list) or not turns:
        raise ConfigError(f"{where}: no user message in it; give at least one")
    for index, turn in enumerate(turns):
        if not isinstance(turn, str) or not turn.strip():
            raise ConfigError(f"{where}: user message {index} is {turn!r}, but must be text")
    return tuple(turns)


def _user_messages(messages: Any, where: str) -> list[Any]:
    """The content of each user message of an OpenAI-style list."""
    if not isinstance(messages, list):
        raise ConfigError(f"{where}: messages must be a list of role and content")
    found = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(f"{where}: message {index} has no role; expected role and content")
        if message["role"] == "user":
            found.append(_text(message.get("content")))
    return found


def _text(content: Any) -> Any:
    """The text of a message's content, which may be given in parts."""
    if not isinstance(content, list):
        return content
    parts = [part.get("text") if isinstance(part, dict) else None for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else None
