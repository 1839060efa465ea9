"""Runs the cases of matrix.py, for test_matrix.py.

A case trains one model eagerly and captured and reports what it saw; the assertions are in the
test.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import graph_trainer as gt
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.training.step_cache import TrainStep
from tests.integration.issued import expected_events
from tests.integration.matrix import MATRIX, MODELS, Case, Flags, Holds, rows
from tests.integration.recorded import EAGER, Recorded, differing, gradient_errors

Result = dict[str, Any]


def case_of(name: str) -> Case:
    (case,) = [case for case in MATRIX if case.name == name]
    return case


def reference_file(case: Case, folder: Path) -> Path:
    """Where one rank leaves its losses and gradients for the cases that share its flags."""
    dtype = case.flags["training.mixed_precision_param"]
    model = MODELS.index(case.model)
    return folder / f"reference_{model}_{dtype}_{case.global_rows}.pt"


def make_reference(folder: Path, name: str) -> None:
    """One rank on the global batch."""
    case = case_of(name)
    recorded = Recorded(case.on_one_rank | EAGER, folder).run()
    payload = {
        "losses": recorded.global_losses(),
        "gradients": recorded.full_gradients(),
        "validated": recorded.validated,
    }
    torch.save(payload, reference_file(case, folder))
    recorded.close()


def run(folder: Path, name: str) -> Result:
    """One mesh and dtype: eager, and captured with every policy."""
    case = case_of(name)
    eager = Recorded(case.eager, folder).run()
    result: Result = {"policies": {}, "losses": eager.global_losses()}
    result["validated"] = eager.validated
    if Holds.ONE_RANK in case.holds:
        reference = torch.load(reference_file(case, folder), map_location="cpu")
        result["one_rank"] = {
            "errors": gradient_errors(eager.full_gradients(), reference["gradients"]),
            "losses": reference["losses"],
            "validated": reference["validated"],
        }
    if Holds.DOUBLE_BATCH in case.holds:
        result["double_batch"] = run_double_batch(case, folder, eager)
    for policy in case.policies:
        flags = case.flags | {"parallelism.fsdp_reshard_after_forward": policy}
        captured = Recorded(flags, folder).run(counting=True)
        result["policies"][policy] = describe(case, eager, captured, folder, flags)
        captured.close()
    eager.close()
    return result


def run_double_batch(case: Case, folder: Path, accumulated: Recorded) -> Result:
    """The same rows on the same mesh, in one microbatch."""
    flags = {k: v for k, v in case.flags.items() if k != "training.global_batch_size"}
    whole = Recorded(flags | rows(case.global_rows // case.data_ranks) | EAGER, folder).run()
    result = {
        "microbatches": [len(step.losses[0]) for step in (accumulated, whole)],
        "errors": gradient_errors(accumulated.full_gradients(), whole.full_gradients()),
        "losses": whole.global_losses(),
    }
    whole.close()
    return result


def describe(case: Case, eager: Recorded, captured: Recorded, folder: Path, flags: Flags) -> Result:
    """What one captured run gave, beside the eager one."""
    found = collectives(captured.joint())
    gathers: dict[str, list[str]] = {"forward": [], "backward": []}
    for entry in found:
        if entry.role == "unshard":
            gathers["backward" if entry.phase == "backward" else "forward"] += entry.parameters
    result: Result = {
        "differing": differing(eager, captured),
        "gradients": len(captured.gradients[0]),
        "losses": captured.global_losses(),
        "gathers": gathers,
        "issued": captured.issued,
        "expected": expected_events(Counter(c.kind for c in found)),
    }
    if Holds.REPEATS in case.holds:
        again = Recorded(flags, folder).run()
        result["repeated_differs"] = differing(captured, again)
        again.close()
    return result


def graphs_that_differ(folder: Path, _: str) -> str:
    """What a rank is told when its peers captured something else."""
    torch.manual_seed(0)
    device = "cuda" if torch.accelerator.is_available() else "cpu"
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to(device)
    gt.simple_fsdp(model, init_device_mesh(device, (dist.get_world_size(),)))
    order = (0, 1) if dist.get_rank() != 1 else (1, 0)

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        sizes = [model[i].weight.float().sum() if i == 0 else model[i].bias.sum() for i in order]
        return model(x).sum() + sizes[0] + sizes[1]

    step = TrainStep(loss)
    try:
        step(model, torch.ones(2, 8, device=device))
    except gt.VerificationError as error:
        return str(error)
    return ""
