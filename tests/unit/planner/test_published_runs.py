"""Predictions stay near what was published, causes modelled and nothing fitted.

Five captures: the whole suite is `python -m benchmarks.published`.
"""

from __future__ import annotations

import pytest

from benchmarks.published.predict import predict
from benchmarks.published.runs import FITS, LEFT_OUT, RUNS
from benchmarks.published.tables import (
    MEMORY_AIM,
    THROUGHPUT_AIM,
    aims,
    compare,
    fits_lines,
    judge_fit,
    judged,
    table_lines,
)

BY_NAME = {run.name: run for run in RUNS}
H100 = [run for run in RUNS if run.hardware == "h100-grand-teton" and not run.kept_back]
CHECKED = [*H100, BY_NAME["8B, 64 A100"], BY_NAME["Llama 2 13B, 64 A100, no AC"]]


@pytest.mark.full
@pytest.mark.parametrize("run", CHECKED, ids=lambda run: run.name)
def test_throughput_and_memory_are_near_what_was_published(run):
    row = compare(run)
    assert abs(row.ratio - 1) < THROUGHPUT_AIM, row
    assert row.memory_ratio is None or abs(row.memory_ratio - 1) < MEMORY_AIM, row


@pytest.mark.full
def test_more_ranks_need_less_memory_and_compiling_is_faster():
    few, many = predict(BY_NAME["8B, 8 H100"]), predict(BY_NAME["8B, 128 H100"])
    assert many.memory_gib < few.memory_gib
    assert many.tokens_per_second < few.tokens_per_second
    for name in ("8B, 8 H100", "8B, 128 H100"):
        eager, compiled = predict(BY_NAME[name]), predict(BY_NAME[f"{name}, compile"])
        assert compiled.tokens_per_second > eager.tokens_per_second
        # what is alive; the allocator's gaps may come out either way
        assert compiled.peak_bytes <= eager.peak_bytes
        assert (eager.kind.compiled, compiled.kind.compiled) == (False, True)


@pytest.mark.full
def test_tables_show_every_row():
    rows = judged([compare(run) for run in H100])
    fits = [judge_fit(run) for run in FITS if run.flags in [run.flags for run in CHECKED]]
    assert [fit.ran for fit in fits] == [fit.predicted for fit in fits] == [True]
    text = "\n".join([*table_lines(rows), *fits_lines(fits), *aims(rows, fits)])
    assert max(map(len, table_lines(rows))) <= 100
    assert all(row.run in text and row.band is not None for row in rows)


def test_runs_have_names_of_their_own_and_sources():
    assert len(BY_NAME) == len(RUNS) and len({run.name for run in FITS}) == len(FITS)
    assert all(run.source for run in (*RUNS, *FITS))
    assert all(": " in text for text in LEFT_OUT), "with the reason"
    assert {run.fits for run in FITS} == {True, False}
