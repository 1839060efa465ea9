"""GraphTrainer: torchtitan's trainer, with one captured graph for forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.validate import BaseValidator
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.observability import structured_logger as sl
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from graph_trainer.core.capture.tracing.trace import LossFn
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.names import clean_fqn
from graph_trainer.core.ordering.agreement import published_failure
from graph_trainer.core.passes.plan_memory.plan_memory import plan_memory
from graph_trainer.core.passes.report import Report
from graph_trainer.core.runtime.collective_failure import describe_missing_ranks, failed_collective
from graph_trainer.core.runtime.step import Gradients
from graph_trainer.core.torch_private_groups import default_store
from graph_trainer.core.torch_private_pipelining import run_modules, stages_of
from graph_trainer.core.training.step_cache import TrainStep
from graph_trainer.core.units import GIB
from graph_trainer.errors import CollectiveError, NotFiniteError, TrainingError
from graph_trainer.titan.activation_policies import BudgetAC
from graph_trainer.titan.captured_stages import (
    Microbatch,
    Pipeline,
    ValidationSchedule,
    make_stage_group,
    sum_in_order,
)
from graph_trainer.titan.checkpoint_states import GENERATORS, Generators, keep_generators_from
from graph_trainer.titan.checkpointer import CheckedCheckpointManager, with_checked_checkpoints
from graph_trainer.titan.chunked_loss import ChunkedCrossEntropyLoss
from graph_trainer.titan.config.check_pipeline import schedule_of
from graph_trainer.titan.config.core_settings import (
    LIMIT_KEY,
    config_keys_in_errors,
    with_config_keys,
)
from graph_trainer.titan.config.remedies import show
from graph_trainer.titan.config.run_config import (
    GraphTrainerConfig,
    of_captured_steps,
    with_text_of_training,
)
from graph_trainer.titan.config.write_toml import save_resolved_config
from graph_trainer.titan.data.loader import TextDataLoader
from graph_trainer.titan.data.tokenizer import TOKENIZER, ByteBPETokenizer
from graph_trainer.titan.device import (
    check_compiler,
    own_cpu_backend,
    process_group_timeouts,
    resident_growth,
)
from graph_trainer.titan.device_memory import MemoryOfRun
from graph_trainer.titan.hugging_face_export import described, write_beside_weights
from graph_trainer.titan.memory_table_file import memory_table_to_toml
from graph_trainer.titan.model_flops import flops_beyond_torchtitans
from graph_trainer.titan.nonfinite_guard import NonfiniteGuard, local_norm, local_tensor
from graph_trainer.titan.observer import RunObserver
from graph_trainer.titan.routing import RoutingRecorder
from graph_trainer.titan.step_inputs import attach_loss, batch_of_zeros, loss_of_batch, passes_of
from graph_trainer.titan.validator import MakeStep, checked_validator

StepFunction = Callable[..., tuple[torch.Tensor, Gradients]]
"""`loss, gradients = step(model, inputs, labels, global_valid_tokens, **extra)`."""

MEMORY_TABLE = "memory_table.toml"
"""The file of the dump folder with what backward keeps, where a budget decides it."""


class GraphTrainer(Trainer):
    """A torchtitan Trainer whose forward_backward_step runs the joint graph.

    The loop, data, clipping, optimizer, schedule, metrics, checkpoints and validation are
    torchtitan's; the forward of a validation is captured too. With `compile.mode = "eager"`,
    torchtitan also runs forward and backward, on the same sharded model: the reference for numbers.
    """

    # torchtitan's launcher calls config.build(), which makes the class that names its config here.
    Config: TypeAlias = GraphTrainerConfig

    def __init__(self, config: GraphTrainerConfig) -> None:
        checked = with_text_of_training(config)  # a copy: what is saved stays as it was given
        checked.checkpoint = with_checked_checkpoints(config.checkpoint)
        architecture = described(config)
        super().__init__(checked)
        self._model = self.model_parts[-1]
        """The model; of a pipeline the last of this rank's stages."""
        is_pipeline = self.parallel_dims.pp_enabled
        if config.model_spec is not None and not is_pipeline:
            self.metrics_processor.num_flops_per_token += flops_beyond_torchtitans(
                config.model_spec.model, self._model, config.training.seq_len
            )
        if not is_pipeline or self.pp_has_last_stage:
            attach_loss(self.loss_fn, self._model)
        self._routing: RoutingRecorder | None = None
        chunked = isinstance(self.loss_fn, ChunkedCrossEntropyLoss)
        if config.replaces_chunked_loss and not chunked and dist.get_rank() == 0:
            logger.info(
                f"{type(self.loss_fn).__name__} of the whole sequence replaces torchtitan's loss "
                "in chunks, which calls backward in forward and is lost in a graph. With "
                'loss.type = "chunked_cross_entropy" the logits are in chunks here too'
            )
        self._guard = NonfiniteGuard(skips=config.training.nonfinite == "skip")
        self._microbatches = 0
        self.captured_step: StepFunction | None = None
        """Runs forward and backward; None in mode "eager", where torchtitan does, and of a
        pipeline."""
        self.pipeline: Pipeline | None = None
        """Runs forward and backward of a pipeline; None in mode "eager"."""
        self.observer = RunObserver()
        """Watches the run; set before `train`."""
        make_validation: MakeStep | None = None
        if config.compile.mode == "eager":
            if ignored := of_captured_steps(config):
                logger.warning(
                    'compile.mode = "eager" captures no step: without effect are '
                    f"{', '.join(ignored)}"
                )
        else:
            self._memory = self._device_memory()
            if file := getattr(config.metrics, "save_routing", None):
                path = Path(config.dump_folder) / file
                self._routing = RoutingRecorder(self._model, self.parallel_dims, path)
            if is_pipeline:
                self._stage_group = make_stage_group(self.parallel_dims)
                self.pipeline = self._make_pipeline(check=self._check_first_graph)
            else:
                self.captured_step = self._make_step(
                    loss_of_batch(self.loss_fn), check=self._check_first_graph
                )
                make_validation = partial(self._make_step, backward=False)
        if config.validator.enable:
            self.validator: BaseValidator = checked_validator(
                self.validator,
                make_validation,
                within=self._naming_who_is_missing,
                schedule=self._validation_schedule() if is_pipeline else None,
            )
        if isinstance(self.checkpointer, CheckedCheckpointManager):
            self.checkpointer.beside_weights = partial(write_beside_weights, architecture, config)
            if self.checkpointer.enable:
                generators = Generators(self.parallel_dims, self.device)
                self.checkpointer.states[GENERATORS] = generators
        keep_generators_from(self.dataloader)
        if dist.get_rank() == 0:
            save_resolved_config(config, config.dump_folder)
            if isinstance(self.tokenizer, ByteBPETokenizer):
                self.tokenizer.save(Path(config.dump_folder, TOKENIZER))

    def init_distributed(self) -> ParallelDims:
        with own_cpu_backend():
            return super().init_distributed()

    def _make_step(self, loss_fn: LossFn, **options: Any) -> TrainStep:
        """Make a step that captures itself, with the backend and passes of [compile]."""
        compile_config = self.config.compile
        memory = self._memory
        return TrainStep(
            loss_fn,
            passes=passes_of(
                self.config, self.parallel_dims, device_memory=memory, host_memory=memory.on_host
            ),
            backend=compile_config.backend,
            partitioned=compile_config.mode == "partitioned",
            partition=compile_config.partition,
            full_capture=compile_config.full_capture or None,
            max_graphs=compile_config.max_graphs,
            on_event=lambda line: logger.info(with_config_keys(line)),
            on_report=self._reported,
            **options,
        )

    def _make_pipeline(self, **options: Any) -> Pipeline:
        """Make the pipeline that captures its stages, as `_make_step`."""
        compile_config = self.config.compile
        return Pipeline(
            stages=stages_of(self.pp_schedule),
            dims=self.parallel_dims,
            stage_group=self._stage_group,
            loss_fn=self.loss_fn,
            schedule=schedule_of(self.config),
            num_microbatches=self.num_pipeline_parallel_microbatches,
            passes=passes_of(
                self.config,
                self.parallel_dims,
                device_memory=self._memory,
                host_memory=self._memory.on_host,
            ),
            backend=compile_config.backend,
            full_capture=compile_config.full_capture or None,
            on_gradients=accumulate_gradients,
            on_event=lambda line: logger.info(with_config_keys(line)),
            on_report=self._reported,
            **options,
        )

    def _validation_schedule(self) -> ValidationSchedule:
        group = self.parallel_dims.get_mesh("pp").get_group()
        if self.pipeline is not None:
            return ValidationSchedule(self._make_pipeline(backward=False), group)
        return ValidationSchedule(partial(self._run_modules, backward=False), group)

    def _run_modules(
        self,
        microbatches: list[Microbatch],
        global_valid_tokens: torch.Tensor | None = None,
        *,
        backward: bool = True,
    ) -> torch.Tensor:
        """Run the stages of a pipeline without graphs; as `Pipeline.__call__`."""
        tokens = {} if global_valid_tokens is None else {"global_valid_tokens": global_valid_tokens}
        losses = run_modules(
            self.pp_schedule,
            [(inputs,) for inputs, _, _ in microbatches],
            [extra for _, _, extra in microbatches],
            [labels for _, labels, _ in microbatches],
            tokens,
            backward=backward,
        )
        return sum_in_order(losses, self.device)

    def _check_first_graph(self, joint: JointGraph) -> None:
        self.observer.first_graph(joint)

    def _parameters(self) -> list[nn.Parameter]:
        """List the parameters of the stages that this rank has."""
        return [parameter for part in self.model_parts for parameter in part.parameters()]

    def _reported(self, joint: JointGraph, report: Report) -> None:
        """Write and show what the passes decided, and log the graph's numbers as metrics."""
        table = joint.decisions.get(plan_memory.name)
        planned = isinstance(self.config.activation_checkpoint, BudgetAC.Config)
        if (
            table is not None
            and planned
            and dist.get_rank() == 0
            and not self.parallel_dims.pp_enabled  # where each stage has a table of its own
        ):
            path = Path(self.config.dump_folder) / MEMORY_TABLE
            try:
                path.write_text(memory_table_to_toml(table), encoding="utf-8")
            except OSError as error:  # the run needs no such file
                logger.warning(f"What backward keeps cannot be written to {path}: {error}")
            else:
                logger.info(f"What backward keeps, by block and op: {path}")
        kind = "" if joint.signature.backward else "validation_"
        values = {
            "predicted_peak_gib": report.last.peak_bytes / GIB,
            "capture_seconds": report.rows[0].seconds,
            "pass_seconds": sum(row.seconds for row in report.rows[1:]),
            "collectives": sum(report.last.collectives.values()),
            "collective_gib": report.last.collective_bytes / GIB,
        }
        named = {f"graph_trainer/{kind}{name}": value for name, value in values.items()}
        self.metrics_processor.logger.log(named, self.step)
        if getattr(self.config.metrics, "console", "") != "quiet":
            self.observer.graph_reported(report)

    def _device_memory(self) -> MemoryOfRun:
        """Return the `MemoryOfRun` of this run; warn if the memory limit is off."""
        if self.config.compile.memory_limit_gib == 0:
            logger.warning(
                f"{LIMIT_KEY} = 0: a step that needs more memory than there is runs all the same, "
                f"and the system may kill it. Unset {LIMIT_KEY} to refuse such a step"
            )
        return MemoryOfRun(self.device, self._parameters(), self.optimizers)

    def forward_backward_step(self, **microbatch: Any) -> torch.Tensor:
        """Run one microbatch and add its gradients to `.grad`, as torchtitan's method does.

        Args:
            microbatch: `input_dict`, `labels` and `global_valid_tokens`; of a pipeline lists of the
                first two, for the microbatches of the schedule.

        Returns:
            the loss; of a pipeline the sum of its microbatches' on the ranks of the last stage, and
            0 on others.
        """
        if self.parallel_dims.pp_enabled:
            loss = self._run_pipeline(**microbatch)
        elif self.captured_step is None:
            loss = super().forward_backward_step(**microbatch)
        else:
            loss = self._run_captured_step(self.captured_step, **microbatch)
        self._microbatches += 1
        return loss

    def _run_captured_step(
        self, step: StepFunction, input_dict: Any, labels: Any, global_valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        assert isinstance(input_dict, dict) and isinstance(labels, torch.Tensor)
        inputs, labels, extra = self.post_dataloading_process(input_dict, labels)
        routed = self._routing.microbatch(self.step) if self._routing else contextlib.nullcontext()
        # around the observer, whose measure of memory is of the step alone
        with routed, self.train_context(), self.observer.microbatch():
            loss, gradients = step(self._model, inputs, labels, global_valid_tokens, **extra)
        accumulate_gradients(self._model, gradients)
        self.observer.gradients_ready(self._model.parameters())
        return loss

    def _run_pipeline(
        self, input_dict: Any, labels: Any, global_valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        assert isinstance(input_dict, list) and isinstance(labels, list)
        microbatches = [
            self.post_dataloading_process(*microbatch)
            for microbatch in zip(input_dict, labels, strict=True)
        ]
        with self.train_context(), self.observer.microbatch():
            loss = (self.pipeline or self._run_modules)(microbatches, global_valid_tokens)
        self.observer.gradients_ready(self._parameters())
        return loss

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """Run a train step: `optimizer_step`, measured and watched.

        Raises:
            NotFiniteError: a loss or a gradient of this step or of one before is not finite, and
                `training.nonfinite` is "stop". Raised when a step is logged or saved, and in the
                last one.
            TrainingError: a collective failed (gloo), with the step, the collective and the
                ranks that did not take part.
        """
        growth: contextlib.AbstractContextManager[Iterable[int]] = contextlib.nullcontext(())
        # in the second step, because the first makes the optimizer's state
        if self._microbatches == self.gradient_accumulation_steps and self.device.type == "cpu":
            self.optimizers.zero_grad()  # as the step begins: else these bytes are no growth
            growth = resident_growth()
        with self._naming_who_is_missing(), growth as grown, self.observer.step():
            self.optimizer_step(data_iterator)
        for num in grown:
            measured = {"graph_trainer/measured_growth_gib": num / GIB}
            self.metrics_processor.logger.log(measured, self.step)
            self.observer.memory_grew(num)
        if self._routing and self.metrics_processor.should_log(self.step):
            self._routing.write()

    def optimizer_step(self, data_iterator: Iterator[Any]) -> None:
        """Run forward and backward of all microbatches, clip, update, and log.

        This is torchtitan's `train_step` with three differences: gradients that are not finite
        update nothing, a loss that is not finite is refused before it is logged, and the largest
        loss of a rank is that of `losses_over_ranks`.
        """
        training, dims = self.config.training, self.parallel_dims
        self.optimizers.zero_grad(set_to_none=training.disable_cuda_graphs)
        rates = self.lr_schedulers.get_metrics()
        batches = []
        """Of each call of forward and backward, the batches of its microbatches."""
        local_tokens = torch.zeros((), dtype=torch.int64)
        for _ in range(self.gradient_accumulation_steps):
            microbatches = []
            for _ in range(self.num_pipeline_parallel_microbatches):
                with sl.log_trace_span("fetching_batch"):
                    microbatches.append(next(data_iterator))
                local_tokens += (microbatches[-1][1] != IGNORE_INDEX).sum()
            batches.append(microbatches)
        sl.log_trace_scalar({"local_valid_tokens": int(local_tokens)})
        local_tokens = local_tokens.to(self.device)
        batch_mesh = dims.get_mesh("batch") if dims.dp_enabled else None
        valid_tokens = dist_utils.dist_sum_tensor(local_tokens, batch_mesh)

        loss = torch.zeros((), device=self.device)
        while batches:
            inputs, labels = self._on_device(batches.pop(0))
            loss_of_call = self.forward_backward_step(
                input_dict=inputs if dims.pp_enabled else inputs[0],
                labels=labels if dims.pp_enabled else labels[0],
                global_valid_tokens=valid_tokens,
            )
            loss = loss + local_tensor(loss_of_call.detach())

        logs = self.metrics_processor.should_log(self.step)
        with sl.log_trace_span("optim"):
            parameters = self._parameters()
            norm_here = local_norm(parameters)
            norm = dist_utils.clip_grad_norm_(
                parameters,
                training.max_norm,
                foreach=True,
                pp_mesh=dims.get_optional_mesh("pp"),
                ep_enabled=dims.ep_enabled,
            )
            self._guard.see(
                self.step, loss=loss, local_norm=norm_here, norm=norm, valid_tokens=valid_tokens
            )
            if logs or self._is_saved() or self.step == training.steps:
                self._guard.check()
            self.checkpointer.maybe_wait_for_staging()
            if self._guard.update(self.optimizers):
                self.lr_schedulers.step()
        if logs:
            self._log(loss, norm, local_tokens, valid_tokens, rates)

    def _on_device(
        self, microbatches: list[tuple[dict[str, Any], torch.Tensor]]
    ) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
        """Move the inputs and labels of microbatches to the device."""
        for inputs, _ in microbatches:
            for name, value in inputs.items():  # in place: what is replaced can be freed
                inputs[name] = value.to(self.device) if isinstance(value, torch.Tensor) else value
        labels = [labels.to(self.device) for _, labels in microbatches]
        return [inputs for inputs, _ in microbatches], labels

    def _is_saved(self) -> bool:
        """Return whether this step ends with a checkpoint."""
        checkpointer, last = self.checkpointer, self.step == self.config.training.steps
        return isinstance(checkpointer, CheckedCheckpointManager) and checkpointer.saves_at(
            self.step, last_step=last
        )

    def _log(
        self,
        loss: torch.Tensor,
        norm: torch.Tensor,
        local_tokens: torch.Tensor,
        valid_tokens: torch.Tensor,
        rates: dict[str, float],
    ) -> None:
        """Log the metrics of a step, as torchtitan does. All ranks call it together."""
        with sl.log_trace_span("collect_dist_metrics"):
            sl.log_trace_scalar({"global_valid_tokens": int(valid_tokens)})
            mean, largest = losses_over_ranks(loss, local_tokens, valid_tokens, self.parallel_dims)
            seen = torch.tensor(self.ntokens_seen, dtype=torch.int64, device=self.device)
            loss_mesh = self.parallel_dims.get_optional_mesh("loss")
            metrics = {"n_tokens_seen": dist_utils.dist_sum(seen, loss_mesh), **rates}
        if self._guard.skips:
            metrics["graph_trainer/skipped_steps"] = self._guard.skipped
        self.metrics_processor.log(self.step, mean, largest, norm.item(), extra_metrics=metrics)

    @contextlib.contextmanager
    def _naming_who_is_missing(self) -> Iterator[None]:
        """Turn a collective that fails inside into a TrainingError, and let errors of the core name
        the keys of the config."""
        try:
            with config_keys_in_errors():
                yield
        except (CollectiveError, RuntimeError) as error:
            failed = error if isinstance(error, CollectiveError) else failed_collective(error, None)
            if failed is None:
                raise
            # Log first, because the launcher may end this rank while it still waits for the others.
            logger.error(f"step {self.step}, rank {dist.get_rank()}: {failed}")
            others = published_failure() or describe_missing_ranks(
                failed.place, default_store(), dist.get_rank(), dist.get_world_size()
            )
            what = f"step {self.step}: {failed.place} failed: {failed.reason}"
            raise TrainingError(f"{what}. {others}") from error

    def train(self) -> None:
        """Prepare the first graph, run torchtitan's loop and finish an asynchronous save.

        Wait for a save under way only where every rank does: at the end, when the data run out,
        and where the loss was refused. After a collective that failed, other ranks may never
        arrive.
        """
        checkpointer, named = self.checkpointer, self.config.checkpoint.initial_load_path
        # a manager of the user's own does not say what it is about to load
        checked = isinstance(checkpointer, CheckedCheckpointManager)
        step = checkpointer.step_to_load() if checked else 0
        if named and step:
            logger.warning(
                f"checkpoint.initial_load_path = {show(named)} is not read: the run goes on "
                f"from its own checkpoint of step {step}"
            )
        with process_group_timeouts():
            if step < self.config.training.steps:  # a run at its end captures nothing
                self._prepare_first_graph()
            try:
                super().train()
                # The data may have run out before a step was logged, on this rank alone.
                self._guard.check(exchange=False)
            except NotFiniteError:
                checkpointer.maybe_wait_for_saving()
                raise
            finally:
                if self._routing:
                    self._routing.write()
            checkpointer.maybe_wait_for_saving()
        if not self._microbatches and not self.should_continue_training():
            logger.warning(
                f"There was nothing left to do: the checkpoint is of step {self.step}, and "
                f"training.steps = {self.config.training.steps}. Raise it to go on"
            )
        if not self._microbatches and self.should_continue_training():
            raise TrainingError(
                f"no step was trained: the data have less than one batch for rank {dist.get_rank()}"
                f" after step {self.step - 1}. Add text, set dataloader.infinite, or lower "
                "training.local_batch_size or training.seq_len."
            )
        if self._guard.skipped:
            logger.warning(
                f"{self._guard.skipped} steps of this run were skipped, since their gradients were "
                "not finite (training.nonfinite): look at the warnings of these steps"
            )
        self.observer.finished(self._parameters(), self.optimizers)

    def _prepare_first_graph(self) -> None:
        """Capture the train step for the batches that the config gives, and compare the ranks.

        What a step is refused for is then refused before a checkpoint is loaded, a batch is read
        or anything trains. A loader of a user's own may give other batches: its first one does it.
        """
        if self.pipeline is None and not isinstance(self.captured_step, TrainStep):
            return
        if self.device.type == "cpu":
            check_compiler(self.config.compile.backend)
        if not isinstance(self.dataloader, (TextDataLoader, HuggingFaceTextDataLoader)):
            return
        state = self.state_dict()
        rows = self.config.training.local_batch_size // self.num_pipeline_parallel_microbatches
        batch = batch_of_zeros(rows, self.config.training.seq_len, self.device)
        inputs, labels, extra = self.post_dataloading_process(*batch)
        self.load_state_dict(state)  # torchtitan has counted the zeros as tokens seen
        valid_tokens = torch.zeros((), dtype=torch.int64, device=self.device)
        with self._naming_who_is_missing(), self.train_context():
            if self.pipeline is not None:
                self.pipeline.prepare((inputs, labels, extra), valid_tokens)
            elif isinstance(self.captured_step, TrainStep):
                self.captured_step.prepare(self._model, inputs, labels, valid_tokens, **extra)


def accumulate_gradients(model: nn.Module, gradients: dict[str, torch.Tensor]) -> None:
    """Add gradients by FQN to the parameters' `.grad`, as autograd would: the first gradient is
    kept as it is, later gradients are added in place."""
    left = dict(gradients)
    for name, parameter in model.named_parameters():
        gradient = left.pop(clean_fqn(name), None)
        if gradient is None:
            continue
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            local_tensor(parameter.grad).add_(local_tensor(gradient))
    assert not left, f"gradients of parameters that the model does not have: {sorted(left)}"


def losses_over_ranks(
    loss: torch.Tensor,
    local_tokens: torch.Tensor,
    valid_tokens: torch.Tensor,
    parallel_dims: ParallelDims,
) -> tuple[float, float]:
    """Return the mean loss of a step's tokens, and the largest mean of a data rank's tokens.

    Ranks of context parallelism have parts of the same sequences, so their losses are added first;
    data ranks without labels have no mean. All ranks call it together.

    Args:
        loss: this rank's, divided by `valid_tokens`; 0 on ranks without the last stage of a
            pipeline.
        local_tokens: the labels that count of this data rank's sequences.
        valid_tokens: the same over all data ranks.
    """
    loss = dist_utils.dist_sum_tensor(loss, parallel_dims.get_optional_mesh("pp"))
    mean = dist_utils.dist_sum(loss, parallel_dims.get_optional_mesh("loss"))
    of_data_rank = dist_utils.dist_sum_tensor(loss, parallel_dims.get_optional_mesh("cp"))
    local_mean = of_data_rank * valid_tokens / local_tokens
    local_mean = torch.where(local_tokens > 0, local_mean, -torch.inf)
    return mean, dist_utils.dist_max(local_mean, parallel_dims.get_optional_mesh("batch"))
