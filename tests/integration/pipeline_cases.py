"""Pipelines on real ranks, eager and captured, and beside one stage, for test_pipeline.py."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import graph_trainer as gt
from graph_trainer.core.ordering.agreement import Agreement
from graph_trainer.core.pipeline import stage as stage_module
from graph_trainer.core.pipeline.reduce_once import reduces_once
from graph_trainer.core.pipeline.schedule import IN_A_V
from graph_trainer.core.sharding.ordered_gloo import BACKEND
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.simulation.simulate import predicted_memory
from graph_trainer.core.torch_private_pipelining import actions_of
from graph_trainer.titan import captured_stages
from tests.integration.issued import count_issued
from tests.integration.matrix import (
    BF16,
    BITWISE,
    DEEPSEEK_V3,
    FP32,
    TOLERANCE,
    VALIDATE,
    Flags,
    context,
    replicate,
    rows,
    shard,
    tensor,
)
from tests.integration.recorded import EAGER, Recorded, differing, gradient_errors

_EXPORT = "model-00001-of-00001.safetensors"
MICROBATCHES = 6
WIDTH = 6


@dataclass(frozen=True)
class Pipeline:
    """A model that torchtitan's split divides into stages, trained eagerly and captured."""

    ranks: int
    flags: Flags
    beside_eager: bool = True
    """Whether it is compared with torch's eager stages. Those run one more forward, to find what
    they pass on, and so count the tokens of experts twice."""
    beside_one_stage: bool = False
    """Whether it is compared with the ranks of one stage that have the whole model."""

    @property
    def degree(self) -> int:
        degree: int = self.flags[_DEGREE]
        return degree

    @property
    def one_stage(self) -> Flags:
        """Flags of the same microbatches, accumulated without a pipeline."""
        flags = {k: v for k, v in self.flags.items() if "pipeline" not in k}
        if "validator.steps" in flags:  # a row each
            flags = flags | {"validator.steps": flags["training.local_batch_size"]}
        sequences = self.flags["training.local_batch_size"]
        keys = ("parallelism.data_parallel_shard_degree", _REPLICATE)
        data_ranks = math.prod(self.flags.get(key, 1) for key in keys)
        return flags | rows(1) | {"training.global_batch_size": sequences * data_ranks}


_DEGREE = "parallelism.pipeline_parallel_degree"
_REPLICATE = "parallelism.data_parallel_replicate_degree"


def pipeline_of(degree: int, schedule: str, *, bitwise: bool = True) -> Flags:
    # clipping would multiply by a norm whose last bits depend on the order of the stages
    flags: Flags = {"training.max_norm": 1e9}
    # gradients are reduced in every microbatch, as eager stages and one stage do
    flags |= BITWISE if bitwise else {}
    return flags | {_DEGREE: degree, "parallelism.pipeline_parallel_schedule": schedule}


REDUCED_ONCE: Flags = pipeline_of(2, "1F1B", bitwise=False) | shard(2) | rows(4) | FP32

PIPELINES = {
    "pp2_fsdp2": Pipeline(
        4,
        pipeline_of(2, "1F1B") | shard(2) | rows(4) | FP32 | VALIDATE,
        beside_one_stage=True,
    ),
    # of the gradients only those of norms are summed, and by tensor parallelism alone
    "pp2_tp2_reduced_once": Pipeline(
        4,
        pipeline_of(2, "1F1B", bitwise=False) | shard(1) | tensor(2) | rows(4) | FP32,
        beside_eager=False,
        beside_one_stage=True,
    ),
    "pp2_cp2_interleaved": Pipeline(
        4, pipeline_of(2, "Interleaved1F1B") | shard(1) | context(2) | rows(4) | FP32
    ),
    "pp2_fsdp2_tp2": Pipeline(8, pipeline_of(2, "1F1B") | shard(2) | tensor(2) | rows(3) | FP32),
    "pp4_fsdp2_gpipe": Pipeline(8, pipeline_of(4, "GPipe") | shard(2) | rows(5) | BF16),
    "pp2_hsdp2x2_ep2": Pipeline(
        8,
        DEEPSEEK_V3.flags
        | pipeline_of(2, "ZBVZeroBubble")
        | replicate(2)
        | shard(2)
        | {"parallelism.expert_parallel_degree": 2}
        | rows(2)
        | FP32,
        beside_eager=False,
        beside_one_stage=True,
    ),
}


class Block(nn.Module):
    """A residual block with a weight that two ranks shard unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Layers(nn.Module):
    """Blocks, of which a stage has some."""

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def loss_of(model: nn.Module, x: torch.Tensor, *, target: torch.Tensor) -> torch.Tensor:
    return (model(x) - target).square().mean()


def add(model: nn.Module, gradients: dict[str, torch.Tensor]) -> None:
    """Add gradients to `.grad`."""
    parameters = dict(model.named_parameters())
    for name, gradient in gradients.items():
        before = parameters[name].grad
        parameters[name].grad = gradient if before is None else before + gradient


def schedules(folder: Path, _: str) -> dict[str, Any]:
    """Losses and gradients of pipelines of two ranks, sharded by FSDP over two others."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))
    return {
        "1F1B": pipeline(mesh, "1F1B", (3, 2), "always"),
        "GPipe": pipeline(mesh, "GPipe", (1, 4), "never", bitwise=False),
        "Interleaved1F1B": pipeline(mesh, "Interleaved1F1B", (1, 1, 2, 1), "always"),
        "LoopedBFS": pipeline(mesh, "LoopedBFS", (2, 1, 1, 1), "never", bitwise=False),
        "InterleavedZeroBubble": pipeline(mesh, "InterleavedZeroBubble", (1, 2, 1, 1), "always"),
        "ZBVZeroBubble": pipeline(mesh, "ZBVZeroBubble", (2, 1, 1, 1), "never"),
        "DualPipeV": pipeline(mesh, "DualPipeV", (1, 1, 1, 2), "always"),
        "compiled": pipeline(
            mesh, "ZBVZeroBubble", (1, 1, 1, 1), "never", "inductor", bitwise=False
        ),
        "file": pipeline(mesh, _schedule_file(folder), (1, 2), "always"),
        "dropout": dropout(mesh),
    }


def _schedule_file(folder: Path) -> str:
    """Write a schedule of two stages: two backwards run in two actions, the others whole."""
    path = folder / f"schedule_{dist.get_rank()}.csv"
    rows = [
        "0F0,0F1,0F2,0I0,0I1,0W0,0W1,0F3,0B2,0F4,0B3,0F5,0B4,0B5",
        "1F0,1B0,1F1,1B1,1F2,1I2,1F3,1W2,1B3,1F4,1B4,1F5,1B5",
    ]
    path.write_text("\n".join(rows) + "\n")
    return str(path)


def pipeline(
    mesh: DeviceMesh,
    schedule: str,
    blocks: tuple[int, ...],
    policy: str,
    backend: str = "eager",
    *,
    bitwise: bool = True,
) -> dict[str, Any]:
    """Train one step by a schedule and on one stage, and return what differs.

    Args:
        blocks: how many blocks each stage has.
        policy: of resharding parameters.
        bitwise: False to reduce gradients once, where the policy keeps parameters.
    """
    group, data = mesh["pp"].get_group(), mesh["fsdp"]
    generator = torch.Generator().manual_seed(data.get_local_rank())
    batches = [torch.randn(2, 3, WIDTH, generator=generator) for _ in range(MICROBATCHES)]
    torch.manual_seed(0)
    all_blocks = {str(number): Block() for number in range(sum(blocks))}
    one_stage = gt.simple_fsdp(Layers(copy.deepcopy(all_blocks)), data)
    config = gt.PassConfig(reshard_after_forward=policy, pipeline_parallel=True, bitwise=bitwise)
    stages, first = [], 0
    for index, count in enumerate(blocks):
        names = [str(number) for number in range(first, first + count)]
        first += count
        place = index if schedule in IN_A_V and index < 2 else index + (schedule in IN_A_V)
        if place % 2 != mesh["pp"].get_local_rank():
            continue
        part = gt.simple_fsdp(Layers({name: all_blocks[name] for name in names}), data)
        is_last = index == len(blocks) - 1
        kwargs = {"target": batches[0][1]} if is_last else {}
        loss_fn = loss_of if is_last else None
        joint = gt.capture_stage(part, (batches[0][0],), kwargs, loss_fn=loss_fn)
        gt.run_passes(joint, config, agreement=Agreement(data.get_group()))
        stage = gt.GraphStage(
            *(joint, part, backend),
            index=index,
            num_stages=len(blocks),
            group=group,
            data_group=data.get_group(),
            splits_backward="Zero" in schedule or schedule in IN_A_V or schedule.endswith(".csv"),
            reduces_once=reduces_once(config),
        )
        stages.append(stage)
    step = gt.PipelineStep(stages, schedule, MICROBATCHES, add)
    args, kwargs = [(x,) for x, _ in batches], [{"target": y} for _, y in batches]
    losses, issued = count_issued(step, args, kwargs)
    expected = []
    for x, y in batches:
        loss = loss_of(one_stage, x, target=y)
        loss.backward()
        expected.append(loss.detach())
    is_last = any(stage.is_last for stage in stages)
    differing, errors = [], []
    if is_last and not torch.equal(torch.stack(losses), torch.stack(expected)):
        differing.append("loss")
    gradients = {name: parameter.grad for name, parameter in one_stage.named_parameters()}
    for stage in stages:
        for name, parameter in stage.submod.named_parameters():
            one, other = local(parameter.grad), local(gradients[name])
            errors.append(float((one - other).norm() / other.norm()) if other.numel() else 0.0)
            if not torch.equal(one, other):
                differing.append(name)
    return {
        "differing": differing,
        "error": max(errors),
        "losses": len(losses),
        "is_last": is_last,
        "gathers": issued.get(f"{BACKEND}:all_gather", 0),
        "reductions": issued.get(f"{BACKEND}:reduce_scatter", 0),
        "parameters": sum(1 for stage in stages for _ in stage.submod.parameters()),
    }


class Dropping(nn.Module):
    """A block whose result is dropped in part."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropped: torch.Tensor = self.dropout(self.block(x))
        return dropped


def dropout(mesh: DeviceMesh) -> list[str]:
    """Train a step of two stages that draw, and return which gradients are not those of eager
    blocks that draw in the same order: a rank draws for its stage, microbatch by microbatch."""
    data, index = mesh["fsdp"], mesh["pp"].get_local_rank()
    generator = torch.Generator().manual_seed(data.get_local_rank())
    batches = [torch.randn(2, 3, WIDTH, generator=generator) for _ in range(MICROBATCHES)]
    torch.manual_seed(0)
    blocks = [Block(), Block()]
    part = gt.simple_fsdp(Dropping(copy.deepcopy(blocks[index])), data)
    kwargs = {"target": batches[0][1]} if index else {}
    joint = gt.capture_stage(*(part, (batches[0][0],), kwargs), loss_fn=loss_of if index else None)
    stage = gt.GraphStage(*(joint, part), index=index, num_stages=2, group=mesh["pp"].get_group())
    step = gt.PipelineStep([stage], "GPipe", MICROBATCHES, add)
    torch.manual_seed(1 + index)
    step([(x,) for x, _ in batches], [{"target": y} for _, y in batches])
    eager = [gt.simple_fsdp(Dropping(block), data) for block in blocks]
    values = [x for x, _ in batches]
    for seed, block in enumerate(eager, start=1):
        torch.manual_seed(seed)
        values = [block(value) for value in values]
    for value, (_, y) in zip(values, batches, strict=True):
        (value - y).square().mean().backward()
    pairs = zip(part.named_parameters(), eager[index].parameters(), strict=True)
    return [n for (n, p), q in pairs if not torch.equal(local(p.grad), local(q.grad))]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _one_stage_file(folder: Path, name: str) -> Path:
    case = PIPELINES[name]
    # the outermost dimension of the mesh is that of the stages
    rank_of_stage = dist.get_rank() % (case.ranks // case.degree)
    return folder / f"one_stage_{name}_{rank_of_stage}.pt"


def one_stage(folder: Path, name: str) -> None:
    """Train the whole model on every rank with the microbatches of a pipeline, eagerly."""
    recorded = Recorded(PIPELINES[name].one_stage | EAGER, folder).run()
    payload = {
        "losses": recorded.losses,
        "gradients": recorded.gradients,
        "validated": recorded.validated,
        "norms": recorded.norms,
    }
    torch.save(payload, _one_stage_file(folder, name))
    recorded.close()


def train(folder: Path, name: str) -> dict[str, Any]:
    """Train a captured pipeline, and say where it differs from what it is compared with."""
    case = PIPELINES[name]
    with predicted_peaks() as peaks:
        captured = Recorded(case.flags, folder).run()
    result: dict[str, Any] = {
        "predicted": peaks,
        "parameters": sorted(name for name, _ in captured.parameters()),
        "gradients": sorted(captured.gradients[-1]),
        "losses": [float(loss) for loss in captured.losses],
        "is_last": captured.trainer.pp_has_last_stage,
    }
    if case.beside_one_stage:
        result["beside_one_stage"] = beside_one_stage(folder, name, captured)
    if case.beside_eager:
        eager = Recorded(case.flags | EAGER, folder).run()
        result["differing"] = differing(eager, captured)
        eager.close()
    captured.close()
    return result


@contextlib.contextmanager
def predicted_peaks() -> Iterator[list[tuple[int, int]]]:
    """While entered, collect what is predicted of the stages that are captured with backward: the
    peak, with what the schedule has in flight, and the peak of what the graph allocates."""
    peaks: list[tuple[int, int]] = []
    run_passes = captured_stages.run_passes

    def run(joint: gt.JointGraph, passes: gt.PassConfig, **options: Any) -> Any:
        report = run_passes(joint, passes, **options)
        if joint.signature.backward:
            memory = predicted_memory(joint, load_hardware("cpu"), passes.other_memory(joint))
            peaks.append((memory.peak_bytes, report.last.peak_bytes))
        return report

    with patch.object(captured_stages, "run_passes", run):
        yield peaks


def beside_one_stage(folder: Path, name: str, captured: Recorded) -> list[str]:
    """Where a pipeline's gradients and losses are not those of one stage, bit by bit; in another
    order of sums, where gradients of the first step are not within TOLERANCE."""
    whole = torch.load(_one_stage_file(folder, name))
    found = []
    if not BITWISE.items() <= PIPELINES[name].flags.items():
        ours = captured.gradients[0]
        errors = gradient_errors(ours, {n: whole["gradients"][0][n] for n in ours})
        far = {n: error for n, error in errors.items() if error > TOLERANCE["float32"]}
        return [f"errors of gradients: {far}"] if far else []
    for step, gradients in enumerate(captured.gradients):
        found += [
            f"gradient of {parameter} in step {step}"
            for parameter, gradient in gradients.items()
            if not torch.equal(gradient, whole["gradients"][step][parameter])
        ]
        total = torch.zeros(())
        for loss in whole["losses"][step]:
            total = total + loss
        if captured.trainer.pp_has_last_stage and captured.losses[step].item() != total.item():
            found.append(f"loss of step {step}")
    if captured.norms != pytest.approx(whole["norms"], rel=1e-6):  # stage by stage
        found.append(f"norms: {captured.norms} and {whole['norms']}")
    # the same rows, in one step or in one step each
    if captured.validated != pytest.approx(whole["validated"], rel=1e-6):
        found.append(f"validation: {captured.validated} and {whole['validated']}")
    return found


def checkpoints(folder: Path, _: str) -> dict[str, Any]:
    """Save a pipeline after two of four steps; go on on other meshes, and export it."""
    home = folder / "pipeline"
    flags: Flags = FP32 | {
        "checkpoint.enable": True,
        "checkpoint.interval": 2,
        "checkpoint.keep_latest_k": 0,
        "checkpoint.last_save_model_only": True,
        "checkpoint.last_save_in_hf": True,
        "training.steps": 4,
    }
    whole = Recorded(flags | REDUCED_ONCE, home)
    with predicted_peaks() as peaks:
        for step in range(4):
            if step == 2:
                whole.trainer.checkpointer.save(2)
            whole.step()
    result: dict[str, Any] = {"losses": whole.global_losses()[2:], "predicted": peaks}
    whole.trainer.checkpointer.save(5, last_step=True)
    whole.close()
    unclipped: Flags = {"training.max_norm": 1e9}
    meshes = {
        "fsdp4": unclipped | shard(4) | rows(2),
        "pp4": pipeline_of(4, "GPipe") | shard(1) | rows(8),
    }
    for name, mesh in meshes.items():
        # eagerly: what is tested is in the checkpoint, which knows of no graph
        other = Recorded(flags | mesh | {"checkpoint.load_step": 2} | EAGER, home)
        other.trainer.checkpointer.load(step=2)
        other.step()
        other.step()
        result[name] = other.global_losses()
        if name == "fsdp4":
            other.trainer.checkpointer.save(6, last_step=True)
        other.close()
    exports = [load_file(home / "checkpoint" / f"step-{step}" / _EXPORT) for step in (5, 6)]
    result["exported"] = [sorted(weights) for weights in exports]
    result["error"] = max(gradient_errors(*exports).values())
    return result


def one_rank_fails(folder: Path, what: str) -> str:
    """Return what each rank is told where one rank of the second stage fails.

    Args:
        what: "capture" or "compile", in which it does; or "schedule", of which it has another.
    """
    recorded = Recorded(PIPELINES["pp2_fsdp2"].flags, folder)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise gt.CaptureError("not on this rank")

    def other_actions(schedule: str, *args: Any) -> Any:
        return actions_of("GPipe", *args)

    failing = {
        "capture": patch.object(captured_stages, "capture_stage", fail),
        "compile": patch.object(stage_module, "find_backend", fail),
        "schedule": patch.object(captured_stages, "actions_of", other_actions),
    }[what]
    with failing if dist.get_rank() == 3 else contextlib.nullcontext():
        try:
            recorded.step()
        except gt.GraphTrainerError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            recorded.close()
    return ""
