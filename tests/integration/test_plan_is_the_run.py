"""What `plan --save` wrote is what two gloo ranks capture, issue and hold; else they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from graph_trainer.core.units import GIB
from tests.integration.launch import ROOT, run_ranks
from tests.integration.planned_run_worker import PLANNED

pytestmark = pytest.mark.timeout(600)

WORKER = Path(__file__).with_name("planned_run_worker.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("planned")
    command = [sys.executable, "-m", "graph_trainer", "plan", "--world-size", "2", "--hardware"]
    command += ["cpu", "--save", str(made / "plan.json"), *PLANNED]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    # a plan of which rank 1 alone captures another step
    document = json.loads((made / "plan.json").read_text())
    del document["classes"]["1"]["fingerprint"]["collectives"][0]
    (made / "other.json").write_text(json.dumps(document))
    return made


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(WORKER, 2, [str(folder)], timeout=500)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("policy", ['fsdp_reshard_after_forward: planned "default", now "always"', "collective "]),
        ("passes", ["planned with the passes normalize_views", "compile.disable_passes"]),
    ],
)
def test_another_run_is_refused_on_every_rank(
    ranks: list[dict[str, Any]], name: str, told: list[str]
) -> None:
    for rank, said in enumerate(ranks):
        assert said[name]["status"] == 2
        assert said[name]["error"].startswith("error: ")
        for part in told:
            assert part in said[name]["error"], said[name]["error"]
        if name != "passes":  # that is known before the ranks know each other
            assert f"rank {rank} captured another step than" in said[name]["error"]


def test_a_rank_that_differs_ends_the_others_too(ranks: list[dict[str, Any]]) -> None:
    first, second = (said["one rank"] for said in ranks)
    assert first["status"] == second["status"] == 2
    assert first["error"].startswith("error: rank 1 could not capture the step: Verification")
    assert "rank 1 captured another step than" in second["error"]
    assert "Config and versions are the plan's" in first["error"]


def test_the_planned_run_trains_and_measures(folder: Path, ranks: list[dict[str, Any]]) -> None:
    assert [said["trained"]["status"] for said in ranks] == [0, 0]
    rows = {row["what"]: row for row in ranks[0]["trained"]["rows"]}
    for name in ("parameters", "gradients", "made by the graph"):
        assert rows[name]["measured"] == rows[name]["predicted"], rows[name]
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        assert rows[name]["measured"] == rows[name]["predicted"] > 0
    # AdamW counts steps in a tensor of its own for each parameter
    state = rows["parameters"]["measured"] + rows["optimizer state"]["measured"]
    assert 1 <= rows["optimizer state"]["ratio"] < 1.001
    assert rows["step"]["measured"] > 0
    assert rows["step"]["how"] == "median of 3 steps after 2 of warm-up"
    # resident memory has the allocator's gaps and Python's objects too
    assert 0.7 < rows["peak memory"]["ratio"] < 1.5, rows["peak memory"]
    (events,) = (folder / "out/trained/tb").iterdir()
    logged = EventAccumulator(str(events)).Reload()
    for name, num_bytes in (
        ("predicted_peak_gib", rows["made by the graph"]["predicted"]),
        ("measured_growth_gib", rows["peak memory"]["measured"] - state),
    ):
        (point,) = logged.Scalars(f"graph_trainer/{name}")
        assert point.value == pytest.approx(num_bytes / GIB)


def test_rank_0_shows_the_table(ranks: list[dict[str, Any]]) -> None:
    shown = ranks[0]["trained"]["shown"].splitlines()
    (title,) = [number for number, line in enumerate(shown) if "Predicted for cpu" in line]
    assert max(len(line) for line in shown[title:]) <= 100
    table = "\n".join(shown[title:])
    assert "made by the graph" in table and "1.000" in table and "not measured" not in table
    assert "Predicted for" not in ranks[1]["trained"]["shown"]
