"""What torchtitan's train loop makes of a step: its checkpoint wrappers, and FSDP2's collectives.

torchtitan 0.3.0 (distributed/activation_checkpoint.py, distributed/fsdp.py) on torch 2.13
(torch/distributed/fsdp/_fully_shard).
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from torch import fx

from graph_trainer.core.analysis.fsdp_copies import fsdp_copies
from graph_trainer.core.analysis.mesh_groups import dtensors_of
from graph_trainer.core.analysis.unshard_chains import unshard_chains
from graph_trainer.core.graph.annotations import (
    Phase,
    Role,
    block_of,
    clear_bucket_tag,
    copy_annotations,
    is_backward,
    module_of,
    parameters_of,
    role_of,
    set_bucket_tag,
)
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import argument, is_collective, is_wait
from graph_trainer.core.graph.signature import InputKind
from graph_trainer.core.passes.base import NoOptions, Stage, graph_pass
from graph_trainer.core.passes.bucketing.assign import Member, members_of, transformer_parts
from graph_trainer.core.passes.bucketing.bucket_collectives import bucket_collectives
from graph_trainer.core.passes.bucketing.rewrite import merge, sort_nodes
from graph_trainer.core.passes.bucketing.tag_buckets import BucketTag
from graph_trainer.core.passes.context import PassContext
from graph_trainer.core.passes.eliminate_dead_code import eliminate_dead_code
from graph_trainer.core.passes.overlap.schedule_overlap import schedule_overlap
from graph_trainer.core.passes.pass_list import PassConfig
from graph_trainer.core.simulation.host import reads_on_host
from graph_trainer.errors import ConfigError
from graph_trainer.titan.activation_policies import NEEDS_CAPTURE, POLICIES
from graph_trainer.titan.config.run_config import GraphTrainerConfig

Unit = tuple[bool, str]
"""Whether it is the backward of a part of the model, and the part."""

_DATA_PARALLEL = frozenset({"dp_replicate", "fsdp", "efsdp"})
"""torchtitan's names of the dimensions of meshes over which FSDP2 shards and copies."""


def config_of_torchtitan(config: GraphTrainerConfig) -> GraphTrainerConfig:
    """Return a config whose capture has what torchtitan's checkpoint wrappers recompute.

    Raises:
        ConfigError: the config has a policy that only the passes of graph_trainer know.
    """
    section = config.activation_checkpoint
    key = value = remedy = ""
    if isinstance(section, NEEDS_CAPTURE):
        key, value = "activation_checkpoint.type", POLICIES[type(section)]
        remedy = '"selective", "full" or "none"'
    elif config.parallelism.fsdp_reshard_after_forward == "auto":
        key, value = "parallelism.fsdp_reshard_after_forward", "auto"
        remedy = '"default", "always" or "never"'
    if key:
        raise ConfigError(
            f'{key} is "{value}", which acts on a captured step, and --like torchtitan plans '
            f"torchtitan's loop, which captures none: set it to {remedy}, or leave --like "
            "torchtitan out"
        )
    changed = copy.copy(config)
    changed.compile = replace(config.compile, mode="eager")
    return changed


def passes_of_torchtitan(passes: PassConfig, compiles: bool) -> PassConfig:
    """Return the passes that make a captured step what torchtitan runs.

    Args:
        compiles: whether blocks are compiled. If not, a checkpointed block computes again what
            backward does not read, too: torchtitan sets early_stop=False.
    """
    left_out = [bucket_collectives.name, schedule_overlap.name]
    if not compiles:
        left_out.append(eliminate_dead_code.name)
    return replace(
        passes,
        activation_policy="none",
        passes=("default", as_fsdp2),
        disable_passes=tuple(left_out),
        options={},
    )


@graph_pass(stage=Stage.SCHEDULE, summary="Gather and reduce each block as FSDP2 in torchtitan")
def as_fsdp2(joint: JointGraph, options: NoOptions, context: PassContext) -> None:
    """Give each block one gather and one reduction for each of its meshes, at FSDP2's places.

    A block's parameters are copied out of their bucket when the block begins. In forward the gather
    of the next one runs since the parameters of the block before were copied out, and with experts
    on several ranks not before the host, which waits for their numbers of tokens, issues it. In
    backward it runs since those of this block were copied out. Gradients are copied into their
    bucket when the block's backward ends, once the reductions of the block before are complete.
    What tensor parallelism sums of a gradient is not in a bucket: it is summed then, one parameter
    after another, before the copies (FSDPParam._get_grad_inner_tensor of torch 2.13).

    Parameters that are freed after forward are gathered for the backward of their block, also
    where that does not read them, as of an embedding.

    Changes nodes with FSDP roles only. Relies on `tag_buckets`. n log n in nodes.
    """
    parts = transformer_parts(joint, separate_experts=False)
    settings = context.settings
    if settings.reshard_after_forward != "never" and not settings.pipeline_parallel:
        _gather_unread(joint, parts)
    buckets: dict[object, list[Member]] = defaultdict(list)
    groups = _data_parallel_groups(joint)
    for member in members_of(joint):
        clear_bucket_tag(member.node)
        if not member.route.reduction or member.route.group in groups:
            buckets[member.route, parts[member.parameter]].append(member)
    merge(joint, list(buckets.values()))
    sort_nodes(joint.graph, _Order(joint, parts, groups).keys())


def _data_parallel_groups(joint: JointGraph) -> set[str]:
    """Return the names of the process groups over which FSDP2 gathers and reduces."""
    groups: set[str] = set()
    for mesh in dict.fromkeys(tensor.device_mesh for _, tensor in dtensors_of(joint)):
        for name in _DATA_PARALLEL.intersection(mesh.mesh_dim_names or ()):
            groups.add(mesh.get_group(name).group_name)
    return groups


def _gather_unread(joint: JointGraph, parts: Mapping[str, str]) -> None:
    """Gather for backward what only forward reads, in parts that are not kept for backward."""
    gathered: set[str] = set()
    for node in joint.graph.nodes:
        if is_backward(node) and role_of(node) is Role.UNSHARD:
            gathered.update(parameters_of(node))
    chains = unshard_chains(joint)
    kept = {parts[chain.parameter] for chain in chains if chain.backward_readers}
    output = joint.output_node()
    copies: dict[fx.Node, fx.Node] = {}
    for chain in chains:
        if chain.parameter in gathered or parts[chain.parameter] in kept:
            continue
        for node in chain.nodes:
            with joint.graph.inserting_before(output):
                copies[node] = joint.graph.node_copy(node, lambda n: copies.get(n, n))
            copy_annotations(node, copies[node], phase=Phase.BACKWARD)
            if is_collective(node):
                set_bucket_tag(copies[node], BucketTag.UNSHARD_BACKWARD)


class _Order:
    """The order of a step whose collectives FSDP2 issues and waits for."""

    def __init__(
        self, joint: JointGraph, parts: Mapping[str, str], groups: Collection[str]
    ) -> None:
        self._parts = parts
        self._nodes = list(joint.graph.nodes)
        self._position = {node: place for place, node in enumerate(self._nodes)}
        self._groups = groups
        self._copies = fsdp_copies(joint.graph, self._is_of_fsdp)
        self._keys: dict[fx.Node, tuple[int, ...]] = {
            node: (place, 0) for node, place in self._position.items()
        }
        parameters = [spec.name for spec, _ in joint.inputs_of(InputKind.PARAMETER)]
        self._number = {name: number for number, name in enumerate(parameters)}
        self._first: dict[Unit, int] = {}
        self._last: dict[Unit, int] = {}
        """The places of the first and the last node of each unit that computes."""
        self._begins: dict[bool, int] = {}
        """The place of the first node of forward and of backward."""
        part_of_module = {name.rpartition(".")[0]: part for name, part in parts.items()}
        for place, node in enumerate(self._nodes):
            if node.op != "call_function":
                continue
            self._begins.setdefault(is_backward(node), place)
            module = module_of(node)
            part = block_of(module) or part_of_module.get(module or "")
            if part is not None and role_of(node) is None:
                self._first.setdefault((is_backward(node), part), place)
                self._last[is_backward(node), part] = place

    def keys(self) -> dict[fx.Node, tuple[int, ...]]:
        """Return by node a key to sort by: its place, and for nodes around a collective the place
        and the side of the node at which FSDP2 runs them."""
        # by collective
        before: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        after: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        gathers: dict[Unit, list[fx.Node]] = defaultdict(list)
        reductions: dict[Unit, list[fx.Node]] = defaultdict(list)
        for node in self._nodes:
            if node in self._copies.after:
                after[self._copies.after[node]].append(node)
            elif node in self._copies.before:
                before[self._copies.before[node]].append(node)
            elif role_of(node) is not None and self._is_of_fsdp(node):
                before[node].append(node)
                unit = (is_backward(node), self._parts[parameters_of(node)[0]])
                reduces = role_of(node) is Role.REDUCE_GRAD
                (reductions if reduces else gathers)[unit].append(node)
        for of_phase in (False, True):
            units = [unit for unit in gathers if unit[0] is of_phase]
            starts = {unit: self._start(unit, gathers[unit], after) for unit in units}
            units.sort(key=starts.__getitem__)
            for index, unit in enumerate(units):
                launch = (self._begins[of_phase], -3)
                if of_phase and index:
                    launch = (starts[units[index - 1]], -1)
                elif index > 1:
                    launch = self._after_copies(starts[units[index - 2]], starts[units[index - 1]])
                collectives = self._in_order(gathers[unit], backward=of_phase)
                self._put(launch, (before[c] for c in collectives))
                self._put((starts[unit], -2), (after[c] for c in collectives))
        ends = {}
        for unit, collectives in reductions.items():
            ends[unit] = self._last.get(unit, self._position[collectives[-1]])
        units = sorted(reductions, key=ends.__getitem__)
        sums = self._sums_of_tensor_parallelism()
        places = [(ends[unit], 2) for unit in units[1:]]
        if units:
            places.append((len(self._nodes) - 1, -1))
        for unit, place_of_wait in zip(units, places, strict=True):
            collectives = self._in_order(reductions[unit], backward=True)
            self._put((ends[unit], 1), ([n for n in before[c] if n in sums] for c in collectives))
            self._put(
                (ends[unit], 3), ([n for n in before[c] if n not in sums] for c in collectives)
            )
            self._put(place_of_wait, (after[c] for c in collectives))
            # a second collective of a chain, as of copies of a sharded model: complete at the end
            chained = [n for c in collectives for n in after[c] if is_collective(n)]
            self._put((len(self._nodes) - 1, -1), (after[c] for c in chained))
        return self._keys

    def _is_of_fsdp(self, node: fx.Node) -> bool:
        """Return whether a node with an FSDP role is a collective of FSDP2."""
        if not is_collective(node):
            return False
        return role_of(node) is Role.UNSHARD or argument(node, "group_name") in self._groups

    def _sums_of_tensor_parallelism(self) -> set[fx.Node]:
        """Return the nodes by which gradients are summed before FSDP2 reduces them, with casts."""
        sums: set[fx.Node] = set()
        for node in reversed(self._nodes):
            if role_of(node) is not Role.REDUCE_GRAD or self._is_of_fsdp(node):
                continue
            is_sum = is_wait(node) and not self._is_of_fsdp(node.all_input_nodes[0])
            if is_sum or any(user in sums for user in node.users):
                sums.add(node)
        return sums

    def _start(
        self, unit: Unit, gathers: list[fx.Node], after: Mapping[fx.Node, list[fx.Node]]
    ) -> int:
        """Return the place of the first node that computes in a unit or reads its parameters."""
        places = [self._first[unit]] if unit in self._first else []
        for gather in gathers:
            for node in after[gather]:
                places += [self._position[user] for user in node.users if role_of(user) is None]
        return min(places)

    def _after_copies(self, place: int, next_place: int) -> tuple[int, int]:
        """Return where the gather of the second next unit starts: after the copies of a unit at
        `place`, and after the last wait of the host before the next unit begins."""
        for later in range(next_place - 1, place - 1, -1):
            if reads_on_host(self._nodes[later]):
                return (later, 1)
        return (place, -1)

    def _in_order(self, collectives: list[fx.Node], *, backward: bool) -> list[fx.Node]:
        """Sort the collectives of a unit as FSDP2 issues them: by their first parameters in the
        model, in backward the last ones first."""
        return sorted(
            collectives, key=lambda c: self._number[parameters_of(c)[0]], reverse=backward
        )

    def _put(self, place: tuple[int, int], groups: Iterable[list[fx.Node]]) -> None:
        """Put groups of nodes at a place, one group after another."""
        for number, nodes in enumerate(groups):
            for node in nodes:
                self._keys[node] = (*place, number, self._position[node])
