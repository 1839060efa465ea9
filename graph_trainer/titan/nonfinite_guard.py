"""Keep gradients that are not finite out of the parameters, and name their step and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.tools.logging import logger

from graph_trainer.errors import NotFiniteError

_SHOWN = 16


class NonfiniteGuard:
    """Update the parameters only where the total norm of the gradients is finite.

    A step without any label that counts has no mean loss, though its gradients are zero, and is
    treated alike. With `skips`, the host waits for that norm in every step, and such a step changes
    neither parameters nor optimizer state nor schedule.

    Otherwise such a step ends the run. The host waits for nothing where all optimizers take
    `found_inf`: the update is then suppressed on the device. The first bad step of a rank is
    stored there too, be it for the norm or for the loss, until `check` raises its error. So call
    `check` where the loop waits in any case: before a step is logged, and before a checkpoint is
    written.
    """

    def __init__(self, *, skips: bool = False) -> None:
        self.skips = skips
        self.skipped = 0
        """The number of steps that were skipped."""
        # whether the step last seen does; all ranks agree
        self._updates: torch.Tensor | None = None
        self._first: torch.Tensor | None = None  # a row; its step is inf while all are finite

    def see(
        self,
        step: int,
        *,
        loss: torch.Tensor,
        local_norm: torch.Tensor,
        norm: torch.Tensor,
        valid_tokens: torch.Tensor,
    ) -> None:
        """Record the numbers of a step, all scalars, without waiting for the device.

        Args:
            loss: this rank's, summed over the microbatches.
            local_norm: `local_norm` of the gradients before clipping, which spreads a NaN.
            norm: the total norm over all ranks, which clipping has computed.
            valid_tokens: the labels of all ranks that count.
        """
        numbers = (loss, local_norm, norm, valid_tokens)
        device = loss.device
        values = [local_tensor(n).detach().to(device, torch.float64) for n in numbers]
        row = torch.stack([torch.full_like(values[0], step), *values])
        self._updates = torch.isfinite(row[3]) & (row[4] > 0)
        if self._first is None or self.skips:
            self._first = torch.full_like(row, math.inf)
        is_first = torch.isinf(self._first[0]) & ~(self._updates & torch.isfinite(row[1]))
        self._first = torch.where(is_first, row, self._first)

    def update(self, optimizers: OptimizersContainer) -> bool:
        """Step the optimizers, unless the step last seen must not.

        Returns:
            whether the step counts: False where it was skipped. True as well where the device
            suppresses the update and the host does not know.
        """
        assert self._updates is not None, "no step was seen"
        if not self.skips and all(map(_takes_found_inf, optimizers)):
            # read by the fused kernels, which then leave parameters and moments; torch's
            # GradScaler sets the same attribute
            found_inf = (~self._updates).float()
            for optimizer in optimizers:
                optimizer.found_inf = found_inf
            try:
                optimizers.step()
            finally:
                for optimizer in optimizers:
                    del optimizer.found_inf
            return True
        if self._updates.item():
            optimizers.step()
            return True
        if self.skips:
            self.skipped += 1
            step, reason, _ = described(self._rows())
            logger.warning(f"Step {step} is skipped, {self.skipped} so far: {reason}")
        return False

    def check(self, *, exchange: bool = True) -> None:
        """End a run that has seen a bad step, unless it skips these. All ranks call it together.

        Args:
            exchange: whether other ranks take part; otherwise for what this rank alone has seen.

        Raises:
            NotFiniteError: on every rank alike, with the first bad step and the ranks.
        """
        if self.skips or self._first is None:
            return
        rows = self._rows() if exchange else {dist.get_rank(): Row(*self._first.tolist())}
        if not all(math.isinf(row.step) for row in rows.values()):
            step, reason, remedy = described(rows)
            raise NotFiniteError(
                f"step {step}: {reason}. Training stops, and no checkpoint has that step's update. "
                f"{remedy} Then start again, from the last checkpoint if there is one; "
                'training.nonfinite = "skip" leaves out such steps.'
            )

    def _rows(self) -> dict[int, Row]:
        """Return the stored row of every rank; an exchange between all of them."""
        assert self._first is not None
        by_rank = [torch.empty_like(self._first) for _ in range(dist.get_world_size())]
        dist.all_gather(by_rank, self._first)
        return {rank: Row(*values) for rank, values in enumerate(torch.stack(by_rank).tolist())}


@dataclass(frozen=True)
class Row:
    """What a rank has stored of its first bad step; all are inf where there is none."""

    step: float
    loss: float
    local_norm: float
    norm: float
    valid_tokens: float


def described(rows: dict[int, Row]) -> tuple[int, str, str]:
    """Return the first bad step, what was not finite in it, on which ranks, and what to do first.

    Args:
        rows: by rank, at least one with a bad step.
    """
    step = min(row.step for row in rows.values())
    first = {rank: row for rank, row in rows.items() if row.step == step}
    losses = [f"rank {r}: {row.loss}" for r, row in first.items() if not math.isfinite(row.loss)]
    ranks = [rank for rank, row in first.items() if not math.isfinite(row.local_norm)]
    row = next(iter(first.values()))
    remedy = "Take other data or a lower learning rate (optimizer.lr)"
    if row.valid_tokens == 0:
        reason = "all labels of the step are ignored (-100) on every rank, so it has no mean loss"
        remedy = "Look at the labels of the data that dataloader names."
    elif losses:
        reason = f"the loss is not finite ({_listed(losses, ' ranks')})"
        remedy = f"Look at that step's batch on those ranks. {remedy}."
    elif ranks:
        reason = f"the loss is finite and a gradient is not (ranks {_listed(ranks)})"
        remedy += ", or look for the operator whose derivative is not finite with "
        remedy += 'torch.autograd.detect_anomaly in compile.mode = "eager".'
    else:
        reason = f"the norm of the gradients overflows: it is finite on every rank, and {row.norm}"
        reason += " over all of them"
        remedy += "."
    return int(step), reason, remedy


def local_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """Return the 2-norm of this rank's parts of the gradients, a scalar; without communication."""
    gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)


def _takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    # torch's mark of such optimizers looks at their defaults, and torchtitan sets each group
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)


def _listed(items: Iterable[object], unit: str = "") -> str:
    shown = list(map(str, items))
    more = f" and {len(shown) - _SHOWN} more{unit}" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a DTensor, and any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
