"""Merged collectives: fewer of them, the same numbers, and never one with what it waits for."""

import functools
from itertools import cycle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

import graph_trainer as gt
from graph_trainer.core.analysis.collectives import collective_inputs
from graph_trainer.core.graph.annotations import (
    Role,
    bucket_tag,
    parameters_of,
    role_of,
    set_bucket_tag,
    tensors_of,
)
from graph_trainer.core.graph.ops import is_collective
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.passes.bucketing.assign import members_of
from graph_trainer.core.passes.bucketing.bucket_collectives import (
    BucketCollectivesOptions,
    bucket_collectives,
)
from graph_trainer.core.passes.bucketing.tag_buckets import tag_buckets
from graph_trainer.core.passes.verify_numbers import verify_values
from graph_trainer.errors import PassError
from graph_trainer.testing import Builder, assert_same, check_pass, fake_mesh, mean_square, run
from tests.examples import examples
from tests.unit.core.passes.bucketing.bucket_graphs import (
    STRATEGIES,
    bucket,
    collectives_of,
    counts,
    gathering,
)
from tests.unit.graphs import Decoder, aten, captured_decoder

BF16 = gt.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def prepared(policy="always", **decoder):
    """A decoder as it comes to bucketing."""
    joint = captured_decoder(**decoder)
    off = ["tag_buckets", "bucket_collectives", "schedule_overlap"]
    gt.run_passes(joint, gt.PassConfig(reshard_after_forward=policy, disable_passes=off))
    return joint


MESHES = {
    "hybrid_shard": {"world": (2, 2), "fsdp": {"mode": "hybrid_shard"}},
    "replicate": {"fsdp": {"mode": "replicate"}},
}


DECODERS = (
    {"world": 3},
    {"tied": True},
    {"checkpointed": True, "fsdp": {"mp_policy": BF16}},
    {"policy": "never", "fsdp": {"mp_policy": BF16, "gradient_divide_factor": 1.0}},
    {"world": 3, "rank": 2, "fsdp": {"mp_policy": BF16}},
)


@pytest.mark.parametrize(
    ("decoder", "options"),
    [
        *(({}, options) for options in STRATEGIES.values()),
        *zip(DECODERS, cycle(STRATEGIES.values()), strict=False),
    ],
)
def test_fewer_collectives_and_the_same_numbers(decoder, options):
    joint = prepared(layers=3, **decoder)
    before, plain = run(joint), counts(joint)
    tag_buckets(joint)
    assert check_pass(bucket_collectives, joint, BucketCollectivesOptions(**options))
    assert_same(before, run(joint))
    assert all(new <= old for new, old in zip(counts(joint), plain, strict=True))
    assert sum(counts(joint)) < sum(plain)
    verify_values(joint)


@pytest.mark.parametrize("mode", MESHES)
@pytest.mark.parametrize("options", STRATEGIES.values(), ids=STRATEGIES)
def test_reductions_over_several_meshes_shrink_as_well(mode, options):
    joint = prepared("default", layers=3, **MESHES[mode])
    before, plain = run(joint), counts(joint)
    bucket(joint, **options)
    assert_same(before, run(joint))
    assert counts(joint)[2] < plain[2]


@pytest.mark.parametrize("layers", [1, 5])
def test_a_block_is_a_bucket_of_each_kind(layers):
    joint = bucket(prepared(layers=layers), strategy="transformer_block")
    # the embedding, and the final norm with the head; backward does not read the embedding
    assert counts(joint) == (layers + 2, layers + 1, layers + 2)
    gathered = [set(parameters_of(n)) for n in collectives_of(joint, Role.UNSHARD, False)]
    assert {"embedding.weight"} in gathered
    assert {"norm.weight", "head.weight"} in gathered
    assert {f"layers.0.{n}.weight" for n in ("norm", "up", "down")} in gathered


@pytest.mark.parametrize("mode", MESHES)
def test_a_block_is_a_bucket_on_every_mesh(mode):
    joint = bucket(prepared("default", layers=3, **MESHES[mode]), strategy="transformer_block")
    gathers, again, reductions = counts(joint)
    # the last bucket stays unsharded by default
    assert (gathers, again) == ((5, 3) if mode == "hybrid_shard" else (0, 0))
    assert reductions == (10 if mode == "hybrid_shard" else 5)  # scattered, then reduced


def sizes(joint, role, backward):
    return [
        max(sum(t.nbytes for t in each) for each in (collective_inputs(n), tensors_of(n)))
        for n in collectives_of(joint, role, backward)
    ]


@functools.cache
def three_layers():
    return prepared(layers=3)


@examples(30)
@given(cap=st.floats(1e-4, 5e-3), span=st.integers(5, 400))
def test_buckets_are_as_full_as_they_may_be(cap, span):
    joint = copy_graph(three_layers())
    tag_buckets(joint)
    members = {m.parameter + m.route.tag: m for m in members_of(joint)}
    bucket_collectives(joint, BucketCollectivesOptions(strategy="size", cap_mib=cap, max_span=span))
    for role, backward, tag in (
        (Role.UNSHARD, False, "unshard_forward"),
        (Role.UNSHARD, True, "unshard_backward"),
        (Role.REDUCE_GRAD, True, "reduce_scatter_grad"),
    ):
        filled = [
            sorted((members[name + tag] for name in parameters_of(n)), key=lambda m: m.position)
            for n in collectives_of(joint, role, backward)
        ]
        for parts in filled:
            if len(parts) > 1:
                assert sum(m.bytes for m in parts) <= cap * 2**20
                assert parts[-1].span - parts[0].span <= span
        for parts, following in zip(filled, filled[1:], strict=False):
            too_large = sum(m.bytes for m in parts) + following[0].bytes > cap * 2**20
            too_far = following[0].span - parts[0].span > span
            assert too_large or too_far


def test_the_payload_is_in_the_order_of_the_parameters():
    joint = bucket(prepared(layers=3), strategy="size")
    registered = [i.name for i in joint.signature.inputs]
    for node in joint.graph.nodes:
        if is_collective(node) and role_of(node) is not None:
            order = [registered.index(name) for name in parameters_of(node)]
            assert order == sorted(order)
            (packed,) = node.all_input_nodes
            while packed.target is not aten.cat.default:
                (packed,) = packed.all_input_nodes
            assert [name for n in packed.all_input_nodes for name in parameters_of(n)] == list(
                parameters_of(node)
            )


def test_none_changes_nothing():
    joint = prepared()
    tag_buckets(joint)
    assert not check_pass(bucket_collectives, joint, BucketCollectivesOptions(strategy="none"))


def test_a_bucket_is_cast_as_a_whole():
    def casts(joint):
        return sum(
            n.target is aten._to_copy.default and role_of(n) is Role.REDUCE_GRAD
            for n in joint.graph.nodes
        )

    joint = prepared(fsdp={"mp_policy": BF16, "gradient_divide_factor": 1.0})
    reductions = counts(joint)[2]
    assert casts(joint) == reductions
    bucket(joint, strategy="transformer_block")
    assert casts(joint) == counts(joint)[2] < reductions


def test_a_member_is_as_large_as_the_larger_of_what_it_reads_and_makes():
    joint = prepared(layers=1)
    tag_buckets(joint)
    for member in members_of(joint):
        (made,), (sent,) = tensors_of(member.node), collective_inputs(member.node)
        assert made.numel() != sent.numel()
        assert member.bytes == 4 * max(made.numel(), sent.numel())


def test_tags_survive_a_split_of_the_graph():
    joint = prepared()
    tag_buckets(joint)
    tags = [bucket_tag(n) for n in joint.graph.nodes if is_collective(n)]
    copy = fx.Graph()
    copy.output(copy.graph_copy(joint.graph, {}))
    assert [bucket_tag(n) for n in copy.nodes if is_collective(n)] == tags
    assert {*tags} == {"unshard_forward", "unshard_backward", "reduce_scatter_grad"}


def test_a_forward_only_graph_is_bucketed():
    model = gt.simple_fsdp(Decoder(3), fake_mesh())
    batch = (torch.zeros(2, 3, dtype=torch.int64),)
    joint = gt.capture(model, mean_square, batch, backward=False)
    before = run(joint)
    bucket(joint, strategy="transformer_block")
    assert counts(joint) == (5, 0, 0)
    assert_same(before, run(joint))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "blocks"}, "must be one of none, size"),
        ({"strategy": "transformer"}, "did you mean 'transformer_block'"),
        ({"cap_mib": 0}, "cap_mib is 0"),
        ({"cap_mib": float("nan")}, "cap_mib is nan"),
        ({"max_span": 0}, "max_span is 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(PassError, match=message):
        BucketCollectivesOptions(**options)


def test_a_collective_without_a_group():
    joint = gathering(Builder(), [("layers.0.p", "", torch.float32)])
    set_bucket_tag(next(n for n in joint.graph.nodes if is_collective(n)), "unshard_forward")
    with pytest.raises(PassError, match="names no process group"):
        bucket_collectives(joint, BucketCollectivesOptions(strategy="size"))


def test_forward_and_backward_never_share_a_bucket():
    joint = bucket(prepared(layers=1), strategy="size", cap_mib=1000, max_span=10**6)
    # one in each direction, however large the cap
    assert counts(joint) == (1, 1, 1)
