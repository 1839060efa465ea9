"""What a plan predicts for the published runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache

from benchmarks.published.runs import Setup
from graph_trainer.core.simulation.hardware import Hardware, load_hardware
from graph_trainer.core.simulation.runtimes import TORCHTITAN
from graph_trainer.core.units import GIB
from graph_trainer.planner.bands import Kind, kind_of
from graph_trainer.planner.captures import Captures
from graph_trainer.planner.plan import Plan, make_plan
from graph_trainer.titan.config.load import load_config


@dataclass(frozen=True, slots=True)
class Prediction:
    """The figures of a plan that are compared with published ones."""

    tokens_per_second: float
    """Per GPU."""
    memory_gib: float
    """What the allocator reserves, as torchtitan's metric."""
    peak_bytes: int
    """The most bytes alive at once."""
    fits_device: bool
    kind: Kind


def predict(run: Setup) -> Prediction:
    """Predict a run; the plan of a run is made once in a process."""
    changes = tuple(run.changes.items())
    return _predicted(run.flags, run.ranks, run.hardware, changes, run.fuses_norms)


@cache
def _predicted(
    flags: tuple[str, ...],
    ranks: int,
    profile: str,
    changes: tuple[tuple[str, float], ...],
    fuses_norms: bool,
) -> Prediction:
    hardware = replace(load_hardware(profile), **dict(changes))
    plan = plan_of_run(flags, ranks, hardware, fuses_norms)
    return Prediction(
        tokens_per_second=plan.tokens_per_second_per_gpu,
        memory_gib=plan.need.allocated / GIB,
        peak_bytes=plan.peak_bytes,
        fits_device=plan.need.total <= plan.hardware.memory_bytes,
        kind=kind_of(plan.config),
    )


def plan_of_run(
    flags: tuple[str, ...], ranks: int, hardware: Hardware, fuses_norms: bool = True
) -> Plan:
    """Plan a run as torchtitan runs it, eager or compiled by itself.

    The graph that torchtitan runs does not depend on the speed of a GPU, so the same run on other
    GPUs is simulated again and not made again.
    """
    return _plan_on_any_gpu(flags, ranks, fuses_norms).on(hardware)


@lru_cache(maxsize=1)
def _plan_on_any_gpu(flags: tuple[str, ...], ranks: int, fuses_norms: bool) -> Plan:
    config, hardware = load_config(list(flags), world_size=ranks), load_hardware("h100-sxm")
    runtime = replace(TORCHTITAN, fuses_norms=fuses_norms)
    return make_plan(
        config, ranks, hardware, runtime=runtime, every_pass=False, captures=_captures()
    )


@cache
def _captures() -> Captures:
    """Return the latest captured steps: an eager run and the same one compiled share theirs."""
    return Captures(most=2)
