"""Runs passes over a joint graph: options, checks, memory limit and a report row for each."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from graph_trainer.core.graph.annotations import offload_tag
from graph_trainer.core.graph.content import unchanging
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.snapshot import copy_graph, restore_graph
from graph_trainer.core.graph.writes import AccessOrder, access_order
from graph_trainer.core.ordering.agreement import (
    Agreement,
    OneRank,
    is_collective_failure,
    reason_of,
)
from graph_trainer.core.passes.base import Pass, Stage
from graph_trainer.core.passes.catalogue import registered_passes
from graph_trainer.core.passes.context import PassContext, detect_on_all_ranks
from graph_trainer.core.passes.memory_limit import Budget
from graph_trainer.core.passes.offload_activations import offload_activations
from graph_trainer.core.passes.pass_list import PassConfig, pass_list
from graph_trainer.core.passes.plan_memory.plan_memory import plan_memory
from graph_trainer.core.passes.report import GraphState, PassRun, Report, graph_state, is_same_state
from graph_trainer.core.passes.verify_numbers import Numbers, verify_values
from graph_trainer.errors import (
    CollectiveError,
    GraphTrainerError,
    PassError,
    VerificationError,
)


def run_passes(
    joint: JointGraph,
    config: PassConfig | None = None,
    *,
    first: JointGraph | None = None,
    agreement: Agreement | None = None,
    on_pass: Callable[[str], None] | None = None,
) -> Report:
    """Run the passes of `config` on `joint`, in place.

    Args:
        first: the first graph of the step where `joint` is one for a batch of another shape: what
            its passes decided by simulation is followed, and those that the memory limit rolled
            back are left out. Then none is rolled back, and a graph beyond the limit is refused.
        agreement: the ranks that call this together, so that all decide alike: about the bytes
            needed where there is a memory limit, and about what passes decide by sizes or by
            simulation. None for those of the default process group; `OneRank()` for this one.
        on_pass: called with each pass's name before it runs, for progress.

    Returns:
        a report with one row a pass, the first row being the graph as captured.

    Raises:
        PassError: an unknown, repeated or misplaced pass; options that do not fit; a pass
            that failed, with the names of those that ran before it; a step that needs more
            memory than the limit, or than the device has; ranks on different devices, where passes
            decide by simulation and no hardware is named.
        VerificationError: a pass that left an invalid graph.
        CollectiveError: another rank has ended before this one's passes had.
    """
    report = Report()
    for _ in pass_by_pass(
        joint, config, first=first, agreement=agreement, on_pass=on_pass, report=report
    ):
        pass  # what it did is in the report
    return report


def pass_by_pass(
    joint: JointGraph,
    config: PassConfig | None = None,
    *,
    first: JointGraph | None = None,
    agreement: Agreement | None = None,
    on_pass: Callable[[str], None] | None = None,
    report: Report | None = None,
    refuses: bool = True,
) -> Iterator[PassRun]:
    """Run the passes as `run_passes` does, one each time the iterator moves on.

    Arguments and errors are those of `run_passes`. A `report` gets the rows; without one nothing is
    measured but what a memory limit needs. A pass that is only optional and raises the need
    of memory above the limit is rolled back before the next pass runs, unless the passes after it
    bring the need back within the limit. Without `refuses`, a graph that needs more than the limit
    or than the device has is the caller's to judge. The code of the graph module is generated once,
    at the end.

    Returns:
        an iterator: first the graph as captured, then each pass. Until it moves on, `joint` is the
        graph after that pass, to be read and not to be changed.
    """
    config, agreement = config or PassConfig(), agreement or Agreement()
    selected = _passes_for(joint, config)
    if first is not None:
        selected = [pass_ for pass_ in selected if pass_.name in first.history]
    # An earlier stage than that of a pass that ran on the graph may not follow: merging gathers
    # after rematerialization, for one, would undo it without a word.
    known = registered_passes()
    ran = [known[name] for name in joint.history if name in known]
    latest = max(ran, key=lambda p: p.stage, default=None)
    if latest is not None and selected and selected[0].stage < latest.stage:
        raise PassError(
            f"'{selected[0].name}' (stage {selected[0].stage.name}) cannot run on a graph that "
            f"'{latest.name}' (stage {latest.stage.name}) ran on before; capture again"
        )
    decisions = {} if first is None else first.decisions
    steps, run, simulated_on = _prepare(joint, config, selected, agreement, decisions)
    follows_plan = plan_memory.name in decisions
    budget = Budget(run, config.device_memory, config.host_memory, follows_plan=follows_plan)
    raised: dict[str, int] = {}
    numbers = Numbers(joint, agreement) if config.verify_passes else None
    if report is None and refuses and budget.may_refuse:  # for what passes raised
        report = Report()
    state, order = graph_state(joint), access_order(joint.graph)
    captured = PassRun("capture", 0.0)
    if report is not None:
        report.add(joint, captured)
    yield captured
    for number, step in enumerate(steps, start=1):
        name = step.graph_pass.name
        if on_pass is not None:
            on_pass(name)
        may_go = bool(config.memory_limit_gib) and first is None and step.graph_pass.optional
        start, before = (copy_graph(joint), budget.needed(joint)) if may_go else (None, 0)
        before_pass = state
        seconds, verified, state, order = run_one(joint, step, numbers, order)
        budget.changed()
        rolled_back = ""
        if start is not None:
            raised[name] = budget.needed(joint) - before
            is_over = raised[name] > 0 and budget.is_over(joint)
            if is_over and not _ends_within(joint, steps[number:], budget):
                rolled_back = budget.why_rolled_back(before, before + raised.pop(name))
                restore_graph(joint, start)
                state, order = graph_state(joint), access_order(joint.graph)
                budget.changed()
                joint.remarks.clear()
                if numbers is not None:
                    numbers.start(joint)
        changed = not is_same_state(before_pass, state)
        simulates = step.graph_pass.needs_hardware(step.options, config)
        if simulated_on and simulates and (changed or joint.remarks):
            where = f"simulated on {simulated_on}"
            if joint.remarks:
                joint.remarks[0] += f"; {where}"
            else:
                joint.remarks.append(where)
            simulated_on = ""  # one row names it
        done = PassRun(
            *(name, seconds),
            changed=changed,
            rolled_back=rolled_back,
            remarks=tuple(joint.remarks),
            verified=verified,
        )
        if report is not None:
            report.add(joint, done)
            if start is None and step.graph_pass.optional:
                raised[name] = report.last.peak_bytes - report.rows[-2].peak_bytes
        yield done
    budget.check(joint, raised, refuses)
    joint.graph_module.recompile()


def _ends_within(joint: JointGraph, later: Sequence[PassStep], budget: Budget) -> bool:
    """Return whether a step that is over the limit will be within it after the later passes."""
    if not later:
        return False
    trial = copy_graph(joint)
    for step in later:
        _run(trial, step)
        trial.history.append(step.graph_pass.name)
    return not budget.is_over(trial)


def run_before(joint: JointGraph, config: PassConfig, last: Pass) -> PassContext:
    """Run the passes of `config` that come before one on `joint`, in place, and return the context
    in which that one would run. Errors are those of `run_passes`, and a PassError where the pass
    list is without it."""
    selected = _passes_for(joint, config)
    steps, *_ = _prepare(joint, config, selected, OneRank())
    for step in steps:
        if step.graph_pass.name == last.name:
            return step.context
        run_one(joint, step, None)
    raise PassError(f"the pass list is without '{last.name}'")


def run_tags(joint: JointGraph, config: PassConfig) -> None:
    """Run the passes of stage TAG alone, on a graph that another partitioner will read.

    Checked are options and settings, but for what other passes do: the partitioner acts on the
    tags. After each pass the graph and its phases are checked. Its signature is not, as outputs may
    be None here; nor is the order of reads and writes, which no tag changes; nor memory, which the
    partitioner decides. A PassError as of `run_passes`, or where the config needs other passes.
    """
    selected = pass_list(config)
    tags = [pass_ for pass_ in selected if pass_.stage is Stage.TAG]
    without_effect: list[str] = []
    if config.activation_policy == "budget":
        without_effect.append('activation_policy = "budget"')
    if config.reshard_after_forward == "auto":
        without_effect.append('reshard_after_forward = "auto"')
    if config.allow_offload:
        without_effect.append("allow_offload")
    if config.memory_limit_gib is not None:
        without_effect.append("memory_limit_gib")
    if config.verify_passes:
        without_effect.append("verify_passes")
    for pass_ in selected:
        is_listed_by_user = not pass_.default or pass_.name not in registered_passes()
        if is_listed_by_user and pass_ not in tags:
            without_effect.append(f"the pass '{pass_.name}' (stage {pass_.stage.name})")
    names = {pass_.name for pass_ in tags}
    without_effect += [f"options of '{name}'" for name in config.options if name not in names]
    if without_effect:
        raise PassError(
            f"{without_effect[0]} would have no effect on an exported step, of which only passes "
            "of stage TAG run: give it to run_passes, before gt.partition"
        )
    steps, *_ = _prepare(joint, config, tags, OneRank())
    for step in steps:
        _run(joint, step)
        try:
            joint.graph.lint()
            joint.check_phases()
        except (RuntimeError, VerificationError) as error:
            message = f"pass '{step.graph_pass.name}' left an invalid graph: {error}"
            raise VerificationError(_with_history(message, joint, step)) from error


class PassStep(NamedTuple):
    """A pass with what it is called with."""

    graph_pass: Pass
    options: Any
    context: PassContext

    def run(self, joint: JointGraph) -> None:
        self.graph_pass.function(joint, self.options, self.context)


def _prepare(
    joint: JointGraph,
    config: PassConfig,
    selected: Sequence[Pass],
    agreement: Agreement,
    decisions: Mapping[str, Any] = {},
) -> tuple[list[PassStep], PassContext, str]:
    """Return the passes, each with its checked options and its context; what all contexts have in
    common; and which machine passes simulate and why, where one does and no hardware is named.
    `decisions` has, by pass, what it decided for an earlier graph of the step."""
    simulates = (pass_.needs_hardware(_options(config, pass_), config) for pass_ in selected)
    hardware, why = config.hardware, ""
    if hardware is None and any(simulates):
        hardware, why, _ = detect_on_all_ranks(joint, agreement)
    shared = PassContext(settings=config, agreement=agreement, hardware=hardware)
    steps: list[PassStep] = []
    for pass_ in reversed(selected):  # from the last: a context has the passes after its own

        def run_later_passes(
            joint: JointGraph, before: Stage | None = None, later: Sequence[PassStep] = tuple(steps)
        ) -> None:
            for step in later:
                if before is None or step.graph_pass.stage < before:
                    step.run(joint)

        decided = decisions.get(pass_.name)
        context = replace(shared, decided=decided, run_later_passes=run_later_passes)
        steps.insert(0, PassStep(pass_, _options(config, pass_), context))
    return steps, shared, why


def _options(config: PassConfig, of: Pass) -> Any:
    options = config.options.get(of.name, of.options_type())
    if not isinstance(options, of.options_type):
        raise PassError(
            f"options of '{of.name}' are a {type(options).__name__}; it takes a "
            f"{of.options_type.__name__}"
        )
    return options


def _passes_for(joint: JointGraph, config: PassConfig) -> list[Pass]:
    """Return the passes of `config` for a graph, whose model may ask for offloading."""
    is_done = offload_activations.name in joint.history
    offloads = not is_done and any(map(offload_tag, joint.graph.nodes))
    return pass_list(config, model_offloads=offloads)


def run_one(
    joint: JointGraph, step: PassStep, numbers: Numbers | None, order: AccessOrder | None = None
) -> tuple[float, str, GraphState, AccessOrder]:
    """Run a pass and check the graph. Both `numbers`, without which the expensive checks are left
    out, and the `order` of reads and writes, if it is known, are of the graph before the pass.

    Returns:
        the seconds of the pass alone, what the expensive checks say of the numbers, and the state
        and the order of the graph after the pass.
    """
    joint.remarks.clear()
    order = order or access_order(joint.graph)
    start = time.perf_counter()
    _run(joint, step)
    seconds = time.perf_counter() - start
    try:
        with unchanging(joint.graph):
            joint.validate()
            order.check_kept(joint)
            state, order = graph_state(joint), access_order(joint.graph)
        verified = ""
        if numbers is not None:
            verify_values(joint)
            may_change_sums = step.graph_pass.changes_sums and not step.context.settings.bitwise
            verified = numbers.check(joint, changes_sums=may_change_sums)
    except VerificationError as error:
        message = f"pass '{step.graph_pass.name}' left an invalid graph: {error}"
        raise VerificationError(_with_history(message, joint, step)) from error
    joint.history.append(step.graph_pass.name)
    return seconds, verified, state, order


def _run(joint: JointGraph, step: PassStep) -> None:
    """Run a pass, naming it in what it raises."""
    try:
        step.run(joint)
    except CollectiveError:  # no fault of the pass that waited for the lost rank
        raise
    except GraphTrainerError as error:
        raise type(error)(_with_history(str(error), joint, step)) from error
    except Exception as error:
        if isinstance(error, RuntimeError) and is_collective_failure(error):
            place = f"what pass '{step.graph_pass.name}' exchanges with other ranks"
            raise CollectiveError(place, reason_of(error)) from error
        frames = traceback.extract_tb(error.__traceback__)[1:]  # without this function's
        of_pass = [f for f in frames if f.filename == frames[min(1, len(frames) - 1)].filename]
        message = f"{type(error).__name__}: {error} ({of_pass[-1].filename}:{of_pass[-1].lineno})"
        raise PassError(_with_history(message, joint, step)) from error


def _with_history(message: str, joint: JointGraph, step: PassStep) -> str:
    """Add to a message a line with the pass and those that ran before it."""
    after = ", ".join(joint.history) or "no other"
    return f"{message}\nRaised by pass '{step.graph_pass.name}', after {after}"
