"""Ranks that capture the same step are planned once; a difference that a plan could see counts."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import CheckpointPolicy

import graph_trainer as gt
from graph_trainer.core.graph.annotations import (
    Phase,
    annotate_node,
    annotation,
    set_recompute_policy,
)
from graph_trainer.core.graph.ops import aten, is_collective
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.planner import saved_plan
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.planner.fingerprint import step_key
from graph_trainer.planner.plan import make_plan
from graph_trainer.planner.saved_plan import plan_every_class
from graph_trainer.planner.verify_order import rank_classes
from tests.unit.planner.conftest import config_of

TP = ("--parallelism.tensor_parallel_degree", "2")


def test_ranks_of_one_step_are_planned_once_as_each_alone(monkeypatch):
    planned = []

    def noted(*args, rank, **more):
        planned.append(rank)
        return make_plan(*args, rank=rank, **more)

    monkeypatch.setattr(saved_plan, "make_plan", noted)
    plan = make_plan(config_of(*TP, world_size=8), 8, load_hardware("cpu"))
    together = plan_every_class(plan)
    assert len(together.classes) > len(planned) >= 1
    monkeypatch.setattr(saved_plan, "step_key", lambda joint, rank, *more: rank)
    planned.clear()
    assert plan_every_class(plan) == together
    assert planned == list(together.classes)


@gt.graph_pass(stage=gt.Stage.TAG, summary="Does nothing")
def of_a_user(joint, options, context):
    """A pass of a user's."""


def test_another_pass_than_ours_may_see_the_rank(monkeypatch):
    planned = []

    def noted(*args, rank, **more):
        planned.append(rank)
        return make_plan(*args, rank=rank, **more)

    monkeypatch.setattr(saved_plan, "make_plan", noted)
    given = ("--compile.passes", "default,tests.unit.planner.test_step_key:of_a_user")
    plan = make_plan(config_of(*given, world_size=4), 4, load_hardware("cpu"))
    assert planned == list(plan_every_class(plan).classes)


def test_a_difference_that_a_plan_could_see_is_another_step():
    run = FakeRank(config_of(*TP, world_size=8), 8, 0, "cpu")
    classes = rank_classes(run)

    def key(change=lambda joint: None, machine=8):
        joint = run.capture()
        change(joint)
        return step_key(joint, 0, classes, machine)

    same = key()
    assert key() == same

    def node(joint, target):
        return next(iter(joint.graph.find_nodes(op="call_function", target=target)))

    def reshaped(joint):
        product = node(joint, aten.mm.default)
        product.meta["val"] = torch.empty(3, 3, device="meta")

    def of_another_phase(joint):
        annotate_node(node(joint, aten.mm.default), annotation(phase=Phase.BACKWARD))

    def tagged(joint):
        set_recompute_policy(node(joint, aten.mm.default), CheckpointPolicy.MUST_SAVE)

    def scaled(joint):
        factor = node(joint, aten.mul.Tensor)
        factor.args = (factor.args[0], 2.0)

    def over_other_groups(joint):
        first = next(n for n in joint.graph.nodes if is_collective(n))
        others = (n for n in joint.graph.nodes if is_collective(n) and n.args[-1] != first.args[-1])
        first.args = (*first.args[:-1], next(others).args[-1])

    for change in (reshaped, of_another_phase, tagged, scaled, over_other_groups):
        assert key(change) != same, change
    assert key(machine=4) != same


def test_parallel_groups_and_the_rows_of_an_embedding_do_not_matter():
    config, keys = config_of(*TP, world_size=8), set()
    for rank in (0, 1, 2):
        run = FakeRank(config, 8, rank, "cpu")
        keys.add(step_key(run.capture(), rank, rank_classes(run), 8))
    assert len(keys) == 1
