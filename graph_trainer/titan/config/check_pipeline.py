"""Check that a model can be split into the stages of a pipeline, and its schedule can run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from graph_trainer.core.pipeline.schedule import IN_A_V, ONE_STAGE, SCHEDULES
from graph_trainer.core.torch_private_pipelining import check_csv, is_csv
from graph_trainer.titan.activation_policies import BudgetAC
from graph_trainer.titan.config.remedies import show
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.config.sources import Problem
from graph_trainer.titan.routing import SAVE_ROUTING

DEGREE = "parallelism.pipeline_parallel_degree"
_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_MICROBATCH = "parallelism.pipeline_parallel_microbatch_size"
_FILE = "parallelism.pipeline_parallel_schedule_csv"
_BATCH = "training.local_batch_size"


def pipeline_problems(config: GraphTrainerConfig) -> Iterator[Problem]:
    """Check the keys of a pipeline against each other, the batch and the model."""
    parallelism, spec = config.parallelism, config.model_spec
    if parallelism.pipeline_parallel_degree == 1 or spec is None:
        return
    model = f"{spec.name} {spec.flavor}"
    of_model = next(_of_model(spec), None)
    if of_model is not None:
        yield Problem(DEGREE, f"{model} {of_model}", "Set it to 1, or train another model.")
        return
    schedule = parallelism.pipeline_parallel_schedule
    is_budget = isinstance(config.activation_checkpoint, BudgetAC.Config)
    if is_budget and schedule in SCHEDULES and schedule not in ONE_STAGE:
        yield Problem(
            "activation_checkpoint.type",
            f"each stage has a budget, and {schedule} has several stages on a rank",
            f'Set it to "full", or {_SCHEDULE} = "1F1B".',
            (_SCHEDULE, DEGREE),
            "budget",
        )
    unsupported = (
        (
            "parallelism.fsdp_reshard_after_forward",
            parallelism.fsdp_reshard_after_forward == "auto",
            "default",
        ),
        ("compile.mode", config.compile.mode == "partitioned", "aot_fx_trace"),
        (SAVE_ROUTING, getattr(config.metrics, "save_routing", None) is not None, None),
    )
    for key, is_set, wanted in unsupported:
        if is_set:
            problem = f"not supported with {DEGREE} = {parallelism.pipeline_parallel_degree}"
            remedy = f"Set {key} = {show(wanted)}." if wanted is not None else "Leave it out."
            yield Problem(key, problem, remedy, (DEGREE,))
    if schedule not in SCHEDULES:
        names = ", ".join(show(name) for name in SCHEDULES)
        yield Problem(_SCHEDULE, "no schedule that graph_trainer runs", f"Set one of {names}.")
        return
    problems = [*_batch_problems(config), *_stage_problems(config, len(spec.model.layers))]
    yield from problems
    if not problems and parallelism.pipeline_parallel_schedule_csv:
        yield from _file_problems(config, _num_stages(config, len(spec.model.layers)))


def schedule_of(config: GraphTrainerConfig) -> str:
    """Return the schedule of a pipeline: a name of torch's, or the path of a CSV file."""
    parallelism = config.parallelism
    return parallelism.pipeline_parallel_schedule_csv or parallelism.pipeline_parallel_schedule


def _of_model(spec: Any) -> Iterator[str]:
    """Yield why a model cannot be split."""
    if spec.pipelining_fn is None or not hasattr(spec.model, "layers"):
        yield "cannot be split into stages: its ModelSpec has no pipelining_fn"
    elif getattr(spec.model, "enable_weight_tying", False):
        yield "has one weight for embedding and output head, which torchtitan does not split"
    elif getattr(spec.model, "mtp_layers", None):
        yield "predicts several tokens, by layers that torchtitan's split leaves out"


def _batch_problems(config: GraphTrainerConfig) -> Iterator[Problem]:
    parallelism, rows = config.parallelism, config.training.local_batch_size
    size = parallelism.pipeline_parallel_microbatch_size
    degree = parallelism.pipeline_parallel_degree
    microbatches = rows // size  # which torchtitan's config has checked to divide
    schedule = parallelism.pipeline_parallel_schedule
    if parallelism.pipeline_parallel_schedule_csv:  # has an order of its own
        return
    if schedule == "1F1B" and microbatches < degree:
        yield Problem(
            _BATCH,
            f'{microbatches} microbatches of {_MICROBATCH} = {size}, and "1F1B" needs one for each '
            f"of the {degree} stages",
            f"Set it to {degree * size} or more, or lower {_MICROBATCH}.",
            (_MICROBATCH, DEGREE),
        )
    # as torch's schedule: as many microbatches in each round
    rounds = max(1, microbatches // degree)
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and microbatches % rounds:
        yield Problem(
            _BATCH,
            f"{microbatches} microbatches, which {schedule} runs in {rounds} rounds of as many",
            f"Set it to a multiple of {degree * size}.",
            (_SCHEDULE, DEGREE),
        )
    if schedule == "DualPipeV" and microbatches < 2 * degree:
        yield Problem(
            _BATCH,
            f'{microbatches} microbatches of {_MICROBATCH} = {size}, and "DualPipeV" needs one for '
            f"each of {2 * degree} stages",
            f"Set it to {2 * degree * size} or more, or lower {_MICROBATCH}.",
            (_MICROBATCH, DEGREE),
        )


def _file_problems(config: GraphTrainerConfig, num_stages: int) -> Iterator[Problem]:
    """Check the file of a schedule."""
    parallelism, path = config.parallelism, schedule_of(config)
    degree = parallelism.pipeline_parallel_degree
    in_a_v = parallelism.pipeline_parallel_schedule in IN_A_V
    size = parallelism.pipeline_parallel_microbatch_size
    microbatches = config.training.local_batch_size // size
    problem = None if is_csv(path) else "a file whose name does not end in .csv"
    try:
        check_csv(path, degree, num_stages, microbatches, in_a_v=in_a_v)
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except ValueError as error:
        problem = f"no schedule of {degree} ranks: {error}"
    if problem is not None:
        yield Problem(
            _FILE,
            problem,
            f"Write a line a rank, with fields such as 0F1 (stage, action, microbatch): F, B, or I "
            f"and W, of {microbatches} microbatches and {num_stages} stages, which {_SCHEDULE} = "
            f"{show(parallelism.pipeline_parallel_schedule)} counts.",
            (DEGREE, _SCHEDULE, _BATCH),
        )


def _num_stages(config: GraphTrainerConfig, num_layers: int) -> int:
    """Return the number of stages, as torchtitan counts them."""
    parallelism = config.parallelism
    if parallelism.module_fqns_per_model_part is not None:
        return len(parallelism.module_fqns_per_model_part)
    first = parallelism.pipeline_parallel_first_stage_less_layers
    last = parallelism.pipeline_parallel_last_stage_less_layers
    if parallelism.pipeline_parallel_layers_per_stage is not None:
        weighted = num_layers + first + last
        return math.ceil(weighted / parallelism.pipeline_parallel_layers_per_stage)
    is_single = parallelism.pipeline_parallel_schedule in ONE_STAGE
    return parallelism.pipeline_parallel_degree * (1 if is_single else 2)


def _stage_problems(config: GraphTrainerConfig, num_layers: int) -> Iterator[Problem]:
    """Check the number of stages, as torchtitan counts them."""
    parallelism = config.parallelism
    degree, schedule = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule
    is_single, stages = schedule in ONE_STAGE, _num_stages(config, num_layers)
    wanted = "one stage" if is_single else "two stages or more"
    cannot_place = stages % degree != 0 or (stages == degree) != is_single
    if parallelism.pipeline_parallel_schedule in IN_A_V:
        wanted, cannot_place = "two stages", stages != 2 * degree
    split = parallelism.module_fqns_per_model_part
    if split is not None:
        key = "parallelism.module_fqns_per_model_part"
        if cannot_place:
            yield Problem(
                key,
                f"{schedule} has {wanted} on each of {degree} ranks",
                f"Name the modules of {degree * (1 if is_single else 2)} stages.",
                (_SCHEDULE, DEGREE),
                f"{stages} stages",
            )
        # torchtitan trains without a module that no stage names, and twice what two name
        layers = [f"layers.{index}" for index in range(num_layers)]
        modules = [name for stage in split for name in stage]
        if modules != ["tok_embeddings", *layers, "norm", "lm_head"] or not all(split):
            yield Problem(
                key,
                "not every module of the model once and in order",
                f"Name tok_embeddings, layers.0 to layers.{num_layers - 1}, norm and lm_head, "
                "some of them in each stage.",
                (DEGREE,),
            )
        return
    first = parallelism.pipeline_parallel_first_stage_less_layers
    last = parallelism.pipeline_parallel_last_stage_less_layers
    weighted = num_layers + first + last
    per_stage = parallelism.pipeline_parallel_layers_per_stage
    if per_stage is not None and cannot_place:
        yield Problem(
            "parallelism.pipeline_parallel_layers_per_stage",
            f"makes {stages} stages of {num_layers} layers, and {schedule} has {wanted} on "
            f"each of {degree} ranks",
            "Leave it out for as many layers in each stage.",
            (_SCHEDULE, DEGREE),
        )
        return
    if stages > weighted or weighted // stages < max(first, last):
        yield Problem(
            DEGREE,
            f"makes {stages} stages of {num_layers} layers, with the embedding counted as {first} "
            f"and the head as {last}",
            f"Set it to {weighted // (2 if not is_single else 1)} or less, or train more layers.",
            (_SCHEDULE,),
        )
