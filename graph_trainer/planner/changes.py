"""Plan a run with other settings: what would help, combinations, step time over memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from graph_trainer.core.analysis.memory import Category
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.passes.context import ActivationPolicy
from graph_trainer.core.passes.memory_limit import enough_gib
from graph_trainer.core.passes.pipeline import pass_by_pass, run_before
from graph_trainer.core.passes.plan_memory.plan_memory import plan_memory, plans_between
from graph_trainer.core.runtime.backends.registry import BACKENDS, find_backend
from graph_trainer.core.simulation.simulate import simulate
from graph_trainer.core.units import GIB, gib
from graph_trainer.errors import ConfigError, GraphTrainerError
from graph_trainer.planner.captures import what_is_captured
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.planner.ledger import row_of
from graph_trainer.planner.plan import LoadConfig, Outcome, Plan, make_plan, plan_of
from graph_trainer.planner.processes import in_processes
from graph_trainer.planner.terminal import OnProgress
from graph_trainer.titan.config.core_settings import LIMIT_KEY, config_keys_in_errors
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.config.sources import COMMAND_LINE
from graph_trainer.titan.routing import mixtures_of

SCHEMA = "graph_trainer.plan.comparison/2"
"""Of the JSON document of a comparison: bytes and seconds."""

Change = dict[str, str]
"""By key of the config, a value as on the command line."""

POLICY = "activation_checkpoint.type"
RESHARD = "parallelism.fsdp_reshard_after_forward"
_PLANS = 9
"""The number of plans of memory that a curve is drawn through at most."""

_SHARDED = (Category.PARAMETERS, Category.OPTIMIZER_STATE, Category.GRADIENTS)

_LEAST = 0.01
"""The smallest saving that is worth a mention, as a part of the whole. Predicted peaks are no
closer to measured ones (test_published_runs)."""


def flags_of(change: Mapping[str, str]) -> tuple[str, ...]:
    """Return the flags that make a change."""
    flags: list[str] = []
    for key, value in change.items():
        section, _, name = key.rpartition(".")
        switch = {"true": f"--{key}", "false": f"--{section}.no_{name}"}.get(value.lower())
        flags += [switch] if switch else [f"--{key}", value]
    return tuple(flags)


def outcome_of(change: Change, plan: Plan) -> Outcome:
    """Sum up the plan of a changed run."""
    band = plan.band
    return Outcome(
        config=change,
        fits=plan.fits,
        needed_bytes=plan.need.total,
        peak_bytes=plan.peak_bytes,
        step_seconds=plan.step_seconds,
        exposed_seconds=plan.microbatches * plan.rows[-1].exposed,
        tokens_per_second_per_gpu=plan.tokens_per_second_per_gpu,
        mfu=plan.mfu,
        mfu_causal=plan.mfu_causal,
        band=band,
        tokens_per_second_per_gpu_range=band.of_rate(plan.tokens_per_second_per_gpu)
        if band
        else None,
        step_seconds_range=band.of_time(plan.step_seconds) if band else None,
        mfu_range=band.of_rate(plan.mfu) if band else None,
    )


def changes_that_help(plan: Plan) -> Iterator[Change]:
    """Yield the changes with which a run that needs too much memory may need less.

    Where a plan of memory has filled more than the device has, the only one is a limit of that.
    """
    decided, room = plan.memory_table is not None, plan.hardware.memory_bytes
    if decided and plan.allowed_bytes == room:
        yield {LIMIT_KEY: f"{plan.hardware.memory_gib:g}"}
        return
    if plan.allowed_bytes < plan.need.total <= room:
        yield {LIMIT_KEY: enough_gib(plan.need.total)}
    config = plan.config
    training, parallelism = config.training, config.parallelism
    checkpointing = config.activation_checkpoint
    policy = type(checkpointing).__qualname__ if checkpointing else ""
    # It frees what is unsharded at the peak, and gaps of the allocator in proportion.
    unsharded = plan.simulation.memory.peak_by_category()[Category.UNSHARDED]
    freed = unsharded * plan.need.allocated / plan.need.alive
    enough = min(_LEAST * plan.need.total, -plan.headroom_bytes)
    if parallelism.fsdp_reshard_after_forward != "always" and freed >= enough:
        yield {RESHARD: "always"}
    if "Full" not in policy and not decided:
        yield {POLICY: "full"}
    if not policy:
        yield {POLICY: "selective"}
    if training.local_batch_size > 1:
        yield {"training.local_batch_size": str(training.local_batch_size // 2)}
    yield {"training.seq_len": str(training.seq_len // 2)}
    if parallelism.data_parallel_replicate_degree > 1:
        yield {
            "parallelism.data_parallel_replicate_degree": "1",
            "parallelism.data_parallel_shard_degree": "-1",
        }
    for name in ("tensor_parallel_degree", "context_parallel_degree"):
        degree = 2 * getattr(parallelism, name)
        if parallelism.data_parallel_shard_degree == -1 and plan.world_size % degree == 0:
            yield {f"parallelism.{name}": str(degree)}
    if config.model_spec and mixtures_of(config.model_spec.model):
        experts = 2 * parallelism.expert_parallel_degree
        yield {"parallelism.expert_parallel_degree": str(experts)}
    if "Chunked" not in type(config.loss).__qualname__:
        yield {"loss.type": "chunked_cross_entropy"}
    if not find_backend(config.compile.backend).fuses_ops:
        for backend in BACKENDS.values():
            if backend.fuses_ops:
                yield {"compile.backend": backend.name}


def advise(
    plan: Plan, load: LoadConfig, on_progress: OnProgress, processes: int = 1
) -> list[Outcome]:
    """Plan the run again with one setting changed at a time.

    Args:
        plan: the plan of a run that does not fit.
        processes: how many plan at once at most.

    Returns:
        the changes that make the run fit or need clearly less memory, first those with which it
        fits and of them the one that needs least, without those that the config excludes.
    """
    planned = partial(_planner_of(plan), world_size=plan.world_size, captures=plan.captures)
    # The first share the capture of the plan: the others, which take longer, begin.
    configs = loaded(list(changes_that_help(plan))[::-1], load)
    outcomes = plan_each(configs, planned, on_progress, processes)
    helpful = (1 - _LEAST) * plan.need.total
    advice = [
        outcome
        for outcome in outcomes
        if not outcome.error and (outcome.fits or outcome.needed_bytes < helpful)
    ]
    return sorted(advice, key=lambda outcome: (not outcome.fits, outcome.needed_bytes))


def fewest_ranks(plan: Plan, load: LoadConfig, on_progress: OnProgress) -> list[Outcome]:
    """Plan a run that does not fit on more ranks, which shard its state further.

    Returns:
        the run on the fewest ranks, doubled up to 64 times as many, on which it fits; nothing where
        there is none, or where the config says how many ranks shard.
    """
    if plan.config.parallelism.data_parallel_shard_degree != -1:
        return []
    at_peak = plan.simulation.memory.peak_by_category()
    sharded = sum(at_peak[category] for category in _SHARDED)
    for more in (2, 4, 8, 16, 32, 64):
        if plan.headroom_bytes + sharded * (1 - 1 / more) < 0:
            continue
        ranks = more * plan.world_size
        on_progress(f"{ranks:,} ranks")
        try:
            on_more = _planner_of(plan)(load((), ranks), world_size=ranks)
        except GraphTrainerError:  # a batch that so many ranks do not divide
            return []
        if on_more.fits:
            return [outcome_of({"world-size": str(ranks)}, on_more)]
    return []


def fitting_together(
    plan: Plan, advice: Iterable[Outcome], load: LoadConfig, on_progress: OnProgress
) -> list[Outcome]:
    """Plan a run that no change makes fit with several: the most helpful, then one more at a time.

    Returns:
        the first of these runs that fits; nothing where none does, or where one change is enough, a
        higher limit left aside.
    """
    by_need = [outcome for outcome in advice if LIMIT_KEY not in outcome.config]
    if any(outcome.fits for outcome in by_need):
        return []
    planned = partial(_planner_of(plan), world_size=plan.world_size, captures=plan.captures)
    changed: Change = {}
    for outcome in sorted(by_need, key=lambda outcome: outcome.needed_bytes):
        more = changed | {key: v for key, v in outcome.config.items() if key not in changed}
        if changed and more != changed:
            (outcome,) = plan_each(loaded([more], load), planned, on_progress, 1)
            if outcome.fits:
                return [outcome]
            if outcome.error:  # they exclude each other
                continue
        changed = more
    return []


def _planner_of(plan: Plan) -> Callable[..., Plan]:
    """Return `make_plan` for the rank, hardware and runtime of a plan, without the ledger."""
    runtime = plan.simulation.runtime
    return partial(
        make_plan, hardware=plan.hardware, rank=plan.rank, runtime=runtime, every_pass=False
    )


Loaded = list[tuple[Change, GraphTrainerConfig | ConfigError]]
"""Changes, each with the changed config, or with why it excludes the change."""


def loaded(changes: Sequence[Change], load: LoadConfig) -> Loaded:
    """Load the config of every change."""
    configs: Loaded = []
    for change in changes:
        try:
            configs.append((change, load(flags_of(change))))
        except ConfigError as error:
            configs.append((change, error))
    return configs


def plan_each(
    configs: Loaded,
    plan: Callable[[GraphTrainerConfig], Plan],
    on_progress: OnProgress,
    processes: int,
) -> list[Outcome]:
    """Plan changed configs, at most `processes` at once. Those of one captured step follow each
    other, so that it is captured once; those that cannot be planned have an error."""
    by_step: dict[str, Loaded] = {}
    for change, config in configs:
        step = "" if isinstance(config, ConfigError) else what_is_captured(config)
        by_step.setdefault(step, []).append((change, config))
    ordered = list(itertools.chain.from_iterable(by_step.values()))

    def planned(number: int) -> Outcome:
        change, config = ordered[number]
        try:
            if isinstance(config, ConfigError):
                raise config
            return outcome_of(change, plan(config))
        except GraphTrainerError as error:
            return Outcome(config=change, error=str(error))

    def announce(number: int) -> None:
        words = ", ".join(f"{key} = {value}" for key, value in ordered[number][0].items())
        on_progress(f"{number + 1} of {len(ordered)}: {words}")

    return in_processes(planned, range(len(ordered)), processes, on_start=announce)


def settings(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parse the settings that `--compare` names; a semicolon separates values that are lists.

    Returns:
        by key, the values to try.

    Raises:
        ConfigError: no `key=value,value`, or a key twice.
    """
    values_of: dict[str, tuple[str, ...]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        between = ";" if ";" in values else ","
        entries = tuple(v.strip() for v in values.split(between) if v.strip())
        key = key.strip().removeprefix("--").replace("-", "_")
        if not key or not equals or not entries:
            raise ConfigError(
                f"--compare {text}: write key=value,value, such as "
                "parallelism.fsdp_reshard_after_forward=always,never; values that are lists are "
                "separated by ;"
            )
        if key in values_of:
            raise ConfigError(f"--compare {key} is given twice: write all its values in one")
        values_of[key] = tuple(dict.fromkeys(entries))
    return values_of


def combinations(wanted: Mapping[str, Sequence[str]]) -> list[Change]:
    """List all combinations of values by key, in the order in which the values are given."""
    return [
        dict(zip(wanted, combination, strict=True))
        for combination in itertools.product(*wanted.values())
    ]


def compare(
    wanted: Mapping[str, Sequence[str]],
    load: LoadConfig,
    plan: Callable[[GraphTrainerConfig], Plan],
    on_progress: OnProgress,
    processes: int = 1,
) -> list[Outcome]:
    """Plan every combination, those that fit first and the fastest of them first.

    Every config is loaded before the first is planned. At most `processes` plan at once.

    Raises:
        ConfigError: a key or a value that no combination can have.
    """
    configs = loaded(combinations(wanted), load)
    for key, values in wanted.items():
        for value in values:
            of_value = [config for change, config in configs if change[key] == value]
            errors = [config for config in of_value if isinstance(config, ConfigError)]
            if len(errors) == len(of_value):
                why = str(errors[0]).replace(f"{COMMAND_LINE}: ", "")
                raise ConfigError(f"--compare {key}={value}: no row can have it: {why}")
    outcomes = plan_each(configs, plan, on_progress, processes)
    outcomes.sort(key=lambda o: (bool(o.error), not o.fits, -o.tokens_per_second_per_gpu))
    return outcomes


@config_keys_in_errors()
def memory_curve(plan: Plan, on_progress: OnProgress, processes: int = 1) -> list[Outcome]:
    """Plan the run under every fixed policy, and under plans of memory from the least to the most.

    The step is captured at most once. At most `processes` plan at once. A plan's limit is what it
    needs, rounded up: a run with this limit takes no longer. Parameters are kept unsharded or
    gathered again as the plan chooses ("auto"). A plan that is no faster than one of less memory is
    left out.

    Raises:
        CaptureError, PassError, VerificationError: as `make_plan`.
    """
    run = FakeRank(plan.config, plan.world_size, plan.rank, plan.hardware.device)
    of_run = run.pass_config(hardware=plan.hardware)
    auto = of_run.reshard_after_forward == "auto"
    passes = replace(
        of_run,
        activation_policy="none",
        reshard_after_forward="default" if auto else of_run.reshard_after_forward,
        memory_limit_gib=0.0,
    )

    def summed_up(change: Change, trial: JointGraph) -> Outcome:
        simulation = simulate(trial, plan.hardware, passes.other_memory(trial))
        rows = [row_of(simulation)]
        return outcome_of(change, plan_of(plan.config, run, passes, rows, simulation))

    def fixed(policy: ActivationPolicy) -> Outcome:
        if policy == of_run.activation_policy and not auto and not plan.limit_bytes:
            return outcome_of({POLICY: policy}, plan)
        trial = plan.captures.of(run)
        list(pass_by_pass(trial, replace(passes, activation_policy=policy)))
        return summed_up({POLICY: policy}, trial)

    spread = partial(in_processes, processes=processes)
    policies: tuple[ActivationPolicy, ...] = ("none", "selective", "full")
    outcomes = spread(fixed, policies, on_start=lambda policy: on_progress(f"the policy {policy}"))
    captured = plan.captures.of(run)
    planned = replace(
        passes,
        activation_policy="budget",
        reshard_after_forward="auto",
        memory_limit_gib=plan.hardware.memory_gib,
    )
    context = run_before(captured, planned, plan_memory)
    plans = plans_between(captured, context, _PLANS)

    def between(kept_and_trial: tuple[int, Callable[[], JointGraph]]) -> Outcome:
        _, trial = kept_and_trial
        outcome = summed_up({POLICY: "budget"}, trial())
        limit = math.ceil(outcome.needed_bytes / GIB * 1e4) / 1e4
        return replace(outcome, config=outcome.config | {LIMIT_KEY: f"{limit:.4f}"})

    def announce(kept_and_trial: tuple[int, Callable[[], JointGraph]]) -> None:
        kept_bytes, _ = kept_and_trial
        on_progress(f"a plan that keeps {gib(kept_bytes)} GiB")

    limited = spread(between, plans, on_start=announce)
    fastest = math.inf
    for outcome in sorted(
        limited, key=lambda outcome: (outcome.needed_bytes, outcome.step_seconds)
    ):
        if outcome.step_seconds < fastest:
            outcomes.append(outcome)
            fastest = outcome.step_seconds
    return outcomes
