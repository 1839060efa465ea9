"""Which passes run, in which order, what is checked, and what a failure says."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import graph_trainer as gt
from graph_trainer.core.graph.annotations import is_backward
from graph_trainer.core.passes.base import NoOptions, Pass, Stage
from graph_trainer.core.passes.bucketing.bucket_collectives import BucketCollectivesOptions
from graph_trainer.core.passes.pipeline import pass_by_pass
from graph_trainer.core.passes.report import HEADINGS, PassReport, Report, measure
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.testing import Builder, code
from tests.unit.core.passes.test_catalogue import DEFAULT
from tests.unit.graphs import BACKWARD, aten, captured_decoder, hungry

UNMERGED = {"bucket_collectives": BucketCollectivesOptions(strategy="none")}


def custom(function, stage=Stage.CLEANUP, name="custom", options_type=NoOptions):
    return Pass(name, stage, "for a test", function, options_type)


def small():
    b = Builder()
    x = b.input("x", 4)
    return b.joint(b.call(aten.sum.default, b.call(aten.mul.Tensor, x, 2)))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"options": {"bucket_collectives": NoOptions()}},
            ["'bucket_collectives'", "NoOptions", "BucketCollectivesOptions"],
        ),
        ({"options": {"rematerialise": NoOptions()}}, ["'rematerialise'"]),
        ({"reshard_after_forward": "sometimes"}, ["'sometimes'", "default"]),
        ({"passes": None}, ["lists of names; got None"]),
    ],
)
def test_settings_that_no_pass_can_carry_out_are_refused(config, words):
    with pytest.raises(gt.PassError) as caught:
        gt.run_passes(small(), gt.PassConfig(**config))
    for word in words:
        assert word in str(caught.value)


def failing(error):
    def function(joint, options, context):
        raise error

    return custom(function, Stage.SCHEDULE, "failing")


@pytest.mark.parametrize("error", [KeyError("lost"), gt.PassError("lost")])
def test_a_failing_pass_is_named_with_those_before_it(error):
    joint = small()
    config = gt.PassConfig(passes=["normalize_views", "eliminate_dead_code", failing(error)])
    with pytest.raises(gt.PassError) as caught:
        gt.run_passes(joint, config)
    said, ran = str(caught.value).split("\n")
    place = f" ({__file__}:{failing.__code__.co_firstlineno + 2})"
    assert "lost" in said and said.endswith(place) == isinstance(error, KeyError)
    assert ran == "Raised by pass 'failing', after normalize_views, eliminate_dead_code"
    assert caught.value.__cause__ is error


def test_our_own_errors_keep_their_type():
    with pytest.raises(
        gt.VerificationError, match="^lost\nRaised by pass 'failing', after no other$"
    ):
        gt.run_passes(small(), gt.PassConfig(passes=[failing(gt.VerificationError("lost"))]))


def test_a_pass_that_leaves_an_invalid_graph_is_named():
    def unmarked(joint, options, context):
        (node,) = joint.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
        node.meta.pop("custom")

    with pytest.raises(
        gt.VerificationError,
        match="'custom' left an invalid graph.*no phase.*\nRaised .* after no other$",
    ):
        gt.run_passes(small(), gt.PassConfig(passes=[custom(unmarked)]))


def lying(joint, options, context):
    (node,) = joint.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    node.meta["val"] = node.meta["val"].new_empty(2, 2)


def breaking(joint, options, context):
    (node,) = joint.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    node.target = aten.mm.default
    node.args = (node.args[0], node.args[0])


@pytest.mark.parametrize(
    "planted, words", [(lying, r"\(4,\).*metadata says.*\(2, 2\)"), (breaking, "cannot run")]
)
def test_verify_passes_finds_what_metadata_hides(planted, words):
    config = gt.PassConfig(passes=[custom(planted)])
    gt.run_passes(small(), config)
    config = gt.PassConfig(passes=[custom(planted)], verify_passes=True)
    with pytest.raises(gt.VerificationError, match=f"(?s)'custom'.*'mul.*{words}") as caught:
        gt.run_passes(small(), config)
    assert "While executing" not in str(caught.value)  # torch would add it, with its advice


def test_a_graph_does_not_go_back_to_an_earlier_stage():
    joint = captured_decoder()
    gt.run_passes(joint, gt.PassConfig(reshard_after_forward="always"))
    before = code(joint)
    with pytest.raises(gt.PassError, match="'deduplicate_unshards'.*'schedule_overlap'"):
        gt.run_passes(joint, gt.PassConfig(passes=["deduplicate_unshards"]))
    assert code(joint) == before
    gt.run_passes(joint, gt.PassConfig(passes=[custom(lambda *_: None, Stage.SCHEDULE)]))


def test_the_report_has_a_row_a_pass_that_says_what_it_did():
    joint = captured_decoder()
    seen = []
    config = gt.PassConfig(reshard_after_forward="always", options=UNMERGED)
    report = gt.run_passes(joint, config, on_pass=seen.append)
    assert seen == DEFAULT and [row.name for row in report.rows] == ["capture", *DEFAULT]
    first, last = report.rows[0], report.last
    again = len([n for n in joint.graph.nodes if is_backward(n) and n.target is GATHER])
    assert last.count("all_gather_into_tensor", BACKWARD) == again > 0
    assert first.count("all_gather_into_tensor") + again == last.count("all_gather_into_tensor")
    assert last.collective_bytes > first.collective_bytes and last.peak_bytes > 0
    by_name = {row.name: row for row in report.rows}
    assert by_name["normalize_views"].nodes < first.nodes
    assert by_name["tag_fsdp_unshards"].nodes == by_name["deduplicate_unshards"].nodes


def test_the_report_reads_as_a_table():
    joint = captured_decoder()
    config = gt.PassConfig(reshard_after_forward="always", options=UNMERGED)
    report = gt.run_passes(joint, config)
    header, *rows = str(report).splitlines()[: 1 + len(report.rows)]
    assert all(heading in header for heading in HEADINGS)
    assert len({len(row) for row in (header, *rows)}) == 1
    gathered = report.last.count("all_gather_into_tensor") - report.rows[0].count(
        "all_gather_into_tensor"
    )
    (rematerialize,) = [row for row in rows if row.startswith("rematerialize")]
    assert f"{gathered} {gathered:+}" in rematerialize


@pytest.mark.parametrize(("width", "has_seconds"), [(100, True), (92, True), (80, False)])
def test_a_table_with_long_changes_leaves_columns_out_not_digits(width, has_seconds):
    row = PassReport("a pass", 1.0, nodes=1, collectives={}, collective_bytes=0, peak_bytes=0)
    wide = replace(row, name="p" * 24, collective_bytes=10**11, peak_bytes=10**11)
    text = Report([row, wide]).text(width)
    first, second, *_ = text.splitlines()
    assert max(map(len, text.splitlines())) <= width and f"{10**11 / 2**20:+,.1f}" in text
    assert first.endswith(" s") == has_seconds and "peak" in first and "MiB" in second


GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


def test_a_row_of_an_unchanged_graph_is_that_of_the_graph():
    """What is taken over from the row before is what measuring would give."""
    joint, report = captured_decoder(), Report()
    config = gt.PassConfig(reshard_after_forward="always")
    for run in pass_by_pass(joint, config, report=report):
        assert report.last == measure(joint, run)
    assert any(not row.changed for row in report.rows)


class Counting(nn.Module):
    """Reads a buffer, writes it, and reads it again."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.ones(4))

    def forward(self, x):
        before = self.count * 2
        self.count.add_(1)
        return self.linear(x) * before + self.count * 3


def drop(read, write):
    write.replace_all_uses_with(write.args[0])
    write.graph.erase_node(write)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, "the step writes buffer 'count', and the graph no longer has a node"),
        (lambda read, write: write.append(read), "'mul' .* reads 'count' after 'add_' writes it"),
        (lambda read, write: read.prepend(write), "'mul' .* reads 'count' after 'add_' writes it"),
    ],
)
def test_a_pass_that_loses_or_passes_a_write_in_place_is_refused(change, message):
    def wrong(joint, options, context):
        nodes = {node.name: node for node in joint.graph.nodes}
        change(nodes["mul"], nodes["add_"])

    joint = gt.capture(Counting(), lambda m, x: m(x).square().mean(), (torch.ones(2, 4),))
    with pytest.raises(gt.VerificationError, match=f"pass 'custom'.*{message}"):
        gt.run_passes(joint, gt.PassConfig(passes=(custom(wrong),)))
    # nor after a pass that was rolled back, which leaves other nodes
    joint = gt.capture(Counting(), lambda m, x: m(x).square().mean(), (torch.ones(2, 4),))
    passes = (hungry(10**9), custom(wrong, Stage.SCHEDULE))
    config = gt.PassConfig(passes=passes, memory_limit_gib=3, hardware=load_hardware("cpu"))
    with pytest.raises(gt.VerificationError, match=f"pass 'custom'.*{message}"):
        gt.run_passes(joint, config)
    assert joint.history == []


def test_a_pass_that_erases_the_output_is_refused():
    def erase(joint, options, context):
        joint.graph.erase_node(joint.output_node())

    with pytest.raises(gt.VerificationError, match="pass 'custom'.*end with its output node"):
        gt.run_passes(small(), gt.PassConfig(passes=(custom(erase),)))
