"""The fake tensors of a trace: sizes that data decide, and views that real strides may allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graph_trainer.core.graph.data_sizes import DataSizes
from graph_trainer.core.torch_private import (
    DataDependentOutputException,
    FakeTensorMode,
    replace_dispatch,
)

aten = torch.ops.aten


def fake_mode() -> FakeTensorMode:
    """Return a mode of fake tensors for a trace.

    A whole number that is read from a tensor is a symbol. A view that the strides of a fake result
    do not allow copies instead of failing, because a real kernel may give other strides:
    `let_views_copy` makes it a reshape.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = mode.dispatch

    def dispatch(func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            (tensor,) = args
            if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
                raise DataDependentOutputException(func)
            # not earlier: a mode that has symbols from the beginning gives them to all sizes
            if mode.shape_env is None:
                mode.shape_env = DataSizes()
        if func is not aten.view.default or args[0].is_contiguous():
            return fake(func, types, args, kwargs)
        try:
            return fake(func, types, args, kwargs)
        except (RuntimeError, ValueError):
            with mode:
                return args[0].contiguous().view(*args[1:])

    replace_dispatch(mode, dispatch)
    return mode
