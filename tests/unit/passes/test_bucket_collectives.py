"""Merged collectives: fewer of them, the same numbers, and never one with what it waits for."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.distributed.device_mesh import init_device_mesh

import graph_trainer as gt
from graph_trainer.analysis.collectives import collective_inputs, num_bytes
from graph_trainer.analysis.ops import argument, is_collective
from graph_trainer.errors import PassError
from graph_trainer.graph_copy import copy_graph
from graph_trainer.joint_graph import (
    Role,
    bucket_tag,
    is_backward,
    parameters_of,
    role_of,
    set_bucket_tag,
    tensors_of,
)
from graph_trainer.passes.bucket_collectives import (
    BucketCollectivesOptions,
    BucketingOptions,
    bucket_collectives,
)
from graph_trainer.passes.bucket_plan import block_of, members_of
from graph_trainer.passes.tag_buckets import tag_buckets
from tests.unit.graphs import (
    BACKWARD,
    Builder,
    assert_same,
    aten,
    c10d,
    captured_decoder,
    check_pass,
    code,
    fake_world,
    run,
    values_for,
)

BF16 = gt.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
STRATEGIES = {
    "block": {"strategy": "transformer_block"},
    "small": {"strategy": "size", "cap_mib": 0.0005},
    "large": {"strategy": "size"},
    "near": {"strategy": "size", "max_span": 40},
}


def prepared(policy="always", **decoder):
    """A decoder as it comes to bucketing."""
    joint = captured_decoder(**decoder)
    off = ["tag_buckets", "bucket_collectives"]
    gt.run_passes(joint, gt.PassConfig(reshard_after_forward=policy, disable_passes=off))
    return joint


def bucket(joint, **options):
    tag_buckets.function(joint, None)
    bucket_collectives.function(joint, BucketCollectivesOptions(**options))
    joint.validate()
    return joint


def collectives_of(joint, role, backward):
    return [
        n
        for n in joint.graph.nodes
        if is_collective(n) and role_of(n) is role and is_backward(n) is backward
    ]


def counts(joint):
    return (
        len(collectives_of(joint, Role.UNSHARD, False)),
        len(collectives_of(joint, Role.UNSHARD, True)),
        len(collectives_of(joint, Role.REDUCE_GRAD, True)),
    )


def on_a_mesh(mode, layers=3):
    """A decoder under HSDP or DDP, on fake ranks."""
    from tests.unit.graphs import Decoder, mean_square

    fake_world(4)
    shape = (2, 2) if mode == "hybrid_shard" else (4,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    torch.manual_seed(0)
    model = gt.simple_fsdp(Decoder(layers), mesh, mode)
    joint = gt.capture(model, mean_square, (torch.zeros(2, 3, dtype=torch.int64),))
    gt.run_passes(joint, gt.PassConfig(disable_passes=["tag_buckets", "bucket_collectives"]))
    return joint


@pytest.mark.parametrize("options", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize(
    "decoder",
    [
        {},
        {"world": 3},
        {"tied": True},
        {"checkpointed": True, "fsdp": {"mp_policy": BF16}},
        {"policy": "never", "fsdp": {"mp_policy": BF16, "gradient_divide_factor": 1.0}},
        {"world": 3, "rank": 2, "fsdp": {"mp_policy": BF16}},
    ],
    ids=["plain", "uneven", "tied", "checkpointed", "bfloat16", "last_rank"],
)
def test_fewer_collectives_and_the_same_numbers(decoder, options):
    joint = prepared(layers=3, **decoder)
    before, plain = run(joint), counts(joint)
    tag_buckets.function(joint, None)
    assert check_pass(bucket_collectives, joint, BucketCollectivesOptions(**options))
    assert_same(before, run(joint))
    assert all(new <= old for new, old in zip(counts(joint), plain, strict=True))
    assert sum(counts(joint)) < sum(plain)
    gt.passes.run_passes(joint, gt.PassConfig(passes=[], verify_passes=True))


@pytest.mark.parametrize("mode", ["hybrid_shard", "replicate"])
@pytest.mark.parametrize("options", STRATEGIES.values(), ids=STRATEGIES)
def test_reductions_over_several_meshes_shrink_as_well(mode, options):
    joint = on_a_mesh(mode)
    before, plain = run(joint), counts(joint)
    bucket(joint, **options)
    assert_same(before, run(joint))
    assert counts(joint)[2] < plain[2]


def test_every_value_is_what_its_metadata_says():
    from graph_trainer.passes.verify import verify_values

    for decoder in ({}, {"world": 3, "rank": 2, "fsdp": {"mp_policy": BF16}}):
        verify_values(bucket(prepared(**decoder), strategy="transformer_block"))


@pytest.mark.parametrize("layers", [1, 5])
def test_a_block_is_a_bucket_of_each_kind(layers):
    joint = bucket(prepared(layers=layers), strategy="transformer_block")
    # the embedding, and the final norm with the head; backward does not read the embedding
    assert counts(joint) == (layers + 2, layers + 1, layers + 2)
    gathered = [set(parameters_of(n)) for n in collectives_of(joint, Role.UNSHARD, False)]
    assert {"embedding.weight"} in gathered
    assert {"norm.weight", "head.weight"} in gathered
    assert {f"layers.0.{n}.weight" for n in ("norm", "up", "down")} in gathered


@pytest.mark.parametrize("mode", ["hybrid_shard", "replicate"])
def test_a_block_is_a_bucket_on_every_mesh(mode):
    joint = bucket(on_a_mesh(mode, layers=3), strategy="transformer_block")
    gathers, again, reductions = counts(joint)
    # the last bucket stays unsharded by default
    assert (gathers, again) == ((5, 3) if mode == "hybrid_shard" else (0, 0))
    assert reductions == (10 if mode == "hybrid_shard" else 5)  # scattered, then reduced


def test_experts_travel_apart():
    b = Builder()
    names = ("layers.0.router", "layers.0.experts.w1", "layers.0.experts.w2", "layers.0.norm")
    joint = gathering(b, [(name, "g", torch.float32) for name in names])
    bucket(joint, strategy="transformer_block")
    found = [parameters_of(n) for n in collectives_of(joint, Role.UNSHARD, False)]
    assert sorted(found) == sorted([(names[0], names[3]), (names[1], names[2])])


@pytest.mark.parametrize(
    ("fqn", "block"),
    [
        ("layers.3.attention.wo.weight", "layers.3"),
        ("encoder.layers.11.mlp.weight", "encoder.layers.11"),
        ("layers.3.experts.7.w1", "layers.3"),
        ("0.weight", "0"),
        ("norm.weight", None),
        ("layer3.weight", None),
    ],
)
def test_blocks_by_name(fqn, block):
    assert block_of(fqn) == block


def sizes(joint, role, backward):
    return [
        max(sum(map(num_bytes, collective_inputs(n))), sum(map(num_bytes, tensors_of(n))))
        for n in collectives_of(joint, role, backward)
    ]


@functools.cache
def three_layers():
    return prepared(layers=3)


@settings(max_examples=30, deadline=None)
@given(cap=st.floats(1e-4, 5e-3), span=st.integers(5, 400))
def test_buckets_are_as_full_as_they_may_be(cap, span):
    joint = copy_graph(three_layers())
    tag_buckets.function(joint, None)
    members = {m.parameter + m.route.tag: m for m in members_of(joint)}
    bucket_collectives.function(
        joint, BucketCollectivesOptions(strategy="size", cap_mib=cap, max_span=span)
    )
    for role, backward, tag in (
        (Role.UNSHARD, False, "unshard_forward"),
        (Role.UNSHARD, True, "unshard_backward"),
        (Role.REDUCE_GRAD, True, "reduce_scatter_grad"),
    ):
        held = [
            sorted((members[name + tag] for name in parameters_of(n)), key=lambda m: m.position)
            for n in collectives_of(joint, role, backward)
        ]
        for parts in held:
            if len(parts) > 1:
                assert sum(m.bytes for m in parts) <= cap * 2**20
                assert parts[-1].span - parts[0].span <= span
        for parts, following in zip(held, held[1:], strict=False):
            too_large = sum(m.bytes for m in parts) + following[0].bytes > cap * 2**20
            too_far = following[0].span - parts[0].span > span
            assert too_large or too_far


def test_the_payload_is_in_the_order_of_the_parameters():
    joint = bucket(prepared(layers=3), strategy="size")
    registered = [i.name for i in joint.signature.inputs]
    for node in joint.graph.nodes:
        if is_collective(node) and role_of(node) is not None:
            order = [registered.index(name) for name in parameters_of(node)]
            assert order == sorted(order)
            (packed,) = node.all_input_nodes
            while packed.target is not aten.cat.default:
                (packed,) = packed.all_input_nodes
            assert [name for n in packed.all_input_nodes for name in parameters_of(n)] == list(
                parameters_of(node)
            )


def test_none_changes_nothing():
    joint = prepared()
    tag_buckets.function(joint, None)
    assert not check_pass(bucket_collectives, joint, BucketCollectivesOptions())


def test_a_bucket_is_cast_as_a_whole():
    def casts(joint):
        return sum(
            n.target is aten._to_copy.default and role_of(n) is Role.REDUCE_GRAD
            for n in joint.graph.nodes
        )

    joint = prepared(fsdp={"mp_policy": BF16, "gradient_divide_factor": 1.0})
    reductions = counts(joint)[2]
    assert casts(joint) == reductions
    bucket(joint, strategy="transformer_block")
    assert casts(joint) == counts(joint)[2] < reductions


# --- graphs by hand ------------------------------------------------------------------------


def finish(b, loss, gradients):
    return b.joint(loss, **{name.replace(".", "__"): node for name, node in gradients.items()})


def gathering(b, parameters):
    """Forward gathers and sums each parameter; its gradient is a copy of the shard."""
    total, gradients = None, {}
    shards = [(name, group, b.parameter(name, 3, dtype=dtype)) for name, group, dtype in parameters]
    for name, group, shard in shards:
        role = {"role": Role.UNSHARD, "parameter": name, "module": name.rpartition(".")[0]}
        whole = b.call(c10d.all_gather_into_tensor.default, shard, 2, group, **role)
        whole = b.call(c10d.wait_tensor.default, whole, **role)
        part = b.call(aten.sum.default, whole)
        total = part if total is None else b.call(aten.add.Tensor, total, part)
        gradients[name] = b.call(aten.clone.default, shard, phase=BACKWARD)
    return finish(b, total, gradients)


class Bytes(fx.Interpreter):
    """Others send what this rank does with other bits, whatever the dtype."""

    def call_function(self, target, args, kwargs):
        if "all_gather" in str(target):
            raw = args[0].view(torch.uint8)
            return torch.cat([raw ^ rank for rank in range(args[1])]).view(args[0].dtype)
        return args[0] if "wait_tensor" in str(target) else target(*args, **kwargs)


def test_gathers_of_several_dtypes_share_a_bucket():
    dtypes = (torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool)
    b = Builder()
    joint = gathering(b, [(f"layers.0.{i}", "g", dtype) for i, dtype in enumerate(dtypes)])
    values = values_for(joint)
    before = Bytes(joint.graph_module).run(*values)
    bucket(joint, strategy="size")
    assert counts(joint) == (1, 0, 0)
    assert_same(before, Bytes(joint.graph_module).run(*values))


def reducing(chains):
    """One gradient a chain of groups: all-reduced over each, one behind the other."""
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
            grad = b.call(c10d.all_reduce.default, grad, op, group, **role)
            grad = b.call(c10d.wait_tensor.default, grad, **role)
        gradients[name] = grad
    return finish(b, loss, gradients)


@settings(max_examples=60, deadline=None)
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


def test_reductions_one_behind_the_other_merge_step_by_step():
    chain = (torch.float32, "sum", ["a", "a"])
    joint = bucket(reducing([chain, chain, chain]), strategy="size")
    assert counts(joint)[2] == 2


def test_a_member_is_as_large_as_the_larger_of_what_it_reads_and_makes():
    joint = prepared(layers=1)
    tag_buckets.function(joint, None)
    for member in members_of(joint):
        (made,), (sent,) = tensors_of(member.node), collective_inputs(member.node)
        assert made.numel() != sent.numel()
        assert member.bytes == 4 * max(made.numel(), sent.numel())


def test_a_circle_of_buckets_is_given_up():
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
        whole = b.call(c10d.all_gather_into_tensor.default, source, 2, "g", **role)
        waits.append(b.call(c10d.wait_tensor.default, whole, **role))
    b.call(aten.mul_.Tensor, waits[2], 2)  # written in place
    loss = b.call(aten.sum.default, b.call(aten.cat.default, waits))
    grads = {}
    for name, other in (("layers.0.p", None), ("layers.0.q", "layers.0.p")):
        role = {"phase": BACKWARD, "role": Role.REDUCE_GRAD, "parameter": name}
        grad = b.call(aten.neg.default, p, phase=BACKWARD)
        grad = b.call(c10d.all_reduce.default, grad, "sum", "g", **role)
        grads[name] = b.call(c10d.wait_tensor.default, grad, **role)
        if other:  # its gradient reads another's
            grads[other] = b.call(aten.add.Tensor, grads[other], grads[name], phase=BACKWARD)
    joint = finish(b, loss, grads)
    tag_buckets.function(joint, None)
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
    grad = b.call(c10d.reduce_scatter_tensor.default, grad, "sum", 2, "g", **how)
    return b.call(c10d.wait_tensor.default, grad, **how)


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
        whole = b.call(c10d.all_gather_into_tensor.default, cast, 2, "g", **role)
        wholes.append(b.call(c10d.wait_tensor.default, whole, **role))
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


def test_a_shard_of_nothing_travels_along_and_complex_numbers_apart():
    b = Builder()
    dtypes = {"p": torch.float32, "q": torch.bfloat16, "r": torch.complex64, "s": torch.complex64}
    shards = {n: b.parameter(f"layers.0.{n}", 3, dtype=dtype) for n, dtype in dtypes.items()}
    shards["empty"] = b.parameter("layers.0.empty", 0)
    total, gradients = None, {}
    for name, shard in shards.items():
        role = {"role": Role.UNSHARD, "parameter": f"layers.0.{name}"}
        whole = b.call(c10d.all_gather_into_tensor.default, shard, 2, "g", **role)
        part = b.call(aten.sum.default, b.call(c10d.wait_tensor.default, whole, **role))
        total = part if total is None else b.call(aten.add.Tensor, total, part)
        gradients[f"layers.0.{name}"] = b.call(aten.clone.default, shard, phase=BACKWARD)
    joint = finish(b, total, gradients)
    values = values_for(joint)
    before = Bytes(joint.graph_module).run(*values)
    bucket(joint, strategy="size")
    found = [parameters_of(n) for n in collectives_of(joint, Role.UNSHARD, False)]
    assert sorted(found) == [
        ("layers.0.p", "layers.0.q", "layers.0.empty"),
        ("layers.0.r", "layers.0.s"),
    ]
    assert_same(before, Bytes(joint.graph_module).run(*values))


def test_one_bucket_of_very_many_members_is_no_square():
    """Twice the members, about twice the work: counted, since clocks are not tests."""
    from graph_trainer.analysis.ops import held_storages, storages_in

    def held(members):
        b = Builder()
        names = [(f"layers.0.{i}", "g", torch.float32) for i in range(members)]
        joint = bucket(gathering(b, names), strategy="size", cap_mib=100.0, max_span=10**6)
        assert counts(joint) == (1, 0, 0)
        storages = held_storages(joint.graph)
        return sum(
            len(list(storages_in(storages[n])))
            for m in joint.graph.nodes
            for n in m.all_input_nodes
        )

    assert held(40) < 2.1 * held(20)


def test_tags_survive_a_split_of_the_graph():
    joint = prepared()
    tag_buckets.function(joint, None)
    tags = [bucket_tag(n) for n in joint.graph.nodes if is_collective(n)]
    copy = fx.Graph()
    copy.output(copy.graph_copy(joint.graph, {}))
    assert [bucket_tag(n) for n in copy.nodes if is_collective(n)] == tags
    assert {*tags} == {"unshard_forward", "unshard_backward", "reduce_scatter_grad"}


def test_a_forward_only_graph_is_bucketed():
    from tests.unit.graphs import Decoder, fake_mesh, mean_square

    model = gt.simple_fsdp(Decoder(3), fake_mesh())
    batch = (torch.zeros(2, 3, dtype=torch.int64),)
    joint = gt.capture(model, mean_square, batch, backward=False)
    before = run(joint)
    bucket(joint, strategy="transformer_block")
    assert counts(joint) == (5, 0, 0)
    assert_same(before, run(joint))


# --- bad input -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "blocks"}, "must be one of none, size"),
        ({"strategy": "transformer"}, "did you mean 'transformer_block'"),
        ({"cap_mib": 0}, "cap_mib is 0"),
        ({"cap_mib": float("nan")}, "cap_mib is nan"),
        ({"max_span": 0}, "max_span is 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(PassError, match=message):
        BucketingOptions(**options)


def test_a_collective_without_a_group():
    joint = gathering(Builder(), [("layers.0.p", "", torch.float32)])
    set_bucket_tag(next(n for n in joint.graph.nodes if is_collective(n)), "unshard_forward")
    with pytest.raises(PassError, match="names no process group"):
        bucket_collectives.function(joint, BucketCollectivesOptions(strategy="size"))


def test_forward_and_backward_never_share_a_bucket():
    joint = bucket(prepared(layers=1), strategy="size", cap_mib=1000, max_span=10**6)
    # one in each direction, however large the cap
    assert counts(joint) == (1, 1, 1)
