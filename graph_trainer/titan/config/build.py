"""Merge the tables of all sources, and build the section classes of the result.

A section such as [dataloader] configures one of several components. Its key `type` chooses one by
a short name, or by "package.module:Class.Config" for a component of a user's own.
"""

import dataclasses
import functools
import os
import pkgutil
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from math import inf
from typing import Annotated, Any, Literal, NamedTuple, Union, get_type_hints

import tyro
from pydantic import (
    AfterValidator,
    ConfigDict,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
)
from torchtitan.components.checkpointer.base import BaseCheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import BaseLoss, CrossEntropyLoss
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.hf_datasets import text_datasets

from graph_trainer.core.suggest import did_you_mean
from graph_trainer.errors import ConfigError, PassError
from graph_trainer.titan.activation_policies import POLICIES
from graph_trainer.titan.checkpointer import CheckedCheckpointManager
from graph_trainer.titan.chunked_loss import ChunkedCrossEntropyLoss
from graph_trainer.titan.config.remedies import (
    AS_SECTION,
    GUESS,
    show,
    unknown_key,
    wrong_choice,
    wrong_type,
)
from graph_trainer.titan.config.run_config import (
    GraphCompileConfig,
    GraphTrainerConfig,
    compile_class,
)
from graph_trainer.titan.config.sources import (
    COMMAND_LINE,
    NO_VALUE,
    FlagText,
    Origins,
    Problem,
    with_none,
)
from graph_trainer.titan.config.toml_file import parse_toml
from graph_trainer.titan.data.loader import TextDataLoader
from graph_trainer.titan.data.tokenizer import ByteBPETokenizer
from graph_trainer.titan.optimizer import SharedOptimizerConfig
from graph_trainer.titan.parallelize import SUPPORTED

NONE = "none"
"""The `type` of an optional section that is switched off."""

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
    OptimizersContainer.Config: {"param_groups": SharedOptimizerConfig},
    ActivationCheckpointing.Config: {name: section for section, name in POLICIES.items()},
}

_YEAR = 365 * 24 * 60 * 60  # seconds; timedelta overflows far above

_AT_LEAST_ONE = (
    *("training.steps", "training.local_batch_size", "training.seq_len", "training.gc_freq"),
    *("parallelism.data_parallel_replicate_degree", "parallelism.tensor_parallel_degree"),
    *("parallelism.context_parallel_degree", "parallelism.expert_parallel_degree"),
    *("parallelism.pipeline_parallel_degree", "parallelism.pipeline_parallel_microbatch_size"),
    "parallelism.pipeline_parallel_layers_per_stage",
    *("metrics.log_freq", "checkpoint.interval", "validator.freq", "profiler.profile_freq"),
    *("lr_scheduler.total_steps", "compile.max_graphs"),
)
_SHARDS = "parallelism.data_parallel_shard_degree"
_LARGEST = sys.float_info.max
_MOST = 2**63 - 1
"""Of an int64, as which torch and torchtitan count."""
_BOUNDS: dict[str, tuple[float, float, str]] = {
    **dict.fromkeys(_AT_LEAST_ONE, (1, _MOST, "")),
    "training.global_batch_size": (1, _MOST, "Set 1 or more, or -1 for one micro-batch a rank."),
    "training.max_norm": (5e-324, inf, "Set it to a positive number (large to clip nothing)."),
    _SHARDS: (1, _MOST, "Set 1 or more, or -1 for all remaining ranks."),
    **dict.fromkeys(
        ("optimizer.lr", "optimizer.weight_decay", "optimizer.eps"),  # AdamW takes inf
        (-_LARGEST, _LARGEST, "Set a finite number."),
    ),
    "dataloader.seed": (0, _MOST, ""),
    "tokenizer.vocab_size": (258, _MOST, "Set 258 or more: 256 bytes, begin and end of a text."),
    "checkpoint.load_step": (-1, _MOST, "Set the step to load, or -1 for the last one."),
    "lr_scheduler.warmup_steps": (0, _MOST, ""),
    "lr_scheduler.decay_ratio": (0, 1, "Set a fraction of the steps, or unset it."),
    "lr_scheduler.min_lr_factor": (0, 1, "Set a fraction of the largest learning rate."),
    "comm.init_timeout_seconds": (1, _YEAR, "Set 1 second or more, at most a year."),
    "comm.train_timeout_seconds": (1, _YEAR, "Set 1 second or more, at most a year."),
    "compile.memory_limit_gib": (
        0,
        1e30,  # a number of GiB, so neither inf nor nan
        "Set the GiB that a step may need on a device, 0 to refuse no step, or unset it for what "
        "the device has.",
    ),
    "compile.expert_imbalance": (
        1,
        _MOST,
        "Set 1 for even shares of the tokens, or how many times its even share a rank may receive.",
    ),
    "activation_checkpoint.layers": (
        1,
        _MOST,
        'Set 1 or more; to recompute nothing set activation_checkpoint.type = "none".',
    ),
    "debug.seed": (0, 2**64 - 1, f"Set a seed from 0 to {2**64 - 1}, or unset it."),
}
"""Key -> the least and the greatest value, and a remedy if there is more to say. torchtitan checks
few of these before ranks run, some by an assert; beyond others a run hangs or divides by zero."""

_OR_MINUS_ONE = ("training.global_batch_size", _SHARDS)

_NOT_SHARDED = "not supported by graph_trainer's sharding"
_ONLY: dict[str, tuple[bool | int | str, str]] = {
    "training.disable_cuda_graphs": (
        True,
        "torchtitan's CUDA graphs cannot wrap a step that graph_trainer runs",
    ),
    "parallelism.enable_fsdp_symm_mem": (False, _NOT_SHARDED),
    **{key: (value, _NOT_SHARDED) for key, value in SUPPORTED.items()},
}
"""Key -> the only value that works, and why."""


def out_of_bounds(key: str, value: Any) -> tuple[str, str] | None:
    """Return problem and remedy where a value of the right type is one that no run can have."""
    if key in _ONLY and value != _ONLY[key][0]:
        wanted, problem = _ONLY[key]
        return problem, f"Set {key} = {show(wanted)}."
    least, greatest, remedy = _BOUNDS.get(key, (-inf, inf, ""))
    minus_one = value == -1 and key in _OR_MINUS_ONE
    if key not in _BOUNDS or value is None or minus_one or least <= value <= greatest:
        return None
    if value > least and greatest == _MOST:
        return "out of bounds", f"Set {key} below 2**63."
    return "out of bounds", remedy or f"Set {key} to {least} or more."


class Field(NamedTuple):
    """What a key takes."""

    hint: Any
    """Its type, without Annotated."""
    settable: bool
    """Whether files and flags can set it."""
    options: list[Any]
    """The members of a union, or the type alone; without None."""
    nullable: bool
    """Whether None is a value of it."""
    sections: list[type]
    """The config classes that it holds; empty for a plain value."""
    entry: type | None
    """The class of the entries, if it is a list of tables."""


def field_of(hint: Any, settable: bool = True) -> Field:
    """Return what a key of this type, without Annotated, takes."""
    is_union = typing.get_origin(hint) in (Union, types.UnionType)
    options = typing.get_args(hint) if is_union else (hint,)
    plain = [option for option in options if option is not type(None)]
    sections: list[Any] = [option for option in plain if dataclasses.is_dataclass(option)]
    entries = [typing.get_args(option)[0] for option in plain if typing.get_origin(option) is list]
    entry: Any = next((option for option in entries if dataclasses.is_dataclass(option)), None)
    return Field(hint, settable, plain, type(None) in options, sections, entry)


@functools.cache
def fields_of(cls: type) -> dict[str, Field]:
    """Return what each key of a config class takes, in the order of the fields."""
    plain, annotated = get_type_hints(cls), get_type_hints(cls, include_extras=True)
    fields = {}
    for name in (f.name for f in dataclasses.fields(cls)):
        is_suppressed = tyro.conf.Suppress in getattr(annotated[name], "__metadata__", ())
        fields[name] = field_of(plain[name], settable=not is_suppressed)
    return fields


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

    None where the declared class already tells it.
    """
    for name, component in components(members).items():
        if component is type(config):
            return name
    path = class_path(type(config))  # classes of [compile] differ, and have one path
    return None if [path] == [class_path(member) for member in members] else path


def table_of(value: Any) -> Any:
    """Return a config as nested tables, in which `type` is a section's class."""
    if isinstance(value, list):
        return [table_of(item) for item in value]
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    table: dict[str, Any] = {"type": type(value)}
    for name, field in fields_of(type(value)).items():
        field_value = getattr(value, name)
        table[name] = table_of(field_value) if field.settable else field_value
    return table


def merge(
    lower: Mapping[str, Any],
    upper: Mapping[str, Any],
    where: str,
    origins: Origins,
    prefix: str = "",
) -> dict[str, Any]:
    """Lay a table over another one, and note where the keys come from.

    Sections are merged key by key, and start empty where `type` names another component. Any other
    table of a file replaces the one before; flags change keys in it, and entries of lists.
    """
    cls, name = lower.get("type"), upper.get("type")
    if isinstance(cls, type) and isinstance(name, str):
        name = components([cls]).get(name, name)
    merged = dict(lower) if name in (None, cls) else {}
    for key, value in upper.items():
        path, before = prefix + key, merged.get(key)
        is_section = isinstance(before, Mapping) and isinstance(before.get("type"), type)
        if isinstance(value, Mapping) and (is_section or where == COMMAND_LINE):
            if isinstance(before, Mapping):
                merged[key] = merge(before, value, where, origins, f"{path}.")
                continue
            if isinstance(before, list):  # --section.list.0.key
                entries = {str(i): entry for i, entry in enumerate(before)}
                if value.keys() <= entries.keys():
                    merged[key] = list(merge(entries, value, where, origins, f"{path}.").values())
                    continue
        merged[key] = name if key == "type" else value
        origins.where[path] = where
    return merged


def build_config(
    entry: GraphTrainerConfig,
    table: Mapping[str, Any],
    origins: Origins,
    command_flags: Iterable[str] = (),
) -> tuple[GraphTrainerConfig | None, list[Problem]]:
    """Build a config of the merged table; None if anything in it is wrong, which is returned too.

    Args:
        entry: the registry entry, whose keys are suggested for misspelt ones.
        origins: which keys file and flags set.
        command_flags: further names that a misspelt flag may mean.
    """
    builder = _Builder(origins, [*settable_keys(entry), "config", "module", *command_flags])
    config = builder.section(type(entry), table, "")
    return config, builder.problems


# What pydantic finds wrong -> the type of JSON that was expected.
_EXPECTED = {
    "bool_type": "boolean",
    "int_type": "integer",
    "float_type": "number",
    "string_type": "string",
    "list_type": "array",
    "tuple_type": "array",
    "dict_type": "object",
}


@dataclasses.dataclass
class _Builder:
    origins: Origins
    known_keys: list[str]
    problems: list[Problem] = dataclasses.field(default_factory=list)

    def refuse(self, key: str, value: Any, problem: str, remedy: str) -> Any:
        """Keep a problem for the one error of them all; return None, in place of the value."""
        self.problems.append(Problem(key, problem, remedy, value=value))

    def section(self, cls: type, table: Mapping[str, Any], path: str) -> Any:
        """Build a config class of its table; None if anything in it is wrong."""
        problems_before = len(self.problems)
        if issubclass(cls, GraphCompileConfig):
            # the sections below [compile] are those of the passes that it lists
            passes = _read(table.get("passes"), field_of(list[str]))
            try:
                cls = compile_class(passes if isinstance(passes, list) else [])
            except (ConfigError, PassError) as error:
                problem = str(error).removeprefix("compile.passes: ")
                return self.refuse("compile.passes", passes, problem, "Or leave the pass out.")
        known = fields_of(cls)
        prefix = f"{path}." if path else ""
        values: dict[str, Any] = {}
        for name, value in table.items():
            key, is_set = prefix + name, bool(self.origins.of(prefix + name))
            if name in known and known[name].settable:
                values[name] = self.value(value, known[name], key)
            elif name in known and not is_set:
                values[name] = value
            elif name in known:
                remedy = "Remove it; where it has an effect it comes from what `base` names."
                self.refuse(key, value, "not settable from a file", remedy)
            elif name != "type" and is_set:
                # not set: options of a pass that the entry lists, and the file does not
                self.unknown(cls, key, value)
        missing = [prefix + name for name in required_fields(cls) if name not in table]
        if missing:
            self.refuse(path, table, "keys without a default missing", f"Add {', '.join(missing)}.")
        if len(self.problems) > problems_before:
            return None
        try:
            return cls(**values)
        except Exception as error:  # whatever a config's own checks raise is about these values
            written = {name: values[name] for name in values if self.origins.of(prefix + name)}
            # of what file and flags set, the one key that the message names
            named = {name: written[name] for name in written if name in str(error)}
            written = named if len(named) == 1 else written
            if len(written) == 1:
                ((name, value),) = written.items()
                needed = re.search(r"requires (\w+)=(True|False)", str(error))
                remedy = "Change it."
                if needed:
                    remedy = f"Set {prefix}{needed[1]} = {needed[2].lower()} too, or leave it out."
                elif "absolute path" in str(error):
                    remedy = f"Write {show(os.path.abspath(value))}."
                return self.refuse(prefix + name, value, f"refused: {error}", remedy)
            remedy = "Change one of these keys, or what else is named."
            return self.refuse(path or "top level", written, f"refused: {error}", remedy)

    def unknown(self, cls: type, key: str, value: Any) -> None:
        """Refuse an unknown key, with the place where it belongs or the nearest known keys."""
        name = key.rpartition(".")[2]
        guess = unknown_key(key, settable_fields(cls), self.known_keys)
        having = [n for n, component in components([cls]).items() if name in fields_of(component)]
        if having:
            guess = f"It belongs to type = {' or '.join(map(show, having))}."
        if issubclass(cls, GraphCompileConfig) and isinstance(value, Mapping):
            guess += " A pass with options has its section where compile.passes names it."
        self.refuse(key, value, "unknown key", guess)

    def value(self, value: Any, field: Field, key: str) -> Any:
        """Return a value as one of its field's type and within its bounds."""
        if value is NO_VALUE and str in field.options:
            return self.refuse(key, "", "the flag has no value", f"Write --{key} and one.")
        value = _read(value, field)
        if field.sections and isinstance(value, Mapping):
            cls = self.component(value, field, key)
            return cls and self.section(cls, value, key)
        if field.sections and (value is not None or not field.nullable):
            return self.refuse(key, value, "expected a section", AS_SECTION.format(key=key))
        if field.entry and isinstance(value, list):
            entry = field_of(field.entry)
            return [self.value(item, entry, f"{key}[{i}]") for i, item in enumerate(value)]
        try:
            value = _adapter(field.hint).validate_python(value)
        except ValidationError as error:
            return self.wrong_type(error, value, field, key)
        if wrong := out_of_bounds(key, value):
            self.refuse(key, value, *wrong)
        return value

    def wrong_type(self, error: ValidationError, value: Any, field: Field, key: str) -> None:
        """Refuse a value of the wrong type; pydantic finds one for each member of a union."""
        findings = error.errors(include_url=False)
        # A place is indices of lists, then names of a union's members; that of a missing entry is
        # behind its list, which is what is wrong.
        place = findings[0]["loc"][: -1 if findings[0]["type"] == "missing" else None]
        among: Sequence[Any] = ()
        options: Sequence[Any] = field.options
        for index in takewhile(lambda step: isinstance(step, int), place):
            among, value, key = value, value[index], f"{key}[{index}]"
            options = [entry for option in options for entry in typing.get_args(option)]
        literals = [option for option in options if typing.get_origin(option) is Literal]
        if literals:
            choices = [choice for option in literals for choice in typing.get_args(option)]
            self.refuse(key, value, *wrong_choice(value, choices))
            return
        is_flag = self.origins.of(key) == COMMAND_LINE
        wrong_lengths = [e for e in findings if e["type"] in ("missing", "too_long")]
        if wrong_lengths and isinstance(value, list):
            length = wrong_lengths[0].get("ctx", {}).get("max_length", len(value) + len(findings))
            entries = [*map(show, value), *["..."] * length][:length]
            example = f"{'--' * is_flag}{key}{' ' if is_flag else ' = '}"
            example += ",".join(entries) if is_flag else f"[{', '.join(entries)}]"
            self.refuse(key, value, f"expected a list of {length}", f"Write {example}.")
            return
        kinds = [_EXPECTED.get(finding["type"], finding["msg"]) for finding in findings]
        problem, remedy = wrong_type(
            key, value, kinds, is_flag=is_flag, nullable=field.nullable, among=among
        )
        if field.entry:
            remedy += f" Or --{key}.0.key value for an entry that there is."
        self.refuse(key, value, problem, remedy)

    def component(self, table: Mapping[str, Any], field: Field, section: str) -> Any:
        """Return the config class that a section's `type` means, or None for "none"."""
        names, key = components(field.sections), f"{section}.type"
        name = _read(table.get("type"), field_of(str))
        if name is None and len(field.sections) == 1:
            return field.sections[0]
        if name is None or (name == NONE and field.nullable):
            written = {k: _read(v, field_of(Any)) for k, v in table.items() if k != "type"}
            if written:
                remedy = f"Take it out, or set {key} to {', '.join(map(show, names))}."
                self.refuse(section, written, "switched off, so this has no effect", remedy)
            return None
        cls = names.get(name) if isinstance(name, str) else name
        if isinstance(name, str) and ":" in name:
            try:
                cls = pkgutil.resolve_name(name)
            except (ImportError, AttributeError, ValueError) as error:
                return self.refuse(key, name, f"cannot be imported ({error})", _OWN_CLASS)
        if isinstance(cls, type) and issubclass(cls, tuple(field.sections)):
            return cls
        known = [*names, NONE] if field.nullable else list(names)
        guess = did_you_mean(name, known, GUESS) if isinstance(name, str) else ""
        choices = f"Write {', '.join(map(show, known))}" if known else "Leave it out"
        return self.refuse(key, name, "no such type", f"{guess}{choices}. {_OWN_CLASS}")


_OWN_CLASS = 'A class of your own is written "package.module:Class.Config".'


def _read(value: Any, field: Field) -> Any:
    """Read what flags have as text, as TOML.

    What is no TOML value is a string, and so is everything where the field takes nothing but
    strings. None is no value, where the field may have none; a list may be written a,b,c. A flag
    without a value sets a boolean to true.
    """
    if isinstance(value, Mapping) and not field.sections:
        return {key: _read(entry, field_of(Any)) for key, entry in value.items()}
    if not isinstance(value, FlagText):
        return value
    if value is NO_VALUE:
        return True if bool in field.options else value
    if value == "None" and field.nullable:
        return None
    try:
        table = parse_toml(f"value = {value}", "value")
        parsed = with_none(table, COMMAND_LINE)["value"] if len(table) == 1 else str(value)
    except ConfigError:
        parsed = str(value)
    if not isinstance(parsed, str):
        is_text = [
            option is str or typing.get_origin(option) is Literal for option in field.options
        ]
        return str(value) if all(is_text) else parsed
    lists = [option for option in field.options if typing.get_origin(option) in (list, tuple)]
    if lists and not value.startswith("["):
        entry = field_of(typing.get_args(lists[0])[0])
        return [_read(FlagText(part), entry) for part in value.split(",")]
    return parsed


def _as_tuples(value: Any) -> Any:
    """Return a value of any type in the one form that survives TOML."""
    if isinstance(value, list | tuple):
        return tuple(map(_as_tuples, value))
    if isinstance(value, Mapping):
        return {key: _as_tuples(entry) for key, entry in value.items()}
    return value


# strict: neither text nor a boolean becomes a number
_STRICT = {
    bool: StrictBool,
    int: StrictInt,
    float: StrictFloat,
    str: StrictStr,
    Any: Annotated[Any, AfterValidator(_as_tuples)],
}


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    """Make the check of a type, strict but that a tuple may be written as a list."""
    return TypeAdapter(_strict(hint), config=ConfigDict(arbitrary_types_allowed=True))


def _strict(hint: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is None or origin is Literal:
        return _STRICT.get(hint, hint)
    arguments = tuple(map(_strict, arguments))
    return Union[arguments] if origin is types.UnionType else origin[arguments]  # noqa: UP007
