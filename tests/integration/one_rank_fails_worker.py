"""A step that one of two ranks cannot capture, or not compile; test_one_rank_fails.py asserts.

After the last case the ranks cannot talk to each other, so the worker ends there.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graph_trainer as gt
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.training.step_cache import TrainStep
from graph_trainer.train import leave
from tests.integration.launch import report


def main() -> None:
    # a rank that waits in vain shall say so within the test's time
    dist.init_process_group(gt.cpu_backend(), timeout=timedelta(seconds=20))
    model = gt.simple_fsdp(nn.Linear(4, 4), init_device_mesh("cpu", (2,)))
    odd = dist.get_rank() == 1

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    causes: list[str] = []

    def error_of(step: TrainStep, columns: int) -> str:
        try:
            step(model, torch.ones(2, columns))
        except Exception as error:
            causes.append(str(error.__cause__))
            return f"{type(error).__name__}: {error}"
        return ""

    step = TrainStep(loss_fn)
    results = {"capture": error_of(step, 5 if odd else 4)}
    results["compile"] = error_of(TrainStep(loss_fn, backend="egaer" if odd else "eager"), 4)
    results["afterwards"] = error_of(step, 4)
    # The first graph is there, so a rank with another batch asks nobody. It fails and ends; the
    # other one is in the middle of its step.
    results["later"] = error_of(step, 5 if odd else 4)
    results["cause"] = causes[-1]
    if not odd:
        # the rank that failed has ended: what a pass agrees on cannot be exchanged with it
        passes = gt.PassConfig(passes=("schedule_overlap",), hardware=load_hardware("cpu"))
        results["lost"] = error_of(TrainStep(loss_fn, passes=passes), 4)
    report(results)
    leave(0)


if __name__ == "__main__":
    main()
