"""Mixtures of experts with expert parallelism on real ranks: numbers, routing, placements."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.expert_cases import CASES, ROWS, TOLERANCE, ExpertCase
from tests.integration.launches import Job, Launches

ROUTINGS = Job(4, "expert_cases:other_routing:deepseek_ep4")
MANY = Job(2, "expert_cases:many_routings:12")
SECOND = Job(4, "expert_cases:second_dimension:")
FEW = Job(4, "expert_cases:few_experts:")
SAVED = Job(4, "expert_cases:saved:")
ON_ONE_RANK = Job(1, "expert_cases:resumed_on_one_rank:", (SAVED,), phase=2)
SAVED_ROUTINGS = [
    Job(4, f"expert_cases:saved_routing:{name}")
    for name in ("deepseek_ep2_full", "deepseek_ep2_tp2")
]
TOKENS = ROWS // 4 * 16
"""Of one rank, each of which chooses three experts."""


def job(case: ExpertCase) -> Job:
    first = next(c for c in CASES if c.model == case.model)
    reference = Job(1, f"expert_cases:make_reference:{first.name}", phase=0)
    return Job(case.ranks, f"expert_cases:run:{case.name}", (reference,))


def jobs(params: dict[str, Any]) -> list[Job]:
    return [job(params["case"])] if "case" in params else [params["other"]]


def cases(which: list[ExpertCase]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", which, ids=[case.name for case in which])


every_case = cases(list(CASES))


@cases([case for case in CASES if case.compiled])
def test_a_compiled_graph_trains_alike(launches: Launches, case: ExpertCase) -> None:
    for rank in launches(job(case)):
        assert rank["losses"] == pytest.approx(rank["eager"], rel=TOLERANCE)


@cases([case for case in CASES if not case.compiled])
def test_three_steps_are_bitwise_equal_to_eager(launches: Launches, case: ExpertCase) -> None:
    ranks = launches(job(case))
    assert len(ranks) == case.ranks
    for rank in ranks:
        assert rank["differing"] == []


@every_case
def test_equal_to_one_rank_with_all_experts(launches: Launches, case: ExpertCase) -> None:
    for rank in launches(job(case)):
        assert rank["losses"] == pytest.approx(rank["one_rank"], rel=TOLERANCE)
        for name, error in rank["errors"].items():
            assert error <= TOLERANCE, name


@every_case
def test_experts_are_on_the_mesh_of_their_own(launches: Launches, case: ExpertCase) -> None:
    rank = launches(job(case))[0]
    replicated = ["dp_replicate"] if "hsdp" in case.name else []
    assert rank["meshes"] == [[*replicated, "efsdp", "ep"]]
    assert rank["dims"] == [0]


@pytest.mark.parametrize("other", [FEW], ids=["fsdp4"])
def test_fewer_experts_than_ranks_are_sharded_along_their_second_dimension(
    launches: Launches, other: Job
) -> None:
    for rank in launches(other):
        assert rank == {"dims": [1], "parts": [1 / 4], "differing": []}


@pytest.mark.parametrize("other", [SECOND], ids=["fsdp4"])
def test_a_weight_sharded_along_its_second_dimension(launches: Launches, other: Job) -> None:
    ranks = launches(other)
    assert all(rank["equal"] == [True] * 8 for rank in ranks)
    # as torch.chunk splits: three rows, and six columns by two
    assert [rank["shapes"][0] for rank in ranks] == [[1, 6, 5]] * 3 + [[0, 6, 5]]
    assert [rank["shapes"][1] for rank in ranks] == [[3, 2, 5]] * 3 + [[3, 0, 5]]


@pytest.mark.parametrize("other", [ROUTINGS], ids=["deepseek_ep4"])
def test_one_graph_serves_every_routing(launches: Launches, other: Job) -> None:
    ranks = launches(other)
    for rank in ranks:
        assert rank["differing"] == [] and rank["graphs"] == 1
        first, last = rank["tokens"][1], rank["tokens"][2]
        # ranks 2 and 3 have experts 4 to 7, and get nothing in the second step
        assert first == [TOKENS] * 3 + [0.0] * 5 and last == [0.0] * 5 + [TOKENS] * 3
        assert rank["tokens"][0] not in (first, last)


@pytest.mark.parametrize("other", SAVED_ROUTINGS, ids=["ep2", "ep2_tp2"])
def test_the_saved_routing_is_what_the_ranks_counted(launches: Launches, other: Job) -> None:
    ranks = launches(other)
    saved = ranks[0]["routing"]
    assert (saved["world_size"], saved["expert_parallel_degree"]) == (4, 2)
    assert saved["layers"] == ["layers.1", "layers.2"]
    places = [(each["step"], each["microbatch"]) for each in saved["microbatches"]]
    assert places == [(step, number) for step in (1, 2, 3, 4) for number in (0, 1)]
    for number, each in enumerate(saved["microbatches"]):
        own = [rank["own"][number] for rank in ranks]
        layers = range(len(saved["layers"]))
        summed = [[sum(c) for c in zip(*(o[layer] for o in own), strict=True)] for layer in layers]
        assert each["tokens"] == summed
        for place, rank in enumerate(ranks):
            members = [own[member] for member in rank["group"]]
            first = 4 * rank["experts"]
            for layer in layers:
                received = sum(sum(o[layer][first : first + 4]) for o in members)
                assert each["received"][layer][place] == received
    assert len({rank for layer in saved["microbatches"][2]["received"] for rank in layer}) > 1


@pytest.mark.parametrize("other", SAVED_ROUTINGS, ids=["ep2", "ep2_tp2"])
def test_predicted_bytes_are_those_of_the_routing_that_happened(
    launches: Launches, other: Job
) -> None:
    ranks = launches(other)
    for rank in ranks:
        assert rank["predicted"] == rank["measured"] and len(rank["measured"]) == 7
    # or the routing made no difference
    assert len({number for rank in ranks for number in rank["measured"]}) > 2


@pytest.mark.parametrize("other", [ON_ONE_RANK], ids=["ep2"])
def test_a_checkpoint_is_resumed_with_other_experts_on_a_rank(
    launches: Launches, other: Job
) -> None:
    (one,) = launches(other)
    for rank in launches(SAVED):
        assert rank["differ"] == []
        for losses in (rank["ep4"], one):
            assert losses == pytest.approx(rank["losses"], rel=TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("other", [MANY], ids=["12"])
def test_many_routings_through_one_graph(launches: Launches, other: Job) -> None:
    for rank in launches(other):
        assert rank == {"finite": 12, "graphs": 1}
