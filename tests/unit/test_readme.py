"""The README keeps its word: its code runs, its listings are what the tools print now.

Every fenced block has a rule here, and one without a rule fails. Commands that start ranks are run
by tests/integration/test_readme_commands.py.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"

CONTINUES = re.compile(r"continues the\s+block with `(\w+)`")
"""What the paragraph before a Python block says when an earlier one has to run first."""

STARTS_RANKS = ("./run_train.sh", "./run_tests.sh")
"""Commands for tests/integration/test_readme_commands.py; `graph-trainer` ones run here."""


@dataclass
class Block:
    """One fenced block."""

    kind: str
    line: int
    text: str = ""
    paragraph: str = ""
    """The text between the block and what stands before it."""
    output: list[str] = field(default_factory=list)
    """The lines of the `text` blocks that follow: what this one prints."""

    @property
    def commands(self) -> list[str]:
        """The commands of a bash block, without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for text in lines if (line := re.sub(r"(^|\s)#.*", "", text).strip())]


def blocks_of(text: str) -> list[Block]:
    """Every fenced block, `text` blocks handed to the block whose output they are."""
    found: list[Block] = []
    paragraph: list[str] = []
    inside: Block | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.lstrip().startswith("```"):
            if inside is None:
                paragraph.append(line)
            else:
                inside.text += line + "\n"
        elif inside is None:
            assert line.startswith("```"), f"line {number}: an indented fence"
            inside = Block(line[3:].strip(), number, paragraph="\n".join(paragraph))
            paragraph = []
        else:
            assert line == "```", f"line {number}: a fence inside a fence"
            found.append(inside)
            inside = None
    assert inside is None, f"line {inside and inside.line}: a fence that is not closed"
    runnable: Block | None = None
    for block in found:
        if block.kind == "text":
            assert runnable is not None, f"line {block.line}: output of nothing"
            runnable.output += [line.rstrip() for line in block.text.splitlines()]
        else:
            assert block.kind in ("python", "bash", "toml"), (
                f"line {block.line}: no test knows what to do with a block of '{block.kind}'"
            )
            runnable = block
    for block in found:
        assert not (block.kind == "toml" and block.output), f"line {block.line}: TOML has no output"
    return [block for block in found if block.kind != "text"]


TEXT = README.read_text(encoding="utf-8")
BLOCKS = blocks_of(TEXT)
PROSE = re.sub(r"^```.*?^```$", "", TEXT, flags=re.M | re.S)
INLINE = re.findall(r"`([^`\n]+)`", PROSE)


def of_kind(kind: str) -> list[pytest.param]:
    found = [b for b in BLOCKS if b.kind == kind]
    return [pytest.param(b, id=f"line{b.line}") for b in found]


def commands(*, start_ranks: bool) -> list[tuple[Block, str]]:
    """Every command of the README that does, or does not, start ranks, with its block."""
    found = [(b, c) for b in BLOCKS if b.kind == "bash" for c in b.commands]
    return [(b, c) for b, c in found if _starts_ranks(c) == start_ranks]


def _starts_ranks(command: str) -> bool:
    words = [w for w in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=.*", w)]
    if words[0] in STARTS_RANKS:
        return True
    assert words[0] == "graph-trainer", f"no test knows how to run `{command}`"
    assert words[1] != "train" or "--help" in words, f"`{command}`: write it with ./run_train.sh"
    return False


def environment() -> dict[str, str]:
    """A user's environment in which the one that runs these tests is active."""
    left_out = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "NGPU",
        "MODULE",
        "CONFIG",
        "NNODES",
        "LOG_RANK",
    )
    kept = {k: v for k, v in os.environ.items() if k not in left_out}
    folder = Path(sys.executable).parent
    return kept | {
        "PATH": os.pathsep.join([str(folder), os.environ["PATH"]]),
        "VIRTUAL_ENV": str(folder.parent),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }


def workplace(folder: Path) -> Path:
    """A folder that looks like a checkout in which a reader has made what the README speaks of:
    its TOML files under their names, a folder of text and an (empty) one of a tokenizer."""
    for block in BLOCKS:
        if block.kind == "toml":
            (folder / toml_name(block)).write_text(block.text)
    for script in STARTS_RANKS:
        (folder / script).symlink_to(ROOT / script)
    (folder / "my_text").mkdir()
    for name in ("README.md", "CONTRIBUTING.md", "LICENSE"):
        (folder / "my_text" / f"{name}.txt").write_text((ROOT / name).read_text(encoding="utf-8"))
    (folder / "assets/hf/Llama-3.1-8B").mkdir(parents=True)
    return folder


def toml_name(block: Block) -> str:
    """The file name in a TOML block's first line."""
    named = re.match(r"# (\S+\.toml)\n", block.text)
    assert named, f"line {block.line}: a TOML block begins with its file's name in a comment"
    return named[1]


def source_of(block: Block) -> tuple[str, list[str]]:
    """A Python block as a program with all that its paragraph says comes first, and the output."""
    said = CONTINUES.search(block.paragraph)
    if not said:
        return block.text, block.output
    before = BLOCKS[: BLOCKS.index(block)]
    (first,) = (b for b in before if b.kind == "python" and re.search(rf"\b{said[1]}\b", b.text))
    source, output = source_of(first)
    return f"{source}\n{block.text}", output + block.output


def run(words: list[str], folder: Path) -> list[str]:
    done = subprocess.run(
        words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    return [line.rstrip() for line in done.stdout.splitlines()]


@pytest.mark.parametrize("block", of_kind("python"))
def test_a_python_block_runs_as_written_and_prints_what_is_shown(block, tmp_path):
    source, shown = source_of(block)
    (tmp_path / "example.py").write_text(source)
    printed = run([sys.executable, "example.py"], tmp_path)
    assert printed == shown, "the README shows something else; it prints now:\n" + "\n".join(
        printed
    )


def test_views_and_waits_are_listed_when_asked_for_as_the_text_says(tmp_path):
    assert "`listing(joint, views=True)`" in PROSE and "`print(joint)`" in PROSE
    (block,) = (b for b in BLOCKS if "print(listing(joint))" in b.text)
    checks = """
from graph_trainer.core.graph.joint_graph import compute_nodes
short, long = listing(joint), listing(joint, views=True)
assert "wait_tensor" in long and "wait_tensor" not in short
assert len(long.splitlines()) == 1 + len(list(compute_nodes(joint.graph)))
assert not set(short.splitlines()) - set(long.splitlines())
assert "def forward(self" in str(joint)
"""
    (tmp_path / "example.py").write_text(block.text + checks)
    run([sys.executable, "example.py"], tmp_path)


@pytest.mark.parametrize(
    ("block", "command"), [pytest.param(*c, id=c[1]) for c in commands(start_ranks=False)]
)
def test_a_command_that_starts_no_ranks_runs_as_written(block, command, tmp_path):
    printed = run(["bash", "-c", command], workplace(tmp_path))
    assert any(printed)
    if block.output:
        assert block.commands == [command], "a block with an output has one command"
        assert printed == block.output, "it prints now:\n" + "\n".join(printed)


@pytest.mark.parametrize("block", of_kind("toml"))
def test_a_toml_block_is_a_config(block, tmp_path, monkeypatch):
    import tomli

    from graph_trainer.titan.config.load import load_config
    from graph_trainer.titan.config.serialize import config_to_toml

    monkeypatch.chdir(workplace(tmp_path))
    config = load_config(["--config", toml_name(block)], world_size=8)
    resolved = tomli.loads(config_to_toml(config))

    def check(given, found, path):
        for key, value in given.items():
            if isinstance(value, dict):
                check(value, found[key], f"{path}{key}.")
            else:
                assert found[key] == value, f"{path}{key}"

    check(tomli.loads(block.text), resolved, "")


def test_every_flag_and_key_in_the_text_is_one():
    from graph_trainer.titan.config.fields import settable_keys
    from graph_trainer.titan.config.load import load_config

    keys = set(settable_keys(load_config([])))
    flags = {f for code in INLINE for f in re.findall(r"--([a-z][\w.-]*)", code)}
    assert flags, "the text names no flag"
    plan = "\n".join(run(["graph-trainer", "plan", "--help"], ROOT))
    own = set(re.findall(r"--([a-z-]+)", plan)) | {"plan"}
    for flag in flags - {"section.key", "config", "module"} - own:
        assert flag in keys, f"--{flag}"
    sections = {key.split(".")[0] for key in keys}
    for code in INLINE:
        if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", code) and code.split(".")[0] in sections:
            assert code in keys, code


def test_every_name_in_the_text_is_one():
    import graph_trainer as gt
    from graph_trainer.cli import launcher

    names = {n for code in INLINE for n in re.findall(r"\bgt\.(\w+)", code)}
    assert names
    assert not [name for name in names if name not in gt.__all__]
    stages = [code for code in INLINE if code.isupper() and code in gt.Stage.__members__]
    once = list(dict.fromkeys(stages))
    assert once == [stage.name for stage in gt.Stage]
    variables = [code for code in INLINE if re.fullmatch(r"[A-Z_]+", code) and code not in stages]
    assert variables
    assert not [name for name in variables if f"\n  {name} " not in launcher.USAGE]


def test_every_file_that_the_text_names_is_there():
    links = [t for t in re.findall(r"\]\(([^)]+)\)", PROSE) if "://" not in t]
    files = [
        code
        for code in INLINE
        if re.fullmatch(r"(\./)?[\w.]+(/[\w.]+)*\.(py|sh|sbatch|toml)", code)
    ]
    made = {"config.toml"}
    assert links
    assert files
    assert not [
        name for name in (*links, *files) if name not in made and not (ROOT / name).exists()
    ]
    named = re.search(r"The others are (.*?)\. ", PROSE, re.S)
    assert named
    others = set(re.findall(r"`(\w+)`", named[1]))
    assert others | {"debugmodel"} == {
        path.stem for path in (ROOT / "configs/llama3").glob("*.toml")
    }


def test_the_policies_are_those_that_there_are():
    from graph_trainer.core.passes.context import ReshardAfterForward

    table = re.search(r"^\| policy \|.*?\n\n", PROSE, re.M | re.S)
    assert table
    assert set(re.findall(r"^\| `(\w+)`", table[0], re.M)) == set(get_args(ReshardAfterForward))


def test_the_default_run_is_as_long_as_the_text_says():
    from graph_trainer.titan.config.load import load_config

    said = re.search(r"for (\d+) steps", PROSE)
    assert said and int(said[1]) == load_config([]).training.steps
    assert f"\nstep: {said[1]}  loss: " in TEXT


def test_lines_fit_100_columns():
    assert [line for line in TEXT.splitlines() if len(line) > 100] == []


@pytest.mark.parametrize(
    "text", ["```console\n$ ls\n```", "```\nls\n```", "```text\na\n```", "```python\n1"]
)
def test_a_block_that_nothing_checks_is_refused(text):
    with pytest.raises(AssertionError, match="line 1"):
        blocks_of(text)


def test_a_command_that_nothing_runs_is_refused():
    assert _starts_ranks("NGPU=4 ./run_train.sh --x y") and not _starts_ranks(
        "graph-trainer passes"
    )
    for command in ("make install", "graph-trainer train --config 8b"):
        with pytest.raises(AssertionError, match="graph-trainer train|make install"):
            _starts_ranks(command)
