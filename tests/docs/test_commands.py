"""The documentation's commands that start ranks: one of a kind is run as written but for two steps,
the others are configs that load."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from graph_trainer.core.passes.catalogue import registered_passes
from graph_trainer.titan.config.load import load_config
from tests.docs import pages

pytestmark = [pytest.mark.timeout(300), pytest.mark.full]

SECONDS = 240
# in float32, as a CPU without instructions for bfloat16 takes fifteen times as long in that
SHORTER = " --training.steps 2 --metrics.log_freq 1 --training.mixed_precision_param float32"
COMMANDS = pages.commands(start_ranks=True)
OWN_MODEL = "--module mydecoder"
TRAINING = [c for c in COMMANDS if "./run_train.sh" in c[1] and "--plan" not in c[1]]
# the run that a page shows, and one of a reader's own model; the integration tests train the others
RUN = [(block, command) for block, command in TRAINING if block.output or OWN_MODEL in command]
TESTING = [c for c in COMMANDS if "./run_tests.sh" in c[1]]
OF_TORCHTITAN = [c[1] for c in COMMANDS if "-m torchtitan.train" in c[1]]
BISECTING = [c[1] for c in COMMANDS if "bisect-passes" in c[1] and OWN_MODEL not in c[1]]

TABLE = {"after", "capture", *registered_passes()}
"""The first column of the passes' table."""


def run(command: str, folder: Path) -> str:
    """Everything that a command of the README prints, in a folder like a reader's."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec env {command}"],
        cwd=folder,
        env=pages.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # torchrun, which ends its ranks
        output, _ = process.communicate(timeout=60)
        raise AssertionError(f"`{command}` did not end within {SECONDS} s\n{output}") from None
    assert process.returncode == 0, f"`{command}`\n{output}"
    return output


def lines_of(output: str) -> list[str]:
    """What is said in each line, without colours, ranks, dates and measured numbers."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", output)
    said = [re.sub(r"^\[rank\d+\]:(\[titan\].*? - INFO - )?", "", x) for x in plain.splitlines()]
    return [line for text in said if (line := _normal(text))]


def _normal(text: str) -> str:
    """A row of the table: its name, gathers and reductions. A remark below the table: the pass and
    what it says, without numbers. Any other line without its numbers."""
    columns = re.split(r"\s{2,}", text.strip())
    named, _, remark = text.strip().partition(": ")
    if named in TABLE:
        return f"{named} | {_normal(remark)}"
    if columns[0] in TABLE:
        name, _, gather_forward, gather_backward, reduce, *_ = columns
        return " | ".join([name, gather_forward, gather_backward, reduce])
    return re.sub(r"\d[\d.,]*", "#", " ".join(text.split()))


def missing(shown: list[str], found: list[str]) -> list[str]:
    """The lines of `shown` that do not stand in `found` in this order; one that ends in "..." is
    the beginning of a line."""
    rest = iter(found)
    return [line for line in shown if not any(_is_shown(line, other) for other in rest)]


def _is_shown(line: str, other: str) -> bool:
    return other.startswith(line[:-3]) if line.endswith("...") else other == line


@pytest.mark.parametrize(("block", "command"), [pytest.param(*c, id=c[1]) for c in RUN])
def test_a_command_that_trains(block, command, tmp_path):
    output = run(command + SHORTER, pages.workplace(tmp_path))
    lines = lines_of(output)
    assert "Training completed" in lines
    assert sum(line.startswith("step: # loss: #") for line in lines) == 2
    assert "Capturing the train step" in lines
    assert (tmp_path / "outputs/config.toml").exists()
    # Log and table reach the screen through two pipes: each is in order, the two are not.
    shown = lines_of("\n".join(line for line in block.output if line.strip() != "..."))
    for part in (True, False):
        wanted = [line for line in shown if (" | " in line) == part]
        assert bool(wanted) == bool(shown)
        assert not missing(wanted, lines), "it shows now:\n" + output


@pytest.mark.parametrize("command", [c[1] for c in TRAINING if c not in RUN])
def test_a_command_that_trains_as_others_do_is_a_config(command, tmp_path, monkeypatch):
    monkeypatch.chdir(pages.workplace(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    words = shlex.split(command)
    ranks = words.pop(0).removeprefix("NGPU=") if words[0].startswith("NGPU=") else "2"
    load_config(words[1:], world_size=int(ranks))


def test_one_page_shows_what_training_shows():
    assert sum(bool(block.output) for block, _ in TRAINING) == 1


@pytest.mark.parametrize("command", [pytest.param(c[1], id=c[1]) for c in TESTING])
def test_a_command_that_tests_is_one_that_the_script_knows(command):
    words = shlex.split(command)[1:]
    assert words in ([], ["--full"]) and "--full) " in (pages.ROOT / "run_tests.sh").read_text()


@pytest.mark.parametrize("command", OF_TORCHTITAN)
def test_torchtitans_own_launcher_trains_the_plugin(command, tmp_path):
    """It imports torchtitan, which binds CUDA where there is no GPU, before our package."""
    small = " --training.seq_len 64 --training.local_batch_size 2"
    output = run(command + SHORTER + small, tmp_path)
    assert "captured in" in output and output.count("Training completed") == 2


@pytest.mark.parametrize("command", BISECTING)
def test_a_command_that_bisects(command, tmp_path):
    assert "passes keep the numbers on 2 ranks" in run(command, pages.workplace(tmp_path))


def test_the_python_example_runs_under_torchrun_with_the_change_that_is_named(tmp_path):
    (named,) = re.findall(r"Under torchrun, write `(.*?)`", pages.PAGES["python_api.md"].prose)
    here = pages.PAGES["python_api.md"].blocks
    (block,) = (b for b in here if "torch.optim" in b.text)
    source, changes = re.subn(r"dist\.init_process_group\(.*\)", named, block.text)
    assert changes == 1
    checks = (
        '\nassert report.last.count("all_gather_into_tensor") > 0'
        "\nassert loss.item() < 1, loss.item()\n"
    )
    (tmp_path / "example.py").write_text(source + checks)
    launch = [Path(sys.executable).name, "-m", "torch.distributed.run", "--standalone"]
    output = run(shlex.join([*launch, "--nproc_per_node=2", "example.py"]), tmp_path)
    assert output.count("step 0: loss") == 2
