"""Tell, before anything is planned, which ranks have equal plans."""

from __future__ import annotations

import copy
import hashlib
import sys
from collections import defaultdict
from dataclasses import fields, is_dataclass, replace
from functools import cache
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import fx

from graph_trainer.core.analysis.mesh_groups import RankClasses
from graph_trainer.core.capture.side_effects import is_reviewed_file
from graph_trainer.core.graph.annotations import (
    annotations_of,
    local_slice_group,
    offload_tag,
    recompute_policy,
    value_of,
)
from graph_trainer.core.graph.collective_kinds import Ranks
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import argument, argument_nodes, is_getitem
from graph_trainer.core.simulation.collective_costs import placement
from graph_trainer.core.torch_private import pytree
from graph_trainer.core.torch_private_groups import group_ranks
from graph_trainer.titan.config.run_config import GraphTrainerConfig


def group_name(ranks: Ranks, rank: int, classes: RankClasses) -> str:
    """Name a group alike for all parallel groups through the ranks of a class."""
    axes = classes.axes_of_group(ranks, rank)
    if axes is None:  # of experts, over part of an axis: named by what its ranks have in common
        apart = {after - before for before, after in pairwise(ranks)}
        return f"{len(ranks)} ranks {apart.pop()} apart" if len(apart) == 1 else f"{[*ranks]}"
    along = (f"{classes.names[axis]} ({classes.sizes[axis]})" for axis in axes)
    return " and ".join(along) or "self"


def shortened(config: GraphTrainerConfig) -> GraphTrainerConfig:
    """Leave out of a model all but the first two and the last of layers that follow each other and
    are configured alike, initial values aside.

    In torchtitan's models and those of transformers, what ranks compute in one of them they compute
    in each, as other ranks do or otherwise. A model of the user's own, which may know its layers by
    their numbers, stays as it is.
    """
    spec = config.model_spec
    layers = getattr(spec and spec.model, "layers", None)
    if spec is None or not isinstance(layers, list) or config.compile.full_capture:
        return config
    if not is_reviewed_file(sys.modules[type(spec.model).__module__].__file__ or ""):
        return config
    kept: list[Any] = []
    for _, group in groupby(layers, key=_without_initial_values):
        alike = list(group)
        kept += alike[:2] + alike[2:][-1:]
    short, model = copy.copy(config), copy.copy(spec.model)
    model.layers = copy.deepcopy(kept)  # building the model writes to them
    short.model_spec = replace(spec, model=model)
    return short


def _without_initial_values(config: Any) -> Any:
    if not is_dataclass(config):
        return config
    names = [each.name for each in fields(config) if each.name != "param_init"]
    return type(config), [_without_initial_values(getattr(config, name)) for name in names]


def plan_key(joint: JointGraph, rank: int, classes: RankClasses, devices_per_node: int) -> str:
    """Hash all of a captured step that passes and simulation read. Linear in nodes.

    Groups count as what they are to the rank, and its slice of a tensor as that. The numbers that
    an elementwise op is given, such as where a rank's part of a vocabulary begins, count only as
    equal or not to those of the same op on the same inputs: passes compare them, and nothing else
    depends on them.

    Args:
        joint: as captured, perhaps of a `shortened` config.
        rank: that captured it; its process groups must still exist.
        devices_per_node: as the hardware has it, which costs of a group depend on.
    """
    places: dict[fx.Node, int] = {}
    groups: dict[str, int] = {}
    numbers: dict[tuple[object, ...], dict[str, int]] = defaultdict(dict)

    @cache
    def of_group(name: str) -> str:
        ranks = group_ranks(name)
        number = groups.setdefault(name, len(groups))
        return f"{number} {group_name(ranks, rank, classes)} {placement(ranks, devices_per_node)}"

    def as_text(leaf: object) -> str:
        if isinstance(leaf, fx.Node):
            if is_getitem(leaf) and local_slice_group(leaf) is not None:
                return f"own slice of %{places[argument_nodes(leaf.args)[0]]}"
            return f"%{places[leaf]}"
        if isinstance(leaf, str) and leaf == argument(node, "group_name"):
            return of_group(leaf)
        tags = getattr(node.target, "tags", ())
        if type(leaf) in (int, float) and torch.Tag.pointwise in tags:
            of_equals = numbers[node.target, *node.all_input_nodes]
            return f"#{of_equals.setdefault(repr(leaf), len(of_equals))}"
        return repr(leaf)

    key = hashlib.sha256()
    for spec in joint.signature.inputs:
        layout = spec.layout.describe()
        key.update(f"{spec.kind} {spec.name} {spec.requires_grad} {layout}\n".encode())
    for output in joint.signature.outputs:
        key.update(f"{output.kind} {output.name} {output.layout.describe()}\n".encode())
    for place, node in enumerate(joint.graph.nodes):
        places[node] = place
        given = pytree.tree_map(as_text, (node.args, node.kwargs))
        row = [node.op, given, recompute_policy(node), offload_tag(node)]
        slice_of = local_slice_group(node)
        for name, text in annotations_of(node).items():
            row.append((name, of_group(text) if text == slice_of else text))
        # what a graph has beside its nodes, subgraphs for one, is no other rank's
        row.append(rank if node.op == "get_attr" else str(node.target))
        for value in pytree.tree_leaves(value_of(node)):
            if isinstance(value, torch.Tensor):
                row += [value.dtype, value.device, *value.shape, value.stride()]
            else:
                row.append(value)
        key.update(f"{row}\n".encode())
    return key.hexdigest()
