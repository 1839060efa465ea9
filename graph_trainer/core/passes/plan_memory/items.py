"""What is decided at once: a block's activations, where its inputs wait, or its parameters."""

# The idea: whatever trades memory for time becomes one kind of thing, a list of choices with bytes
# and nanoseconds, so that one planner weighs a block's activations against its parameters or its
# input in host memory by the same price.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from graph_trainer.core.analysis.blocks import (
    block_inputs,
    forward_blocks,
    is_read_elsewhere,
    may_run_again,
)
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.analysis.unshard_chains import UnshardChain, last_bucket
from graph_trainer.core.graph.annotations import (
    block_of,
    is_backward,
    module_of,
    recompute_policy,
    tensors_of,
)
from graph_trainer.core.graph.data_sizes import nbytes_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import Storage, is_getitem, is_wait, storages_in, value_storages
from graph_trainer.core.graph.writes import writes_of
from graph_trainer.core.passes.context import PassContext
from graph_trainer.core.passes.plan_memory.solver import Block, Choice, Op
from graph_trainer.core.simulation.collective_costs import collective_seconds
from graph_trainer.core.simulation.op_costs import costs
from graph_trainer.core.simulation.runtimes import GRAPH_TRAINER
from graph_trainer.core.units import GIB, NANOSECONDS
from graph_trainer.errors import PassError


class Item(NamedTuple):
    """Something that is decided at once."""

    name: str
    choices: Sequence[Choice]
    """The fewest bytes first."""
    ops: tuple[Op, ...] = ()
    """Of the block, for activations."""
    parameters: tuple[str, ...] = ()
    """Kept unsharded at the last choice; empty for activations."""
    is_input: bool = False
    """Whether it is about the inputs of a block: in host memory at the first choice."""


def blocks_of(joint: JointGraph, context: PassContext) -> list[Block]:
    """Return the blocks of a graph, in order, with the cost of every choice on this rank. Linear.

    What other blocks or the loss read stays alive anyway, so saving it costs nothing.
    """
    backend = context.settings.other_memory(joint)
    hardware = context.hardware_for(joint)
    cost = costs(joint, hardware, GRAPH_TRAINER.fusion(joint, backend.fused, backend.in_regions))
    seconds = {node: each.seconds for node, each in cost.items()}
    seconds |= {each.node: collective_seconds(each, hardware) for each in collectives(joint)}
    storages, size = value_storages(joint.graph), lifetimes(joint).size
    writes = writes_of(joint.graph)
    nodes_of = forward_blocks(joint)
    border: set[Storage] = set()
    for name, nodes in nodes_of.items():
        for node in nodes:
            if is_read_elsewhere(node, name):
                border.update(storages_in(storages[node]))
    blocks = []
    for name, nodes in nodes_of.items():
        # results and waits go with the op that they belong to
        groups: list[list[fx.Node]] = []
        number: dict[fx.Node, int] = {}
        for node in nodes:
            source = node.all_input_nodes[0] if is_getitem(node) or is_wait(node) else node
            number[node] = number.get(source, len(groups))
            if number[node] == len(groups):
                groups.append([])
            groups[number[node]].append(node)
        seen: dict[tuple[str, str], int] = defaultdict(int)
        ops = []
        for place, group in enumerate(groups):
            head = group[0]
            results = [n for n in group if is_getitem(n)] or [head]
            made = {s for n in results for s in storages_in(storages[n]) if s[0] is head}
            tag = recompute_policy(head)
            # a user's tags win; `rematerialize` acts only on MUST_RECOMPUTE
            kept = tag not in (None, CheckpointPolicy.MUST_RECOMPUTE) or not border.isdisjoint(made)
            runs = [n for n in group if n is head or not is_wait(n)]
            may_recompute = not kept and all(may_run_again(n, writes) for n in runs)
            read = {number[i] for n in group for i in n.all_input_nodes if i in number}
            module = (module_of(head) or "").removeprefix(name).removeprefix(".")
            key = (module, str(head.target))
            ops.append(
                Op(
                    *key,
                    nth=seen[key],
                    bytes=0 if kept else sum(size.get(s, 0) for s in made),
                    nanoseconds=round(sum(seconds[n] for n in group) * NANOSECONDS),
                    reads=tuple(sorted(read - {place})),
                    is_needed=any(is_backward(u) for n in group for u in n.users),
                    may_save=not may_recompute
                    or bool(made)
                    and tag is not CheckpointPolicy.MUST_RECOMPUTE,
                    may_recompute=may_recompute,
                )
            )
            seen[key] += 1
        names = [[node.name for node in group] for group in groups]
        blocks.append(Block(name, tuple(ops), names))
    return blocks


def items_of_parameters(
    joint: JointGraph, chains: Sequence[UnshardChain], context: PassContext
) -> list[Item]:
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

    def item(name: str, several: Sequence[UnshardChain]) -> Item:
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
        return Item(name, ends, parameters=tuple(c.parameter for c in several))

    return [item(name, several) for name, several in items.items()]


def items_of_inputs(joint: JointGraph, blocks: Sequence[Block], context: PassContext) -> list[Item]:
    """Return the inputs of each block as a choice, as far as host memory has room for them.

    Copies run beside compute and cost what they take longer than the block does. Nothing is gained
    where host memory is the device's.
    """
    hardware = context.hardware_for(joint)
    if hardware.device == "cpu" or not context.settings.allow_offload:
        return []
    room = hardware.host_memory_gib * GIB / hardware.devices_per_node
    computed = {block.name: sum(op.nanoseconds for op in block.ops) for block in blocks}
    items = []
    for name, nodes in block_inputs(joint).items():
        size = sum(nbytes_of(tensor) for node in nodes for tensor in tensors_of(node))
        room -= size
        if room < 0 or name not in computed:
            break
        copied = round(hardware.host_copy_seconds(size) * NANOSECONDS)
        away = Choice(0, max(0, copied - computed[name]), frozenset())
        items.append(Item(name, [away, Choice(size, 0, frozenset({0}))], is_input=True))
    return items


def agreed_on(
    blocks: Sequence[Block], others: Sequence[Item], context: PassContext
) -> tuple[list[Block], list[Item]]:
    """Give every rank the same costs: where they differ, those of the rank with the largest sum. A
    PassError where the ranks' blocks have different ops."""
    shape = []
    for block in blocks:
        shape.append((block.name, [replace(op, bytes=0, nanoseconds=0) for op in block.ops]))
    choices = [(item.name, item.parameters, len(item.choices)) for item in others]
    if not context.agreement.same((shape, choices)):
        raise PassError(
            "the ranks' blocks have different ops, so that no one plan of memory holds for all: "
            'use another PassConfig.activation_policy, such as "full"'
        )
    costs = [n for b in blocks for op in b.ops for n in (op.bytes, op.nanoseconds)]
    costs += [n for item in others for c in item.choices for n in (c.bytes, c.nanoseconds)]
    if context.agreement.same(costs):
        return list(blocks), list(others)
    # one number with the costs as its digits, their sum first, so that one all-reduce will do
    digits = b"".join(number.to_bytes(8, "big") for number in (sum(costs), *costs))
    number = context.agreement.all_reduce_max(int.from_bytes(digits, "big"))
    largest = number.to_bytes(len(digits), "big")
    taken = (int.from_bytes(largest[at : at + 8], "big") for at in range(8, len(largest), 8))
    agreed_blocks = []
    for block in blocks:
        ops = [replace(op, bytes=next(taken), nanoseconds=next(taken)) for op in block.ops]
        agreed_blocks.append(replace(block, ops=tuple(ops)))
    agreed_items = []
    for item in others:
        of_item = [Choice(next(taken), next(taken), each.saved) for each in item.choices]
        agreed_items.append(item._replace(choices=of_item))
    return agreed_blocks, agreed_items
