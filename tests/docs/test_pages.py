"""The documentation keeps its word: code runs, listings are what is printed now, names exist.

Commands that start ranks are run by test_commands.py.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
from pathlib import Path
from typing import get_args

import pytest

from tests.docs.pages import (
    BLOCKS,
    INDEX,
    INLINE,
    NAMES_FILE,
    PAGES,
    ROOT,
    blocks_of,
    commands,
    environment,
    source_of,
    starts_ranks,
    toml_name,
    without_blocks,
    workplace,
)
from tests.fresh import Fresh


def of_kind(kind: str) -> list[pytest.param]:
    # programs that name their files are run by what imports them
    found = [b for b in BLOCKS if b.kind == kind and not NAMES_FILE.match(b.text)]
    return [pytest.param(b, id=f"{b.page}:{b.line}") for b in found]


def run(words: list[str], folder: Path) -> list[str]:
    done = subprocess.run(
        words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    return [line.rstrip() for line in done.stdout.splitlines()]


@pytest.mark.parametrize("block", of_kind("python"))
def test_a_python_block_runs_as_written_and_prints_what_is_shown(block, tmp_path, fresh):
    source, shown = source_of(block)
    printed = example(source, tmp_path, fresh)
    assert printed == shown, "the page shows something else; it prints now:\n" + "\n".join(printed)


def example(source: str, folder: Path, fresh: Fresh) -> list[str]:
    """The lines that a program prints."""
    (folder / "example.py").write_text(source)
    done = fresh("example.py", folder=folder)
    assert done.returncode == 0, f"{source}\n{done.stdout}\n{done.stderr}"
    return [line.rstrip() for line in done.stdout.splitlines()]


def test_views_and_waits_are_listed_when_asked_for_as_the_text_says(tmp_path, fresh):
    page = PAGES["README.md"]
    assert "`listing(joint, views=True)`" in page.prose and "`print(joint)`" in page.prose
    (block,) = (b for b in page.blocks if "def capture_toy" in b.text)
    checks = """
from graph_trainer.core.graph.joint_graph import compute_nodes
short, long = listing(joint), listing(joint, views=True)
assert "wait_tensor" in long and "wait_tensor" not in short
assert len(long.splitlines()) == 1 + len(list(compute_nodes(joint.graph)))
assert not set(short.splitlines()) - set(long.splitlines())
assert "def forward(self" in str(joint)
"""
    example(block.text + checks, tmp_path, fresh)


CHEAP = commands(start_ranks=False)
# one plan of a shipped config and one of a reader's own model are made; the planner's tests make
# plans like the others
BEGUN = [
    command
    for block, command in CHEAP
    if " calibrate " in command
    or " check " in command
    or (" plan " in command and block.page != "README.md" and "--module mydecoder" not in command)
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("block", "command"), [pytest.param(*c, id=c[1]) for c in CHEAP if c[1] not in BEGUN]
)
def test_a_command_that_starts_no_ranks_runs_as_written(block, command, tmp_path, fresh):
    folder = workplace(tmp_path)
    if block.output:
        assert block.commands == [command], "a block with an output has one command"
        printed = run(["bash", "-c", command], folder)
        assert printed == block.output, "it prints now:\n" + "\n".join(printed)
        return
    _, *words = shlex.split(command)
    done = fresh("-m", "graph_trainer", *words, folder=folder)
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.full
@pytest.mark.parametrize("command", BEGUN)
def test_a_command_that_plans_as_others_do_begins_its_work(command, tmp_path, monkeypatch):
    from graph_trainer.cli import calibrate_command, check_command, plan_command, plan_pipeline
    from graph_trainer.cli import main as cli
    from graph_trainer.planner import changes

    class WorkBegins(Exception):
        pass

    def begin(*args, **how):
        raise WorkBegins

    monkeypatch.setattr(plan_command, "make_plan", begin)
    monkeypatch.setattr(plan_pipeline, "make_pipeline_plan", begin)
    monkeypatch.setattr(calibrate_command, "make_plan", begin)
    monkeypatch.setattr(check_command, "check_recipes", begin)
    monkeypatch.setattr(changes, "plan_each", begin)
    monkeypatch.chdir(workplace(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(WorkBegins):
        cli.main(shlex.split(command)[1:])


@pytest.mark.parametrize("block", of_kind("toml"))
def test_a_toml_block_is_a_config(block, tmp_path, monkeypatch):
    import tomllib

    from graph_trainer.titan.config.load import load_config
    from graph_trainer.titan.config.write_toml import config_to_toml

    monkeypatch.chdir(workplace(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    config = load_config(["--config", toml_name(block)], world_size=8)
    resolved = tomllib.loads(config_to_toml(config))

    def check(given, found, path):
        for key, value in given.items():
            if isinstance(value, dict):
                check(value, found[key], f"{path}{key}.")
            elif isinstance(value, list) and dict in map(type, value):
                for i, (entry, its) in enumerate(zip(value, found[key], strict=True)):
                    check(entry, its, f"{path}{key}[{i}].")
            else:
                assert found[key] == value, f"{path}{key}"

    check(tomllib.loads(block.text), resolved, "")


def test_every_flag_and_key_in_the_text_is_one(fresh):
    from graph_trainer.titan.activation_policies import POLICIES
    from graph_trainer.titan.config.build import settable_keys
    from graph_trainer.titan.config.load import load_config

    keys = set(settable_keys(load_config(["--loss.type", "chunked_cross_entropy"])))
    for section in POLICIES:
        keys |= {f"activation_checkpoint.{field.name}" for field in dataclasses.fields(section)}
    keys |= {f"{key.rpartition('.')[0]}.type" for key in keys if "." in key}
    ours = [code for code in INLINE if not code.startswith("docker ")]
    flags = {f for code in ours for f in re.findall(r"--([a-z][\w.-]*)", code)}
    assert flags, "the text names no flag"
    plan = fresh("-m", "graph_trainer", "plan", "--help", folder=ROOT).stdout
    assert "--memory-curve" in plan
    for command in ("calibrate", "check", "search"):
        plan += fresh("-m", "graph_trainer", command, "--help", folder=ROOT).stdout
    others = {"plan", "schema", "full", "section.key", "config", "module", "quiet", "to", "verbose"}
    others.add("dry-run")
    for flag in flags - others - set(re.findall(r"--([a-z-]+)", plan)):
        entry = re.sub(r"\.\d+\..*", "", flag)  # --section.list.0.key
        assert re.sub(r"\.no-", ".", entry) in keys, f"--{flag}"
    sections = {key.split(".")[0] for key in keys}
    for code in INLINE:
        key = code.partition(" = ")[0]
        if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", key) and key.split(".")[0] in sections:
            assert key in keys, code


def test_every_name_in_the_text_is_one():
    import graph_trainer as gt
    from graph_trainer.cli import launcher

    names = {n for code in INLINE for n in re.findall(r"\bgt\.(\w+)", code)}
    assert names
    assert not [name for name in names if name not in gt.__all__]
    variables = {c for c in PAGES["training.md"].inline if re.fullmatch(r"[A-Z_]{4,}", c)}
    assert len(variables) > 5
    assert not [name for name in variables if f"\n  {name} " not in launcher.USAGE]
    page = PAGES["architecture.md"]
    stages = [code for code in page.inline if code in gt.Stage.__members__]
    assert stages == [stage.name for stage in gt.Stage]


def test_the_policies_are_those_that_there_are():
    from graph_trainer.core.passes.context import ReshardAfterForward

    table = re.search(r"^\| policy \|.*?\n\n", PAGES["training.md"].prose, re.M | re.S)
    assert table
    assert set(re.findall(r"^\| `(\w+)`", table[0], re.M)) == set(get_args(ReshardAfterForward))


def test_the_default_run_is_as_long_as_the_text_says():
    from graph_trainer.titan.config.load import load_config

    page = PAGES["training.md"]
    said = re.search(r"for (\d+) steps", page.prose)
    assert said and int(said[1]) == load_config([]).training.steps
    assert f"\nstep: {said[1]}  loss: " in page.text


def test_the_shipped_configs_are_those_that_the_text_names():
    text = PAGES["configuration.md"].path.read_text()
    rows = re.findall(r"^\| `graph_trainer\.(\w+)` \| ([^|;]*)", text, re.M)
    named = {family: set(re.findall(r"`([^`]+)`", names)) for family, names in rows}
    shipped: dict[str, set[str]] = {}
    for path in (ROOT / "configs").glob("*/*.toml"):
        if path.parent.name != "hardware":
            shipped.setdefault(path.parent.name, set()).add(path.stem)
    assert named == shipped


MARKDOWN = [
    *(p.path for p in PAGES.values()),
    INDEX,
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
]


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_link_and_file_is_there_and_lines_fit_100_columns(path):
    text = path.read_text(encoding="utf-8")
    prose = without_blocks(text)
    for link in re.findall(r"\]\(([^)#]+)\)", prose):
        assert "://" in link or (path.parent / link).exists(), link
    for name in re.findall(r"`([^`\n]+)`", prose):
        if "your_" not in name and re.fullmatch(
            r"(\./)?(graph_trainer|tests|scripts|configs|docs)/[\w./-]+", name
        ):
            assert (ROOT / name).exists(), name
    assert not [x for x in text.splitlines() if len(x) > 100 and not x.startswith("|")]


def test_every_file_on_a_steps_way_is_there():
    page = PAGES["architecture.md"]
    drawn = re.findall(r"^(?:      \|  )?((?:cli|titan|core)/[\w./]+)", page.text, re.M)
    named = re.findall(r"`((?:cli|titan|core)/[\w./]+)`", page.prose)
    assert len(drawn) > 8 and len(named) > 5
    package = ROOT / "graph_trainer"
    assert not [name for name in drawn + named if not (package / name).exists()]
    files = {p.name for p in package.rglob("*.py")}
    assert not set(re.findall(r"`(\w+\.py)`", page.prose)) - files


def test_the_readme_is_short_and_the_index_has_every_page():
    assert PAGES["README.md"].path.stat().st_size <= 10 * 1024
    links = set(re.findall(r"\]\(([^)]+)\)", INDEX.read_text()))
    assert {name for name in PAGES if name != "README.md"} <= links


@pytest.mark.parametrize(
    "text", ["```console\n$ ls\n```", "```\nls\n```", "```text\na\n```", "```python\n1"]
)
def test_a_block_that_nothing_checks_is_refused(text):
    with pytest.raises(AssertionError, match="line 1"):
        blocks_of(text, "a.md")


def test_a_command_that_nothing_runs_is_refused():
    assert starts_ranks("NGPU=4 ./run_train.sh --x y") and not starts_ranks("graph-trainer passes")
    for command in ("make install", "graph-trainer train --config 8b"):
        with pytest.raises(AssertionError, match="graph-trainer train|make install"):
            starts_ranks(command)
