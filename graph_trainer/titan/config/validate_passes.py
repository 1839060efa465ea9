"""Check that the passes of [compile] can run, and that their options have an effect."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from graph_trainer.core.passes.base import Pass
from graph_trainer.core.passes.catalogue import load_pass, registered_passes, resolve_passes
from graph_trainer.errors import ConfigError, PassError
from graph_trainer.titan.config.messages import Origin, bad_value, did_you_mean, show
from graph_trainer.titan.config.run_config import (
    GraphCompileConfig,
    changed_sections,
    pass_config,
)


def check_passes(config: GraphCompileConfig, where: Origin) -> None:
    """Refuse a list of passes that cannot run, and options of passes that do not run.

    Raises:
        ConfigError: a name that is no pass, passes out of order, an option without effect.
    """
    known = list(registered_passes())
    own = [entry for entry in config.passes if ":" in entry]
    own_names = [load_pass(entry).name for entry in own]
    for key, names, valid in (
        ("compile.passes", config.passes, [*known, *own, "default"]),
        (
            "compile.disable_passes",
            config.disable_passes,
            [*known, *own_names],
        ),
    ):
        for name in names:
            if name not in valid:
                raise bad_value(
                    where,
                    key,
                    names,
                    f'"{name}" is not a pass',
                    f"{did_you_mean(name, valid)}Known passes: {', '.join(valid)}.",
                )
    try:
        pass_config(config)
        listed = {p.name for p in resolve_passes(config.passes, config.disable_passes)}
    except PassError as error:
        # Every name is known, so the error is about their order or number and has the remedy.
        place = where.of("compile.passes", "compile.disable_passes")
        raise ConfigError(f"{place}: compile.passes = {show(config.passes)}: {error}.") from error
    for section, each in changed_sections(config).items():
        for name in (*each.relies_on, each.name):
            if name not in listed:
                raise _without_effect(config, section, name, where)


def _without_effect(
    config: GraphCompileConfig, section: str, name: str, where: Origin
) -> ConfigError:
    """Make the error for the first changed key of a section, where a pass does not run."""
    key, value = next(changed_options(config, config.pass_of_section[section]))
    if name in config.disable_passes:
        lack = f"in compile.disable_passes = {show(config.disable_passes)}"
        remedy = f'Take "{name}" out of compile.disable_passes'
    else:
        lack = f"not in compile.passes = {show(config.passes)}"
        remedy = f'Add "{name}" to compile.passes'
    problem = f"has no effect: the pass {name} is {lack}"
    return bad_value(where, key, value, problem, f"{remedy}, or leave {key} out.")


def changed_options(config: GraphCompileConfig, of: Pass) -> Iterator[tuple[str, Any]]:
    """Yield full key and value of each option of a pass that is not the default."""
    options, default = getattr(config, of.section), of.options_type()
    for field in fields(options):
        value = getattr(options, field.name)
        if value != getattr(default, field.name):
            yield f"compile.{of.section}.{field.name}", value
