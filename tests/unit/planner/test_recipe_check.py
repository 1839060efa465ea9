"""`graph-trainer check`: a row says what a plan says, and a lockfile fixes graphs and bytes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from graph_trainer.cli import check_command as command
from graph_trainer.cli import main as cli
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.errors import ConfigError, VerificationError
from graph_trainer.planner import recipe_check
from graph_trainer.planner.changes import flags_of
from graph_trainer.planner.plan import Outcome, make_plan
from graph_trainer.planner.recipe_check import (
    Check,
    Recipe,
    check_recipes,
    check_report,
    difference_of,
)
from graph_trainer.planner.saved_plan import SavedPlan, plan_every_class
from tests.unit.planner.conftest import RANKS, config_of

CPU = load_hardware("cpu")
H100 = load_hardware("h100-sxm")
FULL = ("--activation_checkpoint.type", "full")
ALWAYS = ("--parallelism.fsdp_reshard_after_forward", "always")
TENSOR = ("--parallelism.tensor_parallel_degree", "2")
PIPELINE = "--parallelism.pipeline_parallel"
SHARD = "--parallelism.data_parallel_shard_degree"


def recipe(name="a", *flags):
    """A recipe of one layer."""
    return Recipe(name, lambda more, ranks=None: config_of(*flags, *more, world_size=ranks))


def broken(name, error):
    """A recipe that cannot be loaded."""

    def load(more, ranks=None):
        raise error

    return Recipe(name, load)


def checked(*recipes, hardware=CPU, world_size=RANKS, proves_order=False, **how):
    """The rows of a check."""
    check = Check(hardware, world_size, proves_order, **how)
    return check_recipes(recipes, check, lambda line: None)


@pytest.fixture(scope="module")
def locks(tmp_path_factory):
    """A folder with the lockfile of the recipe "a"."""
    folder = tmp_path_factory.mktemp("locks")
    (row,) = checked(recipe(), lock=folder)
    assert row.passed and row.lock.verdict == "written"
    return folder


@pytest.mark.parametrize(
    ("flags", "hardware"), [(FULL, CPU), (TENSOR, H100), (("--compile.backend", "inductor"), H100)]
)
def test_a_row_says_what_a_plan_says(flags, hardware):
    (row,) = checked(recipe("a", *flags), hardware=hardware)
    plan = make_plan(config_of(*flags), RANKS, hardware)
    band, speed = plan.band, plan.tokens_per_second_per_gpu
    assert (row.fits, row.passed, row.error, row.change) == (plan.fits, True, None, None)
    assert (row.model, row.world_size, row.allowed_bytes) == (plan.model, 2, hardware.memory_bytes)
    shown = check_report([row], hardware)["rows"][0]
    assert shown["needed_bytes"] == plan.needed_bytes > shown["peak_bytes"] - 1
    assert (shown["peak_bytes"], shown["step_seconds"]) == (plan.peak_bytes, plan.step_seconds)
    assert shown["tokens_per_second_per_gpu"] == speed
    assert shown["tokens_per_second_per_gpu_range"] == (band.of_rate(speed) if band else None)
    assert (shown["order"], shown["lock"]) == (None, None)


def test_what_does_not_fit_has_a_change_with_which_it_does():
    flags = ("--training.local_batch_size", "4")
    need = make_plan(config_of(*flags), RANKS, CPU, every_pass=False).needed_bytes
    small = replace(CPU, memory_gib=(need - 1) / 2**30)
    (row,) = checked(recipe("a", *flags), hardware=small)
    assert not row.passed and row.error is None and row.outcome.needed_bytes == need
    changed = make_plan(config_of(*flags, *flags_of(row.change.config)), RANKS, small)
    assert changed.fits and changed.needed_bytes == row.change.needed_bytes < need


def test_what_nothing_makes_fit_fails_without_a_change(monkeypatch):
    helps = Outcome(config={"training.seq_len": "16"}, needed_bytes=1)
    monkeypatch.setattr(recipe_check, "advise", lambda *args: [helps])
    (row,) = checked(recipe(), hardware=replace(CPU, memory_gib=1e-4))
    assert not row.passed and row.error is None and row.change is None


def test_one_bad_recipe_does_not_hide_the_others():
    rows = checked(
        broken("b", ConfigError("no such key")),
        broken("c", RuntimeError("of a model")),
        recipe("d", *TENSOR[:1], "4"),
        recipe(),
    )
    refused = [row.error for row in rows]
    assert refused[0] == "no such key" and refused[3] is None
    assert refused[1].startswith("RuntimeError at ") and refused[1].endswith("of a model")
    assert "tensor_parallel_degree = 4: does not divide" in refused[2]
    assert [row.passed for row in rows] == [False, False, False, True]
    report = check_report(rows, CPU)
    assert not report["passed"] and len({frozenset(row) for row in report["rows"]}) == 1


def test_ranks_that_nothing_states_are_those_of_the_degrees():
    several = ("--parallelism.data_parallel_replicate_degree", "2", SHARD, "2")
    rows = checked(recipe("a", *several), recipe("b"), world_size=None)
    assert rows[0].world_size == 4 and rows[0].passed
    assert "--world-size: how many ranks?" in rows[1].error


def test_the_order_of_all_ranks_is_proved(monkeypatch):
    (row,) = checked(recipe(), proves_order=True)
    assert row.passed and row.order.verdict == "proved"

    def refuse(*args, all_ranks, **settings):
        if not all_ranks:
            raise VerificationError("ranks 0 and 1 differ")

    monkeypatch.setattr(recipe_check, "verify_order", refuse)
    (row,) = checked(recipe(), proves_order=True)
    assert not row.passed and row.fits
    assert (row.order.verdict, row.order.message) == ("NO", "ranks 0 and 1 differ")
    (row,) = checked(recipe(), proves_order=True, all_ranks=True)
    assert row.passed


def test_a_lockfile_is_what_plan_saves_and_is_equal_to_itself(locks):
    plan = make_plan(config_of(), RANKS, CPU)
    assert (locks / "a.json").read_text() == plan_every_class(plan).to_json()
    (row,) = checked(recipe("folder/a.toml"), against=locks)
    assert row.passed and (row.lock.verdict, row.lock.message) == ("same", "")


CHANGED = {
    "input": (("--training.seq_len", "64"), "training.seq_len: planned 32, now 64"),
    "op": (FULL, 'activation_checkpoint.type: planned "none", now "full"'),
    "collective": (ALWAYS, 'reshard_after_forward: planned "default", now "always"'),
}


@pytest.mark.parametrize("part", CHANGED)
def test_after_a_change_the_first_part_of_the_graph_that_differs_is_named(locks, part):
    flags, cause = CHANGED[part]
    (row,) = checked(recipe("a", *flags), against=locks)
    assert not row.passed and row.fits and row.lock.verdict == "DIFFERS"
    assert f"differs from {locks / 'a.json'}: rank 0: {part} " in row.lock.message
    assert cause in row.lock.message and ": planned " in row.lock.message


def changed_lock(locks, folder, change):
    """A folder with the lockfile after a change of its document."""
    document = json.loads((locks / "a.json").read_text())
    change(document)
    (folder / "a.json").write_text(json.dumps(document))
    return folder


def test_bytes_of_the_same_graph_that_differ_are_named(locks):
    (row,) = checked(recipe("a", "--training.global_batch_size", "4"), against=locks)
    assert not row.passed and row.lock.verdict == "DIFFERS"
    assert "rank 0: the same graph, but peak_bytes: planned " in row.lock.message
    assert "training.global_batch_size: planned -1, now 4" in row.lock.message


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("key", ["needed_bytes", "peak_bytes", "gradient_bytes"])
def test_bytes_of_every_class_are_compared(plan, document, key, rank):
    assert difference_of(plan, plan) is None
    document["classes"][rank]["predicted"][key] += 3
    locked = SavedPlan.model_validate_json(json.dumps(document))
    difference = difference_of(locked, plan)
    assert f"rank {rank}: the same graph, but {key}: planned " in difference
    assert "(-3)" in difference


def test_another_graph_of_the_last_class_differs(locks, tmp_path):
    def shorter(document):
        del document["classes"]["1"]["fingerprint"]["collectives"][-1]

    (row,) = checked(recipe(), against=changed_lock(locks, tmp_path, shorter))
    assert not row.passed and "rank 1: collective " in row.lock.message


def test_what_makes_no_other_graph_is_a_remark(locks, tmp_path):
    def older(document):
        document["versions"]["torch"] = "2.1"
        document["hardware"]["memory_gib"] += 1
        document["passes"] = document["passes"][1:]
        document["classes"]["0"]["predicted"]["step_seconds"] *= 2

    folder = changed_lock(locks, tmp_path, older)
    (row,) = checked(recipe("a", "--training.steps", "7"), against=folder)
    assert row.passed and row.lock.verdict == "same"
    for part in (
        *('versions.torch: planned "2.1"', "training.steps: planned 40, now 7"),
        *("hardware.memory_gib: planned", "passes: planned", "A step was planned to take"),
    ):
        assert part in row.lock.message


def other(key, value):
    return lambda document: document.update({key: value})


BAD = {
    "another schema": (other("schema", "graph_trainer.saved_plan/4"), "schema = "),
    "another document": (other("headline", "of --json"), "headline = "),
    "other hardware": (
        lambda document: document["hardware"].update(name="b200"),
        "locked for b200, and the recipe is checked for cpu: check it with --hardware b200, or ",
    ),
    "a config that is not TOML": (other("config", "a = = b"), "not valid TOML"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_lockfile_is_an_error_of_its_row(locks, tmp_path, name):
    change, problem = BAD[name]
    (row,) = checked(recipe(), against=changed_lock(locks, tmp_path, change))
    assert not row.passed and row.fits and row.lock.verdict == "error"
    assert row.lock.message.startswith(f"--against {tmp_path / 'a.json'}: ")
    assert problem in row.lock.message


def test_a_lockfile_that_cannot_be_read_is_an_error_with_the_remedy(tmp_path):
    (tmp_path / "a.json").write_text("not JSON")
    (tmp_path / "c.json").mkdir()
    rows = checked(recipe(), recipe("b"), recipe("c"), against=tmp_path)
    assert not any(row.passed for row in rows)
    for row, problem in zip(rows, ("Invalid JSON", "No such file", "Is a directory"), strict=True):
        path = tmp_path / f"{row.config}.json"
        assert row.lock.message.startswith(f"--against {path}: ") and problem in row.lock.message
        assert f"write it again with --lock {tmp_path}" in row.lock.message
    (row,) = checked(recipe("c"), lock=tmp_path)
    assert row.lock.verdict == "error" and "Is a directory" in row.lock.message


def test_a_lockfile_of_other_ranks_is_an_error(locks):
    (row,) = checked(recipe(), world_size=4, against=locks)
    assert not row.passed and row.lock.verdict == "error"
    assert "locked for 2 ranks, and the recipe is checked for 4: check" in row.lock.message


def test_a_pipeline_fits_or_not_and_cannot_be_locked(tmp_path, monkeypatch):
    def load(more, ranks=None):
        words = [f"{PIPELINE}_degree", "2", f"{PIPELINE}_schedule", "1F1B"]
        config = config_of(*words, "--training.local_batch_size", "4", *more, world_size=ranks)
        config.model_spec.model.layers *= 2
        return config

    (row,) = checked(Recipe("a", load), proves_order=True, lock=tmp_path)
    assert row.passed and row.outcome.needed_bytes >= row.outcome.peak_bytes > 0
    assert (row.order.verdict, row.lock.verdict) == ("proved", "-")
    assert "pipeline" in row.lock.message and not list(tmp_path.iterdir())
    need = row.outcome.needed_bytes
    small = replace(CPU, memory_gib=(need - 1) / 2**30)
    (row,) = checked(Recipe("a", load), hardware=small)
    assert not row.passed and row.error is None
    assert row.change.fits and row.change.needed_bytes < need == row.outcome.needed_bytes
    helps = [Outcome(config={"a": "1"}), Outcome(config={"a": "2"}, fits=True)]
    monkeypatch.setattr(recipe_check, "advise_pipeline", lambda *args: helps)
    (row,) = checked(Recipe("a", load), hardware=small)
    assert row.change is helps[1]


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command on recipes of one layer; its exit code and what it prints."""

    def load(words, world_size, prog, flags):
        if "missing.toml" in words:
            raise ConfigError("missing.toml: there is no such file")
        place = words.index("--config")
        return config_of(*words[:place], *words[place + 2 :], world_size=world_size)

    monkeypatch.setattr(command, "load_for_plan", load)

    def run(*words):
        code = cli.main(["check", *words])
        out, err = capsys.readouterr()
        assert max(map(len, (out + err).splitlines()), default=0) <= 100
        return code, out, err

    return run


CHEAP = ("--hardware", "cpu", "--world-size", "2", "--no-order")


def test_exit_codes_and_documents(run, tmp_path):
    """Configs stand before, between and after flags, whose values are not taken for configs."""
    locks, file = tmp_path / "new/locks", tmp_path / "check.json"
    code, out, err = run("b.toml", *CHEAP, "--training.steps", "7", "c", "--lock", str(locks))
    assert code == 0 and "All 2 passed." in out and "check [" in err
    assert sorted(path.name for path in locks.iterdir()) == ["b.json", "c.json"]
    words = ("b.toml", "missing.toml", *CHEAP, "--against", str(locks), "--json", str(file))
    code, out, _ = run(*words)
    assert code == 1 and "1 of 2 failed." in out and "- missing.toml: refused: " in out
    document = json.loads(file.read_text())
    assert document["schema"] == "graph_trainer.check/1" and not document["passed"]
    assert [row["passed"] for row in document["rows"]] == [True, False]
    assert document["rows"][0]["lock"]["verdict"] == "same"
    code, out, _ = run("b.toml", *CHEAP, *ALWAYS, "--against", str(locks))
    assert code == 1 and "DIFFERS" in out and "collective" in out


def test_a_message_about_several_recipes_stands_once(run):
    code, out, _ = run("a", "b", *CHEAP, *TENSOR[:1], "4")
    assert "recipe" in out and "needs" not in out and "step" not in out
    assert code == 1 and out.count("does not divide") == 1 and "- a, b: refused: " in out


BAD_COMMANDS = {
    "nothing to check": ([], "no configs: name TOML files or shipped configs"),
    "a value and no config": (["--training.steps", "7"], "no configs"),
    "unknown hardware": (["a", "--hardware", "h100-smx"], "did you mean 'h100-sxm'?"),
    "both": (["a", "--lock", "TMP", "--against", "TMP"], "--lock and --against"),
    "all ranks of no proof": (["a", "--no-order", "--all-ranks"], "--all-ranks is for the proof"),
    "a config behind a flag": (["a", "--config", "b"], "configs are named without a flag"),
    "no ranks": (["a", "--world-size", "0"], "write a whole number from 1"),
    "a flag without its name": (["a", "--", "b"], "unexpected"),
    "no folder for the file": (["a", "--json", "TMP/none/x"], "there is no folder TMP/none"),
    "no folder of locks": (["a", "--against", "TMP/none"], "there is no such folder: write"),
    "a folder below a file": (["a", "--lock", "TMP/file/x"], "nor one that can be made"),
    "a folder that is a file": (["a", "--lock", "TMP/file"], "nor one that can be made"),
    "one lockfile for two": (
        ["x/a.toml", "b", "y/a.toml", "--lock", "TMP"],
        "x/a.toml and y/a.toml have one lockfile, TMP/a.json",
    ),
    "one lockfile to compare two with": (["a", "a.toml", "--against", "TMP"], "one lockfile"),
    "a lockfile and the document": (
        ["a", "--lock", "TMP", "--json", "TMP/a.json"],
        "--json and --lock of a both write TMP/a.json",
    ),
}


@pytest.mark.parametrize("name", BAD_COMMANDS)
def test_bad_input_is_refused_before_the_work(monkeypatch, capsys, tmp_path, name):
    words, problem = BAD_COMMANDS[name]
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(command, "check_recipes", lambda *a: pytest.fail("the work was begun"))
    code = cli.main(["check", *(word.replace("TMP", str(tmp_path)) for word in words)])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert problem in " ".join(err.replace(str(tmp_path), "TMP").split())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
