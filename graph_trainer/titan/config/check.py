"""Check what spans sections of a config, needs the number of ranks, or names a file."""

import contextlib
import copy
import inspect
import itertools
import math
import os
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.loss import BaseLoss, CrossEntropyLoss
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.deepseek_v3.mtp import MTPLoss

from graph_trainer.core.passes.catalogue import resolve_passes
from graph_trainer.core.passes.pass_list import pass_list
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.suggest import did_you_mean
from graph_trainer.errors import ConfigError, PassError
from graph_trainer.titan.activation_policies import (
    NEEDS_CAPTURE,
    POLICIES,
    FileAC,
    activation_settings,
)
from graph_trainer.titan.chunked_loss import ChunkedCrossEntropyLoss
from graph_trainer.titan.config.build import type_of
from graph_trainer.titan.config.check_checkpoint import checkpoint_problems
from graph_trainer.titan.config.check_parallelism import (
    context_parallel_problems,
    expert_parallel_problems,
    imbalance_problems,
)
from graph_trainer.titan.config.check_pipeline import pipeline_problems
from graph_trainer.titan.config.check_text import text_problems
from graph_trainer.titan.config.core_settings import key_and_problem
from graph_trainer.titan.config.remedies import GUESS, show, wrong_type
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.config.sources import (
    COMMAND_LINE,
    CONFIGURED,
    Origins,
    Problem,
    refusal,
    unreadable,
)
from graph_trainer.titan.optimizer import SHARED, SharedOptimizerConfig, wrong_groups
from graph_trainer.titan.routing import SAVE_ROUTING, mixtures_of
from graph_trainer.titan.step_inputs import pass_config


def world_size_from_environment() -> int | None:
    """Read the number of ranks from WORLD_SIZE, which a launcher sets; None without one.

    Raises:
        ConfigError: WORLD_SIZE is not a positive number.
    """
    value = os.environ.get("WORLD_SIZE")
    if value is None:
        return None
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise ConfigError(
            f"environment: WORLD_SIZE = {show(value)}: not a positive number of ranks. Unset it, "
            "or start the ranks with torchrun, which sets it."
        )
    return int(value)


def wanted_ranks(config: GraphTrainerConfig) -> int:
    """Return how many ranks a config is for on a machine without GPUs.

    The product of its degrees of parallelism; where the number of shards is open, the smallest
    number of shards that makes two ranks or more and that expert parallelism divides.
    """
    parallelism = config.parallelism
    experts = parallelism.expert_parallel_degree
    ranks_per_batch = parallelism.tensor_parallel_degree * parallelism.context_parallel_degree
    fixed = parallelism.data_parallel_replicate_degree * ranks_per_batch
    fixed *= parallelism.pipeline_parallel_degree
    shards = parallelism.data_parallel_shard_degree
    if shards < 1:
        multiple = experts // math.gcd(experts, ranks_per_batch)
        shards = multiple * -(-max(1, 2 // fixed) // multiple)
    return fixed * shards


def ranks_of_degrees(config: GraphTrainerConfig) -> int:
    """Return how many ranks a plan of a config is for where no flag names a number, and check it
    for them.

    Args:
        config: one that was checked without a number of ranks.

    Raises:
        ConfigError: the number of shards is open; or as `check_config`, without texts.
    """
    ranks = wanted_ranks(config)
    if config.parallelism.data_parallel_shard_degree < 1:
        raise ConfigError(
            "--world-size: how many ranks? parallelism.data_parallel_shard_degree = -1 takes "
            f"all that the other degrees leave, so {ranks} is the fewest that shard: add "
            f"--world-size {ranks}, or the number of your GPUs"
        )
    check_config(config, ranks, reads_text=False)
    return ranks


def check_config(
    config: GraphTrainerConfig,
    world_size: int | None,
    *,
    origins: Origins | None = None,
    reads_checkpoint: bool = False,
    reads_text: bool = True,
) -> None:
    """Refuse a config that cannot train, before any process group is created.

    Args:
        config: the config; each value already has its field's type and is within its bounds.
        world_size: the number of ranks. None leaves out the checks that depend on it.
        origins: which file or flag set each key, for the messages.
        reads_checkpoint: whether the checkpoint that the run begins with has to be here.
        reads_text: whether the texts and the tokenizer of the run have to be here.

    Raises:
        ConfigError: all that is wrong, a line each, with its key, value and remedy.
    """
    origins = origins or Origins()
    problems = [
        *_section_problems(config),
        *_head_problems(config),
        *_batch_problems(config, world_size),
        *itertools.starmap(Problem, config.model_problems()),
        *_model_problems(config),
        *expert_parallel_problems(config, world_size),
        *imbalance_problems(config),
        *pipeline_problems(config),
        *_pass_problems(config),
        *_optimizer_problems(config.optimizer, origins),
        *_file_problems(config),
        *(text_problems(config, world_size) if reads_text else ()),
        *(checkpoint_problems(config, origins) if reads_checkpoint else ()),
    ]
    if problems := problems or [*_refused_by_model(config)]:
        for i, problem in enumerate(problems):
            if problem.value is CONFIGURED:
                value: Any = config
                for part in problem.key.replace("[", ".").replace("]", "").split("."):
                    value = value[int(part)] if part.isdigit() else getattr(value, part)
                problems[i] = problem._replace(value=value)
        raise refusal(problems, origins)


def _section_problems(config: GraphTrainerConfig) -> Iterator[Problem]:
    """Check values that depend on other keys, modes above all."""
    section, compile_config = config.activation_checkpoint, config.compile
    mode = compile_config.mode
    name = POLICIES.get(type(section), "none")
    if mode == "eager" and isinstance(section, NEEDS_CAPTURE):
        yield Problem(
            "activation_checkpoint.type",
            'it acts on a captured step, and compile.mode is "eager"',
            'Set compile.mode = "aot_fx_trace", or the type "selective", "full" or "layers".',
            ("compile.mode",),
            name,
        )
    if compile_config.partition != "tags" and mode != "partitioned":
        yield Problem(
            "compile.partition",
            f'it parts forward and backward, and compile.mode is "{mode}"',
            'Set compile.mode = "partitioned" too, or leave compile.partition out.',
            ("compile.mode",),
        )
    profiler = config.profiler
    least = profiler.profiler_warmup + profiler.profiler_active
    if profiler.enable_profiling and profiler.profile_freq < least:
        yield Problem(
            "profiler.profile_freq",
            f"fewer steps than profiler.profiler_warmup = {profiler.profiler_warmup} and "
            f"profiler.profiler_active = {profiler.profiler_active} take",
            f"Set profiler.profile_freq to {least} or more.",
        )


def _head_problems(config: GraphTrainerConfig) -> Iterator[Problem]:
    """Check that tensor parallelism can split the heads: said before lengths."""
    spec, tensor = config.model_spec, config.parallelism.tensor_parallel_degree
    if spec is None:
        return
    attention = getattr(spec.model, "first_attention", None)
    for name in ("n_heads", "n_kv_heads"):
        heads = getattr(attention, name, None)
        if heads is not None and heads % tensor:
            fitting = [str(degree) for degree in range(1, heads + 1) if heads % degree == 0]
            problem = f"does not divide the {name} = {heads} of {spec.name} {spec.flavor}"
            remedy = f"Set it to a divisor of {heads}: {', '.join(fitting)}."
            yield Problem("parallelism.tensor_parallel_degree", problem, remedy)


def _batch_problems(config: GraphTrainerConfig, world_size: int | None) -> Iterator[Problem]:
    """Check degrees of parallelism, batch and sequence length against each other and the ranks."""
    training, parallelism = config.training, config.parallelism
    shard = parallelism.data_parallel_shard_degree
    replicate = parallelism.data_parallel_replicate_degree
    tensor = parallelism.tensor_parallel_degree
    fixed = replicate * tensor * parallelism.context_parallel_degree
    fixed *= parallelism.pipeline_parallel_degree
    if world_size is not None:
        degrees = (
            f"{degree}_degree"
            for degree in (
                *("data_parallel_replicate", "tensor_parallel", "context_parallel"),
                "pipeline_parallel",
            )
        )
        names = [name for name in degrees if getattr(parallelism, name) != 1]
        key = "data_parallel_shard_degree"
        if shard == -1 and names:  # -1 is the default: the message begins with a degree that is set
            key, *names = names
        product = " x ".join(f"{name} {getattr(parallelism, name)}" for name in names)
        if shard == -1:
            problem = f"times {product} = {fixed}, which " if names else ""
            problem += f"does not divide {world_size} ranks"
            lower = "one of these" if names else "it"
            remedy = f"Start a multiple of {fixed} ranks, or lower {lower}."
        else:
            ranks = fixed * shard
            problem = f"times {product} = {ranks} ranks" if names else f"that is {ranks} ranks"
            problem += f", but {world_size} are started"
            remedy = f"Set -1 for what is left, or start {ranks} ranks."
        fitting = world_size // fixed if shard == -1 else shard
        if fixed * fitting != world_size or fitting == 0:
            others = tuple(f"parallelism.{name}" for name in names)
            yield Problem(f"parallelism.{key}", problem, remedy, others)
            return
        shard = fitting
    if shard != -1 and training.global_batch_size != -1:
        one_step = training.local_batch_size * replicate * shard
        below = training.global_batch_size // one_step * one_step
        choices = f"{below} or {below + one_step}" if below else f"{one_step}"
        if training.global_batch_size % one_step:
            yield Problem(
                "training.global_batch_size",
                f"not a multiple of {one_step}, which is training.local_batch_size "
                f"{training.local_batch_size} on {replicate * shard} data-parallel ranks",
                f"Set it to {choices}, to -1 for {one_step}, or change training.local_batch_size.",
            )
    if parallelism.enable_sequence_parallel and training.seq_len % tensor:
        yield Problem(
            "training.seq_len",
            f"not divisible by parallelism.tensor_parallel_degree = {tensor}, over which "
            "sequence parallelism splits it",
            f"Set training.seq_len to a multiple of {tensor} such as "
            f"{training.seq_len // tensor * tensor or tensor}, or "
            "parallelism.enable_sequence_parallel = false.",
            ("parallelism.tensor_parallel_degree",),
        )


def _model_problems(config: GraphTrainerConfig) -> Iterator[Problem]:
    """Check sequence length, heads and vocabulary against the model."""
    spec, seq_len = config.model_spec, config.training.seq_len
    if spec is None:
        remedy = "Set base to a registry function of the module."
        yield Problem("base", "the config has no model", remedy)
        return
    model = f"{spec.name} {spec.flavor}"
    adapter: Any = spec.state_dict_adapter  # which torchtitan makes on every rank
    if missing := sorted(getattr(adapter, "__abstractmethods__", ())):
        yield Problem(
            "model_spec.state_dict_adapter",
            f"a class without {', '.join(missing)}",
            "Derive it from torchtitan.protocols.state_dict_adapter.StateDictAdapter, with to_hf "
            "and from_hf.",
            value=adapter.__qualname__,
        )
    longest = getattr(spec.model, "max_seq_len", None)
    if longest is not None and seq_len > longest:
        problem = f"longer than the {longest} positions of {model}"
        yield Problem("training.seq_len", problem, f"Set training.seq_len to {longest} or less.")
    attentions = [getattr(layer, "attention", None) for layer in getattr(spec.model, "layers", ())]
    windows = [getattr(attention, "sliding_window_size", None) for attention in attentions]
    window = min((length for length in windows if length is not None), default=seq_len)
    if window < seq_len:
        yield Problem(
            "training.seq_len",
            f"longer than the sliding window of {window} tokens of {model}, which scaled dot "
            "product attention, the only one that is captured, does not have",
            f"Set training.seq_len to {window} or less: there the window hides nothing.",
        )
    several = bool(getattr(spec.model, "mtp_layers", None))
    of_one = (CrossEntropyLoss.Config, ChunkedCrossEntropyLoss.Config)
    if isinstance(config.loss, of_one if several else MTPLoss.Config):
        yield Problem(
            "loss.type",
            f"{model} makes {'several predictions' if several else 'one prediction'} for each "
            "token, and this loss takes another number",
            "Leave [loss] out: the registry entry that `base` names has the model's own.",
            ("base",),
            type_of(config.loss, [BaseLoss.Config]),
        )
    if several and config.validator.enable and config.compile.mode == "eager":
        yield Problem(
            "validator.enable",
            f'{model} makes several predictions, and in compile.mode = "eager" torchtitan\'s '
            "validation gives their loss no positions",
            "Leave it out, or set compile.mode to another one.",
            ("compile.mode",),
        )
    yield from context_parallel_problems(config, spec.model)
    vocabulary = getattr(spec.model, "vocab_size", None)
    tokens = getattr(config.tokenizer, "vocab_size", None)
    if vocabulary is not None and tokens is not None and tokens > vocabulary:
        problem = f"larger than the model's vocabulary of {vocabulary}"
        remedy = f"Set tokenizer.vocab_size to {vocabulary} or less."
        yield Problem("tokenizer.vocab_size", problem, remedy)


def _refused_by_model(config: GraphTrainerConfig) -> Iterator[Problem]:
    """Let torchtitan's model look at the config, as it does on every rank, and look whether each of
    its parameters is trained in one group."""
    spec = config.model_spec
    assert spec is not None
    model, groups = copy.deepcopy(spec.model), config.optimizer.param_groups
    before = dist_utils.get_spmd_backend()
    try:
        # a model asks torchtitan for the backend of sharding, which is set when ranks start
        dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
        model.update_from_config(config=config)
    except Exception as error:  # whatever a model raises is about this config
        problem = f"{spec.name} {spec.flavor} refuses the config: {str(error).rstrip('.')}"
        yield Problem("base", problem, "Change that, or choose another base.")
        return
    finally:
        dist_utils.set_spmd_backend(before)
    wrong = None
    if [group.pattern for group in groups] != [".*"]:  # the names of a large model take a second
        with contextlib.suppress(Exception), torch.device("meta"):  # else the ranks report it
            named = model.build().named_parameters()
            wrong = wrong_groups(groups, [name for name, p in named if p.requires_grad])
    if wrong:
        yield Problem(*wrong)


def _pass_problems(config: GraphTrainerConfig) -> Iterator[Problem]:
    """Let the core make the list of passes, which checks the settings too."""
    ours = config.compile
    try:
        if ours.mode == "eager":  # no pass runs; a warning lists what has no effect then
            resolve_passes(ours.passes, ours.disable_passes)
        else:
            pass_list(pass_config(config))
    except ConfigError:  # a file that cannot be read, which `_file_problems` reports
        return
    except PassError as error:
        key, problem, others = key_and_problem(error, ours.pass_of_section.values())
        value: Any = CONFIGURED
        if pass_ := ours.pass_of_section.get(key.removeprefix("compile.")):
            options, default = getattr(ours, pass_.section), pass_.options_type()
            changed = [
                f.name
                for f in fields(default)
                if getattr(options, f.name) != getattr(default, f.name)
            ]
            value = {name: getattr(options, name) for name in changed}
        yield Problem(key, problem, "", others, value)


# torchtitan looks names up in a private function, when it builds the optimizer.
_OPTIMIZERS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW, "DistMuon": None}


def _optimizer_problems(config: Any, origins: Origins) -> Iterator[Problem]:
    """Check that torchtitan can make an optimizer of the parameter groups, and that a flag for all
    of them reaches one."""
    groups, shared = config.param_groups, {}
    if isinstance(config, SharedOptimizerConfig):
        groups, shared = config.resolved_groups(), config.shared()
    for name, value in shared.items():
        is_flag = origins.of(f"optimizer.{name}") == COMMAND_LINE
        if is_flag and all(name in group.optimizer_kwargs for group in config.param_groups):
            yield Problem(
                f"optimizer.{name}",
                "every parameter group sets its own",
                f"Set {name} in optimizer.param_groups, as --optimizer.param_groups.0."
                f"optimizer_kwargs.{name} does for the first one, or take it out there.",
            )
        try:
            torch.optim.AdamW([torch.nn.Parameter(torch.empty(1))], **{name: value})
        except ValueError as error:
            yield Problem(f"optimizer.{name}", str(error), "Set another value.")
            return
    if not groups:
        remedy = 'Add a [[optimizer.param_groups]] with pattern = ".*", or leave the key out.'
        yield Problem("optimizer.param_groups", "no parameter would be trained", remedy)
    for i, group in enumerate(groups):
        key, name = f"optimizer.param_groups[{i}]", group.optimizer_name
        if name not in _OPTIMIZERS:
            guess = did_you_mean(name, _OPTIMIZERS, GUESS)
            remedy = f"{guess}Write {', '.join(map(show, _OPTIMIZERS))}."
            yield Problem(f"{key}.optimizer_name", "not one of torchtitan's", remedy)
        try:
            re.compile(group.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            remedy = 'Write one that finds the names of the group\'s parameters, such as ".*".'
            yield Problem(f"{key}.pattern", f"not a regular expression ({error})", remedy)
        shared = {name: group.optimizer_kwargs.get(name) for name in SHARED}
        texts = {name: value for name, value in shared.items() if isinstance(value, str)}
        for setting, value in texts.items():  # torch would compare them with numbers
            at = f"{key}.optimizer_kwargs.{setting}"
            kind = "array" if setting == "betas" else "number"
            yield Problem(at, *wrong_type(at, value, [kind]), value=value)
        # DistMuon reads the shapes of real parameters, so it is not made here
        if (optimizer := _OPTIMIZERS.get(name)) and not texts:
            try:
                optimizer([torch.nn.Parameter(torch.empty(1))], **group.optimizer_kwargs)
                if "lr" not in group.optimizer_kwargs:
                    remedy = "Set optimizer.lr, or lr in the group's optimizer_kwargs."
                    at = "optimizer.lr" if isinstance(config, SharedOptimizerConfig) else key
                    yield Problem(at, f"group {i} of parameters has no learning rate", remedy)
            except Exception as error:  # whatever torch says about an argument
                problem = f"{name} does not take them: {error}"
                known = inspect.signature(optimizer).parameters
                unknown = [key for key in group.optimizer_kwargs if key not in known]
                guess = did_you_mean(unknown[0], known, GUESS) if unknown else ""
                remedy = f"{guess}Write what torch.optim.{name} takes, such as {{ lr = 1e-3 }}."
                yield Problem(f"{key}.optimizer_kwargs", problem, remedy)


def _file_problems(config: GraphTrainerConfig) -> Iterator[Problem]:
    """Check the files and folders that the config names, by reading what can be read here."""
    folder = config.dump_folder
    is_name = folder.strip() and "\0" not in folder
    if not is_name or os.path.exists(folder) and not os.path.isdir(folder):
        remedy = "Name a folder, new or existing."
        yield Problem("dump_folder", "not a folder to write to", remedy)
    spec, routing = config.model_spec, getattr(config.metrics, "save_routing", None)
    if routing is not None and spec is not None:
        experts = {moe.num_experts for moe in mixtures_of(spec.model).values()}
        if len(experts) != 1:
            counted = "layers with different numbers of experts" if experts else "no experts"
            problem = f"{spec.name} {spec.flavor} has {counted}, whose tokens it could not count"
            remedy = "Leave it out, or train another mixture of experts."
            yield Problem(SAVE_ROUTING, problem, remedy)
        elif (
            "\0" in routing
            or Path(routing).suffix != ".json"  # no other file of the run has its name
            or os.path.isdir(os.path.join(folder, routing))
        ):
            remedy = "Name a .json file, by a path from dump_folder on."
            yield Problem(SAVE_ROUTING, "not a file to write to", remedy)
    section, hardware = config.activation_checkpoint, config.compile.hardware
    if isinstance(section, FileAC.Config) and not section.path:
        yield Problem(
            "activation_checkpoint.type",
            "it reads a table of what backward keeps, and activation_checkpoint.path is unset",
            "Set the path to a TOML file, such as `graph-trainer plan --table` writes.",
            value="file",
        )
    else:
        try:
            activation_settings(section)
        except ConfigError as error:
            yield unreadable("activation_checkpoint.path", getattr(section, "path", ""), error)
    try:
        if hardware is not None:
            load_hardware(hardware, "compile.hardware")
    except ConfigError as error:
        yield unreadable("compile.hardware", hardware, error)
