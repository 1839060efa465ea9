"""The settings make the list of passes, so that none is without effect."""

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
from graph_trainer.core.passes.catalogue import registered_passes
from graph_trainer.core.passes.context import ActivationPolicy, ReshardAfterForward, RunSettings
from graph_trainer.core.passes.memory_table import MemoryTable
from graph_trainer.core.passes.overlap.overlap_fsdp import OverlapFsdpOptions
from graph_trainer.core.passes.pass_list import PassConfig, pass_list
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


def names(**config):
    return [pass_.name for pass_ in pass_list(PassConfig(**config))]


def settings_and_passes():
    """Every value of a setting that needs passes, and these."""
    limit, table = {"memory_limit_gib": 1.0}, {"memory_table": MemoryTable((), None, ())}
    offloading = {"memory_table": MemoryTable((), None, ("layers.0",))}
    unshards, planned = ["tag_fsdp_unshards", "rematerialize"], ["plan_memory", "rematerialize"]
    for value in ("default", "always"):
        yield {"reshard_after_forward": value}, unshards
    yield {"reshard_after_forward": "auto"} | limit, ["plan_memory", *unshards]
    for value in ("selective", "full", "layers"):
        yield {"activation_policy": value}, ["tag_activations", "rematerialize"]
    yield {"activation_policy": "budget"} | limit, planned
    yield {"activation_policy": "file"} | table, planned
    offloaded = [*planned, "offload_activations"]
    yield {"activation_policy": "budget", "allow_offload": True} | limit, offloaded
    yield {"activation_policy": "file"} | offloading, offloaded
    yield {"passes": ["bucket_collectives"]}, ["tag_buckets"]


SETTINGS = list(settings_and_passes())


@pytest.mark.parametrize(("settings", "needed"), SETTINGS)
def test_a_setting_adds_its_passes_in_the_order_of_the_catalogue(settings, needed):
    listed = settings.get("passes", [])
    assert names(**{"passes": ()} | settings) == [*needed, *listed]
    around = [*listed, "normalize_views", "schedule_overlap"]
    around = [name for name in registered_passes() if name in around]
    expected = [name for name in registered_passes() if name in (*around, *needed)]
    assert names(**settings | {"passes": around}) == expected
    assert names(**settings | {"passes": ["default"]}) == BY_DEFAULT


def test_settings_that_need_no_pass_add_none():
    assert names(passes=(), reshard_after_forward="never") == []
    assert names(passes=(), activation_policy="user") == []
    assert names(passes=(), allow_offload=True) == []


@pytest.mark.parametrize(("settings", "needed"), SETTINGS)
def test_a_pass_that_a_setting_needs_cannot_be_disabled(settings, needed):
    for name in needed:
        with pytest.raises(gt.PassError) as error:
            names(**settings, disable_passes=[name])
        message = str(error.value)
        assert message.startswith("PassConfig.disable_passes: ") and f"'{name}'" in message
        causes = ("bucket_collectives", *(f"PassConfig.{setting}" for setting in settings))
        assert any(cause in message for cause in causes)
    names(**settings, disable_passes=without(*needed, "tag_buckets"))


@pytest.mark.parametrize(
    ("settings", "moved", "behind"),
    [
        ({"activation_policy": "budget"}, "plan_memory", "tag_activations"),
        ({"activation_policy": "budget"}, "plan_memory", "tag_fsdp_unshards"),
        ({"activation_policy": "full"}, "tag_activations", "tag_fsdp_unshards"),
        ({"activation_policy": "full"}, "rematerialize", "offload_activations"),
        ({}, "tag_buckets", "bucket_collectives"),
    ],
)
def test_a_pass_that_a_setting_needs_cannot_run_behind_one_that_reads_its_work(
    settings, moved, behind
):
    order = [name for name in BY_DEFAULT if name != moved]
    order.insert(order.index(behind) + 1, moved)
    with pytest.raises(gt.PassError, match=f"put '{moved}' in front of") as error:
        names(passes=order, memory_limit_gib=1.0, **settings)
    assert str(error.value).startswith("PassConfig.passes: ")


def test_a_users_own_pass_stays_where_it_is_listed():
    @gt.graph_pass(stage=gt.Stage.TAG, summary="Tag parameters in another way")
    def mine(joint, options, context): ...

    listed = [mine, "tag_fsdp_unshards", "bucket_collectives"]
    assert names(passes=listed, activation_policy="full") == [
        *("mine", "tag_activations", "tag_fsdp_unshards"),
        *("rematerialize", "tag_buckets", "bucket_collectives"),
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"activation_policy": "budget"},
        {"activation_policy": "budget", "memory_limit_gib": 0.0},
        {"reshard_after_forward": "auto"},
    ],
)
def test_a_plan_of_memory_needs_a_limit(settings):
    with pytest.raises(gt.PassError, match="^PassConfig.memory_limit_gib: .* set the GiB"):
        PassConfig(**settings)


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
    with pytest.raises(gt.PassError, match="'offload_activations'.* out of the model"):
        gt.run_passes(joint, PassConfig(disable_passes=["offload_activations"]))
    gt.run_passes(joint, PassConfig(passes=[]))
    assert joint.history == ["offload_activations"]
    gt.run_passes(joint, PassConfig(passes=["schedule_overlap"]))  # it has been carried out


@pytest.mark.parametrize("given", [{"strategy": "size"}, TagActivationsOptions(matmuls="keep")])
def test_options_of_another_class_are_refused(given):
    kind = type(given).__name__
    refused = f"options of 'bucket_collectives' are a {kind}; it takes a BucketCollectivesOptions"
    with pytest.raises(gt.PassError, match=refused):
        gt.run_passes(small(), PassConfig(options={"bucket_collectives": given}))


@pytest.mark.parametrize("options", [{"in_flight": 2}, {}], ids=["changed", "as by default"])
def test_options_need_their_pass(options):
    config = PassConfig(options={"overlap_fsdp": OverlapFsdpOptions(**options)})
    with pytest.raises(gt.PassError, match="^OverlapFsdpOptions: .* add it to PassConfig.passes"):
        gt.run_passes(small(), config)


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
            assert of_another or f"the pass '{name}' cannot be left out" in str(error)
        else:
            assert effect(made) == effect(whole) or value is None, name
