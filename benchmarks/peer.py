"""The shim through which benchmarks start torchtitan.experiments.graph_trainer 0.3.0.

The peer's own trainer, tracer and passes run as they are. Chosen here are its configuration, what
it asks of a GPU that is not there, and, through the registry it has for that, which activations
it keeps: all, as ours does, so that both run the same step. Its default policy recomputes
activations too, and refuses to on CPU, where the attention op counts as random.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from graph_trainer.core.graph.annotations import (
    Phase,
    annotate_node,
    annotation,
    is_backward,
    module_of,
    parameter_of,
    phase_of,
    value_of,
)
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.signature import InputKind
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.titan.device import setup

setup()  # before any torchtitan import

from torchtitan.distributed.fsdp import (  # noqa: E402  # isort: skip
    get_fsdp_reshard_after_forward_policy,
)
from torchtitan.experiments.graph_trainer.configs import (  # noqa: E402  # isort: skip
    GraphTrainerCompileConfig,
)
from torchtitan.experiments.graph_trainer.llama3 import model_registry  # noqa: E402  # isort: skip
from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer  # noqa: E402  # isort: skip
from torchtitan.experiments.graph_trainer.memory_policy import tag_sac_policy  # noqa: E402  # isort: skip
from torchtitan.experiments.graph_trainer.passes import (  # noqa: E402  # isort: skip
    apply_graph_passes,
    construct_default_graph_passes,
)
from torchtitan.experiments.graph_trainer.registry import (  # noqa: E402  # isort: skip
    MEMORY_POLICY_REGISTRY,
)
from torchtitan.experiments.graph_trainer.trainer import (  # noqa: E402  # isort: skip
    GraphTrainer,
    make_fwd_bwd_step,
)

# An H100's. They decide nothing: the peer buckets by its own plan, but its scheduler asks for
# them when it is made.
_GIGABYTES_PER_SECOND = 3350
_TERAFLOPS = 989.0

_KEEP_ACTIVATIONS = "keep_activations"


def config_of_peer(config: Any) -> GraphTrainer.Config:
    """The peer's config with everything that `config`, one of ours, says of the run."""
    ours = {f.name: getattr(config, f.name) for f in fields(GraphTrainer.Config)}
    ours["model_spec"] = model_registry(config.model_spec.flavor, attn_backend="sdpa")
    ours["compile"] = GraphTrainerCompileConfig(
        enable=True, memory_policy=_KEEP_ACTIVATIONS, disable_passes=["cudagraph_pass"]
    )
    return GraphTrainer.Config(**ours)


@contextlib.contextmanager
def peer_on_cpu() -> Iterator[None]:
    """Inside, the peer's passes run on a machine without a GPU."""
    room = "torch.utils._runtime_estimation"
    with (
        mock.patch(f"{room}.get_gpu_dram_gbps", lambda: _GIGABYTES_PER_SECOND),
        mock.patch(f"{room}.get_device_tflops", lambda dtype: _TERAFLOPS),
        mock.patch.dict(MEMORY_POLICY_REGISTRY, {_KEEP_ACTIVATIONS: _keep_activations}),
    ):
        yield


def trace_of_peer(prepared: Any) -> Any:
    """The peer's trace of a prepared model (see fake_llama)."""
    step = make_fwd_bwd_step(prepared.model, prepared.loss_fn)
    *batch, positions = prepared.batch()
    return minimal_fx_tracer(step, module=prepared.model)(*batch, {"positions": positions})


def run_passes_of_peer(traced: Any, prepared: Any) -> fx.GraphModule:
    """The peer's default passes on its trace."""
    dims, config = prepared.parallel_dims, prepared.config
    passes = construct_default_graph_passes(traced, config, parallel_dims=dims)
    return apply_graph_passes(
        traced.gm, traced.example_inputs, passes, compile_config=config.compile
    )


def passes_of_peer_on(joint: JointGraph, config: Any, parallel_dims: Any) -> JointGraph:
    """The peer's default passes on a copy of a graph that ours captured.

    They are given what they read and our capture writes elsewhere: the module of each node, the
    mark of backward, and the parameters' names. What they make gets back what ours read: they
    copy the annotations of the first collective of a bucket, and the phase follows their mark.

    Arguments:
        joint: as captured, before any pass.
        config: ours; the reshard policy and the number of layers are read from it.
    """
    joint = copy_graph(joint)
    for node in joint.graph.nodes:
        if (module := module_of(node)) is not None:
            # the peer looks a parameter's gather and reduction up by the parameter's module
            owner = (parameter_of(node) or "").rpartition(".")[0]
            node.meta["custom"] = {**node.meta["custom"], "module_fqn": owner or module}
        if is_backward(node):
            node.meta["autograd_backward"] = True
    peers = config_of_peer(config)
    peers.model_spec.model.layers = config.model_spec.model.layers
    states = [
        spec.name
        for kind in (InputKind.PARAMETER, InputKind.BUFFER)
        for spec, _ in joint.inputs_of(kind)
    ]
    traced = SimpleNamespace(
        gm=joint.graph_module,
        example_inputs=tuple(value_of(node) for node in joint.placeholders()),
        state_fqns=states,
        num_static_inputs=len(states),
        tensor_input_indices=list(range(len(joint.placeholders()))),
    )
    prepared = SimpleNamespace(config=peers, parallel_dims=parallel_dims)
    with peer_on_cpu():
        joint.graph_module = run_passes_of_peer(traced, prepared)
    for node in joint.graph.nodes:
        if node.meta.get("autograd_backward") and phase_of(node) is not Phase.BACKWARD:
            annotate_node(node, annotation(phase=Phase.BACKWARD))
    return joint


def _keep_activations(gm: fx.GraphModule, *, config: Any) -> fx.GraphModule:
    """Keep every activation; gather parameters again where the reshard policy says so."""
    reshard = get_fsdp_reshard_after_forward_policy(
        config.parallelism.fsdp_reshard_after_forward,
        pp_enabled=config.parallelism.pipeline_parallel_degree > 1,
    )
    gathered: set[fx.Node] = set()
    for node in gm.graph.nodes:
        inputs = node.all_input_nodes
        if len(inputs) == 1 and (inputs[0].op == "placeholder" or inputs[0] in gathered):
            gathered.add(node)

    def policy(node: fx.Node) -> CheckpointPolicy:
        again = reshard and node in gathered
        return CheckpointPolicy.MUST_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE

    return tag_sac_policy(gm, policy_fn=policy)
