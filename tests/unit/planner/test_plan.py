"""A plan is what training would capture, and its reports say the same numbers."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import os
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

import graph_trainer as gt
from graph_trainer.cli.plan_command import main
from graph_trainer.core.analysis.memory import Category
from graph_trainer.core.graph.annotations import owner_of, parameters_of, tensors_of
from graph_trainer.core.graph.host_copies import is_copy_to_host
from graph_trainer.core.passes.context import PassContext, RunSettings
from graph_trainer.core.passes.memory_limit import MORE_SHARDS, Budget, what_would_help
from graph_trainer.core.passes.report import PassRun
from graph_trainer.core.simulation.hardware import Hardware, load_hardware
from graph_trainer.core.simulation.runtimes import TORCHTITAN
from graph_trainer.core.simulation.simulate import simulate
from graph_trainer.core.units import GIB
from graph_trainer.errors import ConfigError, PassError
from graph_trainer.planner import changes
from graph_trainer.planner.captures import Captures
from graph_trainer.planner.changes import combinations, compare, flags_of, settings
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.planner.html.drawn import drawn
from graph_trainer.planner.html.page import fit_text, write_page
from graph_trainer.planner.ledger import ledger, row_of
from graph_trainer.planner.plan import Plan, make_plan
from graph_trainer.planner.plan_report import plan_report, readable_report
from graph_trainer.planner.plan_tables import comparison_table, ledger_table
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.files import published
from graph_trainer.titan.training_state_memory import (
    optimizer_bytes,
    other_memory_of,
    trained_bytes,
)
from tests.unit.core.simulation.machines import INSTANT
from tests.unit.graphs import captured_decoder
from tests.unit.planner.conftest import BFLOAT16, shown

FLAGS = ["--training.seq_len", "64", "--training.local_batch_size", "2", *BFLOAT16]


def small(*more: str, ranks: int = 4):
    """The debug model with one layer."""
    config = load_config([*FLAGS, *more], world_size=ranks)
    config.model_spec.model.layers = config.model_spec.model.layers[:1]
    return config


CAPTURES = Captures(most=30)


@cache
def planned(*more: str, ranks=4, hardware="h100-sxm", rank=0, instant_host=False) -> Plan:
    host = INSTANT if instant_host else load_hardware(hardware).host
    machine = dataclasses.replace(load_hardware(hardware), host=host)
    return make_plan(small(*more, ranks=ranks), ranks, machine, rank=rank, captures=CAPTURES)


def test_the_ledger_begins_as_captured_and_ends_with_the_graph_that_runs():
    plan = planned()
    assert plan.rows[0].name == "capture"
    assert [row.name for row in plan.rows[1:]] == plan.simulation.joint.history
    last = plan.rows[-1]
    run = PassRun(last.name, last.seconds, changed=last.changed, remarks=last.remarks)
    assert row_of(plan.simulation, run) == last
    verified = planned("--compile.verify_passes").rows[1]
    assert verified.remarks[-1] == verified.verified != ""


def test_reshard_policies_are_ordered_in_memory_and_in_gathers():
    key = "--parallelism.fsdp_reshard_after_forward"
    # overlap may use what a policy frees
    off = ("--compile.disable_passes", "schedule_overlap")
    never, always = planned(key, "never", *off), planned(key, "always", *off)
    assert never.peak_bytes > always.peak_bytes
    gathers = [
        sum(c.kind == "all_gather_into_tensor" for c in p.simulation.collectives)
        for p in (never, always)
    ]
    assert gathers[0] < gathers[1]


def test_more_microbatches_keep_gradients_and_take_as_many_graphs():
    one, two = planned(), planned("--training.global_batch_size", "16")
    assert (one.microbatches, two.microbatches) == (1, 2)
    assert two.peak_bytes > one.peak_bytes
    assert two.tokens_per_step == 2 * one.tokens_per_step
    graph = two.simulation.timeline.step_seconds
    assert two.step_seconds == (2 * graph + two.outside_seconds) * two.hardware.slowest_of(4)
    # What fits counts the gradients of earlier microbatches.
    assert two.need.allocated >= two.peak_bytes
    assert two.need.total - one.need.total >= trained_bytes(one.simulation.joint) - 2**21


@pytest.mark.parametrize("backend", ["eager", "inductor", "regional"])
def test_the_memory_limit_is_compared_with_what_the_verdict_says(backend):
    hardware = "cpu" if backend == "inductor" else "h100-sxm"
    plan = planned("--compile.backend", backend, hardware=hardware)
    joint = plan.simulation.joint
    other = other_memory_of(plan.config, 4)
    context = PassContext(settings=RunSettings(other_memory=other), hardware=plan.hardware)
    assert Budget(context).needed(joint) == plan.need.total
    reserve = plan.hardware.reserved_bytes
    assert plan.need.total == plan.need.allocated + reserve
    assert (plan.need.total == plan.peak_bytes) == (hardware == "cpu")


def test_the_limit_of_a_validation_counts_the_gradients_of_the_step_before():
    plan = planned()
    graph, other = copy.copy(plan.simulation.joint), other_memory_of(plan.config, 4)
    assert other(graph).accumulated_bytes == 0
    graph.signature = dataclasses.replace(graph.signature, backward=False)
    assert other(graph).accumulated_bytes == trained_bytes(graph) > 0


@pytest.mark.parametrize("limit", [-1.0, float("nan")])
def test_a_limit_that_is_none_is_refused(limit):
    with pytest.raises(PassError, match="write GiB above 0"):
        Budget(PassContext(settings=RunSettings(memory_limit_gib=limit)))


def test_what_would_free_next_to_nothing_is_no_remedy():
    at_peak = dict.fromkeys(Category, 0) | {Category.PARAMETERS: 2**30, Category.ACTIVATIONS: 4}
    _, *only = what_would_help(at_peak, RunSettings()).splitlines()
    (only,) = only
    assert MORE_SHARDS in only and "1.00 GiB" in only


def test_a_parameter_without_a_gradient_has_no_state():
    plan = planned()
    signature = plan.simulation.joint.signature
    name = next(i.name for i in signature.inputs if i.name == "output.weight" or "wo" in i.name)
    without = dataclasses.replace(signature, parameters_without_grad=(name,))
    graph = copy.copy(plan.simulation.joint)
    graph.signature = without
    fewer = trained_bytes(plan.simulation.joint) - trained_bytes(graph)
    assert fewer > 0
    before, after = (optimizer_bytes(j, plan.config) for j in (plan.simulation.joint, graph))
    assert before - after == 2 * fewer


def test_a_pass_that_only_annotates_is_simulated():
    @gt.graph_pass(stage=gt.Stage.TAG, summary="take the roles away")
    def forget_roles(joint, options, context):
        for node in joint.graph.nodes:
            node.meta["custom"] = {
                k: v for k, v in node.meta.get("custom", {}).items() if "fsdp" not in k
            }

    joint = captured_decoder(layers=1)
    hardware = load_hardware("h100-sxm")
    passes = gt.PassConfig(passes=[forget_roles])
    seen = []

    def look(joint):
        seen.append(simulate(joint, hardware))
        return seen[-1]

    rows, last = ledger(joint, passes, look)
    assert [row.name for row in rows] == ["capture", "forget_roles"] and last is seen[-1]
    before, after = (each.memory.peak_by_category() for each in seen)
    assert before != after


def test_tokens_are_counted_a_gpu():
    plan = planned("--parallelism.tensor_parallel_degree", "2")
    assert plan.ranks_per_batch == 2
    assert plan.tokens_per_second_per_gpu == pytest.approx(2 * 64 / 2 / plan.step_seconds)
    for mfu, flops in zip((plan.mfu, plan.mfu_causal), plan.flops_per_token, strict=True):
        assert mfu == pytest.approx(flops * plan.tokens_per_second_per_gpu / 989.4e12)


def test_the_report_is_the_plan_and_tables_fit():
    plan = planned("--parallelism.tensor_parallel_degree", "2")
    said = json.loads(json.dumps(plan_report(plan)))
    assert said["schema"] == "graph_trainer.plan/2"
    assert said["peak"]["bytes"] == sum(said["peak"]["by_category"].values()) == plan.peak_bytes
    assert [row["pass"] for row in said["ledger"]] == [row.name for row in plan.rows]
    counted = sum(
        volume["count"]
        for phases in said["ledger"][-1]["collectives"].values()
        for roles in phases.values()
        for volume in roles.values()
    )
    assert counted == len(plan.simulation.collectives)
    assert {"tensor_parallel", "unshard", "reduce_grad"} <= {
        role
        for phases in said["ledger"][-1]["collectives"].values()
        for roles in phases.values()
        for role in roles
    }
    exposed = said["ledger"][-1]["exposed_seconds"]
    assert sum(exposed.values()) == pytest.approx(plan.rows[-1].exposed)
    assert said["tokens_per_second_per_gpu"] == plan.tokens_per_second_per_gpu
    lines = shown(plan).splitlines()
    assert max(map(len, lines)) <= 100
    assert any("Fits" in line for line in lines)
    # a narrow terminal drops bytes moved and counts, never memory and times
    kept = {"after", "peak", "step", "exposed"}
    for group in ledger_table(said["ledger"]).optional:
        assert not kept & {str(column.header).split("\n")[0] for column in group}


def test_passes_that_decide_for_another_machine_are_told():
    told = "simulation do so for a100-80g"
    plan = planned()
    asks = dataclasses.replace(plan, config=small("--compile.hardware", "a100-80g"))
    assert told in shown(asks) and "simulated on h100-sxm." in " ".join(shown(asks).split())
    same = dataclasses.replace(asks, hardware=load_hardware("a100-80g"))
    assert told not in shown(same) and told not in shown(plan)


def test_a_bucket_over_several_modules_says_what_is_in_it():
    off = ("--compile.disable_passes", "schedule_overlap")
    plan = planned("--compile.bucketing.strategy", "size", *off)
    assert any(len(parameters_of(c.node)) > 1 for c in plan.simulation.collectives)
    owners = {each["owner"] for each in plan_report(plan)["exposed_by_module"]}
    assert owners == {"10 parameters, tok_embeddings.weight to lm_head.weight", "layers.*"}
    assert "10 parameters," in shown(plan)


FEWER = ("--training.global_batch_size", "8", "--activation_checkpoint.type", "full")
FEWER += ("--compile.memory_limit_gib", "40")


def test_the_headline_says_what_was_planned_and_the_verdict_names_the_limit():
    plan = planned("--parallelism.tensor_parallel_degree", "2", *FEWER)
    head, _, tables = shown(plan).partition("What each pass does")
    text = " ".join(head.split())
    assert (
        "mesh dp_shard 2 x tp 2; batch 2 local, 8 global; sequence 64; activation policy full; "
        "reshard default; backend eager; limit 40 GiB" in text
    )
    assert text.endswith(
        "compile.memory_limit_gib is compared here with what rank 0 needs. In training the rank "
        "that needs most decides for all, as it does in --save and --verify-order."
    )
    assert "of the 40.00 GiB of compile.memory_limit_gib;" in " ".join(tables.split())
    assert fit_text(plan_report(plan)).endswith(" of 40.00 GiB, compile.memory_limit_gib")
    assert "memory_limit_gib" not in fit_text(plan_report(planned()))


def test_nodes_have_module_and_op_and_the_only_parallelism_its_name():
    plan = planned("--parallelism.tensor_parallel_degree", "4", instant_host=True)
    report = readable_report(plan)
    nodes = {node.name: node for node in plan.simulation.joint.graph.nodes}
    peaks = [report["peak"]["node"], *(each["node"] for each in report["peak"]["largest"])]
    for said in peaks:
        name, op, owner = re.fullmatch(r"(\w+)(?:, (\w+))?(?: in ([\w.]+))?", said).groups()
        op = op or re.sub(r"(_default)?(_\d+)?$", "", name)  # a name that is the op and a number
        assert nodes[name].op == "placeholder" or f".{op}." in str(nodes[name].target)
        assert (owner or "") == owner_of(nodes[name])
    assert peaks[0].startswith(plan_report(plan)["peak"]["node"]) and " in " in peaks[0]
    assert {each["purpose"] for each in report["exposed_by_module"]} >= {"tensor parallelism"}
    assert "other" not in {each["purpose"].split()[0] for each in report["exposed_by_module"]}
    kinds = drawn(plan)["kinds"]
    slices = {kinds[kind]["key"] for lane in drawn(plan)["lanes"] for kind in lane["kind"]}
    assert "tensor_parallel" in slices and "other" not in slices
    (row,) = (row for row in plan.rows if row.name == "schedule_overlap")
    assert "tensor parallel: " in row.remarks[0] and "other: " not in row.remarks[0]


def test_ranks_differ_where_their_shards_do():
    # 2048 rows over 3 ranks are 683, 683 and 682
    first, last = planned(ranks=3), planned(ranks=3, rank=2)
    assert first.peak_bytes > last.peak_bytes


def test_torchtitan_prefetches_and_needs_more():
    ours = planned()
    theirs = make_plan(small(), 4, load_hardware("h100-sxm"), runtime=TORCHTITAN)
    assert theirs.rows[-1].name == "as_fsdp2"
    assert theirs.rows[-1].exposed < theirs.rows[-2].exposed
    assert theirs.need.total >= ours.need.total
    # it is torchtitan that prefetches, whatever our passes are
    without = small("--compile.disable_passes", "overlap_fsdp")
    again = make_plan(without, 4, ours.hardware, runtime=TORCHTITAN, every_pass=False)
    assert again.rows[-1].name == "as_fsdp2"


def too_small(plan: Plan) -> Hardware:
    room = plan.need.allocated / GIB - 0.01
    return dataclasses.replace(plan.hardware, memory_gib=room, memory_reserved_gib=0.0)


def test_torchtitan_checkpoints_cudnns_attention_which_draws_nothing():
    words = ["--module", "graph_trainer.deepseek_v3", "--config", "debugmodel", *FLAGS]
    config = load_config([*words, "--activation_checkpoint.type", "selective"], world_size=4)
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    hardware = load_hardware("b200")
    plan = make_plan(config, 4, hardware, runtime=TORCHTITAN, every_pass=False)
    named = Counter(str(node.target) for node in plan.simulation.joint.graph.nodes)
    attention = "aten._scaled_dot_product_cudnn_attention{}.default"
    assert named[attention.format("")] == named[attention.format("_backward")] == 2


@pytest.mark.parametrize("policy", ["selective", "budget"])
def test_a_plan_beyond_its_limit_does_not_fit_and_is_advised_one_that_does(policy, monkeypatch):
    flags = ("--activation_checkpoint.type", policy, "--compile.memory_limit_gib")
    plan = planned(*flags, "2.001")
    assert not plan.fits and plan.fits == (plan.need.total <= 2.001 * GIB)
    assert "more than the 2.00 GiB of compile.memory_limit_gib" in " ".join(shown(plan).split())
    row = make_plan(plan.config, plan.world_size, plan.hardware, every_pass=False)  # of --compare
    assert row.need == plan.need and not row.fits
    first, *others = changes.changes_that_help(plan)
    (limit,) = first.values()
    assert 2.001 < float(limit) <= plan.need.total / GIB + 0.01
    assert planned(*flags, limit).fits
    assert "Kept for backward" not in shown(plan), "nothing is"
    some = [{"training.seq_len": "32"}, first]  # the first frees more, and does not fit
    monkeypatch.setattr(changes, "changes_that_help", lambda plan: some)
    monkeypatch.setattr(changes, "_LEAST", 0.0)
    advice = changes.advise(plan, lambda more: small(*flags, "2.001", *more), print)
    assert [each.fits for each in advice] == [True, False] and advice[0].config == first
    tried = [change.get("activation_checkpoint.type") for change in others]
    assert ("full" in tried) == (policy != "budget")  # which recomputes everything already


def test_advice_is_sorted_by_what_it_saves_and_says_what_fits(monkeypatch):
    hardware = too_small(planned())
    plan = make_plan(small(), 4, hardware, every_pass=False)
    assert not plan.fits and "Does not fit" in shown(plan) and "MFU" in shown(planned())
    assert "No setting would help" in shown(plan) and "MFU" not in shown(plan)
    for run, has_speed in ((plan, False), (planned(), True)):
        write_page(run, page := io.StringIO())
        assert ("<dt>MFU</dt>" in page.getvalue()) is has_speed
    tried: list[str] = []
    monkeypatch.setattr(changes, "changes_that_help", lambda plan: CHANGES)
    found = changes.advise(plan, lambda flags: small(*flags), tried.append)
    assert len(tried) == len(CHANGES)
    # one that needs more is not advice, one that the config excludes is left out
    assert sorted(map(str, CHANGES[:2])) == sorted(str(a.config) for a in found)
    assert [a.needed_bytes for a in found] == sorted(a.needed_bytes for a in found)
    for each in found:
        assert each.needed_bytes < plan.need.total
        assert each.fits == (each.needed_bytes <= hardware.memory_bytes)
    advised = dataclasses.replace(plan, advice=tuple(found))
    best = flags_of(found[0].config)
    assert " ".join(best) in shown(advised)
    assert plan_report(advised)["advice"][0]["needed_bytes"] == found[0].needed_bytes
    # a change does what it does by itself
    again = make_plan(small(*best), 4, hardware, every_pass=False)
    assert again.need.total == found[0].needed_bytes


CHANGES = [
    {"training.seq_len": "32"},
    {"parallelism.fsdp_reshard_after_forward": "always"},
    {"parallelism.fsdp_reshard_after_forward": "never"},
    {"parallelism.tensor_parallel_degree": "3"},
]


def test_the_fewest_ranks_are_those_on_which_it_fits(monkeypatch):
    plan = planned(hardware="cpu")  # memory to the byte
    sizes = {ranks: planned(ranks=ranks, hardware="cpu").need.total for ranks in (8, 16)}
    memory = (sizes[8] + sizes[16]) / 2 / GIB
    hardware = dataclasses.replace(plan.hardware, memory_gib=memory)
    tried: list[str] = []

    def load(flags, ranks=None):
        return small(*flags, ranks=ranks)

    def fewest(*more):
        of_ranks = make_plan(small(*more), 4, hardware, captures=CAPTURES, every_pass=False)
        return changes.fewest_ranks(of_ranks, load, tried.append)

    (found,) = fewest()
    assert found.fits and found.needed_bytes == sizes[16]
    assert found.config == {"world-size": "16"} and tried == ["16 ranks"]
    with monkeypatch.context() as patched:  # as if more were sharded: then 8 must be planned
        patched.setattr(changes, "_SHARDED", tuple(Category))
        assert fewest() == [found] and tried[1:] == ["8 ranks", "16 ranks"]
    assert fewest("--parallelism.data_parallel_shard_degree", "4") == []
    hardware = dataclasses.replace(plan.hardware, memory_gib=0.001)
    tried.clear()
    assert fewest() == [] and not tried


def test_room_to_spare_is_said_and_what_would_use_it():
    layers = ("--activation_checkpoint.type", "full")
    plan = planned(*layers, "--training.seq_len", "8192", instant_host=True)
    said = readable_report(plan)["spare"]
    words = said[said.index("--") : said.index(" makes again only")].split()
    assert said in " ".join(shown(plan).split())
    better = planned(*words, "--training.seq_len", "8192", instant_host=True)
    assert better.fits and better.step_seconds < plan.step_seconds
    part = 1 - better.step_seconds / plan.step_seconds
    said_part = float(re.search(r"takes ([\d.]+)%", said)[1]) / 100
    assert part == pytest.approx(said_part, rel=0.25)
    # where backward waits for gathered parameters, that counts
    slow = dataclasses.replace(plan.hardware, node_bytes_per_second=1e9)
    waiting = make_plan(plan.config, 4, slow, captures=CAPTURES)
    part = 1 - make_plan(better.config, 4, slow).step_seconds / waiting.step_seconds
    said_part = float(re.search(r"takes ([\d.]+)%", readable_report(waiting)["spare"])[1])
    assert 100 * part == pytest.approx(said_part, rel=0.25)
    assert not readable_report(better)["spare"] and not readable_report(planned())["spare"]
    full = dataclasses.replace(plan, hardware=too_small(plan))
    assert not readable_report(full)["spare"]
    limited = planned(*layers, "--training.seq_len", "8192", "--compile.memory_limit_gib", "70")
    assert limited.fits and not readable_report(limited)["spare"]
    theirs = make_plan(small(*layers), 4, plan.hardware, runtime=TORCHTITAN)
    assert not readable_report(theirs)["spare"]


def test_what_is_used_to_the_full_is_no_advice():
    def tried(*flags, ranks=4):
        plan = dataclasses.replace(planned(), config=load_config(flags), world_size=ranks)
        return list(changes.changes_that_help(plan))

    fewer = tried("--parallelism.fsdp_reshard_after_forward", "always", *FLAGS)
    assert not any("parallelism.fsdp_reshard_after_forward" in change for change in fewer)
    assert {"training.local_batch_size": "1"} in fewer
    assert {"loss.type": "chunked_cross_entropy"} in fewer
    deepseek = ["--module", "graph_trainer.deepseek_v3", "--config", "debugmodel"]
    assert {"parallelism.expert_parallel_degree": "2"} in tried(*deepseek)
    assert not any("parallelism.expert_parallel_degree" in change for change in fewer)
    words = ["--training.local_batch_size", "1", "--loss.type", "cross_entropy"]
    assert not any("training.local_batch_size" in change for change in tried(*words))


def test_a_change_that_cannot_free_enough_is_not_planned():
    plan = planned("--training.seq_len", "512")
    unsharded = plan.simulation.memory.peak_by_category()[Category.UNSHARDED]
    at_most = unsharded * plan.need.allocated / plan.need.alive
    assert 0 < at_most < 0.01 * plan.need.total

    def is_tried(lacking):
        memory = (plan.need.total - lacking) / GIB
        hardware = dataclasses.replace(plan.hardware, memory_gib=memory)
        changed = changes.changes_that_help(dataclasses.replace(plan, hardware=hardware))
        return any("parallelism.fsdp_reshard_after_forward" in change for change in changed)

    assert is_tried(0.99 * at_most) and not is_tried(1.01 * at_most)


def test_comparison_has_every_combination_those_that_fit_first():
    wanted = settings(
        [
            "training.local_batch_size=1,4",
            "parallelism.fsdp_reshard_after_forward=always, never",
        ]
    )
    assert len(combinations(wanted)) == 4
    between = planned("--training.local_batch_size", "1").need.allocated
    usable = (between + planned("--training.local_batch_size", "4").need.allocated) / 2 / GIB
    hardware = dataclasses.replace(
        load_hardware("h100-sxm"), memory_gib=usable, memory_reserved_gib=0.0
    )
    rows = compare(
        wanted,
        lambda flags: small(*flags),
        lambda config: make_plan(config, 4, hardware, captures=CAPTURES, every_pass=False),
        lambda line: None,
    )
    found = [row.config for row in rows]
    assert len(found) == 4 and all(each in found for each in combinations(wanted))
    fits = [row.fits for row in rows]
    assert fits == sorted(fits, reverse=True) and len(set(fits)) == 2
    for row in rows:
        assert row.fits == (row.config["training.local_batch_size"] == "1")
    speed = [row.tokens_per_second_per_gpu for row in rows if row.fits]
    assert speed == sorted(speed, reverse=True)
    table = comparison_table([dataclasses.asdict(row) for row in rows], hardware.memory_bytes)
    shown_cells = list(zip(*(column.cells for column in table.columns[4:]), strict=True))
    assert [any(map(str, cells)) for cells in shown_cells] == fits, "no speed of what cannot run"


def test_rows_of_one_capture_follow_each_other():
    planned_in_order = []

    def plan(config):
        reshard = config.parallelism.fsdp_reshard_after_forward
        planned_in_order.append((reshard, config.training.local_batch_size))
        return planned()

    wanted = settings(
        [
            "parallelism.fsdp_reshard_after_forward=always,never",
            "training.local_batch_size=1,2,4",
        ]
    )
    compare(wanted, lambda flags: small(*flags), plan, lambda line: None)
    assert planned_in_order == [(r, b) for b in (1, 2, 4) for r in ("always", "never")]


def test_a_combination_that_cannot_be_is_told_and_a_value_that_never_can_is_refused():
    def load(flags):
        return load_config([*FLAGS, *flags], world_size=4)

    wanted = settings(
        [
            "parallelism.tensor_parallel_degree=1,4",
            "parallelism.data_parallel_shard_degree=4,1",
        ]
    )
    rows = compare(wanted, load, lambda config: planned(), lambda line: None)
    assert [bool(row.error) for row in rows] == [False, False, True, True]
    said = (
        "^--compare training.local_batch=1: no row .* unknown key. Did .* training.local_batch_size"
    )
    with pytest.raises(ConfigError, match=said):
        compare(settings(["training.local_batch=1"]), load, lambda c: planned(), lambda line: None)


@pytest.mark.parametrize("text", ["", "=1", "training.seq_len", "training.seq_len=", "a=,"])
def test_a_comparison_without_key_or_value_is_refused(text):
    with pytest.raises(ConfigError, match="write key=value"):
        settings([text])
    with pytest.raises(ConfigError, match="given twice"):
        settings(["training.seq_len=1", "training.seq-len=2"])


def test_booleans_and_lists_are_compared():
    parallel = "parallelism.enable_sequence_parallel"
    wanted = settings(["compile.passes=default;default,overlap_fsdp", f"{parallel}=true,False"])
    assert wanted["compile.passes"] == ("default", "default,overlap_fsdp")
    seen = []
    for values in combinations(wanted):
        config = small("--parallelism.tensor_parallel_degree", "2", *flags_of(values))
        seen.append((config.compile.passes, config.parallelism.enable_sequence_parallel))
    both = ["default", "overlap_fsdp"]
    assert seen == [(["default"], True), (["default"], False), (both, True), (both, False)]


def test_tied_weights_are_one_parameter_under_tensor_parallelism_too():
    config = small("--parallelism.tensor_parallel_degree", "2", ranks=2)
    config.model_spec.model.enable_weight_tying = True
    run = FakeRank(config, 2, device="cpu")
    assert run.model.tok_embeddings._parameters["weight"] is run.model.lm_head._parameters["weight"]
    (tied,) = [i for i in run.capture().signature.inputs if i.aliases]
    assert {tied.name, *tied.aliases} == {"tok_embeddings.weight", "lm_head.weight"}


def test_a_comparison_says_what_it_is_of(tmp_path, capsys):
    path = tmp_path / "c.json"
    words = ["--world-size", "2", "--compare", "training.seq_len=32", "--json", str(path)]
    assert main([*words, "--training.local_batch_size", "1", "--hardware", "cpu"]) == 0
    said = json.loads(path.read_text())
    assert (said["world_size"], said["rank"], said["runtime"]) == (2, 0, "graph_trainer")
    assert said["hardware"]["name"] == "cpu" and "local_batch_size = 1" in said["config"]
    assert [row["config"] for row in said["rows"]] == [{"training.seq_len": "32"}]
    table = capsys.readouterr().out
    assert "All combinations; those fit that need at most 15.5 GiB" in table


def test_a_document_on_stdout_stands_alone(capsys):
    """Of the process: pytest's own stdout, where the tables would be, is another."""
    out, into = os.pipe()
    before = os.dup(1)
    os.dup2(into, 1)
    os.close(into)
    try:
        with ThreadPoolExecutor() as pool, open(out) as document:
            read = pool.submit(document.read)
            words = ["--world-size", "2", "--training.seq_len", "32", "--json", "/dev/stdout"]
            assert main(words) == 0
            os.dup2(before, 1)
            assert json.loads(read.result())["world_size"] == 2
    finally:
        os.dup2(before, 1)
        os.close(before)
    said = capsys.readouterr()
    assert "Fits" in said.err and not said.out


def test_a_full_disk_is_one_message(capsys):
    plan = planned()
    with (
        pytest.raises(ConfigError, match="cannot be written .*No space"),
        published(Path("/dev/full")) as file,
    ):
        file.write(json.dumps(plan_report(plan)))


def test_a_plan_says_what_waits_in_host_memory():
    key = "--compile.offload_activations"
    flags = ["--activation_checkpoint.type", "full", f"{key}.block_inputs", f"{key}.min_bytes", "0"]
    config = load_config([*FLAGS, *flags], world_size=4)
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    plan = make_plan(config, 4, load_hardware("h100-sxm"), every_pass=False)
    report, graph = plan_report(plan), plan.simulation.joint.graph
    copies = [tensors_of(node)[0].nbytes for node in graph.nodes if is_copy_to_host(node)]
    assert report["host_bytes"] == sum(copies) > 0  # all of them at the end of forward
    assert report["copy_wait_seconds"] == plan.simulation.timeline.copy_wait_seconds
    assert any("are in host memory between forward and backward" in n for n in report["notes"])
    assert plan_report(planned())["host_bytes"] == 0
