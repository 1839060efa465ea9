"""Tensor subclasses taken apart and put together, and what a captured layout accepts."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

from graph_trainer.core.graph.subclasses import plain_type, unwrap, wrap
from graph_trainer.testing import become


def dtensor(placement=Shard(0)):  # noqa: B008
    if not dist.is_initialized():
        become(1, 2)
    mesh = init_device_mesh("cpu", (2,))
    local = torch.arange(6.0).view(2, 3)
    # five rows over two ranks: three here would be wrong, and twice two too
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=torch.Size((5, 3)), stride=(3, 1)
    )


@pytest.mark.parametrize(
    ("make", "parts_of"),
    [
        (lambda: torch.randn(2, 3).t(), lambda t: [t]),
        (dtensor, lambda t: [t.to_local()]),
        (lambda: TwoTensor(torch.ones(2), torch.zeros(2)), lambda t: [t.a, t.b]),
    ],
    ids=["plain", "uneven DTensor", "of two tensors"],
)
def test_a_tensor_is_taken_apart_and_rebuilt(make, parts_of):
    tensor = make()
    parts, layout = unwrap(tensor)
    assert [type(p) for p in parts] == [torch.Tensor] * layout.num_tensors
    again = wrap(parts, layout)
    assert type(again) is type(tensor) and layout.matches(again)
    torch.testing.assert_close(parts_of(again), parts_of(tensor), rtol=0, atol=0)
    with pytest.raises(ValueError, match="zip|unpack"):
        wrap([*parts, parts[0]], layout)


def test_a_parameter_counts_as_a_plain_tensor():
    assert plain_type(torch.nn.Parameter(torch.ones(1))) is torch.Tensor


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
def test_a_layout_matches_nothing_else(other):
    _, layout = unwrap(torch.randn(2, 3))
    assert layout.matches(torch.zeros(2, 3))
    assert layout.matches(torch.nn.Parameter(torch.zeros(2, 3)))
    assert not layout.matches(other())


def test_placements_are_part_of_a_layout():
    _, layout = unwrap(dtensor())
    assert layout.matches(dtensor())
    assert not layout.matches(dtensor(Shard(1)))
    assert "Shard" in layout.describe() or "S(0)" in layout.describe()
