"""Debug models on every mesh of matrix.py: numbers and collectives.

`pytest tests/integration/test_matrix.py` runs it on CPU and gloo; with `--device cuda` the same
list on one GPU a rank and nccl. Only what the selected tests need is launched, so that
`-k fsdp3_tp2_fp32` takes a minute.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.launches import Job, Launches
from tests.integration.matrix import BOTH, GRADIENTS, QUICK, Case, Holds, holding

DIFFER = Job(4, "matrix_cases:graphs_that_differ:")


def reference(case: Case) -> Job:
    """Makes the one-rank reference, shared by cases with the same flags there."""
    first = next(c for c in holding(Holds.ONE_RANK) if c.on_one_rank == case.on_one_rank)
    return Job(1, f"matrix_cases:make_reference:{first.name}", phase=0)


def job(case: Case) -> Job:
    after = (reference(case),) if Holds.ONE_RANK in case.holds else ()
    return Job(case.ranks, f"matrix_cases:run:{case.name}", after)


def jobs(params: dict[str, Any]) -> list[Job]:
    return [job(params["case"])] if "case" in params else [params["other"]]


def cases(what: Holds) -> pytest.MarkDecorator:
    """Run a test for every case of which this must hold."""
    params = [
        pytest.param(case, id=case.name, marks=[pytest.mark.quick] if case.name in QUICK else [])
        for case in holding(what)
    ]
    return pytest.mark.parametrize("case", params)


def policies(launches: Launches, case: Case) -> list[tuple[str, dict[str, Any]]]:
    """What every rank found with every policy."""
    ranks = launches(job(case))
    assert len(ranks) == case.ranks
    return [(policy, rank["policies"][policy]) for rank in ranks for policy in case.policies]


@cases(Holds.BITWISE)
def test_three_steps_are_bitwise_equal_to_eager(launches: Launches, case: Case) -> None:
    for policy, entry in policies(launches, case):
        assert entry["differing"] == [], policy
        assert entry["gradients"] == case.model.gradients


@cases(Holds.ONE_RANK)
def test_equal_to_one_rank_on_the_global_batch(launches: Launches, case: Case) -> None:
    for rank in launches(job(case)):
        one = rank["one_rank"]
        assert rank["losses"] == pytest.approx(one["losses"], rel=case.tolerance)
        _check_gradients(one["errors"], case)


def _check_gradients(errors: dict[str, float], case: Case) -> None:
    assert len(errors) == case.model.gradients
    for name, error in errors.items():
        assert error <= case.tolerance, name


@cases(Holds.COLLECTIVES)
def test_collectives_issued_are_those_in_the_graph(launches: Launches, case: Case) -> None:
    for policy, entry in policies(launches, case):
        assert entry["issued"] == entry["expected"], policy
        assert sum(entry["expected"].values()) > 0


@cases(Holds.RESHARD)
def test_parameters_gathered_again_in_backward(launches: Launches, case: Case) -> None:
    assert {"always", "never"} <= set(case.policies)
    # backward of an embedding reads the tokens and no weight
    not_read, last_bucket = {"tok_embeddings.weight"}, {"norm.weight", "lm_head.weight"}
    everything = policies(launches, case)[0][1]["gathers"]["forward"]
    assert len(everything) == len(set(everything)) == GRADIENTS
    read = set(everything) - not_read
    again = {"never": [], "always": sorted(read), "default": sorted(read - last_bucket)}
    for policy, entry in policies(launches, case):
        assert sorted(entry["gathers"]["forward"]) == sorted(everything), policy
        assert sorted(entry["gathers"]["backward"]) == again[policy], policy


@cases(Holds.VALIDATION)
def test_validation_agrees_with_one_rank(launches: Launches, case: Case) -> None:
    for rank in launches(job(case)):
        assert len(rank["validated"]) == 1
        assert rank["validated"] == pytest.approx(rank["one_rank"]["validated"], rel=case.tolerance)


@cases(Holds.DOUBLE_BATCH)
def test_accumulation_equals_one_batch_of_as_many_rows(launches: Launches, case: Case) -> None:
    for rank in launches(job(case)):
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
    for rank in launches(job(case)):
        for entry in rank["policies"].values():
            assert entry["losses"] == pytest.approx(rank["losses"], rel=case.tolerance)


@pytest.mark.parametrize("other", [Job(8, "public_api_runs:run:odd")])
def test_parameters_of_fewer_rows_than_ranks(launches: Launches, other: Job) -> None:
    for rank in launches(other):
        for policy in BOTH:
            entry = rank["policies"][policy]
            assert entry["differences"] == []
            assert entry["gradients"] > 0
            assert entry["issued"] == entry["expected"]
            assert entry["without_gradient"] == ["unused"]
    rows = [rank["rows"]["second.weight"] for rank in launches(other)]
    assert rows == [1, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.quick
@pytest.mark.parametrize("other", [DIFFER])
def test_ranks_whose_graphs_differ_are_refused(launches: Launches, other: Job) -> None:
    messages = set(launches(other))
    assert len(messages) == 1, "every rank says the same"
    (message,) = messages
    assert "rank 0 issues" in message and "rank 1 issues" in message
    assert "would hang" in message
