"""What the caching allocator takes: at least what is alive, gaps included, pools apart."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph_trainer.core.analysis.memory import Category, memory_of
from graph_trainer.core.graph.annotations import Role
from graph_trainer.core.simulation.allocator import (
    Segment,
    one_pool,
    pool_per_stream,
    reserved_bytes,
)
from graph_trainer.core.units import MIB
from graph_trainer.testing import Builder
from tests.examples import examples
from tests.unit.graphs import BACKWARD, aten, c10d, captured_decoder


@examples(200)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 64 * MIB)), max_size=60))
def test_blocks_never_overlap_and_stay_inside(actions):
    segment, alive = Segment(20 * MIB), {}
    for number, (frees, size) in enumerate(actions):
        if frees and alive:
            key = next(iter(alive))
            segment.free(key)
            del alive[key]
        else:
            segment.allocate(number, size)
            alive[number] = size
        blocks = sorted(segment._used.values())
        assert all(a + n <= b for (a, n), (b, _) in zip(blocks, blocks[1:], strict=False))
        assert all(n >= alive[key] for key, (_, n) in segment._used.items())
        assert all(a + n <= segment.reserved for a, n in blocks)
        free = sum(n for n, _ in segment._free)
        assert free + sum(n for _, n in blocks) == segment.reserved
        starts = sorted((a, n) for n, a in segment._free)
        # two free neighbours are one block
        assert all(a + n < b for (a, n), (b, _) in zip(starts, starts[1:], strict=False))


def test_a_hole_that_is_too_small_is_not_used_and_one_that_fits_is():
    segment = Segment(MIB)
    for name in "abc":
        segment.allocate(name, 4 * MIB)
    segment.free("b")
    segment.allocate("larger", 5 * MIB)
    assert segment.reserved == 17 * MIB
    segment.allocate("smaller", 3 * MIB)
    assert segment.reserved == 17 * MIB


def test_what_is_free_at_the_end_grows_instead_of_being_left():
    segment = Segment(MIB)
    segment.allocate("a", 4 * MIB)
    segment.free("a")
    segment.allocate("b", 6 * MIB)
    assert segment.reserved == 6 * MIB


def test_a_step_takes_at_least_its_peak_and_with_one_pool_no_more_than_with_several():
    joint = captured_decoder(layers=3, dim=256, hidden=1024)
    memory = memory_of(joint, optimizer_bytes=MIB)
    one, several = reserved_bytes(memory, one_pool), reserved_bytes(memory, pool_per_stream)
    assert memory.peak_bytes <= one <= several
    assert reserved_bytes(memory_of(joint, optimizer_bytes=50 * MIB)) >= one + 40 * MIB


@pytest.mark.parametrize("role", [Role.UNSHARD, Role.REDUCE_GRAD])
def test_a_pool_gives_nothing_to_another(role):
    builder = Builder()
    shard = builder.parameter("w", 1024, 1024)
    gathered = builder.call(c10d.all_gather_into_tensor.default, shard, 4, "g", role=role)
    waited = builder.call(c10d.wait_tensor.default, gathered)
    small = builder.call(aten.sum.default, waited)
    big = builder.call(aten.expand.default, small, [4096, 1024])
    copy = builder.call(aten.clone.default, big)
    loss = builder.call(aten.sum.default, copy, phase=BACKWARD)
    joint = builder.joint(loss)
    memory = memory_of(joint)
    assert reserved_bytes(memory, one_pool) < reserved_bytes(memory, pool_per_stream)


def test_gradients_of_a_step_are_freed_before_the_next_and_not_twice():
    joint = captured_decoder(layers=2, dim=128, hidden=512)
    memory = memory_of(joint)
    kinds = Counter(s.category for s in memory.storages)
    assert kinds[Category.GRADIENTS]
    twice = reserved_bytes(memory, steps=2)
    assert reserved_bytes(memory, steps=5) == twice


def test_gradients_of_earlier_microbatches_are_taken_as_well():
    joint = captured_decoder(layers=3, dim=256, hidden=1024)
    for earlier in (0, 50 * MIB, 500 * MIB):
        memory = memory_of(joint, optimizer_bytes=MIB, accumulated_bytes=earlier)
        assert memory.peak_bytes <= reserved_bytes(memory) < memory.peak_bytes + 60 * MIB
