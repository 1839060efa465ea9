"""Parameters, gradients and optimizer state of DeepSeek V3 671B on 2,048 ranks, counted by hand."""

from __future__ import annotations

import math

import pytest

from graph_trainer.core.analysis.memory import given_bytes
from graph_trainer.core.graph.signature import InputKind
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.training_state_memory import local_bytes, optimizer_bytes, trained_bytes

RANKS, EXPERT_RANKS = 2048, 64
DENSE_LAYERS, LAYERS = 3, 61

# the model's paper, arXiv 2412.19437, section 4.2
DIM, VOCABULARY, HEADS, HIDDEN = 7168, 129280, 128, 18432
QUERY_RANK, KEY_RANK, KEY, ROPE, VALUE = 1536, 512, 128, 64, 128
EXPERTS, EXPERT_HIDDEN = 256, 2048

ATTENTION = [
    (QUERY_RANK, DIM),
    (QUERY_RANK,),
    (HEADS * (KEY + ROPE), QUERY_RANK),
    (KEY_RANK + ROPE, DIM),
    (KEY_RANK,),
    (HEADS * (KEY + VALUE), KEY_RANK),
    (DIM, HEADS * VALUE),
    (DIM,),  # norms before attention and feed-forward
    (DIM,),
]


def feed_forward(hidden):
    return [(hidden, DIM), (DIM, hidden), (hidden, DIM)]


def elements(shapes):
    """Of a rank's shards, in rows, of tensors of these shapes: (those of rank 0, of the last)."""
    first = last = 0
    for rows, *columns in shapes:
        width = columns[0] if columns else 1
        part = -(-rows // RANKS)  # as torch.chunk splits
        first += part * width
        last += max(0, rows - part * (RANKS - 1)) * width
    return first, last


def without_experts(dense_layers, expert_layers):
    """The shapes of all parameters but those of routed experts."""
    shapes = [(VOCABULARY, DIM), (DIM,), (VOCABULARY, DIM)]
    shapes += dense_layers * (ATTENTION + feed_forward(HIDDEN))
    return shapes + expert_layers * (ATTENTION + [(EXPERTS, DIM)] + feed_forward(EXPERT_HIDDEN))


def state_bytes(dense_layers, expert_layers, rank):
    """What the parameters of a rank take in float32."""
    whole = without_experts(dense_layers, expert_layers)
    # a rank has the experts of 64 ranks, and of each matrix what 32 ranks leave it
    copies = RANKS // EXPERT_RANKS
    assert EXPERT_HIDDEN % copies == DIM % copies == 0
    experts = 3 * EXPERTS // EXPERT_RANKS * EXPERT_HIDDEN * DIM // copies
    return 4 * (elements(whole)[rank > 0] + expert_layers * experts)


def fake_rank(rank, layers=slice(None)):
    words = ["--module", "graph_trainer.deepseek_v3", "--config", "671b"]
    words += ["--parallelism.expert_parallel_degree", str(EXPERT_RANKS)]
    words += ["--training.seq_len", "64"]
    config = load_config(words, world_size=RANKS)
    config.model_spec.model.layers = config.model_spec.model.layers[layers]
    return FakeRank(config, RANKS, rank)


@pytest.mark.parametrize("rank", [0, RANKS - 1])
def test_all_layers(rank):
    fake = fake_rank(rank)
    number = sum(map(math.prod, without_experts(DENSE_LAYERS, LAYERS - DENSE_LAYERS)))
    number += (LAYERS - DENSE_LAYERS) * EXPERTS * 3 * EXPERT_HIDDEN * DIM
    assert fake.num_parameters == number
    expected = state_bytes(DENSE_LAYERS, LAYERS - DENSE_LAYERS, rank)
    assert local_bytes(fake.model.parameters()) == expected


def test_what_a_plan_predicts_of_a_layer_of_each_kind():
    fake = fake_rank(0, slice(DENSE_LAYERS - 1, DENSE_LAYERS + 1))
    joint = fake.capture()
    expected = state_bytes(1, 1, 0)
    assert given_bytes(joint, InputKind.PARAMETER) == trained_bytes(joint) == expected
    assert optimizer_bytes(joint, fake.config) == 2 * expected
