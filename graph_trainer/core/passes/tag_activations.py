"""Decide which activations backward computes again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import fx

from graph_trainer.core.analysis.blocks import (
    forward_block_of,
    forward_blocks,
    is_read_elsewhere,
    may_run_again,
)
from graph_trainer.core.graph.annotations import module_of, recompute_policy, set_kept, tensor_of
from graph_trainer.core.graph.collective_kinds import Result
from graph_trainer.core.graph.data_sizes import exact_shape
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import (
    aliased_input,
    aten,
    collective_kind,
    is_collective,
    is_getitem,
    is_wait,
)
from graph_trainer.core.graph.writes import writes_of
from graph_trainer.core.passes.base import Stage, graph_pass
from graph_trainer.core.passes.context import PassContext, check_choice
from graph_trainer.errors import PassError

FIRST_AC_GRAPH_ID = 1 << 41
"""Of the first block. Far from the numbers of user checkpointing and from that of FSDP's tags."""

Matmuls = Literal["every_second", "keep", "recompute"]
Regather = Literal["policy", "always", "never"]

_LINEAR = (aten.mm.default, aten.linear.default)  # as torchtitan counts them
_EXPENSIVE = (
    aten.addmm.default,
    aten.baddbmm.default,
    aten.bmm.default,
    aten.convolution.default,
    aten._grouped_mm.default,
    aten._scaled_mm.default,
    # not expensive: a choice of experts that is made again may be another one
    aten.topk.default,
    aten.max.default,
)
_ATTENTION = re.compile(r"scaled_dot_product|(flash|efficient|flex|varlen).*att(ention|n)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TagActivationsOptions:
    """Options of `tag_activations` beside the policy for activations."""

    matmuls: Matmuls = "every_second"
    """What "selective", and no other policy, does with the matrix products of linear layers:
    "every_second" recomputes the second, fourth, ... of each block, as torchtitan does; "keep"
    none; "recompute" all."""

    regather: Regather = "policy"
    """Whether backward repeats the all-gathers of tensor parallelism: "always" costs
    communication, "never" the memory of their results. "policy": under "full" only. Reductions
    are repeated under "full" alone, and not with "never". Read under "selective", "full" and
    "layers"."""

    def __post_init__(self) -> None:
        for name, kind in (("matmuls", Matmuls), ("regather", Regather)):
            check_choice(f"TagActivationsOptions.{name}", getattr(self, name), kind)


@graph_pass(
    stage=Stage.TAG,
    summary="Tag activations to be freed after forward and computed again in backward",
    options_type=TagActivationsOptions,
)
def tag_activations(
    joint: JointGraph, options: TagActivationsOptions, context: PassContext
) -> None:
    """Write MUST_SAVE or MUST_RECOMPUTE on the forward nodes of every block, by the policy.

    Under "full" backward has only the blocks' inputs and computes the rest again; so it does under
    "layers" with every nth block, counted from 1. Under "selective" it also has matrix products,
    attention, results of collectives, and the first residual addition of each block. All other
    policies leave the graph as it is, with what the model's own checkpoints recompute.

    Kept under every policy: what another block or the loss reads, results of random ops, numbers
    that the program read from tensors, and what is written in place or read from memory that is. A
    tag that is there already wins; parameters are left to `tag_fsdp_unshards`.

    Relies on phases and modules. Changes metadata only. Linear in nodes.
    """
    policy = context.settings.activation_policy
    if policy not in ("selective", "full", "layers"):
        return
    writes = writes_of(joint.graph)
    every = context.settings.recompute_every_nth_block if policy == "layers" else 1
    blocks = forward_blocks(joint)
    if joint.signature.backward and 0 < len(blocks) < every:
        raise PassError(
            f"PassConfig.recompute_every_nth_block is {every}, and the model has only "
            f"{len(blocks)} blocks: none would be recomputed. Set 1 to {len(blocks)}, or the "
            "policy 'none'"
        )
    chosen = [*blocks.items()][every - 1 :: every]
    for number, (block, nodes) in enumerate(chosen):
        kept = {n for n in nodes if is_read_elsewhere(n, block) or not may_run_again(n, writes)}
        kept |= set(_communicated(nodes, options, context))
        if policy == "selective":
            kept |= set(_worth_keeping(nodes, block, options, context))
        for node in nodes:
            if recompute_policy(node) is None and not is_getitem(node):
                set_kept(node, node in kept, ac_graph_id=FIRST_AC_GRAPH_ID + number)


def _communicated(
    nodes: list[fx.Node], options: TagActivationsOptions, context: PassContext
) -> Iterator[fx.Node]:
    """Yield the collectives that backward does not repeat, and their waits."""
    full = context.settings.activation_policy != "selective"
    repeats = options.regather == "always" or (options.regather == "policy" and full)
    for node in nodes:
        if is_collective(node) or is_wait(node):
            kind = collective_kind(node if is_collective(node) else node.all_input_nodes[0])
            gathers = kind is not None and kind.result is Result.GATHERED
            if not (repeats and (gathers or full)):  # under "selective" only gathers are repeated
                yield node


def _worth_keeping(
    nodes: list[fx.Node], block: str, options: TagActivationsOptions, context: PassContext
) -> Iterator[fx.Node]:
    """Yield what "selective" keeps beside collectives."""
    counted, has_residual, uncounted = 0, False, context.settings.recompute_matmuls_of
    for node in nodes:
        if node.target in _LINEAR:
            if any(part in (module_of(node) or "") for part in uncounted):
                continue
            counted += 1
            if options.matmuls == "keep" or (options.matmuls == "every_second" and counted % 2):
                yield node
        elif node.target in _EXPENSIVE or _ATTENTION.search(str(node.target)):
            yield node
        elif not has_residual and _is_residual(node, block):
            # without it a schedule may hoist the recomputation of whole blocks
            has_residual = True
            yield node


def _is_residual(node: fx.Node, block: str) -> bool:
    """Return whether a node adds what the block was given to what it made of it."""
    if node.target is not aten.add.Tensor or len(node.all_input_nodes) != 2:
        return False
    shape, from_outside = exact_shape(tensor_of(node)), False
    for source in node.all_input_nodes:
        if exact_shape(tensor_of(source)) != shape:
            return False
        while (base := aliased_input(source)) is not None:
            source = base
        from_outside |= forward_block_of(source) != block
    return from_outside
