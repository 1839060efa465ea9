"""A plan file is data, whatever is in it, and a run is held to it before anything is issued."""

from __future__ import annotations

import dataclasses
import io
import json
import operator
import pickle
import re
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from graph_trainer.cli.plan import main as plan_main
from graph_trainer.core.analysis.mesh_groups import RankClasses
from graph_trainer.core.ordering.sequences import issued_by
from graph_trainer.core.passes.pipeline import run_passes
from graph_trainer.core.sharding.collectives import all_gather, all_reduce
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.errors import ConfigError, VerificationError
from graph_trainer.planner.comparison import comparison, save, table
from graph_trainer.planner.console import print_table
from graph_trainer.planner.fake_run import FakeRun
from graph_trainer.planner.fingerprint import Entry, Fingerprint, fingerprint_of, first_difference
from graph_trainer.planner.plan import make_plan
from graph_trainer.planner.plan_check import (
    HeldTo,
    config_differences,
    differences_to,
    held_to,
    take_flag,
)
from graph_trainer.planner.run_metrics import WARM_UP, IssuedCollectives, Measured, StepTimes
from graph_trainer.planner.saved_plan import SCHEMA, read_plan, write_plan
from graph_trainer.planner.saving import plan_every_class
from graph_trainer.planner.verify_order import rank_classes
from graph_trainer.titan.config.load import load_config
from tests.unit.fake_ranks import become
from tests.unit.graphs import Builder

RANKS = 2


def config_of(*flags, world_size=RANKS, layers=1):
    words = ["--config", "debugmodel", "--training.seq_len", "32"]
    config = load_config(
        [*words, "--training.local_batch_size", "1", *flags], world_size=world_size
    )
    model = config.model_spec.model
    model.layers = model.layers[:layers]
    return config


def captured(config, classes, rank=0):
    """The fingerprint of what training captures, and what the rank issues."""
    run = FakeRun(config, classes.num_ranks, rank, "cpu")
    joint = run.capture()
    run_passes(joint, run.pass_config())
    issued = [each.entry for each in issued_by(joint, classes.num_ranks)]
    return fingerprint_of(joint, rank, classes), issued


def text_of(plan):
    file = io.StringIO()
    write_plan(plan, file)
    return file.getvalue()


@pytest.fixture(scope="module")
def full():
    return make_plan(config_of(), RANKS, load_hardware("cpu"))


@pytest.fixture(scope="module")
def plan(full):
    return plan_every_class(full)


@pytest.fixture
def document(plan):
    return json.loads(text_of(plan))


@pytest.fixture
def saved(plan, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text_of(plan))
    return path


def test_what_is_written_is_read(plan, saved):
    assert read_plan(saved) == plan
    of_rank_1 = plan.of_rank(1)
    assert of_rank_1.rank == 1 and of_rank_1.ranks == 1
    assert len(of_rank_1.fingerprint.issues) > 15 and len(of_rank_1.fingerprint.computes) > 10
    # without overlap_fsdp every collective is waited for in place
    waits = [entry.what.rpartition(", ")[2] for entry in of_rank_1.fingerprint.issues]
    assert waits == [f"waited for when {n} are issued" for n in range(1, len(waits) + 1)]
    assert of_rank_1.predicted.parameter_bytes == of_rank_1.predicted.gradient_bytes > 0
    # what the caller holds and what the graph makes are the peak
    parts = of_rank_1.predicted.peak_by_category
    held = sum(parts[name] for name in ("parameters", "optimizer_state", "buffers_and_batch"))
    assert sum(parts.values()) == of_rank_1.predicted.peak_bytes
    assert of_rank_1.predicted.peak_bytes >= held + of_rank_1.predicted.made_bytes
    assert plan.passes[0] == "normalize_views" and plan.config_table()["base"]


def test_what_is_saved_is_what_the_tables_say(full, plan):
    predicted = plan.of_rank(full.rank).predicted
    assert predicted.peak_bytes == full.peak_bytes
    assert predicted.reserved_bytes == full.reserved_bytes
    assert predicted.step_seconds == full.step_seconds
    row = full.rows[-1]
    for kind, roles in predicted.collectives.items():
        assert sum(volume["count"] for volume in roles.values()) == row.of_kind(kind).count


def test_ranks_of_a_class_have_one_fingerprint_and_others_another():
    """On 4 x 2 ranks, 2 and 4 lie within: other groups, the same step."""
    config = config_of("--parallelism.tensor_parallel_degree", "2", world_size=8)
    classes = rank_classes(FakeRun(config, 8, 0, "cpu"))
    (two, issued_by_2), (four, issued_by_4) = (captured(config, classes, r) for r in (2, 4))
    assert classes.representative_of(4) == classes.representative_of(2) == 2
    assert classes.representative_of(6) == 6
    assert issued_by_2 != issued_by_4
    assert two.digest == four.digest
    text = str(two.issues)
    assert "over tp (2)" in text and "over fsdp (4)" in text and "ranks [" not in text


def attention(kernel, *flags):
    """The fingerprint of one attention, of its forward and no more."""
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
    held = held_to_of(saved, plan, config)
    found, _ = captured(config, plan.classes)
    with pytest.raises(VerificationError) as refused:
        held.check(found, 0)
    message = str(refused.value)
    assert message.startswith(f"rank 0 captured another step than {saved} has: {part} ")
    assert cause in message and "; captured " in message and "leave out --plan" in message
    if part != "input":
        assert "in module '" in message and "(node " in message


def held_to_of(path, plan, config):
    return HeldTo(plan, path, *differences_to(plan, config))


def test_what_makes_no_other_graph_is_let_through_and_told(plan, saved, tmp_path):
    config = config_of(
        *("--training.steps", "7", "--metrics.log_freq", "3", "--dump_folder", str(tmp_path)),
        *("--training.global_batch_size", "4"),
    )
    held = held_to_of(saved, plan, config)
    for rank in range(RANKS):
        held.check(captured(config, plan.classes, rank)[0], rank)
    (remark,) = held.remarks()
    assert "training.steps: planned 40, now 7" in remark and "metrics.log_freq" in remark
    assert remark.index("training.") < remark.index("metrics.") and "dump_folder" not in remark
    assert held_to_of(saved, plan, config_of()).remarks() == []


def test_other_versions_warn_and_are_named_where_the_step_differs(plan, saved):
    older = dataclasses.replace(plan, versions=plan.versions | {"torch": "2.1"})
    held = held_to_of(saved, older, config_of())
    planned = plan.of_rank(0).fingerprint
    held.check(planned, 0)
    (remark,) = held.remarks()
    assert "torch planned 2.1, now" in remark
    other = dataclasses.replace(planned, issues=planned.issues[1:])
    with pytest.raises(VerificationError, match=r"Versions differ: torch planned 2\.1, now 2"):
        held.check(other, 0)


def entry(text):
    return Entry(text, f"in module '{text}'")


@pytest.mark.parametrize(
    ("captured", "told"),
    [
        (("a", "x", "c"), r"collective 1 of 3 \(planned 3\): planned b in .*; captured x in "),
        (("a", "c", "b"), "collective 1 of 3"),
        (("a", "b"), r"collective 2 of 2 \(planned 3\): planned c in module 'c'; captured nothing"),
        (("a", "b", "c", "d"), "planned nothing more; captured d in module 'd'"),
    ],
)
def test_the_first_difference_is_found(captured, told):
    planned = Fingerprint((), (), tuple(map(entry, "abc")))
    other = Fingerprint((), (), tuple(map(entry, captured)))
    assert re.search(told, first_difference(planned, other))
    assert planned.digest != other.digest
    assert first_difference(planned, planned) is None
    moved = Fingerprint((), (), tuple(Entry(e.what, "elsewhere") for e in planned.issues))
    assert first_difference(planned, moved) is None and moved.digest == planned.digest


class Opens:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_pickle_is_not_loaded(tmp_path):
    planted = tmp_path / "planted"
    for protocol in (0, 4):
        path = tmp_path / "plan.json"
        path.write_bytes(pickle.dumps(Opens(planted), protocol))
        with pytest.raises(ConfigError, match=r"--plan .*plan\.json: (cannot be read|not JSON)"):
            read_plan(path)
    assert not planted.exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not JSON, or cut short"),
        ("[" * 200_000, "nested too deeply for a plan"),
        ('{"schema":' + "[" * 900 + "]" * 900 + "}", "nested too deeply"),
        ("[]", "not a plan: it has no schema"),
        ('{"schema": "graph_trainer.plan/1"}', "and this version reads graph_trainer.saved_plan/1"),
        ('{"schema": "graph_trainer.saved_plan/2"}', "Write the plan again"),
        (f'{{"schema": "{SCHEMA}", "world_size": NaN}}', "NaN is no number"),
        ('{"schema": ' + "9" * 10_000 + "}", "not JSON, or cut short"),
        (f'{{"schema": "{SCHEMA}"}}', "versions is missing"),
    ],
)
def test_no_plan_is_refused(tmp_path, text, told):
    path = tmp_path / "plan.json"
    path.write_text(text)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # Python's own, which torch._dynamo raises when it is imported
    try:
        with pytest.raises(ConfigError) as refused:
            read_plan(path)
    finally:
        sys.setrecursionlimit(limit)
    assert str(refused.value).startswith(f"--plan {path}: ") and told in str(refused.value)


def test_a_plan_cut_anywhere_is_refused(plan, tmp_path):
    text, path = text_of(plan), tmp_path / "plan.json"
    for length in range(1, len(text) - 1, len(text) // 40):
        path.write_text(text[:length])
        with pytest.raises(ConfigError, match="not JSON, or cut short"):
            read_plan(path)


def test_what_cannot_be_read_is_refused(tmp_path):
    for path in (tmp_path / "none.json", tmp_path, Path("a\0b")):
        with pytest.raises(ConfigError, match=r"cannot be read: .*Name a file that"):
            read_plan(path)


def changed(document, keys, value):
    *path, last = keys
    table = document
    for key in path:
        table = table[key]
    table[last] = value
    return document


@pytest.mark.parametrize(
    ("keys", "value", "told"),
    [
        (["world_sise"], 3, "world_sise = 3: unknown key. Did you mean world_size?"),
        (["world_size"], "2", 'world_size = "2": not a whole number'),
        (["world_size"], True, "world_size = true: not a whole number"),
        (["world_size"], 3, "they multiply to 2 ranks, and world_size is 3"),
        (["world_size"], 0, "world_size is 0"),
        (["versions"], [], "versions = []: not a table"),
        (["versions", "torch"], 2.13, "versions.torch = 2.13: not text"),
        (["passes"], "default", 'passes = "default": not a list'),
        (["passes", 0], 1, "passes[0] = 1: not text"),
        (["config"], "a = = b", "not TOML"),
        (["config"], "a = " + "[" * 5000, "not TOML"),
        (["microbatches"], -1, "microbatches = -1: not a whole number"),
        (["axes", 0], ["dp_replicate"], "axes[0]"),
        (["axes", 0, 1], [], "an axis without ranks"),
        (["axes", 1, 1], [0, 0], "not one for each class of the axes"),
        (["classes"], [], "not one for each class of the axes"),
        (["classes", 0], None, "classes[0]"),
        (["classes", 0, "rank"], 5, "not one for each class of the axes"),
        (["classes", 0, "extra"], 5, "classes[0].extra = 5: unknown key"),
        (["classes", 0, "op", 0], [0, 10**6], "classes[0].op[0] = [0, 1000000]: not two places"),
        (["classes", 0, "op", 0], [-1, 0], "not two places in texts"),
        (["classes", 0, "collective", 3], "x", "classes[0].collective[3]"),
        (["classes", 0, "collective"], [], "classes[0].fingerprint = "),
        (["classes", 0, "fingerprint"], "0", "the file was changed by hand"),
        (["texts", 0], "parameter 'other' float32[1]", "the file was changed by hand"),
        (["texts"], {}, "texts = {}: not a list"),
        (["classes", 0, "predicted", "peak_bytes"], 1.5, "predicted.peak_bytes = 1.5: not a whole"),
        (["classes", 0, "predicted", "peak_bytes"], 10**400, "not a whole number from 0 to 2**63"),
        (["classes", 0, "predicted", "step_seconds"], "1", "predicted.step_seconds"),
        (["classes", 0, "predicted", "step_seconds"], 1e999, "predicted.step_seconds"),
        (["classes", 0, "predicted", "collectives"], {"a": {"b": 1}}, "collectives.a.b = 1"),
        (["classes", 0, "predicted", "collectives"], {"a": {"b": {}}}, "count is missing"),
    ],
)  # fmt: skip
def test_a_changed_plan_is_refused_with_its_key(document, tmp_path, keys, value, told):
    path = tmp_path / "plan.json"
    # json writes infinity as a word of its own; a number that overflows is what a file can have
    path.write_text(json.dumps(changed(document, keys, value)).replace("Infinity", "1e999"))
    with pytest.raises(ConfigError) as refused:
        read_plan(path)
    message = str(refused.value)
    assert message.startswith(f"--plan {path}: ") and told in message, message
    assert "Write the plan again with `graph-trainer plan --save`." in message


def test_axes_that_stand_for_too_many_classes_are_not_counted_out(document, tmp_path):
    path = tmp_path / "plan.json"
    document["axes"] = [["axis", [0, 1]]] * 40
    path.write_text(json.dumps(document | {"world_size": 2**40}))
    with pytest.raises(ConfigError, match="not one for each class of the axes"):
        read_plan(path)


def test_the_flag_is_taken_out_of_a_command_line():
    assert take_flag(["--a.b", "1"]) == (["--a.b", "1"], None)
    assert take_flag(["--plan", "p", "--a", "1"]) == (["--a", "1"], Path("p"))
    assert take_flag(["--a", "1", "--plan=x y"]) == (["--a", "1"], Path("x y"))
    for words in (["--plan"], ["--plan="], ["--plan", "--a"]):
        with pytest.raises(ConfigError, match="--plan names no file"):
            take_flag(words)


def test_without_a_config_the_plan_gives_it_and_flags_override_it(saved):
    config, held = held_to(["--plan", str(saved), "--training.steps", "3"])
    assert (config.training.seq_len, config.training.steps) == (32, 3)
    assert held.config_differs == ("training.steps: planned 40, now 3",)
    config, held = held_to(["--plan", str(saved), "--config", "debugmodel"])
    assert config.training.seq_len == 256
    assert "training.seq_len: planned 32, now 256" in held.config_differs
    assert held_to(["--training.steps", "3"])[1] is None


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--compile.disable_passes", "rematerialize"], "planned with the passes normalize_views"),
        (["--compile.passes", "default,overlap_fsdp"], "ask for .*, overlap_fsdp. Set them as"),
        (["--compile.mode", "eager"], 'compile.mode = "eager" captures no graph'),
        (["--training.seq_leng", "3"], "unknown flag"),
    ],
)
def test_what_needs_no_capture_is_refused_before_ranks_talk(saved, flags, told):
    with pytest.raises(ConfigError, match=told):
        held_to(["--plan", str(saved), *flags])


def test_a_plan_of_another_program_is_not_saved(tmp_path):
    path = tmp_path / "plan.json"
    with pytest.raises(ConfigError, match="--save is for runs of graph_trainer, and --like tor"):
        plan_main(["--save", str(path), "--like", "torchtitan", "--hardware", "cpu"])
    assert not path.exists()


def test_another_number_of_ranks_is_refused(saved, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"planned for 2 ranks, but 4 are started. Start 2"):
        held_to(["--plan", str(saved)])
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert held_to(["--plan", str(saved)])[1] is not None
    with pytest.raises(ConfigError, match="but 8 are started"):
        held_to(["--plan", str(saved)], world_size=8)


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
    path.write_text(
        json.dumps(changed(document, ["config"], f'base = "llama3_debugmodel"\n{line}'))
    )
    with pytest.raises(ConfigError, match=r"which would be imported, and a plan is data"):
        held_to(["--plan", str(path)])
    assert not seen.exists()
    with pytest.raises(ConfigError, match="planned with the passes"):
        flags = ["--compile.disable_passes", "rematerialize"]
        held_to(["--plan", str(path), "--config", "debugmodel", *flags])
    assert not seen.exists()


def test_differences_name_keys_that_one_side_has_not():
    before = {"metrics": {"a": 1}, "training": {"x": [1, 2]}, "base": "b", "dump_folder": "x"}
    now = {"training": {"x": [1], "y": "z"}, "base": "b", "dump_folder": "y"}
    assert config_differences(before, now) == [
        "training.x: planned [1, 2], now [1]",
        'training.y: planned unset, now "z"',
        "metrics.a: planned 1, now unset",
    ]


def compared(plan, **measured):
    given = dict.fromkeys(
        ("peak_bytes", "reserved_bytes", "made_bytes", "gradient_bytes", "step_seconds", "issued")
    )
    given |= {"sees_memory": True, "parameter_bytes": 2**20, "optimizer_bytes": 0, "steps_timed": 0}
    return comparison(plan, 0, Measured(**(given | measured)))


def test_the_table_tells_predicted_measured_and_ratio(plan, tmp_path, capsys):
    predicted = plan.of_rank(0).predicted
    planned = {
        kind: sum(v["count"] for v in roles.values())
        for kind, roles in predicted.collectives.items()
    }
    found = compared(
        plan,
        made_bytes=2 * predicted.made_bytes,
        step_seconds=predicted.step_seconds / 2,
        steps_timed=6,
        issued=planned | {"all_to_all_single": 1},
    )
    rows = {row.what: row for row in found.rows}
    assert rows["made by the graph"].ratio == 2 and rows["step"].ratio == 0.5
    assert rows["step"].how == "median of 6 steps after 3 of warm-up"
    assert rows["all_gather_into_tensor"].ratio == 1
    # what was issued and not planned is told
    assert (rows["all_to_all_single"].predicted, rows["all_to_all_single"].measured) == (0, 1)
    assert rows["peak memory"].measured is None and "not measured" in rows["peak memory"].how
    print_table(table(found))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert any("all_gather_into_tensor" in line and "1.000" in line for line in lines)
    path = save(found, Path("plan.json"), str(tmp_path))
    written = json.loads(path.read_text())
    assert written["rows"][0]["measured"] is None and len(written["rows"]) == len(found.rows)
    assert written["hardware"] == "cpu"


def test_a_short_run_says_what_it_did_not_measure(plan):
    rows = {row.what: row for row in compared(plan).rows}
    assert rows["step"].how == "not measured: the first 3 steps are warm-up"
    assert rows["made by the graph"].how == "not measured: that is done in step 2"
    assert all(row.ratio is None for row in rows.values() if row.measured is None)
    rows = {row.what: row for row in compared(plan, sees_memory=False).rows}
    assert rows["made by the graph"].how == "not measured: compiled code allocates unseen"


def test_steps_of_warm_up_do_not_count():
    times = StepTimes(torch.device("cpu"))
    for step in range(WARM_UP):
        with times.timing():
            time.sleep(0.05)
        assert (times.steps, times.timed, times.median()) == (step + 1, 0, None)
    for _ in range(4):
        with times.timing():
            pass
    assert times.timed == 4 and times.median() < 0.05


def test_collectives_are_counted_where_they_are_started():
    become(0, 2)
    group = dist.group.WORLD
    x = torch.ones(4, 2)
    with IssuedCollectives() as issued:
        all_reduce(all_gather(x, group), group)
        all_reduce(x, group)
    all_reduce(x, group)
    assert issued.count == {"all_gather_into_tensor": 1, "all_reduce": 2}


def test_a_comparison_that_cannot_be_written_is_an_error(plan, tmp_path):
    with pytest.raises(ConfigError, match="predicted and measured cannot be written"):
        save(compared(plan), Path("p"), str(tmp_path / "none"))
