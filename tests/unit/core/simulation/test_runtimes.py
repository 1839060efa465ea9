"""How plain torchtitan differs from the joint graph, one cause at a time."""

from collections import defaultdict

import pytest
import torch

from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.analysis.fsdp_copies import fsdp_copies
from graph_trainer.core.graph.annotations import Role, block_of, module_of, role_of
from graph_trainer.core.sharding.simple_fsdp import MixedPrecisionPolicy
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.simulation.op_costs import costs
from graph_trainer.core.simulation.runtimes import GRAPH_TRAINER, TORCHTITAN, mark_saved
from graph_trainer.core.simulation.simulate import OtherMemory, simulate
from graph_trainer.core.simulation.timeline import COMPUTE, COPIES_IN, HOST
from graph_trainer.testing import Builder
from tests.unit.core.passes.bucketing.bucket_graphs import bucket
from tests.unit.graphs import BACKWARD, aten, captured_decoder

H100 = load_hardware("h100-sxm")


def test_only_nodes_of_layers_are_compiled():
    joint = captured_decoder(layers=2)
    ours = GRAPH_TRAINER.fusion(joint, compiles=True).group
    theirs = TORCHTITAN.fusion(joint, compiles=True).group
    assert set(theirs) < set(ours)
    compiled = [node for node in theirs if role_of(node) is None]
    assert compiled and all(block_of(module_of(node)) is not None for node in compiled)
    assert not GRAPH_TRAINER.fusion(joint, compiles=False).group


def test_a_saved_tensor_is_alive_until_the_backward_of_its_layer_ends():
    builder = Builder()
    x = builder.input("x", 8, 8)
    w = builder.parameter("layers.0.w", 8, 8)
    product = builder.call(aten.mm.default, x, w, module="layers.0")
    builder.call(aten.detach.default, product, module="layers.0")
    loss = builder.call(aten.sum.default, product)
    other = builder.call(aten.mm.default, x, w, module="layers.0", phase=BACKWARD)
    builder.call(aten.neg.default, x, phase=BACKWARD, module="norm")
    joint = builder.joint(loss, layers__0__w=other)
    assert TORCHTITAN.kept_until(joint) == {}
    mark_saved(joint)
    (kept,) = TORCHTITAN.kept_until(joint).items()
    assert kept == ((product, 0), list(joint.graph.nodes).index(other))
    assert GRAPH_TRAINER.kept_until(joint) == {}
    ours, theirs = (simulate(joint, H100, runtime=r).memory for r in (GRAPH_TRAINER, TORCHTITAN))
    place = list(joint.graph.nodes).index(other)
    assert theirs.total[place] - ours.total[place] == 8 * 8 * 4


def test_layers_with_one_index_in_two_lists_are_two():
    builder = Builder()
    x = builder.input("x", 8, 8)
    backward = {}
    weights = {each: builder.parameter(f"{each}.w", 8, 8) for each in ("layers.0", "mtp_layers.0")}
    for layer, w in weights.items():
        x = builder.call(aten.mm.default, x, w, module=layer)
        builder.call(aten.detach.default, x, module=layer)
    loss = builder.call(aten.sum.default, x)
    for layer in ("mtp_layers.0", "layers.0"):
        backward[layer] = builder.call(aten.neg.default, x, phase=BACKWARD, module=layer)
    gradients = {f"{layer.replace('.', '__')}__w": node for layer, node in backward.items()}
    joint = builder.joint(loss, **gradients)
    mark_saved(joint)
    ends = [list(joint.graph.nodes).index(node) for node in backward.values()]
    assert sorted(TORCHTITAN.kept_until(joint).values()) == ends


@pytest.mark.parametrize("compiles", [False, True])
def test_fsdp2_copies_a_bucket_by_one_kernel_that_casts_too(compiles):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    joint = bucket(captured_decoder(layers=2, fsdp={"mp_policy": policy}))
    copies = fsdp_copies(joint.graph)
    fusion = TORCHTITAN.fusion(joint, compiles)
    cost = costs(joint, H100, fusion)
    of_model = {group for node, group in fusion.group.items() if role_of(node) is None}
    moved = {}
    for name, side in zip(("before", "after"), copies, strict=True):
        kernels = defaultdict(set)
        for node in side:
            if node in fusion.group:
                kernels[side[node]].add(fusion.group[node])
                moved[name, side[node]] = moved.get((name, side[node]), 0) + cost[node].bytes
        assert all(len(groups) == 1 for groups in kernels.values())
        assert of_model.isdisjoint(set().union(*kernels.values()))
    buckets = [c for c in collectives(joint) if len(c.parameters) > 1]
    reduced = [c for c in buckets if c.role is Role.REDUCE_GRAD]
    gathered = [c for c in buckets if c.role is Role.UNSHARD]
    assert reduced and gathered
    # gradients in bfloat16 are read and written in float32, gathered parameters read and written
    assert [moved["before", c.node] for c in reduced] == [c.input_bytes * 1.5 for c in reduced]
    assert [moved["after", c.node] for c in gathered] == [c.output_bytes * 2 for c in gathered]


@pytest.mark.parametrize("runtime", [GRAPH_TRAINER, TORCHTITAN], ids=lambda r: r.name)
def test_what_a_gpu_needs_is_no_less_than_what_is_alive(runtime):
    simulation = simulate(captured_decoder(layers=2), H100, OtherMemory(64), runtime)
    assert simulation.need().allocated >= simulation.memory.peak_bytes
    on_cpu = simulate(captured_decoder(layers=2), load_hardware("cpu"), OtherMemory(64), runtime)
    assert on_cpu.need().total == on_cpu.memory.peak_bytes


@pytest.mark.parametrize(("runtime", "beside"), [(GRAPH_TRAINER, False), (TORCHTITAN, True)])
def test_only_fsdp2_copies_into_gathers_on_a_stream_of_its_own(runtime, beside):
    """Copies out of gathers, and into reductions, are of compute for both."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    joint = captured_decoder(layers=2, fsdp={"mp_policy": policy})
    before, after = fsdp_copies(joint.graph)
    simulation = simulate(joint, H100, runtime=runtime)
    streams = defaultdict(set)
    for event in simulation.timeline.events:
        if event.stream != HOST and event.node not in {c.node for c in simulation.collectives}:
            if event.node in before:
                streams[role_of(before[event.node])].add(event.stream)
            elif event.node in after:
                streams["after"].add(event.stream)
    assert streams[Role.UNSHARD] == {COPIES_IN if beside else COMPUTE}
    assert streams["after"] | streams[Role.REDUCE_GRAD] <= {COMPUTE}
