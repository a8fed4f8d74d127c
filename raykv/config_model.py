"""What all sections of a configuration share: frozen, no unknown keys, errors that read well."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from raykv.errors import ConfigError


class FrozenModel(BaseModel):
    """Settings that never change, take no unknown keys, and say in one line what is wrong."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError("; ".join(_explain(error))) from None


def _explain(error: ValidationError, section: tuple[str, ...] = ()) -> Iterator[str]:
    """One clear line per bad setting: its key, its value and what would do."""
    for item in error.errors():
        where = (*section, *(str(part) for part in item["loc"]))
        key = ".".join(where)
        fault = item.get("ctx", {}).get("error")
        inner = fault.__context__ if isinstance(fault, ConfigError) else None
        if isinstance(inner, ValidationError):  # a section's, which FrozenModel.__init__ translated
            yield from _explain(inner, where)
        elif item["type"] == "extra_forbidden":
            yield f"{key}: unknown setting; {_known(error.title, where[-1])}"
        elif item["type"] == "missing":
            yield f"{key}: is required"
        elif item["type"] == "value_error":
            message = item["msg"].removeprefix("Value error, ")
            yield f"{key}: {message}" if key else message
        elif item["type"] == "model_type":
            yield f"{key}: must hold settings of its own, got {item['input']!r}"
        else:
            rule = re.split(", (?:got|unable) ", item["msg"].replace("Input should", "must"))[0]
            value = "a secret that is not shown" if key == "hash_seed" else repr(item["input"])
            yield f"{key}: {rule}, got {value}"


def _known(model: str, key: str) -> str:
    """The setting of a model that was meant, or all there are."""
    names = next(
        list(each.model_fields) for each in FrozenModel.__subclasses__() if each.__name__ == model
    )
    close = difflib.get_close_matches(key, names, n=1)
    return f"did you mean {close[0]}?" if close else f"known here: {', '.join(names)}"
