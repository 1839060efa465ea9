"""Where prose is broken into lines."""

from graph_trainer.core.text import wrapped


def test_lines_break_at_spaces_and_never_inside_a_setting():
    text = "Take the risk with " * 4 + "compile.memory_limit_gib = 0 or all_gather_into_tensor"
    lines = wrapped(text).splitlines()
    assert [line.strip() for line in lines] == [text[:75], text[76:]]
    assert wrapped("x" * 200) == "x" * 200
    row = "after   " * 20
    assert wrapped(row) == row
