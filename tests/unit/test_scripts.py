"""Smoke tests of the scripts, on a machine whose Python only notes what it is asked to run."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
BASH = shutil.which("bash") or "bash"
SCRIPTS = [
    "run_train.sh",
    "run_tests.sh",
    ".ci/run",
    "scripts/environment.sh",
    "scripts/slurm/multinode.sbatch",
    "tests/integration/two_nodes.sh",
]

# `-P -c PROGRAM MODULE...` asks which modules are installed: all of them in an environment that
# pip has filled, and else those that make an environment.
STUB_PYTHON = """\
#!BASH
self=${BASH_SOURCE[0]}
case "$*" in
-P*) [[ -e $self.filled || " $* " == *" venv "* || " $* " == *" pip "* ]]; exit ;;
-V) echo "Python 3.12.1"; exit ;;
esac
echo "$HYPOTHESIS_PROFILE|$PWD|$*" >>"$STUB_LOG"
if [[ -n $STUB_FAILS && "$*" == *"$STUB_FAILS"* ]]; then exit "$STUB_CODE"; fi
case "$*" in
"-m venv --clear "*) mkdir -p "$4/bin"; cp "$self" "$4/bin/python" ;;
"-m pip install"*) touch "$self.filled" ;;
esac
"""


class Machine:
    """A checkout in a folder with a space in its name, and a PATH with a stub for a Python."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.cwd, self.log = folder / "a checkout", folder / "user", folder / "log"
        shutil.copytree(REPOSITORY / "scripts", self.checkout / "scripts")
        shutil.copytree(REPOSITORY / ".ci", self.checkout / ".ci")
        for name in ("run_train.sh", "run_tests.sh", "pyproject.toml", "constraints.txt"):
            shutil.copy(REPOSITORY / name, self.checkout / name)
        self.cwd.mkdir()
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in ("python", "python3"):
            (self.bin / name).write_text(STUB_PYTHON.replace("BASH", BASH, 1))
            (self.bin / name).chmod(0o755)
        for name in ("ip", "chromium", "chromedriver"):  # all that .ci/run would install
            (self.bin / name).symlink_to("/bin/true")

    def call(self, script: str, *words: str, fails: str = "", code: int = 0):
        """Run a script, and return its process and what Python was asked to run."""
        self.log.write_text("")
        environment = {"STUB_LOG": self.log, "STUB_FAILS": fails, "STUB_CODE": str(code)}
        done = subprocess.run(
            [self.checkout / script, *words],
            cwd=self.cwd,
            env={**environment, "PATH": f"{self.bin}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done, [line.split("|") for line in self.log.read_text().splitlines()]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_a_fresh_machine_installs_once_and_trains_in_the_users_folder(machine):
    flags = ["--training.steps", "3"]
    done, asked = machine.call("run_train.sh", *flags, fails="graph_trainer train", code=7)
    assert done.returncode == 7, done.stderr
    made, installed, trained = (words for _, _, words in asked)
    assert made.startswith("-m venv") and "/constraints.txt -e" in installed
    assert trained == "-m graph_trainer train --training.steps 3"
    assert asked[-1][1] == str(machine.cwd)
    assert len(machine.call("run_train.sh")[1]) == 1


def test_a_failed_installation_is_said_and_taken_up_again(machine):
    done, _ = machine.call("run_train.sh", fails="pip install", code=1)
    assert done.returncode == 2 and "the set-up of" in done.stderr and "again" in done.stderr
    assert machine.call("run_train.sh")[0].returncode == 0


@pytest.mark.parametrize(
    ("words", "integration", "unit", "profile"),
    [
        (["run_tests.sh"], "quick", "not full", "fast"),
        (["run_tests.sh", "--full"], "", "", "full"),
        ([".ci/run"], "", "", "full"),
    ],
)
def test_every_gate_runs_even_where_one_fails(machine, words, integration, unit, profile):
    machine.call("run_tests.sh", "--version")  # installs
    done, asked = machine.call(*words, fails="mypy", code=1)
    assert done.returncode == 1 and "failed: mypy" in done.stderr
    assert {(profile, folder) for profile, folder, _ in asked} == {(profile, str(machine.checkout))}
    assert [words for _, _, words in asked] == [
        "-m ruff check .",
        "-m ruff format --check .",
        "-m mypy",
        f"-m pytest tests/integration -m {integration}",
        f"-m pytest tests/docs tests/unit -m {unit} --numprocesses 2 --dist loadfile"
        " --no-loadscope-reorder",
    ]


def test_other_arguments_go_to_pytest_alone(machine):
    machine.call("run_tests.sh", "--version")
    done, asked = machine.call("run_tests.sh", "-k", "one", fails="pytest", code=3)
    assert done.returncode == 3 and [words for _, _, words in asked] == ["-m pytest -k one"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_bash_can_read_it(script):
    """Also with shellcheck, which knows far more, where a machine has it."""
    checks = [[BASH, "-n", script]]
    if shellcheck := shutil.which("shellcheck"):
        checks.append([shellcheck, "-x", script])
    for check in checks:
        done = subprocess.run(check, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert os.access(REPOSITORY / script, os.X_OK) or script == "scripts/environment.sh"
