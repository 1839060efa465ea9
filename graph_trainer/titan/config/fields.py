"""What a config class accepts: its fields, their types and bounds, the components of its sections.

A section such as [dataloader] configures one of several components. Its key `type` chooses one by
a short name, or by "package.module:Class.Config" for a component of a user's own.
"""

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Union

import tyro
from torchtitan.components.checkpointer.base import BaseCheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import BaseLoss, CrossEntropyLoss
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.hf_datasets import text_datasets

from graph_trainer.titan.activation_policies import POLICIES
from graph_trainer.titan.checkpointer import CheckedCheckpointManager
from graph_trainer.titan.chunked_loss import ChunkedCrossEntropyLoss
from graph_trainer.titan.data.loader import TextDataLoader
from graph_trainer.titan.data.tokenizer import ByteBPETokenizer

NONE = "none"
"""The `type` of an optional section that is switched off."""

UNSET = "unset"
"""The key that lists a table's keys whose value is None, which TOML cannot write."""

# Declared class -> short name -> configured class. torchtitan's memory budget policy of activation
# checkpointing has no short name: it acts inside torch.compile, and a captured step has none.
_COMPONENTS: dict[type, dict[str, type]] = {
    BaseDataLoader.Config: {
        "text": TextDataLoader.Config,
        "huggingface": text_datasets.HuggingFaceTextDataLoader.Config,
        "huggingface_interleaved": text_datasets.InterleavedHuggingFaceTextDataLoader.Config,
    },
    BaseTokenizer.Config: {
        "byte_bpe": ByteBPETokenizer.Config,
        "huggingface": HuggingFaceTokenizer.Config,
    },
    BaseCheckpointManager.Config: {"dcp": CheckedCheckpointManager.Config},
    BaseLoss.Config: {
        "cross_entropy": CrossEntropyLoss.Config,
        "chunked_cross_entropy": ChunkedCrossEntropyLoss.Config,
    },
    ActivationCheckpointing.Config: {name: section for section, name in POLICIES.items()},
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
    "parallelism.context_parallel_degree": (1, math.inf, ""),
    "parallelism.expert_parallel_degree": (1, math.inf, ""),
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


class Field(NamedTuple):
    """What a key takes."""

    hint: Any
    """Its type, with Annotated."""
    settable: bool
    """Whether files and flags can set it."""
    options: list[Any]
    """The members of a union, or the type alone; without Annotated and None."""
    nullable: bool
    """Whether None is a value of it."""
    sections: list[type]
    """The config classes that it holds; empty for a plain value."""
    entry: type | None
    """The class of the entries, if it is a list of tables."""


def field_of(hint: Any) -> Field:
    """Return what a key of this type takes."""
    is_annotated = typing.get_origin(hint) is Annotated
    settable = not is_annotated or tyro.conf.Suppress not in hint.__metadata__
    options = _alternatives(hint)
    plain = [each for each in options if each is not type(None)]
    sections: list[Any] = [each for each in plain if dataclasses.is_dataclass(each)]
    entries = [typing.get_args(each)[0] for each in plain if typing.get_origin(each) is list]
    entry: Any = next((each for each in entries if dataclasses.is_dataclass(each)), None)
    return Field(hint, settable, plain, type(None) in options, sections, entry)


def _alternatives(hint: Any) -> list[Any]:
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) in (Union, types.UnionType):
        return [each for member in typing.get_args(hint) for each in _alternatives(member)]
    return [hint]


@functools.cache
def fields_of(cls: type) -> dict[str, Field]:
    """Return what each key of a config class takes, in the order of the fields."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: field_of(hints[f.name]) for f in dataclasses.fields(cls)}


def settable_fields(cls: type) -> dict[str, Field]:
    """Return the `fields_of` a config class that flags and files can set."""
    return {name: field for name, field in fields_of(cls).items() if field.settable}


def required_fields(cls: type) -> list[str]:
    """Return the names of the fields without a default."""
    missing = dataclasses.MISSING
    fields = dataclasses.fields(cls)
    return [f.name for f in fields if f.default is missing and f.default_factory is missing]


def settable_keys(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield every key that can be set on `config` as it is, as `section.key`."""
    for name, field in settable_fields(type(config)).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            yield from settable_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}.type" if field.sections else f"{prefix}{name}"


def class_path(cls: type) -> str:
    """Return the "module:qualified name" of a class, which `pkgutil.resolve_name` takes."""
    return f"{cls.__module__}:{cls.__qualname__}"


def components(members: Sequence[type]) -> dict[str, type]:
    """Return short name -> class for a section declared as any of `members`."""
    for declared, names in _COMPONENTS.items():
        if any(issubclass(member, declared) for member in members):
            return names
    return {}


def type_of(config: Any, members: Sequence[type]) -> str | None:
    """Return the `type` to write for `config` in a section declared as `members`.

    None where the declared class already implies it.
    """
    for name, component in components(members).items():
        if component is type(config):
            return name
    path = class_path(type(config))  # classes of [compile] differ, and have one path
    return None if [path] == [class_path(member) for member in members] else path
