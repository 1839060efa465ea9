"""The debug model with every way to merge and schedule collectives, for
test_communication_passes.py.

The step is captured once a mesh; each variant is a copy of that graph with its own passes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import graph_trainer as gt
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.graph.annotations import (
    Role,
    is_backward,
    role_of,
)
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import is_collective
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.ordering.exchange import check_order_across_ranks
from graph_trainer.core.passes.bucketing.bucket_collectives import BucketCollectivesOptions
from graph_trainer.core.runtime.step import Step
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.titan.step_inputs import loss_of_batch, passes_of
from tests.integration.issued import count_issued, expected_events
from tests.integration.matrix import (
    DDP4,
    FP32,
    FSDP2_TP2,
    FSDP4,
    HSDP2X2,
    Flags,
    rows,
    shard,
)
from tests.integration.recorded import Recorded

Result = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """Options of bucket_collectives, and what else the default list is run with."""

    bucketing: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)


UNSCHEDULED = {"disable_passes": ("schedule_overlap",)}
VARIANTS = {
    "none": Variant({"strategy": "none"}, UNSCHEDULED),
    "size": Variant({"strategy": "size", "cap_mib": 1.0}, UNSCHEDULED),
    "transformer_block": Variant({}, UNSCHEDULED),
    "auto": Variant({"strategy": "auto"}, UNSCHEDULED),
    "default": Variant(),
    "bitwise": Variant({}, {"bitwise": True}),
}

MESHES: dict[str, tuple[Flags, str]] = {
    "fsdp3": (shard(3) | rows(2) | FP32, "always"),
    "fsdp4": (FSDP4 | FP32, "always"),
    "fsdp2_tp2": (FSDP2_TP2 | FP32, "always"),
    "hsdp2x2": (HSDP2X2 | FP32, "always"),
    "ddp4": (DDP4 | FP32, "never"),
}
"""Flags, and the policy that reshards after forward."""
# What each strategy does is seen on one mesh; each is run on another one as well.
FEWER = {
    "fsdp3": ("none", "size", "default"),
    "fsdp2_tp2": ("none", "auto", "default"),
    "hsdp2x2": ("none", "default"),
    "ddp4": ("none", "transformer_block", "bitwise"),
}
RUNS = [(mesh, name) for mesh in MESHES for name in FEWER.get(mesh, tuple(VARIANTS))]
"""Every mesh with the variants that run on it."""
RANKS = {
    "fsdp3": 3,
    "fsdp4": 4,
    "ddp4": 4,
    "fsdp2_tp2": 4,
    "hsdp2x2": 4,
}


def run(folder: Path, mesh: str) -> Result:
    """Every variant on one mesh: first on the same weights and batch, in which nothing
    but the variant differs, then a training step with each."""
    flags, policy = MESHES[mesh]
    recorded = Recorded(flags, folder)
    trainer = recorded.trainer
    config = passes_of(trainer.config, trainer.parallel_dims)
    result: Result = {}
    steps: list[Step] = []

    def compare(model: Any, *args: Any, **kwargs: Any) -> Any:
        captured = gt.capture(model, loss_of_batch(trainer.loss_fn), args, kwargs)
        plain = with_passes(captured, config, VARIANTS["none"], policy)
        exact = plain(model, *args, **kwargs)
        for name in (name for known, name in RUNS if known == mesh):
            variant = VARIANTS[name]
            step = plain if name == "none" else with_passes(captured, config, variant, policy)
            found, issued = count_issued(step, model, *args, **kwargs)
            entry = differences(found, exact)
            kinds = Counter(c.kind for c in collectives(step.joint))
            entry |= {"issued": issued, "expected": expected_events(kinds)}
            entry |= {"merged": counts(step.joint), "plain": counts(plain.joint)}
            result[name] = entry
            steps.append(step)
        return exact

    trainer.captured_step = compare
    recorded.step()
    for step, entry in zip(steps, result.values(), strict=True):
        trainer.captured_step = step
        recorded.step()
        entry["trained"] = recorded.losses[-1].item()
    recorded.close()
    return result


def with_passes(captured: JointGraph, config: gt.PassConfig, variant: Variant, policy: str) -> Step:
    """A copy of a graph with the passes of a variant, checked across the ranks, as a step."""
    joint = copy_graph(captured)
    asked = dataclasses.replace(
        config,
        reshard_after_forward=policy,
        hardware=load_hardware("cpu"),
        options={"bucket_collectives": BucketCollectivesOptions(**variant.bucketing)},
        **variant.more,
    )
    gt.run_passes(joint, asked)
    check_order_across_ranks(joint)
    return gt.compile(joint, compare_ranks=False)


def differences(found: Any, exact: Any) -> Result:
    """A variant's loss and gradients beside the plain graph's."""
    (loss, gradients), (exact_loss, exact_gradients) = found, exact
    assert gradients.keys() == exact_gradients.keys()
    return {
        "losses": [loss.item(), exact_loss.item()],
        "gradients": len(gradients),
        "unlike": [n for n, g in exact_gradients.items() if not same(gradients[n], g)],
    }


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.to_local(), b.to_local())


def counts(joint: JointGraph) -> list[int]:
    """Parameter gathers forward and backward, and gradient reductions."""
    found = Counter((role_of(n), is_backward(n)) for n in joint.graph.nodes if is_collective(n))
    keys = ((Role.UNSHARD, False), (Role.UNSHARD, True), (Role.REDUCE_GRAD, True))
    return [found[key] for key in keys]
