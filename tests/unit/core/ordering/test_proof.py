"""The proof of all ranks at once: waits, cycles, and one rank that stands for its class."""

import dataclasses
import graphlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graph_trainer.core.analysis.mesh_groups import RankClasses
from graph_trainer.core.ordering.exchange import do_agree, summary_of
from graph_trainer.core.ordering.proof import prove_order
from tests.examples import examples
from tests.unit.core.ordering.front_ends import (
    GATHER,
    REDUCE,
    at_once,
    offline,
    online,
    program,
    refused,
    sequence_of,
)
from tests.unit.graphs import collective


def proved(*sequences, classes=None):
    return prove_order(dict(enumerate(sequences)), classes)


def test_the_proof_says_what_was_proved():
    proof = proved(at_once(GATHER, REDUCE), at_once(GATHER, REDUCE))
    assert (proof.ranks, proof.collectives, proof.groups) == (2, (2, 2), 1)
    assert "Order proved: 2 ranks, 2 collectives a rank, 1 group." in str(proof)
    assert "Every rank's graph" in str(proof)


@pytest.mark.parametrize(
    "one, two",
    [
        (program(GATHER, REDUCE, 0, 1), at_once(GATHER, REDUCE)),
        (program(GATHER, REDUCE), program(GATHER, REDUCE, 1, 0)),
    ],
)
def test_waits_may_differ_where_the_order_is_one_but_ranks_of_a_run_are_asked_for_the_same(
    one, two
):
    proved(one, two)
    words = ["collective 0: rank 0 issues", "waited for", "rank 1 issues"]
    refused(one, two, words=words, check=online)


def test_a_missing_rank_is_named():
    everyone = at_once(collective(ranks=(0, 1, 2)))
    refused(everyone, everyone, words=["there is no rank 2 among the 2"])


def test_a_group_of_one_waits_for_no_one():
    alone = [collective(ranks=(rank,)) for rank in range(2)]
    proof = proved(at_once(alone[0], GATHER), at_once(GATHER, alone[1], alone[1]))
    assert proof.collectives == (1, 1) and proof.groups == 1


PAIR, THREE = collective(ranks=(0, 1)), collective("all_reduce", ranks=(0, 1, 2))


# what a rank issues alone counts for where it waits and for nothing else
@pytest.mark.parametrize("alone", [[], [collective(ranks=(0,))]])
def test_waits_in_a_cycle_over_two_groups(alone):
    """Each group sees one order on all its members, and the first wait never ends."""
    words = [
        "in a cycle; running them would hang",
        "'layers.0'",
        f"rank 0 waits until rank 1 comes to {PAIR.describe()}",
        f"rank 1 waits until rank 0 comes to {THREE.describe()}",
    ]
    refused(at_once(*alone, PAIR, THREE), at_once(THREE, PAIR), at_once(THREE), words=words)


def test_two_orders_with_waits_that_would_do_are_not_proved():
    """With a stream a group it would pass; NCCL does not promise one."""
    words = ["cannot be put in one order", "rank 0 waits until rank 1 comes to"]
    first, second = program(PAIR, THREE, 0, 1), program(THREE, PAIR, 0, 1)
    assert "in a cycle" not in refused(first, second, at_once(THREE), words=words)


def test_ranks_that_only_wait_for_a_cycle_are_not_named_in_it():
    a, b = collective(ranks=(1, 2)), collective("all_reduce", ranks=(1, 2, 3))
    first = collective(ranks=(0, 1), numel=5)
    told = refused(at_once(first), at_once(a, b, first), at_once(b, a), at_once(b), words=["cycle"])
    assert "rank 0" not in told and told.count("waits until") == 2


# --- one rank for many ---------------------------------------------------------------------


def uniform(*sizes):
    return RankClasses(tuple("abc"[: len(sizes)]), tuple((0,) * size for size in sizes))


def test_a_group_that_counts_ranks_column_by_column_is_proved_like_any_other():
    by_column = sequence_of([collective(ranks=(0, 3, 1, 4, 2, 5))])
    by_row = sequence_of([collective(ranks=tuple(range(6)))])
    prove_order({0: by_column}, uniform(2, 3))
    one_apart = RankClasses(("a", "b"), ((0, 1), (0, 0, 0)))
    prove_order({0: by_column, 3: by_column}, one_apart)
    words = ["collective 0 of ranks 0 and 3"]
    refused({0: by_column, 3: by_row}, words=words, classes=one_apart)


def test_classes_count_and_place_ranks():
    classes = RankClasses(("dp", "tp"), ((0, 1, 1, 2), (5, 5)))
    assert classes.representatives() == {0: 2, 2: 4, 6: 2}
    assert (classes.num_ranks, classes.coordinates(5)) == (8, (2, 1))
    assert classes.axes_of_group((4, 5), 4) == (1,)
    assert classes.axes_of_group((1, 3, 5, 7), 5) == (0,)
    assert classes.axes_of_group(tuple(range(8)), 3) == (0, 1)
    assert classes.axes_of_group((3,), 3) == ()
    assert classes.axes_of_group((0, 2, 4, 6, 1, 3, 5, 7), 4) == (1, 0)
    for other in ((0, 3), (5, 4), (0, 2), (0, 2, 6), (1, 3, 5, 7), (0, 2, 4, 6, 1, 3, 7, 5)):
        assert classes.axes_of_group(other, 4) is None
    assert classes.classes_in_group(2, (0,)) == (0, 2, 6)
    assert classes.classes_in_group(2, (1,)) == (2,)
    assert (classes.num_groups(0, (0,)), classes.num_groups(2, (1,))) == (2, 2)


def test_one_rank_stands_for_its_class():
    classes = RankClasses(("dp", "tp"), ((0, 0, 0, 1), (0, 0)))
    first = [collective(ranks=(0, 2, 4, 6)), collective("all_reduce", ranks=(0, 1))]
    last = [collective(ranks=(0, 2, 4, 6)), collective("all_reduce", ranks=(6, 7))]
    proof = prove_order({0: at_once(*first), 6: at_once(*last)}, classes)
    assert (proof.ranks, proof.groups, proof.representatives) == (8, 6, {0: 6, 6: 2})
    assert "0 (for 6), 6 (for 2)" in str(proof) and "--all-ranks" in str(proof)
    # the groups of the two along tp are not the same ones, and may issue what they like
    more = [*last, collective("all_reduce", ranks=(6, 7))]
    assert prove_order({0: at_once(*first), 6: at_once(*more)}, classes).collectives == (2, 3)
    last[0] = collective(ranks=(0, 2, 4, 6), numel=9)
    refused(
        {0: at_once(*first), 6: at_once(*last)}, words=["ranks 0 and 6", "9 x"], classes=classes
    )


def test_a_group_across_the_axes_needs_every_rank():
    words = ["does not lie along axes of the mesh (a, b)", "--all-ranks"]
    refused(at_once(collective(ranks=(0, 3))), classes=uniform(2, 2), words=words)


def test_many_ranks_cost_what_their_classes_cost():
    classes = RankClasses(("dp", "tp"), ((0, *(1,) * 510, 2), (0, *(1,) * 6, 2)))
    sequences = {}
    for rank in classes.representatives():
        dp, tp = classes.coordinates(rank)
        along_dp = collective(ranks=tuple(range(tp, 4096, 8)))
        along_tp = collective("all_reduce", ranks=tuple(range(dp * 8, dp * 8 + 8)))
        sequences[rank] = at_once(*[along_dp, along_tp] * 500)
    proof = prove_order(sequences, classes)
    assert (proof.ranks, len(proof.representatives), proof.groups) == (4096, 9, 520)
    assert proof.collectives == (1000, 1000)


# --- random programs -----------------------------------------------------------------------

WORLD = 5
groups = st.lists(st.integers(0, WORLD - 1), min_size=1, unique=True).map(
    lambda r: tuple(sorted(r))
)
calls = st.tuples(groups, st.sampled_from(["all_reduce", "broadcast"]), st.integers(1, 2))


def projected(common, rank, draw_wait):
    own = [collective(kind, ranks, numel=n) for ranks, kind, n in common if rank in ranks]
    waits = [draw_wait(place, len(own)) for place in range(len(own))]
    return sequence_of(
        [dataclasses.replace(c, waited_after=w) for c, w in zip(own, waits, strict=True)]
    )


@examples(100)
@given(st.lists(calls, max_size=12), st.data())
def test_projections_of_one_program_are_proved_and_a_swap_is_refused(common, data):
    def wait(place, length):
        return data.draw(st.none() | st.integers(place + 1, length))

    ranks = [projected(common, rank, wait) for rank in range(WORLD)]
    proved(*ranks)
    swaps = [
        (rank, place)
        for rank, sequence in enumerate(ranks)
        for place in range(len(sequence) - 1)
        if sequence[place].entry != sequence[place + 1].entry
        and sequence[place].entry[1] == sequence[place + 1].entry[1]
        and len(sequence[place].entry[1]) > 1
    ]
    for rank, place in swaps[:3]:
        swapped = list(ranks[rank])
        swapped[place : place + 2] = reversed(swapped[place : place + 2])
        refused(*ranks[:rank], swapped, *ranks[rank + 1 :], words=["First difference", f"{rank}"])


def has_one_order(sequences):
    """The same question, answered in another way: groups agree, and a sort of all exists."""
    sorter = graphlib.TopologicalSorter()
    said = {}
    for sequence in sequences.values():
        count, before = {}, None
        for each in sequence:
            ranks = each.entry[1]
            count[ranks] = count.get(ranks, 0) + 1
            said.setdefault(ranks, []).append((count[ranks], each.entry))
            node = (ranks, count[ranks])
            sorter.add(node, *([before] if before else []))
            before = node
    agreed = all(
        entries.count(e) == len(ranks) for ranks, entries in said.items() for e in set(entries)
    )
    try:
        sorter.prepare()
    except graphlib.CycleError:
        return False
    return agreed


@examples(300)
@given(st.data())
def test_the_verdict_is_that_of_a_topological_sort_and_of_all_ranks(data):
    """Programs by class on a mesh: alike, or permuted, or with one entry changed."""
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    labels = tuple(tuple(data.draw(st.integers(0, 1)) for _ in range(n)) for n in sizes)
    classes = RankClasses(tuple("abc"[: len(sizes)]), labels)
    axes = st.sets(st.integers(0, len(sizes) - 1)).map(lambda a: tuple(sorted(a)))
    steps = st.tuples(axes, st.integers(1, 3))
    common = data.draw(st.lists(steps, max_size=5))
    programs = {}
    for representative in classes.representatives():
        same, other = st.just(common), st.lists(steps, max_size=3)
        programs[representative] = data.draw(same | same | st.permutations(common) | other)

    places = torch.arange(classes.num_ranks).view(sizes)

    def kinds(rank):
        return [of[c] for of, c in zip(labels, classes.coordinates(rank), strict=True)]

    def sequence(rank, own):
        issued = []
        for along, numel in own:
            place = enumerate(classes.coordinates(rank))
            members = places[tuple(slice(None) if axis in along else at for axis, at in place)]
            if members.numel() > 1:
                issued.append(collective(ranks=tuple(members.flatten().tolist()), numel=numel))
        return at_once(*issued)

    everyone = {
        rank: sequence(rank, programs[next(r for r in programs if kinds(r) == kinds(rank))])
        for rank in range(classes.num_ranks)
    }
    expected = has_one_order(everyone)
    assert (offline(everyone) is None) == expected
    assert (offline({r: everyone[r] for r in programs}, classes) is None) == expected
    # what ranks accept at run time is proved, though not the other way round
    summaries = [summary_of(s) for s in everyone.values()]
    assert expected or not do_agree(summaries)
