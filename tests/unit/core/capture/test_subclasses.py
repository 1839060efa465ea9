"""Tensor subclasses taken apart and put together, and what a captured layout accepts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

from graph_trainer.core.capture.subclasses import plain_type, unwrap, wrap
from tests.unit.fake_ranks import become


def dtensor(placement: Shard | Replicate = Shard(0)) -> DTensor:  # noqa: B008
    if not dist.is_initialized():
        become(1, 2)
    mesh = init_device_mesh("cpu", (2,))
    local = torch.arange(6.0).view(2, 3)
    # five rows over two ranks: three here would be wrong, and twice two too
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=torch.Size((5, 3)), stride=(3, 1)
    )


def test_a_plain_tensor_is_its_own_part() -> None:
    tensor = torch.randn(2, 3).t()
    parts, layout = unwrap(tensor)
    assert parts[0] is tensor
    assert layout.num_tensors == 1
    assert wrap(parts, layout) is tensor
    assert plain_type(torch.nn.Parameter(tensor)) is torch.Tensor


def test_an_uneven_dtensor_is_rebuilt() -> None:
    tensor = dtensor()
    parts, layout = unwrap(tensor)
    assert [type(p) for p in parts] == [torch.Tensor]
    again = wrap(parts, layout)
    assert isinstance(again, DTensor)
    assert again.shape == (5, 3)
    assert again.placements == tensor.placements
    assert again.device_mesh == tensor.device_mesh
    assert again.to_local() is not None and torch.equal(again.to_local(), tensor.to_local())


def test_a_subclass_of_two_tensors() -> None:
    tensor = TwoTensor(torch.ones(2), torch.zeros(2))
    parts, layout = unwrap(tensor)
    assert layout.num_tensors == len(parts) == 2
    again = wrap(parts, layout)
    assert torch.equal(again.a, tensor.a)
    assert torch.equal(again.b, tensor.b)


def test_a_wrong_number_of_parts_is_an_error() -> None:
    parts, layout = unwrap(TwoTensor(torch.ones(2), torch.zeros(2)))
    with pytest.raises(ValueError, match="zip"):
        wrap(parts[:1], layout)


@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.randn(3, 3),
        lambda: torch.randn(2, 3, dtype=torch.float64),
        lambda: torch.randn(3, 2).t(),
        lambda: torch.randn(2, 3, device="meta"),
        lambda: TwoTensor(torch.ones(2, 3), torch.ones(2, 3)),
    ],
    ids=["shape", "dtype", "stride", "device", "class"],
)
def test_a_layout_matches_nothing_else(other: object) -> None:
    _, layout = unwrap(torch.randn(2, 3))
    assert layout.matches(torch.zeros(2, 3))
    assert layout.matches(torch.nn.Parameter(torch.zeros(2, 3)))
    assert not layout.matches(other())  # type: ignore[operator]


def test_placements_are_part_of_a_layout() -> None:
    _, layout = unwrap(dtensor())
    assert layout.matches(dtensor())
    assert not layout.matches(dtensor(Shard(1)))
    assert "Shard" in layout.describe() or "S(0)" in layout.describe()
