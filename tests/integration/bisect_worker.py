"""One rank of `graph-trainer bisect-passes` with a wrong pass in its list, for test_bisect.py.

The launch is the command's own. When it is done with the config's model, the same ranks examine
a tiny one, and try a memory limit that their uneven shards put them on either side of: a second
launch would cost more than all of it.
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
from graph_trainer.cli import bisect_worker as worker
from graph_trainer.core.analysis.memory import memory_of
from graph_trainer.core.bisect.search import bisect_passes
from graph_trainer.core.graph.annotations import (
    copy_annotations,
    module_of,
)
from graph_trainer.core.passes.base import Pass, Stage
from graph_trainer.core.runtime.step_cache import TrainStep
from graph_trainer.core.units import GIB
from graph_trainer.train import leave, run
from tests.unit.graphs import Decoder, aten, hungry, mean_square

RESULTS = "GRAPH_TRAINER_TEST_BISECT"
MODULE = "layers.3.feed_forward"
FACTOR = 1.0009765625  # 1 + 2**-10: no rounding takes it back in float32


def _wrong(joint: gt.JointGraph, options: Any, context: gt.PassContext) -> None:
    """The product in one feed-forward is a little more than it was."""
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


def _other_order(joint: gt.JointGraph, options: Any, context: gt.PassContext) -> None:
    """Rank 1 adds up a weight's gradient from two halves of the batch."""
    product = next(n for n in reversed(joint.graph.nodes) if n.target is aten.mm.default)
    a, b = product.args
    width = a.meta["val"].shape[1]
    parts = []
    with joint.graph.inserting_before(product):
        for start, stop in ((width // 2, width), (0, width // 2)):
            left = joint.graph.call_function(aten.slice.Tensor, (a, 1, start, stop))
            right = joint.graph.call_function(aten.slice.Tensor, (b, 0, start, stop))
            part = joint.graph.call_function(aten.mm.default, (left, right))
            left.meta["val"] = a.meta["val"][:, start:stop]
            right.meta["val"] = b.meta["val"][start:stop]
            parts.append(part)
            for node in (left, right, part):
                copy_annotations(product, node)
        both = joint.graph.call_function(aten.add.Tensor, tuple(parts))
    for node in (*parts, both):
        node.meta["val"] = product.meta["val"]
        copy_annotations(product, node)
    product.replace_all_uses_with(both)
    joint.graph.erase_node(product)


def on_rank_1(function: Any) -> Any:
    """A pass that only one rank gets wrong."""
    return lambda *given: function(*given) if dist.get_rank() == 1 else None


WRONG = Pass("wrong", Stage.CLEANUP, "for a test", _wrong)
OTHER_ORDER = Pass("other_order", Stage.CLEANUP, "for a test", on_rank_1(_other_order))


def sharded() -> tuple[torch.nn.Module, torch.Tensor]:
    """A decoder of odd sizes, so that the first rank has more of every weight."""
    torch.manual_seed(0)
    model = gt.simple_fsdp(Decoder(dim=7, hidden=15), init_device_mesh("cpu", (2,)))
    return model, torch.randint(0, 12, (3, 5))


def reordered() -> dict[str, Any]:
    model, tokens = sharded()
    passes = gt.PassConfig(passes=["normalize_views", OTHER_ORDER])
    return bisect_passes(model, mean_square, (tokens,), passes=passes).to_dict()


def limited() -> dict[str, Any]:
    """A limit between what the optional pass would need here and on the other rank."""
    model, tokens = sharded()
    joint = gt.capture(model, mean_square, (tokens,))
    extra = hungry(1000)
    gt.run_passes(joint, gt.PassConfig(passes=["default", extra]))
    mine = memory_of(joint).peak_bytes
    peaks: list[int] = [0, 0]
    dist.all_gather_object(peaks, mine)

    def history(limit: float, optional: Pass = extra) -> list[str]:
        config = gt.PassConfig(passes=["default", optional], memory_limit_gib=limit / GIB)
        step = TrainStep(mean_square, passes=config)
        step(model, tokens)
        (joint,) = step.joint_graphs()
        return joint.history

    def refusal(limit: float, optional: Pass = extra) -> str:
        try:
            history(limit, optional)
        except gt.GraphTrainerError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def lost(joint: gt.JointGraph, options: Any, context: gt.PassContext) -> None:
        raise ValueError("lost")

    failing = Pass("failing", Stage.SCHEDULE, "for a test", on_rank_1(lost), optional=True)
    return {
        "peaks": peaks,
        "between": history(max(peaks) - 1),
        "above": history(max(peaks)),
        "below": refusal(1),
        "failing": refusal(max(peaks), failing),
    }


def main() -> None:
    status = run(work=worker.main)
    if status == 0:
        results = {"reordered": reordered(), "limited": limited()}
        path = Path(os.environ[RESULTS]) / f"{os.environ['RANK']}.json"
        path.write_text(json.dumps(results))
        dist.barrier()
    leave(status)


if __name__ == "__main__":
    main()
