"""Simulate the most promising runs of a space, and return those that were fastest."""

# The idea: three looks at a run, each ten times as dear as the one before and more exact: formulas,
# models of few layers, all of its graph. The run that looks fastest is looked at next, more
# closely. When the next one looks clearly slower than the best that was simulated, the search ends.

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from statistics import fmean
from typing import NamedTuple

from graph_trainer.core.simulation.hardware import Hardware
from graph_trainer.core.units import GIB
from graph_trainer.errors import ConfigError, GraphTrainerError
from graph_trainer.planner.captures import Captures
from graph_trainer.planner.changes import flags_of, outcome_of
from graph_trainer.planner.fake_rank import FakeProcess
from graph_trainer.planner.pipeline_advice import outcome_of_pipeline
from graph_trainer.planner.pipeline_plan import make_pipeline_plan
from graph_trainer.planner.plan import LoadConfig, Outcome, make_plan
from graph_trainer.planner.processes import Workers
from graph_trainer.planner.search.costs import Costs, ModelSize, Needs
from graph_trainer.planner.search.parts import parts_of_pipeline, parts_of_step
from graph_trainer.planner.search.short_models import estimate, with_budget
from graph_trainer.planner.search.space import Candidate, Space
from graph_trainer.planner.terminal import OnProgress
from graph_trainer.titan.config.run_config import GraphTrainerConfig


class Look(IntEnum):
    """How closely a run has been looked at."""

    FORMULA = 0
    SHORT_MODEL = 1


SLOWER = {Look.FORMULA: 0.15, Look.SHORT_MODEL: 0.05}
"""A run that looks so much slower than the best simulated one is not looked at again: more than
these looks are off."""
LARGER = {Look.FORMULA: 1.5, Look.SHORT_MODEL: 1.1}
"""A run that looks as if it needed so many times the memory is not looked at again."""

SMALL = 24
"""Of so few runs all are simulated that formulas do not find too large."""

RULES = {
    "divide": "the config's own checks refuse it, such as degrees that do not divide heads",
    "state": "weights, optimizer states, and gradients or inputs of layers need more than there is",
    "memory": "an estimate needs more memory than there is",
    "slower": f"slower than the best by an estimate: by {SLOWER[Look.FORMULA]:.0%} by formulas, or "
    f"by {SLOWER[Look.SHORT_MODEL]:.0%} by a short model",
    "same": "a budget in which nothing is recomputed is that of no policy",
    "error": "they cannot be planned",
    "left": "not looked at closely before the search ended",
}
"""Why runs were not simulated."""


class Simulated(NamedTuple):
    """A run that was simulated."""

    run: Candidate
    outcome: Outcome
    parts: dict[str, float]
    """What the step consists of, in seconds."""


@dataclass(slots=True)
class Found:
    """What a search knows when it ends."""

    rows: list[Simulated] = field(default_factory=list)
    """The simulated runs; those that fit first, the fastest first."""
    left_out: Counter[str] = field(default_factory=Counter)
    """How many runs were not simulated, by rule."""
    total: int = 0
    """All runs of the space."""
    bound_tokens: float = 0.0
    """Tokens a second and GPU that no run of the space exceeds in the simulator."""
    estimated: int = 0
    """Runs that were estimated by short models."""
    errors: list[float] = field(default_factory=list)
    """Simulated by estimated seconds of runs that were estimated by short models."""
    seconds: float = 0.0
    error: str = ""
    """Why the first of the runs that cannot be planned cannot."""
    note: str = ""
    """Why the search ended early, if not for the time."""
    nearest: tuple[Candidate, float] | None = None
    """The run that seems to need least, and the bytes that it needs."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing was left when the search ended."""
        return not self.left_out["left"]


class _Family(NamedTuple):
    """Runs that differ in the policy of activations alone."""

    runs: tuple[Candidate, ...]


class _Entry(NamedTuple):
    """A family, or a run of it, in the order in which they are looked at: fastest first."""

    order: float
    """Tokens a second and GPU of the fastest, negative."""
    number: int
    """Of the entry; the first of equally fast ones comes first."""
    what: _Family | Candidate


_Estimates = dict[Candidate, Needs | None]
"""Of the runs of a family; None for one that cannot be planned."""


def search(
    space: Space,
    load: LoadConfig,
    hardware: Hardware,
    *,
    seconds: float,
    processes: int,
    on_progress: OnProgress,
) -> Found:
    """Search a space for its fastest runs, for so long at most, or until Ctrl-C.

    Args:
        load: loads the config with a change.
        seconds: after which no further run is looked at.
        processes: how many look at runs at once at most.

    Raises:
        ConfigError: no run of the space can be configured.
    """
    start = time.monotonic()
    queue = _Queue(space, load, hardware, on_progress)
    planner = _Planner(space.world_size, load, hardware, queue.limit_gib)
    note = ""
    with Workers(planner, processes) as workers:
        try:
            while True:
                while workers.free and time.monotonic() - start < seconds:
                    following = queue.next()
                    if following is None:
                        break
                    workers.submit(following)
                if not workers.busy:
                    break
                queue.take(*workers.next())
                on_progress(queue.state)
        except KeyboardInterrupt:
            note = "interrupted"
        except GraphTrainerError as error:  # a process was killed
            note = str(error)
    return queue.end(time.monotonic() - start, note)


def limit_gib(config: GraphTrainerConfig, hardware: Hardware) -> float:
    """Return what a step may need of a device: its memory, or the limit where that is less."""
    return min(config.compile.memory_limit_gib or hardware.memory_gib, hardware.memory_gib)


class _Queue:
    """The runs of a space, in the order in which they are looked at."""

    def __init__(
        self, space: Space, load: LoadConfig, hardware: Hardware, on_progress: OnProgress
    ) -> None:
        self.limit_gib = limit_gib(space.config, hardware)
        self._world_size, self._load = space.world_size, load
        self._found = Found()
        self._refusals: dict[Candidate, ConfigError | None] = {}
        runs = list(space.candidates())
        self._found.total = len(runs)
        on_progress(f"{len(runs):,} runs")
        config = self._first_config(runs)
        size = ModelSize.of(FakeProcess(config, space.world_size, 0, hardware.device))
        allowed = int(self.limit_gib * GIB)
        self._costs = Costs(space.config, size, hardware, space.world_size, allowed)
        self._best = 0.0
        self._in_flight: set[_Family | Candidate] = set()
        """What processes look at."""
        self._estimates: dict[Candidate, Needs] = {}
        """By short models; of pipelines by formulas."""
        self._corrections: dict[object, list[float]] = defaultdict(list)
        """Seconds found as a part of those by formulas, of runs of which these leave out the
        same."""
        self._larger: dict[object, list[float]] = defaultdict(list)
        """The same for the memory of pipelines, which are simulated at once."""
        families: dict[Candidate, list[Candidate]] = defaultdict(list)
        for run in runs:
            bound, about = self._costs.bound(run), self._costs.estimate(run)
            self._note_need(run, about.needed_bytes)
            if bound.needed_bytes > allowed:
                self._found.left_out["state"] += 1
            elif about.needed_bytes > LARGER[Look.FORMULA] * allowed:
                self._found.left_out["memory"] += 1
            else:
                self._found.bound_tokens = max(self._found.bound_tokens, self._speed(run, bound))
                families[replace(run, policy="", offload=False)].append(run)
        self._queue = [
            _Entry(self._order(family), number, family)
            for number, family in enumerate(_Family(tuple(runs)) for runs in families.values())
        ]
        heapq.heapify(self._queue)
        self._numbers = itertools.count(len(self._queue))

    def _first_config(self, runs: list[Candidate]) -> GraphTrainerConfig:
        """Return the config of the first run that the config's checks take.

        Raises:
            ConfigError: there is none.
        """
        refusal: ConfigError | None = None
        for run in dict.fromkeys(map(_checked_for, runs)):
            refusal = self._refusal(run)
            if refusal is None:
                return self._load(flags_of(run.change(self.limit_gib)))
        why = refusal or (
            f"no degrees multiply to {self._world_size} ranks, or none divides the global batch: "
            "fix fewer keys, or give another --global-batch"
        )
        raise ConfigError(f"the search has no run to choose from: {why}")

    def _refusal(self, run: Candidate) -> ConfigError | None:
        """Return why the config's checks refuse a run; None where they do not."""
        checked = _checked_for(run)
        if checked not in self._refusals:
            self._refusals[checked] = None
            try:
                self._load(flags_of(checked.change(self.limit_gib)))
            except ConfigError as error:
                self._refusals[checked] = error
        return self._refusals[checked]

    def _speed(self, run: Candidate, needs: Needs) -> float:
        """Return tokens a second and GPU."""
        return self._costs.tokens(run) / self._world_size / needs.seconds

    def _order(self, what: _Family | Candidate) -> float:
        """Return the order of an entry by what is known of it now."""
        if isinstance(what, Candidate) and what.pipeline == 1:
            return -self._speed(what, self._estimates[what])
        if isinstance(what, Candidate):
            return -self._speed(what, self._by_formulas(what))
        return -max(self._speed(run, self._by_formulas(run)) for run in what.runs)

    def _by_formulas(self, run: Candidate) -> Needs:
        """Estimate a run by formulas and by what these were off by for runs like it."""
        needs, alike = self._costs.estimate(run), _alike(run)
        slower, larger = (fmean(of.get(alike, (1.0,))) for of in (self._corrections, self._larger))
        return Needs(needs.seconds * slower, needs.needed_bytes * larger)

    @property
    def state(self) -> str:
        """What has been done, in one line."""
        return (
            f"{len(self._found.rows)} runs simulated, {self._found.estimated} estimated, "
            f"{self._found.left_out.total():,} left out, {self._left():,} left; best "
            f"{self._best:,.0f} tokens/s/GPU"
        )

    def _left(self) -> int:
        return sum(_count(entry.what) for entry in self._queue) + sum(map(_count, self._in_flight))

    def _note_need(self, run: Candidate, needed_bytes: float) -> None:
        """Keep which run seems to need least."""
        nearest = self._found.nearest
        if nearest is None or needed_bytes < nearest[1]:
            self._found.nearest = run, needed_bytes

    def next(self) -> _Family | Candidate | None:
        """Return what to look at next; None where all that is left looks clearly slower than the
        best."""
        while self._queue:
            entry = heapq.heappop(self._queue)
            order = self._order(entry.what)
            if self._queue and order > self._queue[0].order:  # slower than it had looked
                heapq.heappush(self._queue, entry._replace(order=order))
                continue
            if self._is_slower(entry.what, order):
                self._found.left_out["slower"] += _count(entry.what)
            elif isinstance(entry.what, Candidate) and self._is_too_large(entry.what):
                self._found.left_out["memory"] += 1
            elif isinstance(entry.what, _Family) and self._refusal(entry.what.runs[0]):
                self._found.left_out["divide"] += _count(entry.what)
            elif isinstance(entry.what, _Family) and not self._needs_short_models(entry.what):
                for run in entry.what.runs:
                    self._estimated(run, self._by_formulas(run))
            else:
                self._in_flight.add(entry.what)
                return entry.what
        return None

    def _is_too_large(self, run: Candidate) -> bool:
        """Return whether a run looks too large by now: of pipelines formulas are corrected."""
        needs = self._by_formulas(run) if run.pipeline > 1 else self._estimates[run]
        return needs.needed_bytes > LARGER[Look.SHORT_MODEL] * self._costs.allowed_bytes

    def _needs_short_models(self, family: _Family) -> bool:
        """Return whether short models tell more: they have too few layers for the stages of a
        pipeline, and a small space is simulated anyway."""
        return family.runs[0].pipeline == 1 and self._found.total > SMALL

    def _is_slower(self, what: _Family | Candidate, order: float) -> bool:
        if self._found.total <= SMALL:
            return False
        by_formulas = isinstance(what, _Family) or what.pipeline > 1
        look = Look.FORMULA if by_formulas else Look.SHORT_MODEL
        return -order * (1 + SLOWER[look]) < self._best

    def take(self, what: _Family | Candidate, answer: Simulated | _Estimates) -> None:
        """Take what a look at a family or a run has found."""
        self._in_flight.discard(what)
        if isinstance(answer, dict):
            assert isinstance(what, _Family)
            for run, needs in answer.items():
                if needs is not None:
                    self._found.estimated += 1
                    self._correct(run, needs)
            for run in what.runs:
                if run in answer:
                    self._estimated(run, answer[run])
                else:
                    self._found.left_out["same"] += 1
            return
        outcome, run = answer.outcome, answer.run
        if outcome.error:
            self._found.left_out["error"] += 1
            self._found.error = self._found.error or outcome.error
            return
        self._found.rows.append(answer)
        if outcome.fits:
            self._best = max(self._best, outcome.tokens_per_second_per_gpu)
        if run.pipeline > 1:
            self._correct(run, Needs(outcome.step_seconds, outcome.needed_bytes))
        elif self._found.estimated:
            estimated = self._speed(run, self._estimates[run])
            self._found.errors.append(outcome.tokens_per_second_per_gpu / estimated)

    def _correct(self, run: Candidate, needs: Needs) -> None:
        """Compare what is known of a run with formulas, for others that are like it."""
        by_formulas, alike = self._costs.estimate(run), _alike(run)
        self._corrections[alike].append(needs.seconds / by_formulas.seconds)
        if run.pipeline > 1:
            self._larger[alike].append(needs.needed_bytes / by_formulas.needed_bytes)

    def _estimated(self, run: Candidate, needs: Needs | None) -> None:
        """Take the estimate of a run, None for one that cannot be planned."""
        if needs is None:
            self._found.left_out["error"] += 1
            return
        self._estimates[run] = needs
        entry = _Entry(self._order(run), next(self._numbers), run)
        heapq.heappush(self._queue, entry)

    def end(self, seconds: float, note: str) -> Found:
        """Return what has been found.

        Args:
            seconds: that the search took.
            note: why it ended early.
        """
        result = self._found
        result.note = note
        result.left_out["left"] += sum(map(_count, self._in_flight))
        for entry in self._queue:
            is_slower = self._is_slower(entry.what, self._order(entry.what))
            result.left_out["slower" if is_slower else "left"] += _count(entry.what)
        result.rows.sort(key=_best_first)
        result.seconds = seconds
        return result


def _best_first(row: Simulated) -> tuple[bool, float, str]:
    outcome = row.outcome
    return not outcome.fits, -outcome.tokens_per_second_per_gpu, repr(row.run)


def _count(what: _Family | Candidate) -> int:
    return len(what.runs) if isinstance(what, _Family) else 1


def _checked_for(run: Candidate) -> Candidate:
    """Return a run that the config's checks take or refuse as they do this one: policies divide
    nothing, replicas as shards, and local batches only those of a pipeline, its microbatches."""
    shard = run.replicate * run.shard
    run = replace(run, replicate=1, shard=shard, reshard="default", policy="full", offload=False)
    return run if run.pipeline > 1 else replace(run, rows=1, repeats=1)


def _alike(run: Candidate) -> object:
    """Return what runs share of which formulas leave out the same."""
    return run.pipeline, run.schedule, run.tensor, run.expert > 1, run.policy


class _Planner:
    """Looks at families and runs, in a process of its own, where it keeps captured steps."""

    def __init__(
        self, world_size: int, load: LoadConfig, hardware: Hardware, limit_gib: float
    ) -> None:
        self._world_size, self._load, self._hardware = world_size, load, hardware
        self._limit_gib = limit_gib
        self._plan = partial(
            make_plan,
            world_size=world_size,
            hardware=hardware,
            every_pass=False,
            captures=Captures(12),
        )

    def __call__(self, what: _Family | Candidate) -> Simulated | _Estimates:
        """Simulate a run, or estimate the runs of a family by short models."""
        if isinstance(what, Candidate):
            return self._simulated(what)
        return dict(self._estimates(what))

    def _simulated(self, run: Candidate) -> Simulated:
        change = run.change(self._limit_gib)
        try:
            config = self._load(flags_of(change))
            if run.pipeline > 1:
                pipeline = make_pipeline_plan(config, self._world_size, self._hardware)
                outcome = outcome_of_pipeline(change, pipeline)
                return Simulated(run, outcome, parts_of_pipeline(pipeline))
            plan = self._plan(config)
            return Simulated(run, outcome_of(change, plan), parts_of_step(plan))
        except GraphTrainerError as error:
            return Simulated(run, Outcome(config=change, error=str(error)), {})

    def _estimates(self, family: _Family) -> Iterator[tuple[Candidate, Needs | None]]:
        """Yield estimates; a budget's is between that of no policy and that of "full".

        A budget in which the run without a policy fits is left out, where that is a run too.
        """
        by_policy: dict[str, Needs | None] = {}
        policies = {run.policy for run in family.runs}
        allowed = int(self._limit_gib * GIB)

        def of_policy(policy: str) -> Needs | None:
            if policy not in by_policy:
                run = replace(family.runs[0], policy=policy, offload=False)
                try:
                    config = self._load(flags_of(run.change(self._limit_gib)))
                    by_policy[policy] = estimate(config, self._plan)
                except GraphTrainerError:
                    by_policy[policy] = None
            return by_policy[policy]

        for run in family.runs:
            if run.policy != "budget":
                yield run, of_policy(run.policy)
                continue
            none, full = of_policy("none"), of_policy("full")
            if none is None or full is None:
                yield run, None
            elif none.needed_bytes > allowed or "none" not in policies:
                yield run, with_budget(none, full, allowed)
