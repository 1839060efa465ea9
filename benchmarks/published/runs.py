"""The published runs, and what was left out. The published figures are read here and nowhere else.

All are planned as torchtitan 0.3.0 on FSDP2 would run them (`--like torchtitan`), those of other
trainers and of FSDP1 too: sharding, precision and checkpointing are theirs. Attention is what torch
chooses, and gradients are reduced in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

H100 = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3"
A100 = "pytorch/torchtitan, docs/performance.md as of 2024, Llama 3 on 64 A100 (80 GB)"
LLAMA_2 = "pytorch/torchtitan, docs/performance.md at commit 3faaa1a0d, Llama 2 on 64 A100 (80 GB)"
ASYNC_TP = "pytorch/torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md, vanilla TP"
LLAMA_405B = "pytorch/torchtitan, docs/performance.md as of late 2024, 405B on 128 H100 (94 GB)"
TITAN_929 = "pytorch/torchtitan issue 929, comment of 7 March 2025"
TITAN_1789 = "pytorch/torchtitan issue 1789: 16b.toml of October 2025, loss compiled alone"
TITAN_3816 = "pytorch/torchtitan issue 3816: expert parallelism 1, the loss compiled alone"
PITH_79 = "mlc-ai/pith-train issue 79: torchtitan, blocks and loss compiled"
TORCHAO = "pytorch/ao, torchao/float8/README.md of 0.10: torchtitan 0.0.2, bfloat16"
FMS = "foundation-model-stack/fms-fsdp, README: FSDP1 on torch 2.2, reductions in bfloat16"
PRIME = "PrimeIntellect-ai/prime-rl, benchmarks/baselines, sft-full, January and February 2026"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What was run, and on what."""

    name: str
    source: str
    hardware: str
    """The name of a profile."""
    ranks: int
    flags: tuple[str, ...]
    changes: Mapping[str, float] = field(default_factory=dict)
    """Fields of the profile that the source has other values of."""
    fuses_norms: bool = True
    """Whether one kernel computes an RMSNorm: PyTorch's from 2.9 on, Inductor's, or torchtitan's
    of 2024, which its configs of Llama 2 chose (norm_type = "fused_rmsnorm") and those of Llama 3
    did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published(Setup):
    """One run that somebody published."""

    tokens_per_second: float
    """Per GPU."""
    memory_gib: float | None = None
    """The most that the allocator reserved."""
    then: tuple[float | None, float | None] = (None, None)
    """Predicted by published throughput and memory on 24 November 2026, before the model of time
    had hosts, tiles, protocols and shared links."""
    kept_back: bool = False
    """Whether it is judged only: never in the errors of which bands are made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits(Setup):
    """One run that somebody published as running, or as out of memory."""

    fits: bool


def _8b(batch: int, backend: str, *more: str) -> tuple[str, ...]:
    return (
        *("--config", "8b", "--training.local_batch_size", str(batch)),
        *("--loss.type", "cross_entropy", "--compile.backend", backend, *more),
    )


def _70b(batch: int, tensor_parallel: int, backend: str) -> tuple[str, ...]:
    return (
        *("--config", "70b", "--training.local_batch_size", str(batch)),
        *("--loss.type", "cross_entropy", "--activation_checkpoint.type", "full"),
        *("--compile.backend", backend),
        *("--parallelism.tensor_parallel_degree", str(tensor_parallel)),
    )


_405B = (
    *("--config", "405b", "--training.local_batch_size", "2", "--compile.backend", "eager"),
    *("--loss.type", "cross_entropy", "--activation_checkpoint.type", "full"),
    *("--parallelism.tensor_parallel_degree", "8"),
)


def _llama2(size: str, batch: int, policy: str, backend: str = "eager") -> tuple[str, ...]:
    return (
        *("--module", "benchmarks.published.models", "--config", f"llama2_{size}"),
        *("--training.seq_len", "4096", "--training.local_batch_size", str(batch)),
        *("--loss.type", "cross_entropy", "--activation_checkpoint.type", policy),
        *("--compile.backend", backend),
    )


def _prime(*model: str) -> tuple[str, ...]:
    """Two microbatches of one sequence in each step of eight ranks."""
    return (
        *(*model, "--training.seq_len", "16384", "--training.local_batch_size", "1"),
        *("--training.global_batch_size", "16", "--loss.type", "cross_entropy"),
        *("--activation_checkpoint.type", "full", "--compile.backend", "inductor"),
    )


_QWEN3_4B = ("--module", "benchmarks.published.models", "--config", "qwen3_4b")
_QWEN3_MOE = ("--module", "graph_trainer.qwen3", "--config", "30b-a3b")

_EXPERTS = ("--activation_checkpoint.type", "selective", "--loss.type", "chunked_cross_entropy")


def _deepseek(experts: int, *loss: str) -> tuple[str, ...]:
    return (
        *("--module", "graph_trainer.deepseek_v3", "--config", "16b", *_EXPERTS, *loss),
        *("--training.local_batch_size", "4", "--compile.backend", "eager"),
        *("--parallelism.expert_parallel_degree", str(experts)),
    )


_QWEN3_30B = (
    *(*_QWEN3_MOE, *_EXPERTS),
    *("--training.seq_len", "8192", "--training.local_batch_size", "8"),
    *("--training.global_batch_size", "64", "--compile.backend", "inductor"),
)

# The README's "internode interconnect" is that of a node: the A100 and H100 machines of IBM Vela.
_FMS_A100 = {"network_bytes_per_second": 400e9 / 8 / 8}
_FMS_H100 = {"network_bytes_per_second": 800e9 / 8 / 8}

# FlashAttention-2 on GPUs whose profile has another: on Blackwell as many FLOP/s in each SM as on
# Hopper, 0.33 of 989e12 on 132 SMs, of which B200's 148 are 0.16 of 2250e12. An estimate: it has no
# kernels for Blackwell.
_FLASH_2_B200 = {"attention_efficiency": 0.16}
# FlashAttention-3, head size 128, causal, on an H100 SXM5: forward 600 and backward 518 TFLOP/s
# (its paper, Shah et al., 2024, figures 5 and 6), with 2.5 times the FLOPs in backward: together
# 539 of 989.
_FLASH_3 = {"attention_efficiency": 0.54}

RUNS = (
    Published(
        name="8B, 8 H100",
        source=H100,
        hardware="h100-grand-teton",
        ranks=8,
        flags=_8b(2, "eager"),
        fuses_norms=False,
        tokens_per_second=5762,
        memory_gib=82.4,
        then=(1.11, 0.97),
    ),
    Published(
        name="8B, 8 H100, compile",
        source=H100,
        hardware="h100-grand-teton",
        ranks=8,
        flags=_8b(2, "inductor"),
        tokens_per_second=6667,
        memory_gib=77.0,
        then=(1.12, 1.04),
    ),
    Published(
        name="8B, 128 H100",
        source=H100,
        hardware="h100-grand-teton",
        ranks=128,
        flags=_8b(2, "eager"),
        fuses_norms=False,
        tokens_per_second=5605,
        memory_gib=67.0,
        then=(1.14, 1.00),
    ),
    Published(
        name="8B, 128 H100, compile",
        source=H100,
        hardware="h100-grand-teton",
        ranks=128,
        flags=_8b(2, "inductor"),
        tokens_per_second=6514,
        memory_gib=62.0,
        then=(1.15, 1.09),
    ),
    Published(
        name="8B batch 1, 8 H100, compile",
        source=TITAN_929,
        hardware="h100-grand-teton",
        ranks=8,
        flags=_8b(1, "inductor"),
        tokens_per_second=6500,
        memory_gib=47.65,
    ),
    Published(
        name="8B, 64 A100",
        source=A100,
        hardware="a100-80g",
        ranks=64,
        flags=_8b(1, "eager"),
        fuses_norms=False,
        tokens_per_second=2973,
        then=(1.08, None),
    ),
    Published(
        name="70B, 64 A100, full AC",
        source=A100,
        hardware="a100-80g",
        ranks=64,
        flags=_70b(1, 1, "eager"),
        fuses_norms=False,
        tokens_per_second=331,
        then=(1.11, None),
    ),
    Published(
        name="Llama 2 13B, 64 A100, no AC",
        source=LLAMA_2,
        hardware="a100-80g",
        ranks=64,
        flags=_llama2("13b", 2, "none"),
        tokens_per_second=2162,
    ),
    Published(
        name="Llama 2 13B, 64 A100, AC of layers",
        source=LLAMA_2,
        hardware="a100-80g",
        ranks=64,
        flags=_llama2("13b", 2, "layers"),
        tokens_per_second=1914,
    ),
    Published(
        name="Llama 2 13B, 64 A100, AC of ops",
        source=LLAMA_2,
        hardware="a100-80g",
        ranks=64,
        flags=_llama2("13b", 2, "selective"),
        tokens_per_second=1904,
    ),
    Published(
        name="Llama 2 7B, 128 A100, compile",
        source=FMS,
        hardware="a100-80g",
        ranks=128,
        flags=_llama2("7b", 2, "none", "inductor"),
        changes=_FMS_A100,
        tokens_per_second=4550,
    ),
    Published(
        name="Llama 2 7B, 96 H100, compile",
        source=FMS,
        hardware="h100-sxm",
        ranks=96,
        flags=_llama2("7b", 2, "none", "inductor"),
        changes=_FMS_H100,
        tokens_per_second=9600,
    ),
    Published(
        name="Qwen3 4B, 8 H100, compile",
        source=PRIME,
        hardware="h100-sxm",
        ranks=8,
        flags=_prime(*_QWEN3_4B),
        tokens_per_second=6215,
        memory_gib=54.6,
    ),
    Published(
        name="Qwen3 4B, 8 H200, compile",
        source=PRIME,
        hardware="h200-sxm",
        ranks=8,
        flags=_prime(*_QWEN3_4B),
        tokens_per_second=6643,
        memory_gib=54.6,
    ),
    Published(
        name="Qwen3 4B, 8 B200, compile",
        source=PRIME,
        hardware="b200",
        ranks=8,
        flags=_prime(*_QWEN3_4B),
        changes=_FLASH_2_B200,
        tokens_per_second=8544,
        memory_gib=54.6,
    ),
    Published(
        name="Qwen3 30B-A3B, 8 H200, compile",
        source=PRIME,
        hardware="h200-sxm",
        ranks=8,
        flags=_prime(*_QWEN3_MOE),
        changes=_FLASH_3,
        tokens_per_second=4378,
        memory_gib=106.4,
    ),
    Published(
        name="DeepSeek 16B, 8 B200",
        source=TITAN_3816,
        hardware="b200",
        ranks=8,
        flags=_deepseek(1),
        tokens_per_second=17_500,
        then=(1.86, None),
    ),
    Published(
        name="Qwen3 30B-A3B, 8 B200",
        source=PITH_79,
        hardware="b200",
        ranks=8,
        flags=_QWEN3_30B,
        tokens_per_second=19_500,
        memory_gib=141.8,
        then=(1.28, 1.04),
    ),
    # By the author of issue 929, in the memory of its machines.
    Published(
        name="8B batch 1, 8 H100, compile, torchao",
        source=TORCHAO,
        hardware="h100-grand-teton",
        ranks=8,
        flags=_8b(1, "inductor"),
        tokens_per_second=6150,
        memory_gib=47.65,
        kept_back=True,
    ),
    Published(
        name="Qwen3 30B-A3B, 8 B200, prime-rl",
        source=PRIME,
        hardware="b200",
        ranks=8,
        flags=_prime(*_QWEN3_MOE),
        changes=_FLASH_2_B200,
        tokens_per_second=6958,
        memory_gib=111.8,
        kept_back=True,
    ),
    Published(
        name="Llama 2 70B, batch 1, AC of ops",
        source=LLAMA_2,
        hardware="a100-80g",
        ranks=64,
        flags=_llama2("70b", 1, "selective"),
        tokens_per_second=355,
        kept_back=True,
    ),
    Published(
        name="Llama 2 70B, 64 A100, full AC",
        source=LLAMA_2,
        hardware="a100-80g",
        ranks=64,
        flags=_llama2("70b", 2, "full"),
        tokens_per_second=353,
        kept_back=True,
    ),
    Published(
        name="8B, 64 H100, TP 8, compile",
        source=ASYNC_TP,
        hardware="h100-grand-teton",
        ranks=64,
        flags=_8b(12, "inductor", "--parallelism.tensor_parallel_degree", "8"),
        tokens_per_second=4378,
        kept_back=True,
    ),
    Published(
        name="70B, 256 H100, TP 8, compile",
        source=ASYNC_TP,
        hardware="h100-grand-teton",
        ranks=256,
        flags=_70b(16, 8, "inductor"),
        tokens_per_second=597.3,
        kept_back=True,
    ),
    Published(
        name="405B, 128 H100, TP 8, full AC",
        source=LLAMA_405B,
        hardware="h100-grand-teton",
        ranks=128,
        flags=_405B,
        fuses_norms=False,
        tokens_per_second=109,
        kept_back=True,
    ),
)
"""Ordered so that runs of one captured step follow each other."""

FITS = (
    Fits(
        name="Llama 2 13B, 64 A100, no AC",
        source=LLAMA_2,
        hardware="a100-80g",
        ranks=64,
        flags=_llama2("13b", 2, "none"),
        fits=True,
    ),
    Fits(
        name="Llama 2 70B, 64 A100, full AC",
        source=LLAMA_2,
        hardware="a100-80g",
        ranks=64,
        flags=_llama2("70b", 2, "full"),
        fits=True,
    ),
    Fits(
        name="Llama 2 70B, 64 A100, AC of layers",
        source=LLAMA_2,
        hardware="a100-80g",
        ranks=64,
        flags=_llama2("70b", 2, "layers"),
        fits=False,
    ),
    Fits(
        name="Llama 2 70B, 64 A100, AC of ops",
        source=LLAMA_2,
        hardware="a100-80g",
        ranks=64,
        flags=_llama2("70b", 2, "selective"),
        fits=False,
    ),
    Fits(
        name="Llama 2 70B, batch 1, AC of ops",
        source=LLAMA_2,
        hardware="a100-80g",
        ranks=64,
        flags=_llama2("70b", 1, "selective"),
        fits=True,
    ),
    Fits(
        name="DeepSeek 16B, EP 8, 8 H100",
        source=TITAN_1789,
        hardware="h100-sxm",
        ranks=8,
        flags=_deepseek(8, "--loss.type", "cross_entropy"),
        fits=False,
    ),
    Fits(
        name="DeepSeek 16B, EP 1, 8 H100",
        source=TITAN_1789,
        hardware="h100-sxm",
        ranks=8,
        flags=_deepseek(1, "--loss.type", "cross_entropy"),
        fits=True,
    ),
)
"""Runs that ended for want of memory, and their neighbours that ran."""

LEFT_OUT = (
    "Llama 2 13B, 34B and 70B of fms-fsdp: the share of blocks that is recomputed is not stated",
    "Llama 2 on 464 H100 (PyTorch blog): MFU alone, and that share is not stated",
    "8B on 32 and 64 H200 (Trainy), and all float8 rows of torchtitan: float8 is not planned",
    "8B with long sequences and 405B on 512 H100 (torchtitan): float8; benchmarks.pipelines has "
    "the ratio of two schedules",
    "70B and 8B with asynchronous TP (torchtitan): matmuls that overlap with collectives",
    "MPT (MosaicML llm-foundry): ALiBi and another feed-forward, no model of torchtitan's",
    "Llama 7B on 8 H100 (lingua issue 56): the vocabulary is not stated",
    "7B, 13B and 70B on H200 (KempnerForge): batch and vocabulary are not stated with the results",
    "Qwen 3 and Llama by prime-rl's RL trainer: its loss is in chunks of its own",
    "Qwen 3 4B at sequence 65,536 (prime-rl): longer than the model's 40,960 positions",
    "405B on 128 H100 without TP, out of memory (torchtitan): the batch is not stated",
)
"""What names too little, or runs what the planner cannot describe, with the reason."""
