"""What a fake rank counts of the model that it builds, and which ops it captures."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from graph_trainer.core.graph.joint_graph import compute_nodes
from graph_trainer.core.partition.cut import cut
from graph_trainer.core.simulation.op_costs import flops_of
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.titan.config.load import load_config

aten = torch.ops.aten
BACKWARD = aten._fused_rms_norm_backward.default


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


@pytest.mark.parametrize("degree", [1, 2])
def test_a_gpu_has_a_kernel_for_an_rms_norm(degree):
    """Sharded by tensor parallelism too. It saves its input, and one number of each row."""
    words = ["--config", "debugmodel", "--parallelism.tensor_parallel_degree", str(degree)]
    config = load_config(words, world_size=2)
    layers = len(config.model_spec.model.layers)
    saved = {}
    for fused in (True, False):
        joint = FakeRank(config, 2, fuses_norms=fused).capture()
        forward = joint.graph.find_nodes(op="call_function", target=aten._fused_rms_norm.default)
        assert len(forward) == (2 * layers + 1 if fused else 0)
        for norm in forward:
            (backward,) = (user for user in norm.args[0].users if user.target is BACKWARD)
            assert backward.args[1] is norm.args[0]
            assert aliased(backward.args[3]) is norm
        saved[fused] = cut(joint).saved_bytes()
    assert saved[True] < saved[False]


def aliased(node: fx.Node) -> fx.Node:
    """The op that made an element of its results."""
    return node.args[0] if node.target is operator.getitem else node
