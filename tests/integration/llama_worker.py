"""Runs Llama 3 debug model cases on real ranks; test_llama.py launches it and reads the results.

One launch runs every case in the same processes, because starting eight of them costs half a
minute on two cores. Each case trains the same model eagerly and captured and reports what it
saw; the assertions are in the test.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import graph_trainer as gt
from graph_trainer.analysis.collectives import collectives
from graph_trainer.analysis.unshard_chains import last_bucket, unshard_chains
from graph_trainer.compile import compile
from graph_trainer.config import load_config
from graph_trainer.joint_graph import (
    Phase,
    annotate_node,
    annotation,
    compute_nodes,
    is_backward,
)
from graph_trainer.train_step import TrainStep
from graph_trainer.trainer import GraphTrainer
from tests.integration.launch import finish

STEPS = 3


class Recorded:
    """A trainer that was stepped, with what each forward and backward gave."""

    def __init__(self, flags: list[str], folder: Path) -> None:
        config = load_config([*flags, "--dump_folder", str(folder), "--debug.seed", "42"])
        self.trainer: GraphTrainer = config.build()
        self.losses: list[torch.Tensor] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        original = self.trainer.forward_backward_step

        def recording(**kwargs: Any) -> torch.Tensor:
            loss = original(**kwargs)
            self.losses.append(loss.detach().clone())
            self.gradients.append(
                {n: p.grad.to_local().clone() for n, p in self.parameters() if p.grad is not None}
            )
            return loss

        self.trainer.forward_backward_step = recording
        self.batches = self.trainer.batch_generator(self.trainer.dataloader)

    def parameters(self) -> Any:
        return self.trainer.model_parts[0].named_parameters()

    def step(self) -> None:
        self.trainer.step += 1
        self.trainer.train_step(self.batches)

    def run(self) -> Recorded:
        for _ in range(STEPS):
            self.step()
        return self

    def close(self) -> None:
        self.trainer.close()


def count_issued(recorded: Recorded) -> dict[str, int]:
    """The collectives that the process groups were asked for in one forward and backward.

    Asked of the profiler, which gloo itself tells about every collective it starts.
    """
    trainer = recorded.trainer
    inputs, labels = next(recorded.batches)
    tokens = torch.tensor(labels.numel())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        trainer.forward_backward_step(input_dict=inputs, labels=labels, global_valid_tokens=tokens)
    counted: Counter[str] = Counter()
    for event in profile.events():
        if event.name.startswith("gloo:"):
            counted[event.name] += 1
    return dict(counted)


def compare(a: Recorded, b: Recorded) -> dict[str, Any]:
    """Whether two runs agree bit by bit, and where they first do not."""
    differing = []
    for step in range(STEPS):
        if not torch.equal(a.losses[step], b.losses[step]):
            differing.append(f"loss of step {step}")
        for name, gradient in a.gradients[step].items():
            if not torch.equal(gradient, b.gradients[step][name]):
                differing.append(f"gradient of {name} in step {step}")
        if a.gradients[step].keys() != b.gradients[step].keys():
            differing.append(f"names of step {step}")
    for (name, p), (_, q) in zip(a.parameters(), b.parameters(), strict=True):
        if not torch.equal(p.to_local(), q.to_local()):
            differing.append(f"parameter {name} at the end")
    return {"differing": differing[:5], "gradients": len(a.gradients[0])}


def describe_graph(recorded: Recorded) -> dict[str, Any]:
    """What the graph says it will issue: by kind, and the unshards of each phase."""
    (joint,) = recorded.trainer._captured_step.joint_graphs()
    found = collectives(joint)
    chains: dict[str, list[str]] = {"forward": [], "backward": []}
    for entry in found:
        if entry.role == "unshard":
            chains["backward" if entry.phase == "backward" else "forward"].append(entry.parameter)
    return {"kinds": dict(Counter(c.kind for c in found)), "unshards": chains, "total": len(found)}


def global_losses(recorded: Recorded) -> list[float]:
    """Every step's loss of the global batch: the ranks' parts added up over data parallelism."""
    dims = recorded.trainer.parallel_dims
    total = torch.stack([loss.double() for loss in recorded.losses])
    if dims.dp_enabled:
        dist.all_reduce(total, group=dims.get_mesh("batch").get_group())
    return total.tolist()


def full_gradients(recorded: Recorded) -> dict[str, torch.Tensor]:
    """The first step's gradients, whole, on every rank."""
    whole = {}
    for name, parameter in recorded.parameters():
        local = recorded.gradients[0][name]
        gradient = DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        whole[name] = gradient.full_tensor()
    return whole


def run_case(
    case: dict[str, Any], folder: Path, reference: dict[str, Any] | None
) -> dict[str, Any]:
    """One mesh and dtype: eager, and captured with every policy."""
    result: dict[str, Any] = {"policies": {}}
    eager = Recorded([*case["flags"], "--compile.mode", "eager"], folder).run()
    result["losses"] = global_losses(eager)
    if reference is not None:
        errors = {}
        for name, gradient in full_gradients(eager).items():
            expected = reference["gradients"][name].double()
            errors[name] = float((gradient.double() - expected).norm() / expected.norm())
        result["gradient_errors"] = errors
        result["reference_losses"] = reference["losses"]
    for policy in case["policies"]:
        flags = ["--parallelism.fsdp_reshard_after_forward", policy, *case.get("extra", [])]
        captured = Recorded([*case["flags"], *flags], folder).run()
        entry = compare(eager, captured)
        entry["losses"] = global_losses(captured)
        entry["graph"] = describe_graph(captured)
        entry["issued"] = count_issued(captured)
        result["policies"][policy] = entry
        if case.get("memory"):
            entry["memory"] = measure_memory(captured)
        captured.close()
    eager.close()
    return result


BORDER_BYTES = 1_234_560  # a size that nothing else allocates


def mark_border() -> None:
    """Allocate a tensor of a size of its own: a mark that LiveStorages sees."""
    torch.empty(BORDER_BYTES, dtype=torch.uint8)


class LiveStorages(TorchDispatchMode):
    """Bytes of the storages that a running step holds: their peak, and those at the border.

    The allocator counts more: what gloo's threads still hold of collectives that are over.
    With eight ranks on two cores that is megabytes, and a matter of scheduling and not of the
    graph. (tests/unit/test_compile.py compares the allocator's peak with the predicted one
    where no other thread allocates.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.border = 0
        self._live = 0
        self._tensors: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if _is_tensor(t)}
        for tensor in filter(_is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            pointer, size = storage.data_ptr(), storage.nbytes()
            if size == BORDER_BYTES:
                self.border = self._live
                continue
            if not self._tensors[pointer]:
                if pointer in given:
                    continue  # a view of an input of the step, which is not the step's own
                self._live += size
            self._tensors[pointer] += 1
            weakref.finalize(tensor, self._drop, pointer, size)
        self.peak = max(self.peak, self._live)
        return result

    def _drop(self, pointer: int, size: int) -> None:
        self._tensors[pointer] -= 1
        if not self._tensors[pointer]:
            self._live -= size


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def measure_memory(recorded: Recorded) -> dict[str, float]:
    """What a captured step holds at its peak and at the border between forward and backward,
    where a marking allocation is put into the graph."""
    (step,) = recorded.trainer._captured_step._steps.values()
    joint = step.joint
    first = next(n for n in compute_nodes(joint.graph) if is_backward(n))
    with joint.graph.inserting_before(first):
        marks = [joint.graph.call_function(mark_border)]
    for mark in marks:
        annotate_node(mark, annotation(phase=Phase.BACKWARD))
    marked = compile(joint, "eager")
    inputs, labels = next(recorded.batches)
    batch = (inputs["input"], labels, torch.tensor(labels.numel()))
    model = recorded.trainer.model_parts[0]
    with LiveStorages() as live:
        marked(model, *batch, positions=inputs["positions"])
    kept = last_bucket(joint, unshard_chains(joint))
    read = {c.parameter for c in unshard_chains(joint) if c.parameter != "tok_embeddings.weight"}
    sizes = {name: p.numel() * torch.bfloat16.itemsize for name, p in recorded.parameters()}
    return {
        "peak": live.peak,
        "border": live.border,
        "unsharded": sum(sizes[name] for name in read),
        "last_bucket": sum(sizes[name] for name in kept),
    }


def graphs_that_differ() -> str:
    """What a rank is told when its peers captured something else."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    gt.simple_fsdp(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    order = (0, 1) if dist.get_rank() != 1 else (1, 0)

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        sizes = [model[i].weight.float().sum() if i == 0 else model[i].bias.sum() for i in order]
        return model(x).sum() + sizes[0] + sizes[1]

    step = TrainStep(loss)
    try:
        step(model, torch.ones(2, 8))
    except gt.VerificationError as error:
        return str(error)
    return ""


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(plan["folder"])
    torch.set_num_threads(1)
    results: dict[str, Any] = {"cases": {}}
    for name, case in plan["cases"].items():
        if case.get("make_reference"):
            recorded = Recorded([*case["flags"], "--compile.mode", "eager"], folder).run()
            payload = {"losses": global_losses(recorded), "gradients": full_gradients(recorded)}
            torch.save(payload, folder / f"reference_{name}.pt")
            recorded.close()
            continue
        reference = None
        if "reference" in case:
            reference = torch.load(folder / f"reference_{case['reference']}.pt")
        results["cases"][name] = run_case(case, folder, reference)
    if plan.get("differ"):
        results["differ"] = graphs_that_differ()
    finish(results)


if __name__ == "__main__":
    main()
