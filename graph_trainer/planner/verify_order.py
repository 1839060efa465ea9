"""`graph-trainer plan --verify-order`: prove, without starting them, that ranks cannot hang."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from graph_trainer.core.analysis.mesh_groups import RankClasses
from graph_trainer.core.ordering.proof import OrderProof, prove_order
from graph_trainer.core.ordering.sequences import Sequence, issued_by
from graph_trainer.core.passes.pipeline import pass_by_pass
from graph_trainer.core.torch_private import StridedShard
from graph_trainer.errors import GraphTrainerError, VerificationError
from graph_trainer.planner.captures import Captures
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.planner.simulated_agreement import AsFarAsKnown, Passes, as_agreed, decided_by
from graph_trainer.planner.terminal import OnProgress
from graph_trainer.titan.config.core_settings import config_keys_in_errors
from graph_trainer.titan.config.run_config import GraphTrainerConfig

from torchtitan.distributed import ParallelDims  # isort: skip

MOST_CLASSES = 27
"""Three coordinates (first, last, any other) along each of three axes. First and last have
classes of their own only up to this number of classes; other local shapes always have."""

Shape = tuple[int, ...]


_Layout = tuple[Shape, tuple[tuple[str, int, int], ...]]
"""Global shape of a parameter; of each sharding, outermost first, the mesh axis, its size and the
tensor dimension."""


@config_keys_in_errors()
def verify_order(
    config: GraphTrainerConfig,
    world_size: int,
    *,
    all_ranks: bool = False,
    device: str = "cuda",
    processes: int = 1,
    captures: Captures | None = None,
    on_progress: OnProgress = lambda line: None,
) -> OrderProof:
    """Prove the order of the collectives of all ranks, on fake ranks of this machine.

    Captures the step of every rank that can differ and runs its passes.

    Args:
        config: a checked config whose degrees multiply to `world_size`.
        all_ranks: capture every rank, and not only one of each class.
        device: what the step is captured for: "cuda" or "cpu".
        processes: how many at most capture at once.
        captures: of earlier proofs and plans.
        on_progress: called with a line before the first capture and after each.

    Raises:
        VerificationError: the ranks can hang, with two ranks, the group and what differs; or a
            rank has no graph, with its error.
    """
    captures = captures or Captures()
    classes = None if all_ranks else rank_classes(FakeRank(config, world_size, 0, device))
    ranks = list(classes.representatives()) if classes else list(range(world_size))
    on_progress(announcement(classes, world_size))
    start = time.perf_counter()
    done: list[int] = []

    def run(rank: int, agreement: AsFarAsKnown) -> tuple[Sequence, Passes]:
        try:
            fake = FakeRank(config, world_size, rank, device)
            if classes is not None:
                check_shapes(fake, classes)
            joint = captures.of(fake)
            list(pass_by_pass(joint, fake.pass_config(), agreement=agreement))
            sequence = issued_by(joint, world_size)
        except GraphTrainerError as error:
            raise VerificationError(
                f"rank {rank} could not capture the step: {type(error).__name__}: {error}"
            ) from error
        return sequence, decided_by(joint)

    def report(rank: int, result: tuple[Sequence, Passes, object]) -> None:
        done.append(rank)
        place, seconds = (len(done) - 1) % len(ranks) + 1, time.perf_counter() - start
        left = seconds / len(done) * (len(ranks) - place)
        on_progress(
            f"rank {rank}, {place} of {len(ranks)}: {len(result[0]):,} collectives, "
            f"{seconds:.0f} s so far, {left:.0f} s left"
        )

    return prove_order(as_agreed(ranks, run, on_progress, processes, on_end=report), classes)


def rank_classes(run: FakeRank) -> RankClasses:
    """Group the ranks of a run, as `classes_of`."""
    return classes_of(run.parallel_dims, run.model.parameters())


def classes_of(dims: ParallelDims, parameters: Iterable[torch.Tensor]) -> RankClasses:
    """Group the ranks of a mesh, or of one stage, whose parameters have the same local shapes.

    Two coordinates along an axis are of one class when, at any other coordinates, their ranks
    have the same local shape of every parameter. The first and the last coordinate along each
    axis have classes of their own, because model code often tests for them, while there are at most
    MOST_CLASSES classes.
    """
    # Ranks are counted along the last axis first.
    axes = {"dp_replicate": dims.dp_replicate, "fsdp": dims.dp_shard}
    axes |= ({"cp": dims.cp} if dims.cp_enabled else {}) | {"tp": dims.tp}
    sizes = tuple(axes.values())
    layouts = {_layout_of(p) for p in parameters}
    known: dict[tuple[Shape, ...], int] = {}
    kinds_at: list[dict[int, list[int]]] = [{} for _ in sizes]
    for place in itertools.product(*map(range, sizes)):
        shapes = tuple(_local_shape(layout, sizes, place) for layout in layouts)
        kind = known.setdefault(shapes, len(known))
        for axis, coordinate in enumerate(place):
            kinds_at[axis].setdefault(coordinate, []).append(kind)
    # First and last coordinate with classes of their own; the first alone; neither.
    for first, last in ((True, True), (True, False), (False, False)):
        labels = tuple(
            _class_numbers(list(kinds_of.values()), first=first, last=last) for kinds_of in kinds_at
        )
        if math.prod(len(set(numbers)) for numbers in labels) <= MOST_CLASSES:
            break
    return RankClasses(tuple(axes), labels)


def _class_numbers(kinds: list[list[int]], *, first: bool, last: bool) -> tuple[int, ...]:
    """Number the classes of coordinates along an axis: one for each kind, and one more for the
    `first` and the `last` coordinate where these are asked for."""
    separate: set[int] = set()
    if first:
        separate.add(0)
    if last:
        separate.add(len(kinds) - 1)
    classes: dict[object, int] = {}
    numbers = []
    for coordinate, kind in enumerate(kinds):
        key = (tuple(kind), coordinate if coordinate in separate else None)
        numbers.append(classes.setdefault(key, len(classes)))
    return tuple(numbers)


def _layout_of(parameter: torch.Tensor) -> _Layout:
    if not isinstance(parameter, DTensor):
        return tuple(parameter.shape), ()
    mesh = parameter.device_mesh
    names = zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True)
    shards = [
        (name, size, p.dim) for name, size, p in names if isinstance(p, (Shard, StridedShard))
    ]
    return tuple(parameter.shape), tuple(shards)


def _local_shape(layout: _Layout, sizes: tuple[int, ...], place: tuple[int, ...]) -> Shape:
    """Compute the local shape at a place of a mesh of these sizes, whose axes are replicas, FSDP,
    then context parallelism where there is any, and tensor parallelism.

    The innermost axis splits first, as torch.chunk does: the first ranks get
    ceil(size / ranks) rows, later ranks fewer or none.
    """
    # ranks of one replica are counted along the last axis first
    inner, ranks = 0, 1
    for size, coordinate in zip(sizes[1:], place[1:], strict=True):
        inner, ranks = inner * size + coordinate, ranks * size
    shape, shards = layout
    local = list(shape)
    for name, size, dim in reversed(shards):
        match name:
            case "dp_replicate":
                coordinate = place[0]
            case "tp":
                coordinate = place[-1]
            case "fsdp":  # context parallelism's ranks share its shards
                coordinate = inner // sizes[-1]
            case "ep":  # experts are spread over neighbours, whatever these are to other layers
                coordinate = inner % size
            case "efsdp":
                coordinate = inner // (ranks // size)
            case _:
                raise VerificationError(
                    f"a parameter is sharded over mesh axis '{name}', and which ranks are alike is "
                    "known of dp_replicate, fsdp, tp, ep and efsdp: read the graph of every rank, "
                    "by --verify-order --all-ranks"
                )
        rows = -(-local[dim] // size)
        local[dim] = max(0, min(rows, local[dim] - coordinate * rows))
    return tuple(local)


def check_shapes(run: FakeRank, classes: RankClasses) -> None:
    """Check the local shapes of a rank, as `check_shapes_of`."""
    check_shapes_of(run.model, run.rank, classes)


def check_shapes_of(model: nn.Module, rank: int, classes: RankClasses) -> None:
    """Check that the local shapes of a rank are those that its class was made for.

    Args:
        rank: of the ranks that `classes` groups.

    Raises:
        VerificationError: they are not, so that shapes do not tell which ranks are alike.
    """
    place = classes.coordinates(rank)
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        shape = tuple(parameter.to_local().shape)
        wanted = _local_shape(_layout_of(parameter), classes.sizes, place)
        if shape != wanted:
            raise VerificationError(
                f"parameter '{name}' has {shape} on rank {rank} and its placements "
                f"{parameter.placements} say {wanted}, so shapes do not show which ranks are "
                "alike; read the graph of every rank: --all-ranks"
            )


def announcement(classes: RankClasses | None, world_size: int) -> str:
    if classes is None:
        return f"Capturing the step of all {world_size:,} ranks"
    by_axis = ", ".join(
        f"{len(set(labels))} along {name} ({len(labels):,})"
        for name, labels in zip(classes.names, classes.labels, strict=True)
        if len(labels) > 1
    )
    return (
        f"Capturing the step of {len(classes.representatives())} of {world_size:,} ranks, one for "
        f"each class of coordinates: {by_axis or 'one rank'}"
    )
