"""Check that a model can be split as context and expert parallelism ask."""

from collections.abc import Iterator
from typing import Any

from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from graph_trainer.titan.config.core_settings import IMBALANCE_KEY
from graph_trainer.titan.config.remedies import show
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.config.sources import Problem
from graph_trainer.titan.parallelize_context import heads_that_do_not_divide
from graph_trainer.titan.routing import mixtures_of

_DEGREE = "parallelism.context_parallel_degree"
_EXPERTS = "parallelism.expert_parallel_degree"
_METHOD = "parallelism.context_parallel_method"
_DOCUMENTS = "parallelism.document_mask"
_TENSOR = "parallelism.tensor_parallel_degree"


def context_parallel_problems(config: GraphTrainerConfig, model: Any) -> Iterator[Problem]:
    """Check sequences, heads and attention of a model's config that are to be split or masked."""
    parallelism, seq_len = config.parallelism, config.training.seq_len
    degree, tensor = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    layers = getattr(model, "layers", None)
    if layers is None:  # a model of transformers, or one of the user's own
        problem = "this model, no decoder of torchtitan's, takes data parallelism alone"
        for key, wanted in ((_TENSOR, 1), (_DEGREE, 1), (_DOCUMENTS, False)):
            if getattr(parallelism, key.partition(".")[2]) != wanted:
                yield Problem(key, problem, f"Set {key} = {show(wanted)}.")
    if layers is None or (degree == 1 and not parallelism.document_mask):
        return
    for index, layer in enumerate(layers):
        attention = getattr(layer, "attention", None)
        inner = getattr(attention, "inner_attention", None)
        if not isinstance(inner, ScaledDotProductAttention.Config):
            key, unset = (_DEGREE, "1") if degree > 1 else (_DOCUMENTS, "false")
            yield Problem(
                key,
                f"layers.{index} has no scaled dot product attention, the one kind that is given a "
                "mask or the whole of a sequence that is split",
                f"Set {key} = {unset}.",
            )
            return
    if degree == 1:
        return
    undivided = heads_that_do_not_divide(layers, degree, tensor)
    if undivided and parallelism.context_parallel_method == "ulysses":
        yield Problem(
            _DEGREE,
            f'{_METHOD} = "ulysses" splits heads, and {degree} x tensor_parallel_degree {tensor} '
            f"does not divide the {undivided}",
            f'Set {_METHOD} = "all_gather", or lower the degree.',
            (_METHOD, _TENSOR),
        )
        return
    if parallelism.context_parallel_load_balancer != "headtail":
        problem = "not how graph_trainer splits a sequence"
        remedy = 'Set "headtail", or leave it out.'
        yield Problem("parallelism.context_parallel_load_balancer", problem, remedy, (_DEGREE,))
    shards = tensor if parallelism.enable_sequence_parallel else 1
    parts = 2 * degree * shards
    if seq_len % parts:
        by_tensor = f", and sequence parallelism each of them into {shards}" if shards > 1 else ""
        yield Problem(
            "training.seq_len",
            f"not divisible by {parts}: {_DEGREE} = {degree} splits a sequence into {2 * degree} "
            f"chunks{by_tensor}",
            f"Set training.seq_len to a multiple of {parts} such as "
            f"{seq_len // parts * parts or parts}.",
            (_DEGREE, _TENSOR),
        )
    if getattr(model, "mtp_layers", None):
        problem = "the model predicts several tokens, for which a whole sequence is shifted"
        yield Problem(_DEGREE, problem, f"Set {_DEGREE} = 1, or train a model without mtp_layers.")
    elif sum(1 for _ in model.traverse(ScaledDotProductAttention.Config)) > len(layers):
        problem = "the model has attention beside its layers, as that of images, which is not split"
        yield Problem(_DEGREE, problem, f"Set {_DEGREE} = 1.")


def expert_parallel_problems(
    config: GraphTrainerConfig, world_size: int | None
) -> Iterator[Problem]:
    """Check expert parallelism: experts, ranks, tokens, dispatcher, and what runs the graph.

    Args:
        world_size: the number of ranks; None if unknown.
    """
    key = _EXPERTS
    parallelism, spec = config.parallelism, config.model_spec
    degree, tensor = parallelism.expert_parallel_degree, parallelism.tensor_parallel_degree
    if spec is None:
        return
    model = f"{spec.name} {spec.flavor}"
    mixtures = mixtures_of(spec.model)
    for moe in mixtures.values():
        dispatcher = type(moe.routed_experts.token_dispatcher)
        if dispatcher is not AllToAllTokenDispatcher.Config:
            yield Problem(
                "base",
                f"{model} sends tokens to experts by "
                f"{dispatcher.__qualname__.removesuffix('.Config')}, whose kernels no graph holds",
                "Name an entry with torchtitan's standard dispatcher, moe_comm_backend = "
                '"standard".',
            )
            return
    if degree == 1:
        return
    if not mixtures:
        remedy = f"Set {key} to 1, or train a mixture of experts."
        yield Problem(key, f"{model} has no experts that it could divide", remedy)
        return
    for moe in mixtures.values():
        if moe.num_experts % degree:
            problem = f"does not divide the {moe.num_experts} experts of {model}"
            yield Problem(key, problem, f"Set it to a divisor of {moe.num_experts}.")
            return
    replicate = parallelism.data_parallel_replicate_degree
    context, shards = parallelism.context_parallel_degree, parallelism.data_parallel_shard_degree
    if world_size is not None:
        shards = world_size // (replicate * tensor * context * parallelism.pipeline_parallel_degree)
    ranks = shards * tensor * context
    if shards != -1 and ranks % degree:
        yield Problem(
            key,
            f"does not divide the {ranks} ranks of data_parallel_shard x context_parallel x "
            "tensor_parallel",
            "Set it to a divisor of these, or start more ranks.",
            ("parallelism.data_parallel_shard_degree", _TENSOR),
        )
    if config.training.seq_len % tensor:
        yield Problem(
            "training.seq_len",
            f"not divisible by {_TENSOR} = {tensor}, over which expert parallelism splits the "
            "tokens",
            f"Set training.seq_len to a multiple of {tensor}.",
            (key,),
        )
    if config.compile.mode == "partitioned":
        yield Problem(
            "compile.mode",
            "its backward graph takes tensors only, and needs the numbers of tokens that experts "
            f"receive with {key} = {degree}",
            f'Set compile.mode = "aot_fx_trace", or {key} = 1.',
            (key,),
        )


def imbalance_problems(config: GraphTrainerConfig) -> Iterator[Problem]:
    """Check that the experts of a rank can receive what compile.expert_imbalance names."""
    imbalance = config.compile.expert_imbalance
    wrong = wrong_imbalance(config, imbalance) if imbalance not in (None, 1) else None
    if wrong is not None:
        problem, remedy = wrong
        yield Problem(IMBALANCE_KEY, problem, f"{remedy}, or leave it out.", (_EXPERTS,))


def wrong_imbalance(config: GraphTrainerConfig, imbalance: float = 1.0) -> tuple[str, str] | None:
    """Return why experts cannot receive so many times their even share of the tokens, and how they
    could; None where they can."""
    degree, spec = config.parallelism.expert_parallel_degree, config.model_spec
    if spec is None or not mixtures_of(spec.model):
        problem = "the model has no experts that tokens could be spread over"
        return problem, "Set base to that of a mixture of experts"
    if degree == 1:
        problem = f"{_EXPERTS} = 1: every rank has all experts and computes its own tokens"
        return f"{problem}, wherever they go", f"Set {_EXPERTS} to 2 or more"
    if imbalance > degree:
        problem = f"{_EXPERTS} = {degree}, so a rank that receives all tokens has {degree} times "
        return f"{problem}its even share", f"Set 1 to {degree}"
    return None
