"""One rank of a pipeline that has not started: the stages that training would capture on it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graph_trainer.core.capture.forward_alone import capture_stage
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.torch_private_pipelining import stages_of
from graph_trainer.planner.fake_rank import FakeProcess
from graph_trainer.titan.captured_stages import PassedOn, loss_of_stage, of_loss
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.parallelize import sections_of
from graph_trainer.titan.step_inputs import attach_loss

# torchtitan's automatic split, which has no public name
from torchtitan.distributed.pipeline_parallel import (  # isort: skip
    _generate_llm_fqn_per_model_part as automatic_split,
    _get_pipeline_metadata as what_is_split,
)


class FakeStages(FakeProcess):
    """One rank of a pipeline, with the stages that torchtitan's split gives it, on meta.

    Args: as of `FakeProcess`, with a config that has a pipeline.
    """

    def __init__(self, config: GraphTrainerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        spec = config.model_spec
        assert spec is not None and spec.pipelining_fn is not None
        split = partial(spec.pipelining_fn, self.whole_model, **sections_of(config))
        # what the trainer knows beside the config
        of_trainer = {
            "model_config": spec.model,
            "parallelize_fn": spec.parallelize_fn,
            "loss_fn": self.loss_fn,
            "device": torch.device("meta"),
        }
        stages = stages_of(split(parallel_dims=self.parallel_dims, **of_trainer)[0])
        self.num_stages = stages[0].num_stages
        self.modules = {stage.stage_index: stage.submod.train() for stage in stages}
        """The stages of this rank, by their index."""
        if self.num_stages - 1 in self.modules:
            attach_loss(self.loss_fn, self.modules[self.num_stages - 1])

    def capture(self, index: int, received: PassedOn | None) -> JointGraph:
        """Capture the joint graph of a stage, as training does on this rank.

        Args:
            received: what the stage before passes on; None of the first stage.

        Raises:
            CaptureError: the stage cannot be captured.
        """
        size = self.config.parallelism.pipeline_parallel_microbatch_size
        (taken, labels, valid_tokens), extra = self.batch_of(size)
        if received is not None:
            taken = received.zeros(self.parallel_dims, torch.device("meta"))
        loss_fn = None
        if index == self.num_stages - 1:
            loss_fn = loss_of_stage(self.loss_fn)
            extra |= of_loss(labels, valid_tokens)
        with self.capturing():
            return capture_stage(
                *(self.modules[index], (taken,), extra),
                loss_fn=loss_fn,
                meta_as=self.meta_as,
                full_capture=self.config.compile.full_capture or None,
            )


def modules_of_stages(config: GraphTrainerConfig, run: FakeProcess) -> list[list[str]]:
    """List for each stage the FQNs of its modules, as torchtitan splits the model."""
    assert config.model_spec is not None
    split: list[list[str]] | None = config.parallelism.module_fqns_per_model_part
    if split is not None:
        return split
    metadata = what_is_split(run.parallel_dims, config.parallelism, config.model_spec.model)
    return automatic_split(*metadata)
