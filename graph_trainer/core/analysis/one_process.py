"""Run a joint graph on real values in one process, with the other ranks simulated.

Nothing is communicated: a rank's collectives are computed from what this rank sends. The other
ranks hold this rank's values times powers of two, each rank its own for eight ranks or fewer, so
that a part of another rank is not taken for one of this rank.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from graph_trainer.core.analysis.node_digests import Observe, Observed, run_graph
from graph_trainer.core.graph.annotations import tensor_of
from graph_trainer.core.graph.collective_kinds import KINDS, Effect, kind_of_op
from graph_trainer.core.graph.data_sizes import storage_bytes
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import given_value
from graph_trainer.core.graph.signature import InputKind, with_parts
from graph_trainer.core.torch_private_groups import process_groups
from graph_trainer.errors import VerificationError

REDUCTIONS = ("sum", "avg", "max", "min", "product")
"""Reductions that can be simulated."""
SIMULATED = {op for op, kind in KINDS.items() if kind.effect is Effect.STARTS and not kind.paired}
"""Functional collectives that can be simulated, by name without the namespace."""


class OneProcess(Observed):
    """Runs a graph as one rank, with collectives as functions of what this rank sends.

    Args:
        alike: whether the other ranks hold exactly what this rank holds.
        observe: called with every node and its value.
    """

    def __init__(
        self, module: fx.GraphModule, observe: Observe | None = None, *, alike: bool = False
    ) -> None:
        super().__init__(module, observe)
        self._alike = alike

    def fetch_attr(self, target: str) -> Any:
        """Return a copy of a tensor, and another generator in the place of one."""
        is_new = target not in self._attributes
        value = super().fetch_attr(target)
        if is_new and isinstance(value, torch.Generator):
            value = self._attributes[target] = torch.Generator(value.device).manual_seed(0)
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run an op, or simulate it if it is a collective."""
        schema = getattr(target, "_schema", None)
        kind = None if schema is None else kind_of_op(schema.name)
        if schema is None or kind is None or kind.effect is Effect.NONE:
            return super().call_function(target, args, kwargs)
        if kind.effect is Effect.WAITS:
            return args[0]
        arguments = {e.name: given_value(target, args, kwargs, e.name) for e in schema.arguments}
        name = schema.name.split("::")[1]
        if name not in SIMULATED:
            raise VerificationError(
                f"{target} sends between two ranks, which one process cannot simulate"
            )
        sent: Any = arguments.get("inputs", arguments.get("input"))
        many = sent if isinstance(sent, (list, tuple)) else [sent]
        results = [self._received(name, tensor, arguments) for tensor in many]
        written = many if name.endswith("_") else [arguments["out"]] if "out" in arguments else None
        if written is not None:
            results = [t.copy_(result) for t, result in zip(written, results, strict=True)]
        return results if isinstance(sent, (list, tuple)) else results[0]

    def _received(self, name: str, sent: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        ranks, me = members(str(arguments["group_name"]), arguments.get("group_size"))
        is_integer = not (sent.is_floating_point() or sent.is_complex())

        def factor_of(rank: int) -> float:
            # A power of two, so that products are exact. Gathers over two axes of a mesh of eight
            # ranks give what one over both gives.
            return 1.0 if self._alike or is_integer else 2.0 ** ((rank - me + 8) % 16 - 8)

        factors = [factor_of(rank) for rank in ranks]
        place = ranks.index(me)
        if name.startswith("all_gather"):
            return torch.cat([_times(sent, factor) for factor in factors])
        if name.startswith("broadcast"):
            return _times(sent, factor_of(arguments["src"]))
        if name.startswith("all_to_all"):
            # each rank sends as many rows as this one expects: its own, repeated as often as needed
            rows = sent.split(arguments["input_split_sizes"])[place]
            parts = []
            for size, factor in zip(arguments["output_split_sizes"], factors, strict=True):
                if len(rows) == 0:
                    part = rows.new_zeros(size, *rows.shape[1:])
                else:
                    part = rows[torch.arange(size, device=rows.device) % len(rows)]
                parts.append(_times(part, factor))
            return torch.cat(parts)
        if name.startswith("reduce_scatter"):
            sent = sent.chunk(len(ranks))[place]
        reduction = str(arguments["reduce_op"])
        if set(factors) == {1.0} and reduction == "avg":
            return sent.clone()
        if reduction in ("sum", "avg"):
            total = sent * (len(factors) if is_integer else sum(factors))
            return total / len(factors) if reduction == "avg" else total
        if reduction == "product":
            return sent.pow(len(factors)) * (1 if is_integer else math.prod(factors))
        ends = _times(sent, min(factors)), _times(sent, max(factors))
        return torch.maximum(*ends) if reduction == "max" else torch.minimum(*ends)


def members(group: str, size: int | None = None) -> tuple[tuple[int, ...], int]:
    """Return the global ranks of a group and which of them this process is.

    A group that only a graph by hand names has `size` ranks (2 where that is unknown), and this
    process is the first.
    """
    known = {str(known.group_name): ranks for known, ranks in process_groups()}
    if group in known:
        return known[group], dist.get_rank()
    return tuple(range(size or 2)), 0


def _times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor if factor == 1.0 else tensor * factor


def values_for(joint: JointGraph, seed: int = 0) -> list[torch.Tensor]:
    """Make real values for the placeholders, the same for the same seed.

    Weights are small enough that a deep model's values stay finite, buffers are positive (some
    are variances), integers are 0 or 1, which every index may be; that of an input with one element
    is 1, since a step may divide by it. Integers are the same for every seed: what they select can
    then be wrong on all ranks only. Strides are those of the graph.
    """
    generators = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(0)
    pairs = with_parts(joint.signature.inputs, joint.placeholders())
    return [_like(tensor_of(n), spec.kind, *generators) for spec, nodes in pairs for n in nodes]


def _like(
    fake: torch.Tensor,
    kind: InputKind,
    generator: torch.Generator,
    of_integers: torch.Generator,
) -> torch.Tensor:
    dtype = fake.dtype
    numel = fake.storage_offset() + storage_bytes(fake) // dtype.itemsize
    if not (dtype.is_floating_point or dtype.is_complex):
        filled = torch.randint(0, 2, (numel,), generator=of_integers).to(dtype)
        if fake.ndim == 0:  # a number of something, as of tokens: a loss is divided by it
            filled.fill_(1)
    elif kind is InputKind.BUFFER:
        filled = (torch.rand(numel, generator=generator) + 0.5).to(dtype)
    else:
        drawn = torch.complex64 if dtype.is_complex else torch.float32
        filled = torch.randn(numel, generator=generator, dtype=drawn)
        if kind is InputKind.PARAMETER and fake.ndim > 1:
            filled /= max(1, fake.shape[-1]) ** 0.5
        filled = filled.to(dtype)
    device = filled.to(fake.device)
    return device.as_strided(fake.shape, fake.stride(), fake.storage_offset())


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """Seed torch's generators with 0, and restore their states at the end."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        yield


def run(
    joint: JointGraph,
    values: Sequence[torch.Tensor] | None = None,
    *,
    alike: bool = False,
) -> list[torch.Tensor]:
    """Run a graph in one process; see `OneProcess`.

    Args:
        joint: the graph; no process group is used, whatever its collectives name.
        values: of the placeholders, which stay as they are; by default `values_for(joint)`.
        alike: as of `OneProcess`.

    Returns:
        copies of what the graph returns and, after them, what it leaves in its inputs.
    """
    simulated = functools.partial(OneProcess, alike=alike)
    with same_random_numbers():
        results = run_graph(
            joint, values_for(joint) if values is None else values, interpreter=simulated
        ).results
    return list(itertools.chain.from_iterable(results.values()))
