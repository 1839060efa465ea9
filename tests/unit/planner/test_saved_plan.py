"""A plan file is data, whatever is in it: it is read as written, or refused with the reason."""

from __future__ import annotations

import json
import pickle
import re
from collections import Counter
from pathlib import Path

import pytest

from graph_trainer.cli.plan import main as plan_main
from graph_trainer.errors import ConfigError
from graph_trainer.planner.saved_plan import SCHEMA, read_plan


def test_what_is_written_is_read(plan, saved):
    assert read_plan(saved) == plan
    second = plan.of_rank(1)
    assert second.rank == 1 and second.ranks == 1
    fingerprint = plan.fingerprint(second)
    assert len(fingerprint.issues) > 5 and len(fingerprint.computes) > 10
    # Each is waited for once it is issued itself, some while later ones are in flight.
    waits = [int(re.search(r"waited for when (\d+) are", e.what)[1]) for e in fingerprint.issues]
    later = [wait - number for number, wait in enumerate(waits, start=1)]
    assert min(later) >= 0 < max(later)
    assert second.predicted.parameter_bytes == second.predicted.gradient_bytes > 0
    # The peak is what the caller keeps alive and what the graph makes.
    parts = second.predicted.peak_by_category
    kept = sum(parts[name] for name in ("parameters", "optimizer_state", "buffers_and_batch"))
    assert sum(parts.values()) == second.predicted.peak_bytes
    assert second.predicted.peak_bytes >= kept + second.predicted.made_bytes
    assert plan.passes[0] == "normalize_views" and plan.config_table()["base"]


def test_what_is_saved_is_what_the_tables_say(full, plan):
    predicted = plan.of_rank(full.rank).predicted
    assert predicted.peak_bytes == full.peak_bytes
    assert (predicted.reserved_bytes, predicted.needed_bytes) == full.need[1:]
    assert predicted.step_seconds == full.step_seconds
    shown = Counter()
    for (kind, _, _), volume in full.rows[-1].collectives.items():
        shown[kind] += volume.count
    assert predicted.counts() == shown and all(shown.values())


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
        with pytest.raises(ConfigError, match=r"--plan .*plan\.json: not JSON"):
            read_plan(path)
    assert not planted.exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not JSON, or cut short"),
        ("[" * 200_000, "recursion limit exceeded"),
        ('{"schema":' + "[" * 900 + "]" * 900 + "}", "recursion limit exceeded"),
        ("[]", "not a plan: it has no schema"),
        ('{"schema": "graph_trainer.plan/1"}', "and this version reads graph_trainer.saved_plan/2"),
        ('{"schema": "graph_trainer.saved_plan/2"}', "Write the plan again"),
        ('{"schema": ' + "9" * 10_000 + "}", "not JSON, or cut short"),
        ('{"schema": ' + "9" * 4_000 + "}", "and this version reads graph_trainer.saved_plan/2"),
        (f'{{"schema": "{SCHEMA}"}}', "versions is missing"),
    ],
)
def test_no_plan_is_refused(tmp_path, text, problem):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_plan(path)
    assert str(refused.value).startswith(f"--plan {path}: ") and problem in str(refused.value)


def test_a_plan_cut_anywhere_is_refused(plan, tmp_path):
    text, path = plan.to_json(), tmp_path / "plan.json"
    for length in range(1, len(text) - 1, len(text) // 40):
        path.write_text(text[:length])
        with pytest.raises(ConfigError, match="not JSON, or cut short"):
            read_plan(path)


def test_what_cannot_be_read_is_refused(tmp_path):
    for path in (tmp_path / "none.json", tmp_path, Path("a\0b")):
        with pytest.raises(ConfigError, match=r"cannot be read: .*Name a file that"):
            read_plan(path)


INTEGER, TEXT = "Input should be a valid integer", "Input should be a valid string"


@pytest.mark.parametrize(
    ("keys", "value", "problem"),
    [
        (["world_sise"], 3, "world_sise = 3: unknown key. Did you mean world_size?"),
        (["world_size"], "2", f'world_size = "2": {INTEGER}'),
        (["world_size"], float("nan"), f"world_size = nan: {INTEGER}"),
        (["world_size"], 3, "they multiply to 2 ranks, and world_size is 3"),
        (["world_size"], 0, "world_size is 0"),
        (["versions", "torch"], 2.13, f"versions.torch = 2.13: {TEXT}"),
        (["passes"], "default", 'passes = "default": '),
        (["config"], "a = = b", "not TOML"),
        (["config"], "a = " + "[" * 5000, "not TOML"),
        (["config"], "a = " + "9" * 5000, "not TOML"),
        (["microbatches"], -1, "microbatches = -1: "),
        (["axes", 0, 1], [], "axes[0][1] = []: Tuple should have at least 1 item"),
        (["axes", 1, 1], [0, 0], "not one for each class of the axes"),
        (["classes"], [], "not one for each class of the axes"),
        (["classes", 0, "rank"], 5, "not one for each class of the axes"),
        (["classes", 0, "extra"], 5, "classes[0].extra = 5: unknown key"),
        (["classes", 0, "op", 0], [0, 10**6], "classes[0].op[0] = [0, 1000000]: not two positions"),
        (["classes", 0, "op", 0], [-1, 0], "classes[0].op[0][0] = -1: "),
        (["classes", 0, "collective", 3], "x", 'classes[0].collective[3] = "x": '),
        (["classes", 0, "collective"], [], "classes[0].fingerprint = "),
        (["classes", 0, "fingerprint"], "0", "changed by hand"),
        (["texts", 0], "parameter 'other' float32[1]", "changed by hand"),
        (["classes", 0, "predicted", "peak_bytes"], 1.5, f"predicted.peak_bytes = 1.5: {INTEGER}"),
        (["classes", 0, "predicted", "peak_bytes"], 10**400, "less than 9223372036854775808"),
        (["classes", 0, "predicted", "step_seconds"], 1e999, "predicted.step_seconds = inf"),
        (["classes", 0, "predicted", "collectives"], {"a": {"b": 1}}, "collectives.a.b = 1"),
        (["classes", 0, "predicted", "collectives"], {"a": {"b": {}}}, "count is missing"),
    ],
)  # fmt: skip
def test_a_changed_plan_is_refused_with_its_key(document, tmp_path, keys, value, problem):
    path = tmp_path / "plan.json"
    table = document
    for key in keys[:-1]:
        table = table[key]
    table[keys[-1]] = value
    # json writes infinity as a word of its own; a number that overflows is what a file can have.
    path.write_text(json.dumps(document).replace("Infinity", "1e999"))
    with pytest.raises(ConfigError) as refused:
        read_plan(path)
    message = str(refused.value)
    assert message.startswith(f"--plan {path}: ") and problem in message, message
    assert "Write the plan again with `graph-trainer plan --save`." in message


def test_axes_of_too_many_classes_are_refused_before_they_are_listed(document, tmp_path):
    path = tmp_path / "plan.json"
    document["axes"] = [["axis", [0, 1]]] * 40
    path.write_text(json.dumps(document | {"world_size": 2**40}))
    with pytest.raises(ConfigError, match="not one for each class of the axes"):
        read_plan(path)


def test_a_plan_of_another_program_is_not_saved(tmp_path):
    path = tmp_path / "plan.json"
    with pytest.raises(ConfigError, match="--save is for runs of graph_trainer, and --like tor"):
        plan_main(["--save", str(path), "--like", "torchtitan", "--hardware", "cpu"])
    assert not path.exists()
