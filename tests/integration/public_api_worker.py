"""Cases of the public API on real gloo ranks; test_public_api.py launches this and asserts.

Every case trains one sharded model eagerly and then captured, and reports what differs and
what was communicated. The launch says how many ranks there are; a case that needs another
number is not in its list.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import graph_trainer as gt
from graph_trainer.analysis.collectives import collectives
from graph_trainer.initialize import SameOnAnyMesh
from graph_trainer.joint_graph import Role, is_backward
from graph_trainer.simple_fsdp import shard_of
from tests.integration.launch import finish

STEPS = 3
LEARNING_RATE = 0.1
POLICIES = ("always", "never", "default")

Batch = tuple[torch.Tensor, ...]


@dataclass(kw_only=True)
class Case:
    """One model, how it is sharded and what it is fed."""

    build: Callable[[], nn.Module]
    loss: Callable[..., torch.Tensor]
    batch: Callable[[torch.Generator], Batch]
    shard: Callable[[nn.Module], nn.Module] | None = None
    """Default: fully_shard over all ranks."""
    policies: tuple[str, ...] = POLICIES
    backend: str = "eager"
    global_batch: bool = False
    """Whether to compare with one rank on the global batch too."""
    batch_ranks: int | None = None
    """How many different batches there are; ranks that share tensors share a batch too."""


def fully_sharded(model: nn.Module, **options: Any) -> nn.Module:
    return gt.simple_fsdp(model, init_device_mesh("cpu", (dist.get_world_size(),)), **options)


# --- models ----------------------------------------------------------------------------------


def tokens(vocabulary: int, length: int = 7) -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        return (torch.randint(vocabulary, (2, length), generator=generator),)

    return make


def language_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def masked_tokens(vocabulary: int) -> Callable[[torch.Generator], Batch]:
    """With the causal mask written out. Without one transformers looks into the positions of
    real tensors and drops its mask, and keeps it where tensors are fake: another kernel."""

    def make(generator: torch.Generator) -> Batch:
        (ids,) = tokens(vocabulary)(generator)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        return ids, mask.expand(ids.shape[0], 1, -1, -1)

    return make


def masked_language_loss(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids, attention_mask=mask, use_cache=False).loss


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    # sizes that three ranks do not divide
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def gpt2(dropout: float) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=50,
            n_positions=16,
            n_embd=32,
            n_layer=2,
            n_head=4,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            resid_pdrop=dropout,
        )
        model = GPT2LMHeadModel(config)
        assert model.lm_head.weight is model.transformer.wte.weight
        return model.train()

    return build


class Cnn(nn.Module):
    """Convolutions with batch norm, whose running statistics forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 10, 3), nn.BatchNorm2d(10), nn.ReLU(), nn.Conv2d(10, 4, 3)
        )
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)).mean((2, 3)))


def images(generator: torch.Generator) -> Batch:
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(5, (4,), generator=generator)


def classification(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


class Odd(nn.Module):
    """Every awkward parameter at once: rows that do not divide, fewer rows than ranks, one
    row, a scalar, tied, frozen, unused; and a buffer that forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 10)
        self.second = nn.Linear(10, 3)
        self.third = nn.Linear(3, 1)
        self.tied = nn.Linear(4, 10)
        self.tied.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(10), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5, 2))
        self.register_buffer("average", torch.zeros(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x)) + self.tied(x) * self.frozen
        self.average = 0.9 * self.average + 0.1 * hidden.detach().mean(0)
        return self.third(torch.tanh(self.second(hidden - self.average))) * self.scale


def vectors(generator: torch.Generator) -> Batch:
    return torch.randn(6, 4, generator=generator), torch.randn(6, 1, generator=generator)


def squares(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


class Block(nn.Module):
    def __init__(self, width: int, dropout: float, recompute: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        self.dropout = nn.Dropout(dropout)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute:
            return checkpoint(self._compute, x, use_reentrant=False)
        return self._compute(x)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class Blocks(nn.Module):
    def __init__(self, dropout: float = 0.0, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(4, dropout, recompute) for _ in range(3)])
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tensor_parallel(model: nn.Module) -> nn.Module:
    """2 x 2: tensor parallelism over sizes it does not divide, then FSDP."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {}
    for i in range(3):
        # from a plain tensor torch would infer twice this rank's part, not 9
        plan[f"layers.{i}.up"] = ColwiseParallel(use_local_output=False)
        plan[f"layers.{i}.down"] = RowwiseParallel()
    parallelize_module(model, mesh["tp"], plan)
    return gt.simple_fsdp(model, mesh["dp"])


def hybrid(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return gt.simple_fsdp(model, mesh, "hybrid_shard")


def mixed_precision(model: nn.Module) -> nn.Module:
    policy = gt.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_sharded(model, mp_policy=policy)


def bf16_squares(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x.bfloat16()).float(), y)


ANY_WORLD = {
    "llama": Case(
        build=llama, loss=masked_language_loss, batch=masked_tokens(50), global_batch=True
    ),
    "gpt2_tied": Case(build=gpt2(0.0), loss=language_loss, batch=tokens(50), global_batch=True),
    "gpt2_dropout": Case(
        build=gpt2(0.3), loss=language_loss, batch=tokens(50), policies=("always",)
    ),
    "cnn": Case(build=Cnn, loss=classification, batch=images),
    "odd": Case(build=Odd, loss=squares, batch=vectors),
    "replicate": Case(
        build=Blocks,
        loss=squares,
        batch=vectors,
        shard=lambda m: fully_sharded(m, mode="replicate"),
        policies=("always",),
        global_batch=True,
    ),
    "mixed_precision": Case(build=Blocks, loss=bf16_squares, batch=vectors, shard=mixed_precision),
    "checkpointed": Case(
        build=lambda: Blocks(recompute=True), loss=squares, batch=vectors, global_batch=True
    ),
    "checkpointed_dropout": Case(
        build=lambda: Blocks(dropout=0.4, recompute=True), loss=squares, batch=vectors
    ),
    "inductor": Case(
        build=Blocks, loss=squares, batch=vectors, policies=("always",), backend="inductor"
    ),
}
FOUR_RANKS = {
    "hybrid": Case(
        build=Blocks,
        loss=squares,
        batch=vectors,
        shard=hybrid,
        policies=("always", "never"),
        global_batch=True,
    ),
    "tensor_parallel": Case(
        build=Blocks,
        loss=squares,
        batch=vectors,
        shard=tensor_parallel,
        global_batch=True,
        batch_ranks=2,
    ),
    "odd_four": Case(build=Odd, loss=squares, batch=vectors, policies=("always",)),
    "hybrid_odd": Case(build=Odd, loss=squares, batch=vectors, shard=hybrid, policies=("always",)),
}
LAUNCHES = {
    "three": [*(n for n in ANY_WORLD if n != "inductor"), "initialised"],
    "four": [*FOUR_RANKS, "initialised"],
    "inductor": ["inductor"],
}


def initialised_as_on_one_rank() -> dict[str, Any]:
    """Values that are drawn again until all are within bounds, on every rank alike."""
    world = dist.get_world_size()
    meshes = {"fully_shard": init_device_mesh("cpu", (world,))}
    if world == 4:
        meshes["hybrid_shard"] = init_device_mesh("cpu", (2, 2))
    different = []
    for mode, mesh in meshes.items():
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


# --- running a case --------------------------------------------------------------------------


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
    return (case.batch(generator) for _ in range(STEPS))


def batch_ranks(case: Case) -> int:
    return case.batch_ranks or dist.get_world_size()


def sharded(case: Case) -> nn.Module:
    torch.manual_seed(7)
    return (case.shard or fully_sharded)(case.build())


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


def train_captured(case: Case, policy: str) -> tuple[Run, gt.Step]:
    run = Run(sharded(case))
    first = next(batches(case))
    joint = gt.capture(run.model, case.loss, first)
    gt.run_passes(joint, gt.PassConfig(reshard_after_forward=policy))
    compiled = gt.compile(joint, backend=case.backend)
    for step, batch in enumerate(batches(case)):
        seed_step(step)
        loss, gradients = compiled(run.model, *batch)
        assert not loss.requires_grad
        run.record(loss, gradients)
    return run, compiled


def differences(a: Run, b: Run) -> list[str]:
    """Where two runs are not the same bits."""
    found = []
    for step in range(STEPS):
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


def largest_relative_error(a: Run, b: Run) -> float:
    worst = 0.0
    for one, two in zip(a.gradients, b.gradients, strict=True):
        for name in one:
            if one[name].numel():
                scale = max(float(two[name].abs().max()), 1e-6)
                worst = max(worst, float((one[name] - two[name]).abs().max()) / scale)
    for one, two in zip(a.losses, b.losses, strict=True):
        worst = max(worst, float((one - two).abs() / two.abs()))
    return worst


def one_rank_error(case: Case, run: Run) -> dict[str, float]:
    """The first step against the unsharded model on the global batch, relative errors."""
    torch.manual_seed(7)
    model = case.build()
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


def count_issued(step: gt.Step, model: nn.Module, batch: Batch) -> dict[str, int]:
    """The collectives that gloo itself starts during one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(model, *batch)
    return dict(Counter(e.name for e in profile.events() if e.name.startswith("gloo:")))


def gathers(step: gt.Step, *, backward: bool) -> list[str]:
    return sorted(
        str(c.parameter)
        for c in collectives(step.joint)
        if c.role is Role.UNSHARD and is_backward(c.node) is backward
    )


def run_case(case: Case) -> dict[str, Any]:
    eager = train_eagerly(case)
    result: dict[str, Any] = {"policies": {}, "losses": [float(x) for x in eager.losses]}
    if case.global_batch:
        result["one_rank_error"] = one_rank_error(case, eager)
    for policy in case.policies:
        start = time.perf_counter()
        run, step = train_captured(case, policy)
        entry = {
            "differences": differences(eager, run)[:8],
            "relative_error": largest_relative_error(run, eager),
            "gradients": len(run.gradients[0]),
            "without_gradient": list(step.joint.signature.parameters_without_grad),
            "issued": count_issued(step, run.model, next(batches(case))),
            "in_graph": dict(Counter(c.kind for c in collectives(step.joint))),
            "forward_gathers": gathers(step, backward=False),
            "backward_gathers": gathers(step, backward=True),
            "seconds": time.perf_counter() - start,
        }
        result["policies"][policy] = entry
    return result


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    launch = sys.argv[1]
    names = sys.argv[2:] or LAUNCHES[launch]
    cases = ANY_WORLD | (FOUR_RANKS if launch == "four" else {})
    results: dict[str, Any] = {}
    for name in names:
        try:
            if name == "initialised":
                results[name] = initialised_as_on_one_rank()
            else:
                results[name] = run_case(cases[name])
        except Exception:
            # every rank runs the same case, so every rank fails here or none does
            results[name] = {"error": traceback.format_exc()}
    finish(results)


if __name__ == "__main__":
    main()
