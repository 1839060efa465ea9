"""What the host takes to issue an op, without a kernel: the figures of [host] in configs/hardware.

    python -m benchmarks.host

Each figure is the CPU time of one op on tensors of 8 elements, in microseconds: the least of five
turns. An op of 8 elements computes for some nanoseconds, so that what is measured is dispatch.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_RANKS = 8
_PARAMETERS = 300  # Llama 3 8B has 291
_OPS = 100  # of a checkpointed function


def microseconds(call: Callable[[], object], turns: int, ops: int = 1) -> float:
    """Return the CPU time of one op: the least of five times `turns` calls of `ops` ops."""
    call()
    least = float("inf")
    for _ in range(5):
        start = time.process_time()
        for _ in range(turns):
            call()
        least = min(least, time.process_time() - start)
    return least / turns / ops * 1e6


def figures() -> dict[str, float]:
    """Measure all figures, in microseconds."""
    plain, recorded = torch.randn(8), torch.randn(8, requires_grad=True)
    mesh = init_device_mesh("cpu", (_RANKS,))
    sharded = DTensor.from_local(torch.randn(8), mesh, [Shard(0)])

    def chain(value: torch.Tensor) -> torch.Tensor:
        for _ in range(_OPS):
            value = value * plain
        return value

    def recompute(*_: object) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, recompute)
    full = functools.partial(checkpoint, chain, recorded, use_reentrant=False)
    selective = functools.partial(full, context_fn=contexts)
    parameters = []
    for _ in range(_PARAMETERS):
        parameter = torch.nn.Parameter(sharded.clone())
        parameter.grad = sharded.clone()
        parameters.append(parameter)
    gradients = [p.grad for p in parameters if p.grad is not None]
    optimizer = torch.optim.AdamW(parameters, fused=True)

    def clip() -> None:
        norm = get_total_norm(gradients, foreach=True)
        clip_grads_with_norm_(parameters, 1.0, norm, foreach=True)

    return {
        "op": microseconds(lambda: torch.mul(plain, plain), 3000),
        "op, recorded": microseconds(lambda: torch.mul(recorded, plain), 3000),
        "view": microseconds(lambda: plain.view(2, 4), 3000),
        "op on DTensors": microseconds(lambda: torch.mul(sharded, sharded), 3000),
        "op, recorded, in a function": microseconds(lambda: chain(recorded), 30, _OPS),
        "forward and backward": microseconds(lambda: chain(recorded).sum().backward(), 30, _OPS),
        "op in a full checkpoint": microseconds(full, 30, _OPS),
        "op in a selective checkpoint": microseconds(selective, 30, _OPS),
        "clipping a DTensor": microseconds(clip, 20, _PARAMETERS),
        "updating a DTensor": microseconds(optimizer.step, 20, _PARAMETERS),
    }


def main() -> None:
    """Print the table and one line of JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=_RANKS)
    measured = figures()
    for name, value in measured.items():
        print(f"{name:<32}{value:>8.1f} us")
    print(json.dumps({"torch": torch.__version__} | measured))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
