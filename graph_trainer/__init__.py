"""graph_trainer: one train step as one graph, and passes that decide how it communicates.

The names below are imported when they are first used: importing torch takes seconds, and a mistyped
command has its answer without.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from graph_trainer.errors import (
    CaptureError,
    CheckpointError,
    CollectiveError,
    ConfigError,
    GraphTrainerError,
    MemoryLimitError,
    NotFiniteError,
    PassError,
    TrainingError,
    VerificationError,
)

if TYPE_CHECKING:
    from graph_trainer.core.capture.capture import capture
    from graph_trainer.core.capture.forward_alone import capture_forward, capture_stage
    from graph_trainer.core.capture.tracing.offload_regions import offload
    from graph_trainer.core.graph.joint_graph import JointGraph
    from graph_trainer.core.partition.exported_step import ExportedStep
    from graph_trainer.core.partition.partitioned_step import PartitionedStep, partition
    from graph_trainer.core.partition.torch_compile_backend import backend
    from graph_trainer.core.passes.base import NoOptions, Stage, graph_pass
    from graph_trainer.core.passes.context import PassContext
    from graph_trainer.core.passes.pass_list import PassConfig
    from graph_trainer.core.passes.pipeline import run_passes
    from graph_trainer.core.pipeline.schedule import PipelineStep
    from graph_trainer.core.pipeline.stage import GraphStage
    from graph_trainer.core.runtime.step import Step, compile
    from graph_trainer.core.sharding.ordered_gloo import cpu_backend
    from graph_trainer.core.sharding.simple_fsdp import (
        MixedPrecisionPolicy,
        sharded_parameters,
        simple_fsdp,
    )
    from graph_trainer.core.training.check_capture import check_capture

__all__ = [
    "CaptureError",
    "CheckpointError",
    "CollectiveError",
    "ConfigError",
    "ExportedStep",
    "GraphStage",
    "GraphTrainerError",
    "JointGraph",
    "MixedPrecisionPolicy",
    "NoOptions",
    "NotFiniteError",
    "PartitionedStep",
    "PassConfig",
    "PassContext",
    "MemoryLimitError",
    "PassError",
    "PipelineStep",
    "Stage",
    "Step",
    "TrainingError",
    "VerificationError",
    "backend",
    "capture",
    "capture_forward",
    "capture_stage",
    "check_capture",
    "compile",
    "cpu_backend",
    "graph_pass",
    "offload",
    "partition",
    "run_passes",
    "sharded_parameters",
    "simple_fsdp",
]

_MODULES = {
    "ExportedStep": "core.partition.exported_step",
    "GraphStage": "core.pipeline.stage",
    "JointGraph": "core.graph.joint_graph",
    "MixedPrecisionPolicy": "core.sharding.simple_fsdp",
    "NoOptions": "core.passes.base",
    "PartitionedStep": "core.partition.partitioned_step",
    "PassConfig": "core.passes.pass_list",
    "PassContext": "core.passes.context",
    "PipelineStep": "core.pipeline.schedule",
    "Stage": "core.passes.base",
    "Step": "core.runtime.step",
    "backend": "core.partition.torch_compile_backend",
    "capture": "core.capture.capture",
    "capture_forward": "core.capture.forward_alone",
    "capture_stage": "core.capture.forward_alone",
    "check_capture": "core.training.check_capture",
    "compile": "core.runtime.step",
    "cpu_backend": "core.sharding.ordered_gloo",
    "graph_pass": "core.passes.base",
    "offload": "core.capture.tracing.offload_regions",
    "partition": "core.partition.partitioned_step",
    "run_passes": "core.passes.pipeline",
    "sharded_parameters": "core.sharding.simple_fsdp",
    "simple_fsdp": "core.sharding.simple_fsdp",
}
"""The module below graph_trainer of each name that is imported when it is first used."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
