"""The models that ship repeat their layers: the extended graph is that of a full capture."""

import dataclasses

import pytest

from graph_trainer.core.capture.repetition.repeated_layers import repetition_in
from graph_trainer.core.capture.tracing.model_state import state_of
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.titan.config.load import load_config
from tests.unit.core.capture.conftest import reasons
from tests.unit.core.capture.equal_steps import assert_equal

__all__ = ["reasons"]  # the fixture

LAYERS = 5
SHORT = ("--training.seq_len", "64", "--training.local_batch_size", "1")
TENSOR = ("--parallelism.tensor_parallel_degree", "2")
EXPERTS = ("--parallelism.expert_parallel_degree", "2")
CONTEXT = ("--parallelism.context_parallel_degree", "2")
REPLICAS = ("--parallelism.data_parallel_replicate_degree", "2")
FULL, SELECTIVE = (("--activation_checkpoint.type", kind) for kind in ("full", "selective"))
EAGER = ("--compile.mode", "eager")  # torchtitan's own wrappers recompute while it is traced

CASES = [
    ("llama3", 3, ()),  # 256 rows over 3 ranks
    ("llama3", 4, (*REPLICAS, *FULL)),
    ("llama3", 4, (*TENSOR, *SELECTIVE)),
    ("llama3", 4, (*EAGER, *SELECTIVE)),
    ("qwen3", 4, TENSOR),
    ("deepseek_v3", 4, EXPERTS),
    ("deepseek_v3", 4, (*EXPERTS, *TENSOR)),
    ("deepseek_v3", 4, CONTEXT),
]
QUICK = (CASES[2], CASES[5])


def deep(family, ranks, flags):
    """A rank of the debug model with five layers after those of another kind."""
    words = ["--module", f"graph_trainer.{family}", "--config", "debugmodel", *SHORT, *flags]
    config = load_config(words, world_size=ranks)
    model = config.model_spec.model
    *others, last = model.layers
    kept = [layer for layer in others if type(layer) is not type(last)]
    if getattr(last, "moe", None) is not None:
        kept = [layer for layer in others if layer.moe is None]
    model.layers = [*kept, *(dataclasses.replace(last) for _ in range(LAYERS))]
    return FakeRank(config, ranks, ranks - 1, "cuda")


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c in QUICK else pytest.mark.full) for c in CASES],
    ids=lambda case: f"{case[0]}-{case[1]}-{' '.join(case[2])}",
)
def test_the_extended_graph_is_that_of_a_full_capture(case, reasons):
    run = deep(*case)
    repetition = repetition_in(run.model, state_of(run.model).tensors)
    assert repetition.periods == LAYERS
    part = run.capture()
    assert reasons.all() == []
    run.config.compile.full_capture = True
    assert_equal(part, run.capture())
