"""Buckets of mixtures of experts, with experts divided and not."""

import pytest

import graph_trainer as gt
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.graph.annotations import Role, role_of
from tests.unit.planner.test_expert_parallel import DEGREE, fake_rank

MODELS = {"qwen3": ("qwen3", "debugmodel_moe", 1), "deepseek_v3": ("deepseek_v3", "debugmodel", 2)}
"""Module, config, and how many layers there are up to the first with experts."""


def captured(model, *flags):
    module, config, layers = MODELS[model]
    fake = fake_rank(*flags, module=module, config=config, layers=layers)
    joint = fake.capture()
    return joint, fake.pass_config()


def is_expert(parameter):
    return "routed_experts" in parameter


@pytest.mark.parametrize(
    ("model", "degree"),
    [
        ("qwen3", "1"),
        ("qwen3", "2"),
        ("deepseek_v3", "1"),
        pytest.param("deepseek_v3", "2", marks=pytest.mark.full),
    ],
)
def test_buckets_of_experts_and_of_the_rest_never_mix(model, degree):
    joint, config = captured(model, DEGREE, degree)
    gt.run_passes(joint, config)
    merged = {Role.UNSHARD: 0, Role.REDUCE_GRAD: 0}
    for c in collectives(joint):
        if not c.parameters:
            continue
        of_experts = {is_expert(name) for name in c.parameters}
        assert len(of_experts) == 1, c.parameters
        if of_experts == {True}:
            assert len(c.parameters) == 3  # the block's weights of experts, in one bucket
            merged[role_of(c.node)] += 1
    # gathered in forward and in backward, reduced once
    assert merged == {Role.UNSHARD: 2, Role.REDUCE_GRAD: 1}
