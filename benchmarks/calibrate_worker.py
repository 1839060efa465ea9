"""One rank of `python -m benchmarks.calibrate`: trains configs for some steps, with a clock."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.device import own_cpu_backend
from graph_trainer.titan.trainer import GraphTrainer
from graph_trainer.train import leave


def step_seconds(flags: list[str], folder: Path, warmup: int, steps: int) -> list[float]:
    """Train with a config; return the seconds of each step after the first ones."""
    config = load_config([*flags, "--dump_folder", str(folder)])
    with own_cpu_backend():
        trainer = GraphTrainer(config)
    batches = trainer.batch_generator(trainer.dataloader)
    seconds = []
    for step in range(warmup + steps):
        dist.barrier()
        trainer.step += 1
        start = time.perf_counter()
        trainer.train_step(batches)
        if step >= warmup:
            seconds.append(time.perf_counter() - start)
    trainer.close()
    return seconds


def main() -> None:
    """Run the plan in the file that the first argument names; write `<rank>.json` beside it."""
    path = Path(sys.argv[1])
    plan: dict[str, Any] = json.loads(path.read_text())
    torch.set_num_threads(1)
    results = []
    for place, flags in enumerate(plan["configs"]):
        folder = path.parent / str(place)
        results.append(step_seconds(flags, folder, plan["warmup"], plan["steps"]))
    (path.parent / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    leave(0)


if __name__ == "__main__":
    main()
