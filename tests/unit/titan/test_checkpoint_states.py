"""What a run goes on with: random numbers, learning rate, and what it does not load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from graph_trainer.titan.checkpoint_states import GENERATORS, Generators, keep_generators_from
from graph_trainer.titan.checkpointer import CheckedCheckpointManager

from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # isort: skip

STEPS = 3
ONE_RANK = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"), 1)
SHARDED = ONE_RANK | {"dp_shard": 2}


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
    dist.destroy_process_group()


class Run:
    """A model, its training state and its checkpoints, as the trainer puts them together."""

    step = 0

    def __init__(
        self, folder: Path, mesh: dict[str, int] | None = None, exclude: tuple[Any, ...] = ()
    ) -> None:
        torch.manual_seed(7)
        self.model = nn.Linear(2, 1)
        self.optimizers = default_adamw(lr=1.0).build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=10)
        schedulers = schedule.build(optimizers=self.optimizers, training_steps=20)
        config = CheckedCheckpointManager.Config(
            enable=True, keep_latest_k=0, interval=STEPS, exclude_from_loading=[*exclude]
        )
        self.checkpointer = config.build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=str(folder),
        )
        if mesh is not None:
            generators = Generators(SimpleNamespace(**mesh), torch.device("cpu"))  # type: ignore[arg-type]
            self.checkpointer.states[GENERATORS] = generators
        self.schedulers = schedulers

    def train(self) -> Run:
        for _ in range(STEPS):
            self.step += 1
            self.model(self.draw()).sum().backward()
            self.optimizers.step()
            self.schedulers.step()
        return self

    def draw(self) -> torch.Tensor:
        return torch.rand(4, 2)

    def rates(self) -> list[float]:
        return [group["lr"] for each in self.optimizers for group in each.param_groups]

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


@pytest.fixture
def straight(tmp_path: Path) -> Run:
    """A run of STEPS steps on one rank, with their checkpoint."""
    run = Run(tmp_path, ONE_RANK).train()
    assert run.checkpointer.save(STEPS)
    return run


def drawn_after(run: Run) -> torch.Tensor:
    assert run.checkpointer.load()
    assert run.step == STEPS
    return run.draw()


def test_the_next_random_numbers_are_those_of_the_run_without_a_break(
    straight: Run, tmp_path: Path
) -> None:
    wanted = straight.draw()
    assert torch.equal(drawn_after(Run(tmp_path, ONE_RANK)), wanted)


def test_an_iterator_of_torchs_loader_draws_nothing_of_the_step() -> None:
    loader: Any = StatefulDataLoader([1, 2])
    keep_generators_from(loader)
    before = torch.get_rng_state()
    assert next(iter(loader)) == 1
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("why", ["another mesh", "an old checkpoint", "excluded"])
def test_other_random_numbers_come_from_seed_and_step(
    straight: Run, tmp_path: Path, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    options: dict[str, Any] = {"mesh": SHARDED if why == "another mesh" else ONE_RANK}
    if why == "excluded":
        options["exclude"] = (GENERATORS,)
    if why == "an old checkpoint":
        del straight.checkpointer.states[GENERATORS]
        straight.checkpointer.save(STEPS)
    drawn = [drawn_after(Run(tmp_path, **options)) for _ in range(2)]
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0], straight.draw())
    assert not torch.equal(drawn[0], Run(tmp_path).draw())  # those of step 1
    assert "random numbers, as of dropout, come from debug.seed and" in caplog.text


def test_a_model_that_is_loaded_alone_begins_a_run(straight: Run, tmp_path: Path) -> None:
    straight.checkpointer.save(STEPS, last_step=True)
    run = Run(tmp_path / "other", ONE_RANK)
    run.checkpointer.initial_load_path = straight.checkpointer._create_checkpoint_id(STEPS)
    wanted = Run(tmp_path / "other", ONE_RANK).draw()
    torch.manual_seed(7)
    nn.Linear(2, 1)
    assert run.checkpointer.load() and run.step == 0
    assert torch.equal(run.draw(), wanted)


@pytest.mark.parametrize("exclude", [("optimizer",), ("optimizer", "lr_scheduler"), ()])
def test_the_learning_rate_is_the_loaded_schedules(
    straight: Run, tmp_path: Path, exclude: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run = Run(tmp_path, ONE_RANK, exclude=exclude)
    first = run.rates()
    assert run.checkpointer.load()
    assert first != straight.rates()
    assert run.rates() == (first if "lr_scheduler" in exclude else straight.rates())
    moments = [s for each in run.optimizers for s in each.state.values() if s["step"] > 0]
    assert bool(moments) == (not exclude)
    assert all(f"{name} (" in caplog.text for name in exclude)
