"""Context parallelism: attention of all ranks against the whole sequence, and what is captured."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.experimental._attention import _HeadTailLoadBalancer

import graph_trainer as gt
from graph_trainer.core.analysis.collective_purpose import Traffic, traffic_of
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.analysis.memory import Category, memory_of
from graph_trainer.core.graph.annotations import block_of
from graph_trainer.core.ordering.sequences import issued_by
from graph_trainer.core.sharding import context_parallel
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.errors import ConfigError
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.planner.plan import make_plan
from graph_trainer.planner.plan_report import readable_report
from graph_trainer.titan.config.check import check_config
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.parallelize_context import applied_method, apply_context_parallel
from tests.unit.fake_ranks import in_threads

from torchtitan.models.common.attention import ScaledDotProductAttention  # isort: skip

SEQUENCE, LAYERS = 32, 2


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        attention = ScaledDotProductAttention(ScaledDotProductAttention.Config())
        self.layers = nn.ModuleList([attention])

    def forward(self, q, k, v, *, positions, attention_masks=None):
        options = {"attention_masks": attention_masks, "scale": 0.3}
        return self.layers[0](q, k, v, enable_gqa=q.shape[2] > k.shape[2], **options)


def attend(model, tensors, positions):
    """Output and gradients of a model that attends."""
    inputs = [t.clone().requires_grad_() for t in tensors]
    out = model(*inputs, positions=positions)
    weight = torch.arange(out.shape[-1], dtype=out.dtype)
    (out.sin() * weight).sum().backward()
    return [out.detach(), *(t.grad for t in inputs)]


def on_ranks(ranks, method, tensors, positions, **options):
    """Attend on every rank, in a thread each, with collectives among the threads."""
    order = _HeadTailLoadBalancer(SEQUENCE, ranks, "cpu")._generate_indices().flatten()

    def everyone(tensor):
        found = [None] * ranks
        dist.all_gather_object(found, tensor.detach(), None)
        return found

    def local(blocks):
        return blocks.chunk(ranks)[dist.get_rank()]

    def run(rank):
        mine = order.chunk(ranks)[rank]
        model = Attends()
        group = SimpleNamespace(size=lambda: ranks, rank=lambda: rank)
        apply_context_parallel(model, group, method, torch.float64, **options)
        return attend(model, [t[:, mine] for t in tensors], positions[:, mine])

    with mock.patch.multiple(
        context_parallel,
        annotate=lambda entry: contextlib.nullcontext(),  # it writes to a global
        all_gather=lambda t, group: torch.cat(everyone(t)),
        reduce_scatter=lambda t, group: local(sum(everyone(t))),
        all_to_all=lambda t, group: torch.cat([local(other) for other in everyone(t)]),
    ):
        found = in_threads(ranks, run)
    for each in found:
        if isinstance(each, Exception):
            raise each
    return [torch.cat(parts, dim=1)[:, order.argsort()] for parts in zip(*found, strict=True)]


def some_tensors(heads, key_heads, value_size):
    torch.manual_seed(0)
    sizes = ((heads, 6), (key_heads, 6), (key_heads, value_size))
    return [torch.randn(len(DOCUMENTS), SEQUENCE, *s, dtype=torch.float64) for s in sizes]


def each_document(tensors):
    """Attend within each document alone."""
    results = [torch.zeros_like(t) for t in (tensors[0][..., : tensors[2].shape[-1]], *tensors)]
    for row, lengths in enumerate(DOCUMENTS):
        start = 0
        for length in lengths:
            place = slice(row, row + 1), slice(start, start + length)
            parts = attend(Attends(), [t[place] for t in tensors], None)
            for result, part in zip(results, parts, strict=True):
                result[place] = part
            start += length
    return results


# lengths of the documents of each row; most cross the border of a chunk, of 4 to 16 tokens
DOCUMENTS = ([32], [5, 11, 15, 1], [1, 2, 27, 2])
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
METHODS = pytest.mark.parametrize("method", ["all_gather", "ulysses"])


@pytest.mark.parametrize("ranks", [2, 4])
@METHODS
@pytest.mark.parametrize(
    ("heads", "key_heads", "value_size"), [(4, 4, 6), (8, 4, 6), (4, 4, 5)], ids=str
)
def test_ranks_attend_as_one(ranks, method, heads, key_heads, value_size):
    """Multi-head, grouped-query, and the latent attention's smaller values."""
    tensors = some_tensors(heads, key_heads, value_size)
    found = on_ranks(ranks, method, tensors, POSITIONS)
    assert_close(found, attend(Attends(), tensors, POSITIONS))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@METHODS
def test_documents_stay_apart(ranks, method):
    tensors = some_tensors(8, 4, 6)
    if ranks == 1:
        model = Attends()
        apply_context_parallel(model, None, method, torch.float64, document_mask=True)
        found = attend(model, tensors, POSITIONS)
    else:
        found = on_ranks(ranks, method, tensors, POSITIONS, document_mask=True)
    assert_close(found, each_document(tensors))


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def config_of(*flags, base=(), degree=2):
    words = [*base, "--training.seq_len", "64", "--training.local_batch_size", "1"]
    words += ["--parallelism.data_parallel_shard_degree", "1"]
    words += ["--training.mixed_precision_param", "bfloat16"]
    config = load_config([*words, "--parallelism.context_parallel_degree", str(degree), *flags])
    config.model_spec.model.layers = config.model_spec.model.layers[:LAYERS]
    return config


def captured(*flags, rank=0, method="all_gather", **how):
    """A rank's graph after the passes of its config, its collectives, and the report."""
    config = config_of(*flags, "--parallelism.context_parallel_method", method, **how)
    degree = config.parallelism.context_parallel_degree
    fake = FakeRank(config, degree, rank, "cpu")
    joint = fake.capture()
    report = gt.run_passes(joint, fake.pass_config())
    return joint, collectives(joint), report


def attention_of(found):
    """Block, kind and phase of the collectives of context parallelism."""
    traffic = traffic_of(found)
    ours = [c for c in found if traffic[c.node] is Traffic.CONTEXT_PARALLEL]
    return sorted((block_of(c.module), c.kind, c.phase.value) for c in ours)


def by_layer(per_layer):
    return [(f"layers.{n}", *each) for n in range(LAYERS) for each in per_layer]


GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"


def test_fsdp_and_attention_overlap_over_the_same_ranks():
    joint, found, report = captured()
    assert attention_of(found) == by_layer([(GATHER, "forward"), (SCATTER, "backward")])
    assert {c.ranks for c in found} == {(0, 1)}
    # The schedule moves both: the next layer's parameters are gathered ahead of keys and values.
    traffic = traffic_of(found)
    order = [(traffic[c.node], block_of(c.module)) for c in found]
    assert order.index((Traffic.UNSHARD, "layers.1")) < order.index(
        (Traffic.CONTEXT_PARALLEL, "layers.0")
    )
    (moved,) = [row.remarks[0] for row in report.rows if row.name == "schedule_overlap"]
    assert "unshard: 0 of" not in moved and "context parallel: 0 of" not in moved
    # Every rank has the same graph but for where its queries are in the sequence.
    other, *_ = captured(rank=1)
    assert [n.target for n in joint.graph.nodes] == [n.target for n in other.graph.nodes]
    assert [e.entry for e in issued_by(joint, 2)] == [e.entry for e in issued_by(other, 2)]


def test_what_is_recomputed_gathers_again():
    _, found, _ = captured("--activation_checkpoint.type", "full")
    per_layer = [(GATHER, "backward"), (GATHER, "forward"), (SCATTER, "backward")]
    assert attention_of(found) == [
        (f"layers.{n}", *each) for n in range(LAYERS) for each in per_layer
    ]


ALL_TO_ALL = "all_to_all_single"
KINDS = {
    "all_gather": [(GATHER, "forward"), (SCATTER, "backward")],
    "ulysses": [(ALL_TO_ALL, "backward")] * 2 + [(ALL_TO_ALL, "forward")] * 2,
}


@pytest.mark.parametrize(("degree", "method"), [(2, "ulysses"), (32, "all_gather")])
def test_heads_are_exchanged_by_default_where_they_divide(degree, method, caplog):
    """The log and the plan say which method it is."""
    with caplog.at_level("INFO"):
        plan = make_plan(config_of(degree=degree), degree, load_hardware("cpu"), every_pass=False)
    assert attention_of(collectives(plan.simulation.joint)) == by_layer(KINDS[method])
    assert f"Applied context parallelism ({method})" in caplog.text
    report = readable_report(plan)
    assert report["context_parallel_method"] == method and method in report["settings"]


@pytest.mark.parametrize(
    ("heads", "key_heads", "tensor", "method"),
    [
        (8, 8, 2, "ulysses"),
        (8, 8, 4, "all_gather"),
        (8, 2, 1, "all_gather"),
        (8, None, 2, "ulysses"),
    ],
)
def test_heads_of_queries_and_keys_divide_after_tensor_parallelism(
    heads, key_heads, tensor, method
):
    layer = SimpleNamespace(attention=SimpleNamespace(n_heads=heads, n_kv_heads=key_heads))
    layers = [SimpleNamespace(), layer]
    assert applied_method("auto", layers, 4, tensor) == method


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_other_families_attend_too(family):
    base = ["--module", f"graph_trainer.{family}", "--config", "debugmodel"]
    _, found, _ = captured(base=base)
    assert [c[1] for c in attention_of(found)] == [GATHER, SCATTER] * LAYERS


# A gather keeps whole keys and values, and the mask; both methods more views of what attention
# reads. That what is predicted is alive on real ranks, tests/integration/test_predicted_memory.py
# measures.
@pytest.mark.parametrize(
    ("method", "more"), [("ulysses", {2: 0.03, 4: 0.03}), ("all_gather", {2: 0.07, 4: 0.18})]
)
def test_activations_fall_with_the_degree(method, more):
    """What is alive between forward and backward is this rank's part of the sequence."""
    saved = {}
    for degree in (1, 2, 4):
        joint, *_ = captured("--training.seq_len", "256", method=method, degree=degree)
        saved[degree] = max(memory_of(joint).by_category[Category.ACTIVATIONS])
    for degree, part in more.items():
        assert 1 <= degree * saved[degree] / saved[1] <= 1 + part


def without_attention(model):
    model.layers[1].attention.inner_attention = None


def with_predictions(model):
    model.mtp_layers = [model.layers[1]]


def with_other_attention(model):
    model.norm = ScaledDotProductAttention.Config()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_other_attention, "attention beside its layers"),
        (with_predictions, "predicts several tokens"),
        (without_attention, "layers.1 has no scaled dot product attention"),
    ],
)
def test_models_that_cannot_be_split_are_refused(change, said):
    config = config_of(base=["--module", "graph_trainer.deepseek_v3", "--config", "debugmodel"])
    check_config(config, 2)  # the model as it is
    change(config.model_spec.model)
    with pytest.raises(ConfigError, match=said) as caught:
        check_config(config, 2)
    assert ("attention beside" in str(caught.value)) == (change is with_other_attention)
