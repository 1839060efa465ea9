"""The public API on real gloo ranks: sharded models captured, against the same run eagerly.

One launch for each number of ranks; public_api_worker.py says what the cases are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.launch import run_ranks

WORKER = Path(__file__).with_name("public_api_worker.py")
RANKS = {"three": 3, "four": 4, "inductor": 2}
EVERY = ("always", "never", "default")

# case: (launch, policies)
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "llama": ("three", EVERY),
    "gpt2_tied": ("three", EVERY),
    "gpt2_dropout": ("three", ("always",)),
    "cnn": ("three", EVERY),
    "odd": ("three", EVERY),
    "replicate": ("three", ("always",)),
    "mixed_precision": ("three", EVERY),
    "checkpointed": ("three", EVERY),
    "checkpointed_dropout": ("three", EVERY),
    "hybrid": ("four", ("always", "never")),
    "tensor_parallel": ("four", EVERY),
    "odd_four": ("four", ("always",)),
    "hybrid_odd": ("four", ("always",)),
    "inductor": ("inductor", ("always",)),
}
BITWISE = [(c, p) for c, (launch, policies) in CASES.items() for p in policies if c != "inductor"]
ALL = [(c, p) for c, (_, policies) in CASES.items() for p in policies]

# Sums over ranks and over rows of a batch happen in another order than on one rank: a handful
# of roundings of 2^-24 each, on sums of a few hundred terms.
GLOBAL_BATCH_TOLERANCE = 1e-5
# Inductor fuses and reorders float32 arithmetic within one step, and the errors of a step go
# into the next one's weights.
INDUCTOR_TOLERANCE = 1e-4

pytestmark = pytest.mark.timeout(300)


class Launches:
    """Every launch at most once, when the first test asks for it."""

    def __init__(self) -> None:
        self._results: dict[str, list[Any] | AssertionError] = {}

    def case(self, name: str, launch: str = "") -> list[Any]:
        """What each rank reported of a case."""
        launch = launch or CASES[name][0]
        if launch not in self._results:
            try:
                self._results[launch] = run_ranks(WORKER, RANKS[launch], [launch], timeout=280)
            except AssertionError as error:
                self._results[launch] = error
        results = self._results[launch]
        if isinstance(results, AssertionError):
            raise results
        by_rank = [rank[name] for rank in results]
        for rank, result in enumerate(by_rank):
            assert "error" not in result, f"rank {rank}: {result['error']}"
        return by_rank

    def policy(self, name: str, policy: str) -> list[Any]:
        return [result["policies"][policy] for result in self.case(name)]


@pytest.fixture(scope="module")
def launches() -> Launches:
    return Launches()


@pytest.mark.parametrize(("case", "policy"), BITWISE)
def test_three_steps_are_bitwise_those_of_the_eager_model(
    launches: Launches, case: str, policy: str
) -> None:
    """Losses, every gradient, buffers and the state of the random generator."""
    for result in launches.policy(case, policy):
        assert result["differences"] == []
        assert result["gradients"] > 0


@pytest.mark.parametrize(("case", "policy"), ALL)
def test_collectives_that_run_are_those_of_the_graph(
    launches: Launches, case: str, policy: str
) -> None:
    for result in launches.policy(case, policy):
        assert result["issued"] == result["expected"]
        assert sum(result["expected"].values()) > 0


@pytest.mark.parametrize("case", [c for c, (_, policies) in CASES.items() if "never" in policies])
def test_never_gathers_nothing_in_backward(launches: Launches, case: str) -> None:
    for result in launches.policy(case, "never"):
        assert result["backward_gathers"] == []


@pytest.mark.parametrize("case", [c for c in CASES if c != "replicate"])
def test_forward_gathers_every_parameter_it_reads_once(launches: Launches, case: str) -> None:
    for result in launches.policy(case, CASES[case][1][0]):
        gathered = result["forward_gathers"]
        assert len(gathered) == len(set(gathered)) > 0


@pytest.mark.parametrize("case", [c for c, (_, policies) in CASES.items() if policies == EVERY])
def test_default_keeps_the_last_bucket_and_always_nothing(launches: Launches, case: str) -> None:
    for always, default in zip(
        launches.policy(case, "always"), launches.policy(case, "default"), strict=True
    ):
        again, kept = set(always["backward_gathers"]), set(always["backward_gathers"])
        kept -= set(default["backward_gathers"])
        assert set(default["backward_gathers"]) < again, "default keeps something, always nothing"
        assert again <= set(always["forward_gathers"])
        assert kept


def test_always_gathers_again_what_backward_reads_and_no_more(launches: Launches) -> None:
    """Backward of a linear layer reads its weight and not its bias."""
    for result in launches.policy("hybrid", "always"):
        weights = sorted(n for n in result["forward_gathers"] if n.endswith("weight"))
        weights.remove("layers.0.up.weight")  # its input needs no gradient
        assert result["backward_gathers"] == weights


def test_a_parameter_that_the_loss_does_not_reach_has_no_gradient(launches: Launches) -> None:
    for result in launches.policy("odd", "always"):
        assert result["without_gradient"] == ["unused"]


@pytest.mark.parametrize(
    "case", ["llama", "gpt2_tied", "replicate", "checkpointed", "hybrid", "tensor_parallel"]
)
def test_ranks_together_compute_what_one_rank_does_on_the_global_batch(
    launches: Launches, case: str
) -> None:
    for result in launches.case(case):
        assert result["one_rank_error"]["loss"] < GLOBAL_BATCH_TOLERANCE
        assert result["one_rank_error"]["gradient"] < GLOBAL_BATCH_TOLERANCE


def test_inductor_computes_the_same_within_tolerance(launches: Launches) -> None:
    for result in launches.policy("inductor", "always"):
        assert result["gradients"] > 0
        assert result["relative_error"] < INDUCTOR_TOLERANCE


def test_inductor_gathers_again_in_backward(launches: Launches) -> None:
    """Else the count of what ran would say nothing about duplicates."""
    for result in launches.policy("inductor", "always"):
        assert result["backward_gathers"]
        assert set(result["backward_gathers"]) <= set(result["forward_gathers"])


@pytest.mark.parametrize("launch", ["three", "four"])
def test_random_initialisation_is_that_of_one_rank(launches: Launches, launch: str) -> None:
    for result in launches.case("initialised", launch):
        assert result["different"] == []


@pytest.mark.parametrize(
    ("case", "policy", "draws"),
    # GPT-2: after the embedding, and in both layers in the attention and after two projections
    [("gpt2_dropout", "always", 7), *(("checkpointed_dropout", policy, 3) for policy in EVERY)],
)
def test_dropout_is_drawn_once(launches: Launches, case: str, policy: str, draws: int) -> None:
    """Though what follows it is computed again in backward."""
    for result in launches.policy(case, policy):
        assert result["draws"] == draws


def test_a_run_with_dropout_resumes_from_its_seed(launches: Launches) -> None:
    for result in launches.case("resumed_dropout", "three"):
        assert result["differences"] == []
        assert result["differences_with_another_seed"] != []
