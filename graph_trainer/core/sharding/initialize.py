"""Random initialisation that gives the same model on every mesh."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from graph_trainer.core.sharding.simple_fsdp import shard_of
from graph_trainer.core.torch_private import TorchDispatchMode
from graph_trainer.errors import ConfigError


class SameOnAnyMesh(TorchDispatchMode):
    """Inside, a random op on a sharded parameter draws the full parameter and keeps its shard.

    Every rank draws the same numbers from its default generator, which must be in the same state on
    all ranks. So one rank, eight ranks and eight thousand start from the same model, also on
    devices where DTensor's generator does not work (CPU). Needs memory for one full parameter.

    A plain tensor that is copied to a sharded parameter is the value of the full parameter. A
    scalar that is read from a sharded tensor is that of the full tensor: trunc_normal_ reads one to
    draw again until all numbers are within bounds, and ranks that read the values of their shards
    would draw different numbers afterwards. Ops that make a new random tensor like a DTensor
    (rand_like) draw the full tensor too, and their result is sharded like their input.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], DTensor):
            # a scalar may be a partial sum or maximum on each rank; no backend adds booleans
            scalar = args[0]
            mesh = scalar.device_mesh
            local = scalar.to_local()
            part: torch.Tensor = local.to(torch.int64) if local.dtype is torch.bool else local
            total = DTensor.from_local(part, mesh, scalar.placements, run_check=False)
            value = total.redistribute(placements=[Replicate()] * mesh.ndim).to_local().item()
            return bool(value) if local.dtype is torch.bool else value
        parameter = args[0] if args else None
        if not isinstance(parameter, DTensor):
            return func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default and not isinstance(args[1], DTensor):
            full_value = args[1].expand(parameter.shape)  # the same on every rank
            parameter.to_local().copy_(shard_of(full_value, parameter))
            return parameter
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if any(isinstance(value, DTensor) for value in (*args[1:], *kwargs.values())):
            raise ConfigError(
                f"{func} initialises a sharded parameter from another sharded tensor, and only "
                "random ops with one sharded tensor can give the same numbers on every mesh: "
                "initialise the parameter with one of these"
            )
        in_place = func._schema.is_mutable
        if not in_place and not func._schema.name.endswith("_like"):
            raise ConfigError(
                f"{func} computes from the values of a sharded tensor: initialise parameters "
                "with in-place random ops, normal_ for example"
            )
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        drawn = func(full, *args[1:], **kwargs)
        shard = shard_of(drawn, parameter)
        if in_place:
            parameter.to_local().copy_(shard)
            return parameter
        return DTensor.from_local(
            shard.clone(),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=drawn.stride(),
        )
