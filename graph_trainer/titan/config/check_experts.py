"""Check that the experts of a model, their dispatcher and the mesh allow expert parallelism."""

from collections.abc import Iterator
from typing import Any

from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from graph_trainer.titan.config.run_config import GraphTrainerConfig

_DEGREE = "parallelism.expert_parallel_degree"
_TENSOR = "parallelism.tensor_parallel_degree"
_SHARD = "parallelism.data_parallel_shard_degree"

ExpertProblem = tuple[str, str, str, tuple[str, ...]]
"""A key, what is wrong with its value, what to write instead, and other keys that decide."""


def expert_problems(config: GraphTrainerConfig, world_size: int | None) -> Iterator[ExpertProblem]:
    """Check expert parallelism: experts, ranks, tokens, dispatcher, and what runs the graph.

    Args:
        world_size: the number of ranks, which the other degrees fit already; None if unknown.
    """
    parallelism, spec = config.parallelism, config.model_spec
    degree, tensor = parallelism.expert_parallel_degree, parallelism.tensor_parallel_degree
    if degree < 1:
        yield _DEGREE, "not a positive degree", f"Set {_DEGREE} to 1 or more.", ()
    if degree <= 1 or spec is None:
        return
    model = f"{spec.name} {spec.flavor}"
    mixtures = _mixtures(spec.model)
    if not mixtures:
        problem = f"{model} has no experts that it could divide"
        yield _DEGREE, problem, f"Set {_DEGREE} = 1, or train a mixture of experts.", ()
        return
    for moe in mixtures:
        if moe.num_experts % degree:
            problem = f"does not divide the {moe.num_experts} experts of {model}"
            yield _DEGREE, problem, f"Set it to a divisor of {moe.num_experts}.", ()
            break
    other = (type(moe.routed_experts.token_dispatcher) for moe in mixtures)
    unlike = next((kind for kind in other if kind is not AllToAllTokenDispatcher.Config), None)
    if unlike is not None:
        yield (
            _DEGREE,
            f"{model} sends tokens to experts by {unlike.__qualname__.removesuffix('.Config')}, "
            "whose kernels no graph holds",
            "Make the model with torchtitan's standard dispatcher, moe_comm_backend = "
            f'"standard", or set {_DEGREE} = 1.',
            (),
        )
    shards = parallelism.data_parallel_shard_degree
    if world_size is not None:
        shards = world_size // (parallelism.data_parallel_replicate_degree * tensor)
    if shards != -1 and shards * tensor % degree:
        yield (
            _DEGREE,
            f"does not divide the {shards * tensor} ranks of {_SHARD} x {_TENSOR}",
            "Set it to a divisor of these, or start more ranks.",
            (_SHARD, _TENSOR),
        )
    if config.training.seq_len % tensor:
        yield (
            "training.seq_len",
            f"not divisible by {_TENSOR} = {tensor}, over which expert parallelism splits tokens",
            f"Set training.seq_len to a multiple of {tensor}.",
            (_DEGREE, _TENSOR),
        )
    if config.compile.mode == "partitioned":
        yield (
            "compile.mode",
            "its backward graph takes tensors only, and needs the numbers of tokens that experts "
            f"receive with {_DEGREE} = {degree}",
            f'Set compile.mode = "aot_fx_trace", or {_DEGREE} = 1.',
            (_DEGREE,),
        )


def _mixtures(model: Any) -> list[Any]:
    """Return the config of every mixture of experts in the config of a model."""
    layers = [*getattr(model, "layers", ()), *(getattr(model, "mtp_layers", None) or ())]
    found = (getattr(layer, "moe", None) for layer in layers)
    return [moe for moe in found if moe is not None]
