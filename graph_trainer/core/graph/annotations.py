"""Annotations: typed access to `node.meta`.

Passes and analyses use the accessors below and never the dictionary itself:

    phase        forward, loss or backward
    module       FQN of the module whose forward made the node, or whose backward it is
    fsdp role    unshard or reduce_grad, with the FQN of the parameter
    parallelism  whether context parallelism issued a collective
    bucket       the tag of the collectives that may be merged
    loss grad    the gradient of a loss that backward begins with: a tensor of ones
    counts       of an all-to-all whose splits data decide: the exchange of their counts
    local slice  the group of which each rank takes its local slice, where DTensor does
    recompute    torch's CheckpointPolicy, with an `ac_graph_id`, as PyTorch's partitioner reads
    offload      whether the result is kept for backward in host memory
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from graph_trainer.core.torch_private import detect_fake_mode


class Phase(StrEnum):
    """The part of a train step that a node belongs to."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"


class Role(StrEnum):
    """What a node does for FSDP."""

    UNSHARD = "unshard"
    REDUCE_GRAD = "reduce_grad"


_CUSTOM = "custom"  # torch.fx.traceback.annotate writes here, and fx keeps it across retracing
# Looked up a million times in a plan: a dictionary takes a fifth of the time of an enum's call.
_PHASES: dict[str | None, Phase] = {phase.value: phase for phase in Phase}
_ROLES: dict[str | None, Role] = {role.value: role for role in Role}

_PHASE = "phase"
_MODULE = "module"
_ROLE = "fsdp_role"
_PARAMETER = "fsdp_parameter"
_CONTEXT_PARALLEL = "context_parallel"
_INPUT_NAME = "input_name"
_RECOMPUTE = "recompute"  # these two names are PyTorch's own
_AC_GRAPH_ID = "ac_graph_id"
_SAVED = "saved_for_backward"
_LOCAL_SLICE = "local_slice"
_LOSS_GRADIENT = "loss_gradient"
_COUNTS = "counts"
_RECOMPUTED = "recomputed"
_PARTITION_SAVED = "partition_saved"
_CARRIED = "partition_recompute"
_BUCKET = "bucket"
_OFFLOAD = "offload"  # in `meta` for one node, in `custom` for a region of the model

# PyTorch's partitioner saves a node between two checkpoint regions: one that is to be recomputed,
# with a reader that is to be recomputed and has a larger number. Nodes of every region read a
# gathered parameter, so its number is above those of users, which count up from 0, and of
# `tag_activations`.
FSDP_AC_GRAPH_ID = 1 << 42

_STRENGTH = (
    *("MUST_RECOMPUTE", "MUST_CPU_OFFLOAD", "MUST_SAVE"),
    *("PREFER_RECOMPUTE", "PREFER_CPU_OFFLOAD", "PREFER_SAVE"),
)
"""The names of `CheckpointPolicy`, the strongest first. Older torch versions have fewer. Policies
that newer versions add count as weaker."""

SEPARATOR = ", "
"""Between the FQNs of the parameters that share a bucket."""

_BLOCK = re.compile(r"^(?:.*?\.)??\d+(?=\.|$)")


def annotation(
    *,
    phase: Phase | None = None,
    module: str | None = None,
    role: Role | None = None,
    parameter: str | None = None,
    context_parallel: bool | None = None,
    local_slice: str | None = None,
    offload: bool | None = None,
    loss_gradient: int | None = None,
    counts: str | None = None,
    recomputed: bool | None = None,
) -> dict[str, str]:
    """Make the entry for `torch.fx.traceback.annotate` that the accessors below read back."""
    entries = {
        _PHASE: phase,
        _MODULE: module,
        _ROLE: role,
        _PARAMETER: parameter,
        _CONTEXT_PARALLEL: context_parallel,
        _LOCAL_SLICE: local_slice,
        _OFFLOAD: offload,
        _LOSS_GRADIENT: loss_gradient,
        _COUNTS: counts,
        _RECOMPUTED: recomputed,
    }
    return {key: str(value) for key, value in entries.items() if value is not None}


def annotate_node(node: fx.Node, entry: Mapping[str, str]) -> None:
    """Add the entries of `annotation(...)` to a node, in a new dictionary."""
    node.meta[_CUSTOM] = {**node.meta.get(_CUSTOM, {}), **entry}


def copy_annotations(source: fx.Node, target: fx.Node, *, phase: Phase | None = None) -> None:
    """Give `target` the annotations of `source`, in a new dictionary.

    `Graph.node_copy` shares the values of `meta`: without this, annotating a copy would
    annotate its original too. Recompute and offload tags are decisions about one node and are not
    copied. The phase is that of `source` where none is given.
    """
    target.meta[_CUSTOM] = dict(source.meta.get(_CUSTOM, {}))
    if phase is not None:
        annotate_node(target, annotation(phase=phase))
    clear_recompute_policy(target)
    clear_offload(target)


def merge_tags(kept: fx.Node, other: fx.Node) -> None:
    """Give `kept` the tags of an equal node that it replaces.

    `kept` gets the stronger recompute tag of the two, in the order of `_STRENGTH`, with its
    `ac_graph_id`: MUST_RECOMPUTE wins over every tag that keeps, and a MUST tag wins over a PREFER
    tag. MUST_RECOMPUTE removes an offload tag. The marks of both nodes are kept.
    """
    if other.meta.get(_CUSTOM):
        kept.meta[_CUSTOM] = {**other.meta[_CUSTOM], **kept.meta.get(_CUSTOM, {})}

    def weakness(node: fx.Node) -> int:
        policy = recompute_policy(node)
        if policy is None:
            return len(_STRENGTH) + 1
        return _STRENGTH.index(policy.name) if policy.name in _STRENGTH else len(_STRENGTH)

    stronger = min(kept, other, key=weakness)
    policy = recompute_policy(stronger)
    if policy is not None:
        graph_id = stronger.meta.get(_AC_GRAPH_ID, FSDP_AC_GRAPH_ID)
        set_recompute_policy(kept, policy, ac_graph_id=graph_id)
    for mark in (_OFFLOAD, _SAVED):
        if other.meta.get(mark):
            kept.meta[mark] = True
    if policy is CheckpointPolicy.MUST_RECOMPUTE:
        clear_offload(kept)


def _custom(node: fx.Node, key: str) -> str | None:
    return (node.meta.get(_CUSTOM) or {}).get(key)


def annotations_of(node: fx.Node) -> Mapping[str, str]:
    """Return the annotations of a node. Later changes of the node do not change what it returns."""
    return node.meta.get(_CUSTOM) or {}


def renamed_annotations(node: fx.Node, names: Mapping[str, str]) -> Mapping[str, str]:
    """Return the annotations of a node with modules renamed: `names` maps old FQNs to new ones."""
    renamed = dict(annotations_of(node))
    for key, value in renamed.items():
        for old, new in names.items():
            if value == old or value.startswith(f"{old}."):
                renamed[key] = new + value.removeprefix(old)
                break
    return renamed


def is_analysed_alike(a: Mapping[str, str], b: Mapping[str, str]) -> bool:
    """Return whether two annotations name the same phase, module, role and parameter."""
    keys = (_PHASE, _MODULE, _ROLE, _PARAMETER)
    return a is b or all(a.get(key) == b.get(key) for key in keys)


def phase_of(node: fx.Node) -> Phase | None:
    """Return the phase of a node; None for placeholders, attributes, the output, and annotations
    of other code."""
    return _PHASES.get(_custom(node, _PHASE))


def is_backward(node: fx.Node) -> bool:
    """Return whether a node belongs to backward."""
    return phase_of(node) is Phase.BACKWARD


def is_recomputed(node: fx.Node) -> bool:
    """Return whether a checkpoint of the model ran a node again in backward, while it was traced.

    The copies that `rematerialize` makes have no such mark.
    """
    return _custom(node, _RECOMPUTED) is not None


def module_of(node: fx.Node) -> str | None:
    """Return the FQN of the module that a node belongs to, None where it is not known."""
    return _custom(node, _MODULE)


def block_of(fqn: str | None) -> str | None:
    """Return the repeated block of an FQN: 'layers.3' for 'layers.3.attention.wo.weight'.

    An index is that of its own list: layers.0 and mtp_layers.0 are two blocks.
    """
    match = _BLOCK.match(fqn or "")
    return match.group() if match else None


def role_of(node: fx.Node) -> Role | None:
    """Return what a node does for FSDP, if anything."""
    return _ROLES.get(_custom(node, _ROLE))


def is_context_parallel(node: fx.Node) -> bool:
    """Return whether context parallelism issued a collective."""
    return _custom(node, _CONTEXT_PARALLEL) is not None


def parameter_of(node: fx.Node) -> str | None:
    """Return the FQN of the parameter that a node with an FSDP role serves; several are joined."""
    return _custom(node, _PARAMETER)


def parameters_of(node: fx.Node) -> tuple[str, ...]:
    """List the FQNs of the parameters that a node with an FSDP role serves."""
    joined = parameter_of(node)
    return () if joined is None else tuple(joined.split(SEPARATOR))


def local_slice_group(node: fx.Node) -> str | None:
    """Return the group whose ranks each take their local slice here, as DTensor did at capture."""
    return _custom(node, _LOCAL_SLICE)


def loss_gradient_of(node: fx.Node) -> int | None:
    """Return the index of the output whose gradient, a tensor of ones, a node makes; else None.

    Backward begins with these nodes. Counts the outputs of forward that need a gradient; a loss is
    output 0.
    """
    place = _custom(node, _LOSS_GRADIENT)
    return None if place is None else int(place)


def counts_of(node: fx.Node) -> str | None:
    """Return the exchange of counts that gave an all-to-all its splits: "0", or "0 back".

    "back" is for rows that return. None if the splits do not depend on data.
    """
    return _custom(node, _COUNTS)


def is_marked_saved(node: fx.Node) -> bool:
    """Return whether `partition` saves a result of this node."""
    return _custom(node, _PARTITION_SAVED) is not None


def mark_saved_in_cut(node: fx.Node) -> None:
    """Mark that `partition` saves a result of this node.

    fx keeps the mark when it traces the graph again, unless the node is a getitem: mark the op
    that makes the tuple.
    """
    annotate_node(node, {_PARTITION_SAVED: str(True)})


def input_name(node: fx.Node) -> str | None:
    """Return the FQN or path of the input that a placeholder takes."""
    return node.meta.get(_INPUT_NAME)


def set_input_name(node: fx.Node, name: str) -> None:
    """Set the FQN or path of the input that a placeholder takes."""
    node.meta[_INPUT_NAME] = name


def owner_of(node: fx.Node) -> str:
    """Return the FQN of the one parameter that a node serves, else of the module it belongs to."""
    parameters = parameters_of(node)
    return parameters[0] if len(parameters) == 1 else module_of(node) or ""


def bucket_tag(node: fx.Node) -> str | None:
    """Return the tag of a collective that may be merged with others of the same tag, else None."""
    return _custom(node, _BUCKET)


def set_bucket_tag(node: fx.Node, tag: str) -> None:
    """Tag a collective for merging; fx keeps the tag when the graph is split or traced."""
    annotate_node(node, {_BUCKET: tag})


def clear_bucket_tag(node: fx.Node) -> None:
    """Remove the tag of a collective once it is merged, or is not going to be."""
    node.meta[_CUSTOM] = {k: v for k, v in node.meta[_CUSTOM].items() if k != _BUCKET}


def recompute_policy(node: fx.Node) -> CheckpointPolicy | None:
    """Return the recompute tag of a node, whether a pass or the user wrote it."""
    return node.meta.get(_RECOMPUTE)


def set_recompute_policy(
    node: fx.Node, policy: CheckpointPolicy, *, ac_graph_id: int = FSDP_AC_GRAPH_ID
) -> None:
    """Tag a node. `ac_graph_id` names the checkpoint region; FSDP's tags have their own."""
    node.meta[_RECOMPUTE] = policy
    node.meta[_AC_GRAPH_ID] = ac_graph_id


def set_kept(node: fx.Node, kept: bool, *, ac_graph_id: int = FSDP_AC_GRAPH_ID) -> None:
    """Tag a node MUST_SAVE where its result is kept for backward, else MUST_RECOMPUTE."""
    policy = CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE
    set_recompute_policy(node, policy, ac_graph_id=ac_graph_id)


def clear_recompute_policy(node: fx.Node) -> None:
    """Remove the recompute tag of a node."""
    node.meta.pop(_RECOMPUTE, None)
    node.meta.pop(_AC_GRAPH_ID, None)


def carry_recompute_policy(source: fx.Node, target: fx.Node) -> None:
    """Write the tag of `source` on `target` for a later trace.

    fx keeps it, and `restore_recompute_policy` makes it a tag again.
    """
    policy = recompute_policy(source)
    if policy is not None:
        annotate_node(target, {_CARRIED: f"{policy.name} {source.meta.get(_AC_GRAPH_ID, 0)}"})


def restore_recompute_policy(node: fx.Node) -> None:
    """Turn what `carry_recompute_policy` wrote into a tag, once: a second call changes nothing."""
    carried = _custom(node, _CARRIED)
    if carried is not None:
        policy, region = carried.split()
        set_recompute_policy(node, CheckpointPolicy[policy], ac_graph_id=int(region))
        node.meta[_CUSTOM] = {k: v for k, v in node.meta[_CUSTOM].items() if k != _CARRIED}


def offload_tag(node: fx.Node) -> bool:
    """Return whether a node is tagged to keep its result for backward in host memory."""
    return bool(node.meta.get(_OFFLOAD))


def set_offload(node: fx.Node) -> None:
    """Tag a node to keep its result for backward in host memory, and so not to recompute it."""
    node.meta[_OFFLOAD] = True
    set_recompute_policy(node, CheckpointPolicy.MUST_SAVE)


def clear_offload(node: fx.Node) -> None:
    """Remove the offload tag of a node; a recompute tag stays."""
    node.meta.pop(_OFFLOAD, None)


def in_offload_region(node: fx.Node) -> bool:
    """Return whether the model made a node inside `gt.offload()`."""
    return _custom(node, _OFFLOAD) is not None


def is_saved_for_backward(node: fx.Node) -> bool:
    """Return whether autograd or a checkpoint saved a node's result; backward may not read it."""
    return bool(node.meta.get(_SAVED))


def set_saved_for_backward(node: fx.Node) -> None:
    """Mark that autograd or a checkpoint saved a node's result."""
    node.meta[_SAVED] = True


def value_of(node: fx.Node) -> Any:
    """Return the fake tensor (or nested lists of them) that a node produced at capture."""
    return node.meta.get("val")


def tensor_of(node: fx.Node) -> torch.Tensor:
    """Return the (fake) value of a node whose value is one tensor."""
    value = value_of(node)
    assert isinstance(value, torch.Tensor)
    return value


def inferred_value(node: fx.Node) -> Any:
    """Run a node's op on the (fake) values of its inputs, and return the result."""
    mode = detect_fake_mode([value_of(n) for n in node.all_input_nodes])
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    with mode or contextlib.nullcontext():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def infer_value(node: fx.Node) -> None:
    """Set a node's (fake) value by running its op on the values of its inputs."""
    node.meta["val"] = inferred_value(node)


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """List the fake tensors in a node's value; empty where it makes none."""
    value = value_of(node)
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [v for v in values if isinstance(v, torch.Tensor)]
