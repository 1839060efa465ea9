"""The entries that a config's `base` can name: the Llama 3 sizes that torchtitan knows."""

from torchtitan.components.optimizer import default_adamw
from torchtitan.models.llama3 import config_registry as torchtitan_registry
from torchtitan.models.llama3 import model_registry

from graph_trainer.titan.config.run_config import to_graph_trainer_config
from graph_trainer.titan.trainer import GraphTrainer


def llama3_debugmodel() -> GraphTrainer.Config:
    """Six small layers that train on a laptop."""
    config = torchtitan_registry.llama3_debugmodel()
    config.optimizer = default_adamw(lr=2e-3)  # reaches a lower loss within the 40 steps
    return to_graph_trainer_config(config, activation_checkpoint=None)


def llama3_1b() -> GraphTrainer.Config:
    """Llama 3.2 1B: output head and embedding share one weight."""
    # torchtitan has the model but no trainer config for it; the 8B one's fits.
    config = torchtitan_registry.llama3_8b()
    config.model_spec = model_registry("1B")
    config.hf_assets_path = "./assets/hf/Llama-3.2-1B"
    return to_graph_trainer_config(config)


def llama3_8b() -> GraphTrainer.Config:
    """Llama 3.1 8B."""
    return to_graph_trainer_config(torchtitan_registry.llama3_8b())


def llama3_70b() -> GraphTrainer.Config:
    """Llama 3.1 70B."""
    return to_graph_trainer_config(torchtitan_registry.llama3_70b())


def llama3_405b() -> GraphTrainer.Config:
    """Llama 3.1 405B, in bfloat16."""
    # torchtitan's own entry has float8 linear layers: even to name them needs torchao. This is
    # the 70B entry with the 405B model and its training values.
    config = torchtitan_registry.llama3_70b()
    config.model_spec = model_registry("405B")
    config.hf_assets_path = "./assets/hf/Llama-3.1-405B"
    config.optimizer = default_adamw(lr=8e-5)
    config.lr_scheduler.warmup_steps = 600
    config.training.local_batch_size = 2
    config.training.steps = 3000
    return to_graph_trainer_config(config)
