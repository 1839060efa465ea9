"""A plan file is data, whatever is in it: it is read as written, or refused with the reason."""

from __future__ import annotations

import json
import pickle
import re
from collections import Counter
from pathlib import Path

import pytest

from graph_trainer.cli.plan_command import main as plan_main
from graph_trainer.errors import ConfigError
from graph_trainer.planner.saved_plan import REMEDY, SCHEMA, SavedPlan


def read_plan(path):
    return SavedPlan.read(path, "--plan", REMEDY)


def test_what_is_written_is_read(plan, saved):
    assert read_plan(saved) == plan
    second = plan.of_rank(1)
    assert plan.of_rank(0) is plan.classes[0] and second is plan.classes[1]
    issued = [what for what, _ in second.fingerprint.collectives]
    assert len(issued) > 5 and len(second.fingerprint.ops) > 10
    # Each is waited for once it is issued itself, some while later ones are in flight.
    waits = [int(re.search(r"waited for when (\d+) are", what)[1]) for what in issued]
    later = [wait - number for number, wait in enumerate(waits, start=1)]
    assert min(later) >= 0 < max(later)
    assert second.predicted.parameter_bytes == second.predicted.gradient_bytes > 0
    # The peak is what the caller keeps alive and what the graph makes.
    parts = second.predicted.peak_by_category
    kept = sum(parts[name] for name in ("parameters", "optimizer_state", "buffers_and_batch"))
    assert sum(parts.values()) == second.predicted.peak_bytes
    assert second.predicted.peak_bytes >= kept + second.predicted.made_bytes
    assert plan.passes[0] == "normalize_views" and "\nbase = " in f"\n{plan.config}"


def test_what_is_saved_is_what_the_tables_say(full, plan):
    predicted = plan.of_rank(full.rank).predicted
    assert predicted.peak_bytes == full.peak_bytes
    assert (predicted.reserved_bytes, predicted.needed_bytes) == full.need[1:]
    assert predicted.step_seconds == full.step_seconds
    shown = Counter()
    for (kind, _, _), volume in full.rows[-1].collectives.items():
        shown[kind] += volume.count
    assert predicted.collectives == shown and all(shown.values())


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
        with pytest.raises(ConfigError, match=r"--plan .*plan\.json: Invalid JSON"):
            read_plan(path)
    assert not planted.exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "Invalid JSON: EOF"),
        ("[" * 200_000, "recursion limit exceeded"),
        ("{}", "schema: Field required. Name a file that `graph-trainer plan --save` wrote"),
        ('{"schema": "graph_trainer.saved_plan/2"}', f"Input should be '{SCHEMA}'. Name a file"),
        (f'{{"schema": "{SCHEMA}"}}', "versions: Field required"),
    ],
)
def test_no_plan_is_refused(tmp_path, text, problem):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_plan(path)
    assert str(refused.value).startswith(f"--plan {path}: ") and problem in str(refused.value)


def test_what_cannot_be_read_is_refused(tmp_path):
    for path in (tmp_path / "none.json", tmp_path, Path("a\0b")):
        with pytest.raises(ConfigError, match=r"cannot be read: .*Name a file that"):
            read_plan(path)


OPS = ("fingerprint", "ops")


@pytest.mark.parametrize(
    ("keys", "value", "problem"),
    [
        (["world_sise"], 3, "world_sise = 3: Extra inputs are not permitted"),
        (["world_size"], float("nan"), "world_size = nan: Input should be a valid integer"),
        (["world_size"], 3, "they multiply to 2 ranks, and world_size is 3"),
        (["axes", "fsdp"], [0, 0], "classes: they must be one for each class of the axes"),
        (["classes"], {}, "classes: they must be one for each class of the axes"),
        (["classes", "0", *OPS, 0, 1], 7, "fingerprint.ops.0.1 = 7: Input should be a valid str"),
        (["classes", "0", "predicted", "peak_bytes"], 10**400, "less than 9223372036854775808"),
        (["classes", "0", "predicted", "step_seconds"], 1e999, "predicted.step_seconds = inf"),
    ],
)  # fmt: skip
def test_a_changed_plan_is_refused_with_its_key(document, tmp_path, keys, value, problem):
    """pydantic's own checks are not repeated: one case for each that the models ask for."""
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
    assert "Name a file that `graph-trainer plan --save` wrote, or write the" in message


def test_a_file_of_another_kind_is_told_by_its_schema(document, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"headline": "of --json"} | document | {"schema": "other/2"}))
    with pytest.raises(ConfigError, match='schema = "other/2": Input should be'):
        read_plan(path)


def test_a_class_of_another_rank_is_refused(document, tmp_path):
    path = tmp_path / "plan.json"
    document["classes"]["5"] = document["classes"].pop("1")
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="classes: they must be one for each class of the axes"):
        read_plan(path)


def test_axes_of_too_many_classes_are_refused_before_they_are_listed(document, tmp_path):
    path = tmp_path / "plan.json"
    document["axes"] = {f"axis {number}": [0, 1] for number in range(40)}
    path.write_text(json.dumps(document | {"world_size": 2**40}))
    with pytest.raises(ConfigError, match="one for each class of the axes"):
        read_plan(path)


def test_a_plan_of_another_program_is_not_saved(tmp_path):
    path = tmp_path / "plan.json"
    with pytest.raises(ConfigError, match="--save is for runs of graph_trainer, and --like tor"):
        plan_main(["--save", str(path), "--like", "torchtitan", "--hardware", "cpu"])
    assert not path.exists()
