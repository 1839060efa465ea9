"""The sections of the config that are graph_trainer's own."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import tyro
from torchtitan.config import CompileConfig
from torchtitan.trainer import Trainer

from graph_trainer.core.passes.bucketing.bucket_collectives import BucketCollectivesOptions
from graph_trainer.core.passes.catalogue import resolve_passes
from graph_trainer.core.passes.overlap.overlap_fsdp import OverlapFsdpOptions
from graph_trainer.core.passes.overlap.schedule_overlap import ScheduleOverlapOptions
from graph_trainer.core.passes.pipeline import PassConfig
from graph_trainer.core.runtime.backends.registry import BACKENDS
from graph_trainer.core.simulation.hardware import load_hardware

# help, schema and checks of compile.backend show what the registry lists
if TYPE_CHECKING:
    BackendName = str
else:
    BackendName = Literal[tuple(BACKENDS)]

NOT_TORCH_COMPILE = (
    "torchtitan's torch.compile switch, which graph_trainer does not have: [compile] here "
    "configures the captured step. Leave it out and set compile.mode, compile.backend and "
    "compile.passes"
)
"""What is said about the inherited keys of [compile]."""


@dataclass(kw_only=True, slots=True)
class GraphCompileConfig(CompileConfig):
    """[compile]: how the train step is captured, transformed and run."""

    mode: Literal["aot_fx_trace", "eager"] = "aot_fx_trace"
    """
    "aot_fx_trace" captures forward, loss and backward as one graph and runs that;
    "eager" runs the same sharded model in torchtitan's own loop, without a capture.
    """

    backend: BackendName = "eager"
    """
    What runs the captured graph: "eager" calls its operators one by one, bitwise equal
    to the model itself; "inductor" compiles the whole graph. No effect in mode "eager".
    """

    passes: list[str] = field(default_factory=lambda: ["default"])
    """
    The graph passes to run, in order. "default" stands for the default list, which any
    other pass beside it joins at its stage; entries are names as `graph-trainer passes`
    lists them.
    """

    disable_passes: list[str] = field(default_factory=list)
    """Passes to leave out of the list above, by name."""

    bucketing: BucketCollectivesOptions = field(default_factory=BucketCollectivesOptions)
    """
    How the pass bucket_collectives merges collectives; not at all unless a strategy is set.
    No effect in mode "eager".
    """

    overlap_fsdp: OverlapFsdpOptions = field(default_factory=OverlapFsdpOptions)
    """How far the pass overlap_fsdp reaches, where it is in the list. No effect in mode "eager"."""

    schedule_overlap: ScheduleOverlapOptions = field(default_factory=ScheduleOverlapOptions)
    """
    How far the pass schedule_overlap reaches, where it is in the list. No effect in mode
    "eager".
    """

    hardware: str | None = None
    """
    The machine that the step will run on, for passes that decide by simulation: a profile of
    configs/hardware ("h100-sxm" for one) or the path of a TOML file like those. `graph-trainer
    plan` takes its --hardware where this is unset. No effect in mode "eager".
    """

    memory_limit_gib: float | None = None
    """
    The most GiB that a step may need on a device as predicted: parameters, buffers, batch,
    optimizer state, gradients and what the graph allocates, without the gaps that an
    allocator leaves (`graph-trainer plan` tells them). An optional pass (bucketing,
    overlap) that needs more is rolled back; a step that needs more without any is refused before it
    is taken. Unset for no limit.
    """

    verify_passes: bool = False
    """
    Run the expensive checks after every pass. Slow; for writing and debugging passes.
    """

    max_graphs: int = 8
    """
    How many captured graphs are kept, one for each shape of batch. Beyond it the one
    used longest ago is dropped and captured again when its shape comes back.
    """

    # torchtitan's torch.compile switches mean nothing to a captured step. They stay,
    # because torchtitan's components read them, and can be set from nowhere.
    enable: Annotated[bool, tyro.conf.Suppress] = False
    enable_async_tensor_parallel: Annotated[bool, tyro.conf.Suppress] = False
    components: Annotated[list[str], tyro.conf.Suppress] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class GraphTrainerConfig(Trainer.Config):
    """torchtitan's trainer config with graph_trainer's own [compile] section."""

    # GraphTrainer sets this when it is imported. Without the line, `build` would make
    # torchtitan's own trainer until then.
    _owner: ClassVar[type | None] = None

    compile: GraphCompileConfig = field(default_factory=GraphCompileConfig)

    module: Annotated[str, tyro.conf.Suppress] = ""
    """The module whose config_registry `base` is looked up in."""

    base: Annotated[str, tyro.conf.Suppress] = ""
    """The registry entry that this config began as."""


class PassSection(NamedTuple):
    """A section [compile.NAME] of a pass's options."""

    name: str
    pass_name: str
    options: Any
    """What the pass takes."""
    is_default: bool


def pass_sections(config: GraphCompileConfig) -> list[PassSection]:
    """The options of those passes that have a section of their own."""
    return [
        PassSection(name, pass_name, options, options == type(options)())
        for name, pass_name, options in (
            ("bucketing", "bucket_collectives", config.bucketing),
            ("overlap_fsdp", "overlap_fsdp", config.overlap_fsdp),
            ("schedule_overlap", "schedule_overlap", config.schedule_overlap),
        )
    ]


def pass_config(config: GraphCompileConfig, **more: Any) -> PassConfig:
    """What the passes are told; `more` are fields that other sections decide.

    Raises:
        PassError: a pass that is unknown or out of place.
        ConfigError: `compile.hardware` is no profile.
    """
    named = config.hardware
    passes = PassConfig(
        passes=tuple(config.passes),
        disable_passes=tuple(config.disable_passes),
        verify_passes=config.verify_passes,
        memory_limit_gib=config.memory_limit_gib,
        hardware=None if named is None else load_hardware(named, "compile.hardware"),
        **more,
    )
    listed = {p.name for p in resolve_passes(passes.passes, passes.disable_passes)}
    options = {
        s.pass_name: s.options
        for s in pass_sections(config)
        if s.pass_name in listed and not s.is_default
    }
    return replace(passes, options=options)
