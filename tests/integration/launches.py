"""One launch of real ranks for all the selected tests that need as many ranks.

Starting eight processes costs half a minute on two cores, far more than most cases. So a test
module says which jobs its tests read (`jobs`), the session collects those of the selected tests,
and each launch runs all of its jobs in the same processes when the first test asks for one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.launch import run_ranks

WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class Job:
    """A function that every rank of a launch calls; `worker.py` says how it is named."""

    ranks: int
    name: str
    after: tuple[Job, ...] = ()
    """Jobs of other launches whose files it reads."""
    phase: int = 1
    """Jobs with the same number of ranks and the same phase share a launch. 0 for what others
    come after, 2 for what comes after the launches of phase 1."""
    script: str = ""
    """A program in place of worker.py, which then runs this job alone."""


def jobs_of(item: pytest.Item) -> Iterable[Job]:
    """The jobs whose results a test reads, and those that these come after."""
    module = getattr(item, "module", None)
    if hasattr(module, "jobs"):
        for job in module.jobs(item.callspec.params if hasattr(item, "callspec") else {}):
            yield from job.after
            yield job


class Launches:
    """The results of the jobs that the selected tests need, by rank."""

    def __init__(self, folder: Path, wanted: Iterable[Job], device: str) -> None:
        self.folder = folder
        """The scratch folder of every job."""
        self._device = device
        self._jobs: dict[tuple[int, int, str], list[Job]] = {}
        for job in dict.fromkeys(wanted):
            self._jobs.setdefault(_launch_of(job), []).append(job)
        self._results: dict[tuple[int, int, str], list[Any] | AssertionError] = {}

    def __call__(self, job: Job) -> list[Any]:
        """What each rank found.

        Raises:
            AssertionError: the launch or the job failed, with the ranks' own words.
        """
        launch = _launch_of(job)
        if launch not in self._results:
            for other in self._jobs[launch]:
                for earlier in other.after:
                    if _launch_of(earlier) != launch:
                        self(earlier)
            try:
                self._results[launch] = self._run(job)
            except AssertionError as error:
                self._results[launch] = error
        results = self._results[launch]
        if isinstance(results, AssertionError):
            raise results
        entries = [rank[job.name] for rank in results]
        for rank, entry in enumerate(entries):
            assert "error" not in entry, f"rank {rank}: {entry['error']}"
        return [entry["result"] for entry in entries]

    def _run(self, job: Job) -> list[Any]:
        if job.script:
            words = [str(self.folder), job.name]
            path = Path(__file__).with_name(job.script)
            return run_ranks(path, job.ranks, words, timeout=120, device=self._device)
        names = [j.name for j in self._jobs[_launch_of(job)]]
        words = [str(job.ranks), str(self.folder), *names]
        results = run_ranks(WORKER, job.ranks, words, 2700, self._device, forks=True)
        for name in names:
            entry = results[0][name]
            seconds, threads = entry["seconds"], entry["threads"]
            print(f"{job.ranks} ranks: {name} took {seconds} s, {threads} threads run after it")
        return results


def _launch_of(job: Job) -> tuple[int, int, str]:
    return job.ranks, job.phase, job.name if job.script else ""
