"""A saved plan of one layer on two fake ranks."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.planner.plan import make_plan
from graph_trainer.planner.plan_report import readable_report
from graph_trainer.planner.saved_plan import plan_every_class
from graph_trainer.planner.text import report_text
from graph_trainer.titan.config.load import load_config

RANKS = 2


def config_of(*flags, world_size=RANKS):
    """The debug model with one layer."""
    words = ["--config", "debugmodel", "--training.seq_len", "32"]
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
