"""ExportedStep: AOTAutograd's joint graph, changed and compiled in one order only."""

import operator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._inductor import compile_fx
from torch.utils.checkpoint import CheckpointPolicy

import graph_trainer as gt
from benchmarks.halves import peaks_of
from graph_trainer.core.graph.annotations import set_recompute_policy
from graph_trainer.core.graph.ops import is_collective, is_wait
from graph_trainer.core.partition import exported_step as room
from graph_trainer.core.passes import pipeline
from graph_trainer.core.passes.bucketing.bucket_collectives import BucketCollectivesOptions
from graph_trainer.core.passes.deduplicate_unshards import deduplicate_unshards
from graph_trainer.core.passes.pipeline import run_tags
from graph_trainer.testing import become
from tests.unit.core.capture.steps import batch, squares
from tests.unit.core.partition.test_backend import POLICIES, Seen, counts_of, decoder, plain_decoder
from tests.unit.core.partition.test_partitioned_step import gradients, net, partitioned
from tests.unit.graphs import aten


@pytest.fixture
def step():
    become(0, 1)
    return partitioned(net(), batch())


def through(exported):
    exported.refresh()
    exported.remove_unused_waits()


@pytest.mark.parametrize("config", (POLICIES[1], POLICIES[3]))
def test_what_is_gathered_again_stays_gathered_again(config):
    """The passes have decided; neither partition decides otherwise, merged gathers included."""
    step, args = decoder(**config)
    halves = step.halves.forward, step.halves.backward
    peaks_of_cut = peaks_of(*(half.graph_module for half in halves))
    for partition in ("tags", "min_cut"):
        seen = Seen()
        with gt.ExportedStep(step, *args) as exported:
            through(exported)
            exported.compile(partition=partition, on_partition=seen)
        assert seen.counts()[:2] == counts_of(step)[:2], partition
        peaks = peaks_of(*seen.graphs[0])
        if partition == "tags":
            assert peaks == peaks_of_cut
        else:
            assert all(map(operator.le, peaks, peaks_of_cut))


NOT_MERGED = {"bucket_collectives": BucketCollectivesOptions(strategy="none")}


@pytest.mark.parametrize(("partition", "where"), [("tags", "exported"), ("min_cut", "joint")])
def test_passes_tag_the_exported_graph_or_the_one_before(partition, where):
    """Whole chains are gathered again, although the recomputation of another region reads them."""
    config = gt.PassConfig(reshard_after_forward="always", activation_policy="full")
    model, joint, args = plain_decoder()
    if where == "joint":
        deduplicate_unshards(joint)
        run_tags(joint, config)
    seen = Seen()
    with gt.ExportedStep(gt.partition(joint, model, compare_ranks=False), *args) as exported:
        if where == "exported":
            exported.rewrite(deduplicate_unshards)
        through(exported)
        if where == "exported":
            exported.tag(config)
        exported.compile(partition=partition, on_partition=seen)
    model, passed, _ = plain_decoder()
    gt.run_passes(passed, replace(config, options=NOT_MERGED))
    wanted = counts_of(gt.partition(passed, model, compare_ranks=False))
    assert seen.counts()[:2] == wanted[:2]


@pytest.mark.parametrize("partition", ["tags", "min_cut"])
def test_a_collective_is_waited_for_in_its_half(partition):
    """A gather that must be saved is saved as what its wait returns."""
    model, joint, args = plain_decoder()
    seen = Seen()
    with gt.ExportedStep(gt.partition(joint, model, compare_ranks=False), *args) as exported:
        through(exported)
        exported.tag(save_gathers)
        exported.compile(partition=partition, on_partition=seen)
    assert seen.counts()[1] == 0
    for half in seen.graphs[0]:
        assert calls(half, is_collective) == calls(half, is_wait) > 0


def save_gathers(joint):
    for node in joint.graph.nodes:
        if is_collective(node) or is_wait(node):
            set_recompute_policy(node, CheckpointPolicy.MUST_SAVE)


def calls(module, kind):
    return sum(node.op == "call_function" and kind(node) for node in module.graph.nodes)


@pytest.mark.parametrize(
    ("reshard", "partition", "options"),
    [("default", "tags", NOT_MERGED), ("always", "tags", {}), ("always", "min_cut", NOT_MERGED)],
)
def test_recomputation_reads_what_backward_gathers_anyway(reshard, partition, options):
    """An activation policy tagged later gathers no parameter twice."""
    model, joint, args = plain_decoder()
    gt.run_passes(joint, gt.PassConfig(reshard_after_forward=reshard, options=options))
    step, seen = gt.partition(joint, model, compare_ranks=False), Seen()
    with gt.ExportedStep(step, *args) as exported:
        through(exported)
        exported.tag(gt.PassConfig(activation_policy="full"))
        exported.compile(partition=partition, on_partition=seen)
    assert seen.counts()[:2] == counts_of(step)[:2]
    assert seen.counts() != counts_of(step)  # the policy has acted


@pytest.mark.parametrize(
    ("cut_with", "asked", "options"),
    [
        ("never", "always", {}),
        ("always", "never", {}),
        ("default", "never", NOT_MERGED),
    ],
)
def test_a_way_to_reshard_that_comes_too_late_is_refused(cut_with, asked, options):
    model, joint, args = plain_decoder()
    gt.run_passes(joint, gt.PassConfig(reshard_after_forward=cut_with, options=options))
    with gt.ExportedStep(gt.partition(joint, model, compare_ranks=False), *args) as exported:
        through(exported)
        exported.tag(gt.PassConfig(reshard_after_forward=cut_with))
        with pytest.raises(gt.PassError, match=f'"{asked}" comes too late for this step'):
            exported.tag(gt.PassConfig(reshard_after_forward=asked))


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"activation_policy": "budget", "memory_limit_gib": 1.0}, 'activation_policy = "budget"'),
        (
            {"reshard_after_forward": "auto", "memory_limit_gib": 1.0},
            'reshard_after_forward = "auto"',
        ),
        ({"memory_limit_gib": 1.0}, "memory_limit_gib"),
        ({"allow_offload": True}, "allow_offload"),
        ({"verify_passes": True}, "verify_passes"),
        ({"passes": ["default", "overlap_fsdp"]}, "the pass 'overlap_fsdp' .stage SCHEDULE."),
        ({"options": NOT_MERGED}, "options of 'bucket_collectives'"),
    ],
)
def test_what_other_passes_do_is_refused(step, asked, what):
    with gt.ExportedStep(step, *batch()) as exported:
        through(exported)
        with pytest.raises(gt.PassError, match=f"{what} would have no effect on an exported step"):
            exported.tag(gt.PassConfig(**asked))


def test_tags_need_only_the_passes_that_write_them(step, monkeypatch):
    """No hardware for a pass that does not run, and no pass that acts on tags; but those that write
    them, and what these leave is checked."""
    monkeypatch.setattr(pipeline, "detect_on_all_ranks", None)
    always = partial(gt.PassConfig, reshard_after_forward="always")
    with gt.ExportedStep(step, *batch()) as exported:
        through(exported)
        exported.tag(always())
        exported.tag(always(passes=["tag_fsdp_unshards"]))
        with pytest.raises(gt.PassError, match="'tag_fsdp_unshards' cannot be left out"):
            exported.tag(always(disable_passes=["tag_fsdp_unshards"]))

        @gt.graph_pass(stage=gt.Stage.TAG, summary="Forgets a phase")
        def forgets(joint, options, context):
            next(n for n in joint.graph.nodes if n.op == "call_function").meta.pop("custom")

        with pytest.raises(gt.VerificationError, match="'forgets' left an invalid .* no phase"):
            exported.tag(gt.PassConfig(passes=[forgets]))


def test_a_failed_export_leaves_no_context_behind(step, monkeypatch):
    monkeypatch.setattr(room, "_as_joint_graph", None)
    with pytest.raises(TypeError), gt.ExportedStep(step, *batch()):
        pass
    assert type(torch.ones(1) + 1) is torch.Tensor


@pytest.mark.full
def test_inductor_compiles_its_halves_as_forward_and_backward(step, monkeypatch):
    found = []
    compile_inner = compile_fx.compile_fx_inner

    def inner(*args, **how):
        found.append((how["is_inference"], how["is_backward"]))
        return compile_inner(*args, **how)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", inner)
    with gt.ExportedStep(step, *batch()) as exported:
        through(exported)
        compiled = exported.compile(partition="tags", compiler="inductor")
    other = net()
    losses = [compiled(*batch()), squares(other, *batch())]
    for loss in losses:
        loss.backward()
    assert found == [(False, False), (False, True)]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(gradients(step.model), gradients(other))


@pytest.mark.parametrize("partition", ["tags", "min_cut"])
def test_it_trains_with_eagers_bits(step, partition):
    with gt.ExportedStep(step, *batch()) as exported:
        exported.rewrite(lambda module: None)
        exported.rewrite(lambda module: None)
        through(exported)
        compiled = exported.compile(partition=partition)
    model, other = step.model, net()
    losses = [compiled(*batch()), squares(other, *batch())]
    for loss in losses:
        loss.backward(retain_graph=True)
        loss.backward()
    torch.testing.assert_close(losses[0].detach(), losses[1].detach(), rtol=0, atol=0)
    torch.testing.assert_close(gradients(model), gradients(other), rtol=0, atol=0)


@pytest.mark.parametrize("partition", ["tags", "min_cut"])
def test_tags_decide(step, partition):
    """A matrix product is computed again where its tag says so."""
    graphs = []

    def products(policy):
        def tag(module):
            for node in module.graph.find_nodes(op="call_function", target=aten.addmm.default):
                set_recompute_policy(node, policy)

        def keep(module, inputs):
            graphs.append(module)
            return lambda values: module(*values)

        with gt.ExportedStep(step, *batch()) as exported:
            through(exported)
            exported.tag(tag)
            compiler = lambda m, i: torch._functorch.aot_autograd.make_boxed_func(keep(m, i))  # noqa: E731
            exported.compile(partition=partition, compiler=compiler)
        backward = graphs[-1]
        return len(backward.graph.find_nodes(op="call_function", target=aten.addmm.default))

    assert products(CheckpointPolicy.MUST_SAVE) == 0
    assert products(CheckpointPolicy.MUST_RECOMPUTE) > 0


def test_an_unused_wait_is_removed_and_no_other_node(step):
    def rewrite(module):
        x = module.graph.find_nodes(op="placeholder")[0]
        with module.graph.inserting_before(next(iter(x.users))):
            wait = module.graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (x,))
            gather = module.graph.call_function(
                torch.ops._c10d_functional.all_gather_into_tensor.default, (x, 1, "0")
            )
            again = module.graph.call_function(wait.target, (gather,))
            dead = module.graph.call_function(aten.erfc.default, (x,))
        wait.replace_all_uses_with(x)
        for node in (wait, gather, again, dead):
            node.meta["val"] = x.meta["val"]
        module.graph.erase_node(wait)

    with gt.ExportedStep(step, *batch()) as exported:
        exported.rewrite(rewrite)
        exported.refresh()
        assert "wait_tensor" in str(exported.graph_module.graph)
        exported.remove_unused_waits()
        assert "_c10d_functional" not in str(exported.graph_module.graph)
        assert "erfc" in str(exported.graph_module.graph)


def nested(module):
    output = module.graph.output_node()
    first, *rest = output.args[0]
    output.args = ([(first,), *rest],)


def too_few(module):
    output = module.graph.output_node()
    output.args = (list(output.args[0])[:-1],)


def one_more(module):
    last = module.graph.find_nodes(op="placeholder")[-1]
    with module.graph.inserting_after(last):
        module.graph.placeholder("more")


def swapped(module):
    first, second = module.graph.find_nodes(op="placeholder")[:2]
    second.append(first)


@pytest.mark.parametrize(
    ("rewrite", "message"),
    [
        (nested, r"returns the nested \(.*\) where the flat descriptor is PlainAOTOutput\(idx=0\)"),
        (too_few, "returns .* values and has .* descriptors of outputs"),
        (one_more, "input 'more' of the exported graph has no descriptor"),
        (swapped, r"no input for the descriptor PlainAOTInput\(idx=0\)"),
    ],
)
def test_a_graph_that_does_not_fit_its_descriptors_is_refused(step, rewrite, message):
    with gt.ExportedStep(step, *batch()) as exported:
        exported.rewrite(rewrite)
        with pytest.raises(gt.PassError, match=message):
            exported.refresh()


def test_the_order_is_enforced(step):
    with gt.ExportedStep(step, *batch()) as exported:
        with pytest.raises(gt.PassError, match="TAG needs REMOVE_WAITS before it"):
            exported.tag(lambda module: None)
        with pytest.raises(gt.PassError, match="REMOVE_WAITS needs REFRESH before it"):
            exported.remove_unused_waits()
        exported.refresh()
        with pytest.raises(gt.PassError, match="at REFRESH, after which REWRITE may not come"):
            exported.rewrite(lambda module: None)
        exported.remove_unused_waits()
        with pytest.raises(gt.PassError, match="changes the structure of the exported graph"):
            exported.tag(nested)
        with pytest.raises(gt.PassError, match="partition is 'mincut'; it must be one of tags"):
            exported.compile(partition="mincut")
    with pytest.raises(gt.PassError, match="only within its context"):
        exported.compile()
