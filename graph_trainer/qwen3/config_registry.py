"""The entries that a config's `base` can name: the Qwen 3 sizes that torchtitan knows."""

from torchtitan.components.optimizer import default_adamw
from torchtitan.models.qwen3 import config_registry as torchtitan_registry
from torchtitan.models.qwen3 import model_registry

from graph_trainer.titan.config.run_config import to_graph_trainer_config
from graph_trainer.titan.trainer import GraphTrainer


def qwen3_debugmodel() -> GraphTrainer.Config:
    """Eight small dense layers that train on a laptop."""
    config = torchtitan_registry.qwen3_debugmodel()
    return to_graph_trainer_config(config, activation_checkpoint=None)


def qwen3_debugmodel_moe() -> GraphTrainer.Config:
    """Two layers of 64 small experts, eight for each token."""
    config = torchtitan_registry.qwen3_moe_debug()
    assert config.model_spec is not None
    # torchtitan's eight layers have 300 million parameters, too many for a laptop's memory
    model = config.model_spec.model
    model.layers = model.layers[:2]
    adamw = default_adamw(lr=8e-4)  # as the dense debug model
    return to_graph_trainer_config(config, activation_checkpoint=None, optimizer=adamw)


def qwen3_0_6b() -> GraphTrainer.Config:
    """Qwen 3 0.6B: output head and embedding share one weight."""
    return to_graph_trainer_config(torchtitan_registry.qwen3_0_6b())


def qwen3_8b() -> GraphTrainer.Config:
    """Qwen 3 8B."""
    # torchtitan's own entries of 8B are for fine-tuning and NVFP4; the 14B one's values fit.
    config = torchtitan_registry.qwen3_14b()
    config.model_spec = model_registry("8B")
    config.hf_assets_path = "./assets/hf/Qwen3-8B"
    return to_graph_trainer_config(config, optimizer=default_adamw(lr=3e-4))


def qwen3_32b() -> GraphTrainer.Config:
    """Qwen 3 32B."""
    # torchtitan's rate for these two is that of its smallest model
    config = torchtitan_registry.qwen3_32b()
    return to_graph_trainer_config(config, optimizer=default_adamw(lr=3e-4))


def qwen3_30b_a3b() -> GraphTrainer.Config:
    """Qwen 3 30B-A3B: 128 experts in every layer, eight for each token."""
    config = torchtitan_registry.qwen3_30b_a3b()
    return to_graph_trainer_config(config, optimizer=default_adamw(lr=3e-4))
