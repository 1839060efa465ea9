"""The chunked cross-entropy in one process: numbers, memory, refusals.

tests/integration/test_loss.py runs it on real ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.flop_counter import FlopCounterMode

import graph_trainer as gt
from graph_trainer.testing import fake_mesh
from graph_trainer.titan.chunked_loss import ChunkedCrossEntropyLoss
from tests.unit.titan.tiny_decoder import (
    BATCH,
    DIM,
    SEQUENCE,
    UNIT,
    VOCABULARY,
    TinyDecoder,
    attached,
    inputs,
)

from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss  # isort: skip
from torchtitan.distributed import utils as torchtitan_utils  # isort: skip

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def on_weight(weight: torch.Tensor, **options: Any) -> ChunkedCrossEntropyLoss:
    """Make a loss with an output head of this weight."""
    model = TinyDecoder(weight.shape[1], weight.shape[0])
    loss = attached(model, **options)
    model.lm_head._parameters["weight"] = weight  # type: ignore[assignment]
    return loss


def chunked(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, tokens: Any, **options: Any
) -> Result:
    """Loss and both gradients."""
    loss, metrics = on_weight(weight, **options)(hidden, labels, tokens)
    assert metrics == {}
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, tokens: Any) -> Result:
    """Compute torchtitan's cross-entropy on the same logits."""
    loss, _ = CrossEntropyLoss.Config().build()(hidden @ weight.t(), labels, tokens)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


def exact(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, tokens: Any) -> Result:
    """In float64, from the same inputs."""
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    logits = (hidden @ weight.t()).flatten(0, 1)
    loss = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    loss = loss if tokens is None else loss / tokens
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 norm of the difference."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm())


@pytest.fixture(autouse=True)
def partial_dtensor() -> Any:
    """torchtitan's CrossEntropyLoss asks which SPMD back end there is."""
    before = torchtitan_utils.get_spmd_backend()
    torchtitan_utils.set_spmd_backend("partial_dtensor")
    yield
    torchtitan_utils.set_spmd_backend(before)


@pytest.mark.parametrize(
    ("num_chunks", "tokens"),
    [(1, None), (4, 17), (8, torch.tensor(17)), (100, torch.tensor(17.0))],
    ids=str,
)
@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_the_numbers_are_those_of_torchtitan(
    dtype: torch.dtype, num_chunks: int, tokens: Any
) -> None:
    """Both round, in a row, logits, softmax, its gradient, product and sum over chunks: five
    independent roundings of unit u on either side are sqrt(10) u of relative error. Below them
    lie sums of up to n float32 terms, which round n times in the worst case."""
    case = inputs(dtype)
    terms = max(DIM, VOCABULARY, BATCH * SEQUENCE)
    tolerance = math.sqrt(10) * UNIT[dtype] + terms * UNIT[torch.float32]
    found, expected = chunked(*case, tokens, num_chunks=num_chunks), plain(*case, tokens)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert error(a, b) < tolerance


def test_gradients_are_the_derivatives_of_the_loss() -> None:
    hidden, weight, labels = inputs(torch.float64, sequence=5, dim=3, vocabulary=4)
    labels[:, 2:4] = IGNORE_INDEX  # a chunk without a label

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return on_weight(weight, num_chunks=3)(hidden, labels, torch.tensor(6))[0]

    assert torch.autograd.gradcheck(loss, (hidden, weight))


def test_the_loss_of_a_scaled_loss_is_scaled() -> None:
    hidden, weight, labels = inputs()
    loss, _ = on_weight(weight)(hidden, labels, torch.tensor(4))
    once = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    twice = torch.autograd.grad(2 * loss, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(loss, (hidden, weight))
    for a, b, c in zip(once, twice, again, strict=True):
        assert torch.equal(2 * a, b)
        assert torch.equal(a, c), "backward changed what a second backward reads"


def test_a_second_derivative_is_refused() -> None:
    hidden, weight, labels = inputs()
    loss, _ = on_weight(weight)(hidden, labels)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("magnitude", [1e3, 1e30])
def test_large_logits_neither_overflow_nor_drown_small_ones(magnitude: float) -> None:
    hidden, weight, labels = inputs()
    weight = weight.detach()
    # every logit of a token moves by the same number, which must cancel
    hidden = torch.cat([hidden.detach(), torch.full((BATCH, SEQUENCE, 1), magnitude)], dim=2)
    weight = torch.cat([weight, torch.full((VOCABULARY, 1), 1.0)], dim=1)
    case = hidden.requires_grad_(), weight.requires_grad_(), labels
    found, expected = chunked(*case, torch.tensor(20)), plain(*case, torch.tensor(20))
    for a, b in zip(found, expected, strict=True):
        assert torch.isfinite(a).all()
        assert error(a, b) < 1e-5


def test_more_chunks_do_not_make_the_gradient_worse() -> None:
    """In bfloat16 the sum over chunks is rounded once, not once a chunk."""
    case = inputs(torch.bfloat16, batch=1, sequence=512, vocabulary=20)
    expected = exact(*case, 512)
    one, many = (chunked(*case, 512, num_chunks=n) for n in (1, 256))
    # the product of a chunk is rounded too: with independent errors at most sqrt(2) as much
    assert error(many[2], expected[2]) < 1.5 * error(one[2], expected[2])


@pytest.mark.parametrize("label", [-1, VOCABULARY])
def test_a_label_that_is_no_token_is_an_error(label: int) -> None:
    hidden, weight, labels = inputs()
    labels[1, 2] = label
    with pytest.raises(RuntimeError, match="out of bounds"):
        on_weight(weight)(hidden, labels)


@pytest.mark.parametrize(("batch", "sequence"), [(0, 4), (2, 0), (BATCH, SEQUENCE)])
def test_without_a_label_loss_and_gradients_are_zero(batch: int, sequence: int) -> None:
    hidden, weight, labels = inputs(batch=batch, sequence=sequence)
    found = chunked(hidden, weight, torch.full_like(labels, IGNORE_INDEX), torch.tensor(3))
    for value, like in zip(found, (torch.tensor(0.0), hidden, weight), strict=True):
        assert torch.equal(value, torch.zeros_like(like))


def flops(action: Callable[[], object]) -> int:
    """In matmuls of the output head's size."""
    with FlopCounterMode(display=False) as counter:
        action()
    return counter.get_total_flops() // (2 * BATCH * SEQUENCE * VOCABULARY * DIM)


def test_only_the_gradients_asked_for_are_computed() -> None:
    hidden, weight, labels = inputs()

    def step(hidden: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        loss, _ = on_weight(weight)(hidden, labels)
        wanted = [t for t in (hidden, weight) if t.requires_grad]
        return list(torch.autograd.grad(loss, wanted))

    assert flops(lambda: step(hidden, weight)) == 3
    assert flops(lambda: step(hidden.detach(), weight)) == 2
    assert flops(lambda: step(hidden, weight.detach())) == 2
    frozen = step(hidden, weight.detach())[0]
    assert torch.equal(frozen, step(hidden, weight)[0])


def test_validation_computes_logits_alone() -> None:
    hidden, weight, labels = inputs()

    def validate() -> torch.Tensor:
        with torch.no_grad():
            return on_weight(weight)(hidden, labels, torch.tensor(20))[0]

    assert flops(validate) == 1
    assert torch.equal(validate(), chunked(hidden, weight, labels, torch.tensor(20))[0])
    assert not validate().requires_grad


def peak_bytes(action: Callable[[], object], folder: Path) -> int:
    """The most that the allocator had handed out at once, above what it had before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        action()
    file = folder / "memory.json"
    profile.export_chrome_trace(str(file))
    events = [e for e in json.loads(file.read_text())["traceEvents"] if e["name"] == "[memory]"]
    events.sort(key=lambda e: e["ts"])
    totals = [(e["args"]["Total Allocated"], e["args"]["Bytes"]) for e in events]
    return max(total for total, _ in totals) - (totals[0][0] - totals[0][1])


@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_the_peak_is_a_chunk_of_logits(dtype: torch.dtype, tmp_path: Path) -> None:
    tokens, vocabulary, dim, num_chunks = 512, 4096, 8, 8
    case = inputs(dtype, 1, tokens, dim, vocabulary)
    logits = tokens * vocabulary * 4
    weight = vocabulary * dim * 4
    copies = 1 if dtype is torch.float32 else 1.5  # the matmul's own result beside float32
    found = peak_bytes(lambda: chunked(*case, 512, num_chunks=num_chunks), tmp_path)
    # three times the weight: its gradient's sum, a chunk's product and the hidden states' ones
    assert found < copies * logits / num_chunks + 3 * weight
    assert peak_bytes(lambda: plain(*case, 512), tmp_path) > 2 * logits


def test_the_head_stays_the_models() -> None:
    model = TinyDecoder()
    before = list(model.state_dict())
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    expected = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="sum")
    loss = attached(model, global_vocab_size=VOCABULARY)
    assert list(model.state_dict()) == before
    assert model(tokens).shape == (2, 3, DIM)
    assert not TinyDecoder._skip_lm_head, "attaching one model changed its class"
    torch.testing.assert_close(loss(model(tokens), tokens)[0], expected)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    value, _ = loss(model(tokens), tokens, positions=tokens)
    torch.testing.assert_close(value, torch.tensor(6 * math.log(VOCABULARY)))


class Adapted(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def _with_head(head: nn.Module | None) -> nn.Module:
    model = TinyDecoder()
    model.lm_head = head  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_with_head(None), "TinyDecoder has no output head"),
        (TinyDecoder(bias=True), r"parameters \['weight', 'bias'\]"),
        (_with_head(Adapted(4, 4, bias=False)), "is a Adapted"),
    ],
)
def test_a_head_that_is_more_than_a_matmul_is_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(gt.ConfigError, match=message):
        attached(model)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(gt.ConfigError, match="loss.num_chunks is 0"):
        ChunkedCrossEntropyLoss.Config(num_chunks=0)
    with pytest.raises(gt.ConfigError, match="global_vocab_size is 51 .* has 50 rows"):
        attached(TinyDecoder(), global_vocab_size=51)


def test_bad_calls_are_refused() -> None:
    hidden, weight, labels = inputs()
    with pytest.raises(gt.ConfigError, match="loss.attach"):
        ChunkedCrossEntropyLoss.Config().build()(hidden, labels)
    with pytest.raises(ValueError, match=r"\(2, 13, 16\) do not fit labels of \(2, 12\)"):
        on_weight(weight)(hidden, labels[:, :-1])
    with pytest.raises(ValueError, match=r"\(26, 16\)"):
        on_weight(weight)(hidden.flatten(0, 1), labels.flatten())


def test_a_head_split_by_column_is_refused() -> None:
    hidden, weight, labels = inputs()
    mesh = fake_mesh(2)
    replicated = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
    by_column = DTensor.from_local(weight, mesh, [Shard(1)], run_check=False)
    with pytest.raises(gt.ConfigError, match=r"Shard\(0\)"):
        on_weight(by_column)(replicated, labels)
