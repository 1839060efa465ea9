"""The launches that integration tests share, and which tests are only part of the full run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.launches import Launches, jobs_of

# The first test that asks for a launch waits for all of its jobs.
SECONDS = 2800


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            if item.get_closest_marker("quick") is None:
                item.add_marker(pytest.mark.full)
            if "launches" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.timeout(SECONDS))


@pytest.fixture(scope="session")
def launches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    wanted = [job for item in request.session.items for job in jobs_of(item)]
    device = request.config.getoption("--device")
    return Launches(tmp_path_factory.mktemp("launches"), wanted, device)
