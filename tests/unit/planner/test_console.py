"""Tables keep their digits on any terminal."""

import re

import pytest

from graph_trainer.core.text import WIDTH
from graph_trainer.planner.measures import duration, measure, size
from graph_trainer.planner.terminal import Name, plain_table, print_table, progress


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


def test_lines_of_progress_are_not_wider(capsys):
    with progress("compare") as say:
        say(", ".join(f"a.long_key_{n} = {n}" for n in range(20)))
    printed = capsys.readouterr().err
    assert widest(printed) <= WIDTH and len(printed.splitlines()) > 2
    assert [f"a.long_key_{n} = {n}" in printed for n in range(20)] == [True] * 20


def test_a_table_that_fits_is_as_wide_as_the_terminal_at_most(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    table = plain_table("words")
    table.add_column("what")
    table.add_row("gathers " * 20)
    print_table(table)
    assert widest(capsys.readouterr().out) <= 60


@pytest.mark.parametrize(("columns", "shown"), [(45, 2), (60, 3), (80, 4), (120, 6)])
def test_columns_are_left_out_before_digits(columns, shown, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    table = plain_table("numbers")
    table.add_column("after", no_wrap=True)
    for place in range(6):
        table.add_column(f"number {place}", justify="right")
    table.optional = (tuple(table.columns[2:4]), (table.columns[4],), (table.columns[5],))
    table.add_row("rematerialize", *["1,234,567.8"] * 6)
    print_table(table)
    out = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
    assert out.count("1,234,567.8") == shown and widest(out) <= columns
    assert ("No room for: number 1, number 2" in " ".join(out.split())) == (shown < 6)


@pytest.mark.parametrize("columns", [24, 40, 60])
def test_lines_of_a_name_end_behind_its_parts(monkeypatch, capsys, columns):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    table, name = plain_table("names"), "mm_2\nin layers.0.attention.qkv_linear.wqkv"
    table.add_column("module", overflow="fold")
    table.add_row(Name(name))
    print_table(table)
    cells = [line.strip() for line in capsys.readouterr().out.splitlines()[4:-1]]
    assert "".join(cells[1:]).replace(" ", "") == name[5:].replace(" ", "") and cells[0] == "mm_2"
    assert all(cell.endswith((".", "_", "in")) for cell in cells[1:-1])


def test_a_name_is_folded_and_a_digit_is_not(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    table = plain_table("names")
    for heading in ("module", "of"):
        table.add_column(heading, overflow="fold")
    table.add_column("bytes", justify="right")
    table.add_row("model.layers.31.self_attn" * 2, "model.layers.31.mlp" * 2, "1,234,567.8")
    print_table(table)
    out = capsys.readouterr().out
    assert "1,234,567.8" in out and widest(out) <= 60


def test_torchruns_prefix_fits_too(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("ROLE_NAME", "rank")
    monkeypatch.setenv("LOCAL_RANK", "0")
    table = plain_table("words")
    table.add_column("what")
    table.add_row("gathers " * 20)
    print_table(table)
    assert len("[rank0]:") + widest(capsys.readouterr().out) <= WIDTH


@pytest.mark.parametrize(
    ("kind", "values", "shown"),
    [
        ("bytes", [16.28 * 2**30, 1002 * 2**20], ["16.28 GiB", "0.98 GiB"]),
        ("seconds", [5.13e-3, 952.2e-6], ["5.13 ms", "0.95 ms"]),
        ("seconds", [1.0583, 0.9595], ["1.058 s", "0.960 s"]),
        ("seconds", [0.9595, 0.0087], ["959.5 ms", "8.7 ms"]),
        ("bytes", [12, 0], ["12 B", "0 B"]),
        ("count", [8951, 0], ["8,951", "0"]),
        ("bytes", [], []),
    ],
)
def test_a_column_has_one_unit_that_follows_its_largest(kind, values, shown):
    assert list(map(measure(kind, values).text, values)) == shown


def test_one_number_has_three_digits():
    assert [size(36.66 * 2**30), duration(0.9591), duration(9.0)] == [
        "36.7 GiB",
        "959 ms",
        "9.00 s",
    ]
