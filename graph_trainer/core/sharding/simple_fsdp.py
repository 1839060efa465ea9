"""SimpleFSDP: a sharded parameter that all-gathers when read and reduces its gradient.

There are no hooks and no flat buffers: reading `module.weight` inside forward runs an all-gather
that autograd records, and its backward is the reduction. Run eagerly this is a slow but exact FSDP
that keeps everything unsharded until backward ends. In a captured graph each of these reads is a
few plain nodes that passes can move, merge, drop and repeat.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.fx.traceback import annotate
from torch.nn.parameter import is_lazy

from graph_trainer.core.graph.annotations import Role, annotation
from graph_trainer.core.names import clean_fqn
from graph_trainer.core.sharding.functional_collectives import (
    all_gather,
    all_reduce,
    reduce_scatter,
)
from graph_trainer.core.torch_private import PARAMETERS, StridedShard
from graph_trainer.core.torch_private_groups import concatenate_meshes
from graph_trainer.errors import CheckpointError, ConfigError

Mode = Literal["fully_shard", "hybrid_shard", "replicate"]

_as_shards: ContextVar[bool] = ContextVar("graph_trainer_sharded_parameters", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecisionPolicy:
    """Dtypes of a parameter's all-gather and of its gradient's reduction."""

    param_dtype: torch.dtype | None = None
    """Dtype that parameters are cast to before they are gathered; None for no cast."""

    reduce_dtype: torch.dtype | None = None
    """Dtype that gradients are reduced in, over every mesh dimension, also those of tensor
    parallelism; None for no cast."""


class _TensorParallel(NamedTuple):
    """The layout of the DTensor that the model computes with."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Sharding:
    """How one parameter is unsharded and how its gradient is reduced."""

    fqn: str = field(compare=False)  # equal layers have equal shardings
    shard_group: dist.ProcessGroup | None
    """The group of the all-gather and the reduce-scatter; None if every rank has all rows."""
    reduce_groups: tuple[dist.ProcessGroup, ...]
    """The groups of the all-reduces after the reduce-scatter."""
    dim: int
    """The dimension that is sharded; its entries are the rows below."""
    rows: int
    """Rows of the unsharded local tensor."""
    local_rows: int
    divisor: float
    policy: MixedPrecisionPolicy
    tensor_parallel: _TensorParallel | None
    """None if the model computes with a plain tensor."""

    @property
    def rows_per_rank(self) -> int:
        """Rows that each rank sends: those of the first ranks, which have the most."""
        assert self.shard_group is not None
        return -(-self.rows // self.shard_group.size())

    def __deepcopy__(self, memo: dict[int, Any]) -> _Sharding:
        """Return itself: a copied model communicates over the same process groups."""
        return self

    def unshard(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the module computes with: gathered, in the policy's dtype."""
        shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return _Unshard.apply(shard, self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOver:
    """The ranks over which one parameter is sharded, if they are not those of the model."""

    mesh: DeviceMesh
    """The data-parallel mesh of the parameter; for experts, the ranks with the same experts."""

    mode: Mode
    """How it is sharded, as `simple_fsdp` takes it."""

    dim: int = 0
    """The dimension that is split over the mesh's ranks."""


class _Unshard(torch.autograd.Function):
    """Cast and all-gather a shard; backward reduces the gradient back to the shard. Where tensor
    parallelism has distributed the parameter, the result and its gradient are DTensors."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, sharding: _Sharding) -> torch.Tensor:
        ctx.sharding = sharding
        ctx.shard_dtype = shard.dtype
        with annotate(annotation(role=Role.UNSHARD, parameter=sharding.fqn)):
            full = shard
            if shard.is_floating_point() and sharding.policy.param_dtype is not None:
                full = shard.to(sharding.policy.param_dtype)
            if sharding.shard_group is not None:
                # [local rows, ...] -> [rows, ...]. The last ranks may have fewer rows or none: each
                # rank sends the same padded number, and all padding comes after the last row.
                if sharding.dim:
                    full = full.movedim(sharding.dim, 0)
                padded = _pad_rows(full.contiguous(), sharding.rows_per_rank)
                full = all_gather(padded, sharding.shard_group)
                if full.shape[0] != sharding.rows:
                    full = full.narrow(0, 0, sharding.rows)
                if sharding.dim:
                    # contiguous, as the parameter is, for kernels that read it
                    full = full.movedim(0, sharding.dim).contiguous()
            if full is shard:  # autograd needs another tensor than its input
                full = full.view_as(full)
        if sharding.tensor_parallel is None:
            return full
        mesh, placements, shape, stride = sharding.tensor_parallel
        # With shape and stride, because from_local would infer the local size times the mesh size,
        # which is wrong if tensor parallelism does not divide the rows.
        return DTensor.from_local(
            full, mesh, placements, run_check=False, shape=shape, stride=stride
        )

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        sharding: _Sharding = ctx.sharding
        with annotate(annotation(role=Role.REDUCE_GRAD, parameter=sharding.fqn)):
            if grad.is_floating_point() and sharding.policy.reduce_dtype is not None:
                grad = grad.to(sharding.policy.reduce_dtype)
            if isinstance(grad, DTensor):
                # Here and not in the backward of from_local, which would sum a replicated
                # parameter's gradient over tensor parallelism before the cast.
                assert sharding.tensor_parallel is not None
                grad = grad.redistribute(placements=sharding.tensor_parallel.placements).to_local()
            if sharding.shard_group is not None:
                # [rows, ...] -> [local rows, ...], summed over the group
                if sharding.dim:
                    grad = grad.movedim(sharding.dim, 0)
                num_padded = sharding.rows_per_rank * sharding.shard_group.size()
                # without a name, the padded gradient is freed as soon as it is reduced
                grad = reduce_scatter(
                    _pad_rows(grad.contiguous(), num_padded), sharding.shard_group
                )
                if sharding.rows_per_rank != sharding.local_rows:
                    grad = grad.narrow(0, 0, sharding.local_rows)
                if sharding.dim:
                    grad = grad.movedim(0, sharding.dim).contiguous()
            for group in sharding.reduce_groups:
                grad = all_reduce(grad.contiguous(), group)
            if sharding.divisor != 1:
                grad = grad / sharding.divisor
            return grad.to(ctx.shard_dtype), None


def _pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - tensor.shape[0]
    if missing == 0:
        return tensor
    return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])


@contextlib.contextmanager
def sharded_parameters() -> Iterator[None]:
    """Inside, reading `module.weight` returns the sharded parameter itself.

    For code that writes parameters: initialisation, tying, replacing parameters of a model.
    """
    token = _as_shards.set(True)  # ContextVar.set takes no keyword
    try:
        yield
    finally:
        _as_shards.reset(token)


def simple_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    mode: Mode = "fully_shard",
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    gradient_divide_factor: float | None = None,
    shard_over: Callable[[str, nn.Parameter], ShardOver | None] | None = None,
) -> nn.Module:
    """Shard the parameters of `model` in place, and gather them whenever they are read.

    Args:
        model: any module, on a device or on meta; every rank must have the same values.
            Parameters that are DTensors already (tensor parallelism) are sharded again by rows.
            Frozen parameters stay frozen, and tied ones tied. Scalars are replicated.
        mesh: the data-parallel mesh: one dimension for "fully_shard" and "replicate",
            (replicate, shard) for "hybrid_shard".
        mode: "fully_shard" (FSDP), "hybrid_shard" (HSDP) or "replicate" (DDP).
        mp_policy: dtypes to compute and to reduce in.
        gradient_divide_factor: summed gradients are divided by this number. None for the number of
            data-parallel ranks, so that a mean loss on each rank gives the mean gradient.
        shard_over: `shard_over(fqn, parameter)` -> another mesh and dimension for a parameter, or
            None for `mesh` and its rows. Experts that are parallel over some ranks (DTensors on a
            mesh of these ranks) are sharded over fewer ranks.

    Returns:
        `model` itself. Its parameters are DTensors on `mesh`, followed by the mesh of tensor
        parallelism if there is one, split by rows like FSDP2's.

    Raises:
        ConfigError: an unknown mode, a mesh that does not fit it, a model sharded before, or one
            that is scripted or lazy.

    Example::

        mesh = init_device_mesh("cpu", (8,))
        model = simple_fsdp(model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    """
    _check_mode(mode, mesh)
    for name, module in model.named_modules():
        if isinstance(module, _Sharded):
            raise ConfigError(
                f"module '{name}' ({type(module).__name__}) is sharded already: call simple_fsdp "
                "once, on the root"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"module '{name}' is scripted or traced by torch.jit, which reads its parameters "
                "by itself: shard the Python module that it was made of"
            )
    policy = mp_policy or MixedPrecisionPolicy()
    divisor = float(mesh.size()) if gradient_divide_factor is None else gradient_divide_factor
    sharded: dict[int, tuple[nn.Parameter, _Sharding]] = {}
    for fqn, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ConfigError(
                f"parameter '{fqn}' has no shape yet: run the model once on a batch before "
                "simple_fsdp, which initializes lazy modules"
            )
        fqn = clean_fqn(fqn)
        over = shard_over(fqn, parameter) if shard_over is not None else None
        over = over or ShardOver(mesh=mesh, mode=mode)
        _check_mode(over.mode, over.mesh)
        sharded[id(parameter)] = _shard(fqn, parameter, over, policy, divisor)
    reading_class: Any = functools.cache(_reading_class)  # one for each class
    for module in list(model.modules()):
        parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        if not parameters:
            continue
        shardings = {}
        for name, parameter in parameters.items():
            shard, shardings[name] = sharded[id(parameter)]
            module.register_parameter(name, shard)
        module.graph_trainer_sharding = shardings  # type: ignore[assignment]
        module.__class__ = reading_class(type(module), tuple(parameters))
    return model


class _Sharded:
    """Marks a module that gathers its parameters when they are read."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Describe the module for copy and deepcopy, which work as for any module."""
        described: Any = super().__reduce_ex__(protocol)
        make = described[0]
        return (_Copier(make), *described[1:])


class _Copier:
    """Makes the copy of a sharded module. Raises if it is pickled, as pickle would have to do."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *args: Any) -> Any:
        return self._make(*args)

    def __reduce__(self) -> NoReturn:
        raise CheckpointError(
            "a module that simple_fsdp has sharded cannot be pickled, because it refers to process "
            "groups: save model.state_dict(), and load it into a new model that is sharded again"
        )


def _reading_class(base: type, names: tuple[str, ...]) -> type:
    """Make a subclass of `base` whose attributes `names` gather the parameters of these names.

    Python finds a property of the class before nn.Module searches its parameters, so forward reads
    the gathered tensor; named_parameters, state_dict and the optimizer read the shard.
    """

    def read(module: nn.Module, name: str) -> torch.Tensor | None:
        parameter = vars(module)[PARAMETERS][name]
        if parameter is None or _as_shards.get():
            return parameter
        try:
            return module.graph_trainer_sharding[name].unshard(parameter)  # type: ignore[index, union-attr]
        except AttributeError as error:
            # nn.Module.__getattr__ would catch it and return the shard instead
            raise RuntimeError(f"gathering parameter '{name}' failed: {error}") from error

    reads = {name: property(functools.partial(read, name=name)) for name in names}
    return type(base.__name__, (_Sharded, base), {**reads, "__module__": base.__module__})


def shard_of(full: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """Return this rank's part of a full tensor, sharded like a parameter that `simple_fsdp` made.

    Args:
        full: plain tensor of the parameter's global shape.
        parameter: a sharded parameter, or any DTensor with placements Shard and Replicate.

    Returns:
        A plain tensor of the local shape. No communication takes place.
    """
    mesh = parameter.device_mesh
    local = full
    # From the innermost mesh dimension outwards: tensor parallelism splits first, and FSDP splits
    # each part again, as a strided shard describes.
    for dim in reversed(range(mesh.ndim)):
        placement = parameter.placements[dim]
        if isinstance(placement, (Shard, StridedShard)):
            local = _part_of_rank(local, placement.dim, mesh, dim)
    return local


def _check_mode(mode: str, mesh: DeviceMesh) -> None:
    if mode not in get_args(Mode):
        raise ConfigError(f"mode is '{mode}'; it must be one of {', '.join(get_args(Mode))}")
    expected = 2 if mode == "hybrid_shard" else 1
    if mesh.ndim != expected:
        dimensions = "2 dimensions (replicate, shard)" if expected == 2 else "1 dimension"
        raise ConfigError(
            f"mode '{mode}' needs a mesh of {dimensions} and got one of {mesh.ndim}: {mesh}"
        )


def _shard(
    fqn: str, parameter: nn.Parameter, over: ShardOver, policy: MixedPrecisionPolicy, divisor: float
) -> tuple[nn.Parameter, _Sharding]:
    """Return this rank's shard of a parameter, as a DTensor parameter, and how to gather it."""
    data = parameter.detach()
    mesh = over.mesh
    local = data
    full_mesh = mesh
    tensor_parallel = None
    tensor_parallel_placements: tuple[Placement, ...] = ()
    if isinstance(data, DTensor):
        if any(isinstance(p, Partial) for p in data.placements):
            raise ConfigError(
                f"parameter '{fqn}' is a partial DTensor, which cannot be sharded: redistribute it "
                "first"
            )
        local = data.to_local()
        full_mesh = concatenate_meshes([mesh, data.device_mesh])
        tensor_parallel_placements = data.placements
        tensor_parallel = _TensorParallel(
            data.device_mesh, data.placements, data.shape, data.stride()
        )
    shard_dim = mesh.ndim - 1
    # on one rank the dimension does not matter
    dim = over.dim if mesh.size(shard_dim) > 1 else 0
    if dim >= max(1, local.ndim):
        raise ConfigError(
            f"parameter '{fqn}' of {local.ndim} dimensions has no dimension {dim}: let shard_over "
            "return a dimension that the parameter has"
        )
    rows = local.shape[dim] if local.ndim else 0
    placement: Placement
    if over.mode != "replicate" and local.ndim > 0:
        # a copy, so that the unsharded storage is freed
        shard = _part_of_rank(local, dim, mesh, shard_dim).contiguous().clone()
        local_rows = shard.shape[dim]
        placement = Shard(dim)
        split = _parts_of_dim(data, dim)
        if split > 1:
            placement = StridedShard(dim, split_factor=split)
        shard_group = mesh.get_group(shard_dim)
        reduce_groups = tuple(mesh.get_group(d) for d in range(shard_dim))
    else:
        shard = local.clone()
        local_rows = rows
        placement = Replicate()
        shard_group = None
        reduce_groups = tuple(mesh.get_group(d) for d in range(mesh.ndim))
    sharding = _Sharding(
        fqn=fqn,
        shard_group=shard_group,
        reduce_groups=reduce_groups,
        dim=dim,
        rows=rows,
        local_rows=local_rows,
        divisor=divisor,
        policy=policy,
        tensor_parallel=tensor_parallel,
    )
    replicated = [Replicate() for _ in range(shard_dim)]
    dtensor = DTensor.from_local(
        shard,
        full_mesh,
        (*replicated, placement, *tensor_parallel_placements),
        run_check=False,
        shape=data.shape,
        stride=data.stride(),
    )
    return nn.Parameter(dtensor, requires_grad=parameter.requires_grad), sharding


def _parts_of_dim(data: torch.Tensor, dim: int) -> int:
    """Return into how many parts tensor or expert parallelism has split a dimension."""
    parts = 1
    if isinstance(data, DTensor):
        for size, placement in zip(data.device_mesh.shape, data.placements, strict=True):
            if isinstance(placement, Shard) and placement.dim == dim:
                parts *= size
    return parts


def _part_of_rank(
    tensor: torch.Tensor, tensor_dim: int, mesh: DeviceMesh, mesh_dim: int
) -> torch.Tensor:
    """Slice as torch.chunk does: ceil(size / ranks) for the first ranks, then fewer or none."""
    size = tensor.shape[tensor_dim]
    per_rank = -(-size // mesh.size(mesh_dim))
    start = min(mesh.get_local_rank(mesh_dim) * per_rank, size)
    return tensor.narrow(tensor_dim, start, min(per_rank, size - start))
