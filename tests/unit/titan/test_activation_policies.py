"""Activation policies on the graph keep what torchtitan's checkpoint wrappers keep."""

import copy
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

import graph_trainer as gt
from graph_trainer.core.analysis.blocks import forward_block_of
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.analysis.unshard_chains import unshard_chains
from graph_trainer.core.graph.annotations import is_backward, module_of, recompute_policy
from graph_trainer.core.graph.ops import storage_roots
from graph_trainer.core.names import clean_fqn, without_layer
from graph_trainer.core.ordering.agreement import OneRank
from graph_trainer.core.passes.context import PassContext, RunSettings
from graph_trainer.core.passes.pipeline import run_passes
from graph_trainer.core.passes.tag_activations import TagActivationsOptions, tag_activations
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.simulation.runtimes import GRAPH_TRAINER, TORCHTITAN
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.planner.plan import make_plan
from graph_trainer.titan.activation_policies import LayersAC, activation_settings
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.config.write_toml import config_to_toml

from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # isort: skip


class WrappedFull(FullAC):
    """A policy of a user's own: applied to the modules, and traced."""

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        pass


class WrappedSelective(SelectiveAC):
    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass


WRAPPED = {"full": WrappedFull, "selective": WrappedSelective}


def after_passes(policy, tensor_parallel, *, wrapped=False, regather="always"):
    """The graph of a rank with collectives that are neither merged nor moved."""
    flags = ["--parallelism.tensor_parallel_degree", str(tensor_parallel)]
    flags += ["--activation_checkpoint.type", policy, "--training.seq_len", "64"]
    if policy in WRAPPED and not wrapped:  # torchtitan's wrappers decide about gathers themselves
        flags += ["--compile.tag_activations.regather", regather]
    flags += ["--compile.disable_passes", "bucket_collectives,schedule_overlap"]
    config = load_config(flags, world_size=4)
    if wrapped:
        config.activation_checkpoint = WRAPPED[policy].Config()
    run = FakeRank(config, 4, 0, "cuda")
    joint = run.capture()
    run_passes(joint, run.pass_config(), agreement=OneRank())
    return joint


def kept(policy, tensor_parallel, *, wrapped=False):
    """Count what forward allocates in blocks and backward reads: (module, op, which result).

    With gathers of tensor parallelism repeated, as torchtitan does.
    """
    joint = after_passes(policy, tensor_parallel, wrapped=wrapped)
    parameters = {node for chain in unshard_chains(joint) for node in chain.nodes}
    roots = storage_roots(joint.graph)
    backward = filter(is_backward, joint.graph.nodes)
    sources = {n for node in backward for n in node.all_input_nodes if not is_backward(n)}
    read = {roots[n] for n in sources - parameters}
    return Counter(
        (without_layer(module_of(node)), str(node.target), index)
        for node, index in read
        if node.op == "call_function" and ".layers." in f".{module_of(node)}"
    )


OUTPUTS = {("layers.*", "aten.add.Tensor", 0): 6}  # of each of six blocks
RESIDUAL = {("layers.*", "aten.add.Tensor", 0): 6}
SCATTERED = {
    (f"layers.*.{name}", "_c10d_functional.reduce_scatter_tensor.default", 0): 6
    for name in ("attention.wo", "feed_forward.w2")
}


@pytest.mark.full
def test_full_keeps_what_torchtitan_keeps():
    ours, theirs = (kept("full", 1, wrapped=w) for w in (False, True))
    assert ours == theirs == OUTPUTS


@pytest.mark.full
def test_selective_keeps_what_torchtitan_keeps_and_the_first_residual():
    """The residual holds what the reduce-scatter before it gave; the block's output the other."""
    ours, theirs = (kept("selective", 2, wrapped=w) for w in (False, True))
    assert ours - theirs == RESIDUAL
    assert theirs - ours == SCATTERED
    assert sum(theirs.values()) > 12


@pytest.mark.full
def test_gathers_of_tensor_parallelism_are_repeated_where_asked_for():
    """Two a block, of what the norms give; backward's own gathers are there in any case."""

    def gathers(policy, regather):
        joint = after_passes(policy, 2, regather=regather)
        found = (c for c in collectives(joint) if c.role is None and c.phase == "backward")
        return sum(c.kind == "all_gather_into_tensor" for c in found)

    never = gathers("selective", "never")
    assert gathers("selective", "policy") == gathers("full", "never") == never
    assert gathers("selective", "always") == gathers("full", "policy") == never + 2 * 6


def test_a_run_by_torchtitan_is_planned_with_its_own_wrappers():
    """What checkpoint wrappers hold beside what backward reads counts there."""
    flags = ["--activation_checkpoint.type", "selective", "--training.seq_len", "64"]
    config = load_config(flags, world_size=4)
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    own = copy.copy(config)
    own.activation_checkpoint = WrappedSelective.Config()
    hardware = load_hardware("h100-sxm")

    def peak(config, runtime):
        return make_plan(config, 4, hardware, runtime=runtime, every_pass=False).peak_bytes

    assert peak(config, TORCHTITAN) == peak(own, TORCHTITAN)
    assert peak(config, GRAPH_TRAINER) != peak(own, GRAPH_TRAINER)


def every_nth(layers, every):
    """The rule of torchtitan's selective_ac_option = "n": a count that is 1 at the first block."""
    return [number for number, count in enumerate(range(1, layers + 1)) if count % every == 0]


@pytest.mark.parametrize(("layers", "every"), [(5, 1), (5, 2), (32, 3)])
def test_layers_chooses_every_nth_block_counted_from_one(layers, every):
    """The graph's blocks, and the modules that torchtitan's loop and plans of it wrap."""

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(layers))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).relu().sin()
            return x

    model = Blocks()
    joint = gt.capture(model, lambda model, x: model(x).sum(), (torch.ones(2, 2),))
    settings = {"activation_policy": "layers", "recompute_every_nth_block": every}
    tag_activations.function(
        joint, TagActivationsOptions(), PassContext(settings=RunSettings(**settings))
    )
    tags = ((forward_block_of(n), recompute_policy(n)) for n in joint.graph.nodes)
    tagged = {block for block, policy in tags if block and policy is not None}
    LayersAC(LayersAC.Config(layers=every)).apply(model)
    wrapped = [i for i, block in enumerate(model.layers) if isinstance(block, CheckpointWrapper)]
    chosen = every_nth(layers, every)
    assert wrapped == chosen == sorted(int(block.split(".")[1]) for block in tagged)
    assert (layers, every) != (32, 3) or (len(chosen), chosen[0]) == (10, 2)


def initial_values(policy, *every):
    """The whole parameters of five blocks in torchtitan's loop, by name."""
    flags = ["--compile.mode", "eager", "--activation_checkpoint.type", policy, *every]
    config = load_config(flags, world_size=1)
    config.model_spec.model.layers = config.model_spec.model.layers[:5]
    model = FakeRank(config, 1).model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_states(buffer_device="cpu")
    wrapped = [isinstance(block, CheckpointWrapper) for block in model.layers.values()]
    return wrapped, {clean_fqn(n): p.full_tensor() for n, p in model.named_parameters()}


def test_initial_values_do_not_depend_on_the_blocks_that_are_wrapped():
    _, expected = initial_values("none")
    for every in (2, 3):
        wrapped, values = initial_values("layers", "--activation_checkpoint.layers", str(every))
        assert [n for n, is_wrapped in enumerate(wrapped) if is_wrapped] == every_nth(5, every)
        assert values.keys() == expected.keys()
        assert all(torch.equal(values[name], expected[name]) for name in expected)


def test_a_file_chooses_every_nth_block(tmp_path):
    path = tmp_path / "layers.toml"
    section = '[activation_checkpoint]\ntype = "layers"\n'
    for text, every in ((section, 2), (f"{section}layers = 3\n", 3)):
        path.write_text(f'base = "llama3_debugmodel"\n{text}')
        config = load_config(["--config", str(path)])
        expected = {"activation_policy": "layers", "recompute_every_nth_block": every}
        assert activation_settings(config.activation_checkpoint) == expected
        path.write_text(config_to_toml(config))
        assert load_config(["--config", str(path)]).activation_checkpoint.layers == every


def test_the_section_names_the_policy():
    assert activation_settings(None) == {} == activation_settings(WrappedFull.Config())
    assert activation_settings(FullAC.Config()) == {"activation_policy": "full"}
    chosen = SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=["w2"])
    assert activation_settings(chosen) == {
        "activation_policy": "selective",
        "recompute_matmuls_of": ("w2",),
    }
