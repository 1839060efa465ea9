"""What a run without a plan prints of its passes."""

from __future__ import annotations

import pytest

from graph_trainer.core.passes.report import PassReport, Report
from graph_trainer.core.text import WIDTH
from graph_trainer.testing import become
from graph_trainer.titan.observer import ReportedRun

GATHERS = {("all_gather_into_tensor", "forward"): 12_345}
BIG = PassReport("capture", 1.0, 60_000, GATHERS, 900 * 1024**3, 90 * 1024**3)
CHANGED = PassReport(
    "functionalize_writes", 99.9, 55_555, {}, 0, 10 * 1024**3, remarks=("a remark " * 20,)
)


def test_rank_0_prints_the_largest_graphs_in_a_hundred_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    become(1, 2)
    ReportedRun().graph_reported(Report([BIG, CHANGED]))
    assert not capsys.readouterr().out
    become(0, 2)
    ReportedRun().graph_reported(Report([BIG, CHANGED]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "What each pass did to the joint graph"
    assert len("[rank0]:") + max(map(len, lines)) <= WIDTH
    text = "\n".join(lines)
    for part in ("functionalize_writes", "60,000", "12,345", "-12,345", "a remark"):
        assert part in text
