"""The entries that a config's `base` can name: the DeepSeek V3 sizes that torchtitan knows."""

from torchtitan.models.deepseek_v3 import config_registry as torchtitan_registry

from graph_trainer.titan.config.run_config import to_graph_trainer_config
from graph_trainer.titan.trainer import GraphTrainer


def deepseek_v3_debugmodel() -> GraphTrainer.Config:
    """A dense layer and five of eight small experts that train on a laptop."""
    config = torchtitan_registry.deepseek_v3_debugmodel()
    return to_graph_trainer_config(config, activation_checkpoint=None)


def deepseek_v3_16b() -> GraphTrainer.Config:
    """DeepSeek V2 Lite 16B, which torchtitan trains as a small DeepSeek V3."""
    return to_graph_trainer_config(torchtitan_registry.deepseek_v3_16b())


def deepseek_v3_671b() -> GraphTrainer.Config:
    """DeepSeek V3 671B."""
    return to_graph_trainer_config(torchtitan_registry.deepseek_v3_671b())
