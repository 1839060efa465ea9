"""Fake tensors with the strides of real ones: some fake kernels lay their results out otherwise.

What a trace decides by strides (a reshape that is a view or a copy, `contiguous()`, the layout of
a gradient) is then what eager decides. The layout of a kernel's result depends on the order of
its inputs' strides, and not on how large they are: a run on a few elements shows it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graph_trainer.core.capture.side_effects import user_line
from graph_trainer.core.graph.annotations import value_of
from graph_trainer.core.graph.data_sizes import DataSizes, depends_on_data
from graph_trainer.core.graph.writes import writes_of
from graph_trainer.core.torch_private import (
    DataDependentOutputException,
    FakeTensorMode,
    no_dispatch,
    pytree,
    replace_dispatch,
)
from graph_trainer.errors import CaptureError

aten = torch.ops.aten

# Beside what torch tags as pointwise. On CPU, torch 2.13: the layouts of `benchmarks.sweep` find
# them, among the operators of PyTorch's own samples and their backwards.
_OTHER_STRIDES = {
    "_batch_norm_with_update", "_log_softmax_backward_data", "_native_batch_norm_legit",
    "_prelu_kernel_backward", "batch_norm_backward", "binary_cross_entropy",
    "binary_cross_entropy_backward", "channel_shuffle", "elu_backward", "glu_backward",
    "hardswish_backward", "hardtanh_backward", "huber_loss_backward", "leaky_relu_backward",
    "log_sigmoid_backward", "log_sigmoid_forward", "max_unpool2d", "mse_loss_backward",
    "native_batch_norm", "native_batch_norm_backward",
    "native_layer_norm_backward", "reflection_pad2d_backward", "reflection_pad3d",
    "reflection_pad3d_backward", "replication_pad2d_backward", "replication_pad3d",
    "replication_pad3d_backward", "rrelu_with_noise", "rrelu_with_noise_backward",
    "smooth_l1_loss_backward", "softplus_backward",
}  # fmt: skip

_FEW = 4096
"""An op on up to so many elements runs with the sizes that it has."""

_GAP = 4
"""Sizes that differ by less keep their difference, as those before and after a padding do. Where a
kernel then does not run (wider paddings, channels in groups, halves), four times this is tried."""

_MOST = 2**26
"""More elements are not tried."""


def fakes_as_real() -> FakeTensorMode:
    """Return a mode of fake tensors in which results have the strides that real kernels give them.

    Results on a device that is not here (meta, or a GPU that is planned for) keep the strides of
    the fake kernels. An op raises a CaptureError if its real kernel does not run on few elements
    and it has too many to be run as it is.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    replace_dispatch(mode, _Dispatch(mode))
    return mode


def let_views_copy(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """Turn views whose strides a plain fake kernel gets wrong into reshapes. Linear in nodes.

    A later trace of the graph (by AOTAutograd, Inductor) has plain fake tensors, on which such a
    view may be impossible. On real tensors the reshape is the same view.
    """
    corrected = mode.dispatch.corrected if isinstance(mode.dispatch, _Dispatch) else set()
    if not corrected:
        return
    writes = writes_of(graph)
    affected: set[fx.Node] = set()  # nodes whose strides a plain fake kernel may get wrong
    for node in graph.nodes:
        if node.target not in corrected and affected.isdisjoint(node.all_input_nodes):
            continue
        affected.add(node)
        if (
            node.target in (aten.view.default, aten._unsafe_view.default)
            and value_of(node).shape != value_of(node.args[0]).shape
            and not writes.is_written(node)  # a write into a copy would be lost
        ):
            node.target = aten.reshape.default


_Layout = tuple[tuple[int, ...], torch.dtype | None]
"""The strides and the dtype of a result: fake batch norm on mixed dtypes has another dtype."""


class _Dispatch:
    """Runs an op on fake tensors, as FakeTensorMode does, and corrects strides and dtypes."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._fake = mode.dispatch
        self.corrected: set[Any] = set()
        """The ops of which a result got other strides than the fake kernel's."""
        self._may_differ: dict[Any, bool] = {}
        self._layouts: dict[tuple[Any, ...], list[_Layout]] = {}

    def __call__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            self._allow_data_sizes(args[0])
        result = self._fake(func, types, args, kwargs)
        if func not in self._may_differ:
            self._may_differ[func] = _strides_may_differ(func)
        if not self._may_differ[func]:
            return result
        given = pytree.tree_leaves((args, kwargs))
        tensors = [each for each in given if isinstance(each, torch.Tensor)]
        if self._mode.shape_env is not None and any(map(depends_on_data, given)):
            return result
        if all(t.is_contiguous() for t in tensors) or not all(map(_is_here, tensors)):
            return result
        layouts = (
            (each.shape, each.stride(), each.dtype) if isinstance(each, torch.Tensor) else each
            for each in given
        )
        key = (func, *layouts)
        leaves, tree = pytree.tree_flatten(result)
        if key not in self._layouts:
            self._layouts[key] = _real_layouts(func, args, kwargs, leaves)
        for place, (strides, dtype) in enumerate(self._layouts[key]):
            fake = leaves[place]
            if isinstance(fake, torch.Tensor) and (
                _differ(fake, strides) or fake.dtype is not dtype
            ):
                self.corrected.add(func)
                with self._mode:
                    leaves[place] = torch.empty_strided(
                        fake.shape, strides, dtype=dtype, device=fake.device
                    )
        return pytree.tree_unflatten(leaves, tree)

    def _allow_data_sizes(self, tensor: torch.Tensor) -> None:
        """Let a whole number that is read from a tensor be a symbol.

        A mode gets symbols only then, and treats everything else as before.
        """
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
            raise DataDependentOutputException(aten._local_scalar_dense.default)
        if self._mode.shape_env is None:
            self._mode.shape_env = DataSizes()


def _strides_may_differ(op: Any) -> bool:
    """Tell whether fake and real results of an op may differ in strides."""
    # a view, or an op that writes in place, returns memory of its input
    if any(result.alias_info is not None for result in op._schema.returns):
        return False
    return op._schema.name.split("::")[1] in _OTHER_STRIDES or torch.Tag.pointwise in op.tags


def _is_here(tensor: torch.Tensor) -> bool:
    kind = tensor.device.type
    return kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())


def _real_layouts(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any]
) -> list[_Layout]:
    """Run the real kernel of an op on few elements; return the layout that each result has."""
    given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    gap = _GAP if sum(tensor.numel() for tensor in given) > _FEW else _FEW
    small = _smaller_sizes(given, gap)
    while True:
        try:
            real_results = _run_small(op, args, kwargs, small)
            break
        except Exception as error:
            exact = all(size == to for size, to in small.items())
            gap *= 4
            small = _smaller_sizes(given, gap)
            many = sum(math.prod(small[size] for size in tensor.shape) for tensor in given)
            if not exact and many <= _MOST:
                continue
            layouts = ", ".join(f"{tuple(t.shape)} with strides {t.stride()}" for t in given)
            raise CaptureError(
                f"{op}{user_line()} is given tensors of {layouts}, and the strides of its result "
                f"are unknown, since its kernel does not run on fewer elements ({error}): call "
                ".contiguous() on them first"
            ) from error
    return [
        (_scaled(real.shape, real.stride(), fake.shape), real.dtype)
        if isinstance(fake, torch.Tensor)
        else ((), None)
        for real, fake in zip(pytree.tree_leaves(real_results), results, strict=True)
    ]


def _smaller_sizes(tensors: Sequence[torch.Tensor], gap: int) -> dict[int, int]:
    """Map the sizes of tensors to smaller ones in the same order, at most `gap` apart."""
    small: dict[int, int] = {}
    before = 0
    for size in sorted({size for tensor in tensors for size in tensor.shape}):
        small[size] = small.get(before, 0) + min(size - before, gap)
        before = size
    return small


def _run_small(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], small: Mapping[int, int]
) -> Any:
    """Run the real kernel of an op on real tensors of ones, with the sizes that `small` gives."""
    on_gpu: set[torch.device] = set()

    def shrunk(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.is_cuda:
                on_gpu.add(value.device)
            shape = tuple(small[size] for size in value.shape)
            strides = _scaled(value.shape, value.stride(), shape)
            few = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
            return few.fill_(1)
        if isinstance(value, (list, tuple)):  # of sizes, or of small numbers
            return [small.get(v, v) if type(v) is int else shrunk(v) for v in value]
        return None if isinstance(value, torch.Generator) else value

    with no_dispatch(), torch.no_grad():
        few = [shrunk(value) for value in args]
        few_by_name = {name: shrunk(value) for name, value in kwargs.items()}
        with torch.random.fork_rng(devices=on_gpu):
            return op(*few, **few_by_name)


def _scaled(shape: Sequence[int], strides: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """Return strides in the same order for another shape: dense where these are."""
    scaled = [0] * len(shape)
    dense = scaled_dense = 1
    for dim in sorted(range(len(shape)), key=lambda dim: (strides[dim], shape[dim])):
        if strides[dim]:
            scaled[dim] = scaled_dense * (1 if strides[dim] <= dense else 2)
            dense = strides[dim] * max(shape[dim], 1)
            scaled_dense = scaled[dim] * max(other[dim], 1)
    return tuple(scaled)


def _differ(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    dimensions = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return tensor.numel() > 0 and any(size > 1 and a != b for size, a, b in dimensions)
