"""A graph that was written and read is the captured one, and reading runs no code of the bytes."""

import os
import pickle
import zlib

import pytest
import torch

from graph_trainer.core.graph.serialize import _UNREAD, graph_from_bytes, graph_to_bytes
from graph_trainer.core.torch_private import FakeTensorMode
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.titan.config.load import load_config

MESHES = {
    "hsdp_tp": ("--parallelism.data_parallel_replicate_degree", "2")
    + ("--parallelism.tensor_parallel_degree", "2"),
    "chunked": ("--loss.type", "chunked_cross_entropy"),
}


def described(value, storages):
    """A value of a node; of a tensor all that a fake tensor has, and which memory it shares."""
    if isinstance(value, list | tuple):
        return [described(item, storages) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    storage = value.untyped_storage()
    shared = storages.setdefault(storage._cdata, len(storages))
    layout = (value.shape, value.stride(), value.storage_offset(), storage.nbytes(), shared)
    return (*layout, value.dtype, value.device, value.requires_grad, value.is_conj())


@pytest.mark.parametrize("mesh", MESHES)
def test_a_graph_that_was_read_is_the_captured_one(mesh):
    config = load_config(["--training.seq_len", "64", *MESHES[mesh]], world_size=8)
    config.model_spec.model.layers = config.model_spec.model.layers[:4]
    run = FakeRank(config, 8, 3)
    joint = run.capture()
    content = graph_to_bytes(joint, run.meshes)
    reader = FakeRank(config, 8, 3)
    read = graph_from_bytes(content, FakeTensorMode(), reader.meshes)
    assert read.signature == joint.signature and read.model_type == joint.model_type
    meshes = [value for spec in read.signature.inputs for _, value in spec.layout.constants]
    assert meshes and all(any(mesh is known for known in reader.meshes) for mesh in meshes)
    storages, of_read, conjugated = {}, {}, 0
    for one, two in zip(joint.graph.nodes, read.graph.nodes, strict=True):
        assert (one.op, one.name, one.target) == (two.op, two.name, two.target)
        assert repr((one.args, one.kwargs)) == repr((two.args, two.kwargs))
        wanted = {k: described(v, storages) for k, v in one.meta.items() if k not in _UNREAD}
        assert wanted == {k: described(v, of_read) for k, v in two.meta.items()}, one
        value = one.meta.get("val")
        conjugated += isinstance(value, torch.Tensor) and value.is_conj()
    assert conjugated if mesh == "hsdp_tp" else True, "nothing shows that conjugates are kept"


_MODULE = b"cgraph_trainer.core.graph.serialize\n"


class Evil:
    def __reduce__(self):
        return os.system, ("exit 7",)


@pytest.mark.parametrize(
    "content, message",
    [
        (pickle.dumps(Evil()), "posix.system is not part"),
        (_MODULE + b"_Reader.op\n(Vaten\nVadd\nV__class__\ntR.", "OpOverloadPacket'> is not part"),
        (_MODULE + b"_Reader.constant\n(Vload\ntR.", "<function load .* is not part"),
    ],
)
def test_nothing_but_parts_of_graphs_is_made_of_bytes(content, message):
    with pytest.raises(pickle.UnpicklingError, match=message):
        graph_from_bytes(zlib.compress(content), FakeTensorMode(), [])
