"""run_train.sh, run_tests.sh and their kin, on a machine made of stubs."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.stub_machine import BASH, REPOSITORY, Machine

ALL_MODULES = [
    "graph_trainer",
    "torch",
    "torchtitan",
    "expecttest",
    "hatchling",
    "hypothesis",
    "jsonschema",
    "mypy",
    "plotly",
    "pytest",
    "pytest_timeout",
    "ruff",
    "selenium",
    "transformers",
    "xdist",
]
TRAINING_MODULES = ALL_MODULES[:3]


@pytest.fixture
def machine(tmp_path):
    """A machine with a bare Python and nothing installed."""
    machine = Machine(tmp_path)
    machine.python("python3", ["venv", "ensurepip"])
    return machine


@pytest.fixture
def installed(tmp_path):
    """A machine whose active environment has everything."""
    machine = Machine(tmp_path)
    machine.python("python", ALL_MODULES)
    return machine


# --------------------------------------------------------------------------------------- training


def test_run_train_is_graph_trainer_train(installed):
    flags = ["--training.steps", "3", "x y"]
    installed.call("run_train.sh", *flags, expect=7, STUB_FAILS="train", STUB_CODE="7")
    (call,) = installed.calls()
    assert call.arguments == ["-m", "graph_trainer", "train", *flags]
    # Relative paths, ./outputs among them, are the user's.
    assert call.cwd == installed.cwd
    assert not (installed.checkout / ".venv").exists()


def test_slurm_gives_each_node_its_rank(installed):
    installed.tool("scontrol", 'printf "%s\\n" node7 node8')
    installed.tool(
        "srun",
        '[[ $1 == --kill* ]] && shift; for i in 0 1; do SLURM_NODEID=$i "$@" || exit; done',
    )
    installed.call(
        "scripts/slurm/multinode.sbatch",
        "--config",
        "8b",
        SLURM_SUBMIT_DIR=str(installed.checkout),
        SLURM_JOB_NODELIST="node[7-8]",
        SLURM_JOB_NUM_NODES="2",
        SLURM_JOB_ID="1042",
        NGPU="8",
    )
    # The first call sets up, before the nodes start.
    _, *nodes = installed.calls()
    assert [c.environment["NODE_RANK"] for c in nodes] == ["0", "1"]
    for call in nodes:
        assert call.environment["NNODES"] == "2"
        assert call.environment["RDZV_ENDPOINT"] == "node7:29542"
        assert call.arguments == ["-m", "graph_trainer", "train", "--config", "8b"]


# ------------------------------------------------------------------------------------- the set-up


def test_a_fresh_machine_installs_once(machine):
    machine.call("run_train.sh")
    calls = machine.calls()
    venv = machine.checkout / ".venv"
    assert [c.arguments[:2] for c in calls] == [
        ["-m", "venv"],
        ["-m", "pip"],
        ["-m", "graph_trainer"],
    ]
    assert {c.python for c in calls[1:]} == {venv / "bin/python"}
    assert calls[1].flag("-c") == str(machine.checkout / "constraints.txt")
    assert calls[1].flag("-e") == str(machine.checkout)

    machine.call("run_train.sh")
    assert [c.arguments[1] for c in machine.calls()] == ["graph_trainer"]


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_new_dependencies_are_installed(machine, changed):
    machine.call("run_train.sh")
    machine.calls()
    with (machine.checkout / changed).open("a") as file:
        file.write("# other\n")
    machine.call("run_train.sh")
    assert len(machine.installations()) == 1
    machine.call("run_train.sh", STUB_VERSION="3.13.9")
    assert len(machine.installations()) == 1


def test_the_dev_extra_is_added_and_serves_training(machine):
    here = str(machine.checkout)
    machine.call("run_train.sh")
    machine.call("run_tests.sh")
    machine.call("run_tests.sh")
    machine.call("run_train.sh")
    assert machine.installations() == [here, f"{here}[dev]"]


def test_a_failed_installation_is_taken_up_again(machine):
    done = machine.call("run_train.sh", expect=2, STUB_FAILS="pip install")
    assert "set-up" in done.stderr and "again" in done.stderr
    assert not any("train" in c.arguments for c in machine.calls())
    machine.call("run_train.sh")
    assert len(machine.installations()) == 1


def test_calls_at_once_install_once(machine):
    first = machine.start("run_train.sh", STUB_PIP_TAKES="1")
    deadline = time.monotonic() + 20
    while not (machine.log.exists() and "pip install" in machine.log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    second = machine.call("run_train.sh", STUB_PIP_TAKES="1")
    assert "waiting for another set-up" in second.stderr
    first.communicate(timeout=30)
    assert first.returncode == 0
    assert len(machine.installations()) == 1


def test_an_environment_without_pip_gets_one(machine):
    machine.call("run_train.sh", STUB_NO_PIP="none")
    assert [c.arguments[1] for c in machine.calls()][:3] == ["venv", "ensurepip", "pip"]


@pytest.mark.parametrize(
    ("script", "needed", "kind"),
    [("run_tests.sh", ALL_MODULES, "[dev]"), ("run_train.sh", TRAINING_MODULES, "")],
)
def test_the_active_environment_serves_where_it_has_every_module(machine, script, needed, kind):
    for missing in needed:
        machine.python("python", [name for name in needed if name != missing])
        machine.call(script)
        assert machine.installations() == [f"{machine.checkout}{kind}"], missing
        shutil.rmtree(machine.checkout / ".venv")
    machine.python("python", needed)
    machine.call(script)
    assert machine.installations() == []


@pytest.mark.parametrize(("named", "used"), [("", "python3.12"), ("pythonic", "pythonic")])
def test_the_python_is_the_one_named_or_the_first_new_enough(machine, named, used):
    machine.python("python3", ["venv", "ensurepip"], old=True)
    machine.tool("python3.13", "echo a shim that fails >&2; exit 127")
    machine.python("python3.12", ["venv", "ensurepip"])
    machine.python("pythonic", ["venv", "ensurepip"])
    machine.call("run_train.sh", PYTHON=str(machine.bin / named) if named else "")
    assert machine.calls()[0].python.name == used


@pytest.mark.parametrize("modules", [["venv"], []])
def test_no_fit_python_is_one_message(machine, modules):
    machine.python("python3", modules)
    done = machine.call("run_train.sh", expect=2, STUB_VERSION="3.9.2")
    assert "Python 3.11 or newer" in done.stderr and "Python 3.9.2" in done.stderr
    assert "python3-venv" in done.stderr
    assert machine.calls() == []


def test_a_link_to_the_script_works(machine):
    link = machine.cwd / "train"
    link.symlink_to(machine.checkout / "run_train.sh")
    machine.call(str(link))
    assert machine.installations() == [str(machine.checkout)]


@pytest.mark.parametrize(
    ("modules", "path", "found"),
    [
        (["json"], "", True),
        (["json", "no_such_module"], "", False),
        # A checkout in the current folder is no installation, nor is what is left of one.
        (["package"], "", False),
        (["package"], "PACKAGE", True),
        (["folder"], "PACKAGE", False),
    ],
)
def test_what_counts_as_installed(tmp_path, modules, path, found):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("raise SystemExit('asking imports nothing')")
    (tmp_path / "folder").mkdir()
    done = subprocess.run(
        [
            BASH,
            "-c",
            'source "$1/scripts/environment.sh"; shift; has_modules "$@"',
            "-",
            REPOSITORY,
            sys.executable,
            *modules,
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path.replace("PACKAGE", str(tmp_path))},
        check=False,
        timeout=30,
    )
    assert (done.returncode == 0) == found


# ------------------------------------------------------------------------------ running the tests


@pytest.mark.parametrize(
    ("script", "arguments", "integration", "unit", "profile"),
    [
        ("run_tests.sh", [], "quick", "not full", "fast"),
        ("run_tests.sh", ["--full"], "", "", "full"),
        (".ci/run", [], "", "", "full"),
    ],
)
def test_every_gate_runs_and_then_the_tests(
    installed, script, arguments, integration, unit, profile
):
    installed.call(script, *arguments)
    calls = installed.calls()
    assert [" ".join(c.arguments) for c in calls] == [
        "-m ruff check .",
        "-m ruff format --check .",
        "-m mypy",
        f"-m pytest tests/integration -m {integration}",
        f"-m pytest tests/docs tests/unit -m {unit} --numprocesses 2 --dist loadfile",
    ]
    for call in calls:
        assert call.cwd == installed.checkout
        assert call.environment["OMP_NUM_THREADS"] == call.environment["HF_HUB_OFFLINE"] == "1"
        assert call.environment["HYPOTHESIS_PROFILE"] == profile


@pytest.mark.parametrize(
    "gate", ["ruff check", "ruff format", "mypy", "pytest tests/integration", "pytest tests/docs"]
)
def test_each_gate_fails_the_whole(installed, gate):
    done = installed.call("run_tests.sh", expect=1, STUB_FAILS=f"-m {gate}", STUB_CODE="5")
    assert f"failed: {gate}" in done.stderr
    assert len(installed.calls()) == 5


def test_arguments_go_to_pytest_alone(installed):
    installed.call("run_tests.sh", "-k", "a or b", expect=3, STUB_FAILS="pytest", STUB_CODE="3")
    (call,) = installed.calls()
    assert call.arguments == ["-m", "pytest", "-k", "a or b"]


def test_continuous_integration_asks_nothing(installed):
    installed.call(".ci/run", stdin="an answer\n")
    assert {c.environment["CI"] for c in installed.calls()} == {"true"}
    assert Path(f"{installed.log}.stdin").read_text() == ""


BROWSER = "chromium chromium-driver fonts-dejavu-core"


@pytest.mark.parametrize(
    ("there", "wanted"),
    [
        ((), f"iproute2 {BROWSER}"),
        (("ip",), BROWSER),
        (("ip", "chromium"), BROWSER),  # without its driver
        (("ip", "chromedriver"), BROWSER),
        (("chromium", "chromedriver"), "iproute2"),
        (("ip", "chromium", "chromedriver"), None),
        (("ip", "google-chrome", "chromedriver"), None),
    ],
)
def test_ci_installs_what_tests_need_where_it_lacks(installed, there, wanted):
    asked = installed.checkout / "asked"
    # The tests may run as somebody else.
    script = installed.checkout / ".ci/run"
    script.write_text(script.read_text().replace("EUID == 0", "0 == 0"))
    installed.tool("apt-get", f"echo $* >>'{asked}'")
    for tool in there:
        installed.tool(tool, "")
    installed.call(".ci/run")
    if wanted is None:
        assert not asked.exists()
    else:
        install = f"-qq install --yes --no-install-recommends {wanted}"
        assert asked.read_text().splitlines() == ["-qq update", install]


def test_ci_says_what_is_missing_where_it_cannot_install(installed):
    run = installed.call(".ci/run")
    assert f"for want of iproute2 {BROWSER}: installing needs root and apt-get" in run.stderr


# ------------------------------------------------------------------------------------- all scripts

SCRIPTS = [
    "run_train.sh",
    "run_tests.sh",
    ".ci/run",
    "scripts/environment.sh",
    "scripts/slurm/multinode.sbatch",
    "tests/integration/two_nodes.sh",
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_bash_can_read_it(script):
    """Also with shellcheck, which knows far more, where a machine has it."""
    checks = [[BASH, "-n", script]]
    if shellcheck := shutil.which("shellcheck"):
        checks.append([shellcheck, "-x", script])
    for check in checks:
        done = subprocess.run(check, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
