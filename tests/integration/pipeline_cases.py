"""Pipelines on real ranks beside the model on one stage, for test_pipeline.py."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import graph_trainer as gt
from graph_trainer.core.ordering.agreement import Agreement

MICROBATCHES = 6
WIDTH = 6


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
    for name, parameter in model.named_parameters():
        before = parameter.grad
        parameter.grad = gradients[name] if before is None else before + gradients[name]


def schedules(folder: Path, _: str) -> dict[str, Any]:
    """Losses and gradients of pipelines of two ranks, sharded by FSDP over two others."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))
    return {
        "1F1B": pipeline(mesh, "1F1B", (3, 2), "always"),
        "GPipe": pipeline(mesh, "GPipe", (1, 4), "never"),
        "Interleaved1F1B": pipeline(mesh, "Interleaved1F1B", (1, 1, 2, 1), "always"),
    }


def pipeline(
    mesh: DeviceMesh, schedule: str, blocks: tuple[int, ...], policy: str
) -> dict[str, Any]:
    """Train one step by a schedule and on one stage, and return what differs.

    Args:
        blocks: how many blocks each stage has.
        policy: of resharding parameters.
    """
    group, data = mesh["pp"].get_group(), mesh["fsdp"]
    generator = torch.Generator().manual_seed(data.get_local_rank())
    batches = [torch.randn(2, 3, WIDTH, generator=generator) for _ in range(MICROBATCHES)]
    torch.manual_seed(0)
    all_blocks = {str(number): Block() for number in range(sum(blocks))}
    one_stage = gt.simple_fsdp(Layers(copy.deepcopy(all_blocks)), data)
    config = gt.PassConfig(reshard_after_forward=policy, pipeline_parallel=True)
    stages, first = [], 0
    for index, count in enumerate(blocks):
        names = [str(number) for number in range(first, first + count)]
        first += count
        if index % 2 != mesh["pp"].get_local_rank():
            continue
        part = gt.simple_fsdp(Layers({name: all_blocks[name] for name in names}), data)
        is_last = index == len(blocks) - 1
        kwargs = {"target": batches[0][1]} if is_last else {}
        loss_fn = loss_of if is_last else None
        joint = gt.capture_stage(part, (batches[0][0],), kwargs, loss_fn=loss_fn)
        gt.run_passes(joint, config, agreement=Agreement(data.get_group()))
        stage = gt.GraphStage(
            *(joint, part),
            index=index,
            num_stages=len(blocks),
            group=group,
            data_group=data.get_group(),
        )
        stages.append(stage)
    step = gt.PipelineStep(stages, schedule, MICROBATCHES, add)
    losses = step([(x,) for x, _ in batches], [{"target": y} for _, y in batches])
    expected = []
    for x, y in batches:
        loss = loss_of(one_stage, x, target=y)
        loss.backward()
        expected.append(loss.detach())
    is_last = any(stage.is_last for stage in stages)
    differing = []
    if is_last and not torch.equal(torch.stack(losses), torch.stack(expected)):
        differing.append("loss")
    gradients = {name: parameter.grad for name, parameter in one_stage.named_parameters()}
    for stage in stages:
        for name, parameter in stage.submod.named_parameters():
            if not torch.equal(local(parameter.grad), local(gradients[name])):
                differing.append(name)
    return {"differing": differing, "losses": len(losses), "is_last": is_last}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
