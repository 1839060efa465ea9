"""Whether the passes of [compile] can run, and those that have options do."""

from dataclasses import fields
from typing import Any

from graph_trainer.errors import ConfigError, PassError
from graph_trainer.titan.config.messages import Origin, bad_value, did_you_mean, show


def check_passes(compile_config: Any, where: Origin) -> None:
    """Refuse a list of passes that cannot run, and options of passes that do not run.

    Raises:
        ConfigError: a name that is no pass, passes out of order, an option without effect.
    """
    from graph_trainer.core.passes.catalogue import registered_passes, resolve_passes
    from graph_trainer.titan.config.run_config import pass_sections

    known = registered_passes()
    passes, disabled = compile_config.passes, compile_config.disable_passes
    for key, names, valid in (
        ("compile.passes", passes, [*known, "default"]),
        ("compile.disable_passes", disabled, [*known]),
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
        listed = {
            p.name for p in resolve_passes(compile_config.passes, compile_config.disable_passes)
        }
    except PassError as e:
        # Known names, so it is their order or number, which it explains with the remedy.
        place = where.of("compile.passes", "compile.disable_passes")
        raise ConfigError(f"{place}: compile.passes = {show(passes)}: {e}.") from e
    for section in pass_sections(compile_config):
        if section.is_default:
            continue
        needed = [section.pass_name]
        if section.name == "bucketing" and compile_config.bucketing.strategy != "none":
            needed.insert(0, "tag_buckets")  # it says what may travel together
        for name in needed:
            if name not in listed:
                raise _without_effect(compile_config, section.name, name, where)


def _without_effect(compile_config: Any, section: str, name: str, where: Origin) -> ConfigError:
    """The error for the first key of a section that was changed, where a pass does not run."""
    given = getattr(compile_config, section)
    unchanged = type(given)()
    key, value = next(
        (field.name, value)
        for field in fields(given)
        if (value := getattr(given, field.name)) != getattr(unchanged, field.name)
    )
    disabled = compile_config.disable_passes
    if name in disabled:
        lack = f"in compile.disable_passes = {show(disabled)}"
        remedy = f'Take "{name}" out of compile.disable_passes'
    else:
        lack = f"not in compile.passes = {show(compile_config.passes)}"
        remedy = f'Add "{name}" to compile.passes'
    return bad_value(
        where,
        f"compile.{section}.{key}",
        value,
        f"has no effect: the pass {name} is {lack}",
        f"{remedy}, or leave compile.{section}.{key} out.",
    )
