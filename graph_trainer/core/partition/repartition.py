"""Partition a partitioned step again for torch.compile: with the same result, or by PyTorch's
partitioner within the decisions of passes.

AOTAutograd traces the two graphs into one joint graph and partitions that. `cut` has marked the
nodes that it saved, in metadata that this trace keeps; they are saved again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from graph_trainer.core.graph.annotations import (
    Role,
    copy_annotations,
    is_backward,
    is_marked_saved,
    merge_tags,
    phase_of,
    recompute_policy,
    restore_recompute_policy,
    role_of,
    set_recompute_policy,
)
from graph_trainer.core.graph.host_copies import waits_for_copy
from graph_trainer.core.graph.ops import (
    aliased_input,
    ancestors,
    has_effect,
    is_getitem,
    is_wait,
    may_write,
    runs_once,
)
from graph_trainer.core.torch_private_compile import (
    Partition,
    extract_halves,
    flat_outputs,
    is_opaque,
    is_symbolic,
    is_tangent,
    min_cut_of_tags,
    must_be_in_backward,
    must_be_in_forward,
    place_in,
    standard_partition,
    traced_in_forward,
    written_inputs,
)

_IS_SAVED = (
    (CheckpointPolicy.MUST_RECOMPUTE, False),
    (CheckpointPolicy.MUST_SAVE, True),
    (CheckpointPolicy.PREFER_RECOMPUTE, False),
)
"""Whether a result is saved, by its policy or that of the op that made it, the strongest first."""


def repartition(
    joint: fx.GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **rest: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Partition AOTAutograd's joint graph of a step into forward and backward where `cut` did.

    Forward has the nodes that its outputs need, and those that are marked as saved or tagged
    MUST_SAVE. Backward has all other nodes that the gradients need, wherever they are in the graph:
    recomputation and repeated gathers too. A node with an effect, an assertion for example, runs
    once, in the half in which it was traced.

    Of the results of forward that backward reads, those marked or tagged MUST_SAVE are saved. So
    are random numbers, sizes and opaque objects (as by PyTorch's partitioner), and results of ops
    around the step (as by autograd). The others are recomputed right before their first reader. A
    recompute policy takes precedence over a mark.

    A graph without gradients is left to PyTorch's partitioner. Linear in nodes.

    Args:
        joint: AOTAutograd's joint graph, which is changed.
        inputs: examples of its inputs.
        num_fwd_outputs: how many of its outputs are forward's.
        rest: the other arguments that AOTAutograd passes to a partitioner.
    """
    _, gradients = flat_outputs(joint, num_fwd_outputs)
    returned = {gradient for gradient in gradients if isinstance(gradient, fx.Node)}
    if not returned:
        return standard_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **rest)
    _merge_gathers(joint.graph, _forward(joint, num_fwd_outputs))
    forward = _forward(joint, num_fwd_outputs)
    _recompute(joint, forward, num_fwd_outputs)
    _merge_gathers(joint.graph, forward)  # recomputation reads what backward gathers anyway
    backward = _backward(joint, forward, num_fwd_outputs)
    for node in reversed(list(joint.graph.nodes)):
        if node.op != "call_function":
            continue
        if node in forward or node in backward:
            if not is_symbolic(node):
                place_in(node, "forward" if node in forward else "backward")
        elif not node.users:
            joint.graph.erase_node(node)
    saved: list[fx.Node] = []
    symbolic: list[fx.Node] = []
    opaque: list[fx.Node] = []
    for node in joint.graph.nodes:
        # backward takes values of forward and inputs, as far as it reads or returns them
        outside = node in forward or (node.op == "placeholder" and not is_tangent(node))
        if not outside or not (node in returned or not backward.isdisjoint(node.users)):
            continue
        if is_symbolic(node):
            symbolic.append(node)
        elif is_opaque(node):
            opaque.append(node)
        else:
            saved.append(node)
    return extract_halves(joint, saved, symbolic, opaque, num_fwd_outputs=num_fwd_outputs)


def repartition_by_min_cut(
    joint: fx.GraphModule, inputs: Sequence[Any], **rest: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Let PyTorch's partitioner decide where neither the cut nor a tag has decided.

    The cut has decided which nodes run in backward, with repeated gathers and recomputation. It
    saves random draws, values that forward reads from a buffer that it writes, kept gathers of
    parameters and copies in host memory. Ops around the step are left to PyTorch. Linear in nodes,
    in addition to the partitioner.
    """
    stale = set(written_inputs(joint.graph))
    nodes = [node for node in joint.graph.nodes if node.op == "call_function"]
    for node in nodes:
        restore_recompute_policy(node)
    for node in nodes:
        source = _source(node)
        reads_stale = not stale.isdisjoint(source.all_input_nodes)
        if reads_stale and aliased_input(node) in stale:
            stale.add(node)
            continue
        if is_symbolic(node) or phase_of(source) is None:
            continue
        if is_backward(source):
            place_in(node, "backward")
            continue
        if reads_stale and node.target is torch.ops.aten.clone.default:
            # PyTorch's partitioner moves a clone that only backward reads to backward: let the
            # write in forward read it too
            def comes_after(user: fx.Node, clone: fx.Node = node) -> bool:
                return clone < user

            node.all_input_nodes[0].replace_all_uses_with(node, delete_user_cb=comes_after)
        # recomputation would draw other numbers, or read what forward has written since
        is_kept = runs_once(source) or reads_stale
        if is_marked_saved(source) and recompute_policy(node) is None:
            is_kept |= role_of(source) is Role.UNSHARD or waits_for_copy(source)
        if is_kept:
            set_recompute_policy(node, CheckpointPolicy.MUST_SAVE)
    halves = min_cut_of_tags(joint, inputs, **rest)
    for half in halves:  # recomputation reads what backward gathers anyway
        _merge_gathers(half.graph, set())
        half.recompile()
    return halves


PARTITIONS: dict[str, Partition] = {"tags": repartition, "min_cut": repartition_by_min_cut}
"""By the name of `gt.backend(partition=...)` and `ExportedStep.compile(partition=...)`."""


def _needed_for(graph: fx.Graph, roots: Iterable[Any], stop: set[fx.Node]) -> set[fx.Node]:
    """Return `roots` and the nodes that they need, without `stop` and nodes that only it needs."""
    needed = {root for root in roots if isinstance(root, fx.Node)} - stop
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(n for n in node.all_input_nodes if n not in stop)
    return {node for node in needed if node.op == "call_function"}


def _forward(joint: fx.GraphModule, num_fwd_outputs: int) -> set[fx.Node]:
    """Return the nodes of forward: those that it returns, saves or must run, and their inputs."""
    outputs, _ = flat_outputs(joint, num_fwd_outputs)
    roots: list[Any] = list(outputs)
    depend_on_tangents: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if is_tangent(node) or not depend_on_tangents.isdisjoint(node.all_input_nodes):
            depend_on_tangents.add(node)
        elif node.op == "call_function" and (
            is_marked_saved(node)
            or must_be_in_forward(node)
            or (traced_in_forward(node) and (_must_run(node) or _decision(node)))
        ):
            roots.append(node)
    return _needed_for(joint.graph, roots, stop=set())


def _backward(joint: fx.GraphModule, forward: set[fx.Node], num_fwd_outputs: int) -> set[fx.Node]:
    """Return the nodes of backward: gradients and nodes with effects, and nodes only they read."""
    _, gradients = flat_outputs(joint, num_fwd_outputs)
    roots = list(gradients)
    for node in joint.graph.nodes:
        if node.op == "call_function":
            has_effect_in_backward = not traced_in_forward(node) and _must_run(node)
            if must_be_in_backward(node) or has_effect_in_backward:
                roots.append(node)
    return _needed_for(joint.graph, roots, stop=forward)


def _must_run(node: fx.Node) -> bool:
    """Return whether a node runs for its effect, as an assertion does, in the half of its trace.

    A wait does not: it runs for the readers of its result.
    """
    return has_effect(node) and not is_wait(node) and not is_symbolic(node)


def _is_saved(node: fx.Node) -> bool:
    """Return whether a result of forward is saved for backward, if backward reads it.

    A view is not saved if its base is saved or recomputed.
    """
    if is_symbolic(node) or is_opaque(node):
        return True
    decision = _decision(node)
    if decision is False:
        return False
    base = aliased_input(node)
    if decision is None:
        # an op around the step, or AOTAutograd's view of a result
        return base is None and phase_of(_source(node)) is None
    if is_wait(node):  # backward reads the gathered tensor, and does not wait for it again
        return True
    while base is not None and base.op == "call_function":
        if _decision(base) is not None:
            return False
        base = aliased_input(base)
    return True


def _decision(node: fx.Node) -> bool | None:
    """Return the decision of marks and tags: True to save, False to recompute, None for neither."""
    source = _source(node)
    if runs_once(source) or may_write(source.target):
        return True
    policies = (recompute_policy(source), recompute_policy(node))
    for policy, is_saved in _IS_SAVED:
        if policy in policies:
            return is_saved
    return True if is_marked_saved(source) else None


def _source(node: fx.Node) -> fx.Node:
    """Return the op that made a result: a getitem does not keep its metadata."""
    while is_getitem(node):
        node = node.all_input_nodes[0]
    return node


def _recompute(joint: fx.GraphModule, forward: set[fx.Node], num_fwd_outputs: int) -> None:
    """Let backward read copies of the nodes of forward whose results are not saved.

    Nodes that were traced in forward for backward alone are copied too.
    """
    graph = joint.graph
    copies: dict[fx.Node, fx.Node] = {}

    def copy_of(node: fx.Node) -> fx.Node:
        return copies.get(node, node)

    def is_missing(node: fx.Node) -> bool:
        in_forward = node in forward or traced_in_forward(node)
        return in_forward and node not in copies and not _is_saved(node)

    for reader in sorted(_backward(joint, forward, num_fwd_outputs)):
        if traced_in_forward(reader):
            continue
        for node in ancestors(reader, is_missing):
            with graph.inserting_before(reader):
                copies[node] = graph.node_copy(node, copy_of)
            copy_annotations(node, copies[node])
        reader.args = fx.map_arg(reader.args, copy_of)
        reader.kwargs = fx.map_arg(reader.kwargs, copy_of)


def _merge_gathers(graph: fx.Graph, forward: set[fx.Node]) -> None:
    """Merge equal nodes of unshard chains, within forward and within backward."""
    first: dict[object, fx.Node] = {}
    for node in list(graph.nodes):
        if role_of(node) is not Role.UNSHARD or may_write(node.target):
            continue
        key = (node in forward, node.target, str(node.args), str(node.kwargs))
        kept = first.setdefault(key, node)
        if kept is node:
            continue
        merge_tags(kept, node)
        node.replace_all_uses_with(kept)
        graph.erase_node(node)
