"""From the names on the command line to a registry module, a file and an entry."""

import contextlib
import importlib
import importlib.resources
import inspect
import os
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.convert import to_graph_trainer_config
from graph_trainer.titan.config.messages import did_you_mean, join_or, show
from graph_trainer.titan.config.run_config import GraphTrainerConfig

DEFAULT_MODULE = "graph_trainer.llama3"
DEFAULT_CONFIG = "debugmodel"


def registry_module(name: str, where: str | None = None) -> ModuleType:
    """The module of registry functions that `--module name` means.

    Takes a package with a config_registry module, or such a module itself;
    "graph_trainer." may be left out.

    Arguments:
        where: who names it, for the error message; None means the flag.
    Raises:
        ConfigError: there is none, or its import fails.
    """
    asked = f"--module {name}" if where is None else f"{where}: module = {show(name)}"
    if all(part.isidentifier() for part in name.split(".")):
        for candidate in (
            f"{name}.config_registry",
            name,
            f"graph_trainer.{name}.config_registry",
        ):
            try:
                module = importlib.import_module(candidate)
            except ModuleNotFoundError as e:
                # Missing is the candidate itself or a package above it: try the next.
                if e.name is not None and (candidate + ".").startswith(e.name + "."):
                    continue
                raise ConfigError(f"{asked}: its import fails: {e}. Install it.") from e
            except ImportError as e:
                raise ConfigError(f"{asked}: its import fails: {e}. Mend it.") from e
            if registry_functions(module):
                return module
    known = list(known_modules())
    raise ConfigError(
        f"{asked}: no such module of configs. {did_you_mean(name, known)}"
        f"Known modules: {', '.join(known)}; or name a package of your own with a "
        "config_registry module."
    )


def known_modules() -> Iterator[str]:
    """The packages of configs that graph_trainer has itself."""
    import graph_trainer

    for info in pkgutil.iter_modules(graph_trainer.__path__):
        folder = Path(graph_trainer.__path__[0]) / info.name
        if info.ispkg and (folder / "config_registry.py").exists():
            yield f"graph_trainer.{info.name}"


def registry_functions(module: ModuleType) -> dict[str, Callable[[], Any]]:
    """The registry entries of a module: its own public functions without arguments."""
    return {
        name: function
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
        and not name.startswith("_")
        and not inspect.signature(function).parameters
    }


def registry_entry(module_name: str, base: str, where: str) -> Any:
    """The GraphTrainerConfig of the registry function `base`, with both names set.

    Arguments:
        where: who names it, for the error message.
    Raises:
        ConfigError: an unknown module or function.
    """
    module = registry_module(module_name)
    functions = registry_functions(module)
    if base not in functions:
        raise ConfigError(
            f"{where}: base = {show(base)}: {module.__name__} has no such function. "
            f"{did_you_mean(base, functions)}Write {join_or(show(f) for f in functions)}."
        )
    config = functions[base]()
    if not isinstance(config, GraphTrainerConfig):
        config = to_graph_trainer_config(config)
    config.module = module.__name__.removesuffix(".config_registry")
    config.base = base
    return config


def config_folders(module: str) -> list[Path]:
    """Where the named configs of a module lie: the installed copy, then a checkout's."""
    name = module.removesuffix(".config_registry").rpartition(".")[2]
    installed = Path(str(importlib.resources.files("graph_trainer"))) / "configs" / name
    checkout = Path(__file__).resolve().parents[3] / "configs" / name
    return [folder for folder in (installed, checkout) if folder.is_dir()]


def find_config(module: str, name: str) -> Path | None:
    """The file that `--module module --config name` means.

    A name with a path separator or the suffix .toml is a path. Any other is a file in
    the module's config folder, with or without the prefixes "graph_trainer_" and the
    model's "<name>_". None where the name is a registry function without a file.

    Raises:
        ConfigError: nothing has that name; the message lists what there is.
    """
    if name.endswith(".toml") or os.sep in name or "/" in name:
        return Path(name)
    folders = config_folders(module)
    model = module.removesuffix(".config_registry").rpartition(".")[2]
    plain = name.removeprefix("graph_trainer_")
    candidates = (name, plain, plain.removeprefix(f"{model}_"))
    for folder in folders:
        for candidate in candidates:
            path = folder / f"{candidate}.toml"
            with contextlib.suppress(OSError):  # too long for a file, so no config's name
                if path.is_file():
                    return path
    functions = registry_functions(registry_module(module))
    if name in functions:
        return None
    known = sorted({p.stem for folder in folders for p in folder.glob("*.toml")}) or [*functions]
    guess = did_you_mean(candidates[-1], known)
    raise ConfigError(
        f"--config {name}: {module} has no config of that name. {guess}"
        f"Known configs: {', '.join(known)}; or give a path to a .toml file."
    )
