"""A job's prompts, one JSON object a line, and what each of them asks for."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from raykv.engine.params import SamplingParams
from raykv.errors import ConfigError, RequestError

Id = str | int

_KINDS = ("prompt", "token_ids", "messages")
_FORMATS = '{"prompt": "..."}, {"token_ids": [...]} or {"messages": [{"role": ...}, ...]}'
# One line in, one line out: whoever wants several samples writes the prompt several times.
_OPTIONS = tuple(each.name for each in fields(SamplingParams) if each.name != "n")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the input.

    Attributes:
        number: from 1; blank lines count.
        id: the line's own, or else its number.
        entry: what it says, its id left out.
        error: why it cannot be served; None if it may be.
    """

    number: int
    id: Id
    entry: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def key(self) -> str:
        """The id as JSON: 7 and "7" are two ids."""
        return json.dumps(self.id)


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a file, blank ones left out. A bad one carries its error.

    Raises:
        ConfigError: the file cannot be read.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"the input {path} is no file, but must be: it is read twice")
    first_use: dict[str, int] = {}
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.strip():
                    continue
                line = _parse(raw, number)
                first = first_use.setdefault(line.key, number)
                if first != number:
                    error = f"id {line.key} is in use by line {first}: change one"
                    line = Line(number, line.id, error=error)
                yield line
    except OSError as error:
        raise ConfigError(
            f"cannot read the input {path}: {error.strerror}; pass a readable file"
        ) from None


def encode(entry: Mapping[str, Any], tokenizer: Any) -> list[int]:
    """The token ids of a line's prompt.

    Args:
        entry: the line, with one of prompt, token_ids and messages.
        tokenizer: called for the Hugging Face tokenizer where there is text.

    Raises:
        RequestError: it is no prompt, or the tokenizer cannot make one of it.
    """
    kind = next(kind for kind in _KINDS if kind in entry)
    value = entry[kind]
    if kind == "token_ids":
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise RequestError("token_ids must be a list of whole numbers")
        return value
    if kind == "messages":
        value = _render(value, tokenizer())
    if not isinstance(value, str):
        raise RequestError(f"prompt is a {type(value).__name__}, but must be text")
    try:
        return [int(token) for token in tokenizer().encode(value, add_special_tokens=False)]
    except (TypeError, ValueError) as error:  # such as half of a surrogate pair
        raise RequestError(f"the text cannot be encoded: {error}") from None


def params_of(line: Line, defaults: Mapping[str, Any]) -> SamplingParams:
    """How to continue a line's prompt: its own options over the job's.

    The job's seed is mixed with the line's id, so that equal prompts get different samples, the
    same ones in every run, whatever else runs.

    Raises:
        RequestError: an option is out of range.
    """
    options = dict(defaults) | {name: line.entry[name] for name in _OPTIONS if name in line.entry}
    if "seed" not in line.entry and options.get("seed") is not None:
        digest = hashlib.blake2b(f"{options['seed']} {line.key}".encode(), digest_size=8).digest()
        options["seed"] = int.from_bytes(digest, "little") >> 1
    return SamplingParams(**options)


def _parse(raw: bytes, number: int) -> Line:
    try:
        entry = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        problem = str(error).splitlines()[0] if str(error) else "nested too deeply"
        return Line(number, number, error=f"not valid JSON: {problem}")
    if not isinstance(entry, dict):
        return Line(number, number, error=f"no object; write {_FORMATS}")
    line_id = entry.pop("id", number)
    if not _is_id(line_id):
        problem = f"id is {line_id!r}, but must be text or a whole number"
        return Line(number, number, error=problem)
    return Line(number, line_id, entry, _fault(entry))


def _fault(entry: Mapping[str, Any]) -> str | None:
    """What is wrong with the names in a line."""
    given = [kind for kind in _KINDS if kind in entry]
    for name in entry:
        if name not in {*_KINDS, *_OPTIONS}:
            close = difflib.get_close_matches(name, (*_KINDS, *_OPTIONS), n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(_OPTIONS)}"
            return f"unknown key {name!r}; {hint}"
    if len(given) != 1:
        return f"it has {' and '.join(given) or 'no prompt'}; write one of {_FORMATS}"
    return None


def _is_id(value: Any) -> bool:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which no file can hold
            return False
    return type(value) in {str, int}


def _render(messages: Any, tokenizer: Any) -> str:
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list of objects with role and content")
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError("the model's tokenizer has no chat template: write prompt instead")
    try:
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )
    except Exception as error:  # noqa: BLE001 - templates are programs, and raise what they like
        raise RequestError(
            f"the chat template refuses the messages ({type(error).__name__}: {error}); each needs "
            "role and content"
        ) from None
