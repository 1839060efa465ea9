"""What a pass is, and the list of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from graph_trainer.core.graph.joint_graph import JointGraph


class Stage(IntEnum):
    """When a pass runs. Stages run in this order and a list out of order is refused."""

    CLEANUP = 0
    STRUCTURE = 1
    TAG = 2
    REMATERIALIZE = 3
    COMMUNICATION = 4
    SCHEDULE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOptions:
    """For a pass that has none."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A registered pass: `function(joint, options)` changes the graph in place."""

    name: str
    stage: Stage
    summary: str
    function: Callable[[JointGraph, Any], None]
    options_type: type = NoOptions
    default: bool = True
    """Whether the pass list "default" includes it."""
    optional: bool = False
    """Whether a step needs it only to be faster: it is rolled back where it would need more
    memory than `compile.memory_limit_gib`. For prefetching, bucketing, overlap."""


def graph_pass(
    *,
    stage: Stage,
    summary: str,
    options_type: type = NoOptions,
    default: bool = True,
    optional: bool = False,
) -> Callable[[Callable[[JointGraph, Any], None]], Pass]:
    """Make a function a Pass named after it.

    Example::

        @graph_pass(stage=Stage.CLEANUP, summary="remove what nothing reads")
        def my_pass(joint: JointGraph, options: NoOptions) -> None: ...
    """

    def make(function: Callable[[JointGraph, Any], None]) -> Pass:
        return Pass(function.__name__, stage, summary, function, options_type, default, optional)

    return make
