"""The chunked cross-entropy in one process: numbers, memory, what a capture of it looks like.

tests/integration/test_loss.py runs it on real ranks.
"""

from __future__ import annotations

import json
import math
from collections import Counter
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
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.graph.annotations import (
    Phase,
    Role,
    module_of,
    phase_of,
    tensors_of,
)
from graph_trainer.core.graph.joint_graph import JointGraph, compute_nodes
from graph_trainer.titan.chunked_loss import ChunkedCrossEntropyLoss
from tests.unit.graphs import fake_mesh, fake_world

from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss  # isort: skip
from torchtitan.config import CompileConfig  # isort: skip
from torchtitan.distributed import utils as torchtitan_utils  # isort: skip

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

BATCH, SEQUENCE, DIM, VOCABULARY = 2, 13, 16, 50
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}
POLICIES = ("always", "never", "default")


class TinyDecoder(nn.Module):
    """What the loss needs of a torchtitan decoder."""

    _skip_lm_head = False

    def __init__(self, dim: int = DIM, vocabulary: int = VOCABULARY, *, bias: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, dim)
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.lm_head = nn.Linear(dim, vocabulary, bias=bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.tok_embeddings(tokens))
        return hidden if self._skip_lm_head else self.lm_head(hidden)


def attached(model: nn.Module, **options: Any) -> ChunkedCrossEntropyLoss:
    loss = ChunkedCrossEntropyLoss.Config(**options).build()
    loss.attach(model)
    return loss


def on_weight(weight: torch.Tensor, **options: Any) -> ChunkedCrossEntropyLoss:
    """A loss whose output head holds just this weight."""
    model = TinyDecoder(weight.shape[1], weight.shape[0])
    loss = attached(model, **options)
    model.lm_head._parameters["weight"] = weight  # type: ignore[assignment]
    return loss


def inputs(
    dtype: torch.dtype = torch.float32,
    batch: int = BATCH,
    sequence: int = SEQUENCE,
    dim: int = DIM,
    vocabulary: int = VOCABULARY,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weight and labels; logits are about standard normal, a few labels ignored."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(batch, sequence, dim, generator=g)
    weight = torch.randn(vocabulary, dim, generator=g) / math.sqrt(dim)
    labels = torch.randint(0, vocabulary, (batch, sequence), generator=g)
    labels[torch.rand(labels.shape, generator=g) < 0.2] = IGNORE_INDEX
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def chunked(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, tokens: Any, **options: Any
) -> Result:
    """Loss and both gradients."""
    loss, metrics = on_weight(weight, **options)(hidden, labels, tokens)
    assert metrics == {}
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, tokens: Any) -> Result:
    """torchtitan's own, on the same logits."""
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


# --- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [None, 17, torch.tensor(17), torch.tensor(17.0)], ids=str)
@pytest.mark.parametrize("num_chunks", [1, 4, 8, 100])
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


def test_nothing_but_ignored_labels_is_a_loss_of_zero() -> None:
    hidden, weight, labels = inputs()
    found = chunked(hidden, weight, torch.full_like(labels, IGNORE_INDEX), torch.tensor(3))
    for value in found:
        assert torch.equal(value, torch.zeros_like(value))


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
    # a chunk's own product is rounded too: with independent errors at most sqrt(2) as much
    assert error(many[2], expected[2]) < 1.5 * error(one[2], expected[2])


@pytest.mark.parametrize("label", [-1, VOCABULARY, -99])
def test_a_label_that_is_no_token_is_an_error(label: int) -> None:
    hidden, weight, labels = inputs()
    labels[1, 2] = label
    with pytest.raises(RuntimeError, match="out of bounds"):
        on_weight(weight)(hidden, labels)


@pytest.mark.parametrize(("batch", "sequence"), [(0, 4), (2, 0)])
def test_an_empty_batch_is_a_loss_of_zero(batch: int, sequence: int) -> None:
    hidden, weight, labels = inputs(batch=batch, sequence=sequence)
    loss, hidden_gradient, weight_gradient = chunked(hidden, weight, labels, None)
    assert loss == 0 and hidden_gradient.shape == hidden.shape
    assert torch.equal(weight_gradient, torch.zeros_like(weight))


# --- work and memory ----------------------------------------------------------------------------


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


# --- attaching ----------------------------------------------------------------------------------


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
        (nn.Linear(2, 2), "Linear has no output head 'lm_head'"),
        (_with_head(None), "TinyDecoder has no output head"),
        (TinyDecoder(bias=True), r"parameters \['weight', 'bias'\]"),
        (_with_head(Adapted(4, 4, bias=False)), "is a Adapted"),
        (_with_head(nn.Embedding(4, 4)), "is a Embedding"),
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
    with pytest.raises(gt.ConfigError, match="compile.enable"):
        ChunkedCrossEntropyLoss.Config().build(compile_config=CompileConfig(enable=True))


def test_bad_calls_are_refused() -> None:
    hidden, weight, labels = inputs()
    with pytest.raises(gt.ConfigError, match="loss.attach"):
        ChunkedCrossEntropyLoss.Config().build()(hidden, labels)
    with pytest.raises(ValueError, match=r"\(2, 13, 16\) do not fit labels of \(2, 12\)"):
        on_weight(weight)(hidden, labels[:, :-1])
    with pytest.raises(ValueError, match=r"\(26, 16\)"):
        on_weight(weight)(hidden.flatten(0, 1), labels.flatten())


def test_shardings_that_it_does_not_know_are_refused() -> None:
    hidden, weight, labels = inputs()
    mesh = fake_mesh(2)
    replicated = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
    with pytest.raises(gt.ConfigError, match="parallelize both or neither"):
        on_weight(weight)(replicated, labels)
    by_column = DTensor.from_local(weight, mesh, [Shard(1)], run_check=False)
    with pytest.raises(gt.ConfigError, match=r"Shard\(0\)"):
        on_weight(by_column)(replicated, labels)
    other = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("other",))
    by_row = DTensor.from_local(weight, other, [Shard(0)], run_check=False)
    with pytest.raises(gt.ConfigError, match="must be on the mesh of tensor parallelism"):
        on_weight(by_row)(replicated, labels)


# --- captured -----------------------------------------------------------------------------------


def step_of(loss: ChunkedCrossEntropyLoss) -> Callable[..., torch.Tensor]:
    def step(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor, n: torch.Tensor) -> Any:
        return loss(model(tokens), labels, n)[0]

    return step


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _, _, labels = inputs()
    return labels.clamp(min=0), labels, torch.tensor(20)


@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_captured_is_eager_bit_by_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = TinyDecoder().to(dtype)
    loss = attached(model, num_chunks=4)
    joint = gt.capture(model, step_of(loss), batch())
    gt.run_passes(joint, gt.PassConfig(verify_passes=True))
    value, gradients = gt.compile(joint)(model, *batch())
    expected = step_of(loss)(model, *batch())
    expected.backward()
    assert torch.equal(value, expected)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(gradients[name], parameter.grad), name


def head_collectives(joint: JointGraph) -> Counter[tuple[str, str]]:
    return Counter(
        (c.kind, str(c.phase)) for c in collectives(joint) if c.parameter == "lm_head.weight"
    )


def captured_llama() -> tuple[JointGraph, nn.Module, ChunkedCrossEntropyLoss]:
    """torchtitan's Llama 3 debug model on a rank of four, captured on meta."""
    from graph_trainer.llama3.config_registry import llama3_debugmodel

    spec = llama3_debugmodel().model_spec
    assert spec is not None
    del spec.model.layers[2:]
    with torch.device("meta"):
        model = spec.model.build()
    loss = attached(model, num_chunks=4, global_vocab_size=2048)
    gt.simple_fsdp(
        model, fake_mesh(), mp_policy=gt.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    )
    tokens = torch.zeros(2, 32, dtype=torch.int64, device="meta")
    return gt.capture(model, step_of(loss), (tokens, tokens, torch.tensor(20))), model, loss


@pytest.mark.parametrize("policy", POLICIES)
def test_the_head_is_gathered_once_and_reduced_once(policy: Any) -> None:
    joint, _, _ = captured_llama()
    config = gt.PassConfig(reshard_after_forward=policy, verify_passes=True)
    gt.run_passes(joint, config)
    # backward does not read the weight: no policy gathers it again
    assert head_collectives(joint) == {
        ("all_gather_into_tensor", Phase.LOSS): 1,
        ("reduce_scatter_tensor", Phase.BACKWARD): 1,
    }
    # of what has the vocabulary as a dimension there are the weight, [2048, 256], and the logits
    # of a chunk, [2 * 32 / 4, 2048]
    shapes = {tuple(t.shape) for n in compute_nodes(joint.graph) for t in tensors_of(n)}
    found = {tuple(sorted(shape)) for shape in shapes if 2048 in shape}
    assert found == {(256, 2048), (16, 2048)}


def test_what_the_head_computes_is_labelled_as_its_own() -> None:
    joint, _, _ = captured_llama()
    nodes = list(compute_nodes(joint.graph))
    matmuls = [n for n in nodes if any(2048 in t.shape for t in _operands(n))]
    assert Counter(n.target for n in matmuls) == {aten.mm.default: 4 * 3}
    assert {(module_of(n), phase_of(n)) for n in matmuls} == {("lm_head", Phase.LOSS)}
    exponentials = [n for n in nodes if n.target in (aten.exp_.default, aten.exp.default)]
    assert exponentials
    assert {module_of(n) for n in exponentials if phase_of(n) is Phase.LOSS} == {"loss"}
    gathers = [n for n in nodes if n.target is c10d.all_gather_into_tensor.default]
    assert [module_of(n) for n in gathers][-1] == "lm_head"


def _operands(node: Any) -> list[torch.Tensor]:
    if node.target is not aten.mm.default:
        return []
    return [t for n in (node, *node.all_input_nodes) for t in tensors_of(n)]


@pytest.mark.parametrize("rank", [0, 2])
def test_every_rank_of_tensor_parallelism_captures_the_same_collectives(rank: int) -> None:
    """Seven rows over three ranks: three, three and one."""
    found = []
    for where in (0, rank):
        fake_world(3, where)
        mesh = torch.distributed.init_device_mesh("cpu", (3,))
        model = TinyDecoder(vocabulary=7)
        rows = (3, 3, 1)[where]
        weight = DTensor.from_local(
            torch.zeros(rows, DIM),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=(7, DIM),
            stride=(DIM, 1),
        )
        model.lm_head.weight = nn.Parameter(weight)
        loss = attached(model, num_chunks=2)
        tokens = torch.zeros(2, 6, dtype=torch.int64)
        joint = gt.capture(model, step_of(loss), (tokens, tokens, torch.tensor(20)))
        entries = [(c.kind, c.dtype, c.role, c.input_bytes) for c in collectives(joint)]
        # three numbers for each of six tokens a chunk, and the hidden states' gradient
        assert [e[0] for e in entries] == ["all_gather_into_tensor"] * 2 + ["all_reduce"]
        assert [e[3] for e in entries[:2]] == [2 * 3 * 3 * 4] * 2
        assert all(role is not Role.UNSHARD for *_, role, _ in entries)
        found.append(entries)
        torch.distributed.destroy_process_group()
    assert found[0] == found[1]
