"""Word the problem of a config's key or value, and the remedy."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from graph_trainer.core.suggest import did_you_mean, nearest

GUESS = "Did you mean {}? "
"""Before a remedy, the name that was meant."""
AS_SECTION = "Write its keys under a [{key}] heading, or as --{key}.key value."
"""The remedy for a value in the place of a section."""

_KINDS = {
    "boolean": ("true or false", "true"),
    "integer": ("an integer", "1"),
    "number": ("a number", "1e-3"),
    "string": ("a string", '"text"'),
    "array": ("a list", "[...]"),
    "object": ("a table", "{ key = value }"),
}
"""The types of JSON: what a message calls them, and an example."""
_NUMBERS = {"integer": r"-?[0-9]{1,18}", "number": r"-?[0-9]+(\.[0-9]+)?(e-?[0-9]+)?"}


def unknown_key(key: str, siblings: Iterable[str], all_keys: Iterable[str]) -> str:
    """Say what to write in place of an unknown key: the likeliest first, at most three others.

    Args:
        siblings: the names of its section.
        all_keys: the keys of all sections.
    """
    path, _, name = key.rpartition(".")
    known = {f"{path}.{sibling}" if path else sibling: None for sibling in siblings}
    siblings_by_name = {key.rpartition(".")[2]: key for key in known}
    plain = {re.sub(r"\[\d+\]", "", sibling) for sibling in known}
    known |= {other: None for other in all_keys if other in known or other not in plain}
    switch = key.removeprefix("no_")
    if switch != key and switch in known:
        return f"Write --{path.removeprefix('no_')}.no-{name}."
    words = set(re.split("[._]", key.lower()))
    near = [other for other in known if set(re.split("[._]", other)) == words]  # as of a.enable_a
    near += [other for other in known if other.rpartition(".")[2] == name]
    near += [siblings_by_name[sibling] for sibling in nearest(name, siblings_by_name)]
    # The right key in the wrong section is as common as a typo.
    close = nearest(name, {other.rpartition(".")[2] for other in known}, cutoff=0.8)
    near += nearest(key, [other for other in known if other.rpartition(".")[2] in close], cutoff=0)
    guess, *others = list(dict.fromkeys(near)) or [""]
    sections = {other.rpartition(".")[0] for other in known}
    others = [other for other in others if other not in sections]
    if not guess:
        section = path if siblings_by_name else ""
        return f"`graph-trainer train --help {section}".rstrip() + "` lists the keys."
    return f"Did you mean {guess}? " + (f"Or {', '.join(others[:3])}." if others else "")


def wrong_base(base: Any, registry: str, entries: Sequence[str]) -> str:
    """Say that a file's `base` is none of the entries of a registry of configs."""
    if base is None:
        return f"no base, which names the model. Write base = {' or '.join(map(show, entries))}."
    guess = did_you_mean(base, entries, GUESS) if isinstance(base, str) else ""
    return (
        f"base = {show(base)}: no function of {registry}, so there is no model to train. "
        f"{guess}Write {' or '.join(map(show, entries))}."
    )


def wrong_choice(value: Any, choices: Sequence[Any]) -> tuple[str, str]:
    """Return problem and remedy of a value that is none of the choices."""
    guess = did_you_mean(value, choices, GUESS) if isinstance(value, str) else ""
    return "not one of the known values", f"{guess}Write {', '.join(map(show, choices))}."


def wrong_type(
    key: str,
    value: Any,
    kinds: Sequence[str],
    *,
    is_flag: bool = False,
    nullable: bool = False,
    among: Sequence[Any] = (),
) -> tuple[str, str]:
    """Return problem and remedy of a value of the wrong type.

    Args:
        kinds: the types that the key takes, by their names in JSON, or other words for them.
        nullable: whether the key may have no value, which a flag can say.
        among: the list that the value is an entry of, where the key ends with its index.
    """
    expected = " or ".join(dict.fromkeys(_KINDS.get(kind, (kind,))[0] for kind in kinds))
    kind, text = kinds[0], str(value).strip().lower().removesuffix(".0")
    _, example = _KINDS.get(kind, ("", "..."))
    number = _NUMBERS.get(kind, "$.")
    with_unit = re.fullmatch(rf"(?P<number>{number}) ?(?P<unit>[a-z]+)", text)
    if kind == "boolean" and text in ("false", "no", "off", "0"):
        example = "false"
    elif kind == "array" and isinstance(value, str) and value:
        # in brackets, but not as TOML writes a list
        entries = re.findall(r"[^][\s,\"']+", value) if value.startswith("[") else [value]
        example = show(entries)
    elif not isinstance(value, int) and re.fullmatch(number, text):
        example = text
    elif kind == "integer" and isinstance(value, float) and 1 <= value < 1e18:
        example = str(int(value))
    elif with_unit and re.split("[._]", key)[-1].startswith(with_unit["unit"]):
        example = with_unit["number"]  # 10GiB of memory_limit_gib
    if key.endswith("]"):  # a file and a flag give the whole list
        key = key.partition("[")[0]
        is_wrong = [type(entry) is type(value) for entry in among]
        entries = [example if w else as_toml(e) for w, e in zip(is_wrong, among, strict=True)]
        example = f"[{', '.join(entries or [example])}]"
    if not is_flag:
        return f"expected {expected}", f"Write {key} = {example}."
    if not example.startswith('"'):  # which a shell takes off
        example = shlex.quote(example)
    no_value = f", or --{key} None" if nullable else ""
    return f"expected {expected}", f"Write --{key} {example}{no_value}."


def show(value: Any) -> str:
    """Format `value` as a TOML author would write it, cut after 120 characters."""
    text = as_toml(value)
    return text if len(text) <= 120 else text[:117] + "..."


def as_toml(value: Any) -> str:
    """Format `value` as in a TOML file; None, which TOML does not have, as "unset"."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # as in JSON, which leaves one character that TOML escapes
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_toml, value))}]"
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{key} = {as_toml(entry)}" for key, entry in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    return "unset" if value is None else str(value)
