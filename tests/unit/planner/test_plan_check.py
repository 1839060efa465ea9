"""A run is compared with its plan before anything is issued, and refused where it is another."""

from __future__ import annotations

import operator
import re
from dataclasses import replace
from importlib import metadata

import pytest
import torch

from graph_trainer.core.analysis.mesh_groups import RankClasses
from graph_trainer.core.ordering.sequences import issued_by
from graph_trainer.core.passes.pipeline import run_passes
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.units import GIB
from graph_trainer.errors import ConfigError, VerificationError
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.planner.fingerprint import Fingerprint, fingerprint_of
from graph_trainer.planner.plan import versions
from graph_trainer.planner.plan_check import PlanCheck, differences, load_config_and_plan
from graph_trainer.planner.verify_order import rank_classes
from graph_trainer.testing import Builder
from graph_trainer.titan.config.write_toml import config_to_toml
from tests.unit.core.simulation.machines import has
from tests.unit.planner.conftest import RANKS, config_of

CONFIG = ["--config", "debugmodel", "--training.seq_len", "32", "--training.local_batch_size", "1"]


def captured(config, classes, rank=0):
    """The fingerprint of what training captures, and what the rank issues."""
    run = FakeRank(config, classes.num_ranks, rank, "cpu")
    joint = run.capture()
    run_passes(joint, run.pass_config())
    issued = [each.entry for each in issued_by(joint, classes.num_ranks)]
    return fingerprint_of(joint, rank, classes), issued


def test_ranks_of_a_class_have_one_fingerprint_and_others_another():
    """On 4 x 2 ranks, 2 and 4 lie within: other groups, the same step."""
    config = config_of("--parallelism.tensor_parallel_degree", "2", world_size=8)
    classes = rank_classes(FakeRank(config, 8, 0, "cpu"))
    (two, issued_by_2), (four, issued_by_4) = (captured(config, classes, r) for r in (2, 4))
    assert classes.representative_of(4) == classes.representative_of(2) == 2
    assert classes.representative_of(6) == 6
    assert issued_by_2 != issued_by_4
    assert two.difference(four) is None
    text = str(two.collectives)
    assert "over tp (2)" in text and "over fsdp (4)" in text and "ranks [" not in text


def attention(kernel, *flags):
    """The fingerprint of one attention, forward alone."""
    b = Builder()
    query, key, value = (b.input(n, 1, 2, 8, 4, dtype=torch.bfloat16) for n in "qkv")
    found = b.call(operator.getitem, b.call(kernel, query, key, value, *flags), 0)
    joint = b.joint(b.call(torch.ops.aten.sum.default, found))
    return fingerprint_of(joint, 0, RankClasses(("fsdp",), ((0,),)))


def test_causal_attention_is_another_step_than_full_whatever_the_kernel():
    cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    causal, full = (attention(cpu, 0.0, is_causal) for is_causal in (True, False))
    message = causal.difference(full)
    assert message.count(" attention bfloat16[1, 2, 8, 4]") == 2
    assert "planned causal attention" in message and "captured full attention" in message
    assert causal.difference(attention(flash, 0.0, True)) is None
    assert full.difference(attention(flash, 0.0, False)) is None


DIFFERENT = {
    "sequence": (["--training.seq_len", "64"], "training.seq_len: planned 32, now 64", "input"),
    "replicas": (
        ["--parallelism.data_parallel_replicate_degree", "2",
         "--parallelism.data_parallel_shard_degree", "1"],
        "parallelism.data_parallel_shard_degree: planned -1, now 1", "input",
    ),
    "policy": (
        ["--parallelism.fsdp_reshard_after_forward", "always"],
        'parallelism.fsdp_reshard_after_forward: planned "default", now "always"', "collective",
    ),
    "checkpointing": (["--activation_checkpoint.type", "full"], "activation_checkpoint", "op"),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_step_is_refused_with_what_differs(plan, saved, name):
    flags, cause, part = DIFFERENT[name]
    config = config_of(*flags)
    found, _ = captured(config, plan.rank_classes)
    with pytest.raises(VerificationError) as refused:
        PlanCheck.of(plan, saved, config).check(found, 0)
    message = str(refused.value)
    assert message.startswith(f"rank 0 captured another step than {saved} has: {part} ")
    assert cause in message and "; captured " in message and "leave out --plan" in message
    if part != "input":
        assert "in module '" in message and "(node " in message


def test_what_makes_no_other_graph_trains_with_a_remark(plan, saved, tmp_path):
    config = config_of(
        *("--training.steps", "7", "--metrics.log_freq", "3", "--dump_folder", str(tmp_path)),
        *("--training.global_batch_size", "4"),
    )
    check = PlanCheck.of(plan, saved, config)
    for rank in range(RANKS):
        check.check(captured(config, plan.rank_classes, rank)[0], rank)
    remark = check.remark()
    assert "training.steps: planned 40, now 7" in remark and "metrics.log_freq" in remark
    assert remark.index("training.") < remark.index("metrics.") and "dump_folder" not in remark
    assert PlanCheck.of(plan, saved, config_of()).remark() == ""


def test_other_versions_warn_and_are_named_where_the_step_differs(plan, saved):
    older = plan.model_copy(update={"versions": plan.versions | {"torch": "2.1"}})
    check = PlanCheck.of(older, saved, config_of())
    planned = plan.of_rank(0).fingerprint
    check.check(planned, 0)
    assert 'versions.torch: planned "2.1", now "2' in check.remark()
    other = planned.model_copy(update={"collectives": planned.collectives[1:]})
    with pytest.raises(VerificationError, match=r'versions\.torch: planned "2\.1", now "2'):
        check.check(other, 0)
    with pytest.raises(VerificationError, match="Config and versions are the plan's; it was"):
        PlanCheck.of(plan, saved, config_of()).check(other, 0)


def test_a_plan_whose_config_is_no_toml_is_refused(plan, saved):
    broken = plan.model_copy(update={"config": "a = = b"})
    with pytest.raises(ConfigError, match="--plan .*: config, line 1, column 5: not valid TOML"):
        PlanCheck.of(broken, saved, config_of())


def test_of_many_differences_the_first_are_shown(plan, saved):
    differences = tuple(f"key {place}" for place in range(10))
    assert PlanCheck(plan, saved, differences).remark().endswith("key 7; and 2 more")


def issuing(texts, where="in module '{}'"):
    """A step of these collectives."""
    collectives = tuple((text, where.format(text)) for text in texts)
    return Fingerprint(inputs=(), ops=(), collectives=collectives)


@pytest.mark.parametrize(
    ("captured", "message"),
    [
        (("a", "x", "c"), r"collective 1 of 3 \(planned 3\): planned b in .*; captured x in "),
        (("a", "c", "b"), "collective 1 of 3"),
        (("a", "b"), r"collective 2 of 2 \(planned 3\): planned c in module 'c'; captured nothing"),
        (("a", "b", "c", "d"), "planned nothing more; captured d in module 'd'"),
    ],
)
def test_the_first_difference_is_found(captured, message):
    planned = issuing("abc")
    assert re.search(message, planned.difference(issuing(captured)))
    assert planned.difference(issuing("abc", where="elsewhere")) is None


@pytest.mark.parametrize("words", [["--plan"], ["--plan="], ["--plan", "--a"]])
def test_the_flag_needs_a_file(words):
    with pytest.raises(ConfigError, match="--plan has no value. Write .* plan.json"):
        load_config_and_plan(words)


def test_the_command_line_gives_the_config(saved):
    config, check = load_config_and_plan(["--plan", str(saved), *CONFIG, "--training.steps", "3"])
    assert (config.training.seq_len, config.training.steps) == (32, 3)
    assert [each for each in check.differences if each.startswith("training.steps: ")]
    assert load_config_and_plan(["--training.steps", "3"])[1] is None
    with pytest.raises(ConfigError, match="names nothing to train. Give the --config"):
        load_config_and_plan(["--plan", str(saved), "--training.steps", "3"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--compile.disable_passes", "deduplicate_unshards"],
            "planned with the passes normalize_views",
        ),
        (["--compile.passes", "default,overlap_fsdp"], "ask for .*, overlap_fsdp, .*Set them as"),
        (["--compile.mode", "eager"], 'compile.mode = "eager" captures no graph'),
        (["--training.seq_leng", "3"], "unknown key"),
        (["--training.seq_len", "64"], "training.seq_len: planned 32, now 64. Train what was"),
        (["--training.local_batch_size", "2"], "local_batch_size: planned 1, now 2. Train what"),
    ],
)
def test_what_needs_no_capture_is_refused_before_ranks_communicate(saved, flags, message):
    with pytest.raises(ConfigError, match=message):
        load_config_and_plan(["--plan", str(saved), *CONFIG, *flags])


def needing(plan, need, hardware=None):
    """The plan with a need of bytes on the rank that needs most."""
    big = plan.model_copy(update={"hardware": hardware or plan.hardware}, deep=True)
    rank = max(big.classes)
    predicted = big.classes[rank].predicted.model_copy(update={"needed_bytes": need})
    big.classes[rank] = big.classes[rank].model_copy(update={"predicted": predicted})
    return big


def test_a_plan_that_cannot_fit_is_refused_before_ranks_start(plan, tmp_path):
    """On the rank that needs most, within the limit or else the memory of the plan's hardware."""
    path, limit = tmp_path / "big.json", "--compile.memory_limit_gib"
    hardware = replace(load_hardware("h100-sxm"), name="a_profile_of_ones_own", memory_gib=81.0)

    def load(*flags, need=80 * GIB):
        path.write_text(needing(plan, need, hardware).to_json())
        return load_config_and_plan(["--plan", str(path), *CONFIG, *flags])[1]

    with pytest.raises(ConfigError) as refused:
        load(limit, "79.5")
    assert str(refused.value).startswith(f"--plan {path}: the step needs 80.00 GiB on the rank")
    assert "compile.memory_limit_gib is 79.5 GiB. Plan" in str(refused.value)
    assert str(refused.value).endswith("or raise compile.memory_limit_gib.")
    assert load(limit, "80") and load(need=81 * GIB).plan.hardware == hardware
    message = "is unset and 'a_profile_of_ones_own' has 81 GiB.*take the risk with .*limit_gib = 0"
    with pytest.raises(ConfigError, match=message):
        load(need=81 * GIB + 1)
    assert load(limit, "0", need=81 * GIB + 1)


def test_a_rehearsed_run_is_refused_as_its_ranks_would_refuse_it(plan, saved):
    check = PlanCheck.of(plan, saved, config_of(), rehearses=True)
    check.check_run(plan, None)
    room = int(plan.hardware.memory_gib * GIB)
    with pytest.raises(ConfigError, match="is unset and 'cpu' has"):
        check.check_run(needing(plan, room + 1), None)
    check.check_run(needing(plan, room + 1), 0)
    last = max(plan.classes)
    of_last = plan.classes[last].fingerprint
    other = plan.model_copy(deep=True)
    other.classes[last] = plan.classes[last].model_copy(
        update={"fingerprint": of_last.model_copy(update={"ops": of_last.ops[1:]})}
    )
    with pytest.raises(VerificationError, match=f"^rank {last} captured another step"):
        check.check_run(other, None)


def test_a_device_without_a_profile_is_named_and_not_compared_by_its_substitute(
    plan, saved, monkeypatch
):
    planned = config_of("--compile.hardware", "h100-sxm")
    for_h100 = plan.model_copy(update={"config": config_to_toml(planned)})
    has(monkeypatch, "NVIDIA GH200 480GB", 94.5)
    difference = PlanCheck.of(for_h100, saved, config_of()).remark()
    assert 'hardware: planned "h100-sxm", now "h100-sxm in place of NVIDIA GH200' in difference
    assert not PlanCheck.of(for_h100, saved, config_of(), rehearses=True).remark()
    has(monkeypatch, "NVIDIA H100 80GB HBM3", 79.1)
    assert not PlanCheck.of(for_h100, saved, config_of()).remark()


def test_another_number_of_ranks_is_refused(saved, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"planned for 2 ranks, but 4 are started. Start 2"):
        load_config_and_plan(["--plan", str(saved), *CONFIG])
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert load_config_and_plan(["--plan", str(saved), *CONFIG])[1] is not None
    with pytest.raises(ConfigError, match="but 8 are started"):
        load_config_and_plan(["--plan", str(saved), *CONFIG], world_size=8)


def test_differences_name_keys_that_one_side_lacks():
    before = {"metrics": {"a": 1}, "training": {"x": [1, 2]}, "base": "b", "dump_folder": "x"}
    now = {"training": {"x": [1], "y": "z"}, "base": "b", "dump_folder": "y"}
    # where a run writes and what it shows are no part of a plan
    before["metrics"]["console"], now["metrics"] = "normal", {"console": "quiet"}
    assert differences(before, now) == (
        "training.x: planned [1, 2], now [1]",
        'training.y: planned unset, now "z"',
        "metrics.a: planned 1, now unset",
    )


def test_a_checkout_that_is_not_installed_has_a_version_too(monkeypatch):
    real = metadata.version

    def version(package):
        if package == "graph_trainer":
            raise metadata.PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(metadata, "version", version)
    found = versions()
    assert found["graph_trainer"] == "of a checkout" and found["torch"]
