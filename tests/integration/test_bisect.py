"""graph-trainer bisect-passes on two gloo ranks finds the wrong pass and its node."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.integration.bisect_worker import FACTOR, MODULE, RESULTS
from tests.integration.launch import ROOT, user_environment
from tests.integration.matrix import COMMON, FP32, arguments, rows, shard

pytestmark = pytest.mark.timeout(300)
RANKS = 2

# What the console script does, with a worker that examines more in the same launch.
COMMAND = """
import sys
from graph_trainer.cli.bisect import bisect_passes
sys.exit(bisect_passes(sys.argv[1:], worker="tests.integration.bisect_worker"))
"""


class Launched(NamedTuple):
    code: int
    err: str
    folder: Path
    ranks: list[dict[str, Any]]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    folder = tmp_path_factory.mktemp("bisect")
    passes = "normalize_views,tests.integration.bisect_worker:WRONG,eliminate_dead_code"
    flags = COMMON | FP32 | shard(RANKS) | rows(1)
    flags |= {"dump_folder": folder, "compile.passes": passes}
    flags |= {"parallelism.fsdp_reshard_after_forward": "never"}  # which no pass has to carry out
    environment = user_environment(OMP_NUM_THREADS="1", **{RESULTS: str(folder)})
    command = [sys.executable, "-c", COMMAND, *arguments(flags)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    files = [folder / f"{rank}.json" for rank in range(RANKS)]
    assert all(file.exists() for file in files), f"{done.stdout}\n{done.stderr}"
    ranks = [json.loads(file.read_text()) for file in files]
    return Launched(done.returncode, done.stderr, folder, ranks)


def test_the_folder_of_the_run_keeps_its_config(launched: Launched) -> None:
    assert (launched.folder / "bisect_passes" / "config.toml").exists()
    assert not (launched.folder / "config.toml").exists()


def test_the_wrong_pass_and_its_node_are_named(launched: Launched) -> None:
    """The collectives are the ranks' own: the change is on rank 1 alone, and both ranks end."""
    assert launched.code == 2
    words = " ".join(launched.err.split())
    assert "pass 'wrong' left an invalid graph: on rank 1: loss is another" in words
    assert f"{FACTOR})" in words and f"inserted by the pass, forward, module {MODULE}" in words
    assert "Raised by pass 'wrong', after normalize_views" in words
    assert words.count("left an invalid graph") == 1, "the error of all ranks is shown once"


def test_collectives_are_those_of_the_ranks(launched: Launched) -> None:
    assert [rank["verified"] for rank in launched.ranks] == ["bitwise equal"] * RANKS


def test_ranks_on_either_side_of_a_memory_limit_decide_the_same(launched: Launched) -> None:
    first, second = launched.ranks
    large, small = first["peaks"]
    assert small < large, "the first rank has more of every weight"
    for rank in (first, second):
        assert "hungry" not in rank["between"] and "hungry" in rank["above"]
