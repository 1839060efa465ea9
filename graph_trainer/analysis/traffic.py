"""What each collective is for: FSDP's two roles, tensor parallelism, or anything else."""

from __future__ import annotations

from enum import StrEnum

from torch import fx

from graph_trainer.analysis.collectives import Collective
from graph_trainer.joint_graph import Role


class Traffic(StrEnum):
    """What a collective is for."""

    UNSHARD = "unshard"
    REDUCE_GRAD = "reduce_grad"
    TENSOR_PARALLEL = "tensor_parallel"
    OTHER = "other"


def traffic_of(issued: list[Collective]) -> dict[fx.Node, Traffic]:
    """What each collective of a graph is for. Linear in collectives and group sizes.

    FSDP's say so themselves. Of the rest, tensor parallelism's are those on groups that share
    no two ranks with a group of FSDP's, so that their members compute on the same batch.
    """
    of_role = {Role.UNSHARD: Traffic.UNSHARD, Role.REDUCE_GRAD: Traffic.REDUCE_GRAD}
    data_parallel = {c.ranks for c in issued if c.role is not None}
    known: dict[tuple[int, ...], Traffic] = {}
    found = {}
    for c in issued:
        if c.role is not None:
            found[c.node] = of_role[c.role]
            continue
        if c.ranks not in known:
            apart = all(len(set(c.ranks) & set(group)) < 2 for group in data_parallel)
            known[c.ranks] = Traffic.TENSOR_PARALLEL if apart else Traffic.OTHER
        found[c.node] = known[c.ranks]
    return found
