"""Notice a loss that is not finite, without asking the device at every step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from graph_trainer.errors import NotFiniteError

_SHOWN = 16


class LossGuard:
    """Keeps the first step whose loss on this rank is not finite, and tells the other ranks.

    `see` launches a few tiny kernels and waits for nothing; `check` is one small exchange
    between all ranks that waits for the device. So `check` belongs where the loop waits anyway:
    before a step is logged, and before a checkpoint is written, which must not hold what such
    a loss has made of the parameters (nor what a gradient will, so there the gradients are looked
    at too). Between the two a bad step goes unnoticed; it is named all the same.
    """

    def __init__(self) -> None:
        self._first: torch.Tensor | None = None  # (step, loss); step is inf while all is well

    def see(self, step: int, loss: torch.Tensor) -> None:
        """Note this rank's loss of (a part of) a step."""
        local = _local(loss).detach().to(torch.float64)
        if self._first is None:
            self._first = torch.full((2,), math.inf, dtype=torch.float64, device=local.device)
        is_first = torch.isinf(self._first[0]) & ~torch.isfinite(local)
        seen = torch.stack([torch.full_like(local, step), local])
        self._first = torch.where(is_first, seen, self._first)

    def check(self, step: int, gradients: Iterable[torch.Tensor] = ()) -> None:
        """Go on only if every loss of every rank was finite. All ranks call it together.

        Arguments:
            gradients: what must be finite as well: a checkpoint of `step` must not hold what
                they would make of the parameters. One pass over their bytes.

        Raises:
            NotFiniteError: on every rank alike, with the step and the ranks.
        """
        assert self._first is not None, "nothing was seen"
        finite = [torch.isfinite(_local(gradient)).all() for gradient in gradients]
        good = torch.stack(finite).all() if finite else torch.ones_like(self._first[0])
        mine = torch.cat([self._first, good.to(self._first)[None]])
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        found = torch.stack(everyone).tolist()
        refuse([first for *first, _ in found])
        refuse_gradients(step, [rank for rank, (*_, good) in enumerate(found) if not good])


def refuse(firsts: list[list[float]]) -> None:
    """Raise the NotFiniteError for the ranks' first (step, loss), if any step is finite."""
    step = min(first[0] for first in firsts)
    if math.isinf(step):
        return
    bad = {rank: loss for rank, (at, loss) in enumerate(firsts) if at == step}
    shown = ", ".join(f"rank {rank}: {loss}" for rank, loss in list(bad.items())[:_SHOWN])
    more = f" and {len(bad) - _SHOWN} more ranks" if len(bad) > _SHOWN else ""
    raise NotFiniteError(
        f"step {int(step)}: the loss is not finite ({shown}{more}). Training stops; the last "
        "checkpoint is from before. Look at that step's batch on those ranks, then go on from "
        "that checkpoint with other data or a lower learning rate (optimizer.param_groups)."
    )


def refuse_gradients(step: int, ranks: list[int]) -> None:
    """Raise the NotFiniteError for ranks that hold a gradient that is not finite, if any."""
    if not ranks:
        return
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    raise NotFiniteError(
        f"step {step}: the loss is finite and a gradient is not (ranks {shown}{more}). Training "
        "stops before the checkpoint of this step is written; the last one is from before. Go on "
        "from it with other data or a lower learning rate (optimizer.param_groups), or look for "
        "the operator whose derivative is not finite with torch.autograd.detect_anomaly in "
        'compile.mode = "eager".'
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
