"""Graph passes: one a file, its options beside it; `pipeline` runs and verifies them."""

from graph_trainer.passes.pipeline import (
    PassConfig,
    pass_by_pass,
    passes_like,
    registered_passes,
    resolve_passes,
    run_passes,
)
from graph_trainer.passes.registry import NoOptions, Pass, Stage, graph_pass
from graph_trainer.passes.report import PassReport, Report
from graph_trainer.passes.tag_fsdp_unshards import TagFsdpUnshardsOptions

__all__ = [
    "NoOptions",
    "Pass",
    "PassConfig",
    "PassReport",
    "Report",
    "Stage",
    "TagFsdpUnshardsOptions",
    "graph_pass",
    "pass_by_pass",
    "passes_like",
    "registered_passes",
    "resolve_passes",
    "run_passes",
]
