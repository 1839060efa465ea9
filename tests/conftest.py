"""What every test shares."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        default="cpu",
        choices=("cpu", "cuda"),
        help="where the ranks of tests/integration/test_matrix.py compute: on CPU over gloo, or on "
        "one GPU each over nccl",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cuda_tests = [item for item in items if item.get_closest_marker("cuda")]
    if not cuda_tests:
        return
    import torch  # seconds of import that many runs can do without

    if not torch.cuda.is_available():
        for item in cuda_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Looks for dead cycles less often: with torch loaded each look takes long."""
    gc.set_threshold(50_000, 20, 20)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write what each folder took, below the slowest tests, where tests of several ran.

    Seconds are the sum over tests: with two processes about twice the time that passed.
    """
    seconds: dict[str, float] = {}
    tests: dict[str, set[str]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                folder = report.nodeid.partition("::")[0].rpartition("/")[0]
                seconds[folder] = seconds.get(folder, 0.0) + report.duration
                tests.setdefault(folder, set()).add(report.nodeid)
    if len(seconds) > 1:
        terminalreporter.write_sep("=", "seconds and tests of each folder")
        for folder in sorted(seconds, key=lambda name: -seconds[name]):
            line = f"{seconds[folder]:9.2f} s {len(tests[folder]):5} {folder}"
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def fresh(tmp_path_factory) -> Iterator[Any]:
    """Runs a Python program in a process that has imported torch and done nothing else."""
    from tests.fresh import Fresh

    runs = Fresh(tmp_path_factory.mktemp("fresh"))
    yield runs
    runs.end()


@pytest.fixture(autouse=True)
def not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the variables of a launch that the tests' own shell may have."""
    for name in ("WORLD_SIZE", "RANK", "NGPU", "NNODES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    """Ends a process group that a test left behind, or the next test would run in it."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        # DTensor would hand the ended group's meshes to the next test that has the like
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
