"""Which module of configs, and which of its configs, a name means."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from graph_trainer.core.shipped_configs import config_folders
from graph_trainer.core.suggest import did_you_mean
from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.remedies import GUESS

DEFAULT_MODULE = "graph_trainer.llama3"
DEFAULT_CONFIG = "debugmodel"


def known_modules() -> list[str]:
    """Return the packages of configs that graph_trainer has itself."""
    registries = Path(__file__).parents[2].glob("*/config_registry.py")
    return sorted(f"graph_trainer.{registry.parent.name}" for registry in registries)


def no_such_module(asked: str, name: str) -> ConfigError:
    """Make the error of a name that is no module of configs.

    Args:
        asked: the flag, or file and key, with the name.
    """
    known = known_modules()
    local = [registry.parent.name for registry in Path.cwd().glob("*/config_registry.py")]
    short = [module.rpartition(".")[2] for module in known]
    return ConfigError(
        f"{asked}: no such module of configs. {did_you_mean(name, [*known, *short, *local], GUESS)}"
        f"Known modules: {', '.join(known)}; or name a package of your own with a "
        "config_registry module."
    )


def find_config(
    module: str, asked: str | None, functions: Callable[[], Iterable[str]]
) -> Path | None:
    """Find the file that `--module module --config name` means.

    A name with a path separator or the suffix .toml is a path. Any other is a file in the module's
    config folder, with or without the prefixes "graph_trainer_" and the model's "<name>_".

    Args:
        functions: returns the names of the module's registry functions.

    Returns:
        The path, or None where the name is a registry function without a file.

    Raises:
        ConfigError: nothing has that name; the message lists the known names.
    """
    name = asked or DEFAULT_CONFIG
    if name.endswith(".toml") or os.sep in name or "/" in name:
        return Path(name)
    module = module.removesuffix(".config_registry")
    model = module.rpartition(".")[2]
    folders = config_folders(model)
    plain = name.removeprefix("graph_trainer_")
    candidates = (name, plain, plain.removeprefix(f"{model}_"))
    for folder in folders:
        for candidate in candidates:
            path = folder / f"{candidate}.toml"
            with contextlib.suppress(OSError):  # too long for a file, so no config's name
                if path.is_file():
                    return path
    registered = list(functions())
    if name in registered:
        return None
    known = sorted({p.stem for folder in folders for p in folder.glob("*.toml")}) or registered
    if not asked:
        raise ConfigError(
            f"--module {module}: it has no {DEFAULT_CONFIG}, which is taken without --config. Name "
            f"one of {', '.join(known)} with --config, or a path to a .toml file."
        )
    guess = did_you_mean(candidates[-1], known, GUESS)
    guess = f"Did you mean {name}.toml? " if os.path.isfile(f"{name}.toml") else guess
    if os.path.isfile(name):
        guess = "A file of that name is there, but configs are TOML files that end in .toml. "
    raise ConfigError(
        f"--config {name}: {module} has no config of that name. {guess}"
        f"Known configs: {', '.join(known)}; or give a path to a .toml file."
    )
