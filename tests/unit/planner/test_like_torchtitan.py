"""A plan of a mixture of experts as torchtitan runs it: what is recomputed, and what is not."""

from collections import Counter
from functools import cache

import pytest
import torch

from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.graph.annotations import counts_of, is_backward
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.simulation.runtimes import TORCHTITAN
from graph_trainer.planner.plan import make_plan
from graph_trainer.titan.config.load import load_config

RANKS = 4
MODELS = {"deepseek_v3": ("debugmodel", slice(1, 2)), "qwen3": ("debugmodel_moe", slice(1))}
"""Family -> config and the one layer that is planned, a mixture of experts."""

aten = torch.ops.aten


@cache
def planned(policy, degree, module="deepseek_v3"):
    config, layers = MODELS[module]
    words = ["--module", f"graph_trainer.{module}", "--config", config]
    words += ["--training.local_batch_size", "1", "--training.seq_len", "16"]
    words += ["--activation_checkpoint.type", policy]
    words += ["--parallelism.expert_parallel_degree", str(degree)]
    loaded = load_config(words, world_size=RANKS)
    model = loaded.model_spec.model
    model.layers = model.layers[layers]
    hardware = load_hardware("h100-sxm")
    return make_plan(loaded, RANKS, hardware, runtime=TORCHTITAN, every_pass=False)


def nodes_of(plan, target):
    return [n for n in plan.simulation.joint.graph.nodes if n.target is target]


@pytest.mark.parametrize("module", MODELS)
@pytest.mark.parametrize(
    ("policy", "recomputed"),
    [("none", []), ("selective", []), ("full", [None, "0", "0 back"])],
)
def test_exchanges_are_recomputed_as_the_policy_says(policy, recomputed, module):
    """Counts, tokens and results are sent in forward, gradients of the latter two in backward."""
    plan = planned(policy, 2, module)
    sent = [c.node for c in collectives(plan.simulation.joint) if c.kind == "all_to_all_single"]
    forward = [counts_of(node) for node in sent if not is_backward(node)]
    backward = [counts_of(node) for node in sent if is_backward(node)]
    assert forward == [None, "0", "0 back"]
    assert backward == [*recomputed, "0", "0 back"]


@pytest.mark.parametrize(("policy", "waits"), [("none", 1), ("selective", 1), ("full", 2)])
def test_the_host_waits_for_the_counts_of_each_exchange(policy, waits):
    """A copy that does not block, of what is sent, comes before the one of what arrives."""
    copies = [n for n in nodes_of(planned(policy, 2), aten._to_copy.default) if "cpu" in str(n)]
    copies = [
        node
        for node in nodes_of(planned(policy, 2), aten._to_copy.default)
        if node.kwargs.get("device") == torch.device("cpu")
    ]
    blocking = Counter(not node.kwargs.get("non_blocking", False) for node in copies)
    assert blocking == {False: waits, True: waits}
