"""Check that the attention of a model can be split by context parallelism, or masked."""

from collections.abc import Callable
from typing import Any

from torchtitan.models.common.attention import ScaledDotProductAttention

from graph_trainer.titan.config.run_config import GraphTrainerConfig

_DEGREE = "parallelism.context_parallel_degree"
_METHOD = "parallelism.context_parallel_method"
_DOCUMENTS = "parallelism.document_mask"


def check_context_parallel(
    config: GraphTrainerConfig, model: Any, require: Callable[..., None]
) -> None:
    """Refuse sequences, heads and attention that cannot be split or masked as the config asks.

    Args:
        model: the config of the model.
        require: `(holds, key, problem, remedy, *other_keys)` refuses the value of a key unless
            `holds`.
    """
    parallelism, seq_len = config.parallelism, config.training.seq_len
    degree, tensor = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    if degree == 1 and not parallelism.document_mask:
        return
    key, off = (_DEGREE, "1") if degree > 1 else (_DOCUMENTS, "false")
    by_heads = degree > 1 and parallelism.context_parallel_method == "ulysses"
    for index, layer in enumerate(getattr(model, "layers", ())):
        attention = getattr(layer, "attention", None)
        require(
            isinstance(
                getattr(attention, "inner_attention", None), ScaledDotProductAttention.Config
            ),
            key,
            f"layers.{index} has no scaled dot product attention, the one kind that is given a "
            "mask or the whole of a sequence that is split",
            f"Set {key} = {off}.",
        )
        for name in ("n_heads", "n_kv_heads"):
            heads = getattr(attention, name, None)
            require(
                not by_heads or heads is None or heads % (degree * tensor) == 0,
                _DEGREE,
                f'{_METHOD} = "ulysses" splits heads, and {degree} x tensor_parallel_degree '
                f"{tensor} does not divide the {name} = {heads} of layers.{index}",
                f'Set {_METHOD} = "all_gather", or lower the degree.',
                _METHOD,
                "parallelism.tensor_parallel_degree",
            )
    if degree == 1:
        return
    require(
        parallelism.context_parallel_load_balancer == "headtail",
        "parallelism.context_parallel_load_balancer",
        "not how graph_trainer splits a sequence",
        'Set "headtail", or leave it out.',
        _DEGREE,
    )
    each = tensor if parallelism.enable_sequence_parallel else 1
    parts = 2 * degree * each
    require(
        seq_len % parts == 0,
        "training.seq_len",
        f"not divisible by {parts}: {_DEGREE} = {degree} splits a sequence into {2 * degree} chunks"
        + (f", and sequence parallelism each of them into {each}" if each > 1 else ""),
        f"Set training.seq_len to a multiple of {parts} such as {seq_len // parts * parts or parts}"
        ".",
        _DEGREE,
        "parallelism.tensor_parallel_degree",
    )
    require(
        not getattr(model, "mtp_layers", None),
        _DEGREE,
        "the model predicts several tokens, for which a whole sequence is shifted",
        f"Set {_DEGREE} = 1, or train a model without mtp_layers.",
    )
    attentions = sum(1 for _ in model.traverse(ScaledDotProductAttention.Config))
    require(
        attentions <= len(model.layers),
        _DEGREE,
        "the model has attention beside its layers, as that of images, which is not split",
        f"Set {_DEGREE} = 1.",
    )
