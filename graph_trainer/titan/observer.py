"""What watches a run: the trainer calls it and knows nothing of what it does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import nn

from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.passes.report import Report
from graph_trainer.core.text import width_of_ranks
from graph_trainer.titan.config.core_settings import with_config_keys


class RunObserver:
    """Watches one rank of a run; `GraphTrainer.observer` is one.

    The methods do nothing. An observer overrides those that it needs, and what one of them
    raises ends the run.
    """

    def graph_reported(self, report: Report) -> None:
        """Receive what the passes did to a new graph, of training or validation."""

    def first_graph(self, joint: JointGraph) -> None:
        """Receive the first graph of the train step, its passes run, before it communicates; of a
        pipeline the graph of each of this rank's stages.

        An error on one rank ends the step on all ranks.
        """

    def step(self) -> AbstractContextManager[None]:
        """Return the context that a whole train step runs in."""
        return contextlib.nullcontext()

    def microbatch(self) -> AbstractContextManager[None]:
        """Return the context that forward and backward of one microbatch run in."""
        return contextlib.nullcontext()

    def gradients_ready(self, parameters: Iterable[nn.Parameter]) -> None:
        """Receive the parameters after a microbatch has added its gradients to `.grad`."""

    def memory_grew(self, num_bytes: int) -> None:
        """Receive what CPU memory the run's second step took at its peak: `resident_growth`."""

    def finished(
        self, parameters: Iterable[nn.Parameter], optimizers: Iterable[torch.optim.Optimizer]
    ) -> None:
        """Receive the parameters and optimizers after the last step of a run without error."""


class ReportedRun(RunObserver):
    """Prints what the passes did to each captured graph, on rank 0."""

    def graph_reported(self, report: Report) -> None:
        """Print the table of the passes."""
        if dist.get_rank() == 0:
            text = with_config_keys(report.text(width_of_ranks()))
            print(f"What each pass did to the joint graph\n\n{text}\n")
