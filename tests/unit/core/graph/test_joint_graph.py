"""The graph against its signature, and the accessors of annotations."""

import dataclasses

import pytest
import torch

import graph_trainer as gt
from graph_trainer.core.graph import joint_graph as jg
from graph_trainer.core.graph.annotations import (
    Phase,
    Role,
)
from graph_trainer.core.graph.joint_graph import InputKind
from tests.unit.graphs import BACKWARD, FORWARD, Builder, aten


def linear():
    """x @ w + b, its sum, and both gradients."""
    b = Builder()
    x, w = b.input("args[0]", 2, 3), b.parameter("linear.weight", 3, 4)
    bias = b.parameter("linear.bias", 4)
    out = b.call(aten.addmm.default, bias, x, w)
    loss = b.call(aten.sum.default, out, phase=Phase.LOSS)
    ones = b.call(aten.ones_like.default, out, phase=BACKWARD)
    turned = b.call(aten.t.default, x, phase=BACKWARD)
    dw = b.call(aten.mm.default, turned, ones, phase=BACKWARD)
    db = b.call(aten.sum.dim_IntList, ones, [0], phase=BACKWARD)
    return b.joint(loss, linear__weight=dw, linear__bias=db)


def invalid(joint, *words):
    with pytest.raises(gt.VerificationError) as caught:
        joint.validate()
    for word in words:
        assert word in str(caught.value)


def set_outputs(joint, values):
    joint.output_node().args = (values,)


def test_a_graph_that_fits_its_signature_is_valid():
    joint = linear()
    joint.validate()
    assert [i.name for i, _ in joint.inputs_of(InputKind.PARAMETER)] == [
        "linear.weight",
        "linear.bias",
    ]
    assert [(name, node.meta["val"].shape) for name, node in joint.gradients()] == [
        ("linear.weight", (3, 4)),
        ("linear.bias", (4,)),
    ]
    assert "addmm" in str(joint)


def test_a_nested_output_beside_a_flat_signature():
    joint = linear()
    loss, *gradients = joint.output_values()
    set_outputs(joint, (loss, tuple(gradients)))
    invalid(joint, "flat", gradients[0].name)


def test_an_output_that_is_no_node():
    joint = linear()
    loss, dw, _ = joint.output_values()
    set_outputs(joint, (loss, dw, None))
    invalid(joint, "None")


def test_too_few_outputs():
    joint = linear()
    set_outputs(joint, joint.output_values()[:2])
    invalid(joint, "returns 2", "describes 3")


def test_gradients_in_the_wrong_order():
    joint = linear()
    loss, dw, db = joint.output_values()
    set_outputs(joint, (loss, db, dw))
    invalid(joint, f"'{db.name}'", "'linear.weight'", "(4,)", "(3, 4)")


def test_a_gradient_of_another_dtype():
    joint = linear()
    _, dw, _ = joint.output_values()
    dw.meta["val"] = dw.meta["val"].bfloat16()
    invalid(joint, f"'{dw.name}'", "bfloat16")


def without_gradients(joint, keep):
    outputs = tuple(o for o in joint.signature.outputs if o.name in ("loss", keep))
    joint.signature = dataclasses.replace(joint.signature, outputs=outputs)
    set_outputs(joint, joint.output_values()[: len(outputs)])


def test_a_missing_gradient():
    joint = linear()
    without_gradients(joint, "linear.weight")
    invalid(joint, "no gradient", "'linear.bias'")


def test_all_gradients_missing():
    joint = linear()
    without_gradients(joint, None)
    invalid(joint, "no gradient", "'linear.weight'")


def test_a_parameter_that_the_loss_does_not_reach_needs_none():
    joint = linear()
    without_gradients(joint, "linear.weight")
    joint.signature = dataclasses.replace(joint.signature, parameters_without_grad=("linear.bias",))
    joint.validate()


def test_a_gradient_for_no_parameter():
    joint = linear()
    outputs = [
        dataclasses.replace(o, name=o.name.replace("bias", "bios")) for o in joint.signature.outputs
    ]
    joint.signature = dataclasses.replace(
        joint.signature,
        outputs=tuple(outputs),
        parameters_without_grad=("linear.bias",),
    )
    invalid(joint, "'linear.bios'", "no parameter")


def test_placeholders_out_of_order():
    joint = linear()
    first, second, _ = joint.placeholders()
    first.prepend(second)
    invalid(joint, "'linear.weight'", "'args[0]'", second.name)


def test_a_placeholder_behind_the_body():
    joint = linear()
    *_, last = joint.placeholders()
    moved = joint.graph.find_nodes(op="call_function", target=aten.t.default)[0]
    last.prepend(moved)
    invalid(joint, f"'{last.name}'", "every placeholder comes first")


def test_an_extra_placeholder():
    joint = linear()
    with joint.graph.inserting_after(joint.placeholders()[-1]):
        joint.graph.placeholder("extra")
    invalid(joint, "4 placeholders", "describes 3")


def test_a_node_without_a_phase():
    joint = linear()
    with joint.graph.inserting_before(joint.output_node()):
        node = joint.graph.call_function(aten.neg.default, (joint.placeholders()[0],))
    invalid(joint, f"'{node.name}'", "aten.neg.default", "copy_annotations")


def test_a_node_read_before_it_is_made():
    joint = linear()
    (mm,) = joint.graph.find_nodes(op="call_function", target=aten.mm.default)
    ones = mm.args[1]
    mm.append(ones)
    invalid(joint, f"'{mm.name}'", f"'{ones.name}'", "stands after it")


# --- accessors -----------------------------------------------------------------------------


def node():
    return Builder().input("x", 1)


def test_annotations_are_read_as_they_were_written():
    n = node()
    assert (jg.phase_of(n), jg.module_of(n), jg.role_of(n), jg.parameter_of(n)) == (None,) * 4
    entry = jg.annotation(
        phase=Phase.BACKWARD, module="layers.0", role=Role.UNSHARD, parameter="layers.0.w"
    )
    jg.annotate_node(n, entry)
    assert jg.phase_of(n) is Phase.BACKWARD and jg.is_backward(n)
    assert (jg.module_of(n), jg.role_of(n)) == ("layers.0", Role.UNSHARD)
    assert jg.parameter_of(n) == "layers.0.w"
    jg.annotate_node(n, jg.annotation(phase=Phase.FORWARD))
    assert jg.phase_of(n) is Phase.FORWARD and not jg.is_backward(n)
    assert jg.module_of(n) == "layers.0"


def test_annotating_a_node_leaves_those_alone_that_share_its_meta():
    n = node()
    jg.annotate_node(n, jg.annotation(module="a"))
    copy = n.graph.node_copy(n)
    jg.annotate_node(copy, jg.annotation(module="b"))
    assert jg.module_of(n) == "a"


def test_copied_annotations_carry_no_tag_and_may_change_phase():
    n, copy = node(), node()
    jg.annotate_node(n, jg.annotation(module="a", phase=FORWARD))
    jg.set_recompute_policy(n, jg.CheckpointPolicy.MUST_SAVE)
    copy.meta.update(n.meta)
    jg.copy_annotations(n, copy, phase=BACKWARD)
    assert jg.recompute_policy(copy) is None and "ac_graph_id" not in copy.meta
    assert jg.recompute_policy(n) is jg.CheckpointPolicy.MUST_SAVE
    assert (jg.phase_of(n), jg.phase_of(copy)) == (FORWARD, BACKWARD)
    jg.clear_recompute_policy(n)
    assert jg.recompute_policy(n) is None and "ac_graph_id" not in n.meta


@pytest.mark.parametrize(
    "fqn, layer",
    [
        ("layers.3.attention.wo", 3),
        ("model.layers.12", 12),
        ("0.weight", 0),
        ("layers.1.experts.7.w1", 1),
        ("norm", None),
        ("conv1d.weight", None),
        (None, None),
    ],
)
def test_layer_of(fqn, layer):
    assert jg.layer_of(fqn) == layer


def test_tensors_of_takes_only_tensors():
    n = node()
    tensor = torch.empty(1)
    n.meta["val"] = (None, tensor, 3)
    assert jg.tensors_of(n) == [tensor]
    n.meta["val"] = 3
    assert jg.tensors_of(n) == []
