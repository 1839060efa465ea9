"""One seed gives one model, whatever the mesh."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import graph_trainer as gt
from graph_trainer.core.sharding.initialize import SameOnAnyMesh
from graph_trainer.core.sharding.simple_fsdp import shard_of
from graph_trainer.testing import become


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 9)
        self.down = nn.Linear(9, 5)
        self.norm = nn.LayerNorm(5)
        self.scale = nn.Parameter(torch.zeros(()))
        self.register_buffer("noise", torch.zeros(3))

    def reset(self):
        # trunc_normal_ asks all ranks whether to draw again: see the integration tests
        nn.init.normal_(self.up.weight, std=0.5)
        nn.init.uniform_(self.up.bias, -1, 1)
        nn.init.kaiming_uniform_(self.down.weight)
        nn.init.normal_(self.down.bias)
        nn.init.ones_(self.norm.weight)
        nn.init.zeros_(self.norm.bias)
        nn.init.normal_(self.scale)
        with torch.no_grad():
            self.noise.normal_()
            self.up.weight.add_(0.1 * torch.randn_like(self.up.weight))


def one_rank():
    torch.manual_seed(5)
    model = Net()
    torch.manual_seed(5)
    model.reset()
    return {n: t.detach() for n, t in model.state_dict().items()}


def fully_shard(ranks):
    return lambda m: gt.simple_fsdp(m, init_device_mesh("cpu", (ranks,)))


def hybrid(model):
    gt.simple_fsdp(model, init_device_mesh("cpu", (2, 2)), "hybrid_shard")


def tensor_parallel(model):
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    parallelize_module(model, both["tp"], plan)
    gt.simple_fsdp(model, both["dp"])


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize(
    ("ranks", "shard"),
    [
        (1, fully_shard(1)),
        (3, fully_shard(3)),
        (8, fully_shard(8)),
        (4, hybrid),
        (4, tensor_parallel),
    ],
    ids=["1", "3", "8", "2x2 hybrid", "2x2 with tensor parallelism"],
)
def test_shards_are_those_of_one_rank(ranks, shard, on_meta):
    """shard_of cuts the one-rank model; test_simple_fsdp holds it to assemble the whole."""
    whole = one_rank()
    for rank in range(ranks):
        become(rank, ranks)
        with torch.device("meta" if on_meta else "cpu"):
            model = Net()
        shard(model)
        model.to_empty(device="cpu")
        torch.manual_seed(5)
        with gt.sharded_parameters(), SameOnAnyMesh():
            model.reset()
        after = torch.get_rng_state()
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            assert torch.equal(parameter.to_local(), shard_of(whole[name], parameter)), (rank, name)
            assert (
                not parameter.to_local().numel()
                or name.startswith("norm.bias")
                or (parameter.to_local().any())
            )
        assert torch.equal(model.noise, whole["noise"])
        one_rank()
        assert torch.equal(torch.get_rng_state(), after), "every rank drew everything"


def test_random_tensors_like_a_parameter_leave_it_alone():
    become(1, 2)
    model = gt.simple_fsdp(nn.Linear(4, 6), init_device_mesh("cpu", (2,)))
    weight = model._parameters["weight"]
    assert isinstance(weight, DTensor)
    before = weight.to_local().clone()
    torch.manual_seed(0)
    with SameOnAnyMesh(), torch.no_grad():
        noise = torch.rand_like(weight)
    assert torch.equal(weight.to_local(), before)
    assert isinstance(noise, DTensor)
    torch.manual_seed(0)
    assert torch.equal(noise.to_local(), torch.rand(6, 4)[3:])


def test_ops_that_cannot_be_the_same_on_every_mesh_are_refused():
    become(0, 2)
    model = gt.simple_fsdp(nn.Linear(4, 6), init_device_mesh("cpu", (2,)))
    weight = model._parameters["weight"]
    with SameOnAnyMesh(), torch.no_grad():
        with pytest.raises(gt.ConfigError, match="computes from the values"):
            torch.bernoulli(weight)
        with pytest.raises(gt.ConfigError, match="from another sharded tensor"):
            weight.bernoulli_(weight)


def test_plain_tensors_are_none_of_its_business():
    torch.manual_seed(1)
    expected = torch.randn(3), torch.rand(2)
    torch.manual_seed(1)
    with SameOnAnyMesh():
        found = torch.randn(3), torch.rand(2)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
