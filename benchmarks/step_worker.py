"""One rank of `python -m benchmarks.step`: trains every variant in turn and reports what it saw."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.turns import orders
from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.signature import Signature
from graph_trainer.core.runtime.live_storages import LiveStorages
from graph_trainer.core.sharding.ordered_gloo import BACKEND
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.device import own_cpu_backend
from graph_trainer.titan.trainer import GraphTrainer
from graph_trainer.train import leave

from torchtitan.distributed import utils as dist_utils  # isort: skip

FLAGS = {
    "eager": ["--compile.mode", "eager"],
    **{p: ["--parallelism.fsdp_reshard_after_forward", p] for p in ("never", "default", "always")},
    "plain": [
        *("--compile.bucketing.strategy", "none"),
        *("--compile.disable_passes", "schedule_overlap"),
    ],
    "auto": ["--compile.bucketing.strategy", "auto"],
    "regional": ["--compile.backend", "regional"],
}
# what the process groups and the ops that call them are named in a profile
_COMMUNICATION = ("gloo:", f"{BACKEND}:", "c10d::", "_c10d_functional::", "c10d_functional::")


class Variant:
    """A trainer that is stepped by hand, with a clock at each part of its step.

    `name` is words of FLAGS: "eager", or a reshard policy and what is done beside it; or "peer"
    and a policy. "gloo" beside them: on torch's own process groups.
    """

    def __init__(self, name: str, flags: list[str], folder: Path) -> None:
        words = name.split()
        self._of_peer = words[0] == "peer"
        own = [flag for word in words for flag in FLAGS.get(word, [])]
        config = load_config([*flags, *own, "--dump_folder", str(folder)])
        self._compiled = config.compile.backend != "eager"
        if self._of_peer:
            from benchmarks.peer import config_of_peer

            config = config_of_peer(config)
        groups = _groups_of_plain_gloo() if "gloo" in words else contextlib.nullcontext()
        with own_cpu_backend(), groups:
            self.trainer = config.build() if self._of_peer else GraphTrainer(config)
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._parts: Counter[str] = Counter()
        self._around: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self._batches = self.trainer.batch_generator(self.trainer.dataloader)
        self._clocked(self.trainer, "forward_backward_step", "forward_backward")
        self._clocked(self.trainer.optimizers, "step", "optimizer")
        self._clocked(self.trainer.optimizers, "zero_grad", "optimizer")

    def step(self, around: contextlib.AbstractContextManager[Any] | None = None) -> Counter[str]:
        """One whole train step, its forward and backward within `around`.

        Returns:
            wall seconds of the step and of its parts, and CPU seconds of the main thread and
            of all threads.
        """
        self._around = around or contextlib.nullcontext()
        self._parts = Counter()
        self.trainer.step += 1
        process, thread, start = time.process_time(), time.thread_time(), time.perf_counter()
        with self._clipping():
            self.trainer.train_step(self._batches)
        self._parts["step"] = time.perf_counter() - start
        self._parts["main_cpu"] = time.thread_time() - thread
        self._parts["all_cpu"] = time.process_time() - process
        return self._parts

    def timed_step(self) -> None:
        """A step whose seconds are kept."""
        for part, seconds in self.step().items():
            self.seconds[part].append(seconds)

    def profile(self) -> dict[str, float]:
        """Wall seconds of a profiled step: in compute, in communication, and the other parts."""
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        parts = dict(self.step(profiler))
        events = profiler.key_averages()
        for part, names in (("compute", ("aten::",)), ("gloo", _COMMUNICATION)):
            found = [e.self_cpu_time_total for e in events if e.key.startswith(names)]
            parts[part] = sum(found) / 1e6
        return parts

    def memory(self) -> dict[str, int]:
        """Peak bytes of forward and backward, measured and predicted, and what is issued."""
        graph = self._graph()
        if graph is None:
            return {}  # an eager step's tensors are DTensors, whose insides are not seen
        if self._compiled:
            return {}  # nor is what a compiled program holds
        live = LiveStorages()
        self.step(live)
        issued = [n for n in graph.graph.nodes if "c10d" in str(n.target)]
        return {
            "live_bytes": live.peak_bytes,
            "predicted_bytes": lifetimes(graph).peak_bytes,
            "collectives": sum("wait_tensor" not in str(n.target) for n in issued),
            "nodes": len(graph.graph.nodes),
        }

    def _graph(self) -> JointGraph | None:
        if self._of_peer:
            return JointGraph(self.trainer._traced_step.gm, Signature((), ()))
        if self.trainer.captured_step is None:
            return None
        return self.trainer.captured_step.joint_graphs()[-1]

    def _clocked(self, owner: Any, method: str, part: str) -> None:
        original = getattr(owner, method)

        def clocked(*args: Any, **kwargs: Any) -> Any:
            around = self._around if part == "forward_backward" else contextlib.nullcontext()
            with self._clock(part), around:
                return original(*args, **kwargs)

        setattr(owner, method, clocked)

    def _clipping(self) -> Any:
        original = dist_utils.clip_grad_norm_

        def clocked(*args: Any, **kwargs: Any) -> Any:
            with self._clock("clip"):
                return original(*args, **kwargs)

        return mock.patch.object(dist_utils, "clip_grad_norm_", clocked)

    @contextlib.contextmanager
    def _clock(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._parts[part] += time.perf_counter() - start


def _groups_of_plain_gloo() -> contextlib.AbstractContextManager[Any]:
    """Inside, meshes make groups of torch's gloo, whatever the backend of the world."""
    on_gloo = partial(dist.new_group, backend="gloo")
    return mock.patch("torch.distributed.device_mesh.new_group", on_gloo)


def run(plan: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Prepare all variants, then step them in turns."""
    variants: dict[str, Variant] = {}
    for name in plan["variants"]:
        variants[name] = Variant(name, plan["flags"], folder / name.replace(" ", "_"))
        for _ in range(plan["warmup"]):
            variants[name].step()
    for names in orders(plan["variants"], plan["rounds"]):
        for name in names:
            dist.barrier()
            variants[name].timed_step()
    results = {}
    for name, variant in variants.items():
        dist.barrier()
        results[name] = {
            "seconds": dict(variant.seconds),
            "profile": variant.profile(),
            "memory": variant.memory(),
        }
    return results


def main() -> None:
    """Run the plan in the file that the first argument names; write `<rank>.json` beside it."""
    path = Path(sys.argv[1])
    plan = json.loads(path.read_text())
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        if any(name.startswith("peer") for name in plan["variants"]):
            from benchmarks.peer import peer_on_cpu

            stack.enter_context(peer_on_cpu())
        results = run(plan, path.parent)
    (path.parent / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    main()
