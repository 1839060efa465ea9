"""Trains mixtures of experts with expert parallelism, for test_experts.py; assertions are there."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graph_trainer as gt
from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.graph.annotations import value_of
from graph_trainer.core.graph.data_sizes import data_sizes_of
from graph_trainer.core.runtime.live_storages import LiveStorages
from graph_trainer.core.sharding.simple_fsdp import ShardOver
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.routing import mixtures_of, read_routing
from tests.integration.checkpoint_cases import resumed
from tests.integration.matrix import (
    FP32,
    FULL,
    INDUCTOR,
    LAYERS,
    REGIONAL,
    VALIDATE,
    Flags,
    context,
    replicate,
    rows,
    shard,
    tensor,
)
from tests.integration.recorded import EAGER, Recorded, differing, gradient_errors
from tests.layers import set_experts, with_few_layers

ROWS = 8
"""Sequences of the global batch."""

QWEN3: Flags = {"module": "graph_trainer.qwen3", "config": "debugmodel_moe"}
DEEPSEEK: Flags = {"module": "graph_trainer.deepseek_v3", "config": "debugmodel"}


def experts(ranks: int) -> Flags:
    return {"parallelism.expert_parallel_degree": ranks}


@dataclass(frozen=True)
class ExpertCase:
    """A mixture of experts on a mesh, trained eagerly and captured."""

    name: str
    ranks: int
    flags: Flags
    captured: Flags
    """Of the captured run alone."""

    @property
    def compiled(self) -> bool:
        """Whether kernels are fused, so that the captured run rounds otherwise than the eager."""
        return "compile.backend" in self.captured

    @property
    def model(self) -> Flags:
        return {key: self.flags[key] for key in QWEN3}


def _case(name: str, ranks: int, flags: Flags, **captured: Any) -> ExpertCase:
    shared = ("parallelism.tensor_parallel_degree", "parallelism.context_parallel_degree")
    data = ranks // math.prod(flags.get(key, 1) for key in shared)
    given = {"captured": {}} | captured
    return ExpertCase(name, ranks, flags | FP32 | rows(ROWS // data), **given)


CASES = (
    _case("qwen3_ep2", 4, QWEN3 | shard(4) | experts(2)),
    _case("deepseek_ep4", 4, DEEPSEEK | shard(4) | experts(4) | VALIDATE),
    _case("deepseek_ep2_full", 4, DEEPSEEK | shard(4) | experts(2), captured=FULL),
    _case("deepseek_ep2_tp2", 4, DEEPSEEK | shard(2) | tensor(2) | experts(2)),
    # attention's ranks are half of those of the experts
    _case(
        "deepseek_ep4_cp2",
        4,
        DEEPSEEK | shard(2) | context(2) | experts(4) | VALIDATE,
        captured=FULL,
    ),
    _case("deepseek_ep2_regional", 2, DEEPSEEK | shard(2) | experts(2), captured=REGIONAL),
    _case("deepseek_ep2_inductor", 2, DEEPSEEK | shard(2) | experts(2), captured=INDUCTOR),
    # each rank has one row of its own: expert parallelism splits them, then sharding
    _case("deepseek_ep4_shards4_tp2", 8, DEEPSEEK | shard(4) | tensor(2) | experts(4)),
    _case("deepseek_ep4_hsdp_tp2", 8, DEEPSEEK | replicate(2) | shard(2) | tensor(2) | experts(4)),
)

# What the matrix says of roundings holds here too, with other numbers. An expert computes in
# bfloat16 whatever the rest does, so that its unit counts. Of a layer's operators the attention's
# and the norms' are those of Llama's; a router rounds five times (projection, softmax, factor, sum,
# scale), an expert nine (three casts, three products, gate, factor, sum).
_OPERATORS = 2 * ((13 + 5 + 9) * LAYERS + 4)
TOLERANCE = math.sqrt(2 * _OPERATORS) * 2**-9


def case_of(name: str) -> ExpertCase:
    (case,) = [case for case in CASES if case.name == name]
    return case


def _reference_file(case: ExpertCase, folder: Path) -> Path:
    return folder / f"experts_of_{case.model['module']}.pt"


def make_reference(folder: Path, name: str) -> None:
    """One rank with all experts on the global batch."""
    case = case_of(name)
    recorded = Recorded(case.model | FP32 | rows(ROWS) | EAGER, folder).run()
    payload = {"losses": recorded.global_losses(), "gradients": recorded.full_gradients()}
    torch.save(payload, _reference_file(case, folder))
    recorded.close()


def run(folder: Path, name: str) -> dict[str, Any]:
    """Eager, captured, and one rank's."""
    case = case_of(name)
    reference = torch.load(_reference_file(case, folder))
    eager = Recorded(case.flags | EAGER, folder).run()
    captured = Recorded(case.flags | case.captured, folder).run()
    experts_here = {n: p for n, p in captured.parameters() if "inner_experts" in n}
    result = {
        "differing": differing(eager, captured) + different_buffers(eager, captured),
        "losses": captured.global_losses(),
        "eager": eager.global_losses(),
        "one_rank": reference["losses"],
        "errors": gradient_errors(captured.full_gradients(), reference["gradients"]),
        "meshes": sorted({p.device_mesh.mesh_dim_names for p in experts_here.values()}),
        "dims": sorted({p.placements[-1].dim for p in experts_here.values()}),
    }
    captured.close()
    eager.close()
    return result


def different_buffers(a: Recorded, b: Recorded) -> list[str]:
    """The names of buffers that are not the same bits: the experts' biases, and their counts."""
    named = zip(_buffers(a).items(), _buffers(b).values(), strict=True)
    return [name for (name, one), other in named if not torch.equal(one, other)]


def _buffers(recorded: Recorded) -> dict[str, torch.Tensor]:
    buffers = recorded.trainer.model_parts[0].named_buffers()
    return {name: getattr(b, "_local_tensor", b).clone() for name, b in buffers}


_SAVES: Flags = {
    "checkpoint.enable": True,
    "checkpoint.interval": 2,
    "checkpoint.keep_latest_k": 0,
    "training.steps": 4,
}


def saved(folder: Path, _: str) -> dict[str, Any]:
    """Four eager steps at ep 2; the last two of them again, captured at ep 4, from a checkpoint of
    the second."""
    whole = Recorded(case_of("deepseek_ep2_full").flags | _SAVES | EAGER, folder / "experts")
    for number in range(4):
        whole.step()
        if number == 1:
            whole.trainer.checkpointer.save(whole.trainer.step)
            at_save = {name: p.full_tensor().clone() for name, p in whole.parameters()}
    other = resumed(case_of("deepseek_ep4").flags | _SAVES, folder / "experts")
    loaded = {name: p.full_tensor() for name, p in other.parameters()}
    differ = [name for name, value in at_save.items() if not torch.equal(value, loaded[name])]
    for _ in range(2):
        other.step()
    result = {"differ": differ, "losses": whole.global_losses()[2:], "ep4": other.global_losses()}
    other.close()
    whole.close()
    return result


def resumed_on_one_rank(folder: Path, _: str) -> list[float]:
    """Losses of the two steps after the checkpoint that four ranks left."""
    one = resumed(DEEPSEEK | FP32 | rows(ROWS) | _SAVES, folder / "experts")
    for _ in range(2):
        one.step()
    losses = one.global_losses()
    one.close()
    return losses


class Products(nn.Module):
    """Three products, as of experts fewer than ranks; neither dimension divides by four."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, self.weight)


def second_dimension(folder: Path, _: str) -> dict[str, Any]:
    """Loss and gradient of a weight sharded along either dimension: eager, captured, passes run."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    found, shapes = [], []
    for dim in (0, 1):
        torch.manual_seed(0)
        over = ShardOver(mesh=mesh, mode="fully_shard", dim=dim)
        model = gt.simple_fsdp(Products(), mesh, shard_over=lambda fqn, p, over=over: over)
        shapes.append(tuple(model.state_dict()["weight"].to_local().shape))
        loss = model(x).square().mean()
        (gradient,) = torch.autograd.grad(loss, list(model.parameters()))
        found.append((loss.detach(), gradient.full_tensor()))
        joint = gt.capture(model, lambda m, x: m(x).square().mean(), (x,))
        gt.run_passes(joint, gt.PassConfig(reshard_after_forward="always"))
        loss, gradients = gt.compile(joint)(model, x)
        found.append((loss, gradients["weight"].full_tensor()))
    first = found[0]
    equal = [torch.equal(a, b) for each in found for a, b in zip(first, each, strict=True)]
    return {"equal": equal, "shapes": shapes}


def _with_experts(count: int, config: GraphTrainerConfig) -> None:
    """Leave few layers, and in their mixtures so many experts, of which a token chooses one."""
    with_few_layers(config)
    model: Any = config.model_spec and config.model_spec.model
    for layer in model.layers:
        if layer.moe is not None:
            set_experts(layer.moe, count, 1)


def few_experts(folder: Path, _: str) -> dict[str, Any]:
    """Fewer experts than ranks of FSDP, without expert parallelism."""
    change = functools.partial(_with_experts, 2)
    flags = DEEPSEEK | FP32 | shard(4) | rows(2)
    captured = Recorded(flags, folder, change).run()
    weights = [p for n, p in captured.parameters() if "inner_experts" in n]
    result = {
        "dims": sorted({p.placements[0].dim for p in weights}),
        "parts": sorted({p.to_local().numel() / p.numel() for p in weights}),
    }
    eager = Recorded(flags | EAGER, folder, change).run()
    result["differing"] = differing(eager, captured)
    eager.close()
    captured.close()
    return result


def route(recorded: Recorded, favoured: list[int]) -> None:
    """Let every token choose these experts, by a bias that the graph reads as any other buffer."""
    for name, buffer in recorded.trainer.model_parts[0].named_buffers():
        if name.endswith("expert_bias_E"):
            local = getattr(buffer, "_local_tensor", buffer)
            local.zero_()
            local[favoured] = 100.0


def other_routing(folder: Path, name: str) -> dict[str, Any]:
    """One graph for batches whose tokens all go to the first rank, to the last, and anywhere."""
    case = case_of(name)
    eager, captured = Recorded(case.flags | EAGER, folder), Recorded(case.flags, folder)
    counts = []
    for favoured in ([], [0, 1, 2], [5, 6, 7], []):
        for each in (eager, captured):
            route(each, favoured)
        eager.step()
        tokens = _tokens_by_expert(captured)
        captured.step()
        counts.append(tokens())
    result = {
        "differing": differing(eager, captured, last=4),
        "graphs": len(captured.trainer.captured_step.joint_graphs()),
        "tokens": counts,
    }
    captured.close()
    eager.close()
    return result


def _tokens_by_expert(recorded: Recorded) -> Any:
    """What this rank's tokens chose in the first mixture during one step: read when the optimizer
    has not yet set the counts to zero."""
    (name, counts), *_ = (
        (n, b)
        for n, b in recorded.trainer.model_parts[0].named_buffers()
        if n.endswith("tokens_per_expert_E")
    )
    seen: list[list[float]] = []
    original = recorded.trainer.forward_backward_step

    def watched(**kwargs: Any) -> torch.Tensor:
        loss = original(**kwargs)
        seen.append(getattr(counts, "_local_tensor", counts).tolist())
        recorded.trainer.forward_backward_step = original
        return loss

    recorded.trainer.forward_backward_step = watched
    return lambda: seen[0]


def saved_routing(folder: Path, name: str) -> dict[str, Any]:
    """The file of a run of two microbatches a step whose tokens favour some experts, and what each
    microbatch made of memory on this rank, as measured and as predicted at its routing."""
    file = folder / f"routing_{name}.json"
    case = case_of(name)
    # so many tokens that activations, and not weights, are the peak
    several = {"training.global_batch_size": 2 * ROWS, "training.seq_len": 128}
    several |= {"metrics.save_routing": file}
    recorded = Recorded(case.flags | several, folder)
    trainer, step = recorded.trainer, recorded.trainer.captured_step
    measured, own = [], []

    def watched(*args: Any, **kwargs: Any) -> Any:
        before = _local_counts(recorded)
        with LiveStorages() as live:
            result = step(*args, **kwargs)
        measured.append(live.peak_bytes)
        own.append((_local_counts(recorded) - before).tolist())
        return result

    trainer.captured_step = watched
    for favoured in ([], [0, 1, 2], [7], []):
        route(recorded, favoured)
        recorded.step()
    trainer.captured_step = step
    trainer._routing.write()
    dist.barrier()
    routing = read_routing(file, "", mixtures_of(trainer.config.model_spec.model))
    joint, rank = recorded.joint(), dist.get_rank()
    sizes = data_sizes_of(value_of(joint.placeholders()[0]))
    predicted = []
    for each in routing.microbatches:
        with sizes.assuming([ranks[rank] for ranks in each.received]):
            predicted.append(lifetimes(joint).peak_bytes)
    result = {
        # the first call captures, and makes more than its graph
        "measured": measured[1:],
        "predicted": predicted[1:],
        "own": own,
        "routing": json.loads(file.read_text()),
        "experts": trainer.parallel_dims.get_mesh("ep").get_local_rank(),
        "group": trainer.parallel_dims.get_mesh("ep").mesh.tolist(),
    }
    recorded.close()
    return result


def _local_counts(recorded: Recorded) -> torch.Tensor:
    """What this rank's tokens chose since the optimizer's last step: [layer, expert]."""
    buffers = _buffers(recorded)
    return torch.stack([b for n, b in buffers.items() if n.endswith("tokens_per_expert_E")]).long()


def many_routings(folder: Path, count: str) -> dict[str, Any]:
    """Random routings through one captured graph: how many ended, all finite, and on how many
    graphs. Half of them favour a few experts, so that some ranks get nothing."""
    # two ranks: more would take minutes on two cores and see no other graph
    recorded = Recorded(case_of("deepseek_ep2_inductor").flags, folder)
    generator = torch.Generator().manual_seed(0)
    batch, labels = next(recorded.batches)
    model, trainer = recorded.trainer.model_parts[0], recorded.trainer
    inputs, labels, extra = trainer.post_dataloading_process(batch, labels)
    biases = [b for n, b in model.named_buffers() if n.endswith("expert_bias_E")]
    valid, finite = torch.tensor(labels.numel()), 0
    for number in range(int(count)):
        for bias in biases:
            spread = 100.0 if number % 2 else 0.1
            bias.copy_(torch.randn(bias.shape, generator=generator) * spread)
        loss, _ = trainer.captured_step(model, inputs, labels, valid, **extra)
        finite += int(loss.isfinite())
    dist.barrier()
    result = {"finite": finite, "graphs": len(trainer.captured_step.joint_graphs())}
    recorded.close()
    return result
