"""Files of a fixed form: pydantic models that convert nothing, and what is wrong with a file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from graph_trainer.core.suggest import did_you_mean
from graph_trainer.errors import ConfigError


class Strict(BaseModel):
    """A part of a file: no value is converted when it is read, no key ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    @classmethod
    def read(cls, path: Path, flag: str, remedy: str) -> Self:
        """Read a JSON file, or raise a ConfigError with the flag that names it and the remedy."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise ConfigError(f"{flag} {path}: {first_problem(error)}. {remedy}") from error
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{flag} {path}: cannot be read: {reason}. {remedy}") from error


def first_problem(error: ValidationError, known: Iterable[str] = ()) -> str:
    """Describe the first thing that is wrong with a file: "key = value: problem".

    Args:
        known: the keys of such a file, of which the one like an unknown key is named.
    """
    # The schema comes first: all else may be right in a file of another kind. Then an unknown key,
    # which may be the misspelt name of one that is missing.
    errors = error.errors(include_url=False)
    errors.sort(key=lambda e: (e["loc"] != ("schema",), e["type"] != "extra_forbidden"))
    first = errors[0]
    key, problem = ".".join(map(str, first["loc"])), first["msg"]
    found_value = first["input"]
    if first["type"] == "extra_forbidden":
        problem += did_you_mean(str(first["loc"][-1]), known, "; did you mean {}?")
    if not key or first["type"] == "missing":  # the value would be the table around it
        return f"{key}: {problem}" if key else problem
    # JSON has no words for NaN and infinity.
    is_number = isinstance(found_value, float)
    value = str(found_value)
    if not is_number:
        value = json.dumps(found_value, ensure_ascii=False, default=str)
    return f"{key} = {value if len(value) <= 80 else value[:77] + '...'}: {problem}"
