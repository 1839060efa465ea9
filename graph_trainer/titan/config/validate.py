"""Check the whole config: bounds of values, meshes, shapes, datasets."""

import math
import os
from collections.abc import Callable
from typing import Any

from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.messages import Origin, bad_value, show
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.config.validate_components import check_data, check_optimizer
from graph_trainer.titan.config.validate_passes import check_passes

_Rule = tuple[str, Callable[[Any], bool], str, str]
"""Key, what holds, what is wrong where it does not, what to do."""


def _at_least(key: str, least: int, remedy: str = "") -> _Rule:
    return (
        key,
        lambda value: value is None or value >= least,
        f"below {least}",
        remedy or f"Set {key} to {least} or more.",
    )


def _only(key: str, wanted: bool | int | str, problem: str) -> _Rule:
    return key, lambda value: value == wanted, problem, f"Set {key} = {show(wanted)}."


_LONGEST_TIMEOUT = 365 * 24 * 60 * 60  # seconds; timedelta overflows far above


def _timeout(key: str) -> _Rule:
    return (
        key,
        lambda value: 1 <= value <= _LONGEST_TIMEOUT,
        f"not between 1 and {_LONGEST_TIMEOUT}, a year",
        f"Set {key} to 1 second or more, at most a year.",
    )


_NOT_SHARDED = "not supported by graph_trainer's sharding"

# torchtitan checks few of these before ranks run, some by an assert; others make a run hang or
# divide by zero.
_RULES: tuple[_Rule, ...] = (
    (
        "training.steps",
        lambda value: 1 <= value < 2**63,
        "not between 1 and 2**63 - 1",
        "Set training.steps to 1 or more, below 2**63.",
    ),
    _at_least("training.local_batch_size", 1),
    _at_least("training.seq_len", 1),
    _at_least("training.gc_freq", 1),
    (
        "training.global_batch_size",
        lambda value: value == -1 or value >= 1,
        "neither positive nor -1",
        "Set a positive number of samples, or -1 for one micro-batch a rank.",
    ),
    (
        "training.max_norm",
        lambda value: value > 0,
        "not a positive norm, so no gradient would be left",
        "Set training.max_norm to a positive number (a large one to clip nothing).",
    ),
    _only(
        "training.disable_cuda_graphs",
        True,
        "torchtitan's CUDA graphs cannot wrap a step that graph_trainer runs",
    ),
    _only("training.enable_cpu_offload", False, _NOT_SHARDED),
    _at_least("dataloader.seed", 0),
    _at_least(
        "tokenizer.vocab_size",
        258,
        "Set 258 or more: 256 bytes, the beginning and the end of a document.",
    ),
    _at_least("metrics.log_freq", 1),
    _at_least("checkpoint.interval", 1),
    _at_least("checkpoint.load_step", -1, "Set the step to load, or -1 for the last one."),
    _at_least("validator.freq", 1),
    _at_least("profiler.profile_freq", 1),
    _at_least("lr_scheduler.warmup_steps", 0),
    _at_least("lr_scheduler.total_steps", 1),
    (
        "lr_scheduler.decay_ratio",
        lambda value: value is None or 0 <= value <= 1,
        "not between 0 and 1",
        "Set the fraction of the steps that decay the learning rate, or unset it.",
    ),
    (
        "lr_scheduler.min_lr_factor",
        lambda value: 0 <= value <= 1,
        "not between 0 and 1",
        "Set the smallest learning rate as a fraction of the largest.",
    ),
    _timeout("comm.init_timeout_seconds"),
    _timeout("comm.train_timeout_seconds"),
    _at_least("compile.max_graphs", 1),
    (
        "compile.memory_limit_gib",
        lambda value: value is None or 0 < value < math.inf,
        "not a positive number of GiB",
        "Set the GiB that a step may need on a device, or unset it for no limit.",
    ),
    (
        "debug.seed",
        lambda value: value is None or 0 <= value < 2**64,
        "not between 0 and 2**64 - 1",
        "Set a seed from 0 to 18446744073709551615, or unset it.",
    ),
    _only("parallelism.spmd_backend", "partial_dtensor", "not what graph_trainer shards with"),
    *(
        _only(f"parallelism.{name}_parallel_degree", 1, f"graph_trainer has no {name} parallelism")
        for name in ("pipeline", "context", "expert")
    ),
    _only("parallelism.enable_fsdp_symm_mem", False, _NOT_SHARDED),
    (
        "dump_folder",
        lambda value: bool(value.strip()) and "\0" not in value and not os.path.isfile(value),
        "not a folder to write to",
        "Name a folder, new or existing.",
    ),
)


def world_size_from_environment() -> int | None:
    """Read the number of ranks from WORLD_SIZE, which a launcher sets; None without one.

    Raises:
        ConfigError: WORLD_SIZE is not a positive number.
    """
    value = os.environ.get("WORLD_SIZE")
    if value is None:
        return None
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise bad_value(
            "environment",
            "WORLD_SIZE",
            value,
            "not a positive number of ranks",
            "Unset it, or start the ranks with torchrun, which sets it.",
        )
    return int(value)


def wanted_ranks(config: GraphTrainerConfig) -> int:
    """Return how many ranks a config is for on a machine without GPUs.

    The product of its degrees of parallelism; where the number of shards is open, the smallest
    number of shards that makes two ranks or more.
    """
    parallelism = config.parallelism
    fixed = parallelism.data_parallel_replicate_degree * parallelism.tensor_parallel_degree
    shards = parallelism.data_parallel_shard_degree
    return fixed * (shards if shards > 0 else max(1, 2 // fixed))


def check_config(
    config: GraphTrainerConfig, world_size: int | None, *, origin: Origin | None = None
) -> None:
    """Refuse a config that cannot train, before any process group is created.

    Args:
        config: the config, its values checked for their types.
        world_size: the number of ranks; None leaves out what depends on it.
        origin: where the config's keys come from, for the messages.

    Raises:
        ConfigError: the first thing that is wrong, with its key, value and remedy.
    """
    where = origin or Origin()
    _check_rules(config, where)
    _check_profiler(config.profiler, where)
    check_optimizer(config.optimizer.param_groups, where)
    data_degree = _check_mesh(config.parallelism, world_size, where)
    _check_batch(config, data_degree, where)
    _check_shapes(config, where)
    check_passes(config.compile, where)
    check_data(config, where)


def _check_rules(config: Any, where: Origin) -> None:
    for key, holds, problem, remedy in _RULES:
        section, _, name = key.rpartition(".")
        holder = getattr(config, section) if section else config
        if not hasattr(holder, name):  # a component of a user's own may have other keys
            continue
        value = getattr(holder, name)
        if not holds(value):
            raise bad_value(where, key, value, problem, remedy)


def _check_profiler(profiler: Any, where: Origin) -> None:
    least = profiler.profiler_warmup + profiler.profiler_active
    if profiler.enable_profiling and profiler.profile_freq < least:
        raise bad_value(
            where,
            "profiler.profile_freq",
            profiler.profile_freq,
            f"fewer steps than profiler.profiler_warmup = {profiler.profiler_warmup} and "
            f"profiler.profiler_active = {profiler.profiler_active} take",
            f"Set profiler.profile_freq to {least} or more.",
        )


_DEGREES = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel")


def _check_mesh(parallelism: Any, world_size: int | None, where: Origin) -> int | None:
    """Return the data-parallel degree, None where it depends on an unknown world size."""
    degrees = {f"{name}_degree": getattr(parallelism, f"{name}_degree") for name in _DEGREES}
    for name, degree in degrees.items():
        rest = degree == -1 and name == "data_parallel_shard_degree"
        if degree < 1 and not rest:
            raise bad_value(
                where,
                f"parallelism.{name}",
                degree,
                "not a positive degree",
                f"Set parallelism.{name} to 1 or more"
                + (", or -1 for all ranks that are left." if "shard" in name else "."),
            )
    replicate, shard, tensor = degrees.values()
    if world_size is None:
        return None if shard == -1 else replicate * shard
    keys = [f"parallelism.{name}" for name in degrees]
    product = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
    if shard == -1:
        shard, left = divmod(world_size, replicate * tensor)
        if left or not shard:
            raise ConfigError(
                f"{where.of(*keys)}: parallelism: {product} does not fit on {world_size} ranks: "
                f"{replicate * tensor} does not divide {world_size}. Start a multiple of "
                f"{replicate * tensor} ranks, or lower parallelism.tensor_parallel_degree or "
                "parallelism.data_parallel_replicate_degree."
            )
    if replicate * shard * tensor != world_size:
        raise ConfigError(
            f"{where.of(*keys)}: parallelism: {product} = {replicate * shard * tensor} ranks, but "
            f"{world_size} are started. Make the degrees multiply to {world_size} "
            "(parallelism.data_parallel_shard_degree = -1 takes what is left), or start "
            f"{replicate * shard * tensor} ranks."
        )
    return replicate * shard


def _check_batch(config: Any, data_degree: int | None, where: Origin) -> None:
    training = config.training
    if training.global_batch_size == -1 or data_degree is None:
        return
    one_step = training.local_batch_size * data_degree
    if training.global_batch_size % one_step:
        below = training.global_batch_size // one_step * one_step
        choices = f"{below} or {below + one_step}" if below else f"{one_step}"
        raise bad_value(
            where,
            "training.global_batch_size",
            training.global_batch_size,
            f"not a multiple of {one_step}, which is training.local_batch_size "
            f"{training.local_batch_size} on {data_degree} data-parallel ranks",
            f"Set it to {choices}, to -1 for {one_step}, or change training.local_batch_size.",
        )


def _check_shapes(config: Any, where: Origin) -> None:
    seq_len = config.training.seq_len
    tensor = config.parallelism.tensor_parallel_degree
    if config.parallelism.enable_sequence_parallel and seq_len % tensor:
        near = seq_len // tensor * tensor or tensor
        raise bad_value(
            where.of("training.seq_len", "parallelism.tensor_parallel_degree"),
            "training.seq_len",
            seq_len,
            f"not divisible by parallelism.tensor_parallel_degree = {tensor}, over which "
            "sequence parallelism splits it",
            f"Set training.seq_len to a multiple of {tensor} such as {near}, or "
            "parallelism.enable_sequence_parallel = false.",
        )
    if config.model_spec is None:
        raise ConfigError(
            f"{where.file}: the config has no model. Set base to a registry function of the module."
        )
    model = config.model_spec.model
    longest = getattr(model, "max_seq_len", None)
    if longest is not None and seq_len > longest:
        raise bad_value(
            where,
            "training.seq_len",
            seq_len,
            f"longer than the {longest} positions of {config.model_spec.name} "
            f"{config.model_spec.flavor}",
            f"Set training.seq_len to {longest} or less.",
        )
    attention = getattr(model, "first_attention", None)
    for name in ("n_heads", "n_kv_heads"):
        heads = getattr(attention, name, None)
        if heads is not None and heads % tensor:
            fitting = [d for d in range(1, heads + 1) if heads % d == 0]
            raise bad_value(
                where,
                "parallelism.tensor_parallel_degree",
                tensor,
                f"does not divide the {name} = {heads} of {config.model_spec.name} "
                f"{config.model_spec.flavor}",
                f"Set it to a divisor of {heads}: {', '.join(map(str, fitting))}.",
            )
    vocabulary = getattr(model, "vocab_size", None)
    tokens = getattr(config.tokenizer, "vocab_size", None)
    if vocabulary is not None and tokens is not None and tokens > vocabulary:
        raise bad_value(
            where,
            "tokenizer.vocab_size",
            tokens,
            f"larger than the model's vocabulary of {vocabulary}",
            f"Set tokenizer.vocab_size to {vocabulary} or less.",
        )
