"""Llama 3 8B with weights split over 16 x 8 ranks: every pair of gathers becomes one gather."""

import dataclasses

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils.parametrize import register_parametrization

import graph_trainer as gt
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.graph.annotations import Phase, Role
from graph_trainer.core.graph.joint_graph import InputKind
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.titan.config.load import load_config

LAYERS = 2
FLAGS = [
    *("--module", "graph_trainer.llama3", "--config", "8b", "--loss.type", "cross_entropy"),
    *("--parallelism.data_parallel_shard_degree", "128"),
    *("--parallelism.tensor_parallel_degree", "1"),
    *("--training.seq_len", "64", "--training.local_batch_size", "1"),
]


class Gathered(nn.Module):
    """What a module reads of a parameter: all of it."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh

    def forward(self, shard):
        whole = shard.redistribute(self.mesh, [Replicate(), Replicate()])
        return whole.to_local(grad_placements=[Partial(), Partial()])


def split_over_two_axes(model, **_):
    mesh = init_device_mesh("cpu", (16, 8))
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            shards = distribute_tensor(parameter.detach(), mesh, [Shard(0)] * 2, src_data_rank=None)
            setattr(module, name, nn.Parameter(shards))
            register_parametrization(module, name, Gathered(mesh), unsafe=True)
    return model


def test_every_pair_fuses_in_forward_and_in_backward():
    config = load_config(FLAGS, world_size=128)
    spec = config.model_spec
    spec.model.layers = spec.model.layers[:LAYERS]
    config.model_spec = dataclasses.replace(spec, parallelize_fn=split_over_two_axes)
    joint = FakeRank(config, 128, 77, "cpu").capture()
    always = gt.PassConfig(reshard_after_forward="always")
    without = dataclasses.replace(always, disable_passes=["fuse_chained_all_gathers"])
    chained = gt.run_passes(copy_graph(joint), without)
    fused = gt.run_passes(joint, always)
    parameters = len(list(joint.inputs_of(InputKind.PARAMETER)))
    assert parameters == 7 * LAYERS + 3
    # backward looks up nothing in the embedding
    for phase, pairs in ((Phase.FORWARD, parameters), (Phase.BACKWARD, parameters - 1)):
        assert chained.last.count("all_gather_into_tensor", phase) == 2 * pairs
        assert fused.last.count("all_gather_into_tensor", phase) == pairs
    unshards = [c for c in collectives(joint) if c.role is Role.UNSHARD]
    assert {c.ranks for c in unshards} == {tuple(range(128))}
