"""Every private or version-dependent name of torch, with the reason it is needed.

Checked for torch 2.13 to 2.15 unless a comment names other versions. The rest of the package uses
public names only; tests/unit/test_imports.py checks that.
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

# The module of make_fx, a decision of which `traced_as_one_op` replaces.
import torch.fx.experimental.proxy_tensor as _proxy_tensor

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

# The mode by which make_fx records ops, and the node of a tensor in its graph.
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

# Symbols for sizes that only data decide, which a fake mode gives to `.item()`.
from torch.fx.experimental.symbolic_shapes import ShapeEnv as ShapeEnv

# Inside, real tensors reach their kernels, whatever modes are active.
from torch.utils._mode_utils import no_dispatch as no_dispatch

# A mode that sees every op. The protocol by which subclasses such as DTensor list their inner
# tensors: documented for authors of subclasses, private in name.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as _is_wrapper

if TYPE_CHECKING:
    from torch.distributed.checkpoint import FileSystemReader

_OPS = (torch._ops.OpOverload, HigherOrderOperator)
c10d_functional = torch.ops._c10d_functional


def replace_dispatch(mode: FakeTensorMode, dispatch: Callable[..., Any]) -> None:
    """Let a mode of fake tensors run its ops by another function, as `FakeTensorMode.dispatch`.

    Replaces it on the object, and not in a subclass: higher-order ops look up their rules by type,
    and have them for the class FakeTensorMode alone.
    """
    mode.dispatch = dispatch  # type: ignore[method-assign]


is_traceable_wrapper_subclass: Callable[[torch.Tensor], bool] = _is_wrapper
"""Returns whether a tensor follows the protocol; torch's check narrows types wrongly in mypy."""

current_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr
"""Returns the number that the next autograd node of this thread will get."""

autograd_sequence_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
"""Returns the number that an autograd node got when forward made it."""


below_autograd: Callable[[], contextlib.AbstractContextManager[Any]] = (
    torch._C._AutoDispatchBelowAutograd
)
"""Inside, ops are not recorded for backward, nor decomposed because autograd has no formula."""


@contextlib.contextmanager
def traced_as_one_op(op: torch._ops.OpOverload) -> Iterator[None]:
    """Inside, make_fx records an op as it is on devices with a kernel, not decomposed as on meta.

    make_fx asks this function whether autograd has decomposed an op before. torch 2.13.
    """
    original = _proxy_tensor.autograd_would_have_decomposed

    def decomposed(func: Any, arguments: Any) -> bool:
        return func is not op and original(func, arguments)

    with patch.object(_proxy_tensor, "autograd_would_have_decomposed", decomposed):
        yield


@contextlib.contextmanager
def local_slices(around: Callable[[str], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """Inside, enter `around(group name)` whenever DTensor takes this rank's local slice of a
    replicated tensor, as each rank of the group does at the same place of the program.

    A trace alone does not show this: rank 0 reading its slice looks like all ranks reading the
    first rows. All such redistributions call this method of Shard.
    """
    original = Shard._replicate_to_shard

    def within(shard: Shard, tensor: torch.Tensor, mesh: Any, mesh_dim: int, *rest: Any) -> Any:
        with around(mesh.get_group(mesh_dim).group_name):
            return original(shard, tensor, mesh, mesh_dim, *rest)

    with patch.object(Shard, "_replicate_to_shard", within):
        yield


def strided_shards_outside_traces() -> contextlib.AbstractContextManager[Any]:
    """Inside, compute the rows of a strided shard from real indices, as in eager.

    `_StridedShard` computes them with tensors and reads their values, which a trace does not have.
    It has the method since torch 2.11 at the latest.
    """
    original = StridedShard.local_shard_size_and_offset

    def of_real_indices(*args: Any, **kwargs: Any) -> Any:
        with no_dispatch():
            return original(*args, **kwargs)

    return patch.object(StridedShard, "local_shard_size_and_offset", of_real_indices)


def selective_checkpoint_as_in_eager() -> contextlib.AbstractContextManager[None]:
    """Let selective checkpointing save and recompute while it is traced, as it does eagerly.

    torch.utils.checkpoint detects make_fx and treats it as torch.compile: it then keeps every
    result, recomputes nothing, only tags, and mistakes in-place meta functions for writes into
    results that it keeps ("Tensor cached during selective activation checkpoint has been mutated").
    In this context checkpoint treats the trace as an eager run. torch 2.13; without the context,
    torch may raise its error.
    """
    return getattr(torch.compiler, "_non_strict_tracing_context", contextlib.nullcontext)()


def has_registered_effect(target: Any) -> bool:
    """Return whether an op is declared to have an effect when it is called.

    An operator's register_effect (recorded in `_higher_order_ops.effects`) and
    fx.node.has_side_effect declare effects; torch has no public way to read either.
    """
    from torch._higher_order_ops import effects

    if target is effects.with_effects or target in fx.node._side_effectful_functions:
        return True
    return isinstance(target, _OPS) and effects._get_effect(target) is not None


inputs_of = operator.attrgetter("_input_nodes")
"""Iterates over the inputs of a node, as `all_input_nodes`, which makes a list at each call: ten
times in each analysis of each node."""

NODE_ATTRIBUTES = ("op", "target", "_args", "_kwargs")
"""The attributes that define a node. `_args` and `_kwargs` take half the time of the properties."""


def set_arguments(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Set the arguments of a new node.

    The setters of `args` and `kwargs` call this method of torch 2.13 too, one after the other, and
    Node.__setattr__ removes the node from the table of find_nodes and adds it again each time.
    """
    node._update_args_kwargs(args, kwargs)


def rename_node(graph: fx.Graph, node: fx.Node, name: str) -> None:
    """Give a node a readable name. fx has no public call for it."""
    node._rename(name)
    if node.op == "placeholder":
        node.target = node.name


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that two (fake) tensors share exactly if they share a storage."""
    return tensor.untyped_storage()._cdata


# The dicts of a module's registered parameters, buffers and modules, since the first release of
# torch.nn. get_parameter and get_submodule use getattr, and may find a property of the class.
PARAMETERS = "_parameters"
BUFFERS = "_buffers"
MODULES = "_modules"


@contextlib.contextmanager
def swap_tensors(model: nn.Module, replacement: dict[int, torch.Tensor]) -> Iterator[None]:
    """Inside, replace the tensors of `model`; restore them at the end, on errors too.

    torch.nn.utils.stateless does the same but allows no call other than forward.

    Args:
        replacement: from id(tensor) to the new tensor, so that tied parameters stay tied. Other
            attributes that are one of these tensors are replaced as well.
    """
    modules = list(model.modules())
    registered_before = []
    attributes_before = []
    for module in modules:
        registered_before.append([dict(named) for named in tensor_dicts(module)])
        attributes_before.append(dict(vars(module)))
    try:
        for module in modules:
            # a plain attribute may be a buffer too, as the original table of a rotary embedding
            parameters, buffers, _ = tensor_dicts(module)
            for named in (parameters, buffers, vars(module)):
                named.update(
                    {n: replacement[id(t)] for n, t in named.items() if id(t) in replacement}
                )
        yield
    finally:
        for module, registered in zip(modules, registered_before, strict=True):
            for named, before in zip(tensor_dicts(module), registered, strict=True):
                named.clear()
                named.update(before)
        for module, attributes in zip(modules, attributes_before, strict=True):
            for name, value in attributes.items():
                if id(value) in replacement and vars(module).get(name) is replacement[id(value)]:
                    vars(module)[name] = value


def without_torch_functions() -> contextlib.AbstractContextManager[None]:
    """Inside, reads of tensors' attributes do not call Python code of modes.

    Implementations of __torch_function__ use torch._C.DisableTorchFunction themselves; the public
    DisableTorchFunctionSubclass leaves modes on.
    """
    return torch._C.DisableTorchFunction()


def mark_as_parameter(tensor: torch.Tensor) -> None:
    """Make isinstance(tensor, nn.Parameter) true, as torch itself does for subclasses of Tensor."""
    tensor._is_param = True


def tensor_dicts(module: nn.Module) -> list[dict[str, Any]]:
    """Return the dicts of the parameters, buffers and modules registered on a module itself."""
    return [vars(module)[name] for name in (PARAMETERS, BUFFERS, MODULES)]


def tensor_hooks(tensor: torch.Tensor) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Return a tensor's hooks on its gradient, and its hooks that run after it is added to `.grad`.

    register_hook and register_post_accumulate_grad_hook add them; torch has no public way to read
    them.
    """
    on_gradient = getattr(tensor, "_backward_hooks", None) or {}
    after = getattr(tensor, "_post_accumulate_grad_hooks", None) or {}
    return list(on_gradient.values()), list(after.values())


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hooks_of(modules: Iterable[nn.Module]) -> tuple[Callable[..., Any], ...]:
    """Return the functions that a step runs beside the forwards of the classes, in order.

    These are hooks of all modules, hooks of a model's modules and parameters, and forwards that are
    attributes of a module. torch.nn has no public list of them. This runs in every step, so each
    empty dict costs one look-up.
    """
    hooks: list[Callable[..., Any]] = []
    for name in _HOOKS:
        hooks += vars(torch.nn.modules.module)[f"_global{name}"].values()
    for module in modules:
        attributes = vars(module)
        if "forward" in attributes:
            hooks.append(attributes["forward"])
        for name in _HOOKS:
            if attributes[name]:
                hooks += attributes[name].values()
        for parameter in attributes[PARAMETERS].values():
            if parameter is not None and (
                parameter._backward_hooks or parameter._post_accumulate_grad_hooks
            ):
                on_gradient, after_accumulation = tensor_hooks(parameter)
                hooks += [*on_gradient, *after_accumulation]
    return tuple(hooks)


@contextlib.contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, let a module run `forward` when it is called, and none of its hooks.

    The dicts of hooks are attributes since the first releases of torch.nn.
    """
    attributes = vars(module)
    before = {name: attributes[name] for name in ("forward", *_HOOKS) if name in attributes}
    attributes["forward"] = forward
    attributes.update({name: OrderedDict() for name in _HOOKS})
    try:
        yield
    finally:
        del attributes["forward"]
        attributes.update(before)


def fake_like(
    value: torch.Tensor,
    shape: Sequence[Any],
    stride: Sequence[Any],
    mode: FakeTensorMode,
    device: torch.device,
) -> torch.Tensor:
    """Make a fake tensor like another one, of a shape, strides and device, in a new storage.

    By its class, which has no public name: an op in a FakeTensorMode takes ten times as long for
    each of thousands of parameters, and ten milliseconds and more if sizes are symbols.
    """
    with no_dispatch():
        if all(type(size) is int for size in (*shape, *stride)):
            meta = torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")
        else:
            meta = torch.empty(0, dtype=value.dtype, device="meta").as_strided(shape, stride)
        meta.requires_grad_(value.requires_grad)
        return FakeTensor(mode, meta, device)


def traced_node(tensor: torch.Tensor) -> fx.Node:
    """Return the node of a fake tensor in the graph that make_fx is recording."""
    mode = get_proxy_mode()
    assert mode is not None, "a trace is under way"
    node: fx.Node = get_proxy_slot(tensor, mode.tracer).proxy.node
    return node


def read_next_as(tensor: torch.Tensor, number: torch.SymInt) -> None:
    """Let the next read of a fake tensor's value return a number that is known.

    The number is a new object of the same expression, so that a trace knows its node from that of
    `number`. FakeTensor stores what was read from it, and returns it to later reads.
    """
    assert isinstance(tensor, FakeTensor)
    expression = number.node.expr
    tensor.item_memo = number.node.shape_env.create_symintnode(expression, hint=None)


def value_of_copy(value: Any, sizes: dict[Any, torch.SymInt]) -> Any:
    """Make a value like another one whose sizes data decide, with other symbols.

    ShapeEnv's methods are undocumented; running the op again would take milliseconds if sizes are
    sums of many symbols.

    Args:
        value: a fake tensor, a size, or any other value, which is returned itself.
        sizes: from the expressions of sizes in such values to the sizes of copies. Missing sizes
            are added.
    """

    def size_of_copy(size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        shape_env = size.node.shape_env
        expression = size.node.expr
        for symbol in expression.free_symbols - sizes.keys():
            sizes[symbol] = shape_env.create_unbacked_symint()
            shape_env.var_to_range[sizes[symbol].node.expr] = shape_env.var_to_range[symbol]
            # torch expects a pending symbol in the result of an op: it is in this value
            shape_env.pending_fresh_unbacked_symbols.clear()
        if expression not in sizes:
            symbols = {symbol: sizes[symbol].node.expr for symbol in expression.free_symbols}
            copy = expression.xreplace(symbols)
            sizes[expression] = shape_env.create_symintnode(copy, hint=None)
        return sizes[expression]

    if not isinstance(value, FakeTensor):
        return size_of_copy(value)
    shape = tuple(size_of_copy(size) for size in value.shape)
    stride = tuple(size_of_copy(size) for size in value.stride())
    return fake_like(value, shape, stride, value.fake_mode, value.fake_device)


def clear_saved_tensors(ctx: Any) -> None:
    """Free the tensors that an autograd function saved, unless its graph is retained.

    Otherwise they would be alive until its backward ends. Undocumented, used by AOTAutograd.
    """
    ctx.maybe_clear_saved_tensors()


def fsspec_reader() -> type[FileSystemReader]:
    """Return the class of dcp.load's reader for remote storage, which has no public name."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    return FsspecReader


def is_composite(op: Any) -> bool:
    """Return whether an op is made of others on every device, which autograd records in its place.

    So are the few of torch.jit alone, which have no kernel.
    """
    name, has_kernel = op.name(), torch._C._dispatch_has_kernel_for_dispatch_key
    if not torch._C._dispatch_has_kernel(name):
        return True
    return bool(has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU"))
