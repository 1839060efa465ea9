"""Every private or version-dependent name of torch, with the reason it is needed.

Checked for torch 2.13 to 2.15 where a name says nothing else. The rest of the package uses public
names only; tests/unit/test_imports.py checks that.
"""

from __future__ import annotations

import contextlib
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

# The functional collectives register the ops under this name; the module is private by name
# although DTensor's documented redistribution runs on it.
import torch.distributed._functional_collectives as _functional_collectives  # noqa: F401

# Flattens and rebuilds nested arguments; torch's pytree is private by name only.
import torch.utils._pytree as pytree  # noqa: F401
from torch import fx, nn

# The fake mode that a set of fake tensors belongs to.
from torch._guards import detect_fake_mode as detect_fake_mode

# The class of ops that run subgraphs; only the ops themselves are public.
from torch._ops import HigherOrderOperator as HigherOrderOperator

# FakeTensorMode: tensors with shapes, dtypes and devices but no storage. It has no public
# home yet, although torch.export and torch.compile are built on it.
from torch._subclasses.fake_tensor import DataDependentOutputException  # noqa: F401
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

# Whether a profiler records what this thread runs. torch 2.13 to 2.15.
from torch.autograd import _profiler_enabled as profiler_enabled  # noqa: F401
from torch.distributed.tensor import Shard

# What a DTensor's layout consists of beside mesh and placements. torch 2.13 to 2.15.
from torch.distributed.tensor._dtensor_spec import ShardOrderEntry as ShardOrderEntry
from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta

# DTensor's placement for a dimension that tensor parallelism shards first and FSDP again;
# checkpoints written by FSDP2 carry it, so ours must.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

# A graph module that generates its code when it is called, as most copies of a graph never are.
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule  # noqa: F401

# Symbols for sizes that only data decide, which a fake mode gives to `.item()`.
from torch.fx.experimental.symbolic_shapes import ShapeEnv as ShapeEnv

# Inside, real tensors reach their kernels, whatever modes are active.
from torch.utils._mode_utils import no_dispatch as no_dispatch

# The mode by which random ops on sharded parameters are drawn whole. The subclass protocol by which
# DTensor and friends say what they wrap: documented for subclass authors, private in name.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as _is_wrapper

if TYPE_CHECKING:
    from torch.distributed.checkpoint import FileSystemReader

_OPS = (torch._ops.OpOverload, HigherOrderOperator)
c10d_functional = torch.ops._c10d_functional


def replace_dispatch(mode: FakeTensorMode, dispatch: Callable[..., Any]) -> None:
    """Let a mode of fake tensors run its ops by another function, as `FakeTensorMode.dispatch`.

    On the one object and no subclass of it: higher-order ops have rules for the class
    FakeTensorMode alone, looked up by type.
    """
    mode.dispatch = dispatch  # type: ignore[method-assign]


is_traceable_wrapper_subclass: Callable[[torch.Tensor], bool] = _is_wrapper
"""Returns whether a tensor follows the protocol; torch's check narrows types wrongly in mypy."""

current_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr
"""Returns the number that the next autograd node of this thread will get."""

autograd_sequence_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
"""Returns the number that an autograd node got when forward made it."""


@contextlib.contextmanager
def local_slices(around: Callable[[str], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """Inside, enter `around(group name)` whenever DTensor takes this rank's local slice of a
    replicated tensor, as each rank of the group does at the same place of the program.

    A trace alone cannot tell this from rank 0 reading the first rows, as all ranks may. Shard's
    method is the one place through which all such redistributions go.
    """
    original = Shard._replicate_to_shard

    def within(shard: Shard, tensor: torch.Tensor, mesh: Any, mesh_dim: int, *rest: Any) -> Any:
        with around(mesh.get_group(mesh_dim).group_name):
            return original(shard, tensor, mesh, mesh_dim, *rest)

    with patch.object(Shard, "_replicate_to_shard", within):
        yield


def strided_shards_outside_traces() -> contextlib.AbstractContextManager[Any]:
    """While entered: which rows a strided shard has is computed from real indices, as in eager.

    `_StridedShard` computes it with tensors and reads them, which a trace has no values for. It has
    the method since torch 2.11 at the latest.
    """
    original = StridedShard.local_shard_size_and_offset

    def of_real_indices(*args: Any, **kwargs: Any) -> Any:
        with no_dispatch():
            return original(*args, **kwargs)

    return patch.object(StridedShard, "local_shard_size_and_offset", of_real_indices)


def selective_checkpoint_as_in_eager() -> contextlib.AbstractContextManager[None]:
    """Let selective checkpointing save and recompute while it is traced, as it does eagerly.

    torch.utils.checkpoint sees make_fx at work and takes it for torch.compile: it then keeps
    every result, recomputes nothing, only tags, and takes in-place meta functions for mutations
    of what it keeps ("Tensor cached during selective activation checkpoint has been mutated").
    In this context checkpoint takes the trace for an eager run. torch 2.13; a torch without
    the context raises what it raises.
    """
    return getattr(torch.compiler, "_non_strict_tracing_context", contextlib.nullcontext)()


def has_registered_effect(target: Any) -> bool:
    """Return whether an op is declared to have an effect when it is called.

    An operator's register_effect (which `_higher_order_ops.effects` records) and
    fx.node.has_side_effect declare it; torch has no public way to read either.
    """
    from torch._higher_order_ops import effects

    if target is effects.with_effects or target in fx.node._side_effectful_functions:
        return True
    return isinstance(target, _OPS) and effects._get_effect(target) is not None


inputs_of = operator.attrgetter("_input_nodes")
"""Iterates over the inputs of a node, as `all_input_nodes`, which makes a list at each call: ten
times in each analysis of each node."""

NODE_ATTRIBUTES = ("op", "target", "_args", "_kwargs")
"""What a node is, without the properties around the last two, which take twice the time."""


def set_arguments(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Set what a new node is given.

    The setters of `args` and `kwargs` call this method of torch 2.13 too, one after the other,
    and Node.__setattr__ takes the node out of the table of find_nodes and puts it back each time.
    """
    node._update_args_kwargs(args, kwargs)


def rename_node(graph: fx.Graph, node: fx.Node, name: str) -> None:
    """Give a node a readable name. fx has no public call for it."""
    node._rename(name)
    if node.op == "placeholder":
        node.target = node.name


def storage_id(tensor: torch.Tensor) -> int:
    """Equal for two (fake) tensors exactly when they share a storage."""
    return tensor.untyped_storage()._cdata


PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"
"""The dicts in which a module keeps what is registered on it, since the first release of torch.nn.
get_parameter and get_submodule use getattr, and so may find a property of the class instead."""


@contextlib.contextmanager
def swap_tensors(model: nn.Module, replacement: dict[int, torch.Tensor]) -> Iterator[None]:
    """Inside, replace the tensors of `model`; restore them at the end, on errors too.

    torch.nn.utils.stateless does the same but allows no call other than forward.

    Args:
        replacement: from id(tensor) to the new tensor, so that tied parameters stay tied. Other
            attributes that are one of these tensors are replaced as well.
    """
    modules = list(model.modules())
    saved = [[dict(each) for each in (*tensor_dicts(m), vars(m))] for m in modules]
    try:
        for module in modules:
            # a plain attribute may be a buffer too, as the original table of a rotary embedding
            for place in (*tensor_dicts(module)[:2], vars(module)):
                place.update(
                    {n: replacement[id(t)] for n, t in place.items() if id(t) in replacement}
                )
        yield
    finally:
        for module, (*contents, attributes) in zip(modules, saved, strict=True):
            for place, content in zip(tensor_dicts(module), contents, strict=True):
                place.clear()
                place.update(content)
            for name, value in attributes.items():
                if id(value) in replacement and vars(module).get(name) is replacement[id(value)]:
                    vars(module)[name] = value


def without_torch_functions() -> contextlib.AbstractContextManager[None]:
    """Inside, no mode sees reads of tensors' attributes, each of which would call its Python.

    torch._C.DisableTorchFunction is what implementations of __torch_function__ use themselves; the
    public DisableTorchFunctionSubclass leaves modes on.
    """
    return torch._C.DisableTorchFunction()


def mark_as_parameter(tensor: torch.Tensor) -> None:
    """Let isinstance(tensor, nn.Parameter) hold, as torch itself does for subclasses of Tensor."""
    tensor._is_param = True


def tensor_dicts(module: nn.Module) -> list[dict[str, Any]]:
    """Return the dicts of a module's own parameters, buffers and modules."""
    return [vars(module)[kind] for kind in (PARAMETERS, BUFFERS, MODULES)]


def tensor_hooks(tensor: torch.Tensor) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Return a tensor's hooks on its gradient, and those that run once it is in `.grad`, as
    register_hook and register_post_accumulate_grad_hook keep them. torch has no public way to read
    them."""
    on_gradient = getattr(tensor, "_backward_hooks", None) or {}
    after = getattr(tensor, "_post_accumulate_grad_hooks", None) or {}
    return list(on_gradient.values()), list(after.values())


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hooks_of(modules: Iterable[nn.Module]) -> tuple[Callable[..., Any], ...]:
    """Return what a step runs beside the forwards of the classes, in order.

    These are hooks of all modules, of a model's modules and parameters, and forwards that are
    attributes of a module. torch.nn has no public list of them. Read in every step, so that each
    empty dict costs one look-up.
    """
    hooks_of_all = (vars(torch.nn.modules.module)[f"_global{kind}"] for kind in _HOOKS)
    hooks: list[Callable[..., Any]] = [hook for each in hooks_of_all for hook in each.values()]
    for module in modules:
        contents = vars(module)
        if "forward" in contents:
            hooks.append(contents["forward"])
        for kind in _HOOKS:
            if of_kind := contents[kind]:
                hooks += of_kind.values()
        for parameter in vars(module)[PARAMETERS].values():
            if parameter is not None and (
                parameter._backward_hooks or parameter._post_accumulate_grad_hooks
            ):
                hooks += [hook for each in tensor_hooks(parameter) for hook in each]
    return tuple(hooks)


@contextlib.contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, a module runs `forward` when it is called, and none of the hooks that it has. The
    dicts of hooks are attributes since the first releases of torch.nn."""
    contents = vars(module)
    before = {name: contents[name] for name in ("forward", *_HOOKS) if name in contents}
    contents.update({"forward": forward, **{name: OrderedDict() for name in _HOOKS}})
    try:
        yield
    finally:
        del contents["forward"]
        contents.update(before)


def fake_like(
    value: torch.Tensor,
    shape: Sequence[Any],
    stride: Sequence[Any],
    mode: FakeTensorMode,
    device: torch.device,
) -> torch.Tensor:
    """Make a fake tensor like another one, of a shape, strides and device, with its own storage.

    By its class, which has no public name: an op in a FakeTensorMode takes ten times as long for
    each of thousands of parameters, and ten milliseconds and more where sizes are symbols.
    """
    with no_dispatch():
        if all(type(size) is int for size in (*shape, *stride)):
            like = torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")
        else:
            like = torch.empty(0, dtype=value.dtype, device="meta").as_strided(shape, stride)
        like.requires_grad_(value.requires_grad)
        return FakeTensor(mode, like, device)


def value_of_copy(value: Any, sizes: dict[Any, torch.SymInt]) -> Any:
    """Make a value like another one whose sizes data decide, with symbols of its own.

    ShapeEnv's methods are undocumented; to run the op again takes milliseconds where sizes are sums
    of many symbols.

    Args:
        value: a fake tensor, a size, or anything else, which is returned as it is.
        sizes: by expression of a size of such values, the size to take; missing ones are made.
    """

    def own(size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        shapes, expression = size.node.shape_env, size.node.expr
        for symbol in expression.free_symbols - sizes.keys():
            sizes[symbol] = shapes.create_unbacked_symint()
            shapes.var_to_range[sizes[symbol].node.expr] = shapes.var_to_range[symbol]
            shapes.pending_fresh_unbacked_symbols.clear()  # it is in a value: this one
        if expression not in sizes:
            symbols = {symbol: sizes[symbol].node.expr for symbol in expression.free_symbols}
            sizes[expression] = shapes.create_symintnode(expression.xreplace(symbols), hint=None)
        return sizes[expression]

    if not isinstance(value, FakeTensor):
        return own(value)
    shape, stride = tuple(map(own, value.shape)), tuple(map(own, value.stride()))
    return fake_like(value, shape, stride, value.fake_mode, value.fake_device)


def clear_saved_tensors(ctx: Any) -> None:
    """Free what an autograd function saved, unless its graph is retained; it would stay alive until
    its backward has ended. Undocumented, used by AOTAutograd."""
    ctx.maybe_clear_saved_tensors()


def fsspec_reader() -> type[FileSystemReader]:
    """Return the reader that dcp.load takes for remote storage; by public names dcp.load alone can
    make it."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    return FsspecReader
