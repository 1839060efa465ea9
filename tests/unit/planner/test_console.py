"""Tables keep their digits on any terminal."""

import re

import pytest

from graph_trainer.planner.console import WIDTH, plain_table, print_table


def widest(printed):
    return max(map(len, re.sub("\x1b\\[[0-9;]*m", "", printed).splitlines()))


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_digits_are_whole_on_a_narrow_terminal(columns, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, for rich
    monkeypatch.setenv("COLUMNS", str(columns))
    table = plain_table("numbers")
    table.add_column("after", no_wrap=True)
    for place in range(5):
        table.add_column(f"number {place}", justify="right")
    table.add_row("fuse_chained_all_gathers", *["1,234,567.8"] * 5)
    print_table(table)
    out = capsys.readouterr().out
    assert out.count("1,234,567.8") == 5 and "…" not in out
    assert widest(out) <= WIDTH


def test_a_table_that_fits_is_as_wide_as_the_terminal_at_most(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    table = plain_table("words")
    table.add_column("what")
    table.add_row("gathers " * 20)
    print_table(table)
    assert widest(capsys.readouterr().out) <= 60
