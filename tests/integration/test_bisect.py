"""graph-trainer bisect-passes on two gloo ranks finds the wrong pass and its node."""

from __future__ import annotations

import json
import subprocess
import sys
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
    out: str
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
    return Launched(done.returncode, done.stdout, [json.loads(file.read_text()) for file in files])


def test_the_wrong_pass_and_its_node_are_named(launched: Launched) -> None:
    assert launched.code == 1, "a pass differs"
    table = launched.out[launched.out.index("Loss, gradients and buffers") :]
    assert max(map(len, table.splitlines())) <= 100
    lines = [line.split() for line in table.splitlines() if line.strip()]
    by_pass = {words[0]: words for words in lines}
    for equal in ("capture", "normalize_views"):
        assert by_pass[equal][2] == "0", "differ"
    assert by_pass["wrong"][2] != "0" and by_pass["wrong"][-2:] == ["0,", "1"]
    assert "eliminate_dead_code" not in table, "what comes behind the first is not run"
    assert "'wrong' is the first pass that changes the numbers" in table
    words = " ".join(table.split())
    assert "inserted by the pass" in words and f"module {MODULE}" in words
    assert str(FACTOR) in words and "aten.mul.Tensor" in words
    # every element of the product is larger by 2**-10, relative to itself then
    assert f"max rel {(FACTOR - 1) / FACTOR:.3g}" in words


def test_it_says_how_far_it_is(launched: Launched) -> None:
    for line in ("eager: running", "capture: bitwise equal", "1 of 3 passes", "2 of 3 passes"):
        assert line in launched.out
    assert "training" not in launched.out.lower().split("loss, gradients and buffers")[1]


def test_ranks_on_either_side_of_a_memory_limit_decide_the_same(launched: Launched) -> None:
    first, second = launched.ranks
    large, small = first["peaks"]
    assert small < large, "the first rank has more of every weight"
    for rank in (first, second):
        assert "hungry" not in rank["between"] and "hungry" in rank["above"]
