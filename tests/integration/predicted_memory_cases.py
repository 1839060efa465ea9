"""Peak memory of a training step as predicted and as the allocator tells it, on these ranks.

test_predicted_memory.py asserts.

The `[memory]` events of torch's profiler name every allocation of every thread that knows of the
profiler. gloo's threads do while they run a collective and no longer when they drop the last
reference to it: what they free then is never told, and counts as alive for ever. So a rank lets
them finish before it waits, and a step that did not give everything back is measured again with
more patience.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import graph_trainer as gt
from graph_trainer.core.analysis.memory import given_bytes
from graph_trainer.core.graph.annotations import value_of
from graph_trainer.core.graph.data_sizes import data_sizes_of
from graph_trainer.core.graph.signature import InputKind
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.simulation.simulate import simulate
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.step_inputs import loss_of_batch, passes_of
from graph_trainer.titan.trainer import GraphTrainer
from graph_trainer.titan.training_state_memory import other_memory_of
from tests.integration.matrix import Flags, arguments
from tests.layers import with_few_layers

COMMON: Flags = {"debug.seed": 42, "metrics.log_freq": 100}
WIDE: Flags = {"training.seq_len": 64, "training.local_batch_size": 1}
"""Few tokens: the weights and their collectives are the peak, not activations."""

EXPERTS: Flags = {
    "module": "graph_trainer.deepseek_v3",
    "config": "debugmodel",
    "training.seq_len": 512,
    "parallelism.expert_parallel_degree": 2,
    "metrics.save_routing": "routing.json",
}
"""So many tokens that activations of experts are a good part of the peak."""

LIMIT_GIB = 0.0566
"""Of the case "budget": between 52.7 MiB with everything recomputed and 63.4 with nothing."""
BUDGET: Flags = {
    "activation_checkpoint.type": "budget",
    "compile.memory_limit_gib": LIMIT_GIB,
    "training.mixed_precision_param": "bfloat16",
}

POLICIES = ("always", "default", "never")
LEFT_BYTES = 4096
"""What a step may leave allocated: learning rates and metrics, a few bytes each."""


def make_wide(config: GraphTrainerConfig) -> None:
    """Two layers of the debug model with feed-forwards eight times as wide."""
    model = config.model_spec.model
    model.layers = model.layers[:2]
    for layer in model.layers:
        layer.feed_forward.w1.out_features *= 8
        layer.feed_forward.w3.out_features *= 8
        layer.feed_forward.w2.in_features *= 8


class Patient(TorchDispatchMode):
    """Before every wait: until all ranks have come and `seconds` have passed."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.wait_tensor.default:
            dist.barrier()
            time.sleep(self.seconds)
        return func(*args, **(kwargs or {}))


class Measured:
    """A GraphTrainer that has captured its step and taken one, and what further ones allocate."""

    def __init__(self, model: str, flags: Flags, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._file = folder / f"{os.environ['WORLD_SIZE']}_{os.environ['RANK']}.json"
        config = load_config(arguments(COMMON | flags | {"dump_folder": folder}))
        if model == "wide":
            make_wide(config)
        elif model == "short":
            with_few_layers(config)
        self.trainer: GraphTrainer = GraphTrainer(config)
        self._batches = self.trainer.batch_generator(self.trainer.dataloader)
        self.trainer.captured_step = self._capture
        self._step()  # which makes the optimizer's state

    def _capture(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "_captured"):
            loss_fn = loss_of_batch(self.trainer.loss_fn)
            self._captured = gt.capture(model, loss_fn, args, kwargs)
        return gt.compile(copy_graph(self._captured), compare_ranks=False)(model, *args, **kwargs)

    def result(self, policy: str) -> dict[str, Any]:
        """Bytes of the rank's whole memory at the peak of a step, measured and predicted."""
        config = self.trainer.config
        config.parallelism.fsdp_reshard_after_forward = policy
        joint = copy_graph(self._captured)
        gt.run_passes(joint, passes_of(config, self.trainer.parallel_dims))
        step = gt.compile(joint, compare_ranks=False)
        state = self._state_bytes()
        for attempt in range(4):
            peak, left = self._profiled_step(step, Patient(0.002 * 4**attempt))
            all_given_back = torch.tensor(int(left <= LEFT_BYTES))
            dist.all_reduce(all_given_back, dist.ReduceOp.MIN)
            if all_given_back:
                break
        other = other_memory_of(config, self._data_ranks())(joint)
        with self._as_routed(joint):
            memory = simulate(joint, load_hardware("cpu"), other).memory
        order = list(joint.graph.nodes)
        return {
            "measured": state + peak,
            "predicted": memory.peak_bytes,
            "batch": given_bytes(joint, InputKind.BATCH),
            "state": state,
            "left": left,
            "at": order[memory.peak_position].name,
        }

    def _as_routed(self, joint: gt.JointGraph) -> contextlib.AbstractContextManager[None]:
        """While entered: this rank's experts are expected to receive what they just have."""
        sizes = data_sizes_of(value_of(joint.placeholders()[0]))
        if sizes is None:
            return contextlib.nullcontext()
        kept = [each for *_, each in self.trainer._routing._kept]  # rank 0 has all
        latest = [max(kept, key=lambda each: (each.step, each.microbatch), default=None)]
        dist.broadcast_object_list(latest)
        return sizes.assuming([ranks[dist.get_rank()] for ranks in latest[0].received])

    def _data_ranks(self) -> int:
        dims = self.trainer.parallel_dims
        return dims.get_mesh("batch").size() if dims.dp_enabled else 1

    def close(self) -> None:
        self.trainer.close()
        del self.trainer, self._batches
        gc.collect()

    def _step(self) -> None:
        self.trainer.step += 1
        self.trainer.train_step(self._batches)

    def _state_bytes(self) -> int:
        """Bytes of the storages of parameters, buffers and optimizer state between steps."""
        self.trainer.optimizers.zero_grad(set_to_none=True)
        (model,) = self.trainer.model_parts
        tensors = [*model.parameters(), *model.buffers()]
        for optimizer in self.trainer.optimizers:
            tensors += [v for state in optimizer.state.values() for v in state.values()]
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in local}
        return sum(storage.nbytes() for storage in storages.values())

    def _profiled_step(self, step: gt.Step, patient: Patient) -> tuple[int, int]:
        """The most that a step had allocated at once, and what it left when its gradients were
        dropped."""

        def patiently(*args: Any, **kwargs: Any) -> Any:
            with patient:
                return step(*args, **kwargs)

        self.trainer.captured_step = patiently
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            self._step()
            self.trainer.optimizers.zero_grad(set_to_none=True)
        profile.export_chrome_trace(str(self._file))
        events = json.loads(self._file.read_text())["traceEvents"]
        events = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
        alive, peak = 0, 0
        for event in events:
            alive += event["args"]["Bytes"]
            peak = max(peak, alive)
        return peak, alive


def cases(ranks: int) -> dict[str, tuple[str, Flags, tuple[str, ...]]]:
    """Model, flags and policies by name: those of this number of ranks."""
    found = {"wide": ("wide", WIDE, POLICIES)}
    if ranks == 1:
        found["accumulating"] = ("wide", WIDE | {"training.global_batch_size": 2}, ("never",))
    if ranks == 2:
        found["debug"] = ("debug", {"training.seq_len": 64}, POLICIES)
        found["budget"] = ("debug", {"training.seq_len": 64} | BUDGET, ("auto",))
        tensor = {"parallelism.tensor_parallel_degree": 2}
        found["tensor_parallel"] = ("wide", WIDE | tensor, ("never",))
        found["experts"] = ("short", EXPERTS, ("never",))
        key = "parallelism.context_parallel"
        context = {f"{key}_degree": 2, f"{key}_method": "all_gather"}  # whose mask takes memory
        found["context_parallel"] = ("debug", {"training.seq_len": 128} | context, ("never",))
    return found


def run(folder: Path, name: str) -> dict[str, Any]:
    """A case of `cases`: by policy, what was measured and what is predicted."""
    model, flags, policies = cases(int(os.environ["WORLD_SIZE"]))[name]
    measured = Measured(model, flags, folder / "memory")
    results = {policy: measured.result(policy) for policy in policies}
    measured.close()
    return results
