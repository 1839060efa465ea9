"""Every private name of torch.compile and AOTAutograd, with the reason it is needed. See
`torch_private`. All of them: torch 2.13 to 2.15.

Importing this imports torch._dynamo, which takes seconds and makes a folder: import it only where
AOTAutograd compiles, and only then."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.compile_fx
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd import graph_compile

# AOTAutograd's descriptors of what inputs and outputs are.
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput, PlainAOTInput

# Whether a node's result is an object that AOTAutograd passes on unchanged.
from torch._functorch._aot_autograd.graph_compile import is_opaque_node as is_opaque  # noqa: F401
from torch._functorch.aot_autograd import (
    aot_compile_joint_with_descriptors,
    aot_export_joint_with_descriptors,
)

# What a partitioner of AOTAutograd's joint graph needs: the flat outputs of both halves, whether a
# node has to be in one of them, and the two graphs, with inputs and outputs in the order that
# AOTAutograd expects.
from torch._functorch.partitioners import _extract_fwd_bwd_modules as extract_halves  # noqa: F401
from torch._functorch.partitioners import _extract_fwd_bwd_outputs, _is_tangent
from torch._functorch.partitioners import _must_be_in_backward as must_be_in_backward  # noqa: F401
from torch._functorch.partitioners import _must_be_in_forward as must_be_in_forward  # noqa: F401

# Inductor's partitioner, by min-cut.
from torch._functorch.partitioners import min_cut_rematerialization_partition as standard_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn

# Whether a node's result is a size, or another number that is known only in a run.
from torch.fx.experimental.proxy_tensor import is_sym_node as is_symbolic  # noqa: F401
from torch.fx.traceback import preserve_node_meta

from graph_trainer.core.torch_private_inductor import waits_for_copies_in_place

inductor: Any = torch._inductor.compile_fx
Compiled = Callable[..., Any]
Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
"""`(joint, inputs, *, num_fwd_outputs, **rest) -> forward, backward`, as AOTAutograd calls it."""


def min_cut_of_tags(
    joint: fx.GraphModule, inputs: Sequence[Any], **rest: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Partition by min-cut, without merging equal nodes.

    Merging would join a parameter's gather in forward with its repetition in backward. The meshes
    of DTensors count as objects without a size, which a memory budget needs to know.
    """
    settings = {"cse": False, "unsafe_treat_script_objects_as_zero_size": True}
    with functorch_config.patch(settings):
        return standard_partition(joint, inputs, **rest)


def flat_outputs(joint: fx.GraphModule, num_fwd_outputs: int) -> tuple[list[Any], list[Any]]:
    """Return what forward and backward of AOTAutograd's joint graph return."""
    forward, backward, *_ = _extract_fwd_bwd_outputs(joint, num_fwd_outputs=num_fwd_outputs)
    return forward, backward


def written_inputs(joint: fx.Graph) -> list[fx.Node]:
    """Return the placeholders of AOTAutograd's joint graph to which forward writes."""
    described = joint.output_node().meta["desc"]
    written = {d.mutated_input for d in described if isinstance(d, InputMutationAOTOutput)}
    return [n for n in joint.find_nodes(op="placeholder") if descriptor_of(n) in written]


def is_tangent(node: fx.Node) -> bool:
    """Return whether a placeholder is the gradient of an output."""
    return node.op == "placeholder" and _is_tangent(node)


def traced_in_forward(node: fx.Node) -> bool:
    """Return whether AOTAutograd traced a node while forward ran."""
    return node.op == "call_function" and node.meta.get("partitioner_tag") == "is_forward"


def place_in(node: fx.Node, side: str) -> None:
    """Place a node in "forward" or "backward"; `extract_halves` copies it to no other side."""
    node.meta["partitioner_tag"] = f"must_be_in_{side}"


# Prefixes of AOTAutograd's settings that only PyTorch's partitioner reads.
_OF_THE_PARTITIONER = (
    "activation_",
    "aggressive_recomputation",
    "ban_recompute_",
    "cse",
    "enable_activation_offloading",
    "graphsafe_rng_functionalization",
    "max_dist_from_bw",
    "memory_budget_",
    "recompute_views",
    "treat_parameters_as_free_to_save",
    "visualize_memory_budget_",
)


def settings_of(compiler: str) -> tuple[set[str], set[str], set[str]]:
    """Return the settings of Inductor, of AOTAutograd, and of PyTorch's partitioner alone."""
    of_inductor = set(torch._inductor.list_options()) if compiler == "inductor" else set()
    of_autograd = set(functorch_config.get_config_copy())
    of_partitioner = {name for name in of_autograd if name.startswith(_OF_THE_PARTITIONER)}
    return of_inductor, of_autograd - of_partitioner, of_partitioner


@contextlib.contextmanager
def _autograd_settings(settings: dict[str, Any]) -> Iterator[None]:
    """Inside, apply settings of AOTAutograd, and donate saved values to backward's results only if
    they ask for it.

    `donated_buffer=False` alone is not enough: a graph that is compiled so has None in place of the
    list of donated values. If the setting is True when backward runs, it refuses `retain_graph`
    unless the list is empty, and None counts as not empty.
    """
    no_donations: Any = unittest.mock.patch.object(
        graph_compile, "collect_bw_donated_buffer_idxs", lambda *graphs: []
    )
    donates = settings.get("donated_buffer", False)  # dict.get takes no keyword
    with functorch_config.patch(settings), contextlib.nullcontext() if donates else no_donations:
        yield


def compile_without_compiler(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    partition: Partition,
    compiler: Compiled,
    settings: dict[str, Any] | None = None,
) -> Compiled:
    """Compile by AOTAutograd with a partitioner, and one compiler for forward, backward and
    inference.

    Args:
        settings: settings of torch._functorch.config; None for a graph without a partitioned step.
    """
    backend: Any = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)
    with contextlib.nullcontext() if settings is None else _autograd_settings(settings):
        return backend(module, inputs)


def boxed(function: Compiled) -> Compiled:
    """Mark that a function takes its arguments in a list, which it may empty."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def compile_partitioned_with_inductor(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    settings: dict[str, Any],
    autograd_settings: dict[str, Any],
    partition: Partition,
    uuid: bytes,
) -> Compiled:
    """Compile by Inductor as torch.compile does, with settings that hold for this module alone.

    `config_patches` is applied again when backward is compiled, long after this call.

    Args:
        settings: settings of torch._inductor.config.
        autograd_settings: settings of torch._functorch.config.
        uuid: identifies the partitioner in the key of Inductor's cache.
    """

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: Any, joint_inputs: Any, **rest: Any) -> Any:
            return partition(gm, joint_inputs, **rest)

        def uuid(self) -> bytes:
            return uuid

        def __reduce__(self) -> Any:  # the key of Inductor's cache pickles all settings
            return bytes, (uuid,)

    # AOTAutograd's cache identifies a partitioned step by its name alone, Inductor's by its halves
    autograd_settings = {**autograd_settings, "enable_autograd_cache": False}
    in_backward_too = functorch_config.patch(autograd_settings)
    with _autograd_settings(autograd_settings):
        return inductor.compile_fx(
            module,
            list(inputs),
            inner_compile=in_backward_too(waits_for_copies_in_place()(inductor.compile_fx_inner)),
            config_patches={**settings, "custom_partitioner_fn": Partitioner()},
        )


def compile_plainly(module: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
    """Compile by Inductor as torch.compile does."""
    return inductor.compile_fx(module, list(inputs))


# AOTAutograd's joint graph with descriptors of its inputs and outputs.
ExportedJoint = Any


def export_joint(
    stack: contextlib.ExitStack, function: Compiled, tensors: Sequence[torch.Tensor]
) -> ExportedJoint:
    """Return AOTAutograd's joint graph of a function of tensors.

    `stack` must stay open until the graph is compiled.
    """

    class Function(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> Any:
            return function(*tensors)

    stack.enter_context(preserve_node_meta())
    return aot_export_joint_with_descriptors(stack, Function(), tuple(tensors))


def descriptor_of(node: fx.Node) -> Any:
    """Return AOTAutograd's descriptor of an input; None if it has none."""
    return node.meta.get("desc")


def argument_of(node: fx.Node) -> int | None:
    """Return the index of the argument that an input is, or is a part of; None for other inputs."""
    descriptor = _without_parts(descriptor_of(node))
    return descriptor.idx if isinstance(descriptor, PlainAOTInput) else None


def gradient_of(descriptor: Any) -> int | None:
    """Return the index of the argument whose gradient an output is; None for other outputs."""
    argument = getattr(_without_parts(descriptor), "grad_of", None)
    return getattr(argument, "idx", None)


def _without_parts(descriptor: Any) -> Any:
    """Return the descriptor of the tensor that a plain tensor is inside of, else the same one."""
    while hasattr(descriptor, "base"):
        descriptor = descriptor.base
    return descriptor


def set_flat_arguments(joint: ExportedJoint, placeholders: Sequence[fx.Node]) -> list[Any]:
    """Set AOTAutograd's flat arguments to the values of the placeholders.

    Returns:
        The descriptors of arguments without a placeholder at their place. If there are any, nothing
        is set.
    """
    capture = joint._aot_graph_capture
    expected = [*capture.updated_flat_args_descs[0], *capture.updated_flat_args_descs[1]]
    actual = [descriptor_of(node) for node in placeholders]
    missing = []
    for index, descriptor in enumerate(expected):
        if index >= len(actual) or actual[index] != descriptor:
            missing.append(descriptor)
    if not missing:
        values = [node.meta["val"] for node in placeholders]
        num_primals = len(capture.updated_flat_args[0])
        capture.updated_flat_args = (values[:num_primals], values[num_primals:])
    return missing


def compile_joint(
    joint: ExportedJoint, partition: Partition, forward: Compiled, backward: Compiled
) -> Compiled:
    """Partition an exported joint graph and compile each half, as a function of its tensors."""
    with _autograd_settings({}):
        return aot_compile_joint_with_descriptors(
            joint, partition_fn=partition, fw_compiler=forward, bw_compiler=backward
        )
