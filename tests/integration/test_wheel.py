"""The wheel is all that a user needs: built, installed alone and run from an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(300)


def run(words: list[str | Path], folder: Path) -> str:
    """What a command prints, in an environment that knows nothing of this checkout."""
    left_out = ("PYTHONPATH", "VIRTUAL_ENV", "NGPU", "RANK", "WORLD_SIZE")
    environment = {k: v for k, v in os.environ.items() if k not in left_out}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # The build system is a development tool here, so that nothing is fetched.
    build = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
    run([*build, "--wheel-dir", folder, ROOT], folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment's folder of programs: the package from its wheel and from nowhere else.

    Its dependencies are read where those of this environment lie: to fetch and unpack them anew
    takes a minute and a half where the network is fast. `pip check` sees all of them.
    """
    folder = tmp_path_factory.mktemp("environment")
    run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], folder)
    programs = folder / "venv/bin"
    run([*pip(programs), "install", "--no-deps", "--no-index", wheel], folder)
    (own,) = (folder / "venv/lib").glob("python*/site-packages")
    (own / "dependencies.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return programs


def pip(programs: Path) -> list[str | Path]:
    return [sys.executable, "-m", "pip", "--python", programs / "python"]


def test_the_configs_and_their_schema_are_in_the_wheel_and_tests_are_not(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    configs = {p.relative_to(ROOT).as_posix() for p in (ROOT / "configs").rglob("*.*")}
    assert len(configs) > 5
    assert {f"graph_trainer/{name}" for name in configs} <= names
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "graph_trainer").rglob("*.py")}
    assert sources <= names
    elsewhere = {name.split("/")[0] for name in names} - {"graph_trainer"}
    assert all(name.endswith(".dist-info") for name in elsewhere)


def test_it_trains_from_any_folder_and_nothing_is_missing(installed: Path, tmp_path: Path) -> None:
    where = "import graph_trainer, importlib.metadata as m; print(graph_trainer.__file__)\n"
    where += "print(m.distribution('graph_trainer').locate_file('graph_trainer/__init__.py'))"
    found = run([installed / "python", "-c", where], tmp_path).splitlines()
    assert all(Path(name).is_relative_to(installed.parent) for name in found), found
    assert "No broken requirements found" in run([*pip(installed), "check"], tmp_path)

    train = [installed / "graph-trainer", "train", "--module", "graph_trainer.llama3"]
    shorter = ["--training.steps", "2", "--training.seq_len", "64", "--metrics.log_freq", "1"]
    shown = run([*train, "--config", "debugmodel", *shorter], tmp_path)
    assert "Capturing the train step" in shown and "Training completed" in shown
    assert (tmp_path / "outputs/config.toml").is_file()
