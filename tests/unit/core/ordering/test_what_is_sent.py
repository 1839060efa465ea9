"""Two programs that differ in what they send together, or whom, are no one program."""

import operator

import pytest
import torch

from graph_trainer.core.analysis.mesh_groups import RankClasses
from graph_trainer.core.ordering.sequences import issued_by
from graph_trainer.planner.fingerprint import fingerprint_of
from graph_trainer.testing import Builder
from tests.unit.core.ordering.front_ends import FRONT_ENDS, refused
from tests.unit.graphs import aten, c10d, fake_world

WORLD = 3


def coalesced(*tensors):
    """One reduction of tensors of these sizes and dtypes."""
    b = Builder()
    inputs = [b.input(f"x{i}", n, dtype=d) for i, (n, d) in enumerate(tensors)]
    reduced = b.call(c10d.all_reduce_coalesced.default, inputs, "sum", name_of_world())
    part = b.call(c10d.wait_tensor.default, b.call(operator.getitem, reduced, 0))
    return b.joint(b.call(aten.sum.default, part))


def exchange(sent, received, columns=2):
    """One all-to-all of rows."""
    b = Builder()
    x = b.input("x", sum(sent) if sent else 2 * WORLD, columns)
    args = (x, received, sent, name_of_world())
    waited = b.call(c10d.wait_tensor.default, b.call(c10d.all_to_all_single.default, *args))
    return b.joint(b.call(aten.sum.default, waited))


def name_of_world():
    return torch.distributed.group.WORLD.group_name


def issued(joints):
    return [issued_by(joint, len(joints)) for joint in joints]


FLOAT, DOUBLE, LONG = torch.float32, torch.float64, torch.int64


@FRONT_ENDS
@pytest.mark.parametrize(
    "one, two",
    [
        ([(4, FLOAT), (8, FLOAT)], [(8, FLOAT), (4, FLOAT)]),
        ([(4, FLOAT), (4, LONG)], [(4, FLOAT), (4, DOUBLE)]),
        ([(8, FLOAT)], [(4, FLOAT), (4, FLOAT)]),
    ],
    ids=["order", "dtype", "number"],
)
def test_every_tensor_of_a_coalesced_collective_counts(check, one, two):
    fake_world(2)
    assert check(issued([coalesced(*one), coalesced(*one)])) is None
    different = issued([coalesced(*one), coalesced(*two)])
    refused(*different, words=[f"{two[-1][0]} x {two[-1][1]}"], check=check)
    classes = RankClasses(("fsdp",), ((0, 1),))
    steps = [fingerprint_of(coalesced(*each), 0, classes) for each in (one, one, two)]
    first, same, other = (step.collectives[0][0] for step in steps)
    assert first == same != other


SENT = [[1, 2, 3], [0, 2, 5], [4, 0, 1]]
RECEIVED = [list(column) for column in zip(*SENT, strict=True)]


@FRONT_ENDS
def test_an_all_to_all_may_send_every_member_another_number_of_rows(check):
    fake_world(WORLD)
    even = [2, 2, 2]
    rows = [exchange(s, r) for s, r in zip(SENT, RECEIVED, strict=True)]
    for joints in (rows, [exchange([], even), exchange(even, even), exchange([], even)]):
        assert check(issued(joints)) is None


@FRONT_ENDS
def test_rows_are_of_one_size(check):
    fake_world(WORLD)
    even = [2, 2, 2]
    joints = [exchange(even, even), exchange(even, even, 3), exchange(even, even)]
    refused(*issued(joints), words=["of 3 x"], check=check)
