"""The public API on real gloo ranks: sharded models captured, against the same run eagerly.

public_api_cases.py says what the cases are.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.launches import Job, Launches
from tests.integration.public_api_cases import CASES, POLICIES

ALL = [(name, policy) for name, case in CASES.items() for policy in case.policies]
BITWISE = [each for each in ALL if each[0] != "inductor"]

# Sums over ranks and over rows of a batch happen in another order than on one rank: a handful
# of roundings of 2^-24 each, on sums of a few hundred terms.
GLOBAL_BATCH_TOLERANCE = 1e-5
# Inductor fuses and reorders float32 arithmetic within one step, and the errors of a step go
# into the next one's weights.
INDUCTOR_TOLERANCE = 1e-4


def job(case: str, ranks: int = 0) -> Job:
    return Job(ranks or CASES[case].ranks, f"public_api_runs:run:{case}")


def jobs(params: dict[str, Any]) -> list[Job]:
    return [job(params["case"], params.get("ranks", 0))]


def of_policy(launches: Launches, case: str, policy: str) -> list[Any]:
    """What each rank found with a policy."""
    return [result["policies"][policy] for result in launches(job(case))]


@pytest.mark.parametrize(("case", "policy"), BITWISE)
def test_three_steps_are_bitwise_those_of_the_eager_model(
    launches: Launches, case: str, policy: str
) -> None:
    """Losses, every gradient, buffers and the state of the random generator."""
    for result in of_policy(launches, case, policy):
        assert result["differences"] == []
        assert result["gradients"] > 0


@pytest.mark.parametrize(("case", "policy"), ALL)
def test_collectives_that_run_are_those_of_the_graph(
    launches: Launches, case: str, policy: str
) -> None:
    for result in of_policy(launches, case, policy):
        assert result["issued"] == result["expected"]
        assert sum(result["expected"].values()) > 0


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if "never" in case.policies])
def test_never_gathers_nothing_in_backward(launches: Launches, case: str) -> None:
    for result in of_policy(launches, case, "never"):
        assert result["backward_gathers"] == []


@pytest.mark.parametrize("case", [c for c in CASES if c != "replicate"])
def test_forward_gathers_every_parameter_it_reads_once(launches: Launches, case: str) -> None:
    for result in of_policy(launches, case, CASES[case].policies[0]):
        gathered = result["forward_gathers"]
        assert len(gathered) == len(set(gathered)) > 0


@pytest.mark.parametrize(
    "case", [name for name, case in CASES.items() if case.policies == POLICIES]
)
def test_default_keeps_the_last_bucket_and_always_nothing(launches: Launches, case: str) -> None:
    for always, default in zip(
        of_policy(launches, case, "always"), of_policy(launches, case, "default"), strict=True
    ):
        again, kept = set(always["backward_gathers"]), set(always["backward_gathers"])
        kept -= set(default["backward_gathers"])
        assert set(default["backward_gathers"]) < again, "default keeps something, always nothing"
        assert again <= set(always["forward_gathers"])
        assert kept


@pytest.mark.parametrize("case", ["hybrid"])
def test_always_gathers_again_what_backward_reads_and_no_more(
    launches: Launches, case: str
) -> None:
    """Backward of a linear layer reads its weight and not its bias."""
    for result in of_policy(launches, case, "always"):
        weights = sorted(n for n in result["forward_gathers"] if n.endswith("weight"))
        weights.remove("layers.0.up.weight")  # its input needs no gradient
        assert result["backward_gathers"] == weights


@pytest.mark.parametrize("case", ["odd"])
def test_a_parameter_that_the_loss_does_not_reach_has_no_gradient(
    launches: Launches, case: str
) -> None:
    for result in of_policy(launches, case, "always"):
        assert result["without_gradient"] == ["unused"]


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.global_batch])
def test_ranks_together_compute_what_one_rank_does_on_the_global_batch(
    launches: Launches, case: str
) -> None:
    for result in launches(job(case)):
        assert result["one_rank_error"]["loss"] < GLOBAL_BATCH_TOLERANCE
        assert result["one_rank_error"]["gradient"] < GLOBAL_BATCH_TOLERANCE


@pytest.mark.parametrize("case", ["inductor"])
def test_inductor_computes_the_same_within_tolerance(launches: Launches, case: str) -> None:
    for result in of_policy(launches, case, "always"):
        assert result["gradients"] > 0
        assert result["relative_error"] < INDUCTOR_TOLERANCE
        # or the count of what ran would say nothing about duplicates
        assert result["backward_gathers"]
        assert set(result["backward_gathers"]) <= set(result["forward_gathers"])


@pytest.mark.parametrize(("case", "ranks"), [("initialised", 3), ("initialised", 4)])
def test_random_initialisation_is_that_of_one_rank(
    launches: Launches, case: str, ranks: int
) -> None:
    for result in launches(job(case, ranks)):
        assert result["different"] == []


@pytest.mark.parametrize(
    ("case", "policy", "draws"),
    # GPT-2: after the embedding, and in both layers in the attention and after two projections
    [("gpt2_dropout", "always", 7), *(("checkpointed_dropout", policy, 3) for policy in POLICIES)],
)
def test_dropout_is_drawn_once(launches: Launches, case: str, policy: str, draws: int) -> None:
    """Though what follows it is computed again in backward."""
    for result in of_policy(launches, case, policy):
        assert result["draws"] == draws


@pytest.mark.parametrize(("case", "ranks"), [("resumed_dropout", 3)])
def test_a_run_with_dropout_resumes_from_its_seed(
    launches: Launches, case: str, ranks: int
) -> None:
    for result in launches(job(case, ranks)):
        assert result["differences"] == []
        assert result["differences_with_another_seed"] != []
