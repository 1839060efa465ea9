"""The graph against its signature."""

from dataclasses import replace

import pytest

import graph_trainer as gt
from graph_trainer.core.graph.annotations import Phase
from graph_trainer.core.graph.signature import InputKind
from graph_trainer.testing import Builder
from tests.unit.graphs import BACKWARD, aten


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


def set_outputs(joint, *values):
    joint.output_node().args = (values,)


def without_gradients(joint, keep):
    outputs = tuple(o for o in joint.signature.outputs if o.name in ("loss", keep))
    joint.signature = replace(joint.signature, outputs=outputs)
    set_outputs(joint, *joint.output_values()[: len(outputs)])


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


class Breaks:
    """Each breaks a valid graph in one place and returns what the error must say."""

    def a_nested_output(joint):
        loss, *gradients = joint.output_values()
        set_outputs(joint, loss, tuple(gradients))
        return "flat", gradients[0].name

    def an_output_that_is_no_node(joint):
        set_outputs(joint, *joint.output_values()[:2], None)
        return ("None",)

    def too_few_outputs(joint):
        set_outputs(joint, *joint.output_values()[:2])
        return "returns 2", "describes 3"

    def gradients_in_the_wrong_order(joint):
        loss, dw, db = joint.output_values()
        set_outputs(joint, loss, db, dw)
        return f"'{db.name}'", "'linear.weight'", "(4,)", "(3, 4)"

    def a_gradient_of_another_dtype(joint):
        _, dw, _ = joint.output_values()
        dw.meta["val"] = dw.meta["val"].bfloat16()
        return f"'{dw.name}'", "bfloat16"

    def a_missing_gradient(joint):
        without_gradients(joint, "linear.weight")
        return "no gradient", "'linear.bias'"

    def all_gradients_missing(joint):
        without_gradients(joint, None)
        return "no gradient", "'linear.weight'"

    def a_gradient_for_no_parameter(joint):
        signature = joint.signature
        outputs = [replace(o, name=o.name.replace("bias", "bios")) for o in signature.outputs]
        joint.signature = replace(
            signature, outputs=tuple(outputs), parameters_without_grad=("linear.bias",)
        )
        return "'linear.bios'", "not a parameter"

    def placeholders_out_of_order(joint):
        first, second, _ = joint.placeholders()
        first.prepend(second)
        return "'linear.weight'", "'args[0]'", second.name

    def a_placeholder_after_the_body(joint):
        *_, last = joint.placeholders()
        last.prepend(joint.graph.find_nodes(op="call_function", target=aten.t.default)[0])
        return f"'{last.name}'", "every placeholder comes first"

    def an_extra_placeholder(joint):
        with joint.graph.inserting_after(joint.placeholders()[-1]):
            joint.graph.placeholder("extra")
        return "4 placeholders", "describes 3"

    def a_node_without_a_phase(joint):
        with joint.graph.inserting_before(joint.output_node()):
            node = joint.graph.call_function(aten.neg.default, (joint.placeholders()[0],))
        return f"'{node.name}'", "aten.neg.default", "copy_annotations"

    def a_node_read_before_it_is_made(joint):
        (mm,) = joint.graph.find_nodes(op="call_function", target=aten.mm.default)
        ones = mm.args[1]
        mm.append(ones)
        return f"'{mm.name}'", f"'{ones.name}'", "comes after it"


@pytest.mark.parametrize("name", [name for name in vars(Breaks) if not name.startswith("_")])
def test_what_breaks_the_contract_is_named(name):
    joint = linear()
    words = getattr(Breaks, name)(joint)
    with pytest.raises(gt.VerificationError) as caught:
        joint.validate()
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_parameter_that_the_loss_does_not_reach_needs_no_gradient():
    joint = linear()
    without_gradients(joint, "linear.weight")
    joint.signature = replace(joint.signature, parameters_without_grad=("linear.bias",))
    joint.validate()


def test_a_graph_by_hand_takes_no_batch():
    with pytest.raises(gt.CaptureError, match="made by hand takes no batch: capture a step"):
        _ = linear().captured_call
