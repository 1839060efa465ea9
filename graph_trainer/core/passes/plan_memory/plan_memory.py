"""Choose what backward keeps for the least step time within the memory limit."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from functools import cache, partial

from torch.utils.checkpoint import CheckpointPolicy

from graph_trainer.core.analysis.blocks import block_inputs
from graph_trainer.core.analysis.unshard_chains import UnshardChain, unshard_chains
from graph_trainer.core.graph.annotations import recompute_policy, set_kept, set_offload
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import is_getitem
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.passes.base import NoOptions, Stage, graph_pass
from graph_trainer.core.passes.context import PassContext, SlowestStep
from graph_trainer.core.passes.memory_table import MemoryTable
from graph_trainer.core.passes.plan_memory.items import (
    Item,
    agreed_on,
    blocks_of,
    items_of_inputs,
    items_of_parameters,
)
from graph_trainer.core.passes.plan_memory.solver import Block, Choice, between, frontier
from graph_trainer.core.passes.plan_memory.table import saved_ops, table_of
from graph_trainer.core.passes.tag_activations import FIRST_AC_GRAPH_ID
from graph_trainer.core.units import GIB, gib
from graph_trainer.errors import PassError

_APART = 0.02
"""The part by which each plan that may be tried needs more memory than the one before: more than
the gaps of an allocator differ from one to the next, so that a higher limit finds a larger plan."""

_FEWER = 0.5
"""The part of all bytes that are a choice with which a step is tried too where compute waits."""

_WORTH_TRYING = 0.01
"""From which part of the step on that compute waits."""

_PARTS = 200
"""Into how many parts at most a block's step divides all bytes that are a choice."""


@graph_pass(
    stage=Stage.TAG,
    summary="Choose what backward keeps, for the least time within the memory limit",
    needs_hardware=lambda options, settings: (
        settings.activation_policy in ("budget", "file") or settings.reshard_after_forward == "auto"
    ),
)
def plan_memory(joint: JointGraph, options: NoOptions, context: PassContext) -> None:
    """Tag what backward keeps, recomputes and gathers again, by a solver or by a table.

    Under the activation policy "budget" every op of a block, and with reshard_after_forward "auto"
    every block's parameters, is a choice with the bytes that it keeps and the seconds that it
    saves; with allow_offload so are every block's inputs, which may wait in host memory. For each
    kind of block a solver finds the choices that are best at some price of memory (`frontier`);
    all blocks' steps from one choice to the next, large ones in parts, are put in the order of
    seconds saved a byte, which does not depend on the limit. As many are taken, in that order, as
    the limit allows: so more memory never makes a slower plan. What a step then needs of a device,
    gaps of the allocator included, is simulated on a copy of the graph with all later passes. Bytes
    are those where experts receive `OtherMemory.expert_imbalance` times their even share, seconds
    those of even shares.

    Under the policy "file" the tags are those of `settings.memory_table`; a graph of a later batch
    follows the table of the first. Tags that are there already win. The table is left in
    `joint.decisions`. A graph without backward keeps nothing, and is left alone.

    Relies on phases, modules and FSDP roles. Guarantees the same plan on every rank. Changes
    metadata only. n log n in nodes, but for the solver, which sees one block of a kind.

    Raises:
        PassError: the limit is below what the step needs with everything recomputed;
            the table is of another model; the ranks' graphs are not alike.
    """
    settings = context.settings
    budget = settings.activation_policy == "budget"
    auto = settings.reshard_after_forward == "auto"
    table: MemoryTable | None = context.decided
    if settings.activation_policy == "file" and table is None:
        table = settings.memory_table
    if not joint.signature.backward or not (budget or auto) and table is None:
        return
    blocks = blocks_of(joint, context) if settings.activation_policy in ("budget", "file") else []
    if table is None:
        assert settings.memory_limit_gib  # RunSettings refuses other ones
        planner = _Planner(joint, context, blocks, _read_chains(joint) if auto else [])
        table = planner.plan(settings.memory_limit_gib)
    _tag(joint, blocks, table)
    joint.decisions[plan_memory.name] = table


def plans_between(
    joint: JointGraph, context: PassContext, count: int
) -> list[tuple[int, Callable[[], JointGraph]]]:
    """Choose plans of memory from the one that keeps least to the one that keeps most.

    At most `count`, two or more, and closer where little is kept, as time changes fastest there.
    None of them depends on a limit, so that each is simulated once, where a search within a limit
    takes several.

    Args:
        joint: the graph before `plan_memory`; it stays as it is.
        context: that of `plan_memory`.

    Returns:
        for each the bytes that it keeps of those that are a choice, and a function that makes the
        graph of the step, after all later passes.

    Raises:
        PassError: as `plan_memory`.
    """
    planner = _Planner(joint, context, blocks_of(joint, context), _read_chains(joint))
    plans = planner.spread(count)
    return [(kept, partial(planner.trial, number)) for number, kept in plans.items()]


class _Planner:
    """Finds the longest prefix of the steps with which a step needs no more than the limit."""

    def __init__(
        self,
        joint: JointGraph,
        context: PassContext,
        blocks: Sequence[Block],
        chains: Sequence[UnshardChain],
    ) -> None:
        self._joint, self._context = joint, context
        others = items_of_parameters(joint, chains, context)
        if context.settings.activation_policy == "budget":
            others += items_of_inputs(joint, blocks, context)
        self._blocks, others = agreed_on(blocks, others, context)
        self._decides_parameters = bool(chains)
        solved = {ops: frontier(ops) for ops in dict.fromkeys(b.ops for b in self._blocks)}
        items = [Item(b.name, solved[b.ops], b.ops) for b in self._blocks]
        items += others
        self._items = items
        # among equal savings the last block comes first, since backward frees it first
        corners: list[tuple[float, bool, int, int]] = []
        for place, item in enumerate(items):
            for number, (low, high) in enumerate(itertools.pairwise(item.choices)):
                saved_a_byte = (low.nanoseconds - high.nanoseconds) / max(high.bytes - low.bytes, 1)
                corners.append((-saved_a_byte, bool(item.parameters), number, -place))
        corners.sort()
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
        if not context.agreement.same(plan):
            raise PassError(
                "the ranks' solvers found different plans of memory: install the same scipy on "
                'every host, or use another PassConfig.activation_policy, such as "full"'
            )
        context.simulate(joint)  # what is known of its nodes then is known in every copy
        self._least = cache(self._needed_at_least)
        self._simulated = cache(self._simulate)
        least, kept = self._least(0), self._bytes
        self._places = [0]
        """The numbers of steps that may be tried, the same for every limit."""
        for number in range(1, len(kept)):
            grown = kept[number] - kept[self._places[-1]]
            before = least + kept[self._places[-1]] - kept[0]
            if grown >= _APART * before or number == len(kept) - 1:
                self._places.append(number)

    def plan(self, limit_gib: float) -> MemoryTable:
        """Return the table of the plan that is fastest within a limit, or that needs least."""
        limit = int(limit_gib * GIB)
        number = None
        if self._least(0) <= limit:
            number = self._last_within(limit, lambda number: self._simulated(number).needed)
            if number is None:  # where none fits with them, passes that are optional go
                number = self._last_within(limit, self._least)
        number = number or 0
        # Recomputation that runs while compute would wait for communication costs nothing, and
        # memory that is left lets gathers run ahead. The fewer steps that are tried then are the
        # same for every limit: half of the bytes, and none.
        half = self._bytes[0] + _FEWER * (self._bytes[-1] - self._bytes[0])
        for fewer in (bisect.bisect_right(self._bytes, half) - 1, 0):
            simulated = self._simulated(number)
            if fewer < number and simulated.waits >= _WORTH_TRYING * simulated.nanoseconds:
                tried = self._simulated(fewer)
                if tried.nanoseconds <= simulated.nanoseconds and tried.needed <= limit:
                    number = fewer
        table = self._table(number)
        recomputed = sum(choice.nanoseconds for choice in self._chosen(number)) / 1e6
        away = len(table.offloaded)
        offloaded = f"the inputs of {away} blocks in host memory, " if away else ""
        self._joint.remarks.append(
            f"kept {gib(self._bytes[number])} of {gib(self._bytes[-1])} GiB that is a choice, "
            f"{offloaded}the rest made again in {recomputed:.1f} ms; the step needs "
            f"{gib(self._simulated(number).needed)} GiB of {gib(limit)}"
            + self._context.settings.other_memory(self._joint).imbalance_text
        )
        return table

    def spread(self, count: int) -> dict[int, int]:
        """Return at most `count` of the numbers of steps that may be tried, and the bytes kept."""
        kept = [self._bytes[number] for number in self._places]
        chosen: dict[int, int] = {}
        for part in range(count):
            wanted = kept[0] + (kept[-1] - kept[0]) * (part / (count - 1)) ** 2
            place = bisect.bisect_left(kept, wanted)
            chosen[self._places[place]] = kept[place]
        return chosen

    def _last_within(self, limit: int, needed: Callable[[int], int]) -> int | None:
        """Return the largest number of steps that is within a limit; None where none is.

        More may be kept in less memory, where less is then computed again at once. But a byte that
        is not kept saves a byte at most, up to a page of the allocator, in each microbatch that is
        in flight: so the search comes down from all steps, by no more than the limit lacks, and
        passes no number by that is within it.
        Where the peak does not depend on what is kept that takes long, so every fourth guess halves
        what is left.
        """
        kept = [self._bytes[number] for number in self._places]
        in_flight = 1 + self._context.settings.other_memory(self._joint).earlier_microbatches
        low, high, wanted = -1, len(kept), kept[-1]
        for guesses in itertools.count(1):
            halves = guesses % 4 == 0
            middle = (low + high) // 2 if halves else bisect.bisect_left(kept, wanted)
            middle = min(max(middle, low + 1), high - 1)
            needs = needed(self._places[middle])
            if needs > limit:
                high, wanted = middle, kept[middle] + (limit - needs) // in_flight
            else:
                low = middle
            if high - low == 1 or low == middle and not halves:
                break
        return self._places[low] if low >= 0 else None

    def _needed_at_least(self, number: int) -> int:
        """Return the most bytes that any rank needs of its device after a number of steps, where
        only the passes that any step needs run."""
        return self._context.needed_on_all_ranks(self.trial(number, Stage.COMMUNICATION))

    def _simulate(self, number: int) -> SlowestStep:
        """Simulate the step with all passes."""
        return self._context.simulate_on_all_ranks(self.trial(number))

    def trial(self, number: int, before: Stage | None = None) -> JointGraph:
        """Return a copy of the graph after a number of steps and all later passes, or those before
        a stage."""
        trial, context = copy_graph(self._joint), self._context
        _tag(trial, self._blocks, self._table(number))
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
        saved = {item.name: choice.saved for item, choice in chosen if item.ops}
        away = [item.name for item, choice in chosen if item.is_input and not choice.saved]
        kept = [name for item, choice in chosen if choice.saved for name in item.parameters]
        parameters = kept if self._decides_parameters else None
        return table_of(self._blocks, saved, parameters, away)


def _read_chains(joint: JointGraph) -> list[UnshardChain]:
    return [c for c in unshard_chains(joint) if c.backward_readers or c.forward_readers]


def _tag(joint: JointGraph, blocks: Sequence[Block], table: MemoryTable) -> None:
    """Tag what a table keeps and what it does not; tags that are there already stay. A PassError
    where the table has an op, a block or a parameter that the graph does not have."""
    saved, named = saved_ops(table, blocks), {node.name: node for node in joint.graph.nodes}
    for graph_id, block in enumerate(blocks, start=FIRST_AC_GRAPH_ID):
        for number, (op, names) in enumerate(zip(block.ops, block.nodes, strict=True)):
            kept = number in saved[block.name] or not op.may_recompute
            for node in map(named.__getitem__, names):
                if recompute_policy(node) is None and not is_getitem(node):
                    set_kept(node, kept, ac_graph_id=graph_id)
    inputs = block_inputs(joint) if table.offloaded else {}
    for node in (node for name in table.offloaded for node in inputs.get(name, ())):
        if recompute_policy(node) in (None, CheckpointPolicy.MUST_SAVE):
            set_offload(node)
    if table.parameters is None:
        return
    chains, unsharded = _read_chains(joint), set(table.parameters)
    if unknown := sorted(unsharded - {chain.parameter for chain in chains}):
        raise PassError(
            f"PassConfig.memory_table: keep_unsharded names {', '.join(unknown[:3])}, "
            "which this model does not gather: take it out of the table"
        )
    for chain in chains:
        for node in chain.nodes:
            if recompute_policy(node) is None:
                set_kept(node, chain.parameter in unsharded)
