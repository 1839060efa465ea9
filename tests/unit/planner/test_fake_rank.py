"""What a fake rank counts of the model that it builds."""

from __future__ import annotations

import pytest

from graph_trainer.core.graph.joint_graph import compute_nodes
from graph_trainer.core.simulation.op_costs import flops_of
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.titan.config.load import load_config


def test_flops_of_a_model_that_predicts_several_tokens_are_those_of_its_graph():
    """What a second prediction adds, by torch's counts of the captured ops."""
    counted, captured = [], []
    for entry in ("deepseek_v3_debugmodel", "deepseek_v3_debugmodel_mtp"):
        words = ["--module", "torchtitan.models.deepseek_v3", "--config", entry]
        words += ["--training.seq_len", "16", "--training.local_batch_size", "1"]
        config = load_config([*words, "--activation_checkpoint.type", "none"], world_size=1)
        config.model_spec.model.layers = config.model_spec.model.layers[:2]
        run = FakeRank(config, 1)
        nodes = compute_nodes(run.capture().graph)
        captured.append(sum(flops for flops, _ in map(flops_of, nodes)) / 16)
        counted.append(run.flops_per_token.torchtitan)
    assert counted[1] - counted[0] == pytest.approx(captured[1] - captured[0], rel=0.01)


def test_the_causal_count_has_half_of_the_attention():
    """By hand, of 8B at 65,536 tokens: 6 for each weight but the embedding's, and the attention."""
    config = load_config(["--config", "8b", "--training.seq_len", "65536"], world_size=8)
    run = FakeRank(config, 8)
    weights = 6 * (run.num_parameters - 128_256 * 4096)
    attention = 6 * 32 * 32 * (2 * 128) * 65_536
    assert run.flops_per_token == (weights + attention, weights + attention // 2)
