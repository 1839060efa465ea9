"""What a pass is: a function on the joint graph, and what the pipeline has to know of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import IntEnum
from typing import Any

from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.passes.context import PassContext, RunSettings
from graph_trainer.errors import PassError


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
    """The options of a pass that has none."""


PassFunction = Callable[[JointGraph, Any, PassContext], None]


@dataclass(frozen=True, slots=True)
class Pass:
    """A graph pass: `function(joint, options, context)` changes the graph in place. Calling the
    pass, `a_pass(joint)`, runs the function alone, without the pipeline's checks."""

    name: str
    stage: Stage
    summary: str
    """One line for `graph-trainer passes` and for the help of the config section."""
    function: PassFunction
    options_type: type = NoOptions
    """A frozen dataclass of what a user may set; the docstrings of its fields are the help."""
    default: bool = True
    """Whether the pass list "default" includes it. Read of built-in passes only."""
    optional: bool = False
    """Whether a step needs it only to be faster: it is rolled back where the step would need more
    memory than `PassConfig.memory_limit_gib` after it, and after all later passes. For prefetching,
    bucketing, overlap."""
    changes_sums: bool = False
    """Whether it may change the order in which numbers are added, and so the last bits."""
    has_bitwise_mode: bool = False
    """Whether it leaves every sum as it is where `settings.bitwise` is set. Another pass with
    `changes_sums` is then refused."""
    section: str = ""
    """The config section of its options below [compile]; the pass's name where none is given."""
    needs_hardware: Callable[[Any, RunSettings], bool] = lambda options, settings: False
    """Whether it decides by simulation with these options, and so by `PassConfig.hardware`, on
    which the ranks agree first."""

    def __post_init__(self) -> None:
        try:
            inspect.signature(self.function).bind("joint", "options", "context")
        except (TypeError, ValueError) as error:  # ValueError: a function of C without one
            raise PassError(
                f"the function of the pass '{self.name}' cannot be called with (joint, options, "
                f"context): {error}; a pass without options takes and ignores NoOptions"
            ) from error
        kind = self.options_type
        if not (isinstance(kind, type) and is_dataclass(kind)) or any(
            f.default is MISSING and f.default_factory is MISSING for f in fields(kind)
        ):
            raise PassError(
                f"the options of the pass '{self.name}' are {kind!r}: a dataclass is needed whose "
                "fields all have defaults"
            )
        if not self.section:
            object.__setattr__(self, "section", self.name)

    def __call__(
        self, joint: JointGraph, options: Any = None, context: PassContext | None = None
    ) -> None:
        """Run the function; by default with default options, in a run of one rank."""
        self.function(joint, options or self.options_type(), context or PassContext())


def graph_pass(*, stage: Stage, summary: str, **declared: Any) -> Callable[[PassFunction], Pass]:
    """Make a function a Pass named after it, with these and other `declared` fields of `Pass`.

    Example::

        @graph_pass(stage=Stage.CLEANUP, summary="remove unused nodes")
        def my_pass(joint: JointGraph, options: NoOptions, context: PassContext) -> None: ...
    """
    return lambda function: Pass(function.__name__, stage, summary, function, **declared)
