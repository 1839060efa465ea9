"""Captured steps, each made once for all plans that differ in what acts on the graph alone."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import replace

from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.planner.terminal import OnProgress
from graph_trainer.titan.activation_policies import POLICIES
from graph_trainer.titan.config.run_config import GraphTrainerConfig


class Captures:
    """The first captured step of this process, to which others are compared, and the latest.

    Args:
        most: how many are kept, the first included.
    """

    def __init__(self, most: int = 6) -> None:
        self._most = most
        self._joints: OrderedDict[tuple[object, ...], JointGraph] = OrderedDict()

    def of(self, run: FakeRank, on_progress: OnProgress = lambda line: None) -> JointGraph:
        """Return a copy of the step that `run` captures, which the caller may change.

        Raises:
            CaptureError: the step cannot be captured.
        """
        program = (what_is_captured(run.config), run.device, run.fuses_norms)
        key = (*program, run.world_size, run.rank)
        if key not in self._joints:
            on_progress("capturing the train step")
            self._joints[key] = run.capture()
        joint = self._joints[key]
        first, *others = self._joints
        if key != first:
            self._joints.move_to_end(key)
        for oldest in others[: max(0, len(self._joints) - self._most)]:
            del self._joints[oldest]
        return copy_graph(joint)


def what_is_captured(config: GraphTrainerConfig) -> str:
    """Return what tells the captured step of a config from that of another.

    That is the config, its model included, without [compile], the policy of activations and that
    of resharding, which only passes and backend read.
    """
    ours = config.compile
    same = replace(
        config,
        parallelism=replace(config.parallelism, fsdp_reshard_after_forward="default"),
        compile=type(ours)(mode=ours.mode, full_capture=ours.full_capture),
    )
    # torchtitan's own wrappers recompute while the step is captured.
    if type(config.activation_checkpoint) in POLICIES and ours.mode != "eager":
        same = replace(same, activation_checkpoint=None)
    # functions of equal names: each loaded config has its own, of initial values for example
    return re.sub(r" at 0x[0-9a-f]+", "", repr(same))
