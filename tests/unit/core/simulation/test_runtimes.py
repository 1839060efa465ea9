"""How plain torchtitan differs from the joint graph, one cause at a time."""

import pytest

from graph_trainer.core.graph.annotations import block_of, module_of
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.simulation.runtimes import GRAPH_TRAINER, TORCHTITAN, mark_saved
from graph_trainer.core.simulation.simulate import OtherMemory, simulate
from graph_trainer.core.simulation.timeline import COMPUTE, HOST
from graph_trainer.testing import Builder
from tests.unit.graphs import BACKWARD, aten, captured_decoder

H100 = load_hardware("h100-sxm")


def test_only_nodes_of_layers_are_compiled():
    joint = captured_decoder(layers=2)
    ours = GRAPH_TRAINER.fusion(joint, compiles=True).group
    theirs = TORCHTITAN.fusion(joint, compiles=True).group
    assert set(theirs) < set(ours)
    assert all(block_of(module_of(node)) is not None for node in theirs)
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


def test_copies_take_time_on_both_streams_and_only_in_torchtitan():
    joint = captured_decoder(layers=2)
    ours, theirs = (simulate(joint, H100, runtime=r).timeline for r in (GRAPH_TRAINER, TORCHTITAN))
    assert theirs.busy[COMPUTE] > ours.busy[COMPUTE]
    (group,) = ours.busy.keys() - {COMPUTE, HOST}
    assert theirs.busy[group] > ours.busy[group]
    assert theirs.step_seconds > ours.step_seconds


@pytest.mark.parametrize("runtime", [GRAPH_TRAINER, TORCHTITAN], ids=lambda r: r.name)
def test_what_a_gpu_needs_is_no_less_than_what_is_alive(runtime):
    simulation = simulate(captured_decoder(layers=2), H100, OtherMemory(64), runtime)
    assert simulation.need().allocated >= simulation.memory.peak_bytes
    on_cpu = simulate(captured_decoder(layers=2), load_hardware("cpu"), OtherMemory(64), runtime)
    assert on_cpu.need().total == on_cpu.memory.peak_bytes
