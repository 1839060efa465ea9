"""Models of published runs without a config here: `--module benchmarks.published.models`.

Sizes of the Llama 3 and Qwen 3 families of torchtitan. Learning rates and data are those of another
size: they change neither time nor memory.
"""

from graph_trainer.titan.config.run_config import to_graph_trainer_config
from graph_trainer.titan.trainer import GraphTrainer

from torchtitan.models import llama3, qwen3  # isort: skip
from torchtitan.models.common import (  # isort: skip
    ComplexRoPE,
    Embedding,
    Linear,
    RMSNorm,
)
from torchtitan.models.llama3 import config_registry as llama3_registry  # isort: skip
from torchtitan.models.llama3.model import Llama3Model  # isort: skip
from torchtitan.models.qwen3 import config_registry as qwen3_registry  # isort: skip

_VOCABULARY = 32_000


def _llama2(
    flavor: str, dim: int, layers: int, heads: int, hidden: int, kv_heads: int | None = None
) -> GraphTrainer.Config:
    """Make the config of a Llama 2 model (Touvron et al., 2023, arXiv 2307.09288)."""
    config = llama3_registry.llama3_8b()
    spec = llama3.model_registry("8B")
    spec.flavor = flavor
    spec.model = Llama3Model.Config(
        dim=dim,
        vocab_size=_VOCABULARY,
        tok_embeddings=Embedding.Config(
            num_embeddings=_VOCABULARY, embedding_dim=dim, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=dim, out_features=_VOCABULARY, param_init=llama3._output_linear_init(dim)
        ),
        layers=llama3._build_llama3_layers(
            n_layers=layers,
            dim=dim,
            n_heads=heads,
            n_kv_heads=kv_heads,
            hidden_dim=hidden,
            rope=ComplexRoPE.Config(dim=dim // heads, max_seq_len=4096, theta=10_000),
            attn_backend="flex",
        ),
    )
    config.model_spec = spec
    config.loss.loss_fn.global_vocab_size = _VOCABULARY
    return to_graph_trainer_config(config)


def llama2_7b() -> GraphTrainer.Config:
    """Llama 2 7B."""
    return _llama2("llama2_7B", 4096, 32, 32, 11_008)


def llama2_13b() -> GraphTrainer.Config:
    """Llama 2 13B."""
    return _llama2("llama2_13B", 5120, 40, 40, 13_824)


def llama2_70b() -> GraphTrainer.Config:
    """Llama 2 70B."""
    return _llama2("llama2_70B", 8192, 80, 64, 28_672, kv_heads=8)


def qwen3_4b() -> GraphTrainer.Config:
    """Qwen 3 4B: output head and embedding share one weight."""
    # torchtitan has the model but no trainer config for it; the 1.7B one's fits.
    config = qwen3_registry.qwen3_1_7b()
    config.model_spec = qwen3.model_registry("4B")
    return to_graph_trainer_config(config)
