"""Llama 3 debug model on eight gloo ranks: numbers, collectives and memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.launch import run_ranks

# one launch of eight ranks on two cores runs all cases of this file
pytestmark = pytest.mark.timeout(1800)

WORKER = Path(__file__).with_name("llama_worker.py")
POLICIES = ("always", "never", "default")

# eight ranks of one sequence, four of two, and one of eight: the same global batch
_COMMON = ["--training.seq_len", "64", "--metrics.log_freq", "1"]
_FP32 = ["--training.mixed_precision_param", "float32"]
_MESHES = {
    "fsdp8": ["--parallelism.data_parallel_shard_degree", "8", "--training.local_batch_size", "1"],
    "fsdp4_tp2": [
        *("--parallelism.data_parallel_shard_degree", "4"),
        *("--parallelism.tensor_parallel_degree", "2"),
        *("--training.local_batch_size", "2"),
    ],
}
_DTYPES = {"fp32": _FP32, "bf16": []}
CASES = [(mesh, dtype) for mesh in _MESHES for dtype in _DTYPES]

# How far the gradient of one parameter may be from one rank's, as a relative L2 norm. Both
# sum the same products in another order, and each of the model's about 60 operators in a row
# (6 layers, 5 of them with a rounding of their own, forward and backward) rounds its result:
# independent roundings of unit u add up to sqrt(60) u of relative error on either side.
_UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-9}
GRADIENT_TOLERANCE = {dtype: math.sqrt(2 * 60) * u for dtype, u in _UNIT.items()}

# AdamW's first steps are sign(gradient) * lr, so a gradient element whose sign differs moves
# its weight the other way: losses of later steps are held to the gradients' relative error.
LOSS_TOLERANCE = GRADIENT_TOLERANCE


def _plan(folder: Path, name: str, cases: dict[str, Any], **more: Any) -> str:
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"folder": str(folder), "cases": cases, **more}))
    return str(path)


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """What each of eight ranks reports: every mesh, dtype and policy, in one launch."""
    folder = tmp_path_factory.mktemp("llama")
    one = {
        dtype: {
            "flags": [*_COMMON, *flags, "--training.local_batch_size", "8"],
            "make_reference": 1,
        }
        for dtype, flags in _DTYPES.items()
    }
    run_ranks(WORKER, 1, [_plan(folder, "one", one)], timeout=300)
    cases: dict[str, Any] = {
        f"{mesh}-{dtype}": {
            "flags": [*_COMMON, *_MESHES[mesh], *_DTYPES[dtype]],
            "policies": POLICIES,
            "reference": dtype,
        }
        for mesh, dtype in CASES
    }
    # weights large beside activations: sixteen tokens a rank
    cases["memory"] = {
        "flags": [*_MESHES["fsdp8"], "--training.seq_len", "16"],
        "policies": POLICIES,
        "memory": True,
    }
    yield run_ranks(WORKER, 8, [_plan(folder, "eight", cases, differ=True)], timeout=1500)


@pytest.mark.parametrize(("mesh", "dtype"), CASES)
@pytest.mark.parametrize("policy", POLICIES)
def test_three_steps_are_bitwise_equal_to_eager(
    eight: list[dict[str, Any]], mesh: str, dtype: str, policy: str
) -> None:
    for rank in eight:
        entry = rank["cases"][f"{mesh}-{dtype}"]["policies"][policy]
        assert entry["differing"] == []
        assert entry["gradients"] == 45


@pytest.mark.parametrize(("mesh", "dtype"), CASES)
def test_equal_to_one_rank_on_the_global_batch(
    eight: list[dict[str, Any]], mesh: str, dtype: str
) -> None:
    case = eight[0]["cases"][f"{mesh}-{dtype}"]
    for ours, reference in zip(case["losses"], case["reference_losses"], strict=True):
        assert ours == pytest.approx(reference, rel=LOSS_TOLERANCE[dtype])
    assert len(case["gradient_errors"]) == 45
    for name, error in case["gradient_errors"].items():
        assert error <= GRADIENT_TOLERANCE[dtype], name


@pytest.mark.parametrize(("mesh", "dtype"), CASES)
@pytest.mark.parametrize("policy", POLICIES)
def test_collectives_issued_are_those_in_the_graph(
    eight: list[dict[str, Any]], mesh: str, dtype: str, policy: str
) -> None:
    for rank in eight:
        _check_issued(rank["cases"][f"{mesh}-{dtype}"]["policies"][policy])


def _check_issued(entry: dict[str, Any]) -> None:
    kinds = dict(entry["graph"]["kinds"])
    # gloo itself does a reduce-scatter as an all-reduce, and calls it so
    reductions = kinds.pop("reduce_scatter_tensor", 0) + kinds.pop("all_reduce", 0)
    gathers = kinds.pop("all_gather_into_tensor", 0)
    assert kinds == {}
    assert entry["issued"] == {"gloo:all_gather": gathers, "gloo:all_reduce": reductions}


@pytest.mark.parametrize(("mesh", "dtype"), CASES)
def test_parameters_gathered_again_in_backward(
    eight: list[dict[str, Any]], mesh: str, dtype: str
) -> None:
    policies = eight[0]["cases"][f"{mesh}-{dtype}"]["policies"]
    unshards = {policy: entry["graph"]["unshards"] for policy, entry in policies.items()}
    everything = unshards["never"]["forward"]
    assert len(everything) == len(set(everything)) == 45
    for policy in POLICIES:
        assert sorted(unshards[policy]["forward"]) == sorted(everything)
    assert unshards["never"]["backward"] == []
    # backward of an embedding reads the tokens and no weight
    read = set(everything) - {"tok_embeddings.weight"}
    assert sorted(unshards["always"]["backward"]) == sorted(read)
    kept = {"norm.weight", "lm_head.weight"}
    assert sorted(unshards["default"]["backward"]) == sorted(read - kept)


def test_memory_follows_the_policy(eight: list[dict[str, Any]]) -> None:
    for rank in eight:
        memory = {p: entry["memory"] for p, entry in rank["cases"]["memory"]["policies"].items()}
        peak = {policy: found["peak"] for policy, found in memory.items()}
        assert peak["always"] <= peak["default"] < peak["never"]
        unsharded, last_bucket = memory["never"]["unsharded"], memory["never"]["last_bucket"]
        freed = {p: memory["never"]["border"] - memory[p]["border"] for p in POLICIES}
        assert freed["always"] >= 0.9 * unsharded
        assert freed["default"] >= 0.9 * (unsharded - last_bucket)


def test_ranks_whose_graphs_differ_are_refused(eight: list[dict[str, Any]]) -> None:
    messages = {rank["differ"] for rank in eight}
    assert len(messages) == 1, "every rank tells the same"
    (message,) = messages
    assert "rank 0 issues all_gather_into_tensor" in message
    assert "rank 1 issues all_gather_into_tensor" in message
    assert "would hang" in message


@pytest.fixture(scope="module")
def inductor(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two ranks with the whole graph compiled."""
    folder = tmp_path_factory.mktemp("inductor")
    case = {
        "flags": [*_COMMON, "--training.local_batch_size", "2"],
        "extra": ["--compile.backend", "inductor"],
        "policies": ["always"],
    }
    return run_ranks(WORKER, 2, [_plan(folder, "two", {"inductor": case})], timeout=900)


def test_inductor_trains_alike_and_keeps_every_collective(inductor: list[dict[str, Any]]) -> None:
    for rank in inductor:
        case = rank["cases"]["inductor"]
        entry = case["policies"]["always"]
        _check_issued(entry)
        # fused kernels round once where eager rounds at every operator
        for ours, eager in zip(entry["losses"], case["losses"], strict=True):
            assert ours == pytest.approx(eager, rel=LOSS_TOLERANCE["bf16"])
