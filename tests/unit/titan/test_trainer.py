"""What the trainer logs as metrics of a captured graph."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from graph_trainer.core.training.step_cache import TrainStep
from graph_trainer.core.units import GIB
from graph_trainer.testing import mean_square
from graph_trainer.titan.observer import RunObserver
from graph_trainer.titan.trainer import GraphTrainer


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
