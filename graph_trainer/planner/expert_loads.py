"""What a step needs and takes where tokens are spread unevenly over the ranks of experts.

Nothing is captured again: the sizes of one graph are read under other assumptions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch

from graph_trainer.core.analysis.memory import Memory
from graph_trainer.core.graph.annotations import block_of
from graph_trainer.core.graph.data_sizes import DataSizes, data_sizes_in
from graph_trainer.core.simulation.simulate import need_of, predicted_memory
from graph_trainer.errors import ConfigError
from graph_trainer.planner.plan import ExpertLoad, ExpertLoads, Plan
from graph_trainer.planner.terminal import OnProgress
from graph_trainer.titan.config.check_parallelism import wrong_imbalance
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.routing import RoutedMicrobatch, Routing


def check_imbalances(flag: str, imbalances: Sequence[float], config: GraphTrainerConfig) -> None:
    """Refuse what needs expert parallelism where there is none, and more tokens than there are.

    Args:
        flag: what asks for it, for messages.

    Raises:
        ConfigError: as said.
    """
    wrong = wrong_imbalance(config, max(imbalances, default=1.0))
    if wrong is not None:
        problem, remedy = wrong
        number = f" {max(imbalances):g}" if imbalances else ""
        raise ConfigError(f"{flag}{number}: {problem}. {remedy}, or leave the flag out.")


def expert_loads(
    plan: Plan,
    imbalances: Sequence[float],
    routing: Routing | None,
    on_progress: OnProgress = lambda line: None,
) -> ExpertLoads:
    """Compute the loads of a planned step, and the greatest imbalances with which it fits.

    An imbalance is what a rank's experts receive, in times of an even share, in every layer. Memory
    and time of a row are of the same imbalance, whichever the plan counts with.

    Args:
        plan: of a run with expert parallelism.
        imbalances: a row each.
        routing: where the tokens of a run went, of the same model. Scaled to the tokens of this
            plan, where it had others. What each rank received is known if it had as many ranks and
            the same degree; otherwise its experts are divided anew, and the tokens of an expert are
            the same from every group.
    """
    degree = plan.config.parallelism.expert_parallel_degree
    rows = []
    for imbalance in imbalances:
        on_progress(f"an imbalance of {imbalance:g}")
        rows.append(_load(f"{imbalance:g}", imbalance, _with(plan, imbalance)))
    layers: dict[str, float] = {}
    if routing is not None:
        on_progress("the routing that happened")
        load, layers = _replayed(plan, routing)
        rows.append(load)
    on_progress("all tokens to one rank")
    rows.append(_load("all tokens to one rank", degree, _with(plan, degree)))
    on_progress("the greatest imbalance that fits")

    @cache
    def needed(hundredths: int) -> int:
        memory = _memory(plan, hundredths / 100)
        return need_of(memory, plan.hardware, plan.simulation.runtime).total

    return ExpertLoads(
        degree,
        tuple(rows),
        _greatest_within(plan.allowed_bytes, needed, degree),
        _greatest_within(plan.hardware.memory_bytes, needed, degree),
        layers,
    )


def data_sizes(plan: Plan) -> DataSizes:
    """Return the sizes that data decide of a run with expert parallelism."""
    sizes = data_sizes_in(plan.simulation.joint.graph)
    assert sizes is not None, "there is expert parallelism"
    return sizes


def _with(plan: Plan, received: float | Sequence[int]) -> Plan:
    """Return a plan of the same graph whose rank receives other numbers of rows."""
    with data_sizes(plan).assuming(received):
        simulation = plan.simulation.again()
        return replace(plan, simulation=simulation, need=simulation.need())


def _memory(plan: Plan, received: float | Sequence[int]) -> Memory:
    """Return the memory alone of what `_with` simulates."""
    done = plan.simulation
    with data_sizes(plan).assuming(received):
        other = done.other._replace(expert_imbalance=1.0)
        return predicted_memory(done.joint, plan.hardware, other, done.runtime)


def _load(what: str, imbalance: float, plan: Plan) -> ExpertLoad:
    needed, seconds = plan.need.total, plan.step_seconds
    fits_device = needed <= plan.hardware.memory_bytes
    return ExpertLoad(what, imbalance, plan.peak_bytes, needed, seconds, plan.fits, fits_device)


def _greatest_within(allowed: int, needed: Callable[[int], int], degree: int) -> float | None:
    """Bisect between an even share and all tokens; None where even shares need more than allowed.

    Args:
        needed: bytes by imbalance, in hundredths of an even share.
    """
    low, high = 100, 100 * degree
    if needed(low) > allowed:
        return None
    if needed(high) <= allowed:
        return float(degree)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= allowed else (low, middle)
    return low / 100


def _replayed(plan: Plan, routing: Routing) -> tuple[ExpertLoad, dict[str, float]]:
    """Return the load of a routing, and by layer its greatest imbalance.

    Memory is that of the rank with the highest peak. Time is that of the microbatch in which the
    fullest ranks of all layers receive most: in every layer each rank waits for the fullest one.
    """
    sizes = data_sizes(plan)
    even = sizes.received_rows()
    peak_of = _peaks(plan)
    highest, worst, worst_step = 0.0, even, 0
    most, slowest, slow_step = 0, even, 0
    fullest = [0 for _ in even]
    for microbatch in routing.microbatches:
        ranks = received_rows(plan, routing, microbatch)
        peaks = peak_of(ranks)
        rank = max(range(len(ranks)), key=peaks.__getitem__)
        if peaks[rank] > highest:
            highest, worst, worst_step = peaks[rank], ranks[rank], microbatch.step
        of_any = [max(layer) for layer in zip(*ranks, strict=True)]
        if sum(of_any) > most:
            most, slowest, slow_step = sum(of_any), of_any, microbatch.step
        fullest = [max(pair) for pair in zip(fullest, of_any, strict=True)]
    layers = {
        block_of(exchange.module) or "": number / share
        for exchange, number, share in zip(sizes.exchanges, fullest, even, strict=True)
    }
    what = f"as routed: memory of step {worst_step}, time of step {slow_step}"
    load = _load(what, max(layers.values()), _with(plan, worst))
    return replace(load, step_seconds=_with(plan, slowest).step_seconds), layers


def _peaks(plan: Plan) -> Callable[[list[list[int]]], list[float]]:
    """Return a function that gives the peak bytes of ranks, from the rows of their exchanges.

    The bytes alive at a node grow by as much with each row of an exchange, so that one more row of
    each shows what all others need. One analysis for each exchange.
    """
    even = data_sizes(plan).received_rows()
    alive = torch.tensor(_memory(plan, even).total, dtype=torch.float64)
    growth = torch.empty(len(even), len(alive), dtype=torch.float64)
    for number in range(len(even)):
        rows = [share + (place == number) for place, share in enumerate(even)]
        growth[number] = torch.tensor(_memory(plan, rows).total) - alive
    shares = torch.tensor(even, dtype=torch.float64)
    without = alive - shares @ growth
    # the peak is at none of the nodes that need less with all rows than another one without any
    degree = plan.config.parallelism.expert_parallel_degree
    near = without + degree * shares @ growth >= without.max()
    without, growth = without[near], growth[:, near]

    def peaks(ranks: list[list[int]]) -> list[float]:
        rows = torch.tensor(ranks, dtype=torch.float64)
        highest: list[float] = (without + rows @ growth).amax(dim=1).tolist()
        return highest

    return peaks


def received_rows(plan: Plan, routing: Routing, microbatch: RoutedMicrobatch) -> list[list[int]]:
    """Return by rank, of the run or of one expert-parallel group, the rows of every exchange."""
    degree = plan.config.parallelism.expert_parallel_degree
    sizes = data_sizes(plan)
    of_ranks = microbatch.received
    if (routing.world_size, routing.expert_parallel_degree) != (plan.world_size, degree):
        of_ranks = None
    if of_ranks is None:  # the experts of a rank follow each other
        part = routing.num_experts // degree
        starts = range(0, routing.num_experts, part)
        of_ranks = [[sum(layer[i : i + part]) for i in starts] for layer in microbatch.tokens]
    rows = []
    for exchange, even in zip(sizes.exchanges, sizes.received_rows(), strict=True):
        tokens = of_ranks[routing.layers.index(block_of(exchange.module) or "")]
        total, ranks = sum(tokens), len(tokens)
        # rounded up; of the same run, `even` is the total divided by the ranks, and this is exact
        rows.append([-(-number * even * ranks // total) for number in tokens])
    return [list(rank) for rank in zip(*rows, strict=True)]
