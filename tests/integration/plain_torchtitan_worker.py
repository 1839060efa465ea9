"""torchtitan alone on one rank: trains, saves and loads, and never imports graph_trainer.

Arguments: the launch's scratch folder, and "save": train on batches made up here, which it leaves
there for others; or "load": go on from the checkpoint of step 2 that checkpoint_cases.py left, on
the batches beside it. Reports the losses.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torchtitan.tools import utils

if not torch.accelerator.is_available():
    # torchtitan knows no CPU: what it asks of a device, before anything else of it is imported
    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(
        **{name: getattr(torch.cpu, name) for name in torch.cpu.__all__ if name != "set_device"},
        set_device=lambda device: None,
        get_device_name=lambda device=None: platform.machine(),
        get_device_properties=lambda device=None: SimpleNamespace(total_memory=2**34),
        memory_stats=lambda device=None: {
            "active_bytes.all.peak": 0,
            "reserved_bytes.all.peak": 0,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        },
        reset_peak_memory_stats=lambda device=None: None,
        empty_cache=lambda: None,
    )

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.models.common.attention import (
    FlexAttention,
    ScaledDotProductAttention,
)
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

SAVED = 2
LAYERS = 2
SEQUENCE = 16


class NoData(BaseDataLoader):
    """In the place of a loader and of a tokenizer: the batches come from a file, as tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, **given: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def config(folder: Path) -> Trainer.Config:
    """torchtitan's debug model, with the values that configs/llama3/debugmodel.toml sets.

    Not parallelized: FSDP2 installs mixed precision and collectives that gloo does not have.
    """
    made = llama3_debugmodel()
    made.dump_folder = str(folder)
    made.model_spec.model.layers = made.model_spec.model.layers[:LAYERS]
    made.model_spec.parallelize_fn = lambda model, **options: model
    for _, _, parent, attribute in list(made.model_spec.model.traverse(FlexAttention.Config)):
        setattr(parent, attribute, ScaledDotProductAttention.Config())
    made.loss = CrossEntropyLoss.Config(global_vocab_size=2048)
    made.optimizer = default_adamw(lr=2e-3)
    made.lr_scheduler.warmup_steps = 5
    made.dataloader = made.tokenizer = NoData.Config()
    made.training.seq_len = SEQUENCE
    made.training.local_batch_size = 8
    made.training.steps = SAVED + 2
    made.training.disable_cuda_graphs = True
    made.parallelism.spmd_backend = "partial_dtensor"
    made.activation_checkpoint = None
    made.debug.seed = 42
    made.checkpoint = CheckpointManager.Config(
        enable=True, interval=SAVED, keep_latest_k=0, exclude_from_loading=["dataloader"]
    )
    return made


def made_up_batches() -> list[Any]:
    """Four global batches that need no corpus, for programs that do not share one."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(4):
        tokens = torch.randint(2048, (8, SEQUENCE + 1), generator=generator)
        positions = torch.arange(SEQUENCE).repeat(8, 1)
        batches.append(({"input": tokens[:, :-1].clone(), "positions": positions}, tokens[:, 1:]))
    return batches


def main() -> None:
    folder, what = Path(sys.argv[1]), sys.argv[2]
    if what == "save":
        batches = made_up_batches()
        torch.save(batches, folder / "batches.pt")
    else:
        batches = torch.load(folder / "batches_after.pt")
    torch.set_num_threads(1)
    trainer = config(folder / ("plain" if what == "save" else "ours")).build()
    losses: list[float] = []
    forward_backward_step = trainer.forward_backward_step

    def keeping(**given: Any) -> torch.Tensor:
        loss = forward_backward_step(**given)
        losses.append(float(loss.detach()))
        return loss

    trainer.forward_backward_step = keeping
    if what == "load":
        assert trainer.checkpointer.load(SAVED), "there is no such checkpoint"
    data = trainer.batch_generator(batches)
    for _ in batches:
        trainer.step += 1
        trainer.train_step(data)
        if what == "save":
            trainer.checkpointer.save(trainer.step)
    found = {
        "losses": losses,
        "step": trainer.step,
        "imported": [name for name in sys.modules if name.partition(".")[0] == "graph_trainer"],
    }
    results = json.dumps({what: {"result": found}})
    Path(os.environ["GRAPH_TRAINER_TEST_RESULTS"], "0.json").write_text(results)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that is being torn down


if __name__ == "__main__":
    main()
