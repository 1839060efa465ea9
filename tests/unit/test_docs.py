"""docs/ keeps its word: its code runs and passes its own tests, its files and links exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit import test_readme as readme

ROOT = readme.ROOT
PAGES = sorted((ROOT / "docs").glob("*.md"))


def python_blocks() -> dict[str, str]:
    """The programs of docs/write_a_pass.md, by the file name in their first line."""
    text = (ROOT / "docs/write_a_pass.md").read_text()
    blocks = re.findall(r"^```python\n(\"\"\"(\w+\.py)\"\"\"\n.*?)^```$", text, re.M | re.S)
    assert len(blocks) == text.count("```python") == 2
    return {name: source for source, name in blocks}


def run_example(folder: Path, **changed: str) -> subprocess.CompletedProcess[str]:
    for name, source in (python_blocks() | changed).items():
        (folder / name).write_text(source)
    environment = readme.environment()
    environment["PYTHONPATH"] = f"{folder}:{environment['PYTHONPATH']}"
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider"]
        + ["--rootdir", str(folder), str(folder)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_the_example_pass_passes_its_tests(tmp_path):
    done = run_example(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "7 passed" in done.stdout


def test_the_example_test_finds_the_break_that_the_page_proposes(tmp_path):
    name = "remove_needless_casts.py"
    source, changes = re.subn(r"if writes\.is_written.*:", "if False:", python_blocks()[name])
    assert changes == 1
    done = run_example(tmp_path, **{name: source})
    assert done.returncode == 1 and "test_what_is_written_in_place" in done.stdout


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda p: p.name)
def test_every_link_and_file_is_there(path):
    text = path.read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert "://" in link or (path.parent / link).exists(), link
    code = re.findall(r"`([^`\n]+)`", text)
    for name in code:
        if re.fullmatch(r"(graph_trainer|tests|scripts|configs)/[\w./]+", name):
            assert (ROOT / name).exists(), name
    assert not [x for x in text.splitlines() if len(x) > 100 and not x.startswith("|")]


def test_every_room_that_a_step_travels_through_is_there():
    text = (ROOT / "docs/one_step.md").read_text()
    drawn = re.findall(r"^      \|  (\S+)", text, re.M)
    named = re.findall(r"`(\w+\.py)`", text)
    assert len(drawn) > 5 and len(named) > 5
    package = ROOT / "graph_trainer"
    rooms = {p.name for p in package.rglob("*.py")} | {f"{p.name}/" for p in package.iterdir()}
    assert not set(drawn + named) - rooms


def test_the_readme_links_every_page():
    links = re.findall(r"\]\(([^)]+)\)", readme.PROSE)
    wanted = {f"docs/{path.name}" for path in PAGES} | {"CHANGELOG.md", "benchmarks/README.md"}
    assert wanted <= set(links), wanted - set(links)
