"""Tiny joint graphs for tests: built by hand, or captured on a fake process group.

`run` runs a graph on real values in one process, collectives simulated by functions of their
input alone, so that two graphs can be compared bit by bit.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import graph_trainer as gt
from graph_trainer.core.analysis.collectives import Collective
from graph_trainer.core.capture.subclasses import unwrap
from graph_trainer.core.graph.annotations import (
    Phase,
    Role,
    annotate_node,
    annotation,
    parameter_of,
    phase_of,
    role_of,
    set_input_name,
)
from graph_trainer.core.graph.joint_graph import (
    Input,
    InputKind,
    JointGraph,
    Output,
    OutputKind,
    Signature,
    compute_nodes,
)
from graph_trainer.core.passes.base import Pass, Stage
from graph_trainer.core.passes.context import PassContext
from graph_trainer.core.torch_private import FakeTensorMode, process_groups
from tests.unit.fake_ranks import become

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

FORWARD, LOSS, BACKWARD = Phase.FORWARD, Phase.LOSS, Phase.BACKWARD
GATHER = c10d.all_gather_into_tensor.default
SCATTER = c10d.reduce_scatter_tensor.default
ALL_REDUCE = c10d.all_reduce.default


class Builder:
    """A joint graph by hand: every call makes a node and runs its op on fake tensors."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()
        self.root = nn.Module()
        self.phase = FORWARD
        self._inputs: list[Input] = []

    def input(
        self, name: str, *shape: int, kind: InputKind = InputKind.BATCH, dtype=torch.float32
    ) -> fx.Node:
        node = self.graph.placeholder(re.sub(r"\W+", "_", name))
        node.meta["val"] = self.mode.from_tensor(torch.empty(shape, dtype=dtype))
        set_input_name(node, name)
        trainable = kind is InputKind.PARAMETER
        self._inputs.append(Input(kind, name, unwrap(node.meta["val"])[1], trainable))
        return node

    def parameter(self, name: str, *shape: int, dtype=torch.float32) -> fx.Node:
        return self.input(name, *shape, kind=InputKind.PARAMETER, dtype=dtype)

    def buffer(self, name: str, *shape: int) -> fx.Node:
        return self.input(name, *shape, kind=InputKind.BUFFER)

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
        node = self.graph.call_function(op, args, kwargs)

        def value(n: fx.Node) -> Any:
            return n.meta["val"]

        with self.mode:
            node.meta["val"] = op(*fx.map_arg(args, value), **fx.map_arg(kwargs, value))
        entry = annotation(phase=phase or self.phase, role=role, parameter=parameter, module=module)
        annotate_node(node, entry)
        return node

    def waited(self, op: Any, *args: Any, **how: Any) -> fx.Node:
        """A collective and its wait."""
        return self.call(c10d.wait_tensor.default, self.call(op, *args, **how), **how)

    def total(self, *values: fx.Node, **how: Any) -> fx.Node:
        """The sum of all elements of these values."""
        sums = [self.call(aten.sum.default, value, **how) for value in values]
        return functools.reduce(lambda a, b: self.call(aten.add.Tensor, a, b, **how), sums)

    def call_higher_order(
        self, op: Any, subgraph: fx.GraphModule, *args: Any, val: fx.Node, name: str = "body"
    ) -> fx.Node:
        """A higher-order op whose result looks like the value of `val`."""
        self.root.add_module(name, subgraph)
        attribute = self.graph.get_attr(name)
        node = self.graph.call_function(op, (attribute, *args))
        node.meta["val"] = (val.meta["val"],)
        annotate_node(node, annotation(phase=FORWARD))
        return node

    def joint(self, loss: fx.Node, **gradients: fx.Node) -> JointGraph:
        """The finished graph; gradients by parameter name, '__' for a dot."""
        named = {name.replace("__", "."): node for name, node in gradients.items()}
        self.graph.output((loss, *named.values()))
        outputs = [Output(OutputKind.LOSS, "loss", unwrap(loss.meta["val"])[1])]
        for name, node in named.items():
            outputs.append(Output(OutputKind.GRADIENT, name, unwrap(node.meta["val"])[1]))
        without = tuple(
            i.name for i in self._inputs if i.kind is InputKind.PARAMETER and i.name not in named
        )
        signature = Signature(tuple(self._inputs), tuple(outputs), without)
        joint = JointGraph(fx.GraphModule(self.root, self.graph), signature)
        joint.validate()
        return joint


class _Simulated(fx.Interpreter):
    """Runs collectives as functions of this rank's input: others send multiples of it."""

    def place(self, group: str) -> int:
        """This rank's place in a group; 0 in one that only a graph by hand names."""
        known = {known.group_name: ranks for known, ranks in process_groups()}
        return known[group].index(dist.get_rank()) if group in known else 0

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = str(target)
        if "c10d" not in name:
            return super().call_function(target, args, kwargs)
        if "wait_tensor" in name:
            return args[0]
        if "all_gather_into_tensor" in name:
            place = self.place(args[2])
            return torch.cat([args[0] * (1 + other - place) for other in range(args[1])])
        if "reduce_scatter_tensor" in name:
            return torch.stack(args[0].chunk(args[2])).sum(0)
        if "all_reduce" in name:
            return args[0].copy_(args[0] * 3) if "all_reduce_" in name else args[0] * 3
        raise NotImplementedError(name)


def values_for(joint: JointGraph, seed: int = 0) -> list[torch.Tensor]:
    """Real values for the placeholders, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def make(fake: torch.Tensor) -> torch.Tensor:
        if fake.dtype.is_floating_point:
            return torch.randn(fake.shape, generator=generator).to(fake.dtype)
        return torch.randint(0, 2, fake.shape, generator=generator).to(fake.dtype)

    return [make(node.meta["val"]) for node in joint.placeholders()]


def run(joint: JointGraph, values: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """What the graph returns and, behind it, what it leaves in its inputs."""
    inputs = [v.clone() for v in (values_for(joint) if values is None else values)]
    torch.manual_seed(0)
    with torch.no_grad():
        outputs = _Simulated(joint.graph_module).run(*inputs)
    return [o.clone() for o in outputs] + inputs


def assert_same(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> None:
    """Bitwise equality of two results of `run`."""
    assert len(before) == len(after)
    for place, (a, b) in enumerate(zip(before, after, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape, place
        assert torch.equal(a, b), f"value {place} differs"


def code(joint: JointGraph) -> str:
    """Text that is equal for equal graphs, tags included."""
    return "\n".join(f"{n.format_node()} {n.meta.get('recompute')}" for n in joint.graph.nodes)


def check_pass(
    graph_pass: Pass,
    joint: JointGraph,
    options: Any = None,
    context: PassContext | None = None,
    *,
    same_numbers: bool = True,
) -> bool:
    """Run one pass twice. Numbers must stay the same, and the second run change nothing.

    Args:
        same_numbers: False for a pass that may change the order of a sum.

    Returns:
        whether the first run changed anything.
    """
    before, text = run(joint), code(joint)
    graph_pass(joint, options, context)
    joint.validate()
    first = code(joint)
    if same_numbers:
        assert_same(before, run(joint))
    graph_pass(joint, options, context)
    assert code(joint) == first, "the second run changed the graph"
    return first != text


def targets(joint: JointGraph) -> list[Any]:
    """The ops of a graph, in order."""
    return [n.target for n in compute_nodes(joint.graph)]


def hungry(numbers: int, *, optional: bool = True) -> Pass:
    """A pass that holds so many float32 from the first node to the last."""

    def function(joint, options, context):
        first = next(n for n in joint.graph.nodes if n.op == "call_function")
        with joint.graph.inserting_before(first):
            big = joint.graph.call_function(aten.ones.default, ([numbers],))
        with joint.graph.inserting_before(joint.output_node()):
            end = joint.graph.call_function(aten.neg.default, (big,))
        for node, phase in ((big, FORWARD), (end, BACKWARD)):
            node.meta["val"] = first.meta["val"].new_empty(numbers, dtype=torch.float32)
            annotate_node(node, annotation(phase=phase))

    return Pass("hungry", Stage.SCHEDULE, "for a test", function, optional=optional)


# --- captured graphs -----------------------------------------------------------------------


def fake_world(size: int = 4, rank: int = 0) -> None:
    """A process group of which only this rank exists. The conftest ends it."""
    become(rank, size)


def fake_mesh(sizes: int | tuple[int, ...] = 4, rank: int = 0) -> DeviceMesh:
    sizes = (sizes,) if isinstance(sizes, int) else sizes
    become(rank, math.prod(sizes))
    return init_device_mesh("cpu", sizes)


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """An embedding, repeated blocks, a norm and a head: the shape of every decoder."""

    def __init__(
        self, layers: int = 2, dim: int = 8, hidden: int = 16, *, tied=False, checkpointed=False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, dim)
        self.layers = nn.ModuleDict({str(i): Block(dim, hidden) for i in range(layers)})
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, 12, bias=False)
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers.values():
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(self.norm(x))


def mean_square(model: nn.Module, *args: torch.Tensor) -> torch.Tensor:
    return model(*args).square().mean()


def captured(
    model: nn.Module,
    *args: torch.Tensor,
    world: int | tuple[int, ...] = 4,
    rank: int = 0,
    loss_fn: Callable[..., torch.Tensor] = mean_square,
    **fsdp: Any,
) -> JointGraph:
    """A model captured as FSDP shards it over a fake world, which may be a mesh."""
    gt.simple_fsdp(model, fake_mesh(world, rank), **fsdp)
    return gt.capture(model, loss_fn, args)


def captured_decoder(
    *, world: int | tuple[int, ...] = 4, rank: int = 0, fsdp: Any = None, **model: Any
):
    torch.manual_seed(0)
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    return captured(Decoder(**model), tokens, world=world, rank=rank, **(fsdp or {}))


def unshards(joint: JointGraph, phase: Phase | None = None) -> list[str]:
    """The parameters gathered, in order, in one phase or all."""
    return [
        str(parameter_of(n))
        for n in joint.graph.nodes
        if n.target is c10d.all_gather_into_tensor.default
        and role_of(n) is Role.UNSHARD
        and (phase is None or phase_of(n) is phase)
    ]


def collective(
    kind: str = "all_gather_into_tensor",
    ranks: tuple[int, ...] = (0, 1),
    dtype: torch.dtype = torch.float32,
    numel: int = 8,
    reduction: str | None = None,
    role: Role | None = None,
) -> Collective:
    """One entry of a simulated rank's sequence."""
    node = fx.Graph().placeholder("n")
    size = numel * dtype.itemsize
    return Collective(
        node,
        kind,
        ranks,
        ((str(dtype), numel),),
        size,
        size,
        reduction,
        role,
        FORWARD,
        "layers.0",
        None,
    )
