"""The purpose of each collective: one of FSDP's two roles, a parallelism, or another."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from torch import fx

from graph_trainer.core.analysis.collectives import Collective
from graph_trainer.core.graph.annotations import Role, counts_of, is_context_parallel


class Traffic(StrEnum):
    """The purpose of a collective."""

    UNSHARD = "unshard"
    REDUCE_GRAD = "reduce_grad"
    TENSOR_PARALLEL = "tensor_parallel"
    CONTEXT_PARALLEL = "context_parallel"
    EXPERT_PARALLEL = "expert_parallel"
    OTHER = "other"


def traffic_of(issued: list[Collective], gradients: Iterable[str] = ()) -> dict[fx.Node, Traffic]:
    """Return the purpose of each collective of a graph. Linear in collectives and group sizes.

    FSDP's collectives have a role, and those of context parallelism a mark. Expert parallelism
    issues the all-to-alls whose splits data decide, and the all-to-alls of the same groups, which
    exchange the counts. Any other collective belongs to tensor parallelism if its group shares at
    most one rank with every data-parallel group: its members then compute on the same batch.

    Args:
        gradients: FQNs of the gradients that the graph returns. Without them, a group of tensor
            parallelism that reduces all the gradients that are reduced counts as data-parallel.
    """
    data_parallel = data_parallel_groups(issued, gradients)
    of_experts = {c.ranks for c in issued if counts_of(c.node) is not None}
    known: dict[tuple[int, ...], Traffic] = {}
    traffic = {}
    for c in issued:
        if c.role is not None:
            traffic[c.node] = Traffic(c.role)
        elif is_context_parallel(c.node):
            traffic[c.node] = Traffic.CONTEXT_PARALLEL
        elif c.kind == "all_to_all_single" and c.ranks in of_experts:
            traffic[c.node] = Traffic.EXPERT_PARALLEL
        else:
            if c.ranks not in known:
                shared = [len(set(c.ranks) & set(group)) for group in data_parallel]
                same_batch = all(count < 2 for count in shared)
                known[c.ranks] = Traffic.TENSOR_PARALLEL if same_batch else Traffic.OTHER
            traffic[c.node] = known[c.ranks]
    return traffic


def data_parallel_groups(
    issued: list[Collective], gradients: Iterable[str] = ()
) -> set[tuple[int, ...]]:
    """Return the groups that gather parameters, and those that reduce every gradient.

    "Every" are the gradients that any group reduces, with those that `gradients` names. A group of
    tensor parallelism reduces only the gradients of parameters that it does not shard.
    """
    reduced: dict[tuple[int, ...], set[str]] = {}
    for c in issued:
        if c.role is Role.REDUCE_GRAD:
            reduced.setdefault(c.ranks, set()).update(c.parameters)
    every = set(gradients).union(*reduced.values())
    gathering = {c.ranks for c in issued if c.role is Role.UNSHARD}
    return gathering | {ranks for ranks, parameters in reduced.items() if parameters == every}
