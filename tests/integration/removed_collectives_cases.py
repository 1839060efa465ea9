"""Steps without the collectives that structure passes remove, for test_removed_collectives.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.functional import embedding, linear

import graph_trainer as gt
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.ordering.exchange import check_order_across_ranks
from graph_trainer.core.sharding.simple_fsdp import shard_of
from tests.integration.issued import count_issued, expected_events

ROWS, COLUMNS = 8, 12
CLEANUP = ["normalize_views", "functionalize_index_put", "eliminate_dead_code"]
R, S0, S1 = Replicate(), Shard(0), Shard(1)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def step_with(
    model: nn.Module, loss: Callable[..., torch.Tensor], passes: list[str], *batch: torch.Tensor
) -> dict[str, Any]:
    """One captured step under a list of passes."""
    joint = gt.capture(model, loss, batch)
    gt.run_passes(joint, gt.PassConfig(passes=[*CLEANUP, *passes]))
    check_order_across_ranks(
        joint
    )  # raises where ranks differ, before any of them would wait in vain
    step = gt.compile(joint)
    (value, gradients), issued = count_issued(step, model, *batch)
    kinds = Counter(c.kind for c in collectives(joint))
    return {
        "loss": value,
        "gradients": {name: local(g) for name, g in gradients.items()},
        "kinds": dict(kinds),
        "issued": issued,
        "expected": expected_events(kinds),
    }


def told(plain: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    return {
        "before": plain["kinds"],
        "after": changed["kinds"],
        "issued": changed["issued"],
        "expected": changed["expected"],
        "same_loss": torch.equal(plain["loss"], changed["loss"]),
        "differing": [
            name
            for name, gradient in plain["gradients"].items()
            if not torch.equal(gradient, changed["gradients"][name])
        ],
    }


# --- round trips -------------------------------------------------------------------------------


class Redistributed(nn.Module):
    """A value that is gathered for one reader, or none, and sliced again for another."""

    def __init__(self, mesh: DeviceMesh, layouts: list[tuple[Placement, ...]], reads: str) -> None:
        super().__init__()
        self.mesh, self.layouts, self.reads = mesh, layouts, reads
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, COLUMNS))
        self.shift = nn.Parameter(torch.linspace(-1, 1, COLUMNS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # distinct on every rank, so that a slice of another rank's would show
        whole = DTensor.from_local(x, self.mesh, [R] * self.mesh.ndim, run_check=False)
        first = whole.redistribute(self.mesh, self.layouts[0]).to_local()
        columns = first.shape[1]
        own = first * (1 + dist.get_rank()) * self.scale[:columns] + self.shift[:columns]
        value = DTensor.from_local(own, self.mesh, self.layouts[0], run_check=False)
        total = x.new_zeros(())
        for layout in self.layouts[1:]:
            value = value.redistribute(self.mesh, layout)
            if self.reads == "all" or layout is self.layouts[-1]:
                total = total + value.to_local().tanh().sum()
        return total


TRIPS: dict[str, tuple[tuple[int, ...], list[tuple[Placement, ...]], str]] = {
    "rows": ((4,), [(S0,), (R,), (S0,)], "last"),
    "columns": ((4,), [(S1,), (R,), (S1,)], "last"),
    "rows, gathered value read": ((4,), [(S0,), (R,), (S0,)], "all"),
    "twice": ((4,), [(S0,), (R,), (S0,), (R,), (S0,)], "all"),
    "two dimensions": ((2, 2), [(S0, S1), (R, R), (S0, S1)], "last"),
    "two dimensions, rows": ((2, 2), [(S0, S0), (R, R), (S0, S0)], "last"),
    "third layout": ((2, 2), [(S0, S1), (R, R), (S0, R)], "last"),
    "other columns": ((4,), [(S0,), (R,), (S1,)], "all"),
}


def round_trip(name: str) -> dict[str, Any]:
    shape, layouts, reads = TRIPS[name]
    names = ("a", "b")[: len(shape)]
    model = Redistributed(init_device_mesh("cpu", shape, mesh_dim_names=names), layouts, reads)
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x)

    return told(step_with(model, loss, [], x), step_with(model, loss, ["eliminate_round_trips"], x))


# --- folded reductions -------------------------------------------------------------------------

VOCABULARY, WIDTH = 13, 8
UNIT = 2.0**-24  # of float32, in which every case reduces and adds


def logits(tokens: torch.Tensor, *read: torch.Tensor) -> torch.Tensor:
    """A tied embedding and a layer that is called twice, each reading by itself."""
    into, one, two, out = read
    hidden = linear(torch.tanh(linear(embedding(tokens, into), one)), two)
    return linear(hidden, out)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, WIDTH, generator=generator))
        self.layer = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return logits(tokens, self.embedding, self.layer, self.layer, self.embedding)


MIXED = gt.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FOLDS: dict[str, tuple[tuple[int, ...], str, gt.MixedPrecisionPolicy | None]] = {
    "fully_shard": ((4,), "fully_shard", None),
    "fully_shard, mixed": ((4,), "fully_shard", MIXED),
    "replicate": ((4,), "replicate", None),
    "hybrid_shard": ((2, 2), "hybrid_shard", None),
    "hybrid_shard, mixed": ((2, 2), "hybrid_shard", MIXED),
}


def mean_square(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).float().square().mean()


def absolute_gradients(
    tokens: torch.Tensor, policy: gt.MixedPrecisionPolicy | None
) -> dict[str, torch.Tensor]:
    """For every element of a gradient, the absolute values of what adds up to it, over readings
    and ranks, divided as the gradient is."""
    plain = Tied()
    dtype = torch.float32 if policy is None else policy.param_dtype
    readings = [
        p.detach().to(dtype).requires_grad_()
        for p in (plain.embedding, plain.layer, plain.layer, plain.embedding)
    ]
    loss = logits(tokens, *readings).float().square().mean()
    into, one, two, out = (g.double().abs() for g in torch.autograd.grad(loss, readings))
    sums = {"embedding": into + out, "layer": one + two}
    for total in sums.values():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return sums


def folded(name: str) -> dict[str, Any]:
    shape, mode, policy = FOLDS[name]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    model = gt.simple_fsdp(Tied(), mesh, mode, mp_policy=policy)
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    tokens = torch.randint(0, VOCABULARY, (3, 5), generator=generator)
    plain = step_with(model, mean_square, ["deduplicate_unshards"], tokens)
    passes = ["deduplicate_unshards", "fold_grad_reductions"]
    changed = step_with(model, mean_square, passes, tokens)
    # Two sums of the same terms, each in some order: (n - 1) u / (1 - (n - 1) u) of the sum of
    # the absolute values is the most that either is off by; the division by four is exact.
    off = (2 * dist.get_world_size() - 1) * UNIT
    bound = 2 * off / (1 - off)
    absolute = absolute_gradients(tokens, policy)
    beyond = []
    parameters = dict(model.named_parameters())
    for parameter, gradient in plain["gradients"].items():
        most = bound * shard_of(absolute[parameter], parameters[parameter])
        error = (gradient.double() - changed["gradients"][parameter].double()).abs()
        if torch.any(error > most) or not gradient.any() and gradient.numel():
            beyond.append(parameter)
    return told(plain, changed) | {"beyond": beyond}


def run(folder: Path, _: str) -> dict[str, Any]:
    """Every case, on four ranks."""
    return {
        "trips": {name: round_trip(name) for name in TRIPS},
        "folds": {name: folded(name) for name in FOLDS},
    }
