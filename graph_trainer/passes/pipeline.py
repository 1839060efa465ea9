"""Runs passes over a joint graph: order, checks and a report row for each."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graph_trainer.errors import GraphTrainerError, PassError, VerificationError
from graph_trainer.joint_graph import JointGraph
from graph_trainer.passes.deduplicate_unshards import deduplicate_unshards
from graph_trainer.passes.eliminate_dead_code import eliminate_dead_code
from graph_trainer.passes.functionalize_index_put import functionalize_index_put
from graph_trainer.passes.normalize_views import normalize_views
from graph_trainer.passes.overlap_fsdp import overlap_fsdp
from graph_trainer.passes.registry import Pass
from graph_trainer.passes.rematerialize import rematerialize
from graph_trainer.passes.report import PassReport, Report, measure
from graph_trainer.passes.tag_fsdp_unshards import (
    ReshardAfterForward,
    TagFsdpUnshardsOptions,
    tag_fsdp_unshards,
)
from graph_trainer.passes.verify import verify_values

# In the order in which they run; the list "default" has those that say so.
_BUILT_IN: tuple[Pass, ...] = (
    normalize_views,
    functionalize_index_put,
    eliminate_dead_code,
    deduplicate_unshards,
    tag_fsdp_unshards,
    rematerialize,
    overlap_fsdp,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassConfig:
    """Which passes run, and how."""

    reshard_after_forward: ReshardAfterForward = "default"
    """Shorthand for the option of `tag_fsdp_unshards`."""

    pipeline_parallel: bool = False
    """Whether the graph is one pipeline stage's."""

    passes: Sequence[str | Pass] = ("default",)
    """Names, the word "default" for the default list, or passes of your own."""

    disable_passes: Sequence[str] = ()
    """Names to leave out."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Options dataclass by pass name, for passes that have options."""

    verify_passes: bool = False
    """After every pass also run the graph again on fake tensors and compare every shape."""


def registered_passes() -> dict[str, Pass]:
    """Every built-in pass by name, in stage order."""
    return {p.name: p for p in _BUILT_IN}


def run_passes(
    joint: JointGraph,
    config: PassConfig | None = None,
    *,
    on_pass: Callable[[str], None] | None = None,
) -> Report:
    """Run the passes of `config` on `joint`, in place.

    Arguments:
        on_pass: called with each pass's name before it runs, for progress.

    Returns:
        a report with one row a pass, the first row being the graph as captured.

    Raises:
        PassError: an unknown, repeated or misplaced pass; options that do not fit; a pass
            that failed, with the names of those that ran before it.
        VerificationError: a pass that left an invalid graph.
    """
    return Report(list(pass_by_pass(joint, config, on_pass=on_pass)))


def pass_by_pass(
    joint: JointGraph,
    config: PassConfig | None = None,
    *,
    on_pass: Callable[[str], None] | None = None,
) -> Iterator[PassReport]:
    """What `run_passes` does, one pass each time the iterator moves on.

    Arguments and errors are those of `run_passes`.

    Returns:
        an iterator of the report's rows: first the graph as captured, then the graph after each
        pass. Until it moves on, `joint` is the graph of the latest row.
    """
    config = config or PassConfig()
    selected = resolve_passes(config)
    options = _options_by_name(config, selected)
    _check_history(joint, selected)
    yield measure(joint, "capture", 0.0)
    for graph_pass in selected:
        if on_pass is not None:
            on_pass(graph_pass.name)
        yield _run_one(joint, graph_pass, options[graph_pass.name], config.verify_passes)
    joint.graph_module.recompile()


def resolve_passes(config: PassConfig) -> list[Pass]:
    """The passes that `config` names, checked: known, once each, stages in order.

    Raises:
        PassError: naming the pass, and the nearest known name where there is one.
    """
    known = registered_passes()
    selected: list[Pass] = []
    if isinstance(config.passes, str) or isinstance(config.disable_passes, str):
        raise PassError(
            "compile.passes and compile.disable_passes are lists of names; got the text "
            f"{(config.passes if isinstance(config.passes, str) else config.disable_passes)!r}"
        )
    for entry in config.passes:
        if isinstance(entry, Pass):
            selected.append(entry)
        elif not isinstance(entry, str):
            raise PassError(
                f"compile.passes: {entry!r} is neither a name nor a Pass; make a function a pass "
                "with @graph_pass(stage=..., summary=...)"
            )
        elif entry == "default":
            selected += [p for p in known.values() if p.default]
        else:
            selected.append(_lookup(entry, known, "compile.passes"))
    for name in config.disable_passes:
        if name not in known and name not in {p.name for p in selected}:
            _lookup(name, known, "compile.disable_passes")
    selected = [p for p in selected if p.name not in config.disable_passes]
    _check_unique(selected)
    _check_stages(selected)
    return selected


def _lookup(name: str, known: Mapping[str, Pass], key: str) -> Pass:
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, [*known, "default"], n=1)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    raise PassError(f"{key}: there is no pass '{name}'{hint} Known passes: {', '.join(known)}")


def _check_unique(selected: Sequence[Pass]) -> None:
    seen: set[str] = set()
    for graph_pass in selected:
        if graph_pass.name in seen:
            raise PassError(
                f"compile.passes: '{graph_pass.name}' is listed twice; a pass runs once: remove one"
            )
        seen.add(graph_pass.name)


def _check_stages(selected: Sequence[Pass]) -> None:
    for before, after in zip(selected, selected[1:], strict=False):
        if after.stage < before.stage:
            raise PassError(
                f"compile.passes: '{after.name}' (stage {after.stage.name}) stands after "
                f"'{before.name}' (stage {before.stage.name}); put it in front, stages run in "
                "the order CLEANUP, STRUCTURE, TAG, REMATERIALIZE, COMMUNICATION, SCHEDULE"
            )


def _check_history(joint: JointGraph, selected: Sequence[Pass]) -> None:
    """A graph that has been through a stage does not go back to an earlier one: merging
    gathers after rematerialization, for one, would undo it without a word."""
    known = registered_passes()
    ran = [known[name] for name in joint.history if name in known]
    if not ran or not selected:
        return
    latest = max(ran, key=lambda p: p.stage)
    if selected[0].stage < latest.stage:
        raise PassError(
            f"'{selected[0].name}' (stage {selected[0].stage.name}) cannot run on a graph that "
            f"'{latest.name}' (stage {latest.stage.name}) ran on before; capture again"
        )


def _options_by_name(config: PassConfig, selected: Sequence[Pass]) -> dict[str, Any]:
    for name in config.options:
        if name not in {p.name for p in selected}:
            raise PassError(f"options are given for '{name}', which is not in the pass list")
    _check_shorthand(config, selected)
    options: dict[str, Any] = {}
    for graph_pass in selected:
        given = config.options.get(graph_pass.name)
        if given is None and graph_pass.options_type is TagFsdpUnshardsOptions:
            given = TagFsdpUnshardsOptions(
                reshard_after_forward=config.reshard_after_forward,
                pipeline_parallel=config.pipeline_parallel,
            )
        if given is None:
            given = graph_pass.options_type()
        if not isinstance(given, graph_pass.options_type):
            raise PassError(
                f"options of '{graph_pass.name}' are a {type(given).__name__}; it takes a "
                f"{graph_pass.options_type.__name__}"
            )
        options[graph_pass.name] = given
    return options


def _check_shorthand(config: PassConfig, selected: Sequence[Pass]) -> None:
    """What the shorthand asks for must not get lost."""
    given = config.options.get(tag_fsdp_unshards.name)
    shorthand = TagFsdpUnshardsOptions(
        reshard_after_forward=config.reshard_after_forward,
        pipeline_parallel=config.pipeline_parallel,
    )
    if given is not None and shorthand not in (TagFsdpUnshardsOptions(), given):
        raise PassError(
            f"reshard_after_forward is {config.reshard_after_forward!r} (pipeline_parallel "
            f"{config.pipeline_parallel}) and the options of '{tag_fsdp_unshards.name}' say "
            f"{given}; give one of the two"
        )
    if config.reshard_after_forward == "always" and tag_fsdp_unshards not in selected:
        raise PassError(
            f"reshard_after_forward is 'always' and '{tag_fsdp_unshards.name}', which sees to "
            "it, is not in the pass list"
        )


def _run_one(joint: JointGraph, graph_pass: Pass, options: Any, verify: bool) -> PassReport:
    start = time.perf_counter()
    ran = ", ".join(joint.history) or "no other pass"
    try:
        graph_pass.function(joint, options)
    except GraphTrainerError as error:
        raise type(error)(f"pass '{graph_pass.name}' (after {ran}): {error}") from error
    except Exception as error:
        raise PassError(
            f"pass '{graph_pass.name}' (after {ran}) failed: {type(error).__name__}: {error}"
        ) from error
    seconds = time.perf_counter() - start
    try:
        joint.validate()
        if verify:
            verify_values(joint)
    except VerificationError as error:
        raise VerificationError(
            f"pass '{graph_pass.name}' (after {ran}) left an invalid graph: {error}"
        ) from error
    joint.history.append(graph_pass.name)
    return measure(joint, graph_pass.name, seconds)
