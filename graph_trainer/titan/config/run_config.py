"""The whole config: its sections that are graph_trainer's own, and one made of torchtitan's."""

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, make_dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
import tyro
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import (
    FlexAttention,
    ScaledDotProductAttention,
    VarlenAttention,
)
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from graph_trainer.core.passes.base import Pass
from graph_trainer.core.passes.catalogue import load_pass, registered_passes
from graph_trainer.core.passes.context import ReshardAfterForward
from graph_trainer.core.runtime.backends.registry import BACKENDS
from graph_trainer.errors import ConfigError
from graph_trainer.titan import activation_policies
from graph_trainer.titan.checkpointer import with_checked_checkpoints
from graph_trainer.titan.data.loader import TextDataLoader
from graph_trainer.titan.data.tokenizer import ByteBPETokenizer
from graph_trainer.titan.optimizer import SharedOptimizerConfig, with_shared_settings
from graph_trainer.titan.parallelize import parallelize_decoder
from graph_trainer.titan.parallelize_context import Method
from graph_trainer.titan.routing import SAVE_ROUTING, MetricsWithRouting

# help, schema and checks of compile.backend show what the registry lists
if TYPE_CHECKING:
    BackendName = str
else:
    BackendName = Literal[tuple(BACKENDS)]


@dataclass(kw_only=True, slots=True)
class GraphCompileConfig(CompileConfig):
    """[compile]: how the train step is captured, transformed and run.

    A pass with options has a section of its own, [compile.NAME]. `compile_class` makes the
    subclass that has these sections, so that no field here names a pass.
    """

    pass_of_section: ClassVar[Mapping[str, Pass]] = MappingProxyType({})
    """Name of a section below [compile] -> the pass whose options it has."""

    mode: Literal["aot_fx_trace", "partitioned", "eager"] = "aot_fx_trace"
    """
    "aot_fx_trace" captures forward, loss and backward as one graph and runs that;
    "partitioned" runs the same graph as two, a forward and a backward that autograd calls;
    "eager" runs the same sharded model in torchtitan's own loop, without a capture.
    """

    partition: Literal["tags", "min_cut"] = "tags"
    """
    What is saved for backward in mode "partitioned", and only there. "tags": what the passes have
    decided, and all else that backward reads. "min_cut": PyTorch's partitioner decides about what
    no pass has decided; what backward gathers or computes again stays so.
    """

    full_capture: bool = False
    """
    Trace every layer when the step is captured. Without it, of layers that are alike the first two
    and the last are traced, and the nodes of the others are copied: the graph is the same, and is
    made in the time of three layers. Where layers turn out to differ, and where a module, a hook or
    the loss is code of your own, all are traced in any case. No effect in mode "eager".
    """

    backend: BackendName = "eager"
    """
    What runs the captured graph: "eager" calls its operators one by one, bitwise equal
    to the model itself; "inductor" compiles the whole graph; "regional" compiles what runs
    between collectives, equal parts once, so that deep models compile as fast as shallow ones.
    No effect in mode "eager".
    """

    passes: list[str] = field(default_factory=lambda: ["default"])
    """
    The graph passes to run, in order: names as `graph-trainer passes` lists them, or
    "package.module:name" for a pass of your own. "default" stands for the default list, which
    any other pass beside it joins at its stage. Passes that a setting needs are added to a list
    without them.
    """

    disable_passes: list[str] = field(default_factory=list)
    """Passes to leave out of the list above, by name; not those that a setting needs."""

    bitwise: bool = False
    """
    Change the order of no sum: loss and gradients are then, bit by bit, those of the model run
    eagerly, on any transport. Costs speed on more than two ranks: reductions of gradients are not
    merged. Without it sums keep their addends, and on CPU ranks their order as well. Passes of
    your own that declare `changes_sums` are refused.
    """

    hardware: str | None = None
    """
    The machine that the step will run on, for passes that decide by simulation: a profile of
    configs/hardware ("h100-sxm" for one) or the path of a TOML file like those. Unset for the
    machine that is there, by its device's name; the report of the passes says which.
    `graph-trainer plan` takes its --hardware where this is unset. No effect in mode "eager".
    """

    memory_limit_gib: float | None = None
    """
    The GiB that a device must have at most, as predicted: parameters, buffers, batch, optimizer
    state, gradients, what the graph allocates, and on a GPU the gaps that the allocator leaves and
    the reserve of the hardware's profile (`graph-trainer plan` shows both). An optional pass
    (bucketing, overlap) after which a step needs more is rolled back, unless later passes bring it
    within the limit; a step that needs more without such passes is refused before it runs. Unset
    for what the device has: free memory on a GPU, available memory divided by the ranks of the
    machine on CPU. It refuses steps and rolls no pass back. 0 refuses nothing.
    """

    expert_imbalance: float | None = None
    """
    The imbalance of experts with which a step must fit: what the experts of a rank receive in every
    layer, in times of an even share of the tokens. Predicted memory, and with it what
    activation_checkpoint.type = "budget" keeps, counts so many tokens; predicted time is that of
    even shares. Unset for even shares, or 1; where it is unset and a budget fills the limit,
    `graph-trainer plan` takes the largest of its --expert-imbalance. For expert parallelism only.
    No effect in mode "eager".
    """

    allow_offload: bool = False
    """
    Whether activation_checkpoint.type = "budget" may keep the inputs of blocks in host memory
    between forward and backward, where that makes room for what is slower to compute again. On CPU
    nothing is gained, and nothing chosen.
    """

    verify_passes: bool = False
    """
    Run the expensive checks after every pass: of shapes, and of the results on small real values
    before and after it, in a graph of at most 1 GiB. Slow; for writing and debugging passes.
    """

    max_graphs: int = 8
    """
    How many captured graphs are kept, one for each shape of batch. Beyond this number the one
    used longest ago is dropped, and captured again when its shape comes back.
    """

    # torchtitan's torch.compile switches have no effect on a captured step. torchtitan's
    # components read them, so they stay, but neither files nor flags can set them.
    enable: Annotated[bool, tyro.conf.Suppress] = False
    enable_async_tensor_parallel: Annotated[bool, tyro.conf.Suppress] = False
    components: Annotated[list[str], tyro.conf.Suppress] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class GraphParallelismConfig(ParallelismConfig):
    """[parallelism]: torchtitan's, with more ways to reshard, and to split or mask a sequence."""

    fsdp_reshard_after_forward: ReshardAfterForward = "default"
    """
    Which parameters backward gathers again: "always" all that it reads; "never" none; "default"
    all but the last bucket (final norm and output head), with which backward starts, and none in
    the stages of a pipeline, as FSDP2 does; "auto" those
    that are worth less than their memory under compile.memory_limit_gib. "auto" acts on a captured
    step only.
    """

    context_parallel_method: Method = "auto"
    """
    How attention sees the whole sequence where context_parallel_degree splits it: "ulysses"
    exchanges parts of the sequence for parts of the heads, of queries and of keys, which the degree
    times tensor_parallel_degree must divide; "all_gather" gathers keys and values beside the
    queries of this rank, and masks later tokens. "auto" is "ulysses" where heads divide.
    """

    document_mask: bool = False
    """
    Let a token see only the tokens of its own document, which begins where positions are 0.
    Without it a token sees all tokens before it in its sequence. The mask is a whole matrix, and
    attention with it computes what it hides as well.
    """


@dataclass(kw_only=True, slots=True)
class GraphTrainingConfig(TrainingConfig):
    """[training]: torchtitan's, with what becomes of a step whose gradients are not finite."""

    nonfinite: Literal["stop", "skip"] = "stop"
    """
    What becomes of a step in which the norm of all gradients is NaN or infinite; it never updates
    parameters or optimizer state. "stop" ends the run, also for a loss that is not finite, by the
    next step that is logged or saved, with an error that names the first such step and its ranks.
    "skip" goes on with the next batch, as loss scalers do, and the learning rate schedule does not
    advance; the metric graph_trainer/skipped_steps counts. The host then waits for the norm in
    every step.
    """


@dataclass(kw_only=True, slots=True)
class GraphTrainerConfig(Trainer.Config):
    """torchtitan's trainer config with sections of graph_trainer's own."""

    # GraphTrainer sets this when it is imported. Without the line, `build` would make
    # torchtitan's own trainer until then.
    _owner: ClassVar[type | None] = None

    training: GraphTrainingConfig = field(default_factory=GraphTrainingConfig)
    parallelism: GraphParallelismConfig = field(default_factory=GraphParallelismConfig)
    metrics: MetricsWithRouting.Config = field(default_factory=MetricsWithRouting.Config)
    optimizer: OptimizersContainer.Config = field(default_factory=SharedOptimizerConfig)
    activation_checkpoint: activation_policies.Section = field(default_factory=SelectiveAC.Config)
    compile: GraphCompileConfig = field(default_factory=lambda: compile_class()())

    module: Annotated[str, tyro.conf.Suppress] = ""
    """The module whose config_registry `base` is looked up in."""

    base: Annotated[str, tyro.conf.Suppress] = ""
    """The registry entry that this config began as."""

    replaces_chunked_loss: Annotated[bool, tyro.conf.Suppress] = False
    """Whether torchtitan's entry has a loss in chunks, in whose place this config began with the
    same loss of the whole sequence."""

    def __post_init__(self) -> None:
        Trainer.Config.__post_init__(self)
        self.optimizer = with_shared_settings(self.optimizer)

    def model_problems(self) -> Iterator[tuple[str, str, str]]:
        """Yield the problems that a subclass knows of: key, problem and remedy."""
        yield from ()


def to_graph_trainer_config(config: Trainer.Config, **changes: Any) -> GraphTrainerConfig:
    """Make a graph_trainer config of the same model and run as a torchtitan trainer config.

    The model is sharded by graph_trainer's `parallelize_decoder`, its attention is scaled dot
    product attention, the text is the standard library's with its tokenizer, and [compile] is
    graph_trainer's with its defaults. A loss in chunks, which calls backward in forward, becomes
    the same loss of the whole sequence. CUDA graphs around the step and SPMD back ends other than
    partial DTensors, which exclude a captured step, are switched off. Everything else stays.

    Args:
        config: the result of a function in a torchtitan `config_registry`; it is not changed.
        changes: fields of GraphTrainerConfig that override the result.

    Raises:
        ValueError: the config has no model.
        ConfigError: the model's attention computes what scaled dot product attention does not.

    Example::

        def qwen3_debugmodel():
            return to_graph_trainer_config(config_registry.qwen3_debugmodel())
    """
    if config.model_spec is None:
        raise ValueError("the trainer config has no model_spec, so there is no model to convert")
    values = {name: copy.copy(value) for name, value in _values(config).items()}
    if unknown := values.keys() - {f.name for f in fields(GraphTrainerConfig)}:
        raise ConfigError(
            f"{type(config).__qualname__} has {', '.join(sorted(unknown))}, which a trainer of its "
            "own reads and graph_trainer's does not. Train this model with torchtitan alone."
        )
    loss = config.loss
    if isinstance(loss, ChunkedLossWrapper.Config):
        loss = loss.loss_fn
    elif type(loss) is BaseLoss.Config:  # the default of a config, of which no loss can be made
        vocabulary = getattr(config.model_spec.model, "vocab_size", None)
        loss = CrossEntropyLoss.Config(global_vocab_size=vocabulary)
    metrics = config.metrics
    if type(metrics) is MetricsProcessor.Config:
        metrics = MetricsWithRouting.Config(**_values(metrics) | {"enable_tensorboard": True})
    del values["compile"]
    values |= {
        "model_spec": _model_spec(config.model_spec),
        "training": GraphTrainingConfig(**_values(config.training) | {"disable_cuda_graphs": True}),
        "parallelism": GraphParallelismConfig(
            **_values(config.parallelism) | {"spmd_backend": "partial_dtensor"}
        ),
        "metrics": metrics,
        "checkpoint": with_checked_checkpoints(config.checkpoint),
        "tokenizer": ByteBPETokenizer.Config(),
        "dataloader": TextDataLoader.Config(),
        "validator": replace(
            config.validator, dataloader=TextDataLoader.Config(split="validation", infinite=False)
        ),
        "loss": copy.copy(loss),
        "replaces_chunked_loss": loss is not config.loss,
    }
    return GraphTrainerConfig(**(values | changes))


def with_text_of_training(config: GraphTrainerConfig) -> GraphTrainerConfig:
    """Return the config with the training text for a tokenizer and a validation that name none."""
    training = config.dataloader

    def filled(component: Any) -> Any:
        takes_text = isinstance(component, TextDataLoader.Config | ByteBPETokenizer.Config)
        if not takes_text or component.dataset or component.dataset_path:
            return component
        return replace(component, dataset=training.dataset, dataset_path=training.dataset_path)

    resolved = copy.copy(config)
    if isinstance(training, TextDataLoader.Config):
        resolved.tokenizer = filled(config.tokenizer)
        dataloader = filled(config.validator.dataloader)
        resolved.validator = replace(config.validator, dataloader=dataloader)
    return resolved


def _values(config: Any) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in fields(config)}


def _model_spec(spec: ModelSpec) -> ModelSpec:
    # A copy, because a registry may return the same object in every call.
    model = copy.deepcopy(spec.model)
    for other in (FlexAttention.Config, VarlenAttention.Config):
        for _, _, parent, attribute in list(model.traverse(other)):
            if isinstance(parent, list) and isinstance(attribute, int):
                parent[attribute] = ScaledDotProductAttention.Config()
            elif isinstance(attribute, str):
                setattr(parent, attribute, ScaledDotProductAttention.Config())
    attention = model.first_attention if isinstance(model, Decoder.Config) else None
    if attention is not None:
        # Projections and norms are modules of their own. A parameter beside them, such as attention
        # sinks, is an input of the other attentions, and this one takes no notice of it.
        with torch.device("meta"):
            unused = [name for name, _ in attention.build().named_parameters(recurse=False)]
        if unused:
            raise ConfigError(
                f"{spec.name} {spec.flavor}: its attention has the parameters {', '.join(unused)}, "
                "which scaled dot product attention, the only one that is captured, leaves out. "
                "Train another model, or this one with torchtitan alone."
            )
    return replace(spec, model=model, parallelize_fn=parallelize_decoder)


def compile_class(entries: Iterable[object] = ()) -> type[GraphCompileConfig]:
    """Return the class of [compile] with a section for every pass that has options.

    Args:
        entries: a list of passes; those of a user's own, "package.module:name", get a section.

    Raises:
        PassError: an entry names no pass.
        ConfigError: two passes have a section of one name.
    """
    of_user = [load_pass(entry) for entry in entries if isinstance(entry, str) and ":" in entry]
    return _compile_class(tuple(dict.fromkeys([*registered_passes().values(), *of_user])))


@functools.cache
def _compile_class(passes: tuple[Pass, ...]) -> type[GraphCompileConfig]:
    """Make the class of [compile] with the sections of these passes."""
    sections: dict[str, Pass] = {}
    keys = {f.name for f in fields(GraphCompileConfig)}
    for pass_ in passes:
        if not fields(pass_.options_type):
            continue
        if pass_.section in keys | sections.keys():
            raise ConfigError(
                f"compile.passes: the options of the pass {pass_.name} would be "
                f"[compile.{pass_.section}], which exists already. Give the pass another name or "
                "section."
            )
        sections[pass_.section] = pass_
    # Help and schema read the documentation of dynamic fields here.
    documented = [
        f'    {name}: Options of the pass {pass_.name}: {pass_.summary}. No effect in mode "eager".'
        for name, pass_ in sections.items()
    ]
    first_line = (GraphCompileConfig.__doc__ or "").partition("\n")[0]
    return make_dataclass(
        GraphCompileConfig.__name__,
        [
            (section, pass_.options_type, field(default_factory=pass_.options_type))
            for section, pass_ in sections.items()
        ],
        bases=(GraphCompileConfig,),
        namespace={
            "__doc__": "\n".join([first_line, "", "Args:", *documented]),
            "__module__": __name__,
            "pass_of_section": MappingProxyType(sections),
        },
        kw_only=True,
        slots=True,
    )


def of_captured_steps(config: GraphTrainerConfig) -> list[str]:
    """List the keys with another value than the default that act on a captured step alone."""
    default = type(config.compile)()
    changed = [
        f"compile.{option.name}"
        for option in fields(default)
        if option.name != "mode"
        and getattr(config.compile, option.name) != getattr(default, option.name)
    ]
    if config.parallelism.fsdp_reshard_after_forward != "default":
        changed.append("parallelism.fsdp_reshard_after_forward")
    if getattr(config.metrics, "save_routing", None) is not None:
        changed.append(SAVE_ROUTING)
    return changed


def changed_sections(config: GraphCompileConfig) -> dict[str, Pass]:
    """Return the sections of passes whose options are not the defaults, with their passes."""
    return {
        section: pass_
        for section, pass_ in config.pass_of_section.items()
        if getattr(config, section) != pass_.options_type()
    }
