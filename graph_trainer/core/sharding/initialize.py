"""Random initialisation that gives the same model on every mesh."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from graph_trainer.core.sharding.simple_fsdp import shard_of
from graph_trainer.core.torch_private import TorchDispatchMode
from graph_trainer.errors import ConfigError


class SameOnAnyMesh(TorchDispatchMode):
    """Inside, a random op on a sharded parameter draws the whole parameter and keeps its shard.

    Every rank draws the same numbers from its default generator, which must be in the same
    state on all of them. So one rank, eight ranks and eight thousand start from the same
    model, also on devices where DTensor's generator does not work (CPU). Memory: one
    whole parameter at a time. A plain tensor that is copied to a sharded parameter is the value of
    the whole parameter. Code that reads a value of a sharded tensor, as trunc_normal_ does to draw
    again until all are within bounds, gets that of the whole tensor: with the values of their
    shards, ranks would draw different numbers from there on. Ops that make a new random tensor
    like a DTensor (rand_like) are drawn whole too; what they return is sharded like their input.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], DTensor):
            # a scalar may be a partial sum or maximum on each rank; no backend adds booleans
            scalar = args[0]
            local, mesh = scalar.to_local(), scalar.device_mesh
            part: torch.Tensor = local.to(torch.int64) if local.dtype is torch.bool else local
            total = DTensor.from_local(part, mesh, scalar.placements, run_check=False)
            value = total.redistribute(placements=[Replicate()] * mesh.ndim).to_local().item()
            return bool(value) if local.dtype is torch.bool else value
        like = args[0] if args else None
        if func is torch.ops.aten.copy_.default and isinstance(like, DTensor):
            value = args[1]
            if not isinstance(value, DTensor):  # the whole value, the same on every rank
                like.to_local().copy_(shard_of(value.expand(like.shape), like))
                return like
        if not isinstance(like, DTensor) or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if any(isinstance(other, DTensor) for other in (*args[1:], *kwargs.values())):
            raise ConfigError(
                f"{func} initialises a sharded parameter from another sharded tensor; only "
                "random ops with one sharded tensor can give the same numbers on every mesh"
            )
        in_place = func._schema.is_mutable
        if not in_place and not func._schema.name.endswith("_like"):
            raise ConfigError(
                f"{func} computes from the values of a sharded tensor; initialise parameters "
                "with in-place random ops, normal_ for example"
            )
        whole = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        drawn = func(whole, *args[1:], **kwargs)
        local = shard_of(drawn, like)
        if in_place:
            like.to_local().copy_(local)
            return like
        return DTensor.from_local(
            local.clone(),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=drawn.stride(),
        )
