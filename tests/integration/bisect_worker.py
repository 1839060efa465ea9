"""One rank of `graph-trainer bisect-passes` with a wrong pass in its list, for test_bisect.py.

The launch is the command's own. When it is done with the config's model, the same ranks try a
memory limit that their uneven shards put them on either side of: a second launch would cost more.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import graph_trainer as gt
from graph_trainer.cli import bisect
from graph_trainer.core.graph.annotations import (
    copy_annotations,
    infer_value,
    module_of,
)
from graph_trainer.core.passes.base import Pass, Stage
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.simulation.simulate import predicted_memory
from graph_trainer.core.training.step_cache import TrainStep
from graph_trainer.core.units import GIB
from graph_trainer.testing import mean_square
from graph_trainer.train import leave, run
from tests.unit.graphs import ALL_REDUCE, GATHER, SCATTER, Decoder, aten, c10d, hungry

RESULTS = "GRAPH_TRAINER_TEST_BISECT"
MODULE = "layers.3.feed_forward"
FACTOR = 1.0009765625  # 1 + 2**-10: no rounding takes it back in float32


def _wrong(joint: gt.JointGraph, options: Any, context: gt.PassContext) -> None:
    """On rank 1 the product in one feed-forward is a little more than it was."""
    if dist.get_rank() != 1:
        return
    product = next(
        n
        for n in joint.graph.nodes
        if n.target is aten.mul.Tensor and (module_of(n) or "").startswith(MODULE)
    )
    with joint.graph.inserting_after(product):
        more = joint.graph.call_function(aten.mul.Tensor, (product, FACTOR))
    more.meta["val"] = product.meta["val"]
    copy_annotations(product, more)
    product.replace_all_uses_with(more, delete_user_cb=lambda user: user is not more)


WRONG = Pass("wrong", Stage.CLEANUP, "for a test", _wrong)


def _split(joint: gt.JointGraph, options: Any, context: gt.PassContext) -> None:
    """A reduce-scatter and an all-gather in the place of an all-reduce: no simulation judges it."""
    reduce, *_ = joint.graph.find_nodes(op="call_function", target=ALL_REDUCE)
    (wait,) = reduce.users
    node, reduction, group = reduce.args
    for op, *args in (
        (SCATTER, reduction, 2, group),
        (c10d.wait_tensor.default,),
        (GATHER, 2, group),
        (c10d.wait_tensor.default,),
    ):
        with joint.graph.inserting_before(reduce):
            node = joint.graph.call_function(op, (node, *args))
        copy_annotations(reduce, node)
        infer_value(node)
    wait.replace_all_uses_with(node)
    joint.graph.erase_node(wait)
    joint.graph.erase_node(reduce)


def verified() -> str:
    """What `verify_passes` says of that."""
    torch.manual_seed(0)
    model = gt.simple_fsdp(Decoder(), init_device_mesh("cpu", (2,)), mode="replicate")
    joint = gt.capture(model, mean_square, (torch.randint(0, 12, (3, 5)),))
    split = Pass("split", Stage.CLEANUP, "for a test", _split)
    return gt.run_passes(joint, gt.PassConfig(passes=[split], verify_passes=True)).last.verified


def limited() -> dict[str, Any]:
    """A limit between what the optional pass would need here and on the other rank."""
    torch.manual_seed(0)
    # odd sizes, so that the first rank has more of every weight
    model = gt.simple_fsdp(Decoder(dim=7, hidden=15), init_device_mesh("cpu", (2,)))
    tokens = torch.randint(0, 12, (3, 5))
    joint = gt.capture(model, mean_square, (tokens,))
    extra = hungry(1000)
    gt.run_passes(joint, gt.PassConfig(passes=["default", extra]))
    mine = predicted_memory(joint, load_hardware("cpu")).peak_bytes
    peaks: list[int] = [0, 0]
    dist.all_gather_object(peaks, mine)

    def history(limit: float) -> list[str]:
        config = gt.PassConfig(passes=["default", extra], memory_limit_gib=limit / GIB)
        step = TrainStep(mean_square, passes=config)
        step(model, tokens)
        (joint,) = step.joint_graphs()
        return joint.history

    return {"peaks": peaks, "between": history(max(peaks) - 1), "above": history(max(peaks))}


def main() -> None:
    status = run(work=bisect.verify)
    path = Path(os.environ[RESULTS]) / f"{os.environ['RANK']}.json"
    path.write_text(json.dumps(limited() | {"verified": verified()}))
    dist.barrier()
    leave(status)


if __name__ == "__main__":
    main()
