"""Where prose is broken into lines."""

import pytest

from graph_trainer.core.text import COLUMNS, error_text, wrapped


def test_lines_break_at_spaces_and_never_inside_a_setting(monkeypatch):
    monkeypatch.delenv(COLUMNS, raising=False)
    text = "Take the risk with " * 4 + "compile.memory_limit_gib = 0 or all_gather_into_tensor"
    lines = wrapped(text).splitlines()
    assert [line.strip() for line in lines] == [text[:75], text[76:]]
    lines = wrapped("x" * 85 + ", 'lr': 0.002, 'betas': (0.9, 0.95)").splitlines()
    assert lines == ["x" * 85 + ",", "  'lr': 0.002, 'betas': (0.9, 0.95)"]
    assert wrapped("x" * 200) == "x" * 200
    row = "after  " * 20
    assert wrapped(row) == row


@pytest.mark.parametrize(("columns", "most"), [("80", 72), ("500", 92), ("", 92), ("0", 32)])
def test_a_rank_prints_lines_as_wide_as_the_terminal_of_its_launcher(monkeypatch, columns, most):
    monkeypatch.setenv(COLUMNS, columns)
    widest = max(map(len, wrapped("word " * 100).splitlines()))
    assert most - len("word ") < widest <= most


def test_an_error_keeps_its_lines_and_none_is_wider_than_100_columns():
    text = error_text("a: " + "words " * 40 + "\nRaised by " + "pass_of_mine, " * 10)
    assert max(map(len, text.splitlines())) <= 100 and text.startswith("error: a: words words")
    assert "words\nRaised by pass_of_mine" in text.replace(" \n", "\n")
    assert text.split() == f"error: a: {'words ' * 40}Raised by {'pass_of_mine, ' * 10}".split()
