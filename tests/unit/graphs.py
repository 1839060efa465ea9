"""Tiny graphs for our own tests, beside what graph_trainer.testing has for everyone's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.llama_stack import LlamaStack, Size
from graph_trainer.core.analysis.collectives import Collective
from graph_trainer.core.graph.annotations import (
    Phase,
    Role,
    annotate_node,
    annotation,
    parameter_of,
    phase_of,
    role_of,
)
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.passes.base import Pass, Stage
from graph_trainer.core.sharding.simple_fsdp import simple_fsdp
from graph_trainer.testing import become, captured, fake_mesh

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

FORWARD, LOSS, BACKWARD = Phase.FORWARD, Phase.LOSS, Phase.BACKWARD
GATHER = c10d.all_gather_into_tensor.default
SCATTER = c10d.reduce_scatter_tensor.default
ALL_REDUCE = c10d.all_reduce.default


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


_captured: dict[str, JointGraph] = {}


def captured_once(
    make: Callable[[], nn.Module],
    what: object,
    *args: torch.Tensor,
    world: int | tuple[int, ...] = 4,
    rank: int = 0,
    **fsdp: Any,
) -> JointGraph:
    """Capture what `make` makes, with seed 0, the first time that a test asks for it.

    Args:
        make: makes the model.
        what: with the shapes of `args` and all that follows, tells one captured step from another.

    Returns:
        a copy for this test alone, on a mesh and groups that are made anew.
    """
    shapes = [(tuple(arg.shape), arg.dtype) for arg in args]
    key = repr((what, shapes, world, rank, sorted(fsdp.items())))
    torch.manual_seed(0)
    if key not in _captured:
        _captured[key] = captured(make(), *args, world=world, rank=rank, **fsdp)
    elif isinstance(world, int):
        fake_mesh(world, rank)
    else:  # FSDP makes groups as well
        simple_fsdp(make(), fake_mesh(world, rank), **fsdp)
    torch.manual_seed(0)
    return copy_graph(_captured[key])


def captured_decoder(
    *, world: int | tuple[int, ...] = 4, rank: int = 0, fsdp: Any = None, **model: Any
) -> JointGraph:
    """Capture a decoder as a rank of fake ones."""
    what, tokens = sorted(model.items()), torch.zeros(2, 3, dtype=torch.int64)
    return captured_once(
        lambda: Decoder(**model), what, tokens, world=world, rank=rank, **(fsdp or {})
    )


def captured_stack(size: Size, *shape: int, **how: Any) -> JointGraph:
    """Capture the benchmarks' stack on tokens of this shape, as `captured_once` does."""
    tokens = torch.zeros(*shape, dtype=torch.int64)
    return captured_once(lambda: LlamaStack(size), size, tokens, **how)


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
