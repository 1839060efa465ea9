"""One rank of a run that has not started: what training would capture on it, on any machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy

from graph_trainer.core.capture.capture import capture_step
from graph_trainer.core.capture.tracing.trace import Step
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.returned import scalar_loss
from graph_trainer.core.passes.pass_list import PassConfig
from graph_trainer.core.torch_private import below_autograd, traced_as_one_op
from graph_trainer.core.torch_private_groups import become
from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.model_flops import flops_per_token
from graph_trainer.titan.parallelize import parallelized
from graph_trainer.titan.step_inputs import attach_loss, batch_of_zeros, loss_of_batch, passes_of

from torchtitan.config import TORCH_DTYPE_MAP  # isort: skip
from torchtitan.distributed import activation_checkpoint, ParallelDims, utils as dist_utils  # isort: skip
from torchtitan.tools import utils  # isort: skip


class FakeProcess:
    """Act as one rank of `world_size`: its mesh, and the whole model on meta.

    The process groups are fake, nothing is materialized and nothing is communicated. A process
    acts as one rank at a time: another FakeProcess ends the earlier one's process groups.

    Args:
        config: a checked config whose degrees multiply to `world_size`.
        device: what the step is captured for: "cuda" or "cpu".
        fuses_norms: whether PyTorch has a GPU's kernel for an RMSNorm, as from 2.9 on.
    """

    def __init__(
        self,
        config: GraphTrainerConfig,
        world_size: int,
        rank: int = 0,
        device: str = "cuda",
        fuses_norms: bool = True,
    ) -> None:
        assert config.model_spec is not None
        become(rank, world_size)
        self.config = config
        self.world_size = world_size
        self.rank = rank
        self.device = device
        self.fuses_norms = fuses_norms
        dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
        self.parallel_dims = ParallelDims.from_config(config.parallelism, world_size)
        self.parallel_dims.build_mesh()
        spec = config.model_spec
        spec.model.update_from_config(config=config)
        with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
            self.whole_model = spec.model.build()
        seq_len = config.training.seq_len
        self.num_parameters, _ = spec.model.get_nparams_and_flops(self.whole_model, seq_len)
        self.flops_per_token = flops_per_token(spec.model, self.whole_model, seq_len)
        """Of the whole model; `torchtitan` is what training counts for its MFU."""
        self.loss_fn = config.loss.build(compile_config=config.compile)

    @property
    def data_parallel_degree(self) -> int:
        """The number of different batches in a step."""
        return self.parallel_dims.dp_replicate * self.parallel_dims.dp_shard

    def pass_config(self, **of_machine: Any) -> PassConfig:
        """Return the passes that training runs. Arguments are those of `passes_of`."""
        return passes_of(self.config, self.parallel_dims, **of_machine)

    def batch_of(self, rows: int) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """Make the arguments of a batch as the data loader and the trainer do, on meta.

        Returns:
            (inputs, labels, number of valid tokens), the first two int64 [rows, sequence], of the
            part of a sequence that this rank has; and the keyword arguments of the model.
        """
        seq_len = self.config.training.seq_len // self.parallel_dims.cp
        inputs, labels = batch_of_zeros(rows, seq_len, "meta")
        valid_tokens = torch.empty((), dtype=torch.int64, device="meta")
        return (inputs.pop("input"), labels, valid_tokens), inputs

    @property
    def meta_as(self) -> str:
        """The device that tensors on meta stand for."""
        return "cpu" if self.device == "cpu" else "meta"

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """While entered, a capture is that of the device."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(dist_utils.get_spmd_context(parallel_dims=self.parallel_dims)())
            if self.device != "cpu":
                stack.enter_context(flash_attention_as_on_gpu())
                if self.fuses_norms:
                    stack.enter_context(rms_norm_as_on_gpu())
                stack.enter_context(autocast_as_on_gpu())
                stack.enter_context(host_copies_saved_as_on_gpu())
            yield


class FakeRank(FakeProcess):
    """One rank of a run without a pipeline, with the model that the trainer builds, on meta.

    Args: as of `FakeProcess`.

    Raises:
        ConfigError: the config has a pipeline.
    """

    def __init__(self, config: GraphTrainerConfig, *args: Any, **kwargs: Any) -> None:
        check_one_stage(config)
        super().__init__(config, *args, **kwargs)
        self.model = parallelized(self.whole_model, config, self.parallel_dims)
        attach_loss(self.loss_fn, self.model)

    @property
    def meshes(self) -> list[DeviceMesh]:
        """The meshes of the model's tensors, in the order of the model."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        return list(dict.fromkeys(t.device_mesh for t in tensors if isinstance(t, DTensor)))

    def batch(self) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """Make the arguments of a batch: see `batch_of`."""
        return self.batch_of(self.config.training.local_batch_size)

    def capture(self) -> JointGraph:
        """Capture the joint graph that training captures on this rank.

        Raises:
            CaptureError: the step cannot be captured.
        """
        args, kwargs = self.batch()
        loss_fn = loss_of_batch(self.loss_fn)
        step = Step(self.model, loss_fn, args, kwargs, True, self.meta_as, scalar_loss)
        with self.capturing():
            return capture_step(step, self.config.compile.full_capture or None)


def check_one_stage(config: GraphTrainerConfig, what: str = "this command") -> None:
    """Refuse a pipeline where all of the model must be on each rank.

    Args:
        what: what cannot be done with stages, for the message.

    Raises:
        ConfigError: the config has a pipeline.
    """
    degree = config.parallelism.pipeline_parallel_degree
    if degree > 1:
        raise ConfigError(
            f"parallelism.pipeline_parallel_degree = {degree}: {what} is for models that are not "
            "split into stages. Leave it out: `graph-trainer plan` with --json, --trace or --html "
            "plans all stages and their schedule. Or set parallelism.pipeline_parallel_degree = 1 "
            "for the ranks of one stage"
        )


@contextlib.contextmanager
def autocast_as_on_gpu() -> Iterator[None]:
    """While entered: `torch.autocast` on meta casts what linear layers compute with, as on a GPU.

    Routers of experts compute so in float32. No other op casts: models autocast nothing else.
    """
    original, linear = torch.autocast, F.linear

    def autocast(device_type: str, dtype: torch.dtype | None = None, **options: Any) -> Any:
        if device_type != "meta" or dtype is None or not options.get("enabled", True):
            return original(device_type if device_type != "meta" else "cpu", dtype, **options)

        def cast(*tensors: torch.Tensor | None) -> torch.Tensor:
            return linear(*(t if t is None else t.to(dtype) for t in tensors))  # type: ignore[arg-type]

        return patch.object(F, "linear", cast)

    with patch.object(torch, "autocast", autocast):
        yield


@contextlib.contextmanager
def host_copies_saved_as_on_gpu() -> Iterator[None]:
    """While entered: torchtitan's selective checkpoint saves what is copied from meta to the host.

    So it does with copies from a GPU, which it knows by "cuda" in the name of the device: without
    them a recomputed exchange of experts would wait for its numbers of tokens again.
    """
    original = activation_checkpoint.create_selective_checkpoint_contexts

    def contexts(policy: Callable[..., CheckpointPolicy]) -> Any:
        def as_on_gpu(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if op is torch.ops.aten._to_copy.default and args[0].device.type == "meta":
                target = kwargs.get("device")
                if target is not None and target.type == "cpu":
                    return CheckpointPolicy.MUST_SAVE
            return policy(context, op, *args, **kwargs)

        return original(as_on_gpu)

    with patch.object(activation_checkpoint, "create_selective_checkpoint_contexts", contexts):
        yield


@contextlib.contextmanager
def rms_norm_as_on_gpu() -> Iterator[None]:
    """While entered: `F.rms_norm` is a GPU's kernel, which saves its input and one number a row.

    torch on meta decomposes the op, and a graph would keep every value on the way.
    """
    original = F.rms_norm

    def rms_norm(
        input: torch.Tensor,
        normalized_shape: list[int],
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        if weight is not None and weight.dtype is not input.dtype:  # the kernel takes one dtype
            return original(input, normalized_shape, weight, eps)
        output: torch.Tensor = _FusedRMSNorm.apply(input, list(normalized_shape), weight, eps)
        return output

    with (
        patch.object(F, "rms_norm", rms_norm),
        traced_as_one_op(torch.ops.aten._fused_rms_norm.default),
    ):
        yield


class _FusedRMSNorm(torch.autograd.Function):
    """torch's op with its derivative, which autograd has for devices with a kernel only."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        shape: list[int],
        weight: torch.Tensor | None,
        eps: float | None,
    ) -> torch.Tensor:
        with below_autograd():
            output, rstd = torch.ops.aten._fused_rms_norm.default(input, shape, weight, eps)
        ctx.save_for_backward(input, weight, rstd)
        ctx.shape = shape
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, rstd = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        with below_autograd():
            of_input, of_weight = torch.ops.aten._fused_rms_norm_backward.default(
                gradients[0], input, ctx.shape, rstd, weight, wanted
            )
        return of_input, None, of_weight, None


@contextlib.contextmanager
def flash_attention_as_on_gpu() -> Iterator[None]:
    """While entered: `F.scaled_dot_product_attention` in half precision is a GPU's kernel.

    CUDA builds of torch choose the flash kernel (or cuDNN's, which needs the same memory) for
    float16 and bfloat16, and cuDNN's for a mask or values of another size. On meta, torch
    decomposes attention into matmuls that keep all scores. The ops have a meta kernel and a
    backward, the flash op DTensor's sharding rule too.
    """
    # Not a TorchFunctionMode: while torch.autograd.grad runs under one, the mode is off, and a
    # checkpointed block that is recomputed there would get the other attention.
    original = F.scaled_dot_product_attention

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        # The kernels' limits: half precision, heads of at most 256.
        half = query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= 256
        scale = options.get("scale")
        if half and (attn_mask is not None or value.shape[-1] != query.shape[-1]):
            # cuDNN's takes a mask, and computes what it hides as well, and values of their own size
            cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
            inputs = (query, key, value, attn_mask)
            return cudnn(*inputs, True, dropout_p, is_causal, False, scale=scale)[0]
        if half:
            # The kernel reads fewer keys than queries as they are, so enable_gqa changes nothing.
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return original(query, key, value, attn_mask, dropout_p, is_causal, **options)

    with patch.object(F, "scaled_dot_product_attention", attention):
        yield
