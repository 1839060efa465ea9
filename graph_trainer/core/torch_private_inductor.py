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

    This is the order of collectives, waits and kernels that Inductor does not generate (matrix
    products, attention), as the passes have decided it, the same on all ranks.

    Inductor's passes then neither merge nor move collectives. Only fusion could still move a wait:
    a kernel that needs it moves up when it is fused with an earlier one. So in a graph with
    collectives every node that is a call depends on the call before it, and a fusion that would
    make a cycle with these dependencies does not take place.
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
            if calls:  # fusion detects cycles by the ancestors
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

    torch._inductor.compile is the documented function for an FX graph; the settings are private
    names of its configuration. AOTAutograd would act on recompute tags again, after
    `rematerialize`, and refuses them on attention.
    """
    import torch._inductor
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner(graph_module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        # Inductor assumes that a single graph runs without gradients
        options |= {"is_inference": False, "is_backward": half == "backward"}
        return compile_fx_inner(graph_module, inputs, **options)

    ignore_tags = functorch_config.patch(remat_using_tags_for_fwd_loss_bwd_graph=False)
    with inductor_config.patch(settings_in_order()), ignore_tags, waits_for_copies_in_place():
        if not half:
            return torch._inductor.compile(module, list(examples))
        return compile_fx(module, list(examples), inner_compile=inner)  # type: ignore[return-value]


@contextlib.contextmanager
def waits_for_copies_in_place() -> Iterator[None]:
    """Register with Inductor that the result of `wait_copy` is its first input.

    Otherwise Inductor would reuse the input's memory for another value. It has such a rule for
    waits for collectives. Only a lowering can declare that a custom op shares memory with its
    inputs.
    """
    from torch._inductor.ir import FallbackKernel
    from torch._inductor.lowering import lowerings, register_lowering

    new_lowerings: dict[Any, Any] = {}
    ops = torch.ops.graph_trainer  # by name, because graph/host_copies.py imports this module

    @register_lowering(ops.wait_copy.default, type_promotion_kind=None, lowering_dict=new_lowerings)
    def wait_copy(copy: Any, source: Any) -> Any:
        FallbackKernel.create(ops.wait_copy_.default, copy, source)
        return copy

    with unittest.mock.patch.dict(lowerings, new_lowerings):
        yield


def compile_part_with_inductor(
    module: fx.GraphModule, examples: list[torch.Tensor]
) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """Compile a part of a step that writes no input and returns no view of one, by Inductor.

    Such a part does not need the code that AOTAutograd wraps around Inductor's program. So this
    returns the program itself, which empties its list of arguments and frees each input after its
    last reader. torch._inductor.compile does not return the program; the `inner_compile` of
    compile_fx does. A hit in AOTAutograd's cache would skip it; Inductor's FxGraphCache stays in
    use.
    """
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    programs: list[Any] = []

    def keep_program(graph_module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        programs.append(compile_fx_inner(graph_module, inputs, **options))
        return programs[-1]

    no_autograd_cache = functorch_config.patch(enable_autograd_cache=False)
    settings = settings_in_order()
    if any(example.device.type == "cpu" for example in examples):
        # Inductor would detect the same width. As a setting it is part of the cache's key: without
        # it the cache may return code for wider vectors than the CPU has, which does not compile.
        settings["cpp.simdlen"] = pick_vec_isa().bit_width()
    with torch.no_grad(), inductor_config.patch(settings), no_autograd_cache:
        compile_fx(module, list(examples), inner_compile=keep_program)
    if len(programs) != 1:
        raise ConfigError(
            f"Inductor made {len(programs)} programs of one region, because its fallbacks split a "
            'graph: use the backend "eager" or "inductor", which do without regions'
        )
    return programs[0]


def inductor_cache_folder() -> str:
    """Return the folder of Inductor's cache: TORCHINDUCTOR_CACHE_DIR, or a folder of this user in
    the one for temporary files. Raises an OSError if it cannot be made."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def inductor_has_cache() -> bool:
    """Return whether Inductor's cache is on: a user may have switched it off."""
    import torch._inductor.config as inductor_config

    return bool(inductor_config.fx_graph_cache and not inductor_config.force_disable_caches)


def compilations() -> int:
    """Return how many programs Inductor compiled in this process because its cache had none."""
    from torch._dynamo.utils import counters

    counts = counters["inductor"]
    return counts["fxgraph_cache_miss"] + counts["fxgraph_cache_bypass"]
