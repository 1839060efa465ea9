"""The integration matrix: what is trained on real ranks, and what must hold of it.

To add a case, add a line to MATRIX: a name, how many ranks, flags as on the command line, the
reshard policies to run it with, and what must hold. test_matrix.py finds it there; all cases of
one number of ranks run in one launch. To see what one costs: `pytest tests/integration/
test_matrix.py -k NAME --durations 0 -rP` shows the seconds of each case of its launch.

The model is Llama 3's debug model with two layers, which have every kind of neighbour that six
have. Four ranks do, but where eight mean something: two axes of a mesh, each of two ranks or
more, beside a third, and fewer rows than ranks. Six ranks shard every weight unevenly.

Every policy runs wherever FSDP is on, in float32. bfloat16 changes which dtype a chain casts to
and reduces in, and that is the same chain on every mesh: it runs with every policy on fsdp4, and
with one on hsdp2x2 and on fsdp3_tp2. Sequences are short, because what is
tested is in the graph and not in the length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

Flags = dict[str, Any]

STEPS = 3
LAYERS = 2
GRADIENTS = 7 * LAYERS + 3
"""Of the model that with_few_layers leaves: seven weights a layer, embedding, norm and head."""


def with_few_layers(config: Any) -> None:
    """Leave LAYERS layers of the config's model, in place; one of transformers has its folder's."""
    model = config.model_spec.model
    if hasattr(model, "layers"):
        model.layers = model.layers[:LAYERS]


class Holds(Enum):
    """What must hold of a case, with every policy it runs with."""

    BITWISE = auto()
    """Loss, every gradient and the parameters after three steps are the eager model's, bit by
    bit, on every rank; validation losses too where validation is on. On CPU the default list holds
    it, as ranks add in rank order; on CUDA `compile.bitwise`, which each case gets there."""

    ONE_RANK = auto()
    """Losses and gradients are those of one rank on the global batch, within TOLERANCE."""

    COLLECTIVES = auto()
    """The process groups are asked for what the graph lists, no more and no less."""

    RESHARD = auto()
    """What backward gathers again is what the policy says. For cases with all three."""

    VALIDATION = auto()
    """Validation runs, and its loss is one rank's within TOLERANCE."""

    DOUBLE_BATCH = auto()
    """Accumulated gradients and losses are those of one batch of as many rows, within
    TOLERANCE."""

    REPEATS = auto()
    """Another run gives the same bits. For deterministic mode."""

    CLOSE = auto()
    """Losses are the eager model's within TOLERANCE. For backends that fuse."""


@dataclass(frozen=True)
class Case:
    """One model trained for STEPS steps, eagerly and captured."""

    name: str
    ranks: int
    flags: Flags
    policies: tuple[str, ...]
    holds: frozenset[Holds]

    @property
    def global_rows(self) -> int:
        """Sequences in one step, over all ranks and microbatches."""
        given = self.flags.get("training.global_batch_size")
        return given or self.flags["training.local_batch_size"] * self.data_ranks

    @property
    def data_ranks(self) -> int:
        return self.ranks // self.flags.get("parallelism.tensor_parallel_degree", 1)

    @property
    def eager(self) -> Flags:
        """Flags of the eager run. It has no graph that a budget could plan."""
        budget = self.flags.get("activation_checkpoint.type") == "budget"
        none = {"activation_checkpoint.type": "none"} if budget else {}
        return self.flags | {"compile.mode": "eager"} | none

    @property
    def on_one_rank(self) -> Flags:
        """Flags for one rank on the global batch."""
        dtype = "training.mixed_precision_param"
        return COMMON | {dtype: self.flags[dtype]} | rows(self.global_rows) | VALIDATE

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.flags["training.mixed_precision_param"]]


# How far the gradient of one parameter may be from one rank's, as a relative L2 norm. Both sum the
# same products in another order, and each of OPERATORS in a row rounds its result: n independent
# roundings of unit u add up to sqrt(n) u of relative error on either side. In a layer 13 round:
# norm, projection, rotation, scores, softmax, values, projection, sum; norm, projection, gate,
# projection, sum. Outside the layers embedding, norm, head and loss. Each forward and backward.
# Microbatches are other ranks' rows under another name: accumulating them sums the products of
# one batch in another order too, and the same bound holds.
#
# AdamW's first steps are sign(gradient) * lr, so a gradient element whose sign differs moves
# its weight the other way: losses of later steps are held to the gradients' relative error.
OPERATORS = 2 * (13 * LAYERS + 4)
TOLERANCE = {
    dtype: math.sqrt(2 * OPERATORS) * unit
    for dtype, unit in {"float32": 2**-24, "bfloat16": 2**-9}.items()
}


def shard(ranks: int) -> Flags:
    return {"parallelism.data_parallel_shard_degree": ranks}


def replicate(copies: int) -> Flags:
    return {"parallelism.data_parallel_replicate_degree": copies}


def tensor(ranks: int) -> Flags:
    return {"parallelism.tensor_parallel_degree": ranks}


def rows(sequences: int) -> Flags:
    """Sequences of a microbatch and data-parallel rank."""
    return {"training.local_batch_size": sequences}


def limit(gib: float) -> Flags:
    return {"compile.memory_limit_gib": gib}


COMMON: Flags = {"training.seq_len": 16, "metrics.log_freq": 1, "debug.seed": 42}
FP32: Flags = {"training.mixed_precision_param": "float32"}
BF16: Flags = {"training.mixed_precision_param": "bfloat16"}
VALIDATE: Flags = {"validator.enable": True, "validator.steps": 1}
ACCUMULATE: Flags = {"training.global_batch_size": 16}  # two microbatches of eight rows
BITWISE: Flags = {"compile.bitwise": True}
DETERMINISTIC: Flags = {"debug.deterministic": True}
INDUCTOR: Flags = {"compile.backend": "inductor"}
REGIONAL: Flags = {"compile.backend": "regional"}
PARTITIONED: Flags = {"compile.mode": "partitioned"}
SELECTIVE: Flags = {"activation_checkpoint.type": "selective"}
FULL: Flags = {"activation_checkpoint.type": "full"}
EVERY_SECOND: Flags = {"activation_checkpoint.type": "layers", "activation_checkpoint.layers": 2}
BUDGET: Flags = {"activation_checkpoint.type": "budget"}
# with the policy "always": what the project is known by, word for word
BY_NAME: Flags = {
    "module": "graph_trainer.llama3",
    "config": "graph_trainer_llama3_debugmodel",
    "compile.mode": "aot_fx_trace",
}
CHUNKED: Flags = {"loss.type": "chunked_cross_entropy"}

EVERY = ("always", "never", "default")
# "default" is "always" but for the last bucket: four ranks show it, and six in bf16.
BOTH = ("always", "never")
ALWAYS, NEVER, DEFAULT = ("always",), ("never",), ("default",)

TRAINS = frozenset({Holds.BITWISE, Holds.ONE_RANK, Holds.COLLECTIVES})
RESHARDS = TRAINS | {Holds.RESHARD}
VALIDATES = frozenset({Holds.VALIDATION})
ACCUMULATES = frozenset({Holds.DOUBLE_BATCH})
REPEATS = frozenset({Holds.BITWISE, Holds.REPEATS})
TAGGED = frozenset({Holds.BITWISE, Holds.COLLECTIVES})
"""Activation policies: tags on the graph against torchtitan's wrapped modules."""
FUSED = frozenset({Holds.CLOSE, Holds.COLLECTIVES})

# Meshes: data-parallel ranks times their rows are eight rows, on six ranks six.
FSDP4 = shard(4) | rows(2)
FSDP2_TP2 = shard(2) | tensor(2) | rows(4)
FSDP4_TP2 = shard(4) | tensor(2) | rows(2)
HSDP2X2 = replicate(2) | shard(2) | rows(2)
HSDP2X2_TP2 = replicate(2) | shard(2) | tensor(2) | rows(2)
DDP4 = replicate(4) | shard(1) | rows(2)
TP4 = shard(1) | tensor(4) | rows(8)
FSDP3_TP2 = shard(3) | tensor(2) | rows(2)  # three shards divide no weight evenly
FSDP2 = shard(2) | rows(4)
TP2 = shard(1) | tensor(2) | rows(8)

MATRIX = (
    Case("fsdp2_tp2_fp32", 4, FSDP2_TP2 | FP32, EVERY, RESHARDS - {Holds.ONE_RANK}),
    Case("fsdp4_fp32", 4, FSDP4 | FP32, EVERY, RESHARDS),
    Case("fsdp4_bf16", 4, BY_NAME | FSDP4 | BF16, ALWAYS, TRAINS),
    Case("fsdp4_bitwise_fp32", 4, FSDP4 | FP32 | BITWISE, ALWAYS, TRAINS - {Holds.ONE_RANK}),
    Case("fsdp4_tp2_fp32", 8, FSDP4_TP2 | FP32, BOTH, RESHARDS),
    Case("hsdp2x2_fp32", 4, HSDP2X2 | FP32, EVERY, RESHARDS),
    Case("hsdp2x2_bf16", 4, HSDP2X2 | BF16, NEVER, TRAINS),
    Case("hsdp2x2_tp2_fp32", 8, HSDP2X2_TP2 | FP32 | VALIDATE, BOTH, RESHARDS | VALIDATES),
    Case("ddp4_fp32", 4, DDP4 | FP32, DEFAULT, TRAINS),
    Case("tp4_fp32", 4, TP4 | FP32 | VALIDATE, DEFAULT, TRAINS | VALIDATES),
    Case("fsdp3_tp2_fp32", 6, FSDP3_TP2 | FP32 | VALIDATE, BOTH, RESHARDS | VALIDATES),
    Case("fsdp3_tp2_bf16", 6, FSDP3_TP2 | BF16, DEFAULT, TRAINS),
    Case("accumulate_fp32", 2, FSDP2 | FP32 | ACCUMULATE, DEFAULT, TRAINS | ACCUMULATES),
    Case("deterministic_bf16", 2, FSDP2 | BF16 | DETERMINISTIC, DEFAULT, REPEATS),
    Case("fsdp2_chunked_fp32", 2, FSDP2 | FP32 | CHUNKED, ("always", "default"), TRAINS),
    Case("tp2_chunked_fp32", 2, TP2 | FP32 | CHUNKED, DEFAULT, TRAINS),
    Case("fsdp2_tp2_selective_bf16", 4, FSDP2_TP2 | BF16 | SELECTIVE, ALWAYS, TAGGED),
    Case("hsdp2x2_full_fp32", 4, HSDP2X2 | FP32 | FULL, ALWAYS, TAGGED),
    Case("fsdp2_tp2_layers_fp32", 4, FSDP2_TP2 | FP32 | EVERY_SECOND, ALWAYS, TAGGED),
    Case("fsdp3_tp2_full_fp32", 6, FSDP3_TP2 | FP32 | FULL, DEFAULT, TAGGED),
    # between what the step needs with everything recomputed and with nothing
    Case("fsdp2_tp2_budget_bf16", 4, FSDP2_TP2 | BF16 | BUDGET | limit(0.027), ("auto",), TAGGED),
    Case("fsdp3_tp2_budget_fp32", 6, FSDP3_TP2 | FP32 | BUDGET | limit(0.0215), ALWAYS, TAGGED),
    Case("fsdp2_tp2_partitioned_fp32", 4, FSDP2_TP2 | FP32 | PARTITIONED | FULL, ALWAYS, TAGGED),
    Case(
        "accumulate_partitioned_bf16", 2, FSDP2 | BF16 | PARTITIONED | ACCUMULATE, DEFAULT, TAGGED
    ),
    Case("fsdp2_inductor_bf16", 2, FSDP2 | BF16 | INDUCTOR, ALWAYS, FUSED),
    Case("tp2_inductor_fp32", 2, TP2 | FP32 | INDUCTOR, DEFAULT, FUSED),
    Case("fsdp2_regional_bf16", 2, FSDP2 | BF16 | REGIONAL, ALWAYS, FUSED),
    Case("tp2_regional_fp32", 2, TP2 | FP32 | REGIONAL, DEFAULT, FUSED),
)

QUICK = ("fsdp2_tp2_fp32",)
"""Cases that ./run_tests.sh runs without --full: sharded and tensor parallel, every policy."""


def holding(what: Holds) -> list[Case]:
    """The cases of which something must hold."""
    return [case for case in MATRIX if what in case.holds]


def arguments(flags: Flags) -> list[str]:
    """Flags as words of a command line; True is a flag without a value."""
    words = []
    for key, value in flags.items():
        words += [f"--{key}"] if value is True else [f"--{key}", str(value)]
    return words
