"""Copies to host memory and back: the same bits and strides, complete after their wait."""

import pytest
import torch

from graph_trainer.core.graph.host_copies import OFFLOAD, RELOAD, WAIT_COPY
from graph_trainer.core.torch_private import FakeTensorMode

TENSORS = {
    "plain": lambda device: torch.randn(3, 5, device=device),
    "transposed": lambda device: torch.randn(3, 5, device=device).t(),
    "bfloat16": lambda device: torch.randn(8, device=device).bfloat16(),
    "bool": lambda device: torch.randn(4, 4, device=device) > 0,
    "complex": lambda device: torch.randn(4, device=device, dtype=torch.complex64),
    "nan": lambda device: torch.tensor([float("nan"), -0.0, float("inf")], device=device),
    "empty": lambda device: torch.empty(0, 3, device=device),
    "scalar": lambda device: torch.tensor(1.5, device=device),
}


def there_and_back(tensor):
    stored = WAIT_COPY(OFFLOAD(tensor), tensor)
    return stored, WAIT_COPY(RELOAD(stored, tensor.device), stored)


def assert_same_bits(one, other):
    assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    view = torch.view_as_real if one.is_complex() else torch.clone
    torch.testing.assert_close(view(one), view(other), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", TENSORS)
def test_what_comes_back_is_what_went(name):
    tensor = TENSORS[name]("cpu")
    stored, back = there_and_back(tensor)
    for copy in (stored, back):
        assert_same_bits(copy, tensor)
        assert copy.data_ptr() != tensor.data_ptr() or not tensor.numel()
    assert back.data_ptr() != stored.data_ptr() or not tensor.numel()


def test_a_wait_returns_the_copy_itself():
    tensor = torch.randn(3)
    copy = OFFLOAD(tensor)
    assert WAIT_COPY(copy, tensor) is copy
    assert torch.ops.graph_trainer.wait_copy_(copy, tensor) is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fake_copies_are_on_the_host_and_back_on_the_device(device):
    with FakeTensorMode():
        tensor = torch.empty(3, 5, device=device).t()
        stored, back = there_and_back(tensor)
    assert (stored.device.type, back.device.type) == ("cpu", device)
    assert stored.stride() == back.stride() == tensor.stride()


def test_attributes_of_a_tensor_outlive_its_python_object():
    """Where a copy on a GPU keeps the event of its end."""
    with torch.library._scoped_library("host_copies_test", "DEF") as library:
        library.define("made(Tensor x) -> Tensor")

        def made(x):
            copy = x.clone()
            copy.copy_event = "event"
            return copy

        library.impl("made", made, "CompositeExplicitAutograd")
        assert torch.ops.host_copies_test.made.default(torch.ones(1)).copy_event == "event"


@pytest.mark.cuda
@pytest.mark.parametrize("name", TENSORS)
def test_on_a_gpu_what_comes_back_is_what_went(name):
    tensor = TENSORS[name]("cuda")
    stored, back = there_and_back(tensor)
    assert stored.is_pinned() or not stored.numel()
    assert back.is_cuda
    torch.cuda.synchronize()
    assert_same_bits(stored, tensor.cpu())
    assert_same_bits(back, tensor)


@pytest.mark.cuda
def test_on_a_gpu_memory_is_free_after_the_wait_and_nothing_is_overwritten_before():
    """Values are copied while kernels run, freed after their waits, and their memory reused."""
    kept, expected = [], []
    product = torch.randn(2048, 2048, device="cuda")
    for number in range(8):
        value = torch.full((4096, 4096), float(number), device="cuda")
        copy = OFFLOAD(value)
        product = product @ product * 1e-3  # runs while the copy does
        kept.append(WAIT_COPY(copy, value))
        before = torch.cuda.memory_allocated()
        del value
        assert before - torch.cuda.memory_allocated() == 4096 * 4096 * 4
        torch.full((4096, 4096), -1.0, device="cuda")  # most likely in the same memory
        expected.append(float(number))
    for stored, number in zip(reversed(kept), reversed(expected), strict=True):
        back = RELOAD(stored, torch.device("cuda"))
        product = product @ product * 1e-3
        assert torch.all(WAIT_COPY(back, stored) == number)
