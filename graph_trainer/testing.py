"""What a test of a pass needs: graphs by hand or of a model on fake ranks, and `check_pass`.

docs/write_a_pass.md shows it in use.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from graph_trainer.core.analysis.one_process import run as run
from graph_trainer.core.analysis.one_process import values_for as values_for
from graph_trainer.core.capture.capture import capture
from graph_trainer.core.graph.annotations import (
    Phase,
    Role,
    annotate_node,
    annotation,
    offload_tag,
    recompute_policy,
    set_input_name,
    value_of,
)
from graph_trainer.core.graph.joint_graph import JointGraph, compute_nodes
from graph_trainer.core.graph.signature import Input, InputKind, Output, OutputKind, Signature
from graph_trainer.core.graph.subclasses import unwrap
from graph_trainer.core.passes.base import Pass
from graph_trainer.core.passes.context import PassContext
from graph_trainer.core.passes.pipeline import PassStep, run_one
from graph_trainer.core.passes.verify_numbers import ALIKE, NOT_COMPARED, Numbers
from graph_trainer.core.sharding.simple_fsdp import simple_fsdp
from graph_trainer.core.torch_private import FakeTensorMode, c10d_functional
from graph_trainer.core.torch_private_groups import become as become
from graph_trainer.errors import VerificationError

aten = torch.ops.aten


def fake_mesh(sizes: int | tuple[int, ...] = 4, rank: int = 0) -> DeviceMesh:
    """Become a rank of a mesh of these sizes, all of whose other ranks are fake."""
    sizes = (sizes,) if isinstance(sizes, int) else sizes
    become(rank, math.prod(sizes))
    return init_device_mesh("cpu", sizes)


def mean_square(model: nn.Module, *args: torch.Tensor) -> torch.Tensor:
    """Return the mean of the squared outputs, a loss for any model."""
    return model(*args).square().mean()


def captured(
    model: nn.Module,
    *args: torch.Tensor,
    world: int | tuple[int, ...] = 4,
    rank: int = 0,
    loss_fn: Callable[..., torch.Tensor] = mean_square,
    **fsdp: Any,
) -> JointGraph:
    """Capture a model as FSDP shards it over fake ranks.

    Args:
        args: a batch.
        world: how many ranks, or the sizes of a mesh.
        rank: which of them captures.
        loss_fn: `loss_fn(model, *args)` -> scalar loss.
        fsdp: further arguments of `simple_fsdp`.
    """
    simple_fsdp(model, fake_mesh(world, rank), **fsdp)
    return capture(model, loss_fn, args)


def check_pass(
    graph_pass: Pass,
    graph: JointGraph | nn.Module,
    options: Any = None,
    context: PassContext | None = None,
    *,
    args: Sequence[torch.Tensor] = (),
    ranks_alike: bool = False,
) -> bool:
    """Run one pass twice, with all that the pipeline and `verify_passes` check.

    The graph must stay valid, with the order of reads and writes in place; metadata must be what
    ops make; loss, gradients and what the step leaves in its inputs must keep every bit on the
    same values, or round otherwise if the pass has `changes_sums`; and the second run must change
    nothing.

    Args:
        graph_pass: the pass.
        graph: a joint graph, which is changed, or a model that is captured first, on four ranks.
        options: of the pass; None for its defaults.
        context: what the pass may know of the run.
        args: a batch for the model.
        ranks_alike: whether equal numbers where all ranks hold the same are enough, for a pass
            that gathers over other groups or gathers bytes.

    Returns:
        whether the first run changed anything.

    Raises:
        VerificationError: what is wrong, or why the numbers cannot be compared.
        PassError: the pass failed.

    Example::

        assert check_pass(my_pass, nn.Linear(4, 4), args=(torch.randn(2, 4),))
    """
    joint = captured(graph, *args) if isinstance(graph, nn.Module) else graph
    options = graph_pass.options_type() if options is None else options
    step = PassStep(graph_pass, options, context or PassContext())
    before = code(joint)
    _, verified, *_ = run_one(joint, step, Numbers(joint))
    if verified.startswith(NOT_COMPARED) or (ALIKE in verified and not ranks_alike):
        raise VerificationError(
            f"check_pass cannot tell whether '{graph_pass.name}' is right: {verified}"
        )
    first = code(joint)
    run_one(joint, step, None)
    joint.history.pop()
    if code(joint) != first:
        raise VerificationError(
            f"pass '{graph_pass.name}' changed the graph again when it ran a second time: let it "
            "find nothing to do in a graph that it has changed"
        )
    return first != before


def assert_same(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> None:
    """Assert that two results of `run` are bitwise equal."""
    torch.testing.assert_close([*after], [*before], rtol=0, atol=0)


def code(joint: JointGraph) -> str:
    """Return text that is equal for equal graphs, tags included."""
    return "\n".join(
        f"{n.format_node()} {recompute_policy(n)} {offload_tag(n)}" for n in joint.graph.nodes
    )


def targets(joint: JointGraph) -> list[Any]:
    """List the ops of a graph, in order."""
    return [n.target for n in compute_nodes(joint.graph)]


class Builder:
    """A joint graph by hand: every call makes a node and runs its op on fake tensors.

    Example::

        b = Builder()
        weight = b.parameter("weight", 4)
        product = b.call(aten.mul.Tensor, b.input("x", 4), weight)
        joint = b.joint(b.total(product), weight=b.call(aten.neg.default, product))
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()
        self.root = nn.Module()
        self.phase = Phase.FORWARD
        """The phase of calls that name none."""
        self._inputs: list[Input] = []

    def input(
        self,
        name: str,
        *shape: int,
        kind: InputKind = InputKind.BATCH,
        dtype: torch.dtype = torch.float32,
    ) -> fx.Node:
        """Add an input of the step."""
        node = self.graph.placeholder(re.sub(r"\W+", "_", name))
        node.meta["val"] = self.mode.from_tensor(torch.empty(shape, dtype=dtype))
        set_input_name(node, name)
        trainable = kind is InputKind.PARAMETER
        self._inputs.append(Input(kind, name, unwrap(value_of(node))[1], trainable))
        return node

    def parameter(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        """Add a parameter."""
        return self.input(name, *shape, kind=InputKind.PARAMETER, dtype=dtype)

    def buffer(self, name: str, *shape: int, mutated: bool = False) -> fx.Node:
        """Add a buffer; `mutated` if a call writes it in place."""
        node = self.input(name, *shape, kind=InputKind.BUFFER)
        self._inputs[-1] = dataclasses.replace(self._inputs[-1], mutated=mutated)
        return node

    def call(
        self,
        op: Any,
        *args: Any,
        phase: Phase | None = None,
        role: Role | None = None,
        parameter: str | None = None,
        module: str | None = None,
        **kwargs: Any,
    ) -> fx.Node:
        """Call an op on nodes and other values; phase, role and module are its annotations."""
        node = self.graph.call_function(op, args, kwargs)
        with self.mode:
            node.meta["val"] = op(*fx.map_arg(args, value_of), **fx.map_arg(kwargs, value_of))
        entry = annotation(phase=phase or self.phase, role=role, parameter=parameter, module=module)
        annotate_node(node, entry)
        return node

    def waited(self, op: Any, *args: Any, **how: Any) -> fx.Node:
        """Call a collective and wait for it."""
        return self.call(c10d_functional.wait_tensor.default, self.call(op, *args, **how), **how)

    def total(self, *values: fx.Node, **how: Any) -> fx.Node:
        """Add up all elements of these values."""
        sums = [self.call(aten.sum.default, value, **how) for value in values]
        return functools.reduce(lambda a, b: self.call(aten.add.Tensor, a, b, **how), sums)

    def call_higher_order(
        self, op: Any, subgraph: fx.GraphModule, *args: Any, val: fx.Node, name: str = "body"
    ) -> fx.Node:
        """Call a higher-order op whose result looks like the value of `val`."""
        self.root.add_module(name, subgraph)
        attribute = self.graph.get_attr(name)
        node = self.graph.call_function(op, (attribute, *args))
        node.meta["val"] = (val.meta["val"],)
        annotate_node(node, annotation(phase=Phase.FORWARD))
        return node

    def joint(self, loss: fx.Node, **gradients: fx.Node) -> JointGraph:
        """Finish the graph; gradients by parameter name, with '__' for a dot."""
        named = {name.replace("__", "."): node for name, node in gradients.items()}
        self.graph.output((loss, *named.values()))
        outputs = [Output(OutputKind.LOSS, "loss", unwrap(value_of(loss))[1])]
        for name, node in named.items():
            outputs.append(Output(OutputKind.GRADIENT, name, unwrap(value_of(node))[1]))
        without = tuple(
            i.name for i in self._inputs if i.kind is InputKind.PARAMETER and i.name not in named
        )
        signature = Signature(tuple(self._inputs), tuple(outputs), without)
        joint = JointGraph(fx.GraphModule(self.root, self.graph), signature)
        joint.validate()
        return joint
