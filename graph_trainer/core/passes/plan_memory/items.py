"""The items of a memory plan: activations of a block, its inputs, or parameters."""

# The idea: everything that trades memory for time becomes an item, a list of choices with bytes and
# nanoseconds. So one planner compares a block's activations with its parameters, or with its inputs
# in host memory, at the same price.

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
    """Tensors for which one choice is made."""

    name: str
    choices: Sequence[Choice]
    """The fewest bytes first."""
    ops: tuple[Op, ...] = ()
    """The ops of the block, for activations."""
    parameters: tuple[str, ...] = ()
    """FQNs of parameters, which the last choice keeps unsharded; empty for activations."""
    is_input: bool = False
    """Whether these are the inputs of a block, which the first choice keeps in host memory."""


def blocks_of(joint: JointGraph, context: PassContext) -> list[Block]:
    """Return the blocks of a graph, in order, with the cost of every choice on this rank. Linear.

    Values that other blocks or the loss read stay alive anyway, so saving them costs nothing.
    """
    other = context.settings.other_memory(joint)
    hardware = context.hardware_for(joint)
    cost = costs(joint, hardware, GRAPH_TRAINER.fusion(joint, other.fused, other.in_regions))
    seconds = {node: node_cost.seconds for node, node_cost in cost.items()}
    seconds |= {c.node: collective_seconds(c, hardware) for c in collectives(joint)}
    storages = value_storages(joint.graph)
    size = lifetimes(joint, expert_imbalance=other.expert_imbalance).size
    writes = writes_of(joint.graph)
    nodes_of = forward_blocks(joint)
    read_outside: set[Storage] = set()
    for name, nodes in nodes_of.items():
        for node in nodes:
            if is_read_elsewhere(node, name):
                read_outside.update(storages_in(storages[node]))

    blocks = []
    for name, nodes in nodes_of.items():
        groups, number = _groups(nodes)
        num_equal: dict[tuple[str, str], int] = defaultdict(int)
        ops = []
        for index, group in enumerate(groups):
            head = group[0]
            results = [n for n in group if is_getitem(n)] or [head]
            new_storages: set[Storage] = set()
            for node in results:
                new_storages.update(s for s in storages_in(storages[node]) if s[0] is head)
            tag = recompute_policy(head)
            # a user's tags win; `rematerialize` acts only on MUST_RECOMPUTE
            is_tagged_kept = tag not in (None, CheckpointPolicy.MUST_RECOMPUTE)
            is_kept = is_tagged_kept or not read_outside.isdisjoint(new_storages)
            repeated = [n for n in group if n is head or not is_wait(n)]
            may_recompute = not is_kept and all(may_run_again(n, writes) for n in repeated)
            may_keep = bool(new_storages) and tag is not CheckpointPolicy.MUST_RECOMPUTE
            reads: set[int] = set()
            for node in group:
                reads.update(number[n] for n in node.all_input_nodes if n in number)
            module = (module_of(head) or "").removeprefix(name).removeprefix(".")
            target = str(head.target)
            ops.append(
                Op(
                    module=module,
                    target=target,
                    nth=num_equal[module, target],
                    bytes=0 if is_kept else sum(size.get(s, 0) for s in new_storages),
                    nanoseconds=round(sum(seconds[n] for n in group) * NANOSECONDS),
                    reads=tuple(sorted(reads - {index})),
                    is_needed=any(is_backward(user) for n in group for user in n.users),
                    may_save=may_keep or not may_recompute,
                    may_recompute=may_recompute,
                )
            )
            num_equal[module, target] += 1
        names = [_names(group) for group in groups]
        blocks.append(Block(name, tuple(ops), names))
    return blocks


def _groups(nodes: Sequence[fx.Node]) -> tuple[list[list[fx.Node]], dict[fx.Node, int]]:
    """Group the nodes of a block by op, each with its getitems and waits.

    Returns:
        The groups, and the index of the group of each node.
    """
    groups: list[list[fx.Node]] = []
    number: dict[fx.Node, int] = {}
    for node in nodes:
        source = node.all_input_nodes[0] if is_getitem(node) or is_wait(node) else node
        if source in number:
            number[node] = number[source]
        else:
            number[node] = len(groups)
            groups.append([])
        groups[number[node]].append(node)
    return groups, number


def _names(nodes: Sequence[fx.Node]) -> list[str]:
    return [node.name for node in nodes]


def items_of_parameters(
    joint: JointGraph, chains: Sequence[UnshardChain], context: PassContext
) -> list[Item]:
    """Return an item for the parameters of each block, and for each other parameter.

    Gathers of backward run beside compute, and slow it down by the compute units that they occupy;
    but the gathers with which backward begins have no compute to run beside.
    """
    if not chains:
        return []
    hardware = context.hardware_for(joint)
    seconds = {c.node: collective_seconds(c, hardware) for c in collectives(joint)}
    storages = value_storages(joint.graph)
    size = lifetimes(joint).size
    first_in_backward = last_bucket(joint, list(chains))
    chains_of: dict[str, list[UnshardChain]] = defaultdict(list)
    for chain in chains:
        chains_of[block_of(chain.parameter) or chain.parameter].append(chain)

    items = []
    for name, chains_of_item in chains_of.items():
        cost = 0.0
        kept: set[Storage] = set()  # the storages that backward reads
        for chain in chains_of_item:
            share = hardware.collective_compute_share
            if chain.parameter in first_in_backward:
                share = 1.0
            for node in chain.nodes:
                cost += share * seconds.get(node, 0.0)
        for node in _read_by_backward(chains_of_item):
            kept.update(storages_in(storages[node]))
        kept_bytes = sum(size.get(storage, 0) for storage in kept)
        choices = [Choice(0, round(cost * NANOSECONDS), frozenset())]
        if kept_bytes:
            choices.append(Choice(kept_bytes, 0, frozenset(range(len(chains_of_item)))))
        parameters = tuple(chain.parameter for chain in chains_of_item)
        items.append(Item(name, choices, parameters=parameters))
    return items


def _read_by_backward(chains: Sequence[UnshardChain]) -> set[fx.Node]:
    """Return the nodes of the chains that backward reads."""
    inputs: set[fx.Node] = set()
    nodes: set[fx.Node] = set()
    for chain in chains:
        nodes.update(chain.nodes)
        for reader in chain.backward_readers:
            inputs.update(reader.all_input_nodes)
    return inputs & nodes


def items_of_inputs(joint: JointGraph, blocks: Sequence[Block], context: PassContext) -> list[Item]:
    """Return an item for the inputs of each block, while host memory has space for them.

    Copies run beside compute, and cost the time by which they exceed that of the block. On a CPU,
    where host memory is the device's, there are no items.
    """
    hardware = context.hardware_for(joint)
    if hardware.device == "cpu" or not context.settings.allow_offload:
        return []
    free_bytes = hardware.host_memory_gib * GIB / hardware.devices_per_node
    compute_time = {block.name: _nanoseconds(block) for block in blocks}
    items = []
    for name, nodes in block_inputs(joint).items():
        size = sum(nbytes_of(tensor) for node in nodes for tensor in tensors_of(node))
        free_bytes -= size
        if free_bytes < 0 or name not in compute_time:
            break
        copy_time = round(hardware.host_copy_seconds(size) * NANOSECONDS)
        on_host = Choice(0, max(0, copy_time - compute_time[name]), frozenset())
        on_device = Choice(size, 0, frozenset({0}))
        items.append(Item(name, [on_host, on_device], is_input=True))
    return items


def _nanoseconds(block: Block) -> int:
    return sum(op.nanoseconds for op in block.ops)


def agreed_on(
    blocks: Sequence[Block], others: Sequence[Item], context: PassContext
) -> tuple[list[Block], list[Item]]:
    """Give every rank the same costs: if they differ, those of the rank with the largest sum.

    Raises:
        PassError: the ranks' blocks have different ops.
    """
    shape = []
    for block in blocks:
        shape.append((block.name, [replace(op, bytes=0, nanoseconds=0) for op in block.ops]))
    choices = [(item.name, item.parameters, len(item.choices)) for item in others]
    if not context.agreement.same((shape, choices)):
        raise PassError(
            "the ranks' blocks have different ops, so that no one plan of memory holds for all: "
            'use another PassConfig.activation_policy, such as "full"'
        )
    costs: list[int] = []
    for block in blocks:
        for op in block.ops:
            costs += [op.bytes, op.nanoseconds]
    for item in others:
        for choice in item.choices:
            costs += [choice.bytes, choice.nanoseconds]
    if context.agreement.same(costs):
        return list(blocks), list(others)
    # One number with the costs as its digits, and their sum as the first digit: the largest such
    # number has the largest sum, and one all-reduce is enough.
    width = 8  # bytes of a digit
    digits = b"".join(digit.to_bytes(width, "big") for digit in (sum(costs), *costs))
    number = context.agreement.all_reduce_max(int.from_bytes(digits, "big"))
    largest = number.to_bytes(len(digits), "big")
    starts = range(width, len(largest), width)
    agreed = iter([int.from_bytes(largest[start : start + width], "big") for start in starts])
    agreed_blocks = []
    for block in blocks:
        ops = [replace(op, bytes=next(agreed), nanoseconds=next(agreed)) for op in block.ops]
        agreed_blocks.append(replace(block, ops=tuple(ops)))
    agreed_items = []
    for item in others:
        choices_of_item = []
        for choice in item.choices:
            agreed_choice = choice._replace(bytes=next(agreed), nanoseconds=next(agreed))
            choices_of_item.append(agreed_choice)
        agreed_items.append(item._replace(choices=choices_of_item))
    return agreed_blocks, agreed_items
