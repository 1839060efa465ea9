"""The wording that all config errors share: where, key, value, problem, remedy."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from graph_trainer.core.suggest import nearest
from graph_trainer.errors import ConfigError

COMMAND_LINE = "command line"
"""What messages call the place that flags come from."""


@dataclass(frozen=True)
class Origin:
    """Where the keys of a merged config come from."""

    file: str = "config"
    """The file's name, or another name of the config for messages."""
    flags: frozenset[str] = frozenset()
    """The keys that flags set."""

    def of(self, *keys: str) -> str:
        """Return the command line where a flag set one of these keys, otherwise the file."""
        return COMMAND_LINE if any(key in self.flags for key in keys) else self.file


def show(value: Any) -> str:
    """Format `value` as a TOML author would write it, cut after 80 characters."""
    text = _as_toml(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _as_toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_as_toml, value))}]"
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{key} = {_as_toml(each)}" for key, each in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    return str(value)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Format the known names close to `name`: "Did you mean a, b or c? ", or ""."""
    close = nearest(name, known)
    return f"Did you mean {join_or(close)}? " if close else ""


def did_you_mean_key(key: str, here: Iterable[str], everywhere: Iterable[str]) -> str:
    """Do `did_you_mean` for a full key: its siblings, then its name in another section.

    The right key in the wrong section is as common as a typo.

    Args:
        key: what was written, as `section.key`.
        here: the known keys of the same section, as `section.key`.
        everywhere: all known keys, as `section.key`.
    """
    leaf = key.rpartition(".")[2]
    siblings = {k.rpartition(".")[2]: k for k in here}
    everywhere = list(everywhere)
    guesses = [siblings[near] for near in nearest(leaf, siblings)]
    guesses += [k for k in everywhere if k.rpartition(".")[2] == leaf and k not in guesses]
    guesses = guesses or nearest(key, everywhere)
    return f"Did you mean {join_or(guesses[:3])}? " if guesses else ""


def join_or(names: Iterable[str]) -> str:
    """Join names: "a", "a or b", "a, b or c"."""
    listed = list(names)
    return ", ".join(listed[:-1]) + " or " + listed[-1] if len(listed) > 1 else "".join(listed)


def bad_value(where: str | Origin, key: str, value: Any, problem: str, remedy: str) -> ConfigError:
    """Make the error for a known key whose value cannot be used.

    Args:
        where: the file, or "command line", or the origin of a merged config's keys.
        key: the full key, `section.key`.
        value: what was given.
        problem: what is wrong, a clause without a full stop.
        remedy: what to write instead, a sentence.
    """
    place = where.of(key) if isinstance(where, Origin) else where
    return ConfigError(f"{place}: {key} = {show(value)}: {problem}. {remedy}")
