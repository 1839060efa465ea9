"""A setting acts or is refused: none is without effect because a pass is not in the list."""

from collections import Counter
from dataclasses import fields, replace
from typing import get_args

import pytest
import torch
from torch import nn

import graph_trainer as gt
from graph_trainer.core.graph.annotations import is_backward, module_of, parameters_of, role_of
from graph_trainer.core.graph.ops import is_collective
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.ordering.agreement import OneRank
from graph_trainer.core.passes.bucketing.bucket_collectives import BucketCollectivesOptions
from graph_trainer.core.passes.catalogue import idle_fields, registered_passes
from graph_trainer.core.passes.context import ActivationPolicy, ReshardAfterForward, RunSettings
from graph_trainer.core.passes.pipeline import PassConfig, with_policy
from graph_trainer.core.passes.plan_memory.table import MemoryTable
from graph_trainer.core.passes.tag_activations import TagActivationsOptions
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.simulation.simulate import simulate
from graph_trainer.core.units import GIB
from graph_trainer.testing import Builder, captured
from tests.unit.graphs import SCATTER, Decoder, aten, captured_decoder

# without a reserve and pages: a limit may be a few KiB
MACHINE = replace(load_hardware("h100-sxm"), device="cpu", memory_reserved_gib=0.0)
BY_DEFAULT = [p.name for p in registered_passes().values() if p.default]


def small():
    b = Builder()
    return b.joint(b.total(b.call(aten.mul.Tensor, b.input("x", 4), 2)))


def without(*names):
    return [name for name in BY_DEFAULT if name not in names]


def moved(name, *, behind):
    names = without(name)
    names.insert(names.index(behind) + 1, name)
    return names


@pytest.mark.parametrize(
    ("setting", "value", "passes", "words"),
    [
        *(
            ("reshard_after_forward", value, without(missing), [missing, "'never'"])
            for value in ("default", "always", "auto")
            for missing in ("tag_fsdp_unshards", "rematerialize")
        ),
        ("reshard_after_forward", "auto", without("plan_memory"), ["plan_memory"]),
        *(
            ("activation_policy", value, without(missing), [missing, "'none'"])
            for value in ("selective", "full", "layers")
            for missing in ("tag_activations", "rematerialize")
        ),
        *(
            ("activation_policy", "budget", without(missing), [missing])
            for missing in ("plan_memory", "rematerialize")
        ),
        *(
            (
                *("activation_policy", "budget", moved("plan_memory", behind=tag)),
                ["plan_memory is listed after tag_", 'Put "plan_memory" in front of'],
            )
            for tag in ("tag_activations", "tag_fsdp_unshards")
        ),
        (
            *("activation_policy", "full", moved("tag_activations", behind="tag_fsdp_unshards")),
            ["tag_activations is listed after tag_fsdp_unshards"],
        ),
        (
            *("activation_policy", "full", moved("rematerialize", behind="offload_activations")),
            ["rematerialize is listed after offload_activations"],
        ),
        ("allow_offload", True, without("offload_activations"), ["offload_activations", "False"]),
    ],
)
def test_a_value_without_its_passes_is_refused_with_both_remedies(setting, value, passes, words):
    with pytest.raises(gt.PassError, match=f"{setting} = {value!r} has no effect: the pass") as e:
        gt.run_passes(small(), PassConfig(passes=passes, **{setting: value}))
    for word in (*words, f"or set {setting} to", "compile.passes"):
        assert word in str(e.value)


def test_a_table_that_offloads_needs_the_pass_that_does():
    table = MemoryTable((), None, ("layers.0",))
    config = PassConfig(
        activation_policy="file", memory_table=table, disable_passes=["offload_activations"]
    )
    with pytest.raises(gt.PassError, match="memory_table.offloaded = True has no effect"):
        gt.run_passes(small(), config)


def test_the_remedy_knows_a_list_of_what_is_left_out():
    config = PassConfig(reshard_after_forward="always", disable_passes=["rematerialize"])
    remedy = 'Take "rematerialize" out of compile.disable_passes, or set reshard_after_forward to'
    with pytest.raises(gt.PassError, match=remedy):
        gt.run_passes(small(), config)


def test_what_is_unset_asks_for_nothing():
    gt.run_passes(small(), PassConfig(passes=["eliminate_dead_code"]))
    joints = [captured_decoder(layers=1) for _ in range(4)]
    configs = [
        *(PassConfig(), PassConfig(reshard_after_forward="default")),
        *(
            PassConfig(passes=without("rematerialize"), reshard_after_forward=policy)
            for policy in (None, "never")
        ),
    ]
    for joint, config in zip(joints, configs, strict=True):
        gt.run_passes(joint, config)
    assert gathered_again(joints[0]) == gathered_again(joints[1]) != []
    assert gathered_again(joints[2]) == gathered_again(joints[3]) == []


def test_a_pass_of_a_users_own_may_carry_out_a_value():
    tag = gt.graph_pass(
        stage=gt.Stage.TAG,
        summary="Tag parameters in another way",
        required_for={"reshard_after_forward": ("always",)},
        relies_on=("rematerialize",),
    )(lambda joint, options, context: None)
    config = PassConfig(passes=[tag, "rematerialize"], reshard_after_forward="always")
    gt.run_passes(small(), config)
    with pytest.raises(gt.PassError, match="pass rematerialize is not in compile.passes"):
        gt.run_passes(small(), replace(config, passes=[tag]))


class Offloads(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        with gt.offload():
            x = self.linear(x).tanh()
        return self.linear(x)


def test_an_offload_of_the_model_needs_its_pass():
    joint = captured(Offloads(), torch.randn(2, 4))
    refused = "gt.offload = True has no effect: the pass offload_activations .* of the model"
    with pytest.raises(gt.PassError, match=refused):
        gt.run_passes(joint, PassConfig(disable_passes=["offload_activations"]))
    gt.run_passes(joint)
    gt.run_passes(joint, PassConfig(passes=["schedule_overlap"]))  # it has been carried out


@pytest.mark.parametrize("given", [{"strategy": "size"}, TagActivationsOptions(matmuls="keep")])
def test_options_of_another_class_are_refused(given):
    kind = type(given).__name__
    refused = f"options of 'bucket_collectives' are a {kind}; it takes a BucketCollectivesOptions"
    with pytest.raises(gt.PassError, match=refused):
        gt.run_passes(small(), PassConfig(options={"bucket_collectives": given}))


@pytest.mark.parametrize("options", [{"strategy": "size"}, {}], ids=["changed", "as by default"])
def test_options_need_what_their_pass_relies_on(options):
    given = {"bucket_collectives": BucketCollectivesOptions(**options)}
    with pytest.raises(gt.PassError, match="pass tag_buckets is not in compile.passes"):
        gt.run_passes(small(), PassConfig(passes=["bucket_collectives"], options=given))


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"allow_offload": True}, "'budget'"),
        ({"memory_table": MemoryTable((), None, ())}, "'file'"),
        ({"activation_policy": "full", "recompute_every_nth_block": 3}, "'layers'"),
        ({"activation_policy": "full", "recompute_matmuls_of": ("up",)}, "'selective'"),
        ({"options": {"tag_activations": TagActivationsOptions(matmuls="keep")}}, "'selective'"),
        (
            {"options": {"tag_activations": TagActivationsOptions(regather="always")}},
            "'selective' or 'full' or 'layers'",
        ),
        ({"options": {"bucket_collectives": BucketCollectivesOptions(cap_mib=5.0)}}, "'size'"),
        (
            {"options": {"bucket_collectives": BucketCollectivesOptions(max_span=9)}},
            "'size' or 'auto'",
        ),
    ],
)
def test_what_no_other_field_reads_is_refused(given, remedy):
    (name,) = (given.get("options") or {"": None}).keys()
    with pytest.raises(gt.PassError, match=f"has no effect. Set .* to {remedy}, or leave"):
        gt.run_passes(small(), PassConfig(**given))
    assert not name or name in registered_passes()


@pytest.mark.parametrize("policy", get_args(ActivationPolicy))
def test_another_policy_is_told_nothing_that_it_does_not_read(policy):
    table = MemoryTable((), None, ())
    before = PassConfig(
        activation_policy="layers",
        recompute_every_nth_block=3,
        options={"tag_activations": TagActivationsOptions(regather="never")},
    )
    after = with_policy(before, policy, **({"memory_table": table} if policy == "file" else {}))
    assert after.activation_policy == policy
    settings = {each.name: getattr(after, each.name) for each in fields(RunSettings)}
    assert not list(idle_fields(settings, after.options))
    if policy == "layers":
        assert after == before


# --- every value of every setting, every pass ------------------------------------------------


def gathered_again(joint):
    return sorted(
        name
        for n in joint.graph.nodes
        if role_of(n) == "unshard" and is_collective(n) and is_backward(n)
        for name in parameters_of(n)
    )


def computed_in_backward(joint):
    ops = (aten.mm.default, aten.relu.default, aten.rsqrt.default)
    return Counter(
        (module_of(n), n.target) for n in joint.graph.nodes if is_backward(n) and n.target in ops
    )


def reductions(joint):
    return sum(n.target is SCATTER for n in joint.graph.nodes)


NEVER = PassConfig(reshard_after_forward="never", hardware=MACHINE)
LAYERS = replace(NEVER, activation_policy="layers")
ASKED = {
    "reshard_after_forward": (NEVER, [None, *get_args(ReshardAfterForward)], gathered_again),
    "activation_policy": (NEVER, get_args(ActivationPolicy), computed_in_backward),
    "recompute_matmuls_of": (
        replace(NEVER, activation_policy="selective"),
        [(), ("up",)],
        computed_in_backward,
    ),
    "recompute_every_nth_block": (LAYERS, [1, 2], computed_in_backward),
    "pipeline_parallel": (PassConfig(reshard_after_forward="default"), [True], gathered_again),
    "bitwise": (NEVER, [True], reductions),
}
"""By setting: a config, its values, and what they change in a graph."""
ACTING = ("tag_activations", "plan_memory", "tag_fsdp_unshards", "rematerialize", "tag_buckets")
"""Passes that carry out a setting, and tag_buckets, which no setting needs."""
ELSEWHERE = {
    *("memory_table", "allow_offload"),  # with the policies that read them
    *("hardware", "memory_limit_gib", "other_memory"),  # the pipeline's own, whatever the list
}


def test_every_setting_is_tried():
    assert {f.name for f in fields(RunSettings)} == ASKED.keys() | ELSEWHERE


def carried_out(joint, config):
    made = copy_graph(joint)
    gt.run_passes(made, config, agreement=OneRank())
    return made


def between(joint, *configs):
    """A limit between the needs of two configs, in GiB."""
    needs = [simulate(carried_out(joint, config), MACHINE).need().total for config in configs]
    assert needs[0] < needs[1]
    return sum(needs) / 2 / GIB


@pytest.mark.full
@pytest.mark.parametrize(
    ("setting", "value"), [(name, value) for name, (_, values, _) in ASKED.items()
                           for value in values],
)  # fmt: skip
def test_without_any_one_pass_a_value_is_refused_or_acts_as_before(setting, value):
    # most is in parameters where these are to be gathered again, else in activations
    batch = 2 if value == "auto" else 32
    joint = captured(Decoder(), torch.zeros(batch, 16, dtype=torch.int64))
    config, _, effect = ASKED[setting]
    if value == "auto":
        always = replace(config, reshard_after_forward="always")
        config = replace(config, memory_limit_gib=between(joint, always, config))
    if value in ("budget", "file"):
        full = replace(config, activation_policy="full")
        config = replace(config, memory_limit_gib=between(joint, full, config))
    if value == "file":
        table = carried_out(joint, replace(config, activation_policy="budget")).decisions
        config = replace(config, memory_table=table["plan_memory"])
    config = replace(config, **{setting: value})
    whole = carried_out(joint, config)
    neutral = carried_out(joint, ASKED[setting][0])
    acts = effect(whole) != effect(neutral)
    assert acts or value in ("never", "none", "user", (), 2), "nothing to lose"
    for name in ACTING:
        try:
            made = carried_out(joint, replace(config, disable_passes=[name]))
        except gt.PassError as error:
            # a table is refused too where it is of the ops of another graph
            of_another = value == "file" and "of another model" in str(error)
            assert of_another or f"the pass {name} is in" in str(error)
        else:
            assert effect(made) == effect(whole) or value is None, name
