"""Read what a command line names: the file, the registry module and its entry."""

import contextlib
import importlib
import importlib.resources
import inspect
import os
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, get_type_hints

from torchtitan.trainer import Trainer

from graph_trainer.core.toml_file import read_toml
from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.convert import to_graph_trainer_config
from graph_trainer.titan.config.messages import bad_value, did_you_mean, join_or, show
from graph_trainer.titan.config.run_config import GraphTrainerConfig

DEFAULT_MODULE = "graph_trainer.llama3"
DEFAULT_CONFIG = "debugmodel"


class Source(NamedTuple):
    """A config as it was found, before it is merged and checked."""

    where: str
    """What messages call it: as a rule the file's name."""
    module: str
    base: str
    """The registry function of `module` that the config begins as."""
    table: dict[str, Any]
    """The rest of the document."""


def read_source(module: str | None, name: str | None) -> Source:
    """Find and read the config that the flags name.

    Args:
        module: the value of --module, which overrides the file's `module`.
        name: the value of --config; None means debugmodel.

    Raises:
        ConfigError: there is no such module or config, or the file cannot be used.
    """
    if module is not None:
        module = registry_module(module).__name__.removesuffix(".config_registry")
    name = name or DEFAULT_CONFIG
    path = find_config(module or DEFAULT_MODULE, name)
    if path is None:
        return Source(f"config {name}", module or DEFAULT_MODULE, name, {})
    where, table = str(path), read_toml(path, "--config")
    in_file = {"module": table.pop("module", None), "base": table.pop("base", None)}
    for key, value in in_file.items():
        if value is not None and not isinstance(value, str):
            example = DEFAULT_MODULE if key == "module" else "llama3_debugmodel"
            remedy = f'Write {key} = "{example}".'
            raise bad_value(where, key, value, "expected a string", remedy)
    if module is None:
        module = in_file["module"] or DEFAULT_MODULE
        registry_module(module, where)
    if in_file["base"] is None:
        functions = registry_functions(registry_module(module))
        raise ConfigError(
            f"{where}: base is missing, so there is no model to train. Add a line "
            f"base = {join_or(show(f) for f in functions)} at the top."
        )
    return Source(where, module, in_file["base"], table)


def registry_module(name: str, where: str | None = None) -> ModuleType:
    """Import the module of registry functions that `--module name` means.

    Args:
        name: a package with a config_registry module, or such a module itself; "graph_trainer."
            may be left out.
        where: what names it, for the error message; None means the flag.

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
    """Yield the packages of configs that graph_trainer has itself."""
    import graph_trainer

    for info in pkgutil.iter_modules(graph_trainer.__path__):
        folder = Path(graph_trainer.__path__[0]) / info.name
        if info.ispkg and (folder / "config_registry.py").exists():
            yield f"graph_trainer.{info.name}"


def registry_functions(module: ModuleType) -> dict[str, Callable[[], Any]]:
    """Return the entries of a registry module, by name: its public functions without arguments that
    are declared to return a config. A file that names any other function cannot call it."""
    return {
        name: function
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
        and not name.startswith("_")
        and not inspect.signature(function).parameters
        and _is_config(get_type_hints(function).get("return"))
    }


def _is_config(declared: object) -> bool:
    return isinstance(declared, type) and issubclass(declared, Trainer.Config)


def registry_entry(module_name: str, base: str, where: str) -> GraphTrainerConfig:
    """Make the config of a registry function, a torchtitan config converted, with both names set.

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
    """Return the folders of a module's named configs: the installed copy, then a checkout's."""
    name = module.removesuffix(".config_registry").rpartition(".")[2]
    installed = Path(str(importlib.resources.files("graph_trainer"))) / "configs" / name
    checkout = Path(__file__).resolve().parents[3] / "configs" / name
    return [folder for folder in (installed, checkout) if folder.is_dir()]


def find_config(module: str, name: str) -> Path | None:
    """Find the file that `--module module --config name` means.

    A name with a path separator or the suffix .toml is a path. Any other is a file in the module's
    config folder, with or without the prefixes "graph_trainer_" and the model's "<name>_".

    Returns:
        The path, or None where the name is a registry function without a file.

    Raises:
        ConfigError: nothing has that name; the message lists the known names.
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
