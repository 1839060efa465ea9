"""What a config class accepts: its fields, their types and bounds, the components of its sections.

A section such as [dataloader] configures one of several components. Its key `type` chooses one by
a short name, or by "package.module:Class.Config" for a component of a user's own.
"""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Union

import tyro

NONE = "none"
"""The `type` of an optional section that is switched off."""

UNSET = "unset"
"""The key that lists a table's keys whose value is None, which TOML cannot write."""

# Declared class -> short name -> configured class, all as "module:qualified name", so that a
# module is imported when a section asks for it. torchtitan's memory budget policy of activation
# checkpointing has no short name: it acts inside torch.compile, and a captured step has none.
_COMPONENTS = {
    "torchtitan.components.dataloader:BaseDataLoader.Config": {
        "text": "graph_trainer.titan.data.loader:TextDataLoader.Config",
        "huggingface": "torchtitan.hf_datasets.text_datasets:HuggingFaceTextDataLoader.Config",
        "huggingface_interleaved": (
            "torchtitan.hf_datasets.text_datasets:InterleavedHuggingFaceTextDataLoader.Config"
        ),
    },
    "torchtitan.components.tokenizer:BaseTokenizer.Config": {
        "byte_bpe": "graph_trainer.titan.data.tokenizer:ByteBPETokenizer.Config",
        "huggingface": "torchtitan.components.tokenizer:HuggingFaceTokenizer.Config",
    },
    "torchtitan.components.checkpointer.base:BaseCheckpointManager.Config": {
        "dcp": "graph_trainer.titan.checkpointer:CheckedCheckpointManager.Config",
    },
    "torchtitan.components.loss:BaseLoss.Config": {
        "cross_entropy": "torchtitan.components.loss:CrossEntropyLoss.Config",
        "chunked_cross_entropy": "graph_trainer.titan.chunked_loss:ChunkedCrossEntropyLoss.Config",
    },
    "torchtitan.distributed.activation_checkpoint:ActivationCheckpointing.Config": {
        "selective": "torchtitan.distributed.activation_checkpoint:SelectiveAC.Config",
        "full": "torchtitan.distributed.activation_checkpoint:FullAC.Config",
        "layers": "graph_trainer.titan.activation_policies:LayersAC.Config",
        "budget": "graph_trainer.titan.activation_policies:BudgetAC.Config",
        "file": "graph_trainer.titan.activation_policies:FileAC.Config",
        "user": "graph_trainer.titan.activation_policies:UserAC.Config",
    },
}


_YEAR = 365 * 24 * 60 * 60  # seconds; timedelta overflows far above

_BOUNDS: dict[str, tuple[float, float, str]] = {
    "training.local_batch_size": (1, math.inf, ""),
    "training.seq_len": (1, math.inf, ""),
    "training.steps": (1, 2**63 - 1, "Set it to 1 or more, below 2**63."),
    "training.global_batch_size": (1, math.inf, "Set 1 or more, or -1 for one micro-batch a rank."),
    "training.max_norm": (5e-324, math.inf, "Set it to a positive number (large to clip nothing)."),
    "training.gc_freq": (1, math.inf, ""),
    "parallelism.data_parallel_replicate_degree": (1, math.inf, ""),
    "parallelism.data_parallel_shard_degree": (
        1,
        math.inf,
        "Set 1 or more, or -1 for all remaining ranks.",
    ),
    "parallelism.tensor_parallel_degree": (1, math.inf, ""),
    "dataloader.seed": (0, math.inf, ""),
    "tokenizer.vocab_size": (258, math.inf, "Set 258 or more: 256 bytes, begin and end of a text."),
    "metrics.log_freq": (1, math.inf, ""),
    "checkpoint.interval": (1, math.inf, ""),
    "checkpoint.load_step": (-1, math.inf, "Set the step to load, or -1 for the last one."),
    "validator.freq": (1, math.inf, ""),
    "profiler.profile_freq": (1, math.inf, ""),
    "lr_scheduler.warmup_steps": (0, math.inf, ""),
    "lr_scheduler.total_steps": (1, math.inf, ""),
    "lr_scheduler.decay_ratio": (0, 1, "Set a fraction of the steps, or unset it."),
    "lr_scheduler.min_lr_factor": (0, 1, "Set a fraction of the largest learning rate."),
    "comm.init_timeout_seconds": (1, _YEAR, "Set 1 second or more, at most a year."),
    "comm.train_timeout_seconds": (1, _YEAR, "Set 1 second or more, at most a year."),
    "compile.max_graphs": (1, math.inf, ""),
    "compile.memory_limit_gib": (
        0,
        1e30,  # a number of GiB, so neither inf nor nan
        "Set the GiB that a step may need on a device, 0 to refuse no step, or unset it for what "
        "the device has.",
    ),
    "activation_checkpoint.layers": (
        1,
        math.inf,
        'Set 1 or more; to recompute nothing set activation_checkpoint.type = "none".',
    ),
    "debug.seed": (0, 2**64 - 1, f"Set a seed from 0 to {2**64 - 1}, or unset it."),
}
"""Key -> the least and the greatest value, and a remedy if there is more to say. torchtitan checks
few of these before ranks run, some by an assert; beyond others a run hangs or divides by zero."""

_OR_MINUS_ONE = ("training.global_batch_size", "parallelism.data_parallel_shard_degree")

_NOT_SHARDED = "not supported by graph_trainer's sharding"
_ONLY: dict[str, tuple[bool | int | str, str]] = {
    "training.disable_cuda_graphs": (
        True,
        "torchtitan's CUDA graphs cannot wrap a step that graph_trainer runs",
    ),
    "training.enable_cpu_offload": (False, _NOT_SHARDED),
    "parallelism.spmd_backend": ("partial_dtensor", "not what graph_trainer shards with"),
    "parallelism.enable_fsdp_symm_mem": (False, _NOT_SHARDED),
    "parallelism.pipeline_parallel_degree": (1, "graph_trainer has no pipeline parallelism yet"),
    "parallelism.context_parallel_degree": (1, "graph_trainer has no context parallelism yet"),
    "parallelism.expert_parallel_degree": (1, "graph_trainer has no expert parallelism yet"),
}
"""Key -> the only value that works, and why."""


def out_of_bounds(key: str, value: Any) -> tuple[str, str] | None:
    """Return problem and remedy where a value of the right type is one that no run can have."""
    if key in _ONLY and value != _ONLY[key][0]:
        wanted, problem = _ONLY[key]
        return problem, f"Set {key} = {show(wanted)}."
    least, greatest, remedy = _BOUNDS.get(key, (-math.inf, math.inf, ""))
    minus_one = value == -1 and key in _OR_MINUS_ONE
    if key not in _BOUNDS or value is None or minus_one or least <= value <= greatest:
        return None
    return "out of bounds", remedy or f"Set {key} to {least} or more."


def show(value: Any) -> str:
    """Format `value` as a TOML author would write it, cut after 120 characters."""
    text = _as_toml(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _as_toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_as_toml, value))}]"
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{key} = {_as_toml(each)}" for key, each in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    return UNSET if value is None else str(value)


def field_hints(cls: type) -> dict[str, Any]:
    """Return field name -> type, with Annotated kept, in the order of the fields."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def settable_hints(cls: type) -> dict[str, Any]:
    """Return the `field_hints` of those fields that flags and files can set."""
    return {name: hint for name, hint in field_hints(cls).items() if not is_suppressed(hint)}


def is_suppressed(hint: Any) -> bool:
    """Whether the field can be set from neither flags nor files."""
    return typing.get_origin(hint) is Annotated and tyro.conf.Suppress in hint.__metadata__


def alternatives(hint: Any) -> list[Any]:
    """Return the members of a union, or the type itself, all without Annotated."""
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) in (Union, types.UnionType):
        return [a for member in typing.get_args(hint) for a in alternatives(member)]
    return [hint]


def is_nullable(hint: Any) -> bool:
    """Whether None is a value of this type."""
    return any(a is type(None) for a in alternatives(hint))


def section_classes(hint: Any) -> list[type]:
    """Return the config classes that a field holds; an empty list for a plain value."""
    return [a for a in alternatives(hint) if isinstance(a, type) and dataclasses.is_dataclass(a)]


def table_class(hint: Any) -> type | None:
    """Return the dataclass of the entries where the type is a list of tables, otherwise None."""
    lists = [typing.get_args(a)[0] for a in alternatives(hint) if typing.get_origin(a) is list]
    return next((cls for entry in lists for cls in section_classes(entry)), None)


def required_fields(cls: type) -> list[str]:
    """Return the names of the fields without a default."""
    return [
        f.name
        for f in dataclasses.fields(cls)
        if f.init and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]


def settable_keys(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield every key that can be set on `config` as it is, as `section.key`."""
    for name, hint in settable_hints(type(config)).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            yield from settable_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}.type" if section_classes(hint) else f"{prefix}{name}"


def class_path(cls: type) -> str:
    """Return the "module:qualified name" of a class, which `pkgutil.resolve_name` takes."""
    return f"{cls.__module__}:{cls.__qualname__}"


def short_names(members: list[type]) -> dict[str, str]:
    """Return short name -> class path for a section declared as any of `members`."""
    for declared, names in _COMPONENTS.items():
        # Every class whose path is a key is a subclass of that key's class, so the MRO tells it
        # and nothing has to be imported for issubclass.
        if any(declared == class_path(base) for m in members for base in m.__mro__):
            return names
    return {}


def type_of(config: Any, members: list[type]) -> str | None:
    """Return the `type` to write for `config` in a section declared as `members`.

    None where the declared class already tells it.
    """
    path = class_path(type(config))
    for name, candidate in short_names(members).items():
        if candidate == path:
            return name
    return None if [path] == [class_path(m) for m in members] else path
