"""From a run's settings to its passes: `PassConfig`, and the list that it makes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, assert_never

from graph_trainer.core.passes.base import Pass
from graph_trainer.core.passes.bucketing.bucket_collectives import bucket_collectives
from graph_trainer.core.passes.bucketing.tag_buckets import tag_buckets
from graph_trainer.core.passes.catalogue import check_bitwise, registered_passes, resolve_passes
from graph_trainer.core.passes.context import RunSettings
from graph_trainer.core.passes.memory_limit import DeviceMemoryOf, unknown
from graph_trainer.core.passes.offload_activations import offload_activations
from graph_trainer.core.passes.plan_memory.plan_memory import plan_memory
from graph_trainer.core.passes.rematerialize import rematerialize
from graph_trainer.core.passes.tag_activations import tag_activations
from graph_trainer.core.passes.tag_fsdp_unshards import tag_fsdp_unshards
from graph_trainer.errors import PassError


@dataclass(frozen=True, slots=True, kw_only=True)
class PassConfig(RunSettings):
    """Which passes run, and how."""

    passes: Sequence[str | Pass] = ("default",)
    """Names of built-in passes, "default" for the default list, "package.module:name" for a pass
    of your own, or passes. Beside "default" every other entry joins the list at its stage; without
    "default" the order is yours. Passes that a setting needs are added where the list is without
    them: see `pass_list`."""

    disable_passes: Sequence[str] = ()
    """Names to leave out. A pass that a setting needs cannot be left out."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Options dataclass by pass name, for passes that have options."""

    device_memory: DeviceMemoryOf = unknown
    """What a step of this rank may need on its device, given the graph. Where `memory_limit_gib` is
    None, a graph that needs more on any rank is refused. Passes do not see it: the graph does not
    depend on what a device has free."""

    host_memory: DeviceMemoryOf = unknown
    """What this rank may take of its machine's memory for activations that are copied there. A
    graph that needs more on any rank is refused."""

    verify_passes: bool = False
    """After every pass also run the graph on fake tensors and compare every shape, and run it on
    small real values, on all ranks together or with the other ranks simulated, and compare its
    results with those before the pass. The report says where a graph is too large for that, or
    cannot run here."""


class Need(NamedTuple):
    """What needs a pass."""

    setting: str
    """The setting and its value, or what else needs the pass."""
    instead: str
    """How to do without the pass."""


def pass_list(config: PassConfig, *, model_offloads: bool = False) -> list[Pass]:
    """Return the passes of a run in order: those that `config.passes` names, and those that carry
    out its settings.

    Args:
        model_offloads: whether the model has `gt.offload` regions, which only its graph shows.

    Raises:
        PassError: a pass is unknown, listed twice or out of the order of stages; a pass that a
            setting needs is disabled, or listed after a pass that reads what it does; there are
            options of a pass that is not in the list; a pass changes sums where `bitwise` forbids
            it.
    """
    listed = resolve_passes(config.passes, config.disable_passes)
    policy, reshard = config.activation_policy, config.reshard_after_forward

    needed: dict[Pass, list[Need]] = defaultdict(list)
    if reshard in ("default", "always", "auto"):
        need = Need(
            f'PassConfig.reshard_after_forward = "{reshard}"',
            'set PassConfig.reshard_after_forward = "never"',
        )
        needed[tag_fsdp_unshards].append(need)
        needed[rematerialize].append(need)
        if reshard == "auto":
            needed[plan_memory].append(need)
    carrier: Pass | None
    match policy:
        case "none" | "user":
            carrier = None
        case "selective" | "full" | "layers":
            carrier = tag_activations
        case "budget" | "file":
            carrier = plan_memory
        case _:
            assert_never(policy)
    if carrier is not None:
        need = Need(
            f'PassConfig.activation_policy = "{policy}"',
            'set PassConfig.activation_policy = "none"',
        )
        needed[carrier].append(need)
        needed[rematerialize].append(need)
    if policy == "budget" and config.allow_offload:
        needed[offload_activations].append(Need("PassConfig.allow_offload", "unset that"))
    table = config.memory_table
    if policy == "file" and table is not None and table.offloaded:
        need = Need("PassConfig.memory_table", "leave what is offloaded out of the table")
        needed[offload_activations].append(need)
    if model_offloads:
        need = Need("gt.offload() in the model", "take that out of the model")
        needed[offload_activations].append(need)
    if bucket_collectives in listed:
        need = Need("the pass bucket_collectives", "leave bucket_collectives out too")
        needed[tag_buckets].append(need)

    for pass_ in registered_passes().values():
        if pass_ in needed:
            listed = _with_needed(listed, config.disable_passes, pass_, needed[pass_])
    names = [pass_.name for pass_ in listed]
    for name, options in config.options.items():
        if name in config.disable_passes:
            raise PassError(
                f"{type(options).__name__}: the pass '{name}' is disabled: take it out of "
                "PassConfig.disable_passes, or leave its options out"
            )
        if name not in names:
            raise PassError(
                f"{type(options).__name__}: the pass '{name}' is not in the list: add it to "
                "PassConfig.passes, or leave its options out"
            )
    if config.bitwise:
        check_bitwise(listed)
    return listed


def _with_needed(
    listed: list[Pass], disabled: Sequence[str], pass_: Pass, needs: Sequence[Need]
) -> list[Pass]:
    """Return the list with a built-in pass that is needed: where it is listed, or else behind all
    that come before it in the catalogue.

    Raises:
        PassError: the pass is disabled, or listed after one that has to run after it.
    """
    setting = " and ".join(need.setting for need in needs)
    instead = " and ".join(need.instead for need in needs)
    if pass_.name in disabled:
        raise PassError(
            f"PassConfig.disable_passes: the pass '{pass_.name}' cannot be left out, it is "
            f"needed for {setting}: take it out of PassConfig.disable_passes, or {instead}"
        )
    catalogue = list(registered_passes())

    def is_later(other: Pass) -> bool:
        if other.stage != pass_.stage or other.name not in catalogue:
            return other.stage > pass_.stage
        return catalogue.index(other.name) > catalogue.index(pass_.name)

    place = next((i for i, other in enumerate(listed) if is_later(other)), len(listed))
    names = [other.name for other in listed]
    if pass_.name not in names:
        return [*listed[:place], pass_, *listed[place:]]
    if names.index(pass_.name) > place:
        raise PassError(
            f"PassConfig.passes: '{pass_.name}' is listed after '{names[place]}', which has to run "
            f"after it for {setting}: put '{pass_.name}' in front of '{names[place]}', or "
            f"{instead}"
        )
    return listed
