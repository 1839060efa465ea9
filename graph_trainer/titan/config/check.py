"""Check the whole config: bounds of values, meshes, shapes, passes, components."""

import math
import os
import re
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.hf_datasets import text_datasets

from graph_trainer.core.passes.catalogue import (
    WITHOUT_PASSES,
    check_bitwise,
    resolve_passes,
    without_effect,
)
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.errors import ConfigError, PassError
from graph_trainer.titan.activation_policies import (
    NEEDS_CAPTURE,
    POLICIES,
    BudgetAC,
    FileAC,
    LayersAC,
    activation_settings,
)
from graph_trainer.titan.config.check_experts import expert_problems
from graph_trainer.titan.config.fields import type_of
from graph_trainer.titan.config.run_config import (
    GraphTrainerConfig,
    changed_sections,
)
from graph_trainer.titan.config.sources import Origin, bad_value, did_you_mean, join_or, show
from graph_trainer.titan.data.corpus import open_corpus
from graph_trainer.titan.data.loader import TextDataLoader
from graph_trainer.titan.data.tokenizer import ByteBPETokenizer

_LONGEST_TIMEOUT = 365 * 24 * 60 * 60  # seconds, a year; timedelta overflows far above

_NOT_SHARDED = "not supported by graph_trainer's sharding"

# torchtitan checks few of these bounds before ranks run, some by an assert; beyond others a run
# hangs or divides by zero. Key -> the least and the greatest value, and a remedy, where there is
# more to say than the bound.
_BOUNDS: dict[str, tuple[int, float, str]] = {
    "training.local_batch_size": (1, math.inf, ""),
    "training.seq_len": (1, math.inf, ""),
    "training.steps": (1, 2**63 - 1, "Set training.steps to 1 or more, below 2**63."),
    "training.gc_freq": (1, math.inf, ""),
    "dataloader.seed": (0, math.inf, ""),
    "tokenizer.vocab_size": (
        258,
        math.inf,
        "Set 258 or more: 256 bytes, begin and end of a document.",
    ),
    "metrics.log_freq": (1, math.inf, ""),
    "checkpoint.interval": (1, math.inf, ""),
    "checkpoint.load_step": (-1, math.inf, "Set the step to load, or -1 for the last one."),
    "validator.freq": (1, math.inf, ""),
    "profiler.profile_freq": (1, math.inf, ""),
    "lr_scheduler.warmup_steps": (0, math.inf, ""),
    "lr_scheduler.total_steps": (1, math.inf, ""),
    "lr_scheduler.decay_ratio": (0, 1, "Set a fraction of the steps, or unset it."),
    "lr_scheduler.min_lr_factor": (0, 1, "Set a fraction of the largest learning rate."),
    "comm.init_timeout_seconds": (1, _LONGEST_TIMEOUT, "Set 1 second or more, at most a year."),
    "comm.train_timeout_seconds": (1, _LONGEST_TIMEOUT, "Set 1 second or more, at most a year."),
    "compile.max_graphs": (1, math.inf, ""),
    "activation_checkpoint.layers": (
        1,
        math.inf,
        'Set 1 or more; to recompute nothing set activation_checkpoint.type = "none".',
    ),
    "debug.seed": (0, 2**64 - 1, f"Set a seed from 0 to {2**64 - 1}, or unset it."),
}
# Key -> the only value that works, and why.
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
}


def world_size_from_environment() -> int | None:
    """Read the number of ranks from WORLD_SIZE, which a launcher sets; None without one.

    Raises:
        ConfigError: WORLD_SIZE is not a positive number.
    """
    value = os.environ.get("WORLD_SIZE")
    if value is None:
        return None
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        remedy = "Unset it, or start the ranks with torchrun, which sets it."
        raise bad_value(
            "environment", "WORLD_SIZE", value, "not a positive number of ranks", remedy
        )
    return int(value)


def wanted_ranks(config: GraphTrainerConfig) -> int:
    """Return how many ranks a config is for on a machine without GPUs.

    The product of its degrees of parallelism; where the number of shards is open, the smallest
    number of shards that makes two ranks or more and that expert parallelism divides.
    """
    parallelism = config.parallelism
    tensor, experts = parallelism.tensor_parallel_degree, parallelism.expert_parallel_degree
    fixed = parallelism.data_parallel_replicate_degree * tensor
    shards = parallelism.data_parallel_shard_degree
    if shards < 1:
        multiple = experts // math.gcd(experts, tensor) if experts > 0 else 1
        shards = multiple * -(-max(1, 2 // fixed) // multiple)
    return fixed * shards


def check_config(
    config: GraphTrainerConfig, world_size: int | None, *, origin: Origin | None = None
) -> None:
    """Refuse a config that cannot train, before any process group is created.

    Args:
        config: the config; each value already has its field's type.
        world_size: the number of ranks. None leaves out the checks that depend on it.
        origin: which file or flag set each key, for the messages.

    Raises:
        ConfigError: the first thing that is wrong, with its key, value and remedy.
    """
    where = origin or Origin()
    check = _Checks(config, where)
    check.bounds()
    check.values()
    check_optimizer(config.optimizer.param_groups, where)
    check.batch(check.mesh(world_size))
    check.shapes()
    for key, problem, remedy, others in expert_problems(config, world_size):
        raise check.refused(key, problem, remedy, *others)
    check_passes(config, where)
    check_data(config, where)


@dataclass
class _Checks:
    config: GraphTrainerConfig
    where: Origin

    def refused(self, key: str, problem: str, remedy: str, *other_keys: str) -> ConfigError:
        """Make the error of the value of `key`; a flag may have set one of the other keys."""
        return bad_value(self.where.of(key, *other_keys), key, self.value(key), problem, remedy)

    def require(self, holds: bool, key: str, problem: str, remedy: str, *other_keys: str) -> None:
        """Refuse the value of `key` unless `holds`; the rest is as for `refused`."""
        if not holds:
            raise self.refused(key, problem, remedy, *other_keys)

    def value(self, key: str) -> Any:
        """Return the value of a key; None where a component of a user's own lacks the key."""
        value_of_key: Any = self.config
        for part in key.split("."):
            value_of_key = getattr(value_of_key, part, None)
        return value_of_key

    def activations(self) -> None:
        """Check what decides about the memory of activations, and read the table it names."""
        section, compile_config = self.config.activation_checkpoint, self.config.compile
        name = type_of(section, [ActivationCheckpointing.Config]) if section else ""
        key = "activation_checkpoint.type"
        if isinstance(section, LayersAC.Config):
            spec = self.config.model_spec
            blocks = len(getattr(spec.model, "layers", ())) if spec is not None else 0
            self.require(
                not blocks or section.layers <= blocks,
                "activation_checkpoint.layers",
                f"more than the {blocks} blocks of the model, so none would be recomputed",
                f"Set 1 to {blocks}.",
            )
        if isinstance(section, FileAC.Config):
            self.require(
                bool(section.path),
                "activation_checkpoint.path",
                "names no table",
                'Name the file that a run or a plan with activation_checkpoint.type = "budget" '
                "wrote.",
            )
        auto = self.config.parallelism.fsdp_reshard_after_forward == "auto"
        if compile_config.mode == "eager" and isinstance(section, NEEDS_CAPTURE):
            raise bad_value(
                self.where.of(key, "compile.mode"),
                key,
                name,
                'it acts on a captured step, and compile.mode is "eager"',
                'Set compile.mode = "aot_fx_trace", or the type "selective", "full" or "layers".',
            )
        plans = (
            isinstance(section, BudgetAC.Config) or auto and not isinstance(section, FileAC.Config)
        )
        if compile_config.mode != "eager" and plans and not compile_config.memory_limit_gib:
            what = "parallelism.fsdp_reshard_after_forward" if auto else key
            raise bad_value(
                self.where.of(what, "compile.memory_limit_gib"),
                what,
                "auto" if auto else name,
                "it fills a memory limit, and compile.memory_limit_gib is "
                + ("unset" if compile_config.memory_limit_gib is None else "0, which is no limit"),
                "Set the GiB that a step may need on a device, such as 72 on one of 80 GiB.",
            )
        self.require(
            not compile_config.allow_offload or isinstance(section, BudgetAC.Config),
            "compile.allow_offload",
            "there is no budget that could choose it",
            'Set activation_checkpoint.type = "budget" too, or offload by yourself with '
            "compile.offload_activations.block_inputs.",
        )
        # what a key names is read, so that the message has the place that set the key
        hardware = "compile.hardware"
        named = compile_config.hardware
        for named_by, read in (
            ("activation_checkpoint.path", lambda: activation_settings(section)),
            (hardware, lambda: None if named is None else load_hardware(named, hardware)),
        ):
            try:
                read()
            except ConfigError as error:
                raise ConfigError(f"{self.where.of(named_by)}: {error}") from error
        self.require(
            compile_config.partition == "tags" or compile_config.mode == "partitioned",
            "compile.partition",
            f'it parts forward and backward, and compile.mode is "{compile_config.mode}"',
            'Set compile.mode = "partitioned" too, or leave compile.partition out.',
            "compile.mode",
        )

    def bounds(self) -> None:
        """Check single values against the tables of bounds; the error has a line for each."""
        errors: list[ConfigError] = []
        for key, (low, high, remedy) in _BOUNDS.items():
            value = self.value(key)
            if value is not None and not low <= value <= high:
                bound = f"below {low}" if high == math.inf else f"not between {low} and {high}"
                remedy = remedy or f"Set {key} to {low} or more."
                errors.append(self.refused(key, bound, remedy))
        for key, (wanted, problem) in _ONLY.items():
            if self.value(key) != wanted:
                errors.append(self.refused(key, problem, f"Set {key} = {show(wanted)}."))
        if errors:
            raise ConfigError("\n".join(map(str, errors)))

    def values(self) -> None:
        """Check values of one section that depend on each other, and what they name."""
        training, profiler = self.config.training, self.config.profiler
        self.require(
            training.global_batch_size == -1 or training.global_batch_size >= 1,
            "training.global_batch_size",
            "neither positive nor -1",
            "Set a positive number of samples, or -1 for one micro-batch a rank.",
        )
        self.require(
            training.max_norm > 0,
            "training.max_norm",
            "not a positive norm, so no gradient would be left",
            "Set training.max_norm to a positive number (a large one to clip nothing).",
        )
        self.activations()
        limit = self.config.compile.memory_limit_gib
        self.require(
            limit is None or 0 <= limit < math.inf,
            "compile.memory_limit_gib",
            "not a number of GiB",
            "Set the GiB that a step may need on a device, 0 to refuse no step, or unset it for "
            "what the device has.",
        )
        folder = self.config.dump_folder
        self.require(
            bool(folder.strip()) and "\0" not in folder and not os.path.isfile(folder),
            "dump_folder",
            "not a folder to write to",
            "Name a folder, new or existing.",
        )
        least = profiler.profiler_warmup + profiler.profiler_active
        self.require(
            not profiler.enable_profiling or profiler.profile_freq >= least,
            "profiler.profile_freq",
            f"fewer steps than profiler.profiler_warmup = {profiler.profiler_warmup} and "
            f"profiler.profiler_active = {profiler.profiler_active} take",
            f"Set profiler.profile_freq to {least} or more.",
        )

    def mesh(self, world_size: int | None) -> int | None:
        """Return the data-parallel degree, None where it depends on an unknown world size."""
        names = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel")
        keys = [f"parallelism.{name}_degree" for name in names]
        for key in keys:
            is_shard = "shard" in key
            remaining = ", or -1 for all remaining ranks" if is_shard else ""
            remedy = f"Set {key} to 1 or more{remaining}."
            holds = self.value(key) >= 1 or (is_shard and self.value(key) == -1)
            self.require(holds, key, "not a positive degree", remedy)
        replicate, shard, tensor = map(self.value, keys)
        if world_size is None:
            return None if shard == -1 else replicate * shard
        product = " x ".join(f"{key.partition('.')[2]} {self.value(key)}" for key in keys)
        place = f"{self.where.of(*keys)}: parallelism: {product}"
        if shard == -1:
            shard, left = divmod(world_size, replicate * tensor)
            if left or not shard:
                raise ConfigError(
                    f"{place} does not fit on {world_size} ranks: {replicate * tensor} does not "
                    f"divide {world_size}. Start a multiple of {replicate * tensor} ranks, or "
                    "lower parallelism.tensor_parallel_degree or "
                    "parallelism.data_parallel_replicate_degree."
                )
        ranks = replicate * shard * tensor
        if ranks != world_size:
            raise ConfigError(
                f"{place} = {ranks} ranks, but {world_size} are started. Make the degrees multiply "
                f"to {world_size} (parallelism.data_parallel_shard_degree = -1 takes what is "
                f"left), or start {ranks} ranks."
            )
        return replicate * shard

    def batch(self, data_degree: int | None) -> None:
        """Check the global batch against the data-parallel degree, where that is known."""
        training = self.config.training
        if training.global_batch_size == -1 or data_degree is None:
            return
        one_step = training.local_batch_size * data_degree
        below = training.global_batch_size // one_step * one_step
        choices = f"{below} or {below + one_step}" if below else f"{one_step}"
        self.require(
            training.global_batch_size % one_step == 0,
            "training.global_batch_size",
            f"not a multiple of {one_step}, which is training.local_batch_size "
            f"{training.local_batch_size} on {data_degree} data-parallel ranks",
            f"Set it to {choices}, to -1 for {one_step}, or change training.local_batch_size.",
        )

    def shapes(self) -> None:
        """Check sequence length, heads and vocabulary against the model and the mesh."""
        seq_len, parallelism = self.config.training.seq_len, self.config.parallelism
        tensor = parallelism.tensor_parallel_degree
        self.require(
            not parallelism.enable_sequence_parallel or seq_len % tensor == 0,
            "training.seq_len",
            f"not divisible by parallelism.tensor_parallel_degree = {tensor}, over which "
            "sequence parallelism splits it",
            f"Set training.seq_len to a multiple of {tensor} such as "
            f"{seq_len // tensor * tensor or tensor}, or "
            "parallelism.enable_sequence_parallel = false.",
            "parallelism.tensor_parallel_degree",
        )
        spec = self.config.model_spec
        if spec is None:
            raise ConfigError(
                f"{self.where.file}: the config has no model. Set base to a registry function of "
                "the module."
            )
        longest = getattr(spec.model, "max_seq_len", None)
        self.require(
            longest is None or seq_len <= longest,
            "training.seq_len",
            f"longer than the {longest} positions of {spec.name} {spec.flavor}",
            f"Set training.seq_len to {longest} or less.",
        )
        attention = getattr(spec.model, "first_attention", None)
        for name in ("n_heads", "n_kv_heads"):
            heads = getattr(attention, name, None)
            if heads is not None:
                fitting = [str(d) for d in range(1, heads + 1) if heads % d == 0]
                self.require(
                    heads % tensor == 0,
                    "parallelism.tensor_parallel_degree",
                    f"does not divide the {name} = {heads} of {spec.name} {spec.flavor}",
                    f"Set it to a divisor of {heads}: {', '.join(fitting)}.",
                )
        vocabulary = getattr(spec.model, "vocab_size", None)
        tokens = self.value("tokenizer.vocab_size")
        self.require(
            vocabulary is None or tokens is None or tokens <= vocabulary,
            "tokenizer.vocab_size",
            f"larger than the model's vocabulary of {vocabulary}",
            f"Set tokenizer.vocab_size to {vocabulary} or less.",
        )


_KEYS = {
    "reshard_after_forward": "parallelism.fsdp_reshard_after_forward",
    "activation_policy": "activation_checkpoint.type",
    "allow_offload": "compile.allow_offload",
}
"""Where a config has the settings of a run that passes carry out."""


def check_passes(whole: GraphTrainerConfig, where: Origin) -> None:
    """Refuse a list of passes that cannot run, and settings and options that it leaves without
    effect.

    Raises:
        ConfigError: a name that is no pass, passes out of order, a setting or option without
            effect.
    """
    config = whole.compile
    try:
        listed = resolve_passes(config.passes, config.disable_passes)
        if config.bitwise:
            check_bitwise(listed)
    except PassError as error:
        # A message begins with the list that it is about; an own pass's import has no such name.
        key, _, problem = str(error).partition(": ")
        if key not in ("compile.passes", "compile.disable_passes"):
            key, problem = "compile.passes", str(error)
        names = config.disable_passes if key == "compile.disable_passes" else config.passes
        raise ConfigError(f"{where.of(key)}: {key} = {show(names)}: {problem}.") from error
    if config.mode == "eager":  # no pass runs; a warning lists what has no effect then
        return
    settings = {
        "reshard_after_forward": whole.parallelism.fsdp_reshard_after_forward,
        "activation_policy": POLICIES.get(type(whole.activation_checkpoint), "none"),
        "allow_offload": config.allow_offload,
    }
    sections = {each.name: section for section, each in changed_sections(config).items()}
    options = {name: getattr(config, section) for name, section in sections.items()}

    def key_of(name: str, of: str) -> str:
        is_option = of and hasattr(options[of], name)
        return f"compile.{sections[of]}.{name}" if is_option else _KEYS[name]

    for idle in without_effect(listed, config.disable_passes, settings, options):
        key = key_of(idle.name, idle.of)
        place = where.of(key)
        if idle.of or idle.other:
            instead = f"leave {key} out"
        else:
            instead = f"set {key} = {show(WITHOUT_PASSES[idle.name])}"
            place = where.of(key, "compile.passes", "compile.disable_passes")
        remedy = idle.remedy
        if idle.other:
            remedy = f"Set {key_of(idle.other, idle.of)} to {' or '.join(map(show, idle.acting))}"
        raise bad_value(place, key, idle.value, idle.problem, f"{remedy}, or {instead}.")


# torchtitan looks names up in a private function, when it builds the optimizer.
_OPTIMIZERS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW, "DistMuon": None}


def check_optimizer(groups: list[Any], where: Origin) -> None:
    """Refuse parameter groups that torchtitan could not make an optimizer of.

    Raises:
        ConfigError: no group, an unknown optimizer, a pattern that is no regular expression,
            or arguments that the optimizer does not take.
    """
    if not groups:
        raise bad_value(
            where,
            "optimizer.param_groups",
            groups,
            "no parameter would be trained",
            'Add a [[optimizer.param_groups]] with pattern = ".*", or leave the key out.',
        )
    for i, group in enumerate(groups):
        key = f"optimizer.param_groups[{i}]"
        if group.optimizer_name not in _OPTIMIZERS:
            raise bad_value(
                where,
                f"{key}.optimizer_name",
                group.optimizer_name,
                "not an optimizer of torchtitan's",
                f"{did_you_mean(group.optimizer_name, _OPTIMIZERS)}"
                f"Write {join_or(show(name) for name in _OPTIMIZERS)}.",
            )
        try:
            re.compile(group.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise bad_value(
                where,
                f"{key}.pattern",
                group.pattern,
                f"not a regular expression ({error})",
                'Write one that finds the names of the group\'s parameters, such as ".*".',
            ) from error
        _check_arguments(group, key, where)


def _check_arguments(group: Any, key: str, where: Origin) -> None:
    optimizer = _OPTIMIZERS[group.optimizer_name]
    if optimizer is None:  # DistMuon reads the shapes of real parameters
        return
    try:
        optimizer([torch.nn.Parameter(torch.empty(1))], **group.optimizer_kwargs)
    except Exception as error:  # whatever torch says about an argument
        raise ConfigError(
            f"{where.of('optimizer.param_groups')}: {key}.optimizer_kwargs = "
            f"{show(group.optimizer_kwargs)}: {group.optimizer_name} does not take them: {error}. "
            f"Write what torch.optim.{group.optimizer_name} takes, such as {{ lr = 1e-3 }}."
        ) from error


def check_data(config: GraphTrainerConfig, where: Origin) -> None:
    """Refuse datasets and tokenizers that are not there.

    Raises:
        ConfigError: with the section, the key, the value and a remedy.
    """
    for section in ("dataloader", "tokenizer"):
        _check_dataset(getattr(config, section), section, where)
    if config.validator.enable:
        _check_dataset(config.validator.dataloader, "validator.dataloader", where)
    if isinstance(config.tokenizer, HuggingFaceTokenizer.Config) and not os.path.isdir(
        config.hf_assets_path
    ):
        raise bad_value(
            where,
            "hf_assets_path",
            config.hf_assets_path,
            'there is no such folder, and tokenizer.type = "huggingface" reads the tokenizer there',
            'Name the folder that holds tokenizer.json, or set tokenizer.type = "byte_bpe".',
        )


def _check_dataset(component: Any, section: str, where: Origin) -> None:
    if isinstance(component, TextDataLoader.Config | ByteBPETokenizer.Config):
        try:
            open_corpus(component.dataset, component.dataset_path)
        except ConfigError as e:
            place = where.of(f"{section}.dataset", f"{section}.dataset_path")
            raise ConfigError(f"{place}: {section}: {e}") from e
    elif isinstance(component, text_datasets.HuggingFaceTextDataLoader.Config):
        known = text_datasets.DATASETS
        if component.dataset.lower() not in known:
            raise bad_value(
                where,
                f"{section}.dataset",
                component.dataset,
                "not a dataset of torchtitan's",
                f"{did_you_mean(component.dataset, known)}Write {' or '.join(known)}, or set "
                f'{section}.type = "text" for the embedded text or files of your own.',
            )
    elif is_dataclass(component):  # several sources in one loader
        for field in fields(component):
            value = getattr(component, field.name)
            for i, source in enumerate(value if isinstance(value, list) else []):
                if is_dataclass(source):
                    _check_dataset(source, f"{section}.{field.name}[{i}]", where)
