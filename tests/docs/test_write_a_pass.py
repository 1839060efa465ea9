"""The programs of docs/write_a_pass.md run, and its test finds what the page says it finds."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.docs.pages import PAGES
from tests.fresh import Fresh


def python_blocks() -> dict[str, str]:
    """The programs of docs/write_a_pass.md, by the file name in their first line."""
    sources = [b.text for b in PAGES["write_a_pass.md"].blocks if b.kind == "python"]
    found = {source.split('"""')[1]: source for source in sources}
    assert len(found) == len(sources) == 2
    return found


def run_example(folder: Path, fresh: Fresh, **changed: str) -> subprocess.CompletedProcess[str]:
    for name, source in (python_blocks() | changed).items():
        (folder / name).write_text(source)
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder))
    return fresh(*words, folder=folder)


def test_the_example_pass_passes_its_tests(tmp_path, fresh):
    done = run_example(tmp_path, fresh)
    assert done.returncode == 0, done.stdout
    assert "8 passed" in done.stdout


def test_the_example_test_finds_the_break_that_the_page_proposes(tmp_path, fresh):
    name = "remove_needless_casts.py"
    source, changes = re.subn(r"if writes\.is_written.*:", "if False:", python_blocks()[name])
    assert changes == 1
    done = run_example(tmp_path, fresh, **{name: source})
    assert done.returncode == 1 and "test_what_is_written_in_place" in done.stdout
