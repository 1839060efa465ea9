"""What fuse_chained_all_gathers and eliminate_round_trips find in a small Llama of torchtitan's."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize

import graph_trainer as gt
from graph_trainer.core.graph.annotations import local_slice_group
from graph_trainer.core.ordering.agreement import OneRank
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.testing import become, mean_square
from graph_trainer.titan.config.load import load_config
from tests.unit.graphs import BACKWARD, FORWARD, unshards

PASSES = ["normalize_views", "eliminate_dead_code", "eliminate_round_trips"]


def config(*flags):
    found = load_config(["--training.seq_len", "64", *flags], world_size=4)
    found.model_spec.model.layers = found.model_spec.model.layers[:1]
    return found


class Whole(nn.Module):
    """Gathers a weight that is split over both axes of a mesh, the inner axis first."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh

    def forward(self, weight):
        whole = weight.redistribute(self.mesh, [Replicate()] * 2)
        return whole.to_local(grad_placements=[Partial()] * 2)


def llama_on_two_axes():
    become(0, 4)
    mesh = init_device_mesh("cpu", (2, 2))
    made = config().model_spec.model
    with torch.device("meta"):
        model = made.build()
        tokens = torch.zeros(1, 8, dtype=torch.int64)
    for module in list(model.modules()):
        for name, weight in list(module.named_parameters(recurse=False)):
            split = distribute_tensor(weight.detach(), mesh, [Shard(0)] * 2, src_data_rank=None)
            setattr(module, name, nn.Parameter(split))
            parametrize.register_parametrization(module, name, Whole(mesh), unsafe=True)
    return gt.capture(model, mean_square, (tokens,), meta_as="cpu")


@pytest.mark.full
def test_every_weight_that_two_axes_split_is_gathered_at_once():
    count = {}
    for off in (["fuse_chained_all_gathers"], []):
        joint = llama_on_two_axes()
        off += ["bucket_collectives", "schedule_overlap"]
        gt.run_passes(joint, gt.PassConfig(reshard_after_forward="always", disable_passes=off))
        count[len(off)] = [len(unshards(joint, phase)) for phase in (FORWARD, BACKWARD)]
    assert min(count[2]) > 6 and count[3] == [2 * number for number in count[2]]


@pytest.mark.full
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_llama_of_the_trainer_has_neither(replicas):
    """As docs/communication.md says: the passes are for models that redistribute by themselves."""
    flags = ["--parallelism.tensor_parallel_degree", "2"]
    flags += ["--parallelism.data_parallel_replicate_degree", str(replicas)]
    joint = FakeRank(config(*flags), 4).capture()
    assert not any(local_slice_group(node) for node in joint.graph.nodes)
    passes = [*PASSES, "fuse_chained_all_gathers"]
    rows = gt.run_passes(joint, gt.PassConfig(passes=passes), agreement=OneRank()).rows
    assert not any(row.changed for row in rows[-2:])
