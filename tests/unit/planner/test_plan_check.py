"""A run is compared with its plan before anything is issued, and refused where it is another."""

from __future__ import annotations

import dataclasses
import json
import operator
import pkgutil
import re
import shlex

import pytest
import torch

from graph_trainer.core.analysis.mesh_groups import RankClasses
from graph_trainer.core.ordering.sequences import issued_by
from graph_trainer.core.passes.pipeline import run_passes
from graph_trainer.errors import ConfigError, VerificationError
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.planner.fingerprint import Entry, Fingerprint, fingerprint_of, first_difference
from graph_trainer.planner.plan_check import (
    PlanCheck,
    differences,
    is_path,
    load_config_and_plan,
)
from graph_trainer.planner.verify_order import rank_classes
from graph_trainer.testing import Builder
from graph_trainer.titan.config.fields import (
    section_classes,
    settable_hints,
    short_names,
    table_class,
)
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from tests.unit.planner.conftest import RANKS, config_of


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
    assert two.digest == four.digest
    text = str(two.issues)
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
    assert first_difference(causal, full).count(" attention bfloat16[1, 2, 8, 4]") == 2
    assert "planned causal attention" in first_difference(causal, full)
    assert "captured full attention" in first_difference(causal, full)
    assert causal.computes[0].what == attention(flash, 0.0, True).computes[0].what
    assert full.computes[0].what == attention(flash, 0.0, False).computes[0].what


DIFFERENT = {
    "sequence": (["--training.seq_len", "64"], "training.seq_len: planned 32, now 64", "input"),
    "batch": (["--training.local_batch_size", "2"], "training.local_batch_size: pl", "input"),
    "mesh": (["--parallelism.tensor_parallel_degree", "2"], "tensor_parallel_degree", "input"),
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
    (remark,) = check.remarks()
    assert "training.steps: planned 40, now 7" in remark and "metrics.log_freq" in remark
    assert remark.index("training.") < remark.index("metrics.") and "dump_folder" not in remark
    assert PlanCheck.of(plan, saved, config_of()).remarks() == []


def test_other_versions_warn_and_are_named_where_the_step_differs(plan, saved):
    older = plan.model_copy(update={"versions": plan.versions | {"torch": "2.1"}})
    check = PlanCheck.of(older, saved, config_of())
    planned = plan.fingerprint(plan.of_rank(0))
    check.check(planned, 0)
    (remark,) = check.remarks()
    assert 'torch: planned "2.1", now' in remark
    other = dataclasses.replace(planned, issues=planned.issues[1:])
    with pytest.raises(VerificationError, match=r'Versions differ: torch: planned "2\.1", now "2'):
        check.check(other, 0)


def entry(text):
    return Entry(text, f"in module '{text}'")


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
    planned = Fingerprint((), (), tuple(map(entry, "abc")))
    other = Fingerprint((), (), tuple(map(entry, captured)))
    assert re.search(message, first_difference(planned, other))
    assert planned.digest != other.digest
    assert first_difference(planned, planned) is None
    moved = Fingerprint((), (), tuple(Entry(e.what, "elsewhere") for e in planned.issues))
    assert first_difference(planned, moved) is None and moved.digest == planned.digest


@pytest.mark.parametrize("words", [["--plan"], ["--plan="], ["--plan", "--a"]])
def test_the_flag_needs_a_file(words):
    with pytest.raises(ConfigError, match="--plan has no value. Write .* plan.json"):
        load_config_and_plan(words)


def test_without_a_config_the_plan_gives_it_and_flags_override_it(saved):
    config, check = load_config_and_plan(["--plan", str(saved), "--training.steps", "3"])
    assert (config.training.seq_len, config.training.steps) == (32, 3)
    assert check.config_differs == ("training.steps: planned 40, now 3",)
    config, check = load_config_and_plan(["--plan", str(saved), "--config", "debugmodel"])
    assert config.training.seq_len == 256
    assert "training.seq_len: planned 32, now 256" in check.config_differs
    assert load_config_and_plan(["--training.steps", "3"])[1] is None


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
    ],
)
def test_what_needs_no_capture_is_refused_before_ranks_communicate(saved, flags, message):
    with pytest.raises(ConfigError, match=message):
        load_config_and_plan(["--plan", str(saved), *flags])


def test_another_number_of_ranks_is_refused(saved, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"planned for 2 ranks, but 4 are started. Start 2"):
        load_config_and_plan(["--plan", str(saved)])
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert load_config_and_plan(["--plan", str(saved)])[1] is not None
    with pytest.raises(ConfigError, match="but 8 are started"):
        load_config_and_plan(["--plan", str(saved)], world_size=8)


@pytest.mark.parametrize(
    "line",
    [
        'module = "planted"',
        'module = "graph_trainer_planted"',
        '[loss]\ntype = "planted.inner:Loss.Config"',
        '[[optimizer.param_groups]]\npattern = ".*"\ntype = "planted.inner:X"',
        '[dataloader]\nsources = [[{type = "planted.inner:X"}]]',
        '[override]\nimports = ["torchtitan.overrides.x.y", "planted.inner.f"]',
        '[override]\nimports = [["planted.inner.f", {}]]',
        '[compile]\npasses = ["default", "planted.inner:f"]',
    ],
)
def test_a_plan_names_no_code_to_import(document, tmp_path, monkeypatch, line):
    seen = tmp_path / "imported"
    for package in ("planted", "graph_trainer_planted"):
        (tmp_path / package).mkdir()
        for name in ("__init__", "inner", "config_registry"):
            (tmp_path / package / f"{name}.py").write_text(f"open({str(seen)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "plan.json"
    config = f'base = "llama3_debugmodel"\n{line}'
    path.write_text(json.dumps(document | {"config": config}))
    with pytest.raises(ConfigError, match=r"which would be imported, and a plan is data"):
        load_config_and_plan(["--plan", str(path)])
    with pytest.raises(ConfigError, match="planned with the passes"):
        flags = ["--compile.disable_passes", "deduplicate_unshards"]
        load_config_and_plan(["--plan", str(path), "--config", "debugmodel", *flags])
    assert not seen.exists()


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("", "dump_folder", "/x y"),
        ("", "hf_assets_path", "../x"),
        ("[checkpoint]", "initial_load_path", "x"),
        ("[checkpoint]", "folder", "../../x"),
        ("[dataloader]", "dataset_path", "someone/dataset"),
        ("[validator.dataloader]", "dataset_path", "/x"),
        ("[compile]", "hardware", "x.toml"),
        ("[debug]", "save_config_file", "/x"),
    ],
)
def test_a_plan_names_no_file_that_the_command_line_does_not(
    document, tmp_path, section, key, value
):
    path = tmp_path / "plan.json"
    config = f'base = "llama3_debugmodel"\n{section}\n{key} = "{value}"'
    path.write_text(json.dumps(document | {"config": config}))
    flag = f"{section[1:-1]}.{key}".removeprefix(".")
    with pytest.raises(ConfigError, match=re.escape(f'has {flag} = "{value}"')) as refused:
        load_config_and_plan(["--plan", str(path)])
    words = shlex.split(str(refused.value).partition("what you trust: ")[2].partition(";")[0])
    assert words == [f"--{flag}", value]


def test_flags_name_the_files_of_a_plan(document, tmp_path):
    path = tmp_path / "plan.json"
    config = 'base = "llama3_debugmodel"\ndump_folder = "/x"\nhf_assets_path = "/y"\n'
    path.write_text(json.dumps(document | {"config": config + "[checkpoint]\nfolder = '/z'"}))
    words = ["--plan", str(path), "--dump_folder", "/x", "--checkpoint.folder=/other"]
    with pytest.raises(ConfigError, match=r'config has hf_assets_path = "/y": .*: --hf_assets_'):
        load_config_and_plan(words)
    config, _ = load_config_and_plan([*words, "--hf_assets_path", "/y"])
    assert (config.dump_folder, config.checkpoint.folder) == ("/x", "/other")


# Every key that takes any text, beside those that name code or files.
NO_PATHS = {
    *("activation_checkpoint.determinism_check", "compile.disable_passes", "compile.passes"),
    *("activation_checkpoint.force_recompute_mm_shapes_by_fqns", "dataloader.dataset"),
    *("checkpoint.exclude_from_loading", "dataloader.sources.dataset", "override.imports"),
    *("parallelism.context_parallel_load_balancer", "parallelism.pipeline_parallel_schedule"),
    *("parallelism.context_parallel_ptrr_mask_key", "optimizer.param_groups.pattern"),
    *("parallelism.module_fqns_per_model_part", "optimizer.param_groups.optimizer_name"),
    *("tokenizer.dataset", "validator.dataloader.dataset", "validator.dataloader.sources.dataset"),
    *("optimizer.param_groups.optimizer_kwargs", "optimizer.optimizer_factory_kwargs_by_name"),
}


def texts(cls, prefix=""):
    """Every key of a config that takes any text, in every component of its sections."""
    for name, hint in settable_hints(cls).items():
        classes = section_classes(hint)
        members = [pkgutil.resolve_name(n) for n in short_names(classes).values()]
        entry = table_class(hint)
        for inner in {*classes, *members, *([entry] if entry else [])}:
            yield from texts(inner, f"{prefix}{name}.")
        if not classes and not entry and "str" in str(hint) and "Literal" not in str(hint):
            yield prefix + name


def test_every_key_that_may_name_a_file_is_known():
    found = set(texts(GraphTrainerConfig))
    assert {key for key in found if not is_path(key, "x")} == NO_PATHS
    assert {"dump_folder", "dataloader.sources.dataset_path", "compile.hardware"} < found
    assert not is_path("compile.hardware", "h100-sxm") and is_path("compile.hardware", "h100")


def test_differences_name_keys_that_one_side_lacks():
    before = {"metrics": {"a": 1}, "training": {"x": [1, 2]}, "base": "b", "dump_folder": "x"}
    now = {"training": {"x": [1], "y": "z"}, "base": "b", "dump_folder": "y"}
    assert differences(before, now) == (
        "training.x: planned [1, 2], now [1]",
        'training.y: planned unset, now "z"',
        "metrics.a: planned 1, now unset",
    )
