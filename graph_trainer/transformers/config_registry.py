"""The entry that a config's `base` can name: the model is the one that `[model] path` names."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace

from torchtitan.components.optimizer import default_adamw
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.run_config import GraphTrainerConfig, to_graph_trainer_config
from graph_trainer.titan.parallelize import parallelize_decoder
from graph_trainer.transformers.model import TransformersModel, TransformersStateDictAdapter


@dataclass(kw_only=True, slots=True)
class ModelSection:
    """[model]: which model of transformers is trained."""

    path: str = ""
    """
    A folder with the model's config.json: its weights, where safetensors lie beside it, else random
    ones. Or a name, with random weights: a folder of configs/transformers ("debugmodel"), a model
    type of transformers ("gpt2" has its default sizes), or a config that transformers finds in its
    cache or, unless HF_HUB_OFFLINE is set, on the hub.
    """


@dataclass(kw_only=True, slots=True)
class TransformersConfig(GraphTrainerConfig):
    """graph_trainer's config with a [model] section."""

    model: ModelSection = field(default_factory=ModelSection)

    def __post_init__(self) -> None:
        GraphTrainerConfig.__post_init__(self)
        spec, path = self.model_spec, self.model.path  # type: ignore[has-type]
        if spec is not None and spec.flavor != path:
            model = TransformersModel.Config(path=path)
            self.model_spec = replace(spec, flavor=path, model=model)  # type: ignore[misc]

    def model_problems(self) -> Iterator[tuple[str, str, str]]:
        """Yield what [model] makes impossible."""
        try:
            self.model_spec.model.check()
        except ConfigError as error:
            yield "model.path", str(error), ""


def causal_lm() -> TransformersConfig:
    """The AutoModelForCausalLM that `[model] path` names."""
    config = to_graph_trainer_config(
        Trainer.Config(
            model_spec=ModelSpec(
                name="transformers",
                flavor="",
                model=TransformersModel.Config(),
                parallelize_fn=parallelize_decoder,
                pipelining_fn=None,
                post_optimizer_build_fn=None,
                state_dict_adapter=TransformersStateDictAdapter,
            ),
            optimizer=default_adamw(lr=3e-4),
        )
    )
    return TransformersConfig(**{f.name: getattr(config, f.name) for f in fields(config)})
