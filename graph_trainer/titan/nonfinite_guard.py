"""Notice a loss that is not finite, without waiting for the device at every step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from graph_trainer.errors import NotFiniteError

_SHOWN = 16


class LossGuard:
    """Store the first step whose loss on this rank is not finite, and exchange it between ranks.

    `see` launches a few tiny kernels and waits for nothing; `check` is one small all-gather over
    all ranks that waits for the device. So call `check` where the loop waits in any case: before
    a step is logged, and before a checkpoint is written, which must not contain the parameters
    that such a loss has updated (nor those that a gradient will update, so at a checkpoint the
    gradients are checked too). Until the next `check` training goes on; the message names the
    first bad step nevertheless.
    """

    def __init__(self) -> None:
        self._first: torch.Tensor | None = None  # (step, loss); step is inf while all are finite

    def see(self, step: int, loss: torch.Tensor) -> None:
        """Record this rank's loss of a step or of a microbatch, a scalar."""
        local = local_tensor(loss).detach().to(torch.float64)
        if self._first is None:
            self._first = torch.full((2,), math.inf, dtype=torch.float64, device=local.device)
        is_first = torch.isinf(self._first[0]) & ~torch.isfinite(local)
        seen = torch.stack([torch.full_like(local, step), local])
        self._first = torch.where(is_first, seen, self._first)

    def check(self, step: int, gradients: Iterable[torch.Tensor] = ()) -> None:
        """Refuse to go on if any loss of any rank was not finite. All ranks call it together.

        Args:
            gradients: tensors that must be finite as well, before a checkpoint of `step`. Costs
                one pass over their bytes.

        Raises:
            NotFiniteError: on every rank alike, with the step and the ranks.
        """
        assert self._first is not None, "nothing was seen"
        finite = [torch.isfinite(local_tensor(gradient)).all() for gradient in gradients]
        good = torch.stack(finite).all() if finite else torch.ones_like(self._first[0])
        local = torch.cat([self._first, good.to(self._first)[None]])
        by_rank = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(by_rank, local)
        rows = torch.stack(by_rank).tolist()
        refuse([first for *first, _ in rows])
        refuse_gradients(step, [rank for rank, (*_, good) in enumerate(rows) if not good])


def refuse(firsts: list[list[float]]) -> None:
    """Raise a NotFiniteError if a rank had a loss that is not finite.

    `firsts` is (step, loss) for each rank; the step is inf where all losses were finite.
    """
    step = min(first[0] for first in firsts)
    if math.isinf(step):
        return
    bad = [f"rank {rank}: {loss}" for rank, (at, loss) in enumerate(firsts) if at == step]
    raise NotFiniteError(
        f"step {int(step)}: the loss is not finite ({_listed(bad, ' ranks')}). Training stops; the "
        "last checkpoint is from before. Look at that step's batch on those ranks, then go on from "
        "that checkpoint with other data or a lower learning rate (optimizer.lr)."
    )


def refuse_gradients(step: int, ranks: list[int]) -> None:
    """Raise a NotFiniteError for ranks with a gradient that is not finite, if there are any."""
    if not ranks:
        return
    raise NotFiniteError(
        f"step {step}: the loss is finite and a gradient is not (ranks {_listed(ranks)}). Training "
        "stops before the checkpoint of this step is written; the last one is from before. Go on "
        "from it with other data or a lower learning rate (optimizer.lr), or look for "
        "the operator whose derivative is not finite with torch.autograd.detect_anomaly in "
        'compile.mode = "eager".'
    )


def _listed(items: Iterable[object], unit: str = "") -> str:
    shown = list(map(str, items))
    more = f" and {len(shown) - _SHOWN} more{unit}" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a DTensor, and any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
