"""What graph_trainer does with every decoder of torchtitan, and docs/models.md's table of it.

`python -m tests.unit.titan.decoders` prints the table.
"""

from __future__ import annotations

import functools
import logging
import pkgutil
import re
from collections.abc import Iterator

import torchtitan.models

from graph_trainer.errors import ConfigError, GraphTrainerError
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.config.sources import registry_functions, registry_module
from tests.layers import with_few_layers

EVERY = "all"
"""In place of a config's name, where the module of a family cannot be imported."""

CAPTURED = "captured"

# on the smallest mesh with shards and tensor parallelism; a sequence that no window cuts
_FLAGS = {
    "parallelism.data_parallel_shard_degree": 2,
    "parallelism.tensor_parallel_degree": 2,
    "parallelism.expert_parallel_degree": 1,
    "parallelism.pipeline_parallel_degree": 1,
    "training.seq_len": 64,
    "training.local_batch_size": 2,
    "hf_assets_path": ".",
}
_RANKS = 4

HEAD = ("| `--module torchtitan.models...` | `--config` | FSDP 2 x TP 2 |", "|---|---|---|")


@functools.cache
def decoders() -> tuple[tuple[str, str], ...]:
    """Return family and registry entry of everything that torchtitan has for a decoder."""
    return tuple(_decoders())


def _decoders() -> Iterator[tuple[str, str]]:
    for info in pkgutil.iter_modules(torchtitan.models.__path__):
        if not info.ispkg or info.name in ("common", "flux"):  # flux makes pictures
            continue
        try:
            module = registry_module(f"torchtitan.models.{info.name}")
        except ConfigError:
            yield info.name, EVERY
        else:
            yield from ((info.name, entry) for entry in registry_functions(module))


def outcome(family: str, entry: str) -> str:
    """Capture two layers of each kind on a fake rank; return CAPTURED or the refusal."""
    name = "debugmodel" if entry == EVERY else entry
    words = ["--module", f"torchtitan.models.{family}", "--config", name]
    words += [f"--{key}={value}" for key, value in _FLAGS.items()]
    try:
        config = load_config(words, world_size=_RANKS)
        with_few_layers(config)
        joint = FakeRank(config, _RANKS, device="cpu").capture()
    except GraphTrainerError as error:
        # without the names that the row has already, and the remedy that is the same for all
        text = re.sub(r"^(.*?: base = \"\w+\": |--module \S+: )", "", str(error))
        return re.sub(r" Or choose another entry of \S+\.$", "", text)
    # A parameter without a gradient is one that the captured model leaves out.
    assert not joint.signature.parameters_without_grad, joint.signature.parameters_without_grad
    return CAPTURED


def row(family: str, entry: str, result: str) -> str:
    return f"| `{family}` | `{entry}` | {result} |"


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    print(*HEAD, *(row(*each, outcome(*each)) for each in decoders()), sep="\n")
