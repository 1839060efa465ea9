"""Where no change makes a run fit, the fewest of them that do together."""

from __future__ import annotations

import dataclasses
import io

import pytest

from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.units import GIB
from graph_trainer.planner import changes
from graph_trainer.planner.changes import Outcome, flags_of, outcome_of
from graph_trainer.planner.html.page import write_page
from graph_trainer.planner.plan import make_plan
from graph_trainer.titan.config.core_settings import LIMIT_KEY
from tests.unit.planner.conftest import config_of, shown

RANKS = 4
CHANGES = [
    {"training.seq_len": "64"},
    {"training.local_batch_size": "2"},
    {"activation_checkpoint.type": "full"},
]


def load(flags):
    given = ["--training.seq_len", "128", "--training.local_batch_size", "4"]
    return config_of(*given, *flags, world_size=RANKS)


def planned(*made, memory_gib=1.0):
    hardware = dataclasses.replace(load_hardware("cpu"), memory_gib=memory_gib)
    flags = [flag for change in made for flag in flags_of(change)]
    return make_plan(load(flags), RANKS, hardware, every_pass=False)


@pytest.fixture(scope="module")
def outcomes():
    """What each change needs."""
    return [outcome_of(each, planned(each)) for each in CHANGES]


def together(plan, outcomes):
    tried = []
    room = plan.hardware.memory_gib * GIB
    given = [dataclasses.replace(each, fits=each.needed_bytes <= room) for each in outcomes]
    return changes.fitting_together(plan, given, load, tried.append), tried


def test_the_fewest_that_fit_together_the_most_helpful_first(outcomes):
    alone = sorted(outcomes, key=lambda each: each.needed_bytes)
    both = alone[0].config | alone[1].config
    need = planned(both).need.total
    assert need < alone[0].needed_bytes
    plan = planned(memory_gib=(need + alone[0].needed_bytes) / 2 / GIB)
    assert not plan.fits
    (found,), tried = together(plan, alone)
    assert found.fits and found.needed_bytes == need and len(tried) == 1
    assert list(found.config) == list(both)
    said = shown(with_advice(plan, found))
    for key, value in both.items():
        assert f"--{key} {value}" in said


def test_what_the_config_excludes_is_left_out(outcomes):
    alone = sorted(outcomes, key=lambda each: each.needed_bytes)
    need = planned(alone[0].config, alone[1].config).need.total
    plan = planned(memory_gib=need / GIB)
    between = (alone[0].needed_bytes + alone[1].needed_bytes) // 2
    refused = Outcome(config={"parallelism.tensor_parallel_degree": "3"}, needed_bytes=between)
    (found,), tried = together(plan, [*alone, refused])
    assert found.fits and found.needed_bytes == need and len(tried) == 2
    little = planned(memory_gib=0.5 * need / GIB)
    assert together(little, alone)[0] == []
    alone = [dataclasses.replace(each, fits=False) for each in alone]
    assert "None of these makes it fit, nor do they together" in shown(with_advice(little, *alone))


def test_one_that_fits_alone_is_enough_but_for_a_higher_limit(outcomes):
    best = min(each.needed_bytes for each in outcomes)
    assert together(planned(memory_gib=best / GIB), outcomes) == ([], [])
    plan = planned(memory_gib=0.9 * best / GIB)
    limit = Outcome(config={LIMIT_KEY: "1"}, fits=True, needed_bytes=plan.need.total)
    assert together(plan, [limit, *outcomes])[0] == together(plan, outcomes)[0] != []


def with_advice(plan, *outcomes):
    return dataclasses.replace(plan, advice=outcomes)


@pytest.mark.parametrize("fits", [False, True])
def test_the_page_reports_that_nothing_fits(outcomes, fits):
    plan = with_advice(planned(memory_gib=0.001), dataclasses.replace(outcomes[0], fits=fits))
    page = io.StringIO()
    write_page(plan, page)
    assert ("None of these makes it fit" in page.getvalue()) == (not fits)
