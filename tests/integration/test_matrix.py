"""Llama 3's debug model on every mesh of matrix.py: numbers, collectives, memory, checkpoints.

`pytest tests/integration/test_matrix.py` runs it on CPU and gloo; with `--device cuda` the same
list on one GPU a rank and nccl. Only what the selected tests need is launched, so that
`-k fsdp3_tp2_fp32` takes a minute.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.launch import run_ranks
from tests.integration.matrix import (
    EVERY,
    MATRIX,
    PUBLIC,
    TOLERANCE,
    Case,
    Holds,
    holding,
)

# one launch of eight ranks on two cores runs most of the cases of this file
pytestmark = pytest.mark.timeout(2000)

WORKER = Path(__file__).with_name("matrix_worker.py")
PLAIN = Path(__file__).with_name("plain_torchtitan_worker.py")
GRADIENTS = 45
SEQUENCE = 16

SAVED, ONE_RANK, FROM_PLAIN = "checkpoint:saved", "checkpoint:one_rank", "checkpoint:from_plain"
PLAIN_SAVES, PLAIN_LOADS, DIFFER = "plain:save", "plain:load", "differ"

# What a job finds in the scratch folder, and what must have left it there.
NEEDS = {FROM_PLAIN: PLAIN_SAVES, ONE_RANK: SAVED, PLAIN_LOADS: SAVED}


def reference(case: Case) -> str:
    """The job that makes the one-rank reference, shared by cases with the same flags there."""
    first = next(c for c in holding(Holds.ONE_RANK) if c.on_one_rank == case.on_one_rank)
    return f"reference:{first.name}"


def jobs_of(item: pytest.Item) -> Iterable[str]:
    """The jobs that a test reads the results of, and those that these need."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    job = params.get("job", "")
    if case := params.get("case"):
        job = f"case:{case.name}"
        if Holds.ONE_RANK in case.holds:
            yield reference(case)
    if job:
        yield job
        yield from [NEEDS[job]] if job in NEEDS else []


class Launches:
    """The launches that the selected tests need, each when the first of them asks for it."""

    def __init__(self, folder: Path, wanted: set[str], device: str) -> None:
        self._folder = folder
        self._device = device
        self._results: dict[str, list[Any] | AssertionError] = {}
        eight = [SAVED, FROM_PLAIN, DIFFER, *(f"public:{name}" for name in PUBLIC)]
        by_ranks: dict[int, list[str]] = {}
        for case in MATRIX:
            by_ranks.setdefault(case.ranks, []).append(f"case:{case.name}")
        by_ranks.setdefault(8, []).extend(eight)
        every = {f"{ranks} ranks": (ranks, jobs) for ranks, jobs in by_ranks.items()} | {
            "references": (1, [*dict.fromkeys(map(reference, holding(Holds.ONE_RANK)))]),
            "plain saves": (1, [PLAIN_SAVES]),
            "one goes on": (1, [ONE_RANK]),
            "plain loads": (1, [PLAIN_LOADS]),
        }
        self._ranks = {name: ranks for name, (ranks, _) in every.items()}
        self._jobs = {name: [j for j in jobs if j in wanted] for name, (_, jobs) in every.items()}

    def job(self, job: str) -> list[Any]:
        """What each rank found."""
        (launch,) = [name for name, jobs in self._jobs.items() if job in jobs]
        if launch not in self._results:
            for other in self._before(launch):
                self.job(other)
            try:
                self._results[launch] = self._run(launch)
            except AssertionError as error:
                self._results[launch] = error
        results = self._results[launch]
        if isinstance(results, AssertionError):
            raise results
        entries = [rank[job] for rank in results]
        for rank, entry in enumerate(entries):
            assert "error" not in entry, f"rank {rank}: {entry['error']}"
        return [entry["result"] for entry in entries]

    def _before(self, launch: str) -> list[str]:
        """One job of every launch that must have ended before this one begins."""
        earlier = {NEEDS[job] for job in self._jobs[launch] if job in NEEDS}
        if any(job.startswith("case:") for job in self._jobs[launch]):
            earlier.update(self._jobs["references"][:1])
        return sorted(earlier - set(self._jobs[launch]))

    def _run(self, launch: str) -> list[Any]:
        jobs, folder = self._jobs[launch], self._folder
        if launch.startswith("plain"):
            paths = {
                PLAIN_SAVES: [folder / "plain", _synthetic_batches(folder / "batches.pt")],
                PLAIN_LOADS: [folder / "ours", folder / "batches_after.pt"],
            }
            (job,) = jobs
            words = [job.partition(":")[2], *map(str, paths[job])]
            (result,) = run_ranks(PLAIN, 1, words, timeout=120, device=self._device)
            return [{job: {"result": result}}]
        words = [str(folder), *jobs]
        results = run_ranks(WORKER, self._ranks[launch], words, timeout=1900, device=self._device)
        for job in jobs:
            print(f"{launch}: {job} took {results[0][job]['seconds']} s")
        return results


def _synthetic_batches(path: Path) -> Path:
    """Four global batches that need no corpus, for programs that do not share one."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(4):
        tokens = torch.randint(2048, (8, SEQUENCE + 1), generator=generator)
        positions = torch.arange(SEQUENCE).repeat(8, 1)
        batches.append(({"input": tokens[:, :-1].clone(), "positions": positions}, tokens[:, 1:]))
    torch.save(batches, path)
    return path


@pytest.fixture(scope="module")
def launches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    ours = [item for item in request.session.items if item.path == Path(__file__)]
    wanted = {job for item in ours for job in jobs_of(item)}
    device = request.config.getoption("--device")
    return Launches(tmp_path_factory.mktemp("matrix"), wanted, device)


def cases(what: Holds) -> pytest.MarkDecorator:
    """Run a test for every case of which this must hold."""
    return pytest.mark.parametrize("case", holding(what), ids=lambda case: case.name)


def policies(launches: Launches, case: Case) -> list[tuple[str, dict[str, Any]]]:
    """What every rank found with every policy."""
    ranks = launches.job(f"case:{case.name}")
    assert len(ranks) == case.ranks
    return [(policy, rank["policies"][policy]) for rank in ranks for policy in case.policies]


@cases(Holds.BITWISE)
def test_three_steps_are_bitwise_equal_to_eager(launches: Launches, case: Case) -> None:
    for policy, entry in policies(launches, case):
        assert entry["differing"] == [], policy
        assert entry["gradients"] == GRADIENTS


@cases(Holds.ONE_RANK)
def test_equal_to_one_rank_on_the_global_batch(launches: Launches, case: Case) -> None:
    launches.job(reference(case))
    for rank in launches.job(f"case:{case.name}"):
        one = rank["one_rank"]
        assert rank["losses"] == pytest.approx(one["losses"], rel=case.tolerance)
        _check_gradients(one["errors"], case)


def _check_gradients(errors: dict[str, float], case: Case) -> None:
    assert len(errors) == GRADIENTS
    for name, error in errors.items():
        assert error <= case.tolerance, name


@cases(Holds.COLLECTIVES)
def test_collectives_issued_are_those_in_the_graph(launches: Launches, case: Case) -> None:
    for policy, entry in policies(launches, case):
        assert entry["issued"] == entry["expected"], policy
        assert sum(entry["expected"].values()) >= GRADIENTS


@cases(Holds.RESHARD)
def test_parameters_gathered_again_in_backward(launches: Launches, case: Case) -> None:
    assert set(case.policies) == set(EVERY)
    # backward of an embedding reads the tokens and no weight
    not_read, last_bucket = {"tok_embeddings.weight"}, {"norm.weight", "lm_head.weight"}
    everything = policies(launches, case)[0][1]["gathers"]["forward"]
    assert len(everything) == len(set(everything)) == GRADIENTS
    read = set(everything) - not_read
    again = {"never": [], "always": sorted(read), "default": sorted(read - last_bucket)}
    for policy, entry in policies(launches, case):
        assert sorted(entry["gathers"]["forward"]) == sorted(everything), policy
        assert sorted(entry["gathers"]["backward"]) == again[policy], policy


@cases(Holds.MEMORY)
def test_memory_follows_the_policy(launches: Launches, case: Case) -> None:
    for rank in launches.job(f"case:{case.name}"):
        memory = {policy: entry["memory"] for policy, entry in rank["policies"].items()}
        peak = {policy: found["peak"] for policy, found in memory.items()}
        assert peak["always"] <= peak["default"] < peak["never"]
        unsharded, last_bucket = memory["never"]["unsharded"], memory["never"]["last_bucket"]
        freed = {p: memory["never"]["border"] - memory[p]["border"] for p in EVERY}
        assert freed["always"] >= 0.9 * unsharded
        assert freed["default"] >= 0.9 * (unsharded - last_bucket)


@cases(Holds.VALIDATION)
def test_validation_agrees_with_one_rank(launches: Launches, case: Case) -> None:
    for rank in launches.job(f"case:{case.name}"):
        assert len(rank["validated"]) == 1
        assert rank["validated"] == pytest.approx(rank["one_rank"]["validated"], rel=case.tolerance)


@cases(Holds.DOUBLE_BATCH)
def test_accumulation_equals_one_batch_of_as_many_rows(launches: Launches, case: Case) -> None:
    for rank in launches.job(f"case:{case.name}"):
        double = rank["double_batch"]
        assert double["microbatches"] == [2, 1]
        assert rank["losses"] == pytest.approx(double["losses"], rel=case.tolerance)
        _check_gradients(double["errors"], case)


@cases(Holds.REPEATS)
def test_deterministic_mode_repeats_itself(launches: Launches, case: Case) -> None:
    for policy, entry in policies(launches, case):
        assert entry["repeated_differs"] == [], policy


@cases(Holds.CLOSE)
def test_a_compiled_graph_trains_alike(launches: Launches, case: Case) -> None:
    """Fused kernels round once where eager rounds at every operator."""
    for rank in launches.job(f"case:{case.name}"):
        for entry in rank["policies"].values():
            assert entry["losses"] == pytest.approx(rank["losses"], rel=case.tolerance)


@pytest.mark.parametrize("job", [f"public:{name}" for name in PUBLIC])
def test_parameters_of_fewer_rows_than_ranks(launches: Launches, job: str) -> None:
    for rank in launches.job(job):
        for policy in EVERY:
            entry = rank["policies"][policy]
            assert entry["differences"] == []
            assert entry["gradients"] > 0
            assert entry["issued"] == entry["expected"]
            assert entry["without_gradient"] == ["unused"]
    rows = [rank["rows"]["second.weight"] for rank in launches.job(job)]
    assert rows == [1, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("job", [DIFFER])
def test_ranks_whose_graphs_differ_are_refused(launches: Launches, job: str) -> None:
    messages = set(launches.job(job))
    assert len(messages) == 1, "every rank tells the same"
    (message,) = messages
    assert "rank 0 issues all_gather_into_tensor" in message
    assert "rank 1 issues all_gather_into_tensor" in message
    assert "would hang" in message


@pytest.mark.parametrize("job", [SAVED])
def test_a_resumed_run_equals_an_uninterrupted_one(launches: Launches, job: str) -> None:
    for rank in launches.job(job):
        assert rank["resumed_at"] == 2
        assert rank["differing"] == []


def near(losses: list[float]) -> Any:
    """Another mesh sums in another order, and both go on from the same bits."""
    assert len(losses) == 2
    return pytest.approx(losses, rel=TOLERANCE["float32"])


@pytest.mark.parametrize("job", [SAVED])
def test_saved_on_fsdp8_it_goes_on_on_fsdp4_tp2(launches: Launches, job: str) -> None:
    for rank in launches.job(job):
        assert rank["fsdp4_tp2"] == near(rank["losses"][2:])


@pytest.mark.parametrize("job", [ONE_RANK])
def test_saved_on_fsdp8_it_goes_on_on_one_rank(launches: Launches, job: str) -> None:
    assert launches.job(job)[0] == near(launches.job(SAVED)[0]["losses"][2:])


@pytest.mark.parametrize("job", [PLAIN_LOADS])
def test_plain_torchtitan_goes_on_from_our_checkpoint(launches: Launches, job: str) -> None:
    """The second loss needs the optimizer's state and the schedule as well."""
    (plain,) = launches.job(job)
    assert plain["imported"] == []
    assert plain["step"] == 4
    assert plain["losses"] == near(launches.job(SAVED)[0]["losses"][2:])


@pytest.mark.parametrize("job", [FROM_PLAIN])
def test_we_go_on_from_plain_torchtitans_checkpoint(launches: Launches, job: str) -> None:
    (plain,) = launches.job(PLAIN_SAVES)
    assert plain["imported"] == []
    for losses in launches.job(job):
        assert losses == near(plain["losses"][2:])
