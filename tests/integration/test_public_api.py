"""The public API on real gloo ranks: sharded models captured, against the same run eagerly.

public_api_cases.py says what the cases are.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.launches import Job, Launches
from tests.integration.matrix import TOLERANCE
from tests.integration.public_api_cases import CASES, POLICIES

ALL = [(name, policy) for name, case in CASES.items() for policy in case.policies]

# Sums over ranks and over rows of a batch happen in another order than on one rank: a handful
# of roundings of 2^-24 each, on sums of a few hundred terms.
GLOBAL_BATCH_TOLERANCE = 1e-5


def job(case: str, ranks: int = 4) -> Job:
    return Job(CASES[case].ranks if case in CASES else ranks, f"public_api_runs:run:{case}")


def jobs(params: dict[str, Any]) -> list[Job]:
    return [job(params["case"], params.get("ranks", 4))]


def of_policy(launches: Launches, case: str, policy: str) -> list[Any]:
    """What each rank found with a policy."""
    return [result["policies"][policy] for result in launches(job(case))]


@pytest.mark.parametrize(("case", "policy"), ALL)
def test_three_steps_are_bitwise_those_of_the_eager_model(
    launches: Launches, case: str, policy: str
) -> None:
    """Losses, every gradient, buffers and the state of the random generator."""
    for result in of_policy(launches, case, policy):
        assert result["differences"] == []
        assert result["gradients"] > 0


@pytest.mark.parametrize(("case", "policy"), ALL)
def test_three_steps_of_a_partitioned_step_are_too(
    launches: Launches, case: str, policy: str
) -> None:
    """Halves of the loss add up to the gradients of the whole, as halving and adding are exact."""
    for result in of_policy(launches, case, policy):
        assert result["partitioned"] == []


@pytest.mark.parametrize(("case", "policy"), ALL)
def test_collectives_that_run_are_those_of_the_graph(
    launches: Launches, case: str, policy: str
) -> None:
    for result in of_policy(launches, case, policy):
        assert result["issued"] == result["expected"]
        assert sum(result["expected"].values()) > 0


@pytest.mark.parametrize("case", CASES)
def test_forward_gathers_every_parameter_it_reads_once(launches: Launches, case: str) -> None:
    for result in of_policy(launches, case, CASES[case].policies[0]):
        gathered = result["gathered"]
        assert len(gathered) == len(set(gathered)) > 0


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.global_batch])
def test_ranks_together_compute_what_one_rank_does_on_the_global_batch(
    launches: Launches, case: str
) -> None:
    for result in launches(job(case)):
        assert result["one_rank_error"]["loss"] < GLOBAL_BATCH_TOLERANCE
        assert result["one_rank_error"]["gradient"] < GLOBAL_BATCH_TOLERANCE


@pytest.mark.parametrize("case", ["initialised"])
def test_random_initialisation_is_that_of_one_rank(launches: Launches, case: str) -> None:
    for result in launches(job(case)):
        assert result["different"] == []


@pytest.mark.parametrize("case", ["reduce_dtype"])
def test_gradients_are_reduced_over_tensor_parallelism_in_the_reduce_dtype(
    launches: Launches, case: str
) -> None:
    for result in launches(job(case)):
        assert not result["differs"]
        assert result["error"] < 2**-20  # of four summands in float32; bfloat16 rounds to 2**-9


@pytest.mark.parametrize("case", ["rank_dependent"])
def test_ranks_compare_before_the_first_step(launches: Launches, case: str) -> None:
    """A hang until the group's time-out otherwise."""
    for result in launches(job(case)):
        assert "do not issue the same collectives" in result["error"]
        assert "rank 1" in result["error"] or "ranks 0 and 1" in result["error"]


@pytest.mark.parametrize(
    ("case", "policy", "draws"),
    # GPT-2: after the embedding, and in both layers in the attention and after two projections
    [("gpt2_dropout", "always", 7), *(("checkpointed_dropout", policy, 3) for policy in POLICIES)],
)
def test_dropout_is_drawn_once(launches: Launches, case: str, policy: str, draws: int) -> None:
    """Though what follows it is computed again in backward."""
    for result in of_policy(launches, case, policy):
        assert result["draws"] == draws


@pytest.mark.parametrize(("case", "ranks"), [("compiled_by_inductor", 2)])
def test_inductor_compiles_a_partitioned_step_in_its_order(
    launches: Launches, case: str, ranks: int
) -> None:
    for result in launches(job(case, ranks)):
        for policy in ("none", "full"):
            found = result[policy]
            assert max(found["errors"]) < TOLERANCE["float32"]
            assert found["codes"] == found["halves"]
            gathers = [half.count("all_gather_into_tensor") for half in found["halves"]]
            assert min(gathers) > 0
