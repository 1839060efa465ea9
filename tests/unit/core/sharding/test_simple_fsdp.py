"""SimpleFSDP on fake process groups: who holds what, and what reading a parameter does.

The numbers that real ranks compute are in tests/integration/test_public_api.py.
"""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import graph_trainer as gt
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.graph.annotations import (
    Role,
    parameter_of,
    role_of,
)
from graph_trainer.core.sharding.simple_fsdp import shard_of
from graph_trainer.core.torch_private import StridedShard
from graph_trainer.testing import become


def mesh(ranks=3, rank=0):
    become(rank, ranks)
    return init_device_mesh("cpu", (ranks,))


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.ten = nn.Linear(4, 10)
        self.tied = nn.Linear(4, 10, bias=False)
        self.tied.weight = self.ten.weight
        self.two = nn.Linear(10, 2)
        self.one = nn.Linear(2, 1)
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.frozen = nn.Parameter(torch.randn(7, 2), requires_grad=False)
        self.register_buffer("buffer", torch.ones(2))
        self.register_parameter("nothing", None)

    def forward(self, x):
        return self.one(self.two(self.ten(x) + self.tied(x))) * self.scale * self.frozen.sum()


def odd():
    torch.manual_seed(0)
    return Odd()


def loss(model, x):
    return model(x).mean()


def tensor_parallel():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 5), nn.LayerNorm(5))


def dp_and_tp():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def shard_tensor_parallel(model):
    both = dp_and_tp()
    plan = {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()}
    parallelize_module(model, both["tp"], plan)
    with torch.no_grad():
        # parallelize_module's broadcast brings nothing from other ranks of a fake group
        for parameter, value in zip(
            model.parameters(), tensor_parallel().parameters(), strict=True
        ):
            if isinstance(parameter, DTensor):
                parameter.to_local().copy_(shard_of(value.detach(), parameter))
    return gt.simple_fsdp(model, both["dp"])


def fully_shard(ranks):
    return lambda model: gt.simple_fsdp(model, init_device_mesh("cpu", (ranks,)))


def hybrid(model):
    return gt.simple_fsdp(model, init_device_mesh("cpu", (2, 3)), "hybrid_shard")


def replicate(model):
    return gt.simple_fsdp(model, init_device_mesh("cpu", (3,)), "replicate")


def cuts_of_both(rank, name):
    """Nine rows: five for the first of tensor parallelism, of which FSDP makes three and two."""
    dp, tp = divmod(rank, 2)
    of_tp = {"0.weight": 0, "0.bias": 0, "1.weight": 1}
    return [*([(of_tp[name], tp, 2)] if name in of_tp else []), (0, dp, 2)]


# Ranks, model, how it is sharded, and the cuts of a parameter: dimension, part, of how many.
LAYOUTS = {
    **{str(n): (n, odd, fully_shard(n), lambda r, _, n=n: [(0, r, n)]) for n in (1, 2, 3, 4, 16)},
    "hybrid": (6, odd, hybrid, lambda rank, name: [(0, rank % 3, 3)]),
    "replicate": (3, odd, replicate, lambda rank, name: []),
    "tensor parallel": (4, tensor_parallel, shard_tensor_parallel, cuts_of_both),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_has_its_part_as_chunk_cuts_it(layout):
    ranks, make, shard, cuts = LAYOUTS[layout]
    whole = dict(make().named_parameters())
    for rank in range(ranks):
        become(rank, ranks)
        for name, parameter in shard(make()).named_parameters():
            part = whole[name].detach()
            for dim, place, count in cuts(rank, name) if part.ndim else []:
                chunks = part.chunk(count, dim)
                part = chunks[place] if place < len(chunks) else part.narrow(dim, 0, 0)
            assert torch.equal(parameter.to_local(), part), (rank, name)
            assert torch.equal(shard_of(whole[name].detach(), parameter), part), (rank, name)


def test_placements():
    become(0, 6)
    model = hybrid(odd())
    assert model.ten._parameters["weight"].placements == (Replicate(), Shard(0))
    assert model._parameters["scale"].placements == (Replicate(), Replicate())
    become(0, 3)
    assert replicate(odd()).ten._parameters["weight"].placements == (Replicate(),)
    become(0, 4)
    model = shard_tensor_parallel(tensor_parallel())
    weight = model[0]._parameters["weight"]
    assert weight.placements == (StridedShard(0, split_factor=2), Shard(0))
    assert weight.shape == model[0].weight.shape == (9, 4)
    assert model[1]._parameters["weight"].placements == (Shard(0), Shard(1))
    assert model[0].weight.placements == (Shard(0),), "the model computes on tensor parallelism's"


# --- what stays as it was -----------------------------------------------------------------------


def test_names_ties_flags_and_classes_stay():
    plain, model = odd(), odd()
    assert gt.simple_fsdp(model, mesh()) is model
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    assert model.ten._parameters["weight"] is model.tied._parameters["weight"]
    assert not model._parameters["frozen"].requires_grad
    assert model._parameters["frozen"].shape == (7, 2)
    assert model.nothing is None
    assert isinstance(model, Odd)
    assert isinstance(model.ten, nn.Linear)
    assert repr(model) == repr(plain)
    assert type(model.ten) is type(model.two), "one class for all modules of a kind"


def test_a_model_on_meta_stays_there_and_can_be_materialised():
    with torch.device("meta"):
        model = Odd()
    gt.simple_fsdp(model, mesh())
    assert all(p.is_meta for p in model.parameters())
    joint = gt.capture(model.to_empty(device="meta"), loss, (torch.empty(2, 4, device="meta"),))
    assert len(collectives(joint)) > 0
    model.to_empty(device="cpu")
    assert all(isinstance(p, DTensor) and not p.is_meta for p in model.parameters())


def test_the_unsharded_storage_is_let_go():
    model = gt.simple_fsdp(nn.Linear(8, 9), mesh())
    local = model._parameters["weight"].to_local()
    assert local.untyped_storage().nbytes() == 3 * 8 * 4


def test_a_deep_copy_shares_nothing_but_the_groups():
    model = gt.simple_fsdp(odd(), mesh())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin._parameters["scale"].to_local().fill_(9)
    assert model._parameters["scale"].to_local() == 3
    assert twin.ten.weight.shape == (10, 4)


# --- reading a parameter ------------------------------------------------------------------------


def test_reading_gathers_and_sharded_parameters_does_not():
    model = gt.simple_fsdp(odd(), mesh())
    assert not isinstance(model.ten.weight, DTensor)
    assert model.ten.weight.shape == (10, 4)
    with pytest.raises(ZeroDivisionError), gt.sharded_parameters():
        assert model.ten.weight is model.ten._parameters["weight"]
        model.two.weight = nn.Parameter(model.two.weight.detach())
        raise ZeroDivisionError  # it ends with an error too
    assert not isinstance(model.ten.weight, DTensor)
    assert not isinstance(model.two.weight, DTensor)
    assert isinstance(model.two._parameters["weight"], DTensor)


def test_a_failing_gather_is_not_mistaken_for_a_missing_attribute():
    model = gt.simple_fsdp(nn.Linear(4, 4), mesh())
    del model.graph_trainer_sharding
    with pytest.raises(RuntimeError, match="gathering parameter 'weight' failed"):
        _ = model.weight


def captured(model):
    return gt.capture(model, loss, (torch.randn(2, 4),))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_roles_say_which_nodes_gather_and_which_reduce(ranks):
    joint = captured(gt.simple_fsdp(odd(), mesh(ranks)))
    unshards = [n for n in joint.graph.nodes if role_of(n) is Role.UNSHARD]
    found = collectives(joint)
    if ranks == 1:
        assert found == [], "a group of one communicates nothing"
        return
    assert {parameter_of(n) for n in unshards} >= {"ten.weight", "ten.bias", "frozen"}
    assert "tied.weight" not in {parameter_of(n) for n in unshards}, "known by its first name"
    by_role = {role: sorted({c.parameter for c in found if c.role is role}) for role in Role}
    trained = ["one.bias", "one.weight", "ten.bias", "ten.weight", "two.bias", "two.weight"]
    assert by_role[Role.UNSHARD] == sorted([*trained, "frozen"])
    assert by_role[Role.REDUCE_GRAD] == sorted([*trained, "scale"])
    assert {c.kind for c in found if c.parameter == "scale"} == {"all_reduce"}
    assert all(c.reduction in (None, "sum") for c in found), "gloo's AVG has been seen wrong"


GATHER, SCATTER, REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
HALF, DOUBLE = "torch.bfloat16", "torch.float64"


@pytest.mark.parametrize(
    ("sizes", "mode", "wanted"),
    [
        ((6,), "fully_shard", [(GATHER, 6, HALF), (SCATTER, 6, DOUBLE)]),
        ((2, 3), "hybrid_shard", [(GATHER, 3, HALF), (SCATTER, 3, DOUBLE), (REDUCE, 2, DOUBLE)]),
        ((6,), "replicate", [(REDUCE, 6, DOUBLE)]),
    ],
)
def test_what_travels_in_every_mode_and_dtype(sizes, mode, wanted):
    become(0, 6)
    policy = gt.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float64)
    mesh = init_device_mesh("cpu", sizes)
    model = gt.simple_fsdp(nn.Linear(4, 6), mesh, mode, mp_policy=policy)
    joint = gt.capture(model, lambda m, x: m(x.bfloat16()).mean(), (torch.randn(2, 4),))
    assert {node.meta["val"].dtype for _, node in joint.gradients()} == {torch.float32}
    found = [c for c in collectives(joint) if c.parameter == "weight"]
    assert [(c.kind, len(c.ranks), c.dtype) for c in found] == wanted


def test_every_rank_sends_the_same_number_of_rows():
    """Else the ranks' collectives would differ and hang."""
    entries = []
    for rank in range(4):
        joint = captured(gt.simple_fsdp(odd(), mesh(4, rank)))
        entries.append([c.entry() for c in collectives(joint)])
    assert entries[0] == entries[1] == entries[2] == entries[3]


@pytest.mark.parametrize(("factor", "divisors"), [(None, {3.0}), (1.0, set()), (8.0, {8.0})])
def test_gradients_are_divided_once(factor, divisors):
    model = gt.simple_fsdp(nn.Linear(4, 6), mesh(3), gradient_divide_factor=factor)
    joint = captured(model)
    found = [
        n.args[1]
        for n in joint.graph.nodes
        if role_of(n) is Role.REDUCE_GRAD and "div" in str(n.target)
    ]
    assert set(found) == divisors
    assert len(found) == 2 * len(divisors)


@torch.backends.mkldnn.flags(enabled=False)  # oneDNN's LSTM cannot be captured
def test_modules_that_read_their_parameters_in_unusual_ways():
    """Lists, dictionaries, parametrizations, attention's own fast path and an LSTM."""

    class Unusual(nn.Module):
        def __init__(self):
            super().__init__()
            self.several = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(2)])
            self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(5, 4))})
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.lstm = nn.LSTM(4, 4, batch_first=True)

        def forward(self, x):
            x = self.normed(x * sum(self.several)) @ self.named["a"].t() @ self.named["a"]
            return self.lstm(self.attention(x, x, x)[0])[0]

    model = gt.simple_fsdp(Unusual(), mesh(3))
    joint = gt.capture(model, loss, (torch.randn(2, 3, 4),))
    assert joint.signature.parameters_without_grad == ()
    reduced = {c.parameter for c in collectives(joint) if c.role is Role.REDUCE_GRAD}
    assert reduced == {n for n, _ in model.named_parameters()}


# --- refusals -----------------------------------------------------------------------------------


def test_modes_and_meshes_that_do_not_fit():
    one = mesh(4)
    two = init_device_mesh("cpu", (2, 2))
    for wrong, mode, message in [
        (one, "fully_sharded", "'fully_sharded'.*fully_shard, hybrid_shard, replicate"),
        (two, "fully_shard", "a mesh of 1 dimension and got one of 2"),
        (two, "replicate", "a mesh of 1 dimension and got one of 2"),
        (one, "hybrid_shard", r"2 dimensions \(replicate, shard\) and got one of 1"),
    ]:
        model = nn.Linear(4, 4)
        with pytest.raises(gt.ConfigError, match=message):
            gt.simple_fsdp(model, wrong, mode)
        assert type(model) is nn.Linear


def test_sharding_twice_is_refused_and_changes_nothing():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    gt.simple_fsdp(model[1], mesh())
    first = model[0].weight
    with pytest.raises(gt.ConfigError, match=r"module '1' \(Linear\) is sharded already"):
        gt.simple_fsdp(model, mesh())
    assert model[0].weight is first


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_what_cannot_be_sharded_is_refused_and_nothing_changes():
    for other, message in (
        (nn.LazyLinear(4), r"parameter '1.weight' has no shape yet: run the model once"),
        (torch.jit.script(nn.Linear(4, 4)), "module '1' is scripted or traced by torch.jit"),
    ):
        model = nn.Sequential(nn.Linear(4, 4), other)
        with pytest.raises(gt.ConfigError, match=message):
            gt.simple_fsdp(model, mesh())
        assert type(model[0]) is nn.Linear and not isinstance(model[0].weight, DTensor)


def test_a_sharded_model_is_copied_and_not_pickled():
    model = gt.simple_fsdp(odd(), mesh(1))
    x = torch.randn(3, 4)
    for copied, shares in ((copy.deepcopy(model), False), (copy.copy(model), True)):
        assert torch.equal(loss(copied, x), loss(model, x))
        assert (copied._parameters["scale"] is model._parameters["scale"]) == shares
    for write in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(gt.CheckpointError, match=r"cannot be pickled, .*: save model.state_di"):
            write(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again = gt.simple_fsdp(odd(), mesh(1))
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    again.load_state_dict(torch.load(file))
    assert torch.equal(loss(again, x), loss(model, x))


def test_a_partial_parameter_is_refused_by_name():
    become(0, 4)
    both, model = dp_and_tp(), nn.Linear(4, 4)
    tensor = DTensor.from_local(torch.ones(4, 4), both["tp"], [Partial()], run_check=False)
    model.weight = nn.Parameter(tensor)
    with pytest.raises(gt.ConfigError, match="'weight' is a partial DTensor"):
        gt.simple_fsdp(model, both["dp"])


def test_a_replicated_tensor_parallel_parameter():
    become(0, 4)
    both, model = dp_and_tp(), nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), both["tp"], [Replicate()]))
    gt.simple_fsdp(model, both["dp"])
    assert model._parameters["weight"].placements == (Shard(0), Replicate())
    assert model.weight.placements == (Replicate(),)


def test_a_gradient_is_reduced_over_tensor_parallelism_in_the_reduce_dtype():
    """Of a norm whose weight is replicated while its rows are split, as by sequence parallelism."""
    become(0, 4)
    both, model = dp_and_tp(), nn.RMSNorm(8)
    model.weight = nn.Parameter(distribute_tensor(torch.ones(8), both["tp"], [Replicate()]))
    policy = gt.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float64)
    gt.simple_fsdp(model, both["dp"], mp_policy=policy)

    def loss_fn(model, x):
        rows = DTensor.from_local(x, both["tp"], [Shard(0)], run_check=False)
        return model(rows).to_local().sum()

    joint = gt.capture(model, loss_fn, (torch.randn(4, 8, dtype=torch.bfloat16),))
    found = [(c.kind, c.ranks, c.dtype, c.input_bytes, c.role) for c in collectives(joint)]
    assert found == [
        (GATHER, (0, 2), HALF, 8, Role.UNSHARD),
        (REDUCE, (0, 1), DOUBLE, 64, Role.REDUCE_GRAD),
        (SCATTER, (0, 2), DOUBLE, 64, Role.REDUCE_GRAD),
    ]
