"""The integration matrix: what is trained on real ranks, and what must hold of it.

To add a case, add a line to MATRIX: a name, how many ranks, flags as on the command line, the
reshard policies to run it with, and what must hold. test_matrix.py finds it there; all cases of
one number of ranks run in one launch. To see what one costs: `pytest tests/integration/
test_matrix.py -k NAME --durations 0 -rP` shows the seconds of each case of its launch.

The model is Llama 3's debug model with two layers, which have every kind of neighbour that six
have, or another one of MODELS with two of each kind. Four ranks do, but where eight mean something:
two axes of a mesh, each of two ranks or more, beside a third, and fewer rows than ranks. Six ranks
shard every weight unevenly.

The policies "always" and "never" run on each kind of mesh with FSDP, in float32, and on eight
ranks, where two kinds meet, "always" alone. bfloat16 changes which dtype
a chain casts to and reduces in, and that is the same chain on every mesh: it runs with one policy,
on fsdp4, hsdp2x2 and fsdp3_tp2. Sequences are short, because what is tested is in the graph and
not in the length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from tests.layers import OF_EACH_KIND

Flags = dict[str, Any]

STEPS = 3
LAYERS = OF_EACH_KIND
GRADIENTS = 7 * LAYERS + 3
"""Of the model that with_few_layers leaves: seven weights a layer, embedding, norm and head."""


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
class Model:
    """What is trained, and what its numbers are held to."""

    flags: Flags
    gradients: int
    """Its parameters, all of which have one."""

    operators: int
    """The rounding operators one after the other in a step; see OPERATORS."""

    in_bfloat16: bool = False
    """Whether a part of it computes in bfloat16 whatever the dtype, as torchtitan's experts do."""


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
        shared = ("parallelism.tensor_parallel_degree", "parallelism.context_parallel_degree")
        return self.ranks // math.prod(self.flags.get(key, 1) for key in shared)

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
        common = COMMON | {dtype: self.flags[dtype]} | rows(self.global_rows) | self.model.flags
        # torchtitan's eager validation gives its multi-token prediction loss no positions
        return common if self.model is DEEPSEEK_V3_MTP else common | VALIDATE

    @property
    def model(self) -> Model:
        named = [m for m in MODELS if m.flags and m.flags.items() <= self.flags.items()]
        return named[0] if named else LLAMA3

    @property
    def tolerance(self) -> float:
        model = self.model
        dtype = "bfloat16" if model.in_bfloat16 else self.flags["training.mixed_precision_param"]
        return bound(model.operators, dtype)


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
UNIT = {"float32": 2**-24, "bfloat16": 2**-9}


def bound(operators: int, dtype: str) -> float:
    return math.sqrt(2 * operators) * UNIT[dtype]


TOLERANCE = {dtype: bound(OPERATORS, dtype) for dtype in UNIT}

# Qwen 3 adds norms of queries and keys. The gradients of their weights add up every head of every
# token in a row: partial sums of n addends of random sign, each rounded, are off by sqrt(n / 2) u,
# as n / 2 operators are. Whole rows are added elsewhere, of which there are too few to count.
#
# torchtitan's experts compute in bfloat16 in any dtype, and its unit holds. In place of the
# feed-forward's five, experts have ten operators: norm, scores, softmax, their normalisation,
# projection, gate, projection, weighting, the sum over experts, sum. DeepSeek V3's attention has a
# projection and a norm more, its experts the sum with the shared expert, and its first layer a
# feed-forward. with_few_layers leaves 16 experts: the scores of two of 64 nearly tie for some
# token, and rounding would exchange the two.
HEADS = 16
LLAMA3 = Model({}, GRADIENTS, OPERATORS)
_QWEN3: Flags = {"module": "graph_trainer.qwen3", "config": "debugmodel"}
_DEEPSEEK: Flags = {"module": "graph_trainer.deepseek_v3", "config": "debugmodel"}
_DEEPSEEK_MTP: Flags = {
    "module": "torchtitan.models.deepseek_v3",
    "config": "deepseek_v3_debugmodel_mtp",
    "activation_checkpoint.type": "none",
}
QWEN3 = Model(_QWEN3, 20, 2 * (14 * LAYERS + 4) + 8 * 16 * HEADS // 2)
QWEN3_MOE = Model(
    _QWEN3 | {"config": "debugmodel_moe"},
    23,
    2 * (19 * LAYERS + 4),
    in_bfloat16=True,
)
DEEPSEEK_V3 = Model(_DEEPSEEK, 41, 2 * (15 + 21 * LAYERS + 4), in_bfloat16=True)
# one layer more, and before it two norms and the projection of both
DEEPSEEK_V3_MTP = Model(_DEEPSEEK_MTP, 59, 2 * (15 + 21 * (LAYERS + 1) + 2 + 4), in_bfloat16=True)
MODELS = (LLAMA3, QWEN3, QWEN3_MOE, DEEPSEEK_V3, DEEPSEEK_V3_MTP)


def shard(ranks: int) -> Flags:
    return {"parallelism.data_parallel_shard_degree": ranks}


def replicate(copies: int) -> Flags:
    return {"parallelism.data_parallel_replicate_degree": copies}


def tensor(ranks: int) -> Flags:
    return {"parallelism.tensor_parallel_degree": ranks}


def context(ranks: int, method: str = "all_gather") -> Flags:
    key = "parallelism.context_parallel"
    return {f"{key}_degree": ranks, f"{key}_method": method}


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
DOCUMENTS: Flags = {"parallelism.document_mask": True}
CHUNKED: Flags = {"loss.type": "chunked_cross_entropy"}

EVERY = ("always", "never", "default")
# "default" is "always" but for the last bucket: one mesh shows it, and six ranks in bf16.
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
HSDP2X2 = replicate(2) | shard(2) | rows(2)
HSDP2X2_TP2 = replicate(2) | shard(2) | tensor(2) | rows(2)
DDP4 = replicate(4) | shard(1) | rows(2)
TP4 = shard(1) | tensor(4) | rows(8)
FSDP3_TP2 = shard(3) | tensor(2) | rows(2)  # three shards divide no weight evenly
FSDP2 = shard(2) | rows(4)
TP2 = shard(1) | tensor(2) | rows(8)
CP2 = shard(1) | context(2) | rows(8)  # FSDP and attention communicate over the same two ranks
CP4_ULYSSES = shard(1) | context(4, "ulysses") | rows(8)
FSDP2_CP2 = shard(2) | context(2) | rows(4)
HSDP2_CP2 = replicate(2) | shard(1) | context(2, "ulysses") | rows(4)
FSDP2_CP2_TP2 = shard(2) | context(2) | tensor(2) | rows(4)

MATRIX = (
    Case("fsdp2_tp2_fp32", 4, FSDP2_TP2 | FP32, EVERY, RESHARDS - {Holds.ONE_RANK}),
    Case("fsdp4_fp32", 4, FSDP4 | FP32, BOTH, RESHARDS),
    Case("fsdp4_bf16", 4, BY_NAME | FSDP4 | BF16, ALWAYS, TRAINS),
    Case("hsdp2x2_fp32", 4, HSDP2X2 | FP32, BOTH, RESHARDS),
    Case("hsdp2x2_bitwise_bf16", 4, HSDP2X2 | BF16 | BITWISE, NEVER, TRAINS),
    Case("hsdp2x2_tp2_fp32", 8, HSDP2X2_TP2 | FP32 | VALIDATE, ALWAYS, TRAINS | VALIDATES),
    Case("ddp4_fp32", 4, DDP4 | FP32, DEFAULT, TRAINS),
    Case("tp4_fp32", 4, TP4 | FP32 | VALIDATE, DEFAULT, TRAINS | VALIDATES),
    Case("fsdp3_tp2_fp32", 6, FSDP3_TP2 | FP32 | VALIDATE, BOTH, RESHARDS | VALIDATES),
    Case("fsdp3_tp2_bf16", 6, FSDP3_TP2 | BF16, DEFAULT, TRAINS),
    Case("accumulate_fp32", 2, FSDP2 | FP32 | ACCUMULATE, DEFAULT, TRAINS | ACCUMULATES),
    Case("deterministic_bf16", 2, FSDP2 | BF16 | DETERMINISTIC, DEFAULT, REPEATS),
    Case("fsdp2_chunked_fp32", 2, FSDP2 | FP32 | CHUNKED, ("always", "default"), TRAINS),
    Case("tp2_chunked_fp32", 2, TP2 | FP32 | CHUNKED, DEFAULT, TRAINS),
    Case("fsdp2_tp2_selective_bf16", 4, FSDP2_TP2 | BF16 | SELECTIVE, ALWAYS, TAGGED),
    Case("fsdp2_layers_fp32", 2, FSDP2 | FP32 | EVERY_SECOND, ALWAYS, TAGGED),
    # between what the step needs with everything recomputed and with nothing
    Case("fsdp2_tp2_budget_bf16", 4, FSDP2_TP2 | BF16 | BUDGET | limit(0.027), ("auto",), TAGGED),
    Case("fsdp3_tp2_budget_fp32", 6, FSDP3_TP2 | FP32 | BUDGET | limit(0.0215), ALWAYS, TAGGED),
    Case("fsdp2_tp2_partitioned_fp32", 4, FSDP2_TP2 | FP32 | PARTITIONED | FULL, ALWAYS, TAGGED),
    Case(
        "accumulate_partitioned_bf16", 2, FSDP2 | BF16 | PARTITIONED | ACCUMULATE, DEFAULT, TAGGED
    ),
    Case("cp2_fp32", 2, CP2 | FP32 | VALIDATE, BOTH, RESHARDS | VALIDATES),
    Case("cp2_full_bf16", 2, CP2 | BF16 | FULL, ALWAYS, TAGGED),
    Case("cp2_selective_partitioned_fp32", 2, CP2 | FP32 | SELECTIVE | PARTITIONED, ALWAYS, TAGGED),
    Case("cp2_documents_fp32", 2, CP2 | FP32 | DOCUMENTS, ALWAYS, TAGGED),
    Case("cp4_ulysses_fp32", 4, CP4_ULYSSES | FP32 | VALIDATE, ALWAYS, TRAINS | VALIDATES),
    Case("hsdp2_cp2_ulysses_full_fp32", 4, HSDP2_CP2 | FP32 | FULL, ALWAYS, TRAINS),
    Case("fsdp2_cp2_bf16", 4, FSDP2_CP2 | BF16, DEFAULT, TRAINS),
    Case("fsdp2_cp2_tp2_fp32", 8, FSDP2_CP2_TP2 | FP32 | VALIDATE, ALWAYS, TRAINS | VALIDATES),
    Case("fsdp2_inductor_bf16", 2, FSDP2 | BF16 | INDUCTOR, ALWAYS, FUSED),
    Case("tp2_regional_fp32", 2, TP2 | FP32 | REGIONAL, DEFAULT, FUSED),
    Case("qwen3_fsdp2", 2, QWEN3.flags | FSDP2 | FP32, DEFAULT, TRAINS),
    Case("qwen3_fsdp2_tp2", 4, QWEN3.flags | FSDP2_TP2 | FP32, DEFAULT, TRAINS),
    Case("qwen3_cp2", 2, QWEN3.flags | CP2 | FP32, DEFAULT, TRAINS),
    Case("qwen3_moe_fsdp2_tp2", 4, QWEN3_MOE.flags | FSDP2_TP2 | FP32, DEFAULT, TRAINS),
    Case("deepseek_v3_fsdp2", 2, DEEPSEEK_V3.flags | FSDP2 | FP32, DEFAULT, TRAINS),
    Case("deepseek_v3_fsdp2_tp2", 4, DEEPSEEK_V3.flags | FSDP2_TP2 | FP32, DEFAULT, TRAINS),
    Case("deepseek_v3_mtp_tp2", 2, DEEPSEEK_V3_MTP.flags | TP2 | FP32, DEFAULT, TRAINS),
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
