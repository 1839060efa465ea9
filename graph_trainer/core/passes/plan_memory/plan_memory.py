"""Choose what backward keeps for the least step time within the memory limit."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.analysis.memory import Memory
from graph_trainer.core.analysis.unshard_chains import UnshardChain, last_bucket, unshard_chains
from graph_trainer.core.graph.annotations import block_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import storages_in, value_storages
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.passes.base import NoOptions, Stage, graph_pass
from graph_trainer.core.passes.context import PassContext, detect_on_all_ranks, fingerprint
from graph_trainer.core.passes.memory_limit import KEY
from graph_trainer.core.passes.plan_memory.choices import NANOSECONDS, Block, Op, blocks_of
from graph_trainer.core.passes.plan_memory.solver import Choice, between, frontier
from graph_trainer.core.passes.plan_memory.table import MemoryTable, tag_blocks, tag_parameters
from graph_trainer.core.simulation.collective_costs import collective_seconds
from graph_trainer.core.simulation.simulate import predicted_memory
from graph_trainer.core.units import GIB, gib
from graph_trainer.errors import MemoryLimitError, PassError

_RESERVE = 0.02
"""The part of the limit that is left to passes that run later, for what they gather ahead."""

_ROUNDS = 5
"""How many plans are tried where those passes add more than that."""

_FEWER = 0.5
"""The part of all bytes that are a choice with which a step is tried too where compute waits."""

_WORTH_TRYING = 0.01
"""From which part of the step on that compute waits."""

_PARTS = 200
"""Into how many parts at most a block's step divides all bytes that are a choice."""


@graph_pass(
    stage=Stage.TAG,
    summary="Choose what backward keeps, for the least time within the memory limit",
    required_for={"activation_policy": ("budget", "file"), "reshard_after_forward": ("auto",)},
)
def plan_memory(joint: JointGraph, options: NoOptions, context: PassContext) -> None:
    """Tag what backward keeps, recomputes and gathers again, by a solver or by a table.

    Under the activation policy "budget" every op of a block, and with reshard_after_forward "auto"
    every block's parameters, is a choice with the bytes that it keeps and the seconds that it
    saves. For each kind of block a solver finds the choices that are best at some price of memory
    (`frontier`); all blocks' steps from one choice to the next, large ones in parts, are put in the
    order of seconds saved a byte, which does not depend on the limit. As many are taken, in that
    order, as the predicted peak allows: so more memory never makes a slower plan. Each peak is
    predicted from a copy of the graph with the passes up to rematerialization.

    Under the policy "file" the tags are those of `context.memory_table`; so they are for a graph of
    a later batch, which follows the first. Tags that are there already win. The table is left in
    `joint.decisions`. A graph without backward keeps nothing, and is left alone.

    Relies on phases, modules and FSDP roles. Guarantees the same plan on every rank. Changes
    metadata only. n log n in nodes, but for the solver, which sees one block of a kind.

    Raises:
        PassError: there is no limit; the limit is below what the step needs with everything
            recomputed; the table is of another model; the ranks' graphs are not alike.
    """
    budget = context.activation_policy == "budget"
    auto = context.reshard_after_forward == "auto"
    table: MemoryTable | None = context.decided
    if context.activation_policy == "file" and table is None:
        table = context.memory_table
    if not joint.signature.backward or not (budget or auto) and table is None:
        return
    if context.hardware is None:
        found = detect_on_all_ranks(joint, context.all_reduce_max)
        context = replace(context, hardware=found.hardware)
    blocks = blocks_of(joint, context) if context.activation_policy in ("budget", "file") else []
    chains = [c for c in unshard_chains(joint) if c.backward_readers or c.forward_readers]
    if table is None:
        if not context.memory_limit_gib:
            raise PassError(
                f"{KEY} is {context.memory_limit_gib}: a plan of memory needs a limit. Set the GiB "
                'that a step may need on a device, or an activation_checkpoint.type such as "full"'
            )
        planner = _Planner(joint, context, blocks, chains if auto else [])
        table = planner.plan(context.memory_limit_gib)
    tag_blocks(blocks, table.saved(blocks))
    if table.parameters is not None:
        tag_parameters(chains, table.parameters)
    joint.decisions[plan_memory.name] = table


class _Item(NamedTuple):
    """Something that is decided at once: a block's activations, or its parameters."""

    name: str
    choices: Sequence[Choice]
    """The fewest bytes first."""
    ops: tuple[Op, ...] = ()
    """Of the block, for activations."""
    parameters: tuple[str, ...] = ()
    """Kept unsharded at the last choice; empty for activations."""


class _Step(NamedTuple):
    """A simulated step of the slowest rank."""

    peak: int
    """Bytes."""
    nanoseconds: int
    waits: int
    """Nanoseconds that compute waits for communication."""


class _Planner:
    """Finds the longest prefix of the steps whose predicted peak is within the limit."""

    def __init__(
        self,
        joint: JointGraph,
        context: PassContext,
        blocks: Sequence[Block],
        chains: Sequence[UnshardChain],
    ) -> None:
        self._joint, self._context = joint, context
        self._blocks, parameters = _agreed(blocks, _parameters(joint, chains, context), context)
        self._decides_parameters = bool(chains)
        solved = {ops: frontier(ops) for ops in dict.fromkeys(b.ops for b in self._blocks)}
        items = [_Item(b.name, solved[b.ops], b.ops) for b in self._blocks]
        items += parameters
        self._items = items
        # of equals the last block first: backward frees it first
        corners = sorted(
            (-_worth(low, high), bool(item.parameters), number, -place)
            for place, item in enumerate(items)
            for number, (low, high) in enumerate(itertools.pairwise(item.choices))
        )
        most = sum(item.choices[-1].bytes - item.choices[0].bytes for item in items)
        self._steps: list[tuple[int, Choice]] = []
        """Which item is given more memory, and what it then keeps."""
        self._bytes = [sum(item.choices[0].bytes for item in items)]
        """What is kept after each number of steps, in bytes."""
        parts: dict[object, list[Choice]] = {}
        for _, _, number, place in corners:
            item = items[-place]
            low, high = item.choices[number : number + 2]
            if (key := (item.ops, low, high)) not in parts:
                parts[key] = between(*key, most / _PARTS) if item.ops else [high]
            start = self._bytes[-1] - low.bytes
            self._steps += [(-place, choice) for choice in parts[key]]
            self._bytes += [start + choice.bytes for choice in parts[key]]
        plan = [(place, c.bytes, c.nanoseconds, sorted(c.saved)) for place, c in self._steps]
        if not context.same_on_all_ranks(fingerprint(plan)):
            raise PassError(
                "the ranks' solvers found unlike plans of memory: install the same scipy on every "
                'host, or use an activation_checkpoint.type such as "selective" or "full"'
            )
        self._peaks: dict[int, int] = {}
        self._steps_simulated: dict[int, _Step] = {}

    def plan(self, limit_gib: float) -> MemoryTable:
        """Return the table of the plan that is fastest within a limit.

        Raises:
            PassError: nothing is.
        """
        limit = int(limit_gib * GIB)
        if self._peak(0) > limit:
            raise MemoryLimitError(self._infeasible(limit))
        target = max(int(limit * (1 - _RESERVE)), self._peak(0))
        number = self._last_within(target)
        best: int | None = None
        for round_ in range(_ROUNDS):
            peak = self._simulated(number).peak
            if peak <= limit:
                best = max(best or 0, number)
                if round_ == 0 or peak >= limit * (1 - 2 * _RESERVE):
                    break
            target += int(limit * (1 - _RESERVE / 2)) - peak
            if target < self._peak(0):
                break
            number = self._last_within(target)
        # where none fits with them, passes that are optional are rolled back
        number = number if best is None else self._fastest(best)
        self._joint.remarks.append(self._remark(number, limit))
        return self._table(number)

    def _last_within(self, target: int) -> int:
        """Return the number of steps whose peak is within a target when that of one more is not.

        Between a number that fits and one that does not, peaks are about linear in what is kept;
        every fourth guess halves the interval, in case they are not.
        """
        low, high = 0, len(self._steps)
        if self._peak(high) <= target:
            return high
        for guess in itertools.count():
            if high - low <= 1:
                break
            peak_low, peak_high = self._peak(low), self._peak(high)
            share = (target - peak_low) / max(peak_high - peak_low, 1)
            wanted = self._bytes[low] + share * (self._bytes[high] - self._bytes[low])
            middle = next(n for n in range(low, high + 1) if self._bytes[n] >= wanted or n == high)
            if guess % 4 == 3:
                middle = (low + high) // 2
            middle = min(max(middle, low + 1), high - 1)
            if self._peak(middle) <= target:
                low = middle
            else:
                high = middle
        return low

    def _peak(self, number: int) -> int:
        """Predict the peak, in bytes, of the rank that needs most after a number of steps."""
        if number not in self._peaks:
            peak = self._memory(number).peak_bytes
            self._peaks[number] = self._context.all_reduce_max(peak)
        return self._peaks[number]

    def _simulated(self, number: int) -> _Step:
        """Simulate the step with all passes, on the rank that needs most of each."""
        if number not in self._steps_simulated:
            context, trial = self._context, self._trial(number, None)
            found = context.simulate(trial)
            waits = sum(wait.seconds for wait in found.timeline.exposed)
            largest = context.all_reduce_max
            self._steps_simulated[number] = _Step(
                largest(found.memory.peak_bytes),
                largest(round(found.timeline.step_seconds * NANOSECONDS)),
                largest(round(waits * NANOSECONDS)),
            )
        return self._steps_simulated[number]

    def _fastest(self, number: int) -> int:
        """Return a number of steps that is as fast, and fewer where compute waits.

        Recomputation that runs while compute would wait for communication costs nothing. The
        fewer steps are the same for every limit.
        """
        kept = self._bytes[0] + _FEWER * (self._bytes[-1] - self._bytes[0])
        fewer = bisect.bisect_right(self._bytes, kept) - 1
        found = self._simulated(number)
        if fewer >= number or found.waits < _WORTH_TRYING * found.nanoseconds:
            return number
        return fewer if self._simulated(fewer).nanoseconds <= found.nanoseconds else number

    def _memory(self, number: int) -> Memory:
        """Predict the memory of a step with the passes that any step needs."""
        trial, context = self._trial(number, Stage.COMMUNICATION), self._context
        device = context.hardware_for(trial).device
        return predicted_memory(trial, context.other_memory(trial)._replace(device=device))

    def _trial(self, number: int, before: Stage | None) -> JointGraph:
        """Return a copy of the graph after a number of steps and the later passes, all of them or
        those before a stage."""
        trial, context = copy_graph(self._joint), self._context
        named = {node.name: node for node in trial.graph.nodes}
        blocks = [
            replace(b, nodes=[[named[n.name] for n in group] for group in b.nodes])
            for b in self._blocks
        ]
        table = self._table(number)
        tag_blocks(blocks, table.saved(blocks))
        if table.parameters is not None:
            tag_parameters(unshard_chains(trial), table.parameters)
        context.run_later_passes(trial, before)
        return trial

    def _chosen(self, number: int) -> list[Choice]:
        """Return the choice of every item after a number of steps."""
        chosen = [item.choices[0] for item in self._items]
        for place, choice in self._steps[:number]:
            chosen[place] = choice
        return chosen

    def _table(self, number: int) -> MemoryTable:
        chosen = list(zip(self._items, self._chosen(number), strict=True))
        saved = {item.name: choice.saved for item, choice in chosen if not item.parameters}
        kept = [name for item, choice in chosen if choice.saved for name in item.parameters]
        return MemoryTable.of(self._blocks, saved, kept if self._decides_parameters else None)

    def _remark(self, number: int, limit: int) -> str:
        chosen = self._chosen(number)
        again = sum(choice.nanoseconds for choice in chosen) / 1e6
        kept, most = self._bytes[number], self._bytes[-1]
        return (
            f"kept {gib(kept)} of {gib(most)} GiB that is a choice, the rest made again in "
            f"{again:.1f} ms; predicted peak {gib(self._simulated(number).peak)} GiB of "
            f"{gib(limit)}"
        )

    def _infeasible(self, limit: int) -> str:
        memory = self._memory(0)
        parts = sorted(memory.peak_by_category().items(), key=lambda entry: -entry[1])
        needs = ", ".join(
            f"{category.value.replace('_', ' ')} {gib(size)}"
            for category, size in parts
            if size > memory.peak_bytes / 1000
        )
        return (
            f"{KEY} = {gib(limit)}: the step needs {gib(self._peak(0))} GiB at its predicted peak "
            f"on the rank that needs most even with everything recomputed. This rank: {needs}. Set "
            f"{KEY} to {self._peak(0) / GIB + 0.005:.2f} or more, a smaller "
            "training.local_batch_size, or more ranks"
        )


def _worth(low: Choice, high: Choice) -> float:
    """Return the nanoseconds that a step saves for each byte."""
    return (low.nanoseconds - high.nanoseconds) / max(high.bytes - low.bytes, 1)


def _parameters(
    joint: JointGraph, chains: Sequence[UnshardChain], context: PassContext
) -> list[_Item]:
    """Return the parameters of each block, and each other one, as a choice.

    Gathers of backward run beside compute and cost it the units that they occupy; but those that
    backward begins with have nothing to run beside.
    """
    if not chains:
        return []
    hardware = context.hardware_for(joint)
    seconds = {each.node: collective_seconds(each, hardware) for each in collectives(joint)}
    storages, size = value_storages(joint.graph), lifetimes(joint).size
    first = last_bucket(joint, list(chains))
    items: dict[str, list[UnshardChain]] = {}
    for chain in chains:
        items.setdefault(block_of(chain.parameter) or chain.parameter, []).append(chain)

    def item(name: str, several: Sequence[UnshardChain]) -> _Item:
        read = {n for c in several for r in c.backward_readers for n in r.all_input_nodes}
        made = {s for c in several for n in c.nodes if n in read for s in storages_in(storages[n])}
        share = {
            c.parameter: 1.0 if c.parameter in first else hardware.collective_compute_share
            for c in several
        }
        cost = sum(share[c.parameter] * seconds.get(n, 0.0) for c in several for n in c.nodes)
        kept = sum(size.get(s, 0) for s in made)
        ends = [Choice(0, round(cost * NANOSECONDS), frozenset())]
        if kept:
            ends.append(Choice(kept, 0, frozenset(range(len(several)))))
        return _Item(name, ends, parameters=tuple(c.parameter for c in several))

    return [item(name, several) for name, several in items.items()]


def _agreed(
    blocks: Sequence[Block], parameters: Sequence[_Item], context: PassContext
) -> tuple[list[Block], list[_Item]]:
    """Give every rank the same costs: where they differ, those of the rank with the largest sum.

    Raises:
        PassError: the ranks' blocks have unlike ops.
    """
    shape = [(b.name, [replace(op, bytes=0, nanoseconds=0) for op in b.ops]) for b in blocks]
    choices = [(item.name, item.parameters, len(item.choices)) for item in parameters]
    if not context.same_on_all_ranks(fingerprint((shape, choices))):
        raise PassError(
            "the ranks' blocks have unlike ops, so that no one plan of memory holds for all: use "
            'an activation_checkpoint.type such as "selective" or "full"'
        )
    costs = [n for b in blocks for op in b.ops for n in (op.bytes, op.nanoseconds)]
    costs += [n for item in parameters for c in item.choices for n in (c.bytes, c.nanoseconds)]
    if context.same_on_all_ranks(fingerprint(costs)):
        return list(blocks), list(parameters)
    # one number with the costs as its digits, their sum first, so that one all-reduce will do
    digits = b"".join(number.to_bytes(8, "big") for number in (sum(costs), *costs))
    largest = context.all_reduce_max(int.from_bytes(digits, "big")).to_bytes(len(digits), "big")
    agreed = (int.from_bytes(largest[at : at + 8], "big") for at in range(8, len(largest), 8))
    return (
        [
            replace(b, ops=tuple(replace(op, bytes=next(agreed), nanoseconds=next(agreed))
                                 for op in b.ops))
            for b in blocks
        ],
        [
            item._replace(choices=[Choice(next(agreed), next(agreed), c.saved)
                                   for c in item.choices])
            for item in parameters
        ],
    )  # fmt: skip
