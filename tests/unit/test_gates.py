"""The quality gates themselves: pinned dependencies, warnings as errors."""

import re
import tomllib
import warnings
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[2]


LONGEST_FILE = 600


def test_no_file_is_too_long_to_read_in_one_sitting():
    long = {
        path.relative_to(REPOSITORY).as_posix()
        for folder in ("graph_trainer", "tests")
        for path in (REPOSITORY / folder).rglob("*.py")
        if len(path.read_text().splitlines()) > LONGEST_FILE
    }
    assert not long


def pins():
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pinned = [line.partition("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, _, version in pinned}


def declared():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [Requirement(r) for r in project["dependencies"] + sum(extras.values(), [])]


def test_every_pin_is_exact_and_without_a_local_version():
    for name, version in pins().items():
        assert re.fullmatch(r"[0-9][0-9a-z.]*", version), f"{name}=={version}"
    for requirement in declared():
        version = pins()[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), requirement


def test_everything_that_is_installed_with_the_package_is_pinned():
    """Follows the dependencies of what is installed here, the markers of this machine applied."""
    environment = default_environment()
    todo, seen = declared(), set[tuple[str, str]]()
    while todo:
        requirement = todo.pop()
        if requirement.marker and not requirement.marker.evaluate():
            continue  # Ours, for another system.
        name = canonicalize_name(requirement.name)
        # What the CUDA build of torch brings, torch pins itself, and a CPU has none of it.
        if name.startswith(("nvidia-", "cuda-")):
            continue
        for extra in {"", *requirement.extras} - {e for n, e in seen if n == name}:
            seen.add((name, extra))
            assert name in pins(), f"constraints.txt does not pin {name}"
            needed = map(Requirement, metadata.requires(name) or [])
            marked = {**environment, "extra": extra}
            for need in needed:
                if need.marker is None or need.marker.evaluate(marked):
                    need.marker = None  # Answered here, where the extra is known.
                    todo.append(need)
    assert len(seen) > 50, "the walk found hardly anything"


def test_a_warning_from_our_own_code_is_an_error():
    def warn(module):
        warnings.warn_explicit("old", DeprecationWarning, "a file", 1, module=module)

    for module in ("graph_trainer", "graph_trainer.passes.x"):
        with pytest.raises(DeprecationWarning):
            warn(module)
    with warnings.catch_warnings(record=True):
        warn("torch")
