"""Whether a run names the machine that its passes ask about."""

from __future__ import annotations

from graph_trainer.core.simulation.hardware import known_hardware
from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.run_config import GraphTrainerConfig


def check_hardware(config: GraphTrainerConfig) -> None:
    """Find out before any process group is made what the pass would find out after the capture.

    Raises:
        ConfigError: a pass decides by simulation, and `compile.hardware` is unset.
    """
    from graph_trainer.core.passes.catalogue import resolve_passes

    compile_config = config.compile
    if compile_config.mode == "eager" or compile_config.hardware is not None:
        return
    listed = {p.name for p in resolve_passes(compile_config.passes, compile_config.disable_passes)}
    asks = {
        'compile.bucketing.strategy = "auto"': "bucket_collectives" in listed
        and compile_config.bucketing.strategy == "auto",
        "the pass schedule_overlap": "schedule_overlap" in listed,
    }
    for what, is_asking in asks.items():
        if is_asking:
            raise ConfigError(
                f"compile.hardware is unset, and {what} decides by simulation. Set "
                f"compile.hardware to one of {', '.join(known_hardware())}, or to the path of a "
                "profile of your own."
            )
