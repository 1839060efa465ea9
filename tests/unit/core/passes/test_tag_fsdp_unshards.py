"""Which chains are kept and which are gathered again, by policy."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

import graph_trainer as gt
from graph_trainer.core.analysis.unshard_chains import unshard_chains
from graph_trainer.core.graph.annotations import (
    FSDP_AC_GRAPH_ID,
    recompute_policy,
    set_recompute_policy,
)
from graph_trainer.core.passes.context import PassContext, RunSettings
from graph_trainer.core.passes.deduplicate_unshards import deduplicate_unshards
from graph_trainer.core.passes.tag_fsdp_unshards import tag_fsdp_unshards
from graph_trainer.testing import captured, check_pass
from tests.unit.graphs import Decoder, aten, c10d, captured_decoder

SAVE, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE

LAYERS = {f"layers.{i}.{name}.weight" for i in range(2) for name in ("norm", "up", "down")}
LAST = {"norm.weight", "head.weight"}


def tag(joint, policy="default", **settings):
    """Tag, and say what each chain that backward reads was given: one tag a chain."""
    deduplicate_unshards(joint)
    context = PassContext(settings=RunSettings(reshard_after_forward=policy, **settings))
    check_pass(tag_fsdp_unshards, joint, context=context)
    found = {}
    for chain in unshard_chains(joint):
        policies = {recompute_policy(n) for n in chain.nodes}
        assert len(policies) == 1, f"{chain.parameter}: only part of the chain is tagged"
        found[chain.parameter] = policies.pop()
    return found


def of_policy(found, policy):
    return {name for name, each in found.items() if each is policy}


@pytest.mark.parametrize(
    ("decoder", "settings", "saved", "again"),
    [
        ({}, {"policy": "always"}, set(), LAYERS | LAST),
        ({}, {"policy": "never"}, LAYERS | LAST, set()),
        ({}, {}, LAST, LAYERS),
        ({"tied": True}, {}, {"norm.weight", "embedding.weight"}, LAYERS),
        ({"checkpointed": True}, {}, LAST, LAYERS),
        ({}, {"pipeline_parallel": True}, LAYERS | LAST, set()),
        ({}, {"policy": "always", "pipeline_parallel": True}, set(), LAYERS | LAST),
    ],
)
def test_what_is_kept_and_what_is_gathered_again(decoder, settings, saved, again):
    found = tag(captured_decoder(**decoder), **settings)
    assert of_policy(found, SAVE) == saved and of_policy(found, RECOMPUTE) == again


def test_a_model_without_blocks_keeps_the_module_it_reads_last():
    linear = nn.Linear(4, 4)
    model = nn.Sequential(OrderedDict(encode=linear, relu=nn.ReLU(), decode=nn.Linear(4, 4)))
    found = tag(captured(model, torch.randn(2, 4)))
    # x is not a parameter: backward does not read encode, nor any bias
    assert of_policy(found, SAVE) == {"decode.weight"} and not of_policy(found, RECOMPUTE)


def test_a_sequential_keeps_its_last_module():
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)])
    assert of_policy(tag(captured(model, torch.randn(2, 4))), RECOMPUTE) == {"1.weight", "2.weight"}


def test_a_frozen_parameter_is_gathered_again_where_backward_reads_it():
    model = Decoder()
    model.layers["1"].up.weight.requires_grad_(False)
    joint = captured(model, torch.zeros(2, 3, dtype=torch.int64))
    assert "layers.1.up.weight" in of_policy(tag(joint), RECOMPUTE)


def test_the_whole_chain_is_tagged_with_casts_padding_and_transposes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False))
    policy = gt.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    joint = captured(model, torch.randn(2, 5).bfloat16(), rank=2, mp_policy=policy)
    tag(joint, "always")
    (chain,) = [c for c in unshard_chains(joint) if c.parameter == "1.weight"]
    ops = [n.target for n in chain.nodes]
    for op in (aten._to_copy, aten.cat, aten.slice, aten.t):
        assert any(getattr(found, "overloadpacket", None) is op for found in ops), op
    assert c10d.wait_tensor.default in ops
    assert {recompute_policy(n) for n in chain.nodes} == {RECOMPUTE}


@pytest.mark.parametrize("mine", [SAVE, RECOMPUTE])
@pytest.mark.parametrize("policy", ["always", "never"])
def test_a_decision_of_the_users_wins(policy, mine):
    joint = captured_decoder()
    chain = unshard_chains(joint)[2]
    set_recompute_policy(chain.nodes[0], mine, ac_graph_id=7)
    tag_fsdp_unshards(
        joint, context=PassContext(settings=RunSettings(reshard_after_forward=policy))
    )
    assert recompute_policy(chain.nodes[0]) is mine
    assert chain.nodes[0].meta["ac_graph_id"] == 7


@pytest.mark.parametrize(
    "preference", [CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.PREFER_RECOMPUTE]
)
def test_a_preference_is_overwritten(preference):
    joint = captured_decoder()
    for chain in unshard_chains(joint):
        for node in chain.nodes:
            set_recompute_policy(node, preference, ac_graph_id=7)
    assert of_policy(tag(joint), RECOMPUTE) == LAYERS


def test_tags_have_a_checkpoint_region_of_their_own():
    joint = captured_decoder()
    tag(joint)
    ids = {n.meta["ac_graph_id"] for n in joint.graph.nodes if recompute_policy(n) is not None}
    assert ids == {FSDP_AC_GRAPH_ID} and min(ids) > 2**32


def test_an_unknown_policy_names_the_nearest():
    with pytest.raises(gt.PassError, match="'allways'.*did you mean 'always'"):
        PassContext(settings=RunSettings(reshard_after_forward="allways"))
