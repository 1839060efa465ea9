"""Trains the debug model with every way to merge and schedule collectives, on this launch's ranks.

The step is captured once a mesh; each variant is a copy of that graph with its own passes. Every
variant sees the same weights and batch as the plain graph, and then takes a training step itself.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

import graph_trainer as gt
from graph_trainer.analysis.collectives import collectives
from graph_trainer.analysis.hardware import load_hardware
from graph_trainer.analysis.ops import is_collective
from graph_trainer.captured_step import loss_of_batch, passes_of
from graph_trainer.graph_copy import copy_graph
from graph_trainer.joint_graph import JointGraph, Role, is_backward, role_of
from graph_trainer.order_check import LargestOfAllRanks, check_order_across_ranks
from graph_trainer.passes.bucket_collectives import BucketCollectivesOptions
from tests.integration.communication import MESHES, VARIANTS, Variant
from tests.integration.issued import count_issued, expected_events
from tests.integration.launch import finish
from tests.integration.matrix import Flags
from tests.integration.recorded import Recorded

Step = Any
Result = dict[str, Any]


class Mesh:
    """One trainer, its captured step, and the batch that all variants are compared on."""

    def __init__(self, flags: Flags, folder: Path) -> None:
        self.recorded = Recorded(flags, folder)
        trainer = self.trainer = self.recorded.trainer
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.joint: JointGraph | None = None
        self.passes = passes_of(trainer.config, trainer.parallel_dims, "cpu")

    def graph(self, model: Any, *args: Any, **kwargs: Any) -> JointGraph:
        """The step as it is captured, once."""
        if self.joint is None:
            loss_fn = loss_of_batch(self.trainer.loss_fn)
            self.joint = gt.capture(model, loss_fn, args, kwargs)
        return copy_graph(self.joint)

    def step_with(self, variant: Variant, policy: str, joint: JointGraph) -> Step:
        """A graph with the passes of a variant, checked across the ranks, as a step."""
        config = dataclasses.replace(
            self.passes,
            passes=("default", *variant.passes),
            reshard_after_forward=policy,
            hardware=load_hardware("cpu"),
            options={"bucket_collectives": BucketCollectivesOptions(**variant.bucketing)},
        )
        gt.run_passes(joint, config, agree=LargestOfAllRanks())
        check_order_across_ranks(joint)
        return gt.compile(joint)

    def close(self) -> None:
        self.recorded.close()


def run_mesh(flags: Flags, policies: tuple[str, ...], folder: Path) -> Result:
    """Every policy and variant on one mesh."""
    mesh = Mesh(flags, folder)
    result: Result = {}
    for policy in policies:
        for name, variant in VARIANTS.items():
            result[f"{policy} {name}"] = run_variant(mesh, variant, policy)
    mesh.close()
    return result


def run_variant(mesh: Mesh, variant: Variant, policy: str) -> Result:
    """One training step, compared with the plain graph's on the same weights and batch."""
    found: Result = {}

    def step(model: Any, *args: Any, **kwargs: Any) -> Any:
        plain = mesh.graph(model, *args, **kwargs)
        exact_loss, exact = mesh.step_with(VARIANTS["none"], policy, plain)(model, *args, **kwargs)
        joint = mesh.graph(model, *args, **kwargs)
        compiled = mesh.step_with(variant, policy, joint)
        (loss, gradients), issued = count_issued(compiled, model, *args, **kwargs)
        bounds = summation_bounds(plain, compiled, model, args, kwargs)
        found.update(
            losses=[loss.item(), exact_loss.item()],
            gradients=len(gradients),
            unlike=sorted(n for n in exact if not same(gradients[n], exact[n])),
            beyond=[n for n in exact if not within(gradients[n], exact[n], bounds[n])],
            least_bound=min(b.max().item() for b in bounds.values() if b.numel()),
            issued=issued,
            expected=expected_events(Counter(c.kind for c in collectives(joint))),
            collectives=counts(joint),
            plain=counts(plain),
        )
        return loss, gradients

    mesh.trainer.take_step_with(step)
    mesh.recorded.step()
    found["finite"] = all(
        torch.isfinite(g).all().item() for g in mesh.recorded.gradients[-1].values()
    )
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.to_local(), b.to_local())


def within(a: torch.Tensor, b: torch.Tensor, bound: torch.Tensor) -> bool:
    difference = (a.to_local().double() - b.to_local().double()).abs()
    return bool((difference <= bound).all())


def counts(joint: JointGraph) -> list[int]:
    """Parameter gathers forward and backward, and gradient reductions."""
    found = Counter((role_of(n), is_backward(n)) for n in joint.graph.nodes if is_collective(n))
    keys = ((Role.UNSHARD, False), (Role.UNSHARD, True), (Role.REDUCE_GRAD, True))
    return [found[key] for key in keys]


def summation_bounds(
    plain: JointGraph, compiled: Step, model: Any, args: Any, kwargs: Any
) -> dict[str, torch.Tensor]:
    """How far two orders of summation can be apart, element by element of each gradient.

    n numbers x added up in float32, in whatever order, are off by at most (n - 1) u sum |x| to
    first order, u = 2**-24 (Higham, Accuracy and Stability of Numerical Algorithms, 4.2); and so
    two orders are at most twice that apart, n being at most the number of ranks. The sums of |x|
    are reduced beside the gradients.
    """
    magnitudes = Magnitudes(plain)
    values = compiled._state_values(model) + compiled._batch_values(args, kwargs)
    with torch.no_grad():
        magnitudes.run(*values)
    ranks, unit = dist.get_world_size(), 2.0**-24
    return {
        name: 2 * (ranks - 1) * unit * magnitudes.magnitude[node].double()
        for name, node in plain.gradients()
    }


class Magnitudes(fx.Interpreter):
    """Runs a graph and beside each reduction of gradients one of their magnitudes."""

    def __init__(self, joint: JointGraph) -> None:
        super().__init__(joint.graph_module, garbage_collect_values=False)
        self.magnitude: dict[fx.Node, torch.Tensor] = {}

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        if node.op != "call_function":
            return result
        reduces = role_of(node) is Role.REDUCE_GRAD and is_collective(node)
        if reduces or any(n in self.magnitude for n in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._magnitude_of)
            self.magnitude[node] = node.target(*args, **kwargs)
        return result

    def _magnitude_of(self, node: fx.Node) -> Any:
        if node in self.magnitude:
            return self.magnitude[node]
        value = self.env[node]
        return value.abs() if isinstance(value, torch.Tensor) else value


def main() -> None:
    """Arguments: the scratch folder, then the names of the meshes."""
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    finish({name: run_mesh(*MESHES[name], folder) for name in names})


if __name__ == "__main__":
    main()
