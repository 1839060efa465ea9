"""Both front ends: ranks that would hang are refused alike, ranks that would not are accepted."""

import dataclasses

import pytest
import torch

import graph_trainer as gt
from graph_trainer.core.analysis.mesh_groups import RankClasses
from graph_trainer.core.ordering.sequences import issued_by
from graph_trainer.testing import become
from tests.unit.core.ordering.front_ends import (
    FRONT_ENDS,
    GATHER,
    REDUCE,
    at_once,
    offline,
    refused,
)
from tests.unit.graphs import captured_decoder, collective

SMALL, LARGE = collective(ranks=(0, 1), numel=4), collective(ranks=(2, 3), numel=9)
EVEN, ODD = collective(ranks=(0, 2)), collective(ranks=(1, 3))
LOW, HIGH = collective(ranks=(0, 1)), collective(ranks=(2, 3), kind="all_reduce")
ACCEPTED = {
    "equal": ([GATHER, REDUCE], [GATHER, REDUCE]),
    "empty": ([], []),
    # stages of a pipeline, or experts
    "sizes of two groups": ([SMALL, EVEN], [SMALL, ODD], [LARGE, EVEN], [LARGE, ODD]),
    "numbers of two groups": ([LOW], [LOW], [HIGH, HIGH, HIGH], [HIGH, HIGH, HIGH]),
}


@FRONT_ENDS
@pytest.mark.parametrize("ranks", ACCEPTED.values(), ids=ACCEPTED)
def test_ranks_that_agree_are_accepted(check, ranks):
    assert check([at_once(*issued) for issued in ranks]) is None


DIFFERING = {
    "order": ([GATHER, REDUCE], [REDUCE, GATHER], 0),
    "dtype": ([GATHER], [collective(dtype=torch.bfloat16)], 0),
    "numel": ([GATHER], [collective(numel=9)], 0),
    "reduction": ([REDUCE], [dataclasses.replace(REDUCE, reduction="avg")], 0),
    "kind": ([GATHER, GATHER], [GATHER, collective("all_reduce")], 1),
    "one less at the end": ([GATHER, REDUCE], [GATHER], 1),
    "one more at the end": ([GATHER], [GATHER, GATHER], 1),
    "nothing at all": ([GATHER], [], 0),
    "the group's order": ([GATHER], [collective(ranks=(1, 0))], 0),
}


@FRONT_ENDS
@pytest.mark.parametrize("name", DIFFERING)
def test_a_difference_names_both_ranks_and_both_entries(name, check):
    one, two, place = DIFFERING[name]
    at = [r[place].describe() if place < len(r) else "nothing more" for r in (one, two)]
    if name == "the group's order" and check is offline:
        at[1] = "nothing more"  # two groups, and each has one member that knows of it
    counted = " of ranks 0 and 1 on a group of both" if check is offline else ""
    words = [f"First difference, collective {place}{counted}: rank 0 issues {at[0]}", "'layers.0'"]
    words += ["the same order; running them would hang", f"rank 1 issues {at[1]}"]
    refused(at_once(*one), at_once(*two), words=words, check=check)


@FRONT_ENDS
def test_a_group_that_only_some_of_its_members_know_of(check):
    everyone, pair = collective(ranks=(0, 1, 2)), collective(ranks=(0, 1))
    words = ["rank 0 issues all_gather", "[0, 1, 2]", "rank 2 issues nothing more"]
    refused(at_once(everyone), at_once(everyone), [], words=words, check=check)
    words = [f"rank 2 issues {pair.describe()} and is not a member of that group"]
    refused(at_once(everyone), at_once(everyone), at_once(pair), words=words, check=check)


@FRONT_ENDS
def test_three_ranks_wait_for_each_other_pair_by_pair(check):
    """The members of each pair agree on what they issue, and yet no rank could begin."""
    a, b, c = (collective(ranks=r) for r in ((0, 1), (1, 2), (0, 2)))
    words = ["would hang", "rank 0", "all_gather"]
    message = refused(at_once(a, c), at_once(b, a), at_once(c, b), words=words, check=check)
    assert check is not offline or message.count("waits until") == 3


@FRONT_ENDS
def test_the_odd_one_out_is_named_among_many_and_a_large_group_is_shortened(check):
    ranks = tuple(range(64))
    same = [collective(ranks=ranks)] * 3
    odd = [*same[:2], collective(ranks=ranks, numel=7)]
    everyone = [at_once(*(odd if rank == 41 else same)) for rank in ranks]
    words = ["collective 2", "rank 0", "rank 41", "of 7 x", "64 ranks [0, 1, 2, 3, ..., 63]"]
    refused(*everyone, words=words, check=check)


@pytest.fixture(scope="module")
def captured():
    """What each of four ranks issues with uneven shards: 10 rows are 3, 3, 3 and 1."""
    issued, shards = [], set()
    for rank in range(4):
        become(rank, 4)
        joint = captured_decoder(rank=rank, dim=10, hidden=10)
        gt.run_passes(joint, gt.PassConfig(reshard_after_forward="always"))
        issued.append(issued_by(joint, 4))
        shards.add(tuple(n.meta["val"].shape for n in joint.placeholders()))
    assert len(shards) == 2 and len(issued[0]) > 8
    return issued


@FRONT_ENDS
def test_all_ranks_of_a_captured_step_agree(check, captured):
    assert check(captured) is None
    classes = RankClasses(("fsdp",), ((0, 0, 0, 1),))
    assert offline({0: captured[0], 3: captured[3]}, classes) is None
    words = ["rank 0", "rank 3 issues nothing more"]
    refused(*captured[:3], captured[3][:-1], words=words, check=check)
