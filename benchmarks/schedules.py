"""What a schedule costs: bubbles and steps of real ranks, beside those that are simulated.

    python -m benchmarks.schedules                  # two ranks of one thread each, CPU
    python -m benchmarks.schedules --microbatches 8

Each rank times the programs of its stages. The measured bubble is the part of a step in which ranks
run none of them. The simulated one is of `simulate_schedule` with the mean of the measured times of
each stage, and with sends that take no time: so it is the order of actions that is compared. As
many cores as ranks must be free.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import graph_trainer as gt
from benchmarks.turns import orders
from graph_trainer.core.pipeline.schedule import SCHEDULES
from graph_trainer.core.pipeline.simulate_schedule import StageSeconds, simulate_schedule
from graph_trainer.core.torch_private_pipelining import actions_of, ranks_of_stages, splits_backward

LAYERS, WIDTH, ROWS = 16, 512, 64
ONE_STAGE = ("1F1B", "GPipe")
PROGRAMS = ("forward", "backward", "backward_input", "backward_weight")


class Block(nn.Module):
    """A residual feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, width] -> the same."""
        return x + self.down(torch.tanh(self.up(x)))


def loss_of(model: nn.Module, x: torch.Tensor, *, target: torch.Tensor) -> torch.Tensor:
    """Return the mean of the squared differences from the target."""
    return (model(x) - target).square().mean()


def main() -> None:
    """Measure every schedule, and print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="of the pipeline, with a core each")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each schedule")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store, result = Path(folder, "store"), Path(folder, "result.json")
        arguments = (flags.ranks, flags.microbatches, flags.rounds, str(store), str(result))
        torch.multiprocessing.start_processes(
            measure, arguments, nprocs=flags.ranks, start_method="spawn"
        )
        rows = json.loads(result.read_text())
    print(f"{'':<22} step ms  bubble    simulated: step ms  bubble")
    for row in rows:
        print(
            f"{row['schedule']:<22} {1e3 * row['seconds']:7.1f}  {row['bubble']:6.1%}"
            f"    {1e3 * row['simulated_seconds']:18.1f}  {row['simulated_bubble']:6.1%}"
        )
    print(json.dumps(rows))


def measure(rank: int, ranks: int, microbatches: int, rounds: int, store: str, result: str) -> None:
    """Run all schedules on one rank; the first rank writes the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    runs = {schedule: Run(schedule, rank, ranks, microbatches) for schedule in SCHEDULES}
    for run in runs.values():
        run.step()
    for run in runs.values():
        run.steps.clear()
        run.programs.clear()
    for order in orders(list(runs), rounds):
        for schedule in order:
            runs[schedule].step()
    rows = [run.row() for run in runs.values()]
    if rank == 0:
        Path(result).write_text(json.dumps(rows))
    dist.destroy_process_group()


class Run:
    """The stages of one rank under one schedule.

    Attributes:
        steps: the seconds of each step, of this rank.
        programs: by stage and program, the seconds of each of its runs.
    """

    def __init__(self, schedule: str, rank: int, ranks: int, microbatches: int) -> None:
        self.schedule, self.ranks, self.microbatches = schedule, ranks, microbatches
        self.steps: list[float] = []
        self.programs: dict[str, list[float]] = defaultdict(list)
        self._num_stages = ranks * (1 if schedule in ONE_STAGE else 2)
        self._actions = actions_of(schedule, self._num_stages, ranks, microbatches)
        self._batches = [torch.randn(ROWS, WIDTH) for _ in range(microbatches)]
        rank_of = ranks_of_stages(self._actions)
        stages = [self._stage(i) for i in range(self._num_stages) if rank_of[i] == rank]
        self._step = gt.PipelineStep(stages, schedule, microbatches, lambda module, found: None)

    def _stage(self, index: int) -> gt.GraphStage:
        blocks = (Block() for _ in range(LAYERS // self._num_stages))
        part, batch = nn.Sequential(*blocks), self._batches[0]
        is_last = index == self._num_stages - 1
        kwargs, loss_fn = ({"target": batch}, loss_of) if is_last else ({}, None)
        joint = gt.capture_stage(part, (batch,), kwargs, loss_fn=loss_fn)
        gt.run_passes(joint)
        stage = gt.GraphStage(
            *(joint, part),
            index=index,
            num_stages=self._num_stages,
            splits_backward=splits_backward(self._actions),
        )
        for program in PROGRAMS:
            setattr(stage, program, self._timed(f"{index} {program}", getattr(stage, program)))
        return stage

    def _timed(self, name: str, program: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = program(*args, **kwargs)
            self.programs[name].append(time.perf_counter() - start)
            return result

        return run

    def step(self) -> None:
        """Run a step from the moment at which all ranks are ready."""
        dist.barrier()
        start = time.perf_counter()
        self._step([(b,) for b in self._batches], [{"target": b} for b in self._batches])
        self.steps.append(time.perf_counter() - start)

    def row(self) -> dict[str, Any]:
        """Return what all ranks measured, and what is simulated from it."""
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, (self.steps, dict(self.programs)))
        steps = [max(of_ranks) for of_ranks in zip(*(steps for steps, _ in found), strict=True)]
        mean: dict[str, float] = {}
        busy = 0.0
        for _, programs in found:
            for name, seconds in programs.items():
                mean[name] = statistics.mean(seconds)
                # a whole backward of a split one runs both parts, which are counted
                if not (name.endswith(" backward") and f"{name}_input" in programs):
                    busy += sum(seconds)
        timeline = simulate_schedule(
            self._actions,
            {
                index: StageSeconds(
                    forward=mean[f"{index} forward"],
                    backward=mean.get(f"{index} backward", 0.0),
                    backward_input=mean.get(f"{index} backward_input", 0.0),
                    backward_weight=mean.get(f"{index} backward_weight", 0.0),
                )
                for index in range(self._num_stages)
            },
        )
        return {
            "schedule": self.schedule,
            "microbatches": self.microbatches,
            "seconds": statistics.mean(steps),
            "bubble": 1 - busy / (self.ranks * sum(steps)),
            "simulated_seconds": timeline.seconds,
            "simulated_bubble": timeline.bubble,
        }


if __name__ == "__main__":
    main()
