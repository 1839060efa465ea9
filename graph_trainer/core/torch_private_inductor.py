"""Every private name of Inductor, with the reason it is needed. See `torch_private`. All of them:
torch 2.13 to 2.15."""

from __future__ import annotations

import contextlib
import itertools
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import fx

from graph_trainer.errors import ConfigError


def settings_in_order() -> dict[str, Any]:
    """Return settings under which Inductor keeps the graph's order.

    It is the order of collectives, waits and kernels that Inductor does not write itself (matrix
    products, attention), which passes that all ranks share have decided.

    Collectives are neither merged nor moved by Inductor's passes. Fusion alone moves a wait: a
    kernel that needs it moves up when it is fused with an earlier one. So in a graph with
    collectives every node that is a call depends on the call before it, and what would make a cycle
    of that is not fused.
    """
    from torch._inductor.custom_graph_pass import CustomSchedulerPass
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.utils import contains_collective

    class KeepOrder(CustomSchedulerPass):
        def __call__(self, nodes: list[Any]) -> list[Any]:
            if not any(map(contains_collective, nodes)):
                return nodes
            calls = [node for node in nodes if node.is_extern() or node.is_template()]
            for before, node in itertools.pairwise(calls):
                result = next(iter(before.get_buffer_names()))
                node.add_fake_dep(WeakDep(result, node.get_name(), is_fake=True))
            if calls:  # fusion finds cycles by the ancestors
                calls[0].scheduler.compute_ancestors()
            return nodes

        def uuid(self) -> bytes:
            return Path(__file__).read_bytes()

    return {
        "reorder_for_compute_comm_overlap": False,
        "reorder_for_locality": False,
        "reorder_for_peak_memory": False,
        "bucket_all_gathers_fx": "none",
        "bucket_reduce_scatters_fx": "none",
        "bucket_all_reduces_fx": "none",
        "aten_distributed_optimizations.enable_overlap_scheduling": False,
        "_fuse_ddp_communication": False,
        "_micro_pipeline_tp": False,
        "_pre_fusion_custom_pass": KeepOrder(),
    }


def compile_with_inductor(
    module: fx.GraphModule, examples: list[torch.Tensor], half: str = ""
) -> Callable[..., Sequence[torch.Tensor]]:
    """Compile a graph by Inductor; return a function of its inputs.

    The graph has its backward already, or is "forward" or "backward".

    torch._inductor.compile is the documented way in for an FX graph; the settings are private
    names of its configuration. AOTAutograd would act on recompute tags once more, which
    `rematerialize` has acted on, and refuses them on attention.
    """
    import torch._inductor
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner(graph_module: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Any:
        # Inductor takes a graph that it gets alone for one without gradients
        how |= {"is_inference": False, "is_backward": half == "backward"}
        return compile_fx_inner(graph_module, inputs, **how)

    once = functorch_config.patch(remat_using_tags_for_fwd_loss_bwd_graph=False)
    with inductor_config.patch(settings_in_order()), once, waits_for_copies_in_place():
        if not half:
            return torch._inductor.compile(module, list(examples))
        return compile_fx(module, list(examples), inner_compile=inner)  # type: ignore[return-value]


@contextlib.contextmanager
def waits_for_copies_in_place() -> Iterator[None]:
    """Register with Inductor that the result of `wait_copy` is its first input.

    Inductor would otherwise give the input's memory to another value; it knows this of the waits
    for collectives. Only a lowering can declare what a custom op shares with its inputs.
    """
    from torch._inductor.ir import FallbackKernel
    from torch._inductor.lowering import lowerings, register_lowering

    ours: dict[Any, Any] = {}
    copies = torch.ops.graph_trainer  # by name: graph/host_copies.py is above this file

    @register_lowering(copies.wait_copy.default, type_promotion_kind=None, lowering_dict=ours)
    def wait_copy(copy: Any, source: Any) -> Any:
        FallbackKernel.create(copies.wait_copy_.default, copy, source)
        return copy

    with unittest.mock.patch.dict(lowerings, ours):
        yield


def compile_part_with_inductor(
    module: fx.GraphModule, examples: list[torch.Tensor]
) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """Compile a part of a step by Inductor; it writes no input and returns no view of one.

    Such a part needs none of what AOTAutograd wraps around Inductor's program: the function that
    is returned is the program itself, which empties the list that it is given and frees each
    input after its last reader. torch._inductor.compile does not return the program; the
    `inner_compile` of compile_fx does. AOTAutograd's own cache would skip it; FxGraphCache, which
    is below, stays in use.
    """
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    made: list[Any] = []

    def note(graph_module: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Any:
        made.append(compile_fx_inner(graph_module, inputs, **how))
        return made[-1]

    off = functorch_config.patch(enable_autograd_cache=False)
    settings = settings_in_order()
    if any(example.device.type == "cpu" for example in examples):
        # what Inductor detects, named, so that it is part of the cache's key: otherwise the cache
        # would return code for wider vectors than the CPU has, which does not compile
        settings["cpp.simdlen"] = pick_vec_isa().bit_width()
    with torch.no_grad(), inductor_config.patch(settings), off:
        compile_fx(module, list(examples), inner_compile=note)
    if len(made) != 1:
        raise ConfigError(
            f"Inductor made {len(made)} programs of one region: its fallbacks split a graph. "
            'The backends "eager" and "inductor" do without regions'
        )
    return made[0]


def inductor_cache_folder() -> str:
    """Return where Inductor keeps what it compiles: TORCHINDUCTOR_CACHE_DIR, or a folder of this
    user's below the one for temporary files. An OSError where it cannot be made."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def inductor_has_cache() -> bool:
    """Return whether Inductor keeps what it compiles: a user may have switched that off."""
    import torch._inductor.config as inductor_config

    return bool(inductor_config.fx_graph_cache and not inductor_config.force_disable_caches)


def compilations() -> int:
    """Return how many programs Inductor compiled in this process, for lack of them in its cache."""
    from torch._dynamo.utils import counters

    counts = counters["inductor"]
    return counts["fxgraph_cache_miss"] + counts["fxgraph_cache_bypass"]
