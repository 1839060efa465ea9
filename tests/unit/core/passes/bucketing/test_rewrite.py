"""Buckets in graphs by hand: dtypes, groups, chains, cycles, writes, offsets."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from graph_trainer.core.graph.annotations import (
    Role,
    bucket_tag,
    is_backward,
    parameters_of,
    role_of,
)
from graph_trainer.core.graph.ops import argument
from graph_trainer.core.passes.bucketing.assign import members_of
from graph_trainer.core.passes.bucketing.tag_buckets import tag_buckets
from graph_trainer.testing import Builder, assert_same, code, run, values_for
from tests.examples import examples
from tests.unit.core.passes.bucketing.bucket_graphs import (
    STRATEGIES,
    bucket,
    collectives_of,
    counts,
    finish,
    gathering,
)
from tests.unit.graphs import ALL_REDUCE, BACKWARD, GATHER, SCATTER, aten


@pytest.fixture(autouse=True)
def of_two_ranks(monkeypatch):
    """The groups of these graphs do not exist."""
    module = "graph_trainer.core.passes.bucketing.bucket_collectives"
    monkeypatch.setattr(sys.modules[module], "group_ranks", lambda group: (0, 1))


class Bytes(fx.Interpreter):
    """Others send what this rank does with other bits, whatever the dtype."""

    def call_function(self, target, args, kwargs):
        if "all_gather" in str(target):
            raw = args[0].view(torch.uint8)
            return torch.cat([raw ^ rank for rank in range(args[1])]).view(args[0].dtype)
        return args[0] if "wait_tensor" in str(target) else target(*args, **kwargs)


def test_gathers_of_several_dtypes_share_a_bucket_but_complex_numbers_apart():
    real = [torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool]
    dtypes = dict(enumerate([*real, torch.complex64, torch.complex64]))
    b = Builder()
    parameters = [(f"layers.0.{i}", "g", dtype) for i, dtype in dtypes.items()]
    joint = gathering(b, parameters, empty=("layers.0.empty", "g", torch.float32))
    values = values_for(joint)
    before = Bytes(joint.graph_module).run(*values)
    bucket(joint, strategy="size")
    found = [parameters_of(n) for n in collectives_of(joint, Role.UNSHARD, False)]
    names = [name for name, *_ in parameters]
    assert sorted(found) == [(*names[:5], "layers.0.empty"), tuple(names[5:])]
    assert_same(before, Bytes(joint.graph_module).run(*values))


def reducing(chains):
    """One gradient a chain of groups: all-reduced over each, one after the other."""
    b = Builder()
    x = b.input("x", 4)
    names = [f"layers.0.p{i}" for i in range(len(chains))]
    for name, (dtype, *_) in zip(names, chains, strict=True):
        b.parameter(name, 4, dtype=dtype)
    loss = b.call(aten.sum.default, x)
    gradients = {}
    for scale, (name, (dtype, op, groups)) in enumerate(zip(names, chains, strict=True), 1):
        grad = b.call(aten.mul.Tensor, x, scale, phase=BACKWARD)
        grad = b.call(aten._to_copy.default, grad, dtype=dtype, phase=BACKWARD)
        for group in groups:
            role = {"phase": BACKWARD, "role": Role.REDUCE_GRAD, "parameter": name}
            grad = b.waited(ALL_REDUCE, grad, op, group, **role)
        gradients[name] = grad
    return finish(b, loss, gradients)


@examples(60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.float64]),
            st.sampled_from(["sum", "max"]),
            st.lists(st.sampled_from("abc"), min_size=1, max_size=4),
        ),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(list(STRATEGIES.values())),
)
def test_any_chains_of_reductions(chains, options):
    joint = reducing(chains)
    before = run(joint)
    names = [name for name, _ in joint.gradients()]
    kind = {n: (str(dtype), op) for n, (dtype, op, _) in zip(names, chains, strict=True)}
    bucket(joint, **options)
    assert_same(before, run(joint))
    issued = []
    for node in collectives_of(joint, Role.REDUCE_GRAD, True):
        served = parameters_of(node)
        assert len({kind[name] for name in served}) == 1
        assert len(set(served)) == len(served)
        issued += [(name, argument(node, "group_name")) for name in served]
    for name, (_, _, groups) in zip(names, chains, strict=True):
        assert [group for owner, group in issued if owner == name] == groups


def test_reductions_one_after_the_other_merge_step_by_step():
    chain = (torch.float32, "sum", ["a", "a"])
    joint = bucket(reducing([chain, chain, chain]), strategy="size")
    assert counts(joint)[2] == 2


def test_a_cycle_of_buckets_is_given_up():
    f32 = torch.float32
    joint = reducing([(f32, "sum", ["a", "b"]), (f32, "sum", ["b", "a"]), (f32, "sum", ["c"])])
    assert len(members_of(joint)) == 0
    text = code(joint)
    bucket(joint, strategy="size")
    assert counts(joint)[2] == 5
    assert code(joint) == text


def test_what_is_not_a_parameters_alone_is_not_tagged():
    b = Builder()
    p, q = b.parameter("layers.0.p", 3), b.parameter("layers.0.q", 3)
    both = b.call(aten.add.Tensor, p, q)
    waits = []
    for source, name in ((both, "layers.0.p"), (p, "layers.0.p"), (q, "layers.0.q")):
        role = {"role": Role.UNSHARD, "parameter": name}
        waits.append(b.waited(GATHER, source, 2, "g", **role))
    b.call(aten.mul_.Tensor, waits[2], 2)  # written in place
    loss = b.call(aten.sum.default, b.call(aten.cat.default, waits))
    grads = {}
    for name, other in (("layers.0.p", None), ("layers.0.q", "layers.0.p")):
        role = {"phase": BACKWARD, "role": Role.REDUCE_GRAD, "parameter": name}
        grad = b.call(aten.neg.default, p, phase=BACKWARD)
        grads[name] = b.waited(ALL_REDUCE, grad, "sum", "g", **role)
        if other:  # its gradient reads another's
            grads[other] = b.call(aten.add.Tensor, grads[other], grads[name], phase=BACKWARD)
    joint = finish(b, loss, grads)
    tag_buckets(joint)
    tagged = [n for n in joint.graph.nodes if bucket_tag(n)]
    assert [(role_of(n), n.all_input_nodes[0]) for n in tagged if not is_backward(n)] == [
        (Role.UNSHARD, p)
    ]
    # what leads to two gradients is not one parameter's
    assert [parameters_of(n) for n in tagged if is_backward(n)] == [("layers.0.p",)]


def sending(b, name, grad):
    """A gradient, cast and reduced."""
    how = {"phase": BACKWARD, "role": Role.REDUCE_GRAD, "parameter": name}
    grad = b.call(aten._to_copy.default, grad, dtype=torch.float32, **how)
    return b.waited(SCATTER, grad, "sum", 2, "g", **how)


def test_gradients_that_are_wide_before_do_not_widen_the_others_one_by_one():
    """As where tensor parallelism has summed a norm's gradient in the dtype of reductions."""
    b = Builder()
    x = b.input("x", 4, 3, dtype=torch.bfloat16)
    wide = b.input("wide", 4, 3)
    gradients = {}
    for name in "pqr":
        b.parameter(f"layers.0.{name}", 2, 3)
    for name, source in (("p", x), ("q", wide), ("r", x)):
        how = {"phase": BACKWARD, "role": Role.REDUCE_GRAD, "parameter": f"layers.0.{name}"}
        grad = b.call(aten.mul.Tensor, source, 1 + len(gradients), phase=BACKWARD)
        if source is x:
            grad = b.call(aten._to_copy.default, grad, dtype=torch.float32, **how)
        gradients[f"layers.0.{name}"] = b.waited(SCATTER, grad, "sum", 2, "g", **how)
    joint = finish(b, b.call(aten.sum.default, x), gradients)
    before = run(joint)
    bucket(joint, strategy="size")
    assert_same(before, run(joint))
    assert counts(joint)[2] == 1
    assert not joint.graph.find_nodes(op="call_function", target=aten._to_copy.default)


def write(b, node, factor):
    return b.call(aten.mul_.Tensor, node, factor, phase=BACKWARD)


def overwritten_between(b, x):
    """What one member sends is a cast of what is written before the other sends."""
    first = sending(b, "layers.0.p", x)
    write(b, x, 5)
    return first, sending(b, "layers.0.q", b.call(aten.mul.Tensor, x, 3, phase=BACKWARD))


def scaled_by_what_is_written(b, x):
    """A gradient is scaled by a buffer that is written before the other one is reduced."""
    how = {"phase": BACKWARD, "role": Role.REDUCE_GRAD, "parameter": "layers.0.p"}
    scale = b.call(aten.sum.default, x, phase=BACKWARD)
    first = b.call(aten.mul.Tensor, sending(b, "layers.0.p", x), scale, **how)
    write(b, scale, 3)
    return first, sending(b, "layers.0.q", b.call(aten.neg.default, x, phase=BACKWARD))


def read_at_an_offset(b, x):
    """A view counts from the beginning of a storage that a bucket would be."""
    how = {"phase": BACKWARD, "role": Role.REDUCE_GRAD, "parameter": "layers.0.q"}
    first = sending(b, "layers.0.p", x)
    second = sending(b, "layers.0.q", b.call(aten.neg.default, x, phase=BACKWARD))
    return first, b.call(aten.as_strided.default, second, [2, 3], [3, 1], 0, **how)


@pytest.mark.parametrize(
    "gradients", [overwritten_between, scaled_by_what_is_written, read_at_an_offset]
)
def test_what_depends_on_its_place_stays_there(gradients):
    b = Builder()
    for name in "pq":
        b.parameter(f"layers.0.{name}", 2, 3)
    x = b.call(aten.neg.default, b.input("x", 4, 3, dtype=torch.bfloat16), phase=BACKWARD)
    first, second = gradients(b, x)
    loss = b.call(aten.sum.default, x)
    joint = finish(b, loss, {"layers.0.p": first, "layers.0.q": second})
    before = run(joint)
    bucket(joint, strategy="size")
    assert counts(joint)[2] == 2
    assert_same(before, run(joint))


def test_a_parameter_that_is_written_is_gathered_where_it_was():
    b = Builder()
    wholes, shards = [], [b.parameter(f"layers.0.{n}", 3) for n in "pqr"]
    for name, shard in zip("pqr", shards, strict=True):
        role = {"role": Role.UNSHARD, "parameter": f"layers.0.{name}"}
        if name == "q":
            b.call(aten.mul_.Tensor, shard, 7)
        cast = b.call(aten._to_copy.default, shard, dtype=torch.bfloat16, **role)
        wholes.append(b.waited(GATHER, cast, 2, "g", **role))
    loss = b.call(aten.sum.default, b.call(aten.cat.default, wholes))
    grads = {
        f"layers.0.{n}": b.call(aten.clone.default, s, phase=BACKWARD)
        for n, s in zip("pqr", shards, strict=True)
    }
    joint = finish(b, loss, grads)
    before = run(joint)
    bucket(joint, strategy="size")
    assert counts(joint)[0] == 2
    assert_same(before, run(joint))


def test_one_bucket_of_very_many_members_is_no_square():
    """Twice the members, about twice the work: counted, since clocks are not tests."""
    from graph_trainer.core.graph.ops import storages_in, value_storages

    def alive(members):
        b = Builder()
        names = [(f"layers.0.{i}", "g", torch.float32) for i in range(members)]
        joint = bucket(gathering(b, names), strategy="size", cap_mib=100.0, max_span=10**6)
        assert counts(joint) == (1, 0, 0)
        storages = value_storages(joint.graph)
        return sum(
            len(list(storages_in(storages[n])))
            for m in joint.graph.nodes
            for n in m.all_input_nodes
        )

    assert alive(40) < 2.1 * alive(20)
