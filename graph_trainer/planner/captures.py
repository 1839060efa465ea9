"""Captured steps, each made once for all plans that differ only behind the capture."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.planner.console import OnProgress
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.titan.activation_policies import POLICIES
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.config.serialize import config_to_toml


class Captures:
    """The latest captured steps of this process.

    Args:
        most: how many are kept, the latest.
    """

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._joints: OrderedDict[tuple[object, ...], JointGraph] = OrderedDict()

    def of(self, run: FakeRank, on_progress: OnProgress = lambda line: None) -> JointGraph:
        """Return a copy of the step that `run` captures, which the caller may change.

        Raises:
            CaptureError: the step cannot be captured.
        """
        assert run.config.model_spec is not None
        layers = len(getattr(run.config.model_spec.model, "layers", ()))
        config = config_to_toml(_without_what_acts_later(run.config))
        key = (config, layers, run.world_size, run.rank, run.device)
        if key not in self._joints:
            on_progress("capturing the train step")
            self._joints[key] = run.capture()
        self._joints.move_to_end(key)
        while len(self._joints) > self._most:
            self._joints.popitem(last=False)
        return copy_graph(self._joints[key])


def _without_what_acts_later(config: GraphTrainerConfig) -> GraphTrainerConfig:
    """Set what only passes, backend and train loop read to one value, whatever it is."""
    same = replace(
        config,
        parallelism=replace(config.parallelism, fsdp_reshard_after_forward="default"),
        compile=type(config.compile)(mode=config.compile.mode),
    )
    # torchtitan's own wrappers recompute while the step is captured.
    if type(config.activation_checkpoint) in POLICIES and config.compile.mode != "eager":
        same = replace(same, activation_checkpoint=None)
    return same
