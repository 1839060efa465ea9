"""A saved plan of one layer on two fake ranks, and the captures of a test."""

from __future__ import annotations

import io
import json
from functools import cache

import pytest
import torch
from rich.console import Console

from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.planner.plan import make_plan
from graph_trainer.planner.plan_report import readable_report
from graph_trainer.planner.plan_tables import report_text
from graph_trainer.planner.saved_plan import plan_every_class
from graph_trainer.testing import Builder
from graph_trainer.titan.config.load import load_config

RANKS = 2

# the numbers of many plans here are of it, and the debug model computes in float32
BFLOAT16 = ("--training.mixed_precision_param", "bfloat16")


def config_of(*flags, world_size=RANKS):
    """The debug model with one layer."""
    words = ["--config", "debugmodel", "--training.seq_len", "32", *BFLOAT16]
    config = load_config(
        [*words, "--training.local_batch_size", "1", *flags], world_size=world_size
    )
    config.model_spec.model.layers = config.model_spec.model.layers[:1]
    return config


def shown(plan):
    """The tables of a plan as text."""
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(report_text(readable_report(plan)))
    return console.export_text()


@pytest.fixture(scope="session")
def full():
    return make_plan(config_of(), RANKS, load_hardware("cpu"))


@pytest.fixture(scope="session")
def plan(full):
    return plan_every_class(full)


@pytest.fixture
def document(plan):
    return json.loads(plan.to_json())


@pytest.fixture
def saved(plan, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    return path


@pytest.fixture
def captured(monkeypatch):
    """The ranks that have captured so far."""
    made, original = [], FakeRank.capture

    def capture(run):
        made.append(run)
        return original(run)

    monkeypatch.setattr(FakeRank, "capture", capture)
    return made


@pytest.fixture
def counted(monkeypatch):
    """As `captured`, but each capture is the same small graph, made by hand in no time."""
    made = []

    def capture(run):
        made.append(run)
        return copy_graph(by_hand())

    monkeypatch.setattr(FakeRank, "capture", capture)
    return made


@cache
def by_hand():
    b = Builder()
    weight = b.parameter("weight", 4)
    product = b.call(torch.ops.aten.mul.Tensor, b.input("x", 4), weight)
    return b.joint(b.total(product), weight=b.call(torch.ops.aten.neg.default, product))
