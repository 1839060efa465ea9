"""Groups that passes make: with the ranks in order, once, and with torchtitan's time-outs."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from graph_trainer.core.ordering.agreement import OneRank
from graph_trainer.core.sharding.process_groups import groups_made, groups_within
from graph_trainer.core.torch_private_groups import group_ranks, process_groups
from graph_trainer.testing import become
from graph_trainer.titan.device import process_group_timeouts

BY_COLUMN = ((0, 2, 1, 3), (4, 6, 5, 7))
PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))


def test_each_rank_gets_the_group_it_is_in_with_ranks_in_order():
    for rank in (1, 6):
        become(rank, 8)
        names = groups_within([BY_COLUMN, PAIRS], OneRank())
        assert group_ranks(names[BY_COLUMN]) == BY_COLUMN[rank // 4]
        assert group_ranks(names[PAIRS]) == PAIRS[rank // 2]


def test_groups_are_made_once_and_not_before_they_are_asked_for():
    become(0, 8)
    assert groups_made() == []
    first = groups_within([PAIRS], OneRank())
    assert groups_within([PAIRS, BY_COLUMN], OneRank())[PAIRS] == first[PAIRS]
    assert len(groups_made()) == 2


def test_the_order_in_which_groups_are_made_does_not_depend_on_that_of_the_question():
    made = []
    for asked in ([PAIRS, BY_COLUMN], [BY_COLUMN, PAIRS]):
        become(0, 8)
        groups_within(asked, OneRank())
        made.append([ranks for group, ranks in process_groups() if group in groups_made()])
    assert made[0] == made[1]


def test_the_whole_world_in_order_is_there_already():
    become(2, 4)
    names = groups_within([((0, 1, 2, 3),)], OneRank())
    assert set(names.values()) == {dist.group.WORLD.group_name} and groups_made() == []
    assert group_ranks(groups_within([((0, 2, 1, 3),)], OneRank())[((0, 2, 1, 3),)]) == (0, 2, 1, 3)


def test_a_group_that_someone_else_made_is_not_taken():
    """Others may have made it on some ranks only, and those ranks alone would find it."""
    become(0, 8)
    theirs = dist.new_group([0, 1])
    assert groups_within([PAIRS], OneRank())[PAIRS] != theirs.group_name


@pytest.mark.parametrize("has_its_own", [True, False])
def test_torchtitan_shortens_the_time_outs_of_these_groups_too(monkeypatch, has_its_own):
    """torch 2.13 has no torch.distributed.set_timeout."""
    calls = []

    def record(timeout, group=None):
        calls.append((timeout, group))

    if has_its_own:
        monkeypatch.setattr(dist, "set_timeout", record, raising=False)
    else:
        monkeypatch.delattr(dist, "set_timeout", raising=False)
        monkeypatch.setattr("graph_trainer.titan.device.set_process_group_timeout", record)
    become(0, 8)
    groups_within([PAIRS], OneRank())
    (made,) = groups_made()
    soon, mesh_group = timedelta(seconds=7), dist.new_group([0, 4])
    with process_group_timeouts():
        dist.set_timeout(soon, mesh_group)
        dist.set_timeout(soon, None)
    assert calls == [(soon, mesh_group), (soon, None), (soon, made)]
    assert getattr(dist, "set_timeout", None) is (record if has_its_own else None)
