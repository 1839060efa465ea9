"""The report table as a person sees it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from graph_trainer.core.passes.report import PassReport, Report
from graph_trainer.planner.console import WIDTH, report_table
from graph_trainer.planner.planned_run import ReportedRun

_GATHERS = {("all_gather_into_tensor", "forward"): 12_345}
_BIG = PassReport("capture", 1.0, 60_000, _GATHERS, 900 * 1024**3, 90 * 1024**3)
_CHANGED = PassReport("functionalize_index_put", 99.9, 55_555, {}, 0, 10 * 1024**3)


def lines(report: Report) -> list[str]:
    out = io.StringIO()
    Console(width=WIDTH, file=out).print(report_table(report))
    return out.getvalue().splitlines()


def test_the_largest_graphs_fit_a_hundred_columns() -> None:
    found = lines(Report([_BIG, _CHANGED]))
    assert max(map(len, found)) <= WIDTH
    text = " ".join(found)
    # nothing is cut, and a change stands beside its number
    for part in ("functionalize_index_put", "60,000", "55,555", "-4,445", "12,345", "-12,345"):
        assert part in text
    assert "…" not in text


def test_rank_0_prints_it_for_logs(capsys: pytest.CaptureFixture[str]) -> None:
    ReportedRun(rank=0).graph_reported(Report([_BIG]))
    assert "What each pass did to the joint graph" in capsys.readouterr().out
    ReportedRun(rank=1).graph_reported(Report([_BIG]))
    assert not capsys.readouterr().out
