"""What may be kept or recomputed: the ops of every block, their bytes and their seconds."""

from __future__ import annotations

from collections import defaultdict

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from graph_trainer.core.analysis.blocks import forward_blocks, is_read_elsewhere, may_run_again
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.graph.annotations import is_backward, module_of, recompute_policy
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import Storage, is_getitem, is_wait, storages_in, value_storages
from graph_trainer.core.graph.writes import writes_of
from graph_trainer.core.passes.context import PassContext
from graph_trainer.core.passes.plan_memory.block import Block, Op
from graph_trainer.core.simulation.collective_costs import collective_seconds
from graph_trainer.core.simulation.op_costs import costs
from graph_trainer.core.simulation.runtimes import GRAPH_TRAINER
from graph_trainer.core.units import NANOSECONDS


def blocks_of(joint: JointGraph, context: PassContext) -> list[Block]:
    """Return the blocks of a graph, in order, with the cost of every choice on this rank. Linear.

    What other blocks or the loss read stays alive anyway, so saving it costs nothing.
    """
    fusion = context.settings.other_memory(joint)
    hardware = context.hardware_for(joint)
    cost = costs(joint, hardware, GRAPH_TRAINER.fusion(joint, fusion.fused, fusion.in_regions))
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
        blocks.append(Block(name, tuple(ops), groups))
    return blocks
