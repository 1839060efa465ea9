"""Runs passes over a joint graph: order, checks and a report row for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.snapshot import copy_graph, put_back
from graph_trainer.core.passes.base import Pass
from graph_trainer.core.passes.bucketing.bucket_collectives import bucket_collectives
from graph_trainer.core.passes.bucketing.tag_buckets import tag_buckets
from graph_trainer.core.passes.context import Simulator
from graph_trainer.core.passes.deduplicate_unshards import deduplicate_unshards
from graph_trainer.core.passes.eliminate_dead_code import eliminate_dead_code
from graph_trainer.core.passes.eliminate_round_trips import eliminate_round_trips
from graph_trainer.core.passes.fold_grad_reductions import fold_grad_reductions
from graph_trainer.core.passes.functionalize_index_put import functionalize_index_put
from graph_trainer.core.passes.fuse_chained_all_gathers import fuse_chained_all_gathers
from graph_trainer.core.passes.fuse_chained_reduce_scatters import fuse_chained_reduce_scatters
from graph_trainer.core.passes.memory_limit import (
    KEY,
    Agree,
    Budget,
    HeldBytes,
    alone,
    nothing_held,
)
from graph_trainer.core.passes.normalize_views import normalize_views
from graph_trainer.core.passes.overlap.overlap_fsdp import overlap_fsdp
from graph_trainer.core.passes.overlap.schedule_overlap import schedule_overlap
from graph_trainer.core.passes.rematerialize import rematerialize
from graph_trainer.core.passes.report import Measured, PassReport, Report
from graph_trainer.core.passes.tag_fsdp_unshards import (
    ReshardAfterForward,
    TagFsdpUnshardsOptions,
    tag_fsdp_unshards,
)
from graph_trainer.core.passes.verify import verify_values
from graph_trainer.core.simulation.hardware import Hardware
from graph_trainer.core.suggest import did_you_mean
from graph_trainer.core.units import gib
from graph_trainer.errors import GraphTrainerError, PassError, VerificationError

# In the order in which they run; the list "default" has those that say so.
_BUILT_IN: tuple[Pass, ...] = (
    normalize_views,
    functionalize_index_put,
    eliminate_dead_code,
    deduplicate_unshards,
    eliminate_round_trips,
    fuse_chained_all_gathers,
    fuse_chained_reduce_scatters,
    fold_grad_reductions,
    tag_fsdp_unshards,
    rematerialize,
    tag_buckets,
    bucket_collectives,
    overlap_fsdp,
    schedule_overlap,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassConfig:
    """Which passes run, and how."""

    reshard_after_forward: ReshardAfterForward = "default"
    """Shorthand for the option of `tag_fsdp_unshards`."""

    pipeline_parallel: bool = False
    """Whether the graph is one pipeline stage's."""

    passes: Sequence[str | Pass] = ("default",)
    """Names, the word "default" for the default list, or passes of your own. A built-in pass
    beside "default" joins the list at its stage; without it the order is yours."""

    disable_passes: Sequence[str] = ()
    """Names to leave out."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Options dataclass by pass name, for passes that have options."""

    verify_passes: bool = False
    """After every pass also run the graph again on fake tensors and compare every shape."""

    memory_limit_gib: float | None = None
    """The most GiB that a step may need on a device, parameters and all: a pass that is only
    optional and breaks it is rolled back, and a graph that does without them refused."""

    held_bytes: HeldBytes = nothing_held
    """What counts against the limit beside the graph and its inputs, given the graph."""

    hardware: Hardware | None = None
    """The machine that the step will run on, for passes that decide by simulation."""


def registered_passes() -> dict[str, Pass]:
    """Every built-in pass by name, in stage order."""
    return {p.name: p for p in _BUILT_IN}


def run_passes(
    joint: JointGraph,
    config: PassConfig | None = None,
    *,
    on_pass: Callable[[str], None] | None = None,
    agree: Agree = alone,
    roll_back: bool = True,
) -> Report:
    """Run the passes of `config` on `joint`, in place.

    Arguments:
        on_pass: called with each pass's name before it runs, for progress.
        agree: makes of this rank's number the largest of all ranks', so that all decide alike:
            bytes of a peak where there is a memory limit, and what passes that decide by sizes
            or by simulation ask (`Simulator`). Ranks that hold unlike sizes need it.
        roll_back: whether the memory limit may roll passes back; where it may not, a graph
            beyond the limit is refused with all its passes.

    Returns:
        a report with one row a pass, the first row being the graph as captured.

    Raises:
        PassError: an unknown, repeated or misplaced pass; options that do not fit; a pass
            that failed, with the names of those that ran before it; a step that needs more
            memory than the limit.
        VerificationError: a pass that left an invalid graph.
    """
    rows = pass_by_pass(joint, config, on_pass=on_pass, agree=agree, roll_back=roll_back)
    return Report(list(rows))


def pass_by_pass(
    joint: JointGraph,
    config: PassConfig | None = None,
    *,
    on_pass: Callable[[str], None] | None = None,
    agree: Agree = alone,
    roll_back: bool = True,
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
    _hand_out_simulators(config, selected, options, agree)
    _check_history(joint, selected)
    budget = Budget(config.memory_limit_gib, config.held_bytes, agree)
    measured = Measured()
    rows = [measured.row(joint, "capture", 0.0)]
    yield rows[0]
    kept: list[_Kept] = []
    left = list(selected)
    while left or (kept and budget.is_over(joint)):
        if not left:
            # What stands behind an optional pass may need the memory that this one took. The
            # others behind this one have been rolled back before it.
            last = kept.pop()
            left = [p for p in last.behind if not p.optional]
            change = f"it changes the predicted peak by {last.after - last.before:+,} bytes"
            why = (
                f"rolled back to make room for the passes behind it: {change}, and with them that "
                if left
                else f"rolled back, as the step is over the limit with it: {change}; the peak "
            ) + f"is {gib(budget.peak(joint))} GiB, {KEY} is {config.memory_limit_gib:g}"
            rows.append(_roll_back(joint, last, budget, why, measured))
            yield rows[-1]
            continue
        graph_pass = left.pop(0)
        if on_pass is not None:
            on_pass(graph_pass.name)
        start: _Kept | None = None
        if budget.is_set and roll_back and graph_pass.optional:
            peak = budget.peak(joint)
            start = _Kept(graph_pass.name, copy_graph(joint), list(left), peak, peak)
        seconds = _run_one(joint, graph_pass, options[graph_pass.name], config.verify_passes)
        row = measured.row(joint, graph_pass.name, seconds)
        row = replace(row, remarks=tuple(joint.remarks))
        budget.changed()
        if start is not None:
            after = budget.peak(joint)
            if after > start.before and budget.is_over(joint):
                why = budget.why_rolled_back(start.before, after)
                row = _roll_back(joint, start, budget, why, measured)
            else:
                kept.append(start._replace(after=after))
        rows.append(row)
        yield row
    if budget.is_over(joint):
        reshards = config.reshard_after_forward == "always"
        raise budget.refusal(joint, str(Report(rows)), reshards=reshards)
    joint.graph_module.recompile()


class _Kept(NamedTuple):
    """What there was before an optional pass."""

    name: str
    graph: JointGraph
    behind: list[Pass]
    """The passes that come after it."""
    before: int
    after: int
    """Predicted peaks in bytes, before and right after the pass."""


def _roll_back(
    joint: JointGraph, to: _Kept, budget: Budget, why: str, measured: Measured
) -> PassReport:
    start = time.perf_counter()
    put_back(joint, to.graph)
    budget.changed()
    return replace(measured.row(joint, to.name, time.perf_counter() - start), rolled_back=why)


def passes_like(config: PassConfig, first: JointGraph) -> PassConfig:
    """`config` as it was carried out on `first`: no other passes than those that it kept, and
    what they decided by simulation decided alike.

    Raises:
        PassError: as `resolve_passes`.
    """
    out = [p.name for p in resolve_passes(config) if p.name not in first.history]
    options = {name: given for name, given in config.options.items() if name not in out}
    decided = {name: given for name, given in first.decisions.items() if name not in out}
    return replace(
        config,
        disable_passes=(*config.disable_passes, *out),
        options={**options, **decided},
    )


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
    if "default" in config.passes:
        selected = _joined(selected, known)
    _check_stages(selected)
    return selected


def _joined(selected: list[Pass], known: Mapping[str, Pass]) -> list[Pass]:
    """Built-in passes beside the default list join it where they belong, so that nobody has to
    write the list out to add one; passes of one's own stay where they were put."""
    ordered = iter([p for name, p in known.items() if p in selected])
    return [next(ordered) if p.name in known else p for p in selected]


def _lookup(name: str, known: Mapping[str, Pass], key: str) -> Pass:
    if name in known:
        return known[name]
    hint = did_you_mean(name, [*known, "default"], otherwise=".")
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


def _hand_out_simulators(
    config: PassConfig, selected: Sequence[Pass], options: dict[str, Any], agree: Agree
) -> None:
    """Fill the field `simulator` of options that have it and were given none."""
    for place, graph_pass in enumerate(selected):
        given = options[graph_pass.name]
        if not hasattr(given, "simulator") or given.simulator is not None:
            continue
        behind = selected[place + 1 :]

        def run_behind(joint: JointGraph, behind: Sequence[Pass] = behind) -> None:
            for later in behind:
                later.function(joint, options[later.name])

        options[graph_pass.name] = replace(
            given,
            simulator=Simulator(
                hardware=config.hardware,
                held=config.held_bytes,
                limit_gib=config.memory_limit_gib,
                agree=agree,
                behind=run_behind,
            ),
        )


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


def _run_one(joint: JointGraph, graph_pass: Pass, options: Any, verify: bool) -> float:
    """Seconds that the pass took, its checks not among them."""
    joint.remarks.clear()
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
    return seconds
