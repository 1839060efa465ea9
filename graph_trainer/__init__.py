"""graph_trainer: one train step as one graph, and passes that decide how it communicates."""

from graph_trainer.core.bisect.check_capture import check_capture
from graph_trainer.core.capture.capture import capture
from graph_trainer.core.capture.forward_alone import capture_forward
from graph_trainer.core.capture.offload_regions import offload
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.partition.backend import backend
from graph_trainer.core.partition.export import ExportedStep
from graph_trainer.core.partition.partitioned_step import PartitionedStep, partition
from graph_trainer.core.passes.base import NoOptions, Stage, graph_pass
from graph_trainer.core.passes.context import PassContext
from graph_trainer.core.passes.pipeline import PassConfig, run_passes
from graph_trainer.core.runtime.step import Step, compile
from graph_trainer.core.sharding.ordered_gloo import cpu_backend
from graph_trainer.core.sharding.simple_fsdp import (
    MixedPrecisionPolicy,
    sharded_parameters,
    simple_fsdp,
)
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

__all__ = [
    "CaptureError",
    "CheckpointError",
    "CollectiveError",
    "ConfigError",
    "ExportedStep",
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
    "Stage",
    "Step",
    "TrainingError",
    "VerificationError",
    "backend",
    "capture",
    "capture_forward",
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
