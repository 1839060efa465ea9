"""A trainer whose every step is kept, so that two runs can be compared bit by bit."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.names import clean_fqn
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.nonfinite_guard import local_tensor
from graph_trainer.titan.trainer import GraphTrainer
from tests.integration.issued import Issued, count_issued
from tests.integration.matrix import COMMON, STEPS, Flags, arguments
from tests.layers import with_few_layers

EAGER: Flags = {"compile.mode": "eager"}
# CUDA's attention adds up its gradient in the order in which blocks happen to finish, and NCCL a
# merged sum in an order of its own.
_ON_CUDA: Flags = {"debug.deterministic": True, "compile.bitwise": True}


class Recorded:
    """A GraphTrainer and what its steps gave on this rank.

    Attributes:
        losses: for each step, this rank's loss of every microbatch.
        gradients: for each step, this rank's part of every gradient before clipping, by name.
        validated: every validation's loss.
        norms: for each step, the norm of all gradients.
        issued: the collectives that the last recorded step asked for, if it was asked to count.
    """

    def __init__(
        self,
        flags: Flags,
        folder: Path,
        change: Callable[[GraphTrainerConfig], None] = with_few_layers,
    ) -> None:
        on_cuda = _ON_CUDA if torch.accelerator.is_available() else {}
        words = arguments(COMMON | on_cuda | flags | {"dump_folder": folder})
        config = load_config(words)
        change(config)
        self.trainer: GraphTrainer = GraphTrainer(config)
        self.losses: list[torch.Tensor] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.validated: list[float] = []
        self.norms: list[float] = []
        self.issued: Issued = {}
        self._microbatches: list[torch.Tensor] = []
        self._latest: dict[str, torch.Tensor] = {}
        self._original = self.trainer.forward_backward_step
        self.trainer.forward_backward_step = self._forward_backward_step
        self.trainer.metrics_processor.log_validation = self._log_validation
        see = self.trainer._guard.see

        def see_norm(step: int, **numbers: torch.Tensor) -> None:
            self.norms.append(float(local_tensor(numbers["norm"])))
            see(step, **numbers)

        self.trainer._guard.see = see_norm
        self.batches = self.trainer.batch_generator(self.trainer.dataloader)

    def parameters(self) -> list[tuple[str, DTensor]]:
        """Those of this rank; of a pipeline those of its stages."""
        named = (entry for part in self.trainer.model_parts for entry in part.named_parameters())
        return [(clean_fqn(name), parameter) for name, parameter in named]

    def joint(self) -> JointGraph:
        """The one graph that was captured."""
        (joint,) = self.trainer.captured_step.joint_graphs()
        return joint

    def step(self, *, counting: bool = False) -> None:
        self._microbatches = []
        self.trainer.step += 1
        with self._counted() if counting else contextlib.nullcontext():
            self.trainer.train_step(self.batches)
        self.losses.append(torch.stack(self._microbatches))
        self.gradients.append(self._latest)

    def run(self, *, counting: bool = False) -> Recorded:
        """STEPS steps, collectives counted in the last one, and validation if it is on."""
        for number in range(STEPS):
            self.step(counting=counting and number == STEPS - 1)
        trainer = self.trainer
        if trainer.config.validator.enable:
            trainer.validator.validate(trainer.model_parts, trainer.step)
        return self

    def global_losses(self) -> list[float]:
        """Every step's loss of the global batch: parts of ranks, stages and microbatches added."""
        total = torch.stack([loss.double().sum() for loss in self.losses])
        dims = self.trainer.parallel_dims
        for mesh in (dims.get_optional_mesh("loss"), dims.get_optional_mesh("pp")):
            if mesh is not None:
                dist.all_reduce(total, group=mesh.get_group())
        return total.tolist()

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """The first step's gradients, whole, on every rank."""
        return {
            name: DTensor.from_local(
                self.gradients[0][name],
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            ).full_tensor()
            for name, parameter in self.parameters()
        }

    def close(self) -> None:
        """Leave only the losses. Eight ranks that keep every trainer of a launch fill a machine:
        torchtitan switches garbage collection off, and a trainer is full of cycles."""
        self.trainer.close()
        if self.trainer.config.debug.deterministic:
            torch.use_deterministic_algorithms(False)
        self.gradients, self._latest = [], {}
        del self.trainer, self.batches, self._original
        gc.collect()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count what the captured step issues, and nothing of the loop around it."""
        captured = self.trainer.captured_step

        def counting(*args: Any, **kwargs: Any) -> Any:
            result, self.issued = count_issued(captured, *args, **kwargs)
            return result

        self.trainer.captured_step = counting
        try:
            yield
        finally:
            self.trainer.captured_step = captured

    def _forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
        loss = self._original(**kwargs)
        self._microbatches.append(loss.detach().clone())
        self._latest = {
            n: p.grad.to_local().clone() for n, p in self.parameters() if p.grad is not None
        }
        return loss

    def _log_validation(self, *, loss: float, step: int) -> None:
        self.validated.append(loss)


def differing(a: Recorded, b: Recorded, *, last: int = STEPS) -> list[str]:
    """Where the last steps of two runs are not the same bits; the first few places."""
    found = []
    for step in range(-last, 0):
        if not torch.equal(a.losses[step], b.losses[step]):
            found.append(f"loss of step {step}")
        if a.gradients[step].keys() != b.gradients[step].keys():
            found.append(f"names of the gradients of step {step}")
        for name in a.gradients[step].keys() & b.gradients[step].keys():
            if not torch.equal(a.gradients[step][name], b.gradients[step][name]):
                found.append(f"gradient of {name} in step {step}")
    for (name, p), (_, q) in zip(a.parameters(), b.parameters(), strict=True):
        if not torch.equal(p.to_local(), q.to_local()):
            found.append(f"parameter {name} at the end")
    if a.validated != b.validated:
        found.append(f"validation: {a.validated} and {b.validated}")
    return found[:5]


def gradient_errors(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Relative L2 norm of each gradient's difference."""
    assert found.keys() == expected.keys()
    errors = {}
    for name, gradient in found.items():
        wanted = expected[name].to(gradient.device)
        # the difference rounds by its own size; sums of squares need float64
        difference, size = (
            torch.linalg.vector_norm(tensor, dtype=torch.float64)
            for tensor in (gradient.float() - wanted.float(), wanted)
        )
        errors[name] = float(difference / size)
    return errors
