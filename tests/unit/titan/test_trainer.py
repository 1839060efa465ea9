"""What the trainer logs as metrics of a captured graph and of the memory of a step."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from graph_trainer.core.training.step_cache import TrainStep
from graph_trainer.core.units import GIB
from graph_trainer.errors import TrainingError
from graph_trainer.testing import mean_square
from graph_trainer.titan import trainer as trainer_module
from graph_trainer.titan.checkpointer import CheckedCheckpointManager
from graph_trainer.titan.nonfinite_guard import NonfiniteGuard
from graph_trainer.titan.observer import RunObserver
from graph_trainer.titan.trainer import GraphTrainer

from torchtitan.components.checkpointer.base import BaseCheckpointManager  # isort: skip


@pytest.mark.parametrize("backward", [True, False])
def test_each_captured_graph_is_logged_once(backward):
    logged, reports = [], []
    metrics = SimpleNamespace(logger=SimpleNamespace(log=lambda *args: logged.append(args)))
    config = SimpleNamespace(activation_checkpoint=None, metrics=None)
    trainer = SimpleNamespace(
        config=config, metrics_processor=metrics, step=7, observer=RunObserver()
    )

    def reported(joint, report):
        reports.append(report)
        GraphTrainer._reported(trainer, joint, report)

    step = TrainStep(mean_square, backward=backward, on_report=reported)
    model = nn.Linear(4, 4)
    for rows in (2, 2, 3):
        step(model, torch.ones(rows, 4))
    assert [at for _, at in logged] == [7, 7]
    for (values, _), report in zip(logged, reports, strict=True):
        last, kind = report.last, "" if backward else "validation_"
        capture = values[f"graph_trainer/{kind}capture_seconds"]
        assert capture > 0 and f"{capture:.2f}" in str(report).splitlines()[1]
        assert values == {
            f"graph_trainer/{kind}predicted_peak_gib": last.peak_bytes / GIB,
            f"graph_trainer/{kind}capture_seconds": capture,
            f"graph_trainer/{kind}pass_seconds": sum(row.seconds for row in report.rows[1:]),
            f"graph_trainer/{kind}collectives": 0,
            f"graph_trainer/{kind}collective_gib": 0,
        }


def run_of_two_steps(monkeypatch, checkpointer, named=None, batches=1):
    """A trainer whose loop does nothing; what it warns of, and whether it prepared a graph."""
    said, prepared = [], []

    def loop(self):
        self._microbatches += batches if self.should_continue_training() else 0

    monkeypatch.setattr(trainer_module.logger, "warning", said.append)
    monkeypatch.setattr(trainer_module.Trainer, "train", loop)
    monkeypatch.setattr(GraphTrainer, "_prepare_first_graph", lambda self: prepared.append(self))
    monkeypatch.setattr(trainer_module.dist, "get_rank", lambda: 3)
    monkeypatch.setattr(GraphTrainer, "should_continue_training", lambda self: self.step < 2)
    run = object.__new__(GraphTrainer)
    checkpoint = SimpleNamespace(initial_load_path=named)
    run.config = SimpleNamespace(checkpoint=checkpoint, training=SimpleNamespace(steps=2))
    run.checkpointer = checkpointer
    run._microbatches, run._routing, run.optimizers = 0, None, None
    run.model_parts = [nn.Linear(1, 1)]
    run.observer, run.step = SimpleNamespace(finished=lambda *of: None), 0
    run._guard = NonfiniteGuard()
    return run, said, prepared


def checkpoints_up_to(newest):
    checkpointer = object.__new__(CheckedCheckpointManager)
    checkpointer.enable, checkpointer.step_to_load = False, lambda: newest
    return checkpointer


@pytest.mark.parametrize(("newest", "captures"), [(0, 1), (1, 1), (2, 0), (3, 0)])
def test_a_run_that_is_at_its_end_captures_nothing(monkeypatch, newest, captures):
    run, _, prepared = run_of_two_steps(monkeypatch, checkpoints_up_to(newest))
    run.train()
    assert len(prepared) == captures


def test_a_run_whose_data_have_no_batch_does_not_end_as_if_it_had_trained(monkeypatch):
    run, _, _ = run_of_two_steps(monkeypatch, checkpoints_up_to(0), batches=0)
    run.step = 1  # torchtitan counts the step before it asks for its batch
    with pytest.raises(TrainingError, match="less than one batch for rank 3 after step 0"):
        run.train()


@pytest.mark.parametrize("named", [None, "other/checkpoint"])
@pytest.mark.parametrize("newest", [0, 2])
def test_what_a_resumed_run_does_not_do_is_said(monkeypatch, newest, named):
    run, said, _ = run_of_two_steps(monkeypatch, checkpoints_up_to(newest), named)
    run.step = newest
    run.train()
    wanted = ['initial_load_path = "other/checkpoint" is not read'] if named and newest else []
    wanted += ["There was nothing left to do: the checkpoint is of step 2"] if newest else []
    assert len(said) == len(wanted)
    assert all(words in line for words, line in zip(wanted, said, strict=True))


def test_a_run_with_a_checkpoint_manager_of_the_users_own_trains(monkeypatch):
    class OwnManager(BaseCheckpointManager):
        enable, save_future = False, None
        _load = _save = _maybe_wait_for_staging = _wait_for_saving = _close = None

    run, said, prepared = run_of_two_steps(monkeypatch, OwnManager(), "other/checkpoint")
    run.train()
    assert prepared == [run] and not said


@pytest.mark.parametrize(("device", "grew"), [("cpu", [2**29]), ("cuda", []), ("cpu", [])])
def test_the_memory_of_the_second_step_is_measured_and_logged(monkeypatch, device, grew):
    """`grew` is empty where the system tells nothing."""
    logged, received, entered = [], [], []

    @contextlib.contextmanager
    def resident_growth():
        assert weight.grad is None, "freed by the step, it would hide as many bytes"
        growth = []
        yield growth
        entered.append(trainer._microbatches)
        growth += grew

    def step(self, data):
        weight.grad = torch.ones(4)
        self._microbatches += self.gradient_accumulation_steps

    monkeypatch.setattr(GraphTrainer, "optimizer_step", step)
    monkeypatch.setattr(trainer_module, "resident_growth", resident_growth)
    trainer = GraphTrainer.__new__(GraphTrainer)
    trainer.device, trainer._microbatches = torch.device(device), 0
    trainer.gradient_accumulation_steps = 2
    trainer.observer, trainer._routing = RunObserver(), None
    weight = nn.Parameter(torch.ones(4))
    trainer.optimizers = torch.optim.SGD([weight])
    trainer.observer.memory_grew = received.append
    trainer.metrics_processor = SimpleNamespace(
        logger=SimpleNamespace(log=lambda *args: logged.append(args))
    )
    for trainer.step in (7, 8, 9):
        trainer.train_step(iter(()))
    assert received == grew and entered == [4] * (device == "cpu")
    assert logged == [({"graph_trainer/measured_growth_gib": 0.5}, 8)] * len(grew)
