"""Workloads for replays: prompts with the replies that they got, in order of arrival.

Three sources: traces in Mooncake's format, which name 512-token blocks of prompts but hold no
tokens; recorded chats, which hold the text; and conversations that are made up.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.errors import ConfigError

Tokens = NDArray[np.int32]
TRACE_BLOCK = 512  # tokens that one hash id of a trace stands for
_COMMON, _REPLY = 1 << 28, 1 << 29  # where the numbers of other kinds of made-up tokens begin
_MAX_REPLY = 1 << 13
_MAX_ID = _COMMON // TRACE_BLOCK
_MIX = np.uint64(
    0x9E3779B97F4A7C15
)  # 2**64 over the golden ratio: products with it are well spread


@dataclass(frozen=True, slots=True)
class Visit:
    """One request.

    Attributes:
        prompt: int32 [num_prompt_tokens].
        reply: int32, what is generated.
        after: index of the visit that it continues, which is over when it arrives; -1 for none.
    """

    prompt: Tokens
    reply: Tokens
    after: int = -1


def load_trace(path: Path, limit: int | None = None) -> list[Visit]:
    """Read a trace: JSON lines with ``input_length``, ``output_length`` and ``hash_ids``.

    Hash ids say which 512-token blocks are equal; the tokens are made up from them. Where the first
    new block of a prompt begins is known to 512 tokens only, so this is filled in:

    - A prompt that begins with all full blocks of an earlier one, and is long enough, continues it:
      the rest of that prompt and its reply come first. (Not where that is the first block only,
      which may just be a common system prompt.)
    - Else it leaves the others inside of the block, at a place that is drawn from the hash id of
      the block before: all who part there have so much in common.

    Args:
        path: of the trace.
        limit: requests to read; None for all.

    Raises:
        ConfigError: the file cannot be read, or a line is not as described.
    """
    visits: list[Visit] = []
    first: dict[int, int] = {}  # hash id -> the visit that has its tokens
    latest: dict[int, int] = {}  # hash id of the last full block -> the latest visit that ends so
    for row in _rows(path, limit):
        ids, length, number = row.hash_ids, row.num_tokens, len(visits)

        num_known = _num_known(row, visits, first)
        start = min(length, num_known * TRACE_BLOCK)
        after, known, rest = -1, _none(), _own(ids, num_known)
        if num_known:
            known = visits[first[ids[num_known - 1]]].prompt[:start]
            after = _continued(visits, latest.get(ids[num_known - 1], -1), num_known, length)
            rest = rest if after < 0 else _resume(visits[after], start, rest)
        prompt = np.concatenate((known, rest))[:length]
        reply = _REPLY + np.arange(row.num_reply_tokens, dtype=np.int32) + number * _MAX_REPLY
        visits.append(Visit(prompt, reply.astype(np.int32), after))
        first.update(dict.fromkeys(ids[num_known:], number))
        num_full = length // TRACE_BLOCK
        if num_full > 1:
            latest[ids[num_full - 1]] = number
    if not visits:
        raise ConfigError(f"trace {path} holds no requests; name a file with one per line")
    return visits


def load_chats(path: Path, limit: int | None = None, num_active: int = 256) -> list[Visit]:
    """Read chats, and let them take place side by side.

    Of two participants, the one who writes first is the user, the other one's messages are what is
    generated; a prompt is all text before the reply. A token is a byte of UTF-8. So many
    conversations go on at a time, and take turns; one that is over makes room for the next.

    Args:
        path: JSON in the format of chitchat-dataset's ``dataset.json``: an object of conversations
            with ``messages``, a list of turns, each a list of objects with ``text``.
        limit: conversations to read; None for all.
        num_active: conversations at a time.

    Raises:
        ConfigError: the file cannot be read or is not as described.
    """
    conversations = _conversations(path, limit)
    if not conversations:
        raise ConfigError(f"chats {path} hold no conversation with a reply; name another file")
    return _take_turns(conversations, num_active)


def make_up(num_conversations: int = 64, num_active: int = 16) -> list[Visit]:
    """Make up conversations of two to six turns, behind one of three system prompts.

    Args:
        num_conversations: how many.
        num_active: conversations at a time; see ``load_chats``.
    """
    rng = np.random.default_rng(0)

    def write(low: int, high: int) -> Tokens:
        return rng.integers(0, 1 << 20, rng.integers(low, high), dtype=np.int32)

    systems = [write(200, 1500) for _ in range(3)]
    conversations = []
    for number in range(num_conversations):
        first = np.concatenate((systems[number % 3], write(10, 300)))
        rest = [write(10, 300) for _ in range(1 + 2 * int(rng.integers(1, 6)))]
        conversations.append([first, *rest])
    return _take_turns(conversations, num_active)


# -- details --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Row:
    hash_ids: list[int]
    num_tokens: int
    num_reply_tokens: int


def _rows(path: Path, limit: int | None) -> Iterator[_Row]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and number > limit:
                    return
                try:
                    yield _row(json.loads(line))
                except (ValueError, KeyError, TypeError, OverflowError) as error:
                    raise ConfigError(
                        f"trace {path}, line {number}: expected an object with input_length, "
                        f"output_length and hash_ids, got {type(error).__name__}: {error}"
                    ) from None
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"trace {path} is no UTF-8 text: {error.reason}") from None


def _row(values: Any) -> _Row:
    ids = [int(each) for each in values["hash_ids"]]
    length, num_reply = int(values["input_length"]), int(values["output_length"])
    if not 0 < length <= len(ids) * TRACE_BLOCK < length + TRACE_BLOCK:
        raise ValueError(f"{len(ids)} hash_ids for input_length {length}")
    if not 0 <= num_reply < _MAX_REPLY or not 0 <= min(ids) <= max(ids) < _MAX_ID:
        raise ValueError(f"output_length {num_reply} or a hash id is out of range")
    return _Row(ids, length, num_reply)


def _num_known(row: _Row, visits: list[Visit], first: dict[int, int]) -> int:
    """Leading blocks whose tokens an earlier visit has; the start of a block is not enough."""

    def is_known(index: int) -> bool:
        holder = first.get(row.hash_ids[index])
        stop = min(row.num_tokens, (index + 1) * TRACE_BLOCK)
        return holder is not None and stop <= len(visits[holder].prompt)

    return sum(1 for _ in takewhile(is_known, range(len(row.hash_ids))))


def _none() -> Tokens:
    return np.empty(0, np.int32)


def _own(ids: list[int], start: int) -> Tokens:
    """Tokens of the blocks from ``start`` on, each in part common to all that follow on the same.

    Those who go on from a block in different ways part at a place that is the block's own.
    """
    blocks = np.array(ids, np.int64)
    before = blocks[max(0, start - 1) : -1]
    offsets = np.arange(TRACE_BLOCK)
    tokens = blocks[start:, None] * TRACE_BLOCK + offsets
    num_common = ((before.astype(np.uint64) + 1) * _MIX >> 32).astype(np.int64) % TRACE_BLOCK
    common = _COMMON + before[:, None] * TRACE_BLOCK + offsets
    following = tokens[len(tokens) - len(before) :]  # all but the very first block of a prompt
    following[:] = np.where(offsets < num_common[:, None], common, following)
    return tokens.ravel().astype(np.int32)


def _continued(visits: list[Visit], earlier: int, num_known: int, length: int) -> int:
    """The visit that a prompt continues, or -1."""
    if earlier < 0:
        return -1
    visit = visits[earlier]
    num_before = len(visit.prompt) + len(visit.reply)
    is_all_of_it = len(visit.prompt) // TRACE_BLOCK == num_known
    return earlier if is_all_of_it and num_before < length else -1


def _resume(visit: Visit, start: int, rest: Tokens) -> Tokens:
    """What comes after the full blocks of a prompt that is continued."""
    told = np.concatenate((visit.prompt[start:], visit.reply))
    return np.concatenate((told, rest[len(told) :]))


def _take_turns(conversations: list[list[Tokens]], num_active: int) -> list[Visit]:
    """Conversations side by side; every second turn, from the second on, is generated."""
    waiting = iter(conversations)
    active = list(islice(waiting, num_active))
    visits: list[Visit] = []
    progress: dict[int, tuple[int, int]] = {}  # by id(): turns that were played, the last visit
    while active:
        going_on = []
        for turns in active:
            num_played, after = progress.pop(id(turns), (0, -1))
            prompt = np.concatenate(turns[: num_played + 1])
            visits.append(Visit(prompt, turns[num_played + 1], after))
            if num_played + 3 < len(turns):
                progress[id(turns)] = num_played + 2, len(visits) - 1
                going_on.append(turns)
            else:
                going_on += islice(waiting, 1)
        active = going_on
    return visits


def _conversations(path: Path, limit: int | None) -> list[list[Tokens]]:
    """The turns of each conversation that has a reply."""
    try:
        values = json.loads(path.read_text(encoding="utf-8")).values()
        found = (one["messages"] for one in values if len(one["messages"]) > 1)
        return [[_text(turn) for turn in turns] for turns in islice(found, limit)]
    except OSError as error:
        raise ConfigError(f"chats {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"chats {path}: expected an object of conversations with messages, lists of lists of "
            f"objects with text, got {type(error).__name__}: {error}"
        ) from None


def _text(turn: Any) -> Tokens:
    text = "\n".join(message["text"] for message in turn) + "\n"
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)
