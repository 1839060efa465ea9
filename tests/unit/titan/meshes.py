"""On which meshes each family is trained by tests of real ranks, for docs/models.md and its test.

`python -m tests.unit.titan.meshes` prints the page's table.
"""

from __future__ import annotations

from tests.integration.expert_cases import CASES
from tests.integration.matrix import Flags, Holds, holding

HEAD = ("| Model | Meshes |", "|---|---|")

_NAMES = {
    ("llama3", "debugmodel"): "Llama 3",
    ("qwen3", "debugmodel"): "Qwen 3",
    ("qwen3", "debugmodel_moe"): "Qwen 3, mixture of experts",
    ("deepseek_v3", "debugmodel"): "DeepSeek V3",
}


def mesh_of(flags: Flags) -> str:
    """Name a mesh by its degrees, as "FSDP 2 x TP 2"."""
    degrees = {
        kind: flags.get(f"parallelism.{key}_degree", 1)
        for kind, key in (
            ("copies", "data_parallel_replicate"),
            ("shards", "data_parallel_shard"),
            ("TP", "tensor_parallel"),
            ("CP", "context_parallel"),
            ("EP", "expert_parallel"),
        )
    }
    copies, shards = degrees.pop("copies"), degrees.pop("shards")
    parts = []
    if copies > 1 and (shards > 1 or degrees["CP"] > 1):  # the ranks of CP share parameters too
        parts.append(f"HSDP {copies} x {shards}")
    elif copies > 1:
        parts.append(f"DDP {copies}")
    elif shards > 1:
        parts.append(f"FSDP {shards}")
    return " x ".join(
        parts + [f"{kind} {degree}" for kind, degree in degrees.items() if degree > 1]
    )


def table() -> list[str]:
    """Return the lines of the table: where loss and gradients are the eager model's bits."""
    trained = [case.flags for case in holding(Holds.BITWISE)]
    trained += [case.flags for case in CASES if not case.compiled]
    lines = []
    for model, name in _NAMES.items():
        meshes = {mesh_of(flags) for flags in trained if _model_of(flags) == model}
        lines.append(f"| {name} | {'; '.join(sorted(meshes))} |")
    return [*HEAD, *lines]


def _model_of(flags: Flags) -> tuple[str, str]:
    module = flags.get("module", "graph_trainer.llama3").rpartition(".")[2]
    return module, flags.get("config", "debugmodel").removeprefix("graph_trainer_llama3_")


if __name__ == "__main__":
    print(*table(), sep="\n")
