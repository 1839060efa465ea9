"""Initial values of torchtitan's models: one rank's on every mesh, drawn without communication."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from graph_trainer.core.sharding.simple_fsdp import shard_of
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.titan.config.load import load_config
from tests.layers import with_few_layers

MIXTURE = ["--module", "graph_trainer.qwen3", "--config", "debugmodel_moe"]


def initialized(flags, ranks, rank=0):
    """A rank's model, and the collectives that its initialization issued."""
    config = load_config(["--compile.mode", "eager", *flags], world_size=ranks)
    with_few_layers(config)
    model = FakeRank(config, ranks, rank).model.to_empty(device="cpu")
    torch.manual_seed(0)
    with CommDebugMode() as communication:
        model.init_states(buffer_device="cpu")
    return model, set(communication.get_comm_counts())


@pytest.mark.parametrize("module", [[], MIXTURE], ids=["llama3", "qwen3_moe"])
def test_every_rank_draws_its_part_of_one_ranks_values(module):
    model, _ = initialized(module, 1)
    whole = {name: p.full_tensor() for name, p in model.named_parameters()}
    assert all(p.any() for p in whole.values())
    if not module:
        head = whole["lm_head.weight"]
        # three standard deviations: of so many numbers some were drawn again
        assert 2.5 < (head.abs().max() / head.std()).item() <= 3.1
    for rank in (0, 3):
        sharded = ["--parallelism.tensor_parallel_degree", "2"]
        model, collectives = initialized(module + sharded, 4, rank)
        # torchtitan's, of the cache of the rotary embedding
        assert collectives <= {torch.ops.c10d.broadcast_}
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            assert torch.equal(parameter.to_local(), shard_of(whole[name], parameter)), name


def test_an_initializer_that_leaves_a_parameter_as_it_is_gets_the_parameter():
    config = load_config(["--compile.mode", "eager"], world_size=2)
    with_few_layers(config)
    model = FakeRank(config, 2, 0).model.to_empty(device="cpu")
    weight = dict(model.named_parameters())["norm.weight"]
    nn.init.constant_(weight, 3.0)
    model.norm._param_init = {"weight": lambda parameter: None}
    model.init_states(buffer_device="cpu")
    assert isinstance(weight, DTensor) and (weight.to_local() == 3).all()
