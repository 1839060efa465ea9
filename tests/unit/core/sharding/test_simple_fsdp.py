"""SimpleFSDP on fake process groups: who holds what, and what reading a parameter does.

The numbers that real ranks compute are in tests/integration/test_public_api.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
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
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.sharding.simple_fsdp import shard_of
from graph_trainer.core.torch_private import StridedShard
from tests.unit.fake_ranks import become


def mesh(ranks: int = 3, rank: int = 0) -> DeviceMesh:
    become(rank, ranks)
    return init_device_mesh("cpu", (ranks,))


class Odd(nn.Module):
    def __init__(self) -> None:
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(self.two(self.ten(x) + self.tied(x))) * self.scale * self.frozen.sum()


def odd() -> Odd:
    torch.manual_seed(0)
    return Odd()


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean()


def shards(
    ranks: int, make: Callable[[], nn.Module], shard: Callable[[nn.Module], Any]
) -> list[dict[str, torch.Tensor]]:
    """Every rank's local parameters, one fake rank after the other."""
    found = []
    for rank in range(ranks):
        become(rank, ranks)
        model = make()
        shard(model)
        found.append({n: p.to_local().detach().clone() for n, p in model.named_parameters()})
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 16])
def test_rows_are_split_as_chunk_does_and_make_up_the_whole(ranks: int) -> None:
    whole = dict(odd().named_parameters())
    by_rank = shards(ranks, odd, lambda m: gt.simple_fsdp(m, init_device_mesh("cpu", (ranks,))))
    for name, parameter in whole.items():
        parts = [rank[name] for rank in by_rank]
        if parameter.ndim == 0:
            assert all(torch.equal(p, parameter) for p in parts)
            continue
        chunks = list(parameter.detach().chunk(ranks))
        chunks += [parameter.detach()[:0]] * (ranks - len(chunks))
        assert [p.shape for p in parts] == [c.shape for c in chunks], name
        assert torch.equal(torch.cat(parts), parameter), name


def test_hybrid_and_replicate() -> None:
    whole = odd().ten.weight

    def hybrid(model: nn.Module) -> nn.Module:
        return gt.simple_fsdp(model, init_device_mesh("cpu", (2, 3)), "hybrid_shard")

    by_rank = [rank["ten.weight"] for rank in shards(6, odd, hybrid)]
    for replica in (by_rank[:3], by_rank[3:]):
        assert torch.equal(torch.cat(replica), whole)
    model = hybrid(odd())
    assert model.ten._parameters["weight"].placements == (Replicate(), Shard(0))
    assert model._parameters["scale"].placements == (Replicate(), Replicate())

    model = gt.simple_fsdp(odd(), mesh(3), "replicate")
    assert model.ten._parameters["weight"].placements == (Replicate(),)
    assert torch.equal(model.ten._parameters["weight"].to_local(), whole)


def tensor_parallel() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 5), nn.LayerNorm(5))


def shard_tensor_parallel(model: nn.Module) -> None:
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()}
    parallelize_module(model, both["tp"], plan)
    with torch.no_grad():
        # parallelize_module's broadcast brings nothing from other ranks of a fake group
        for parameter, value in zip(
            model.parameters(), tensor_parallel().parameters(), strict=True
        ):
            if isinstance(parameter, DTensor):
                parameter.to_local().copy_(shard_of(value.detach(), parameter))
    gt.simple_fsdp(model, both["dp"])


def test_tensor_parallel_parameters_are_split_again_by_rows() -> None:
    whole = dict(tensor_parallel().named_parameters())
    by_rank = shards(4, tensor_parallel, shard_tensor_parallel)  # ranks are dp * 2 + tp

    def joined(name: str, tp: int) -> torch.Tensor:
        return torch.cat([by_rank[tp][name], by_rank[2 + tp][name]])

    # nine rows: five for the first of tensor parallelism, of which FSDP makes three and two
    assert [r["0.weight"].shape[0] for r in by_rank] == [3, 2, 2, 2]
    assert torch.equal(torch.cat([joined("0.weight", 0), joined("0.weight", 1)]), whole["0.weight"])
    columns = torch.cat([joined("1.weight", 0), joined("1.weight", 1)], dim=1)
    assert torch.equal(columns, whole["1.weight"])
    assert torch.equal(joined("1.bias", 1), whole["1.bias"])
    assert torch.equal(joined("2.weight", 0), whole["2.weight"])

    model = tensor_parallel()
    become(0, 4)
    shard_tensor_parallel(model)
    weight = model[0]._parameters["weight"]
    assert weight.placements == (StridedShard(0, split_factor=2), Shard(0))
    assert weight.shape == (9, 4)
    assert model[1]._parameters["weight"].placements == (Shard(0), Shard(1))
    assert model[0].weight.placements == (Shard(0),), "the model computes on tensor parallelism's"
    assert model[0].weight.shape == (9, 4)


def test_shard_of_agrees_with_what_simple_fsdp_does() -> None:
    whole = dict(tensor_parallel().named_parameters())
    for rank in range(4):
        become(rank, 4)
        model = tensor_parallel()
        shard_tensor_parallel(model)
        for name, parameter in model.named_parameters():
            mine = shard_of(whole[name].detach(), parameter)
            assert torch.equal(mine, parameter.to_local()), (rank, name)


# --- what stays as it was -----------------------------------------------------------------------


def test_names_ties_flags_and_classes_stay() -> None:
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


def test_a_model_on_meta_stays_there_and_can_be_materialised() -> None:
    with torch.device("meta"):
        model = Odd()
    gt.simple_fsdp(model, mesh())
    assert all(p.is_meta for p in model.parameters())
    joint = gt.capture(model.to_empty(device="meta"), loss, (torch.empty(2, 4, device="meta"),))
    assert len(collectives(joint)) > 0
    model.to_empty(device="cpu")
    assert all(isinstance(p, DTensor) and not p.is_meta for p in model.parameters())


def test_the_unsharded_storage_is_let_go() -> None:
    model = gt.simple_fsdp(nn.Linear(8, 9), mesh())
    local = model._parameters["weight"].to_local()
    assert local.untyped_storage().nbytes() == 3 * 8 * 4


def test_a_deep_copy_shares_nothing_but_the_groups() -> None:
    model = gt.simple_fsdp(odd(), mesh())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin._parameters["scale"].to_local().fill_(9)
    assert model._parameters["scale"].to_local() == 3
    assert twin.ten.weight.shape == (10, 4)


# --- reading a parameter ------------------------------------------------------------------------


def test_reading_gathers_and_sharded_parameters_does_not() -> None:
    model = gt.simple_fsdp(odd(), mesh())
    assert not isinstance(model.ten.weight, DTensor)
    assert model.ten.weight.shape == (10, 4)
    with gt.sharded_parameters():
        assert model.ten.weight is model.ten._parameters["weight"]
        model.two.weight = nn.Parameter(model.two.weight.detach())
    assert not isinstance(model.two.weight, DTensor)
    assert isinstance(model.two._parameters["weight"], DTensor)


def test_sharded_parameters_ends_with_an_error_too() -> None:
    model = gt.simple_fsdp(odd(), mesh())
    with pytest.raises(ZeroDivisionError), gt.sharded_parameters():
        _ = 1 / 0
    assert not isinstance(model.ten.weight, DTensor)


def test_a_failing_gather_is_not_mistaken_for_a_missing_attribute() -> None:
    model = gt.simple_fsdp(nn.Linear(4, 4), mesh())
    del model.graph_trainer_sharding
    with pytest.raises(RuntimeError, match="gathering parameter 'weight' failed"):
        _ = model.weight


def captured(model: nn.Module) -> JointGraph:
    return gt.capture(model, loss, (torch.randn(2, 4),))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_roles_say_which_nodes_gather_and_which_reduce(ranks: int) -> None:
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


def kinds(joint: JointGraph, parameter: str) -> list[str]:
    found = [c for c in collectives(joint) if c.parameter == parameter]
    return [f"{c.kind} {len(c.ranks)} {str(c.dtype).removeprefix('torch.')}" for c in found]


def test_what_travels_in_every_mode_and_dtype() -> None:
    policy = gt.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float64)

    def bf16_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x.bfloat16()).mean()

    def capture(mesh: DeviceMesh, mode: Any) -> JointGraph:
        model = gt.simple_fsdp(nn.Linear(4, 6), mesh, mode, mp_policy=policy)
        joint = gt.capture(model, bf16_loss, (torch.randn(2, 4),))
        assert {n: node.meta["val"].dtype for n, node in joint.gradients()} == {
            "weight": torch.float32,
            "bias": torch.float32,
        }
        return joint

    become(0, 6)
    flat, square = init_device_mesh("cpu", (6,)), init_device_mesh("cpu", (2, 3))
    gather, scatter = "all_gather_into_tensor", "reduce_scatter_tensor"
    assert kinds(capture(flat, "fully_shard"), "weight") == [
        f"{gather} 6 bfloat16",
        f"{scatter} 6 float64",
    ]
    assert kinds(capture(square, "hybrid_shard"), "weight") == [
        f"{gather} 3 bfloat16",
        f"{scatter} 3 float64",
        "all_reduce 2 float64",
    ]
    assert kinds(capture(flat, "replicate"), "weight") == ["all_reduce 6 float64"]


def test_every_rank_sends_the_same_number_of_rows() -> None:
    """Else the ranks' collectives would differ and hang."""
    entries = []
    for rank in range(4):
        joint = captured(gt.simple_fsdp(odd(), mesh(4, rank)))
        entries.append([c.entry() for c in collectives(joint)])
    assert entries[0] == entries[1] == entries[2] == entries[3]


@pytest.mark.parametrize(("factor", "divisors"), [(None, {3.0}), (1.0, set()), (8.0, {8.0})])
def test_gradients_are_divided_once(factor: float | None, divisors: set[float]) -> None:
    model = gt.simple_fsdp(nn.Linear(4, 6), mesh(3), gradient_divide_factor=factor)
    joint = captured(model)
    found = [
        n.args[1]
        for n in joint.graph.nodes
        if role_of(n) is Role.REDUCE_GRAD and "div" in str(n.target)
    ]
    assert set(found) == divisors
    assert len(found) == 2 * len(divisors)


def test_modules_that_read_their_parameters_in_unusual_ways() -> None:
    """Lists, dictionaries, parametrizations, attention's own fast path and an LSTM."""

    class Unusual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.several = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(2)])
            self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(5, 4))})
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.lstm = nn.LSTM(4, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.normed(x * sum(self.several)) @ self.named["a"].t() @ self.named["a"]
            return self.lstm(self.attention(x, x, x)[0])[0]

    model = gt.simple_fsdp(Unusual(), mesh(3))
    joint = gt.capture(model, loss, (torch.randn(2, 3, 4),))
    assert joint.signature.parameters_without_grad == ()
    reduced = {c.parameter for c in collectives(joint) if c.role is Role.REDUCE_GRAD}
    assert reduced == {n for n, _ in model.named_parameters()}


# --- refusals -----------------------------------------------------------------------------------


def test_modes_and_meshes_that_do_not_fit() -> None:
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
            gt.simple_fsdp(model, wrong, mode)  # type: ignore[arg-type]
        assert type(model) is nn.Linear


def test_sharding_twice_is_refused_and_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    gt.simple_fsdp(model[1], mesh())
    first = model[0].weight
    with pytest.raises(gt.ConfigError, match=r"module '1' \(Linear\) is sharded already"):
        gt.simple_fsdp(model, mesh())
    assert model[0].weight is first


def test_a_partial_parameter_is_refused_by_name() -> None:
    from torch.distributed.tensor import Partial

    both = _both()
    model = nn.Linear(4, 4)
    tensor = DTensor.from_local(torch.ones(4, 4), both["tp"], [Partial()], run_check=False)
    model.weight = nn.Parameter(tensor)
    with pytest.raises(gt.ConfigError, match="'weight' is a partial DTensor"):
        gt.simple_fsdp(model, both["dp"])


def _both() -> DeviceMesh:
    become(0, 4)
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def test_a_replicated_tensor_parallel_parameter() -> None:
    both = _both()
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), both["tp"], [Replicate()]))
    gt.simple_fsdp(model, both["dp"])
    assert model._parameters["weight"].placements == (Shard(0), Replicate())
    assert model.weight.placements == (Replicate(),)
