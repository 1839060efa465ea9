"""graph_trainer: one train step as one graph, and passes that decide how it communicates."""

from graph_trainer.capture import capture
from graph_trainer.compile import Step, compile
from graph_trainer.errors import (
    CaptureError,
    CheckpointError,
    CollectiveError,
    ConfigError,
    GraphTrainerError,
    NotFiniteError,
    PassError,
    TrainingError,
    VerificationError,
)
from graph_trainer.joint_graph import JointGraph
from graph_trainer.passes import NoOptions, PassConfig, Stage, graph_pass, run_passes
from graph_trainer.simple_fsdp import MixedPrecisionPolicy, sharded_parameters, simple_fsdp

__all__ = [
    "CaptureError",
    "CheckpointError",
    "CollectiveError",
    "ConfigError",
    "GraphTrainerError",
    "JointGraph",
    "MixedPrecisionPolicy",
    "NoOptions",
    "NotFiniteError",
    "PassConfig",
    "PassError",
    "Stage",
    "Step",
    "TrainingError",
    "VerificationError",
    "capture",
    "compile",
    "graph_pass",
    "run_passes",
    "sharded_parameters",
    "simple_fsdp",
]
