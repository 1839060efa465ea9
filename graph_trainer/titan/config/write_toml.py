"""A resolved config as TOML that gives back an equal config."""

import dataclasses
import datetime
from pathlib import Path
from typing import Any

import tomli_w

from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.build import NONE, settable_fields, type_of
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.config.sources import UNSET

_HEADER = """\
# Every value this run was given. Start the same run again with --config and this file.
"""


def config_to_toml(config: GraphTrainerConfig) -> str:
    """Write the whole config as a TOML document, which gives an equal config when it is loaded.

    `module` and `base` name the model. Values that TOML cannot write (functions that the registry
    entry set) come from that entry too; a comment lists their keys.
    """
    left_out: list[str] = []
    names = {key: value for key in ("module", "base") if (value := getattr(config, key))}
    table = names | _table(config, "", left_out)
    header = _HEADER
    if left_out:
        header += f"# Not written, they come from `base`: {', '.join(left_out)}\n"
    return header + "\n" + tomli_w.dumps(table)


def save_resolved_config(config: GraphTrainerConfig, folder: str | Path) -> None:
    """Write the config to `folder`/config.toml, which `--config` takes back.

    The folder is made if it is not there.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    path = Path(folder) / "config.toml"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(config_to_toml(config), encoding="utf-8")
    except (OSError, UnicodeEncodeError) as e:
        raise ConfigError(
            f"dump_folder = {str(folder)!r}: the resolved config cannot be written there ({e}). "
            "Set --dump_folder to a folder that can be written."
        ) from e


class _Unwritable(Exception):
    """A value that TOML cannot write."""


def _table(config: Any, prefix: str, left_out: list[str]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    unset: list[str] = []
    for name, field in settable_fields(type(config)).items():
        value = getattr(config, name)
        if field.sections and value is None:
            table[name] = {"type": NONE}
        elif field.sections:
            component = type_of(value, field.sections)
            head = {"type": component} if component else {}
            table[name] = head | _table(value, f"{prefix}{name}.", left_out)
        elif value is None and field.nullable:
            unset.append(name)
        else:
            try:
                table[name] = _plain(value, f"{prefix}{name}", left_out)
            except _Unwritable:
                left_out.append(prefix + name)
    return ({UNSET: unset} if unset else {}) | table


def _plain(value: Any, path: str, left_out: list[str]) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _table(value, f"{path}.", left_out)
    if isinstance(value, list | tuple):
        return [_plain(v, path, left_out) for v in value]
    if isinstance(value, dict):
        unset = [k for k, v in value.items() if v is None]
        kept = {k: _plain(v, path, left_out) for k, v in value.items() if v is not None}
        return ({UNSET: unset} if unset else {}) | kept
    if isinstance(value, str | bool | int | float | datetime.date | datetime.time):
        return value
    raise _Unwritable
