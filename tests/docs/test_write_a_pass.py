"""The programs of docs/write_a_pass.md run, and its test finds what the page says it finds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import PAGES, environment


def python_blocks() -> dict[str, str]:
    """The programs of docs/write_a_pass.md, by the file name in their first line."""
    sources = [b.text for b in PAGES["write_a_pass.md"].blocks if b.kind == "python"]
    found = {source.split('"""')[1]: source for source in sources}
    assert len(found) == len(sources) == 2
    return found


def run_example(folder: Path, **changed: str) -> subprocess.CompletedProcess[str]:
    for name, source in (python_blocks() | changed).items():
        (folder / name).write_text(source)
    variables = environment()
    variables["PYTHONPATH"] = f"{folder}:{variables['PYTHONPATH']}"
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        + ["--rootdir", str(folder), str(folder)],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_the_example_pass_passes_its_tests(tmp_path):
    done = run_example(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "8 passed" in done.stdout


def test_the_example_test_finds_the_break_that_the_page_proposes(tmp_path):
    name = "remove_needless_casts.py"
    source, changes = re.subn(r"if writes\.is_written.*:", "if False:", python_blocks()[name])
    assert changes == 1
    done = run_example(tmp_path, **{name: source})
    assert done.returncode == 1 and "test_what_is_written_in_place" in done.stdout
