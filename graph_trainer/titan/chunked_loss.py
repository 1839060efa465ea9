"""Cross-entropy over the sequence in chunks, with one read of the output head's weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.fx.traceback import annotate
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss
from torchtitan.config import CompileConfig

from graph_trainer.core.graph.annotations import annotation
from graph_trainer.core.sharding.functional_collectives import all_gather
from graph_trainer.errors import ConfigError

_HEAD = "lm_head"
"""What torchtitan's decoders call the output head, and so the label of its matmuls."""


class ChunkedCrossEntropyLoss(BaseLoss):
    """Compute the cross-entropy from hidden states and the output head's weight, in chunks.

    The loss is that of `CrossEntropyLoss` on the logits, of which only one chunk of the sequence
    is alive at a time. One autograd function takes the hidden states and the weight, so for any
    number of chunks the weight is gathered once, its gradient is reduced once, and a capture
    contains both.

    Gradients are computed in forward, chunk by chunk, while the chunk's logits are alive; backward
    multiplies them by the gradient of the loss. Recomputing logits in backward would need a fourth
    matmul of the head's size and save no memory: backward begins with the loss. Under
    `torch.no_grad()` only logits are computed.

    Memory beyond inputs and gradients, for a chunk of n tokens, a vocabulary of V (V / ranks
    under tensor parallelism) and a hidden size of D: n * V logits in float32 and, below float32,
    again in the weight's dtype; and twice V * D: in float32 the sum of the weight's gradient over
    chunks, and in the weight's dtype the product of one chunk.

    Under tensor parallelism the weight is split by vocabulary, evenly or not. The ranks then
    exchange three numbers a token (maximum, sum, the label's logit), once a chunk.

    Example::

        loss = ChunkedCrossEntropyLoss.Config(num_chunks=8).build()
        loss.attach(model)
        value, _ = loss(model(tokens), labels, global_valid_tokens)
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        global_vocab_size: int | None = None
        """Full vocabulary size; where given, the head that is attached must have it."""

        num_chunks: int = 8
        """
        Number of chunks that the sequence is split into, as torch.chunk does it: where the number
        does not divide the length, the last chunk is shorter and there may be fewer.
        """

        def __post_init__(self) -> None:
            if self.num_chunks < 1:
                raise ConfigError(
                    f"loss.num_chunks is {self.num_chunks}; it must be at least 1, which is the "
                    "whole sequence at once"
                )

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        del compile_config  # torchtitan's torch.compile: the whole step is captured instead
        self.num_chunks = config.num_chunks
        self.global_vocab_size = config.global_vocab_size
        self._head: nn.Linear | None = None

    def attach(self, model: nn.Module) -> None:
        """Let the loss compute with the output head of a torchtitan decoder.

        `model.forward` then returns hidden states instead of logits. The head stays a part of the
        model: its parameter keeps its name, its sharding and its place in checkpoints, and its
        weight is read at every call.

        Raises:
            ConfigError: a model without such a head, or a head that is more than one matmul.
        """
        head = getattr(model, _HEAD, None)
        if head is None or not hasattr(model, "_skip_lm_head"):
            raise ConfigError(
                f"{type(model).__name__} has no output head 'lm_head' that it can leave out; the "
                "chunked cross-entropy needs a torchtitan Decoder: use CrossEntropyLoss"
            )
        # Anything but a plain matmul (a bias, an adapter, a quantised layer) would be ignored.
        names = [name for name, _ in head.named_parameters()]
        plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
        if not plain or names != ["weight"]:
            raise ConfigError(
                f"the output head is a {type(head).__name__} with parameters {names}; the chunked "
                "cross-entropy needs a linear layer with a weight alone: use CrossEntropyLoss"
            )
        if self.global_vocab_size not in (None, head.out_features):
            raise ConfigError(
                f"loss.global_vocab_size is {self.global_vocab_size} and the output head has "
                f"{head.out_features} rows; leave the key out or give the head's size"
            )
        self._head = head
        model._skip_lm_head = True  # type: ignore[assignment]

    def __call__(
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss and no metrics, as torchtitan's `CrossEntropyLoss` does.

        Args:
            pred: hidden states [batch, sequence, dim], in the dtype that the head computes in.
                Under tensor parallelism a DTensor, or a plain tensor that is the same on every
                rank.
            labels: [batch, sequence] integers; -100 is left out.
            global_valid_tokens: divisor of the sum over tokens; None for the sum itself.
            kwargs: ignored.

        Returns:
            (loss, {}): a scalar in float32, or in float64 for float64 inputs; the same on every
            rank of tensor parallelism.

        Raises:
            ConfigError: no model was attached, or a sharding that this loss does not know.
            ValueError: hidden states and labels of different shapes.
            RuntimeError: a label that is not a row of the head, as in torch's cross_entropy (on
                CUDA an assertion of the device).
        """
        del kwargs
        if self._head is None:
            raise ConfigError(
                "the chunked cross-entropy has no output head: call loss.attach(model) once the "
                "model is built"
            )
        # The read may run ops of the head, such as an all-gather.
        with annotate(annotation(module=_HEAD)):
            weight = self._head.weight
        hidden, weight, shard = _local(pred, weight)
        if hidden.ndim != 3 or hidden.shape[:2] != labels.shape:
            raise ValueError(
                f"hidden states of {tuple(hidden.shape)} do not fit labels of "
                f"{tuple(labels.shape)}; they must be [batch, sequence, dim] and [batch, sequence]"
            )
        loss = _ChunkedCrossEntropy.apply(
            hidden,
            weight,
            labels,
            global_valid_tokens,
            shard,
            self.num_chunks,
            torch.is_grad_enabled(),
        )
        return loss, {}


@dataclass(frozen=True, slots=True)
class _VocabularyShard:
    """The rows of the output head's weight on this rank."""

    vocabulary: int
    start: int
    group: dist.ProcessGroup | None
    """The ranks among which the rows are split; None where this rank has all of them."""


def _local(
    hidden: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, _VocabularyShard]:
    """Return the local tensors, and the part of the vocabulary that the weight is.

    Each rank's gradient of the hidden states comes from its part of the vocabulary and is one
    summand of the full gradient. It is declared as a partial DTensor instead of being summed here,
    so that the layer before can choose the reduction: a reduce-scatter under sequence parallelism.
    """
    if not isinstance(weight, DTensor):
        return hidden, weight, _VocabularyShard(weight.shape[0], 0, None)
    mesh, placements = weight.device_mesh, weight.placements
    if mesh.ndim != 1 or placements[0] not in (Shard(0), Replicate()):
        raise ConfigError(
            f"the output head's weight has placements {placements} on {mesh}; the chunked "
            "cross-entropy needs one mesh dimension, split by vocabulary (Shard(0)) or not at all"
        )
    if not isinstance(hidden, DTensor):
        hidden = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
    else:
        hidden = hidden.redistribute(placements=[Replicate()])
    vocabulary, ranks = weight.shape[0], mesh.size()
    if ranks == 1 or placements[0] == Replicate():
        return hidden.to_local(), weight.to_local(), _VocabularyShard(vocabulary, 0, None)
    per_rank = -(-vocabulary // ranks)
    start = min(mesh.get_local_rank() * per_rank, vocabulary)
    shard = _VocabularyShard(vocabulary, start, mesh.get_group())
    return hidden.to_local(grad_placements=[Partial()]), weight.to_local(), shard


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of the tokens' losses over the divisor; gradients come with it, in forward.

    Under tensor parallelism the gradient of the hidden states is this rank's summand.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        divisor: torch.Tensor | None,
        shard: _VocabularyShard,
        num_chunks: int,
        with_gradients: bool,
    ) -> torch.Tensor:
        # needs_input_grad does not know about no_grad
        wants_hidden, wants_weight = (n and with_gradients for n in ctx.needs_input_grad[:2])
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        scale = torch.ones_like(total)
        if divisor is not None:
            scale = (scale / divisor).to(dtype)
        hidden_gradients = []
        weight_gradient: torch.Tensor | None = None
        parts = zip(hidden.chunk(num_chunks, 1), labels.chunk(num_chunks, 1), strict=True)
        for part, targets in parts:  # [batch, chunk, dim], [batch, chunk]
            tokens = part.reshape(-1, part.shape[-1])
            softmax = _Softmax(tokens, weight, targets.reshape(-1), dtype, shard)
            total = total + softmax.loss()
            if not (wants_hidden or wants_weight):
                continue
            gradient = softmax.gradient(scale).to(tokens.dtype)
            del softmax  # frees the gradient in float32
            with annotate(annotation(module=_HEAD)):
                if wants_hidden:
                    hidden_gradients.append((gradient @ weight).view(part.shape))
                if wants_weight:
                    # The sum is as large as the weight, so it is in place; in at least float32,
                    # because rounding once a chunk to bfloat16 would make the error grow with the
                    # number of chunks; a matmul and a sum, because counters of FLOPs do not know
                    # addmm_.
                    product = gradient.t() @ tokens
                    if weight_gradient is None:
                        weight_gradient = product.to(dtype)
                    else:
                        weight_gradient.add_(product)
                    del product
            del gradient  # or it would be alive together with the next chunk's logits
        ctx.save_for_backward(
            torch.cat(hidden_gradients, dim=1) if wants_hidden else None,
            weight_gradient.to(weight.dtype) if weight_gradient is not None else None,
        )
        return total if divisor is None else total / divisor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            # The saved gradients are constants to autograd: a penalty on them has no gradient.
            raise RuntimeError(
                "the chunked cross-entropy cannot be differentiated twice (create_graph=True); "
                "use CrossEntropyLoss"
            )
        # not in place: with retain_graph backward may run again
        gradients = (g if g is None else g * grad for g in ctx.saved_tensors)
        return (*gradients, None, None, None, None, None)


class _Softmax:
    """Loss and gradient of one chunk's logits, over the parts of the vocabulary of all ranks."""

    def __init__(
        self,
        tokens: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        dtype: torch.dtype,
        shard: _VocabularyShard,
    ) -> None:
        self._valid = (targets != IGNORE_INDEX).unsqueeze(1)
        with annotate(annotation(module=_HEAD)):
            # [tokens, rows]; everything below is in place
            logits = (tokens @ weight.t()).to(dtype)
        targets = targets.unsqueeze(1)
        index = targets - shard.start
        self._is_local = self._valid & (index >= 0) & (index < weight.shape[0])
        # A label that is not a row of the head keeps an index that is out of bounds on every rank:
        # all ranks raise, and none waits for another in a collective.
        inside = (targets >= 0) & (targets < shard.vocabulary)
        other_rows = ~self._valid | (inside & ~self._is_local)
        self._index = torch.where(other_rows, 0, index)
        # A rank without rows has no maximum; minus infinity is the one that changes nothing.
        maximum = (
            logits.amax(1, keepdim=True)
            if weight.shape[0]
            else torch.full_like(self._valid, -torch.inf, dtype=dtype)
        )
        target = torch.zeros_like(maximum)
        if weight.shape[0]:
            target = torch.where(self._is_local, logits.gather(1, self._index), target)
        self._exponentials = logits.sub_(maximum).exp_()
        sums = self._exponentials.sum(1, keepdim=True)
        factor = torch.ones_like(maximum)
        if shard.group is not None:
            # One all-gather of three numbers a token, after which all ranks compute the same bits,
            # replaces an all-reduce for the maximum and another for the sums: latency costs more
            # than bytes here.
            local = torch.cat([maximum, sums, target], dim=1)
            ranks = all_gather(local, shard.group).view(shard.group.size(), *local.shape)
            maxima, all_sums, all_targets = ranks.split(1, dim=2)
            local_maximum, maximum = maximum, maxima.amax(0)
            sums = (all_sums * (maxima - maximum).exp()).sum(0)
            target = all_targets.sum(0)
            factor = (local_maximum - maximum).exp()
        self._to_probabilities = factor / sums
        # In this order no large number is added to a small one.
        self._losses = maximum - target + sums.log()

    def loss(self) -> torch.Tensor:
        """Sum the losses of the chunk's valid tokens, a scalar."""
        return torch.where(self._valid, self._losses, 0).sum()

    def gradient(self, scale: torch.Tensor) -> torch.Tensor:
        """Compute `scale` times the gradient by the local logits, in place: [tokens, rows]."""
        scales = torch.where(self._valid, scale, 0)
        gradient = self._exponentials.mul_(self._to_probabilities * scales)
        if gradient.shape[1]:
            gradient.scatter_add_(1, self._index, torch.where(self._is_local, -scales, 0))
        return gradient
