"""`verify_passes` runs the graph before and after each pass on the same real values."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import graph_trainer as gt
from graph_trainer.core.graph.annotations import copy_annotations, counts_of, infer_value, tensor_of
from graph_trainer.core.graph.data_sizes import has_data_sizes
from graph_trainer.core.ordering.agreement import OneRank
from graph_trainer.core.passes import pipeline, verify_numbers
from graph_trainer.core.passes.base import Pass, Stage
from graph_trainer.core.passes.fuse_chained_collectives import fuse_chained_all_gathers
from graph_trainer.testing import Builder, become, captured
from tests.unit.core.capture.exchanging import exchanging
from tests.unit.core.passes.rank_order import inner_first
from tests.unit.graphs import ALL_REDUCE, GATHER, SCATTER, aten, c10d, captured_decoder, hungry


class Two(nn.Module):
    """Two weights of one shape, a buffer that a step writes, and dropout."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x):
        self.count.add_(x.detach().sum(0))
        return self.down(nn.functional.dropout(self.up(x), 0.5)) + self.count


def two():
    return captured(Two(), torch.randn(8, 4))


def verified(joint, *changes, **declared):
    """What the report says of each of these changes of the graph as a pass."""
    passes = [
        Pass(f"change_{i}", Stage.SCHEDULE, "", lambda joint, *_, c=c: c(joint), **declared)
        for i, c in enumerate(changes)
    ]
    report = gt.run_passes(joint, gt.PassConfig(passes=passes, verify_passes=True))
    return [row.verified for row in report.rows[1:]]


def refused(joint, change, **declared):
    with pytest.raises(gt.VerificationError) as caught:
        verified(joint, change, **declared)
    return str(caught.value)


def insert(node, op, *args, reader=None):
    """Let the readers of a node, or one of them, read `op(node, *args)`."""
    with node.graph.inserting_after(node):
        made = node.graph.call_function(op, (node, *args))
    copy_annotations(node, made)
    infer_value(made)
    node.replace_all_uses_with(made, lambda user: user is not made and reader in (None, user))
    return made


def outputs(joint):
    return list(joint.output_node().args[0])


def returned(joint, name):
    return dict(joint.gradients())[name]


def swap(joint):
    up, down = returned(joint, "up.weight"), returned(joint, "down.weight")
    other = {up: down, down: up}
    joint.output_node().args = (tuple(other.get(n, n) for n in outputs(joint)),)


def scale(name, number):
    def change(joint):
        insert(returned(joint, name), aten.mul.Tensor, number, reader=joint.output_node())

    return change


def write_more(joint):
    (add,) = joint.graph.find_nodes(op="call_function", target=aten.add_.Tensor)
    joint.output_node().prepend(insert(add, aten.mul_.Tensor, 2, reader=joint.output_node()))


def drop_less(joint):
    (drop,) = joint.graph.find_nodes(op="call_function", target=aten.bernoulli_.float)
    drop.args = (drop.args[0], 0.25)


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (swap, "gradient of up.weight .* by at most .*; so are 1 more"),
        (scale("down.weight", 0), "gradient of down.weight .*; the first node that differs: %mul"),
        (scale("up.bias", 1 + 2**-22), "gradient of up.bias .* by at most"),
        (write_more, "buffer count .* by at most"),
        (drop_less, "loss .* by at most .*; the first node that differs: %bernoulli"),
    ],
)
def test_a_pass_that_changes_numbers_is_named_with_the_first_result(change, first):
    wrong = Pass("wrong", Stage.TAG, "", lambda joint, *_: change(joint))
    gt.run_passes(two(), gt.PassConfig(passes=[wrong]))  # nothing else notices
    assert re.match(f"pass 'change_0' left .*: {first}", refused(two(), change))


def test_what_keeps_every_bit_is_said_to():
    def twice_negated(joint):
        insert(insert(outputs(joint)[0], aten.neg.default), aten.neg.default)

    joint = two()
    state = torch.get_rng_state()
    assert verified(joint, twice_negated, lambda joint: None) == ["bitwise equal"] * 2
    assert torch.equal(torch.get_rng_state(), state)


def test_sizes_that_data_decide_follow_from_the_values():
    joint = exchanging(layers=2)
    assert verified(joint, lambda joint: None) == ["bitwise equal"]
    name = "experts.0.weight"
    assert f"gradient of {name} " in refused(joint, scale(name, 2))

    def send_other_rows(joint):
        first, *_ = (n for n in joint.graph.nodes if counts_of(n) == "0")
        rows = first.args[0]
        insert(rows, aten.flip.default, [0], reader=first)

    assert "loss is another than before the pass" in refused(exchanging(), send_other_rows)


def test_beside_sizes_that_data_decide_others_are_compared_with_metadata(monkeypatch):
    # what fake kernels compute is compared first
    monkeypatch.setattr(pipeline, "verify_values", lambda joint: None)

    def narrow(joint):
        relu, *_ = joint.graph.find_nodes(op="call_function", target=aten.relu.default)
        assert has_data_sizes(tensor_of(relu))
        relu.meta["val"] = relu.meta["val"][:, :2]

    said = refused(exchanging(), narrow)
    assert re.search(r"'relu' makes \[\(\(\d+, 4\), .* and its metadata says .*, 2\), ", said)


@pytest.mark.parametrize("world", [3, 8])
def test_the_passes_of_the_default_list_keep_every_bit(world):
    config = gt.PassConfig(reshard_after_forward="always", verify_passes=True)
    report = gt.run_passes(captured_decoder(world=world, rank=1, tied=True), config)
    assert {row.verified for row in report.rows[1:]} == {"bitwise equal"}


def test_a_pass_that_may_round_may_not_do_more():
    round_otherwise = scale("up.bias", 1 + 2**-22)
    (text,) = verified(two(), round_otherwise, changes_sums=True)
    assert re.match(r"equal up to rounding: gradient of up.bias by at most \d.*e-0", text)
    for change in (swap, scale("up.bias", 0), scale("up.bias", 1 + 2**-16)):
        assert "gradient of up." in refused(two(), change, changes_sums=True)


def test_numbers_that_are_not_finite_are_not_claimed():
    b = Builder()
    joint = b.joint(b.total(b.call(aten.log.default, b.input("x", 9))))
    assert verified(joint, lambda joint: None) == ["bitwise equal, and loss is not finite"]


@torch.library.custom_op("graph_trainer_tests::halves", mutates_args=())
def halves(x: torch.Tensor) -> torch.Tensor:
    """An op whose fake result has another dtype than the real one."""
    return x.half()


halves.register_fake(lambda x: torch.empty_like(x))
HALVES = torch.ops.graph_trainer_tests.halves.default


def test_metadata_is_compared_with_real_results():
    def change(joint):
        node = insert(returned(joint, "up.bias"), HALVES, reader=joint.output_node())
        insert(node, aten._to_copy.default, reader=joint.output_node())

    message = refused(two(), change)
    assert re.search(r"node 'halves.*' makes .*float16.* of real values and its metadata", message)


def test_what_runs_no_more_is_named():
    def out_of_range(joint):
        first = insert(outputs(joint)[0], aten.unsqueeze.default, 0)
        picked = insert(first, aten.index_select.default, 0, seven)
        insert(picked, aten.squeeze.dim, 0)

    b = Builder()
    x, place = b.input("x", 4), b.input("i", 1, dtype=torch.int64)
    seven = b.call(aten.add.Tensor, place, 7)
    joint = b.joint(b.total(x))
    assert "does not run on the values on which it ran before: IndexError" in refused(
        joint, out_of_range
    )


# --- other ranks ---------------------------------------------------------------------------------


def replaced(joint, node, *calls):
    """Put a row of ops in the place of a node."""
    value = node.args[0]
    for op, *args in calls:
        with joint.graph.inserting_before(node):
            made = joint.graph.call_function(op, (value, *args))
        copy_annotations(node, made)
        value = made
        infer_value(made)
    node.replace_all_uses_with(value)
    joint.graph.erase_node(node)


def gathered(place):
    b = Builder()
    whole = b.waited(GATHER, b.input("x", 2), 2, "0")
    return b.joint(b.total(b.call(aten.slice.Tensor, whole, 0, place, place + 2)))


@pytest.mark.parametrize("place", [0, 2])
def test_the_part_of_another_rank_is_another(place):
    def read_what_was_sent(joint):
        (part,) = joint.graph.find_nodes(op="call_function", target=aten.slice.Tensor)
        part.replace_all_uses_with(joint.placeholders()[0])

    if place:
        assert "loss is another" in refused(gathered(place), read_what_was_sent)
    else:
        assert verified(gathered(place), read_what_was_sent) == ["bitwise equal"]


@pytest.mark.parametrize("sizes", [(4, 2), (8, 4)])
def test_gathers_over_other_groups(sizes):
    become(1, sizes[0] * sizes[1])
    (text,) = verified(inner_first(*sizes, rows=64), fuse_chained_all_gathers)
    only_alike = "; graph-trainer bisect-passes compares real ranks"
    alike = f" where all ranks hold the same{only_alike}" if sizes == (8, 4) else ""
    assert text == "bitwise equal" + alike


def test_a_collective_in_place_of_another_kind_is_not_judged():
    def split(joint):
        (node,) = joint.graph.find_nodes(op="call_function", target=ALL_REDUCE)
        wait = c10d.wait_tensor.default
        replaced(joint, node, (SCATTER, "sum", 2, "0"), (wait,), (GATHER, 2, "0"))

    b = Builder()
    joint = b.joint(b.total(b.waited(ALL_REDUCE, b.input("x", 4), "sum", "0")))
    (text,) = verified(joint, split)
    assert re.match("numbers not compared: all_gather.*reduce_scatter.* replaces another", text)


# --- where a graph is not run --------------------------------------------------------------------


def on_meta():
    b = Builder()
    return b.joint(b.total(b.call(aten._to_copy.default, b.input("x", 4), device="meta")))


def with_call(op, *args):
    b = Builder()
    return b.joint(b.total(b.waited(op, b.input("x", 4), *args)))


def unknown():
    b = Builder()
    return b.joint(b.total(b.call(HALVES, b.input("x", 4))))


def out_of_range():
    b = Builder()
    picked = b.call(
        aten.embedding.default, b.parameter("w", 1, 3), b.input("i", 9, dtype=torch.int64)
    )
    return b.joint(b.total(picked))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (on_meta, "no real values on cpu, meta here"),
        (
            lambda: with_call(ALL_REDUCE, "bxor", "0"),
            "communicates, or may, in a way that is not simulated",
        ),
        (unknown, "graph_trainer_tests.* communicates, or may, in a way that is not simulated"),
        (out_of_range, "it does not run on made-up values: IndexError"),
    ],
)
def test_what_cannot_run_is_said(make, reason, monkeypatch):
    become(0, 2)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "gloo")
    joint = make()
    passes = [Pass(name, Stage.TAG, "", lambda *_: None) for name in ("one", "two")]
    config = gt.PassConfig(passes=passes, verify_passes=True)
    report = gt.run_passes(joint, config, agreement=OneRank())
    (note,) = report.notes()
    assert re.match(f"one, two: numbers not compared: .*{reason}", note)
    assert note in " ".join(str(report).split())
    assert all(len(line) <= 100 for line in str(report).splitlines())


def test_a_graph_that_needs_too_much_memory_is_not_run(monkeypatch):
    b = Builder()
    joint = b.joint(b.total(b.call(aten.neg.default, b.input("x", 256))))
    monkeypatch.setattr(verify_numbers, "MOST_BYTES", 2 * 1024 + 4)
    assert verified(joint, lambda joint: None) == ["bitwise equal"]
    (text,) = verified(joint, hungry(1024))
    assert text.startswith("numbers not compared: a run needs")


def test_after_a_pass_is_rolled_back_numbers_are_compared_with_those_before_it():
    def change(joint, options, context):
        hungry(1 << 20).function(joint, options, context)
        scale("up.bias", 1 + 2**-22)(joint)

    large = Pass("large", Stage.TAG, "", change, optional=True, changes_sums=True)
    idle = Pass("idle", Stage.TAG, "", lambda *_: None)
    config = gt.PassConfig(passes=[large, idle], memory_limit_gib=2 / 1024, verify_passes=True)
    _, first, second = gt.run_passes(two(), config).rows
    assert first.rolled_back and first.verified.startswith("equal up to rounding")
    assert second.verified == "bitwise equal"
