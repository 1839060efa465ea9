"""Runs the public API's cases on real ranks, for test_public_api.py.

Every case trains one sharded model eagerly and then captured, and reports what differs and
what was communicated.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import graph_trainer as gt
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.graph.annotations import Role, is_backward
from graph_trainer.core.graph.ops import is_collective, is_random, is_wait
from graph_trainer.core.runtime.backends.regional.regional import compile_graph
from graph_trainer.core.sharding.initialize import SameOnAnyMesh
from graph_trainer.core.sharding.simple_fsdp import shard_of
from tests.integration.issued import count_issued, expected_events
from tests.integration.public_api_cases import CASES, DEVICE, Batch, Case, fully_sharded
from tests.unit.core.runtime.backends.regional_graphs import as_it_stands

STEPS = 3
LEARNING_RATE = 0.1


def initialised_as_on_one_rank() -> dict[str, Any]:
    """Values that are drawn again until all are within bounds, on every rank alike."""
    different = []
    for mode, shape in (("fully_shard", (4,)), ("hybrid_shard", (2, 2))):
        mesh = init_device_mesh(DEVICE, shape)
        for seed in range(4):
            plain = nn.Linear(5, 7)
            model = gt.simple_fsdp(nn.Linear(5, 7), mesh, mode)
            for target in (plain, model):
                torch.manual_seed(seed)
                with gt.sharded_parameters(), SameOnAnyMesh():
                    nn.init.trunc_normal_(target.weight, a=-1.5, b=1.5)
                    nn.init.normal_(target.bias)
            for name, parameter in model.named_parameters():
                mine = shard_of(plain.get_parameter(name).detach(), parameter)
                if not torch.equal(parameter.to_local(), mine):
                    different.append(f"{mode} {name} with seed {seed}")
    return {"different": different}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass
class Run:
    """A model trained for a few steps, and what each step gave on this rank."""

    model: nn.Module
    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    buffers: list[dict[str, torch.Tensor]] = field(default_factory=list)
    random: list[torch.Tensor] = field(default_factory=list)

    def record(self, loss: torch.Tensor, gradients: dict[str, torch.Tensor]) -> None:
        self.losses.append(loss.detach().clone())
        self.gradients.append({n: local(g).clone() for n, g in gradients.items()})
        self.buffers.append({n: b.clone() for n, b in self.model.named_buffers()})
        self.random.append(torch.get_rng_state())
        parameters = dict(self.model.named_parameters())
        for name, gradient in gradients.items():
            local(parameters[name].detach()).sub_(LEARNING_RATE * local(gradient))


def batches(case: Case, rank: int | None = None) -> Iterator[Batch]:
    """The batches of one data-parallel rank, this process's own by default."""
    if rank is None:
        rank = dist.get_rank() // (dist.get_world_size() // batch_ranks(case))
    generator = torch.Generator().manual_seed(100 + rank)
    made = (case.batch(generator) for _ in range(STEPS))
    return (tuple(value.to(DEVICE) for value in batch) for batch in made)


def batch_ranks(case: Case) -> int:
    return case.batch_ranks or dist.get_world_size()


def sharded(case: Case) -> nn.Module:
    torch.manual_seed(7)
    return (case.shard or fully_sharded)(case.build().to(DEVICE))


def seed_step(step: int) -> None:
    torch.manual_seed(1000 + 10 * step + dist.get_rank())


def train_eagerly(case: Case) -> Run:
    run = Run(sharded(case))
    for step, batch in enumerate(batches(case)):
        seed_step(step)
        loss = case.loss(run.model, *batch)
        loss.backward()
        gradients = {n: p.grad for n, p in run.model.named_parameters() if p.grad is not None}
        run.model.zero_grad(set_to_none=True)
        run.record(loss, gradients)
    return run


def prepared(case: Case, policy: str, model: nn.Module) -> gt.JointGraph:
    joint = gt.capture(model, case.loss, next(batches(case)))
    config = gt.PassConfig(reshard_after_forward=policy, activation_policy=case.activation)
    gt.run_passes(joint, config)
    return joint


def train_captured(case: Case, policy: str) -> tuple[Run, gt.Step]:
    run = Run(sharded(case))
    joint = prepared(case, policy, run.model)
    compiled = gt.compile(joint)
    if case.in_regions:
        compiled = gt.Step(joint, compile_graph(joint, as_it_stands))
    for step, batch in enumerate(batches(case)):
        seed_step(step)
        loss, gradients = compiled(run.model, *batch)
        assert not loss.requires_grad
        run.record(loss, gradients)
    return run, compiled


def train_partitioned(case: Case, policy: str) -> Run:
    """By a loop of the caller's own: `loss.backward()`, of half the loss twice."""
    run = Run(sharded(case))
    module = gt.partition(prepared(case, policy, run.model))
    for step, batch in enumerate(batches(case)):
        seed_step(step)
        loss = module(*batch)
        for _ in range(2):
            (loss / 2).backward(retain_graph=True)
        gradients = {n: p.grad for n, p in run.model.named_parameters() if p.grad is not None}
        run.model.zero_grad(set_to_none=True)
        run.record(loss, gradients)
    return run


def differences(a: Run, b: Run) -> list[str]:
    """Where two runs are not the same bits."""
    found = []
    for step in range(len(a.losses)):
        if not torch.equal(a.losses[step], b.losses[step]):
            found.append(f"loss of step {step}: {a.losses[step]} != {b.losses[step]}")
        if not torch.equal(a.random[step], b.random[step]):
            found.append(f"random state after step {step}")
        for kind in ("gradients", "buffers"):
            one, two = getattr(a, kind)[step], getattr(b, kind)[step]
            if one.keys() != two.keys():
                found.append(f"{kind} of step {step}: {set(one) ^ set(two)}")
            found += [
                f"{kind} '{n}' of step {step}"
                for n in one.keys() & two.keys()
                if one[n].dtype != two[n].dtype or not torch.equal(one[n], two[n])
            ]
    return found


def one_rank_error(case: Case, run: Run) -> dict[str, float]:
    """The first step against the unsharded model on the global batch, relative errors."""
    torch.manual_seed(7)
    model = case.build().to(DEVICE)
    every_rank = [next(batches(case, r)) for r in range(batch_ranks(case))]
    loss = case.loss(model, *[torch.cat(parts) for parts in zip(*every_rank, strict=True)])
    loss.backward()
    mean = run.losses[0].clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    worst = 0.0
    parameters = dict(run.model.named_parameters())
    for name, parameter in model.named_parameters():
        sharded_gradient = DTensor.from_local(
            run.gradients[0][name],
            parameters[name].device_mesh,
            parameters[name].placements,
            run_check=False,
            shape=parameters[name].shape,
            stride=parameters[name].stride(),
        )
        error = (sharded_gradient.full_tensor() - parameter.grad).norm() / parameter.grad.norm()
        worst = max(worst, float(error))
    return {"loss": float((mean - loss.detach()).abs() / loss.detach()), "gradient": worst}


def gathered_in_forward(step: gt.Step) -> list[str]:
    found = collectives(step.joint)
    return [str(c.parameter) for c in found if c.role is Role.UNSHARD and not is_backward(c.node)]


def run_case(case: Case) -> dict[str, Any]:
    eager = train_eagerly(case)
    result: dict[str, Any] = {"policies": {}}
    result["rows"] = {n: local(p).shape[0] for n, p in eager.model.named_parameters() if p.ndim}
    if case.global_batch:
        result["one_rank_error"] = one_rank_error(case, eager)
    for policy in case.policies:
        run, step = train_captured(case, policy)
        _, issued = count_issued(step, run.model, *next(batches(case)))
        listed = collectives(step.joint)
        entry = {
            "differences": differences(eager, run)[:8],
            "partitioned": differences(eager, train_partitioned(case, policy))[:8],
            "gradients": len(run.gradients[0]),
            "without_gradient": list(step.joint.signature.parameters_without_grad),
            "issued": issued,
            "expected": expected_events(Counter(c.kind for c in listed)),
            "draws": sum(is_random(node) for node in step.joint.graph.nodes),
            "gathered": gathered_in_forward(step),
        }
        result["policies"][policy] = entry
    return result


def reduced_in_reduce_dtype() -> dict[str, Any]:
    """A norm that tensor parallelism replicates, with part of the rows on each rank: its gradient,
    eager and captured, beside the float32 sum over all ranks of what each computes in bfloat16."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    norm, alone = nn.RMSNorm(64), nn.RMSNorm(64).to(DEVICE, torch.bfloat16)
    weight = torch.ones(64, device=DEVICE)
    norm.weight = nn.Parameter(distribute_tensor(weight, mesh["tp"], [Replicate()]))
    dtypes = gt.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = gt.simple_fsdp(norm, mesh["dp"], mp_policy=dtypes, gradient_divide_factor=1.0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(16, 64, generator=generator).to(DEVICE, torch.bfloat16)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        rows = DTensor.from_local(x, mesh["tp"], [Shard(0)], run_check=False)
        return model(rows).to_local().float().square().sum()

    loss_fn(model, x).backward()
    eager = dict(model.named_parameters())["weight"].grad
    _, captured = gt.compile(gt.capture(model, loss_fn, (x,)))(model, x)
    alone(x).float().square().sum().backward()
    expected = alone.weight.grad.float()
    dist.all_reduce(expected)
    return {
        "differs": not torch.equal(local(eager), local(captured["weight"])),
        "error": float((eager.full_tensor() - expected).abs().max() / expected.abs().max()),
    }


def refused_where_a_branch_depends_on_the_rank() -> dict[str, Any]:
    """Rank 1 leaves a layer out: its step gathers less than that of the other ranks."""
    model = fully_sharded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(DEVICE))

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model[0](x) if dist.get_rank() == 1 else model(x)).square().mean()

    x = torch.ones(2, 4, device=DEVICE)
    step = gt.compile(gt.capture(model, loss_fn, (x,)))
    try:
        step(model, x)
    except gt.VerificationError as error:
        return {"error": str(error)}
    return {"error": ""}


def compiled_by_inductor() -> dict[str, Any]:
    """The Llama behind gt.backend("inductor"): its loss, and the order of what each half issues in
    the first partition and in Inductor's programs."""
    case, found = CASES["llama"], {}
    eager = train_eagerly(case)
    for policy in ("none", "full"):
        run = Run(sharded(case))
        joint = gt.capture(run.model, case.loss, next(batches(case)))
        config = gt.PassConfig(reshard_after_forward="always", activation_policy=policy)
        gt.run_passes(joint, config)
        step = gt.partition(joint)
        # a rank that finds a program in the cache writes none
        compiler = gt.backend("inductor", settings={"fx_graph_cache": False})
        compiled = torch.compile(step, backend=compiler, fullgraph=True)

        def train(run: Run = run, compiled: Any = compiled) -> None:
            for batch in batches(case):
                loss = compiled(*batch)
                loss.backward()
                named = run.model.named_parameters()
                gradients = {n: p.grad for n, p in named if p.grad is not None}
                run.model.zero_grad(set_to_none=True)
                run.record(loss, gradients)

        _, codes = run_and_get_code(train)
        calls = r"_c10d_functional\.(\w+?)_?\.default\("
        found[policy] = {
            "errors": [
                float((a - b).abs() / b.abs())
                for a, b in zip(run.losses, eager.losses, strict=True)
            ],
            "halves": [
                [n.target.__name__.split(".")[0] for n in half.graph.nodes if communicates(n)]
                for half in (step.halves.forward, step.halves.backward)
            ],
            "codes": [re.findall(calls, code) for code in codes],
        }
    return found


def communicates(node: fx.Node) -> bool:
    return is_collective(node) or is_wait(node)


ALONE = {
    "compiled_by_inductor": compiled_by_inductor,
    "initialised": initialised_as_on_one_rank,
    "reduce_dtype": reduced_in_reduce_dtype,
    "rank_dependent": refused_where_a_branch_depends_on_the_rank,
}
"""What is not a case: a function for each name."""


def run(folder: Path, name: str) -> dict[str, Any]:
    """One case, or what else has that name."""
    return ALONE[name]() if name in ALONE else run_case(CASES[name])
