"""Check that the passes of [compile] can run, and that their options have an effect."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from graph_trainer.core.passes.base import Pass
from graph_trainer.core.passes.catalogue import (
    WITHOUT_PASSES,
    idle_fields,
    lacking,
    load_pass,
    registered_passes,
    resolve_passes,
    unmet_settings,
)
from graph_trainer.core.passes.context import RunSettings
from graph_trainer.errors import ConfigError, PassError
from graph_trainer.titan.activation_policies import POLICIES
from graph_trainer.titan.config.messages import Origin, bad_value, did_you_mean, show
from graph_trainer.titan.config.run_config import (
    GraphCompileConfig,
    GraphTrainerConfig,
    changed_sections,
    pass_config,
)

_KEYS = {
    "reshard_after_forward": "parallelism.fsdp_reshard_after_forward",
    "activation_policy": "activation_checkpoint.type",
    "allow_offload": "compile.allow_offload",
}
"""Where a config has the settings of a run that passes carry out."""


def check_passes(whole: GraphTrainerConfig, where: Origin) -> None:
    """Refuse a list of passes that cannot run, and settings and options that it leaves without
    effect.

    Raises:
        ConfigError: a name that is no pass, passes out of order, a setting or option without
            effect.
    """
    config = whole.compile
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
        listed = resolve_passes(config.passes, config.disable_passes)
    except PassError as error:
        # Every name is known, so the error is about their order or number and has the remedy.
        place = where.of("compile.passes", "compile.disable_passes")
        raise ConfigError(f"{place}: compile.passes = {show(config.passes)}: {error}.") from error
    disabled = config.disable_passes
    for section, each in changed_sections(config).items():
        if lack := lacking(listed, disabled, each):
            key, value = next(changed_options(config, config.pass_of_section[section]))
            problem, remedy = lack
            raise bad_value(where, key, value, problem, f"{remedy}, or leave {key} out.")
    if config.mode == "eager":
        return
    policy = POLICIES.get(type(whole.activation_checkpoint), "none")
    for section in changed_sections(config):
        options = getattr(config, section)
        for idle, other, values in idle_fields(options, RunSettings(activation_policy=policy)):
            key, acting = f"compile.{section}.{idle}", " or ".join(map(show, values))
            other = _KEYS.get(other, f"compile.{section}.{other}")
            remedy = f"Set {other} to {acting}, or leave {key} out."
            raise bad_value(where, key, getattr(options, idle), "has no effect", remedy)
    settings = {
        "reshard_after_forward": whole.parallelism.fsdp_reshard_after_forward,
        "activation_policy": policy,
        "allow_offload": config.allow_offload,
    }
    for setting, value, problem, remedy in unmet_settings(listed, disabled, settings):
        key, without = _KEYS[setting], WITHOUT_PASSES[setting]
        place = where.of(key, "compile.passes", "compile.disable_passes")
        raise bad_value(place, key, value, problem, f"{remedy}, or set {key} = {show(without)}.")


def changed_options(config: GraphCompileConfig, of: Pass) -> Iterator[tuple[str, Any]]:
    """Yield full key and value of each option of a pass that is not the default."""
    options, default = getattr(config, of.section), of.options_type()
    for field in fields(options):
        value = getattr(options, field.name)
        if value != getattr(default, field.name):
            yield f"compile.{of.section}.{field.name}", value
