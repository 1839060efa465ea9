"""Convert a torchtitan trainer config to graph_trainer's."""

import copy
import dataclasses
from typing import Any

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.models.common.attention import (
    FlexAttention,
    ScaledDotProductAttention,
    VarlenAttention,
)
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from graph_trainer.titan.checkpointer import with_checked_checkpoints
from graph_trainer.titan.config.run_config import GraphParallelismConfig, GraphTrainerConfig
from graph_trainer.titan.data.loader import TextDataLoader
from graph_trainer.titan.data.tokenizer import ByteBPETokenizer
from graph_trainer.titan.parallelize import parallelize_decoder


def to_graph_trainer_config(config: Trainer.Config, **changes: Any) -> GraphTrainerConfig:
    """Make a graph_trainer config of the same model and run as a torchtitan trainer config.

    The model is sharded by graph_trainer's `parallelize_decoder`, its attention is scaled dot
    product attention, the loss is the plain cross-entropy, the text is the standard library's
    with its tokenizer, and [compile] is graph_trainer's with its defaults. CUDA graphs around the
    step and SPMD back ends other than partial DTensors, which exclude a captured step, are
    switched off. Everything else stays.

    Args:
        config: the result of a function in a torchtitan `config_registry`; it is not changed.
        changes: fields of GraphTrainerConfig that override the result.

    Raises:
        ValueError: the config has no model.

    Example::

        def qwen3_debugmodel():
            return to_graph_trainer_config(config_registry.qwen3_debugmodel())
    """
    if config.model_spec is None:
        raise ValueError("the trainer config has no model_spec, so there is no model to convert")
    values = {name: copy.copy(getattr(config, name)) for name in _names(config)}
    del values["compile"]
    values |= {
        "model_spec": _model_spec(config.model_spec),
        "training": dataclasses.replace(config.training, disable_cuda_graphs=True),
        "parallelism": GraphParallelismConfig(
            **{name: getattr(config.parallelism, name) for name in _names(config.parallelism)}
            | {"spmd_backend": "partial_dtensor"}
        ),
        "checkpoint": with_checked_checkpoints(config.checkpoint),
        "tokenizer": ByteBPETokenizer.Config(),
        "dataloader": TextDataLoader.Config(),
        "validator": dataclasses.replace(
            config.validator,
            dataloader=TextDataLoader.Config(split="validation", infinite=False),
        ),
        "loss": CrossEntropyLoss.Config(
            global_vocab_size=getattr(config.model_spec.model, "vocab_size", None)
        ),
    }
    return GraphTrainerConfig(**(values | changes))


def _names(config: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(config)]


def _model_spec(spec: ModelSpec) -> ModelSpec:
    # A copy, because a registry may return the same object in every call.
    model = copy.deepcopy(spec.model)
    for other in (FlexAttention.Config, VarlenAttention.Config):
        for _, _, parent, attribute in list(model.traverse(other)):
            if isinstance(parent, list) and isinstance(attribute, int):
                parent[attribute] = ScaledDotProductAttention.Config()
            elif isinstance(attribute, str):
                setattr(parent, attribute, ScaledDotProductAttention.Config())
    return dataclasses.replace(spec, model=model, parallelize_fn=parallelize_decoder)
