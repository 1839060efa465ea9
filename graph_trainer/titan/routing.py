"""The tokens that routers sent to experts: counted in training, and the file that keeps them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import torch
import torch.distributed as dist
from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed import ParallelDims

from graph_trainer.core.graph.annotations import block_of
from graph_trainer.errors import ConfigError
from graph_trainer.titan.files import check_outputs, published
from graph_trainer.titan.strict import Strict, first_problem

SCHEMA: Final = "graph_trainer.routing/1"
"""Changes with every change of the format."""

SAVE_ROUTING = "metrics.save_routing"

KEPT = 200
"""The most microbatches that a file has."""

_COUNTER = "tokens_per_expert_E"

Count = Annotated[int, Field(ge=0, lt=2**53)]


class MetricsWithRouting(MetricsProcessor):
    """torchtitan's metrics, with a key for the tokens of experts. Logs nothing more."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """[metrics]: torchtitan's, with a file of the tokens that experts receive."""

        save_routing: str | None = None
        """
        A file below dump_folder for the tokens that each expert receives, by step and layer, which
        `graph-trainer plan --routing` takes. It has the 200 microbatches in which tokens are spread
        most unevenly. Written whenever a step is logged and when training ends. A step then waits
        for one more all-reduce.
        """


def mixtures_of(model: Any) -> dict[str, Any]:
    """Return the configs of a model's mixtures of experts, by the FQN of their layer."""
    lists = ((name, getattr(model, name, None) or ()) for name in ("layers", "mtp_layers"))
    layers = {f"{name}.{i}": layer for name, several in lists for i, layer in enumerate(several)}
    mixtures = {name: getattr(layer, "moe", None) for name, layer in layers.items()}
    return {name: moe for name, moe in mixtures.items() if moe is not None}


class RoutedMicrobatch(Strict):
    """Where the tokens of one microbatch went; each counts once for every expert that it chose."""

    step: Count
    microbatch: Count
    """Its number within the step, from 0."""
    tokens: list[list[Count]]
    """By layer and expert, those of all ranks."""
    received: list[list[Count]] | None = None
    """By layer and rank: what a rank's experts received. None where it is not known."""


class Routing(Strict):
    """A file that `metrics.save_routing` names."""

    schema_: Literal["graph_trainer.routing/1"] = Field(alias="schema")
    world_size: Annotated[int, Field(ge=1)]
    expert_parallel_degree: Annotated[int, Field(ge=1)]
    layers: tuple[str, ...]
    """FQNs of the layers with experts, in order."""
    microbatches: Annotated[list[RoutedMicrobatch], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_shapes(self) -> Routing:
        """Check that every microbatch counts the same layers, experts and ranks, and tokens."""
        experts = len(self.microbatches[0].tokens[0]) if self.microbatches[0].tokens else 0
        for number, each in enumerate(self.microbatches):
            for name, rows, length in (
                ("tokens", each.tokens, experts),
                ("received", each.received, self.world_size),
            ):
                if rows is None:
                    continue
                if [len(row) for row in rows] != [length] * len(self.layers):
                    problem = "it must have {layers} layers of {length} numbers"
                elif not all(map(any, rows)):
                    problem = "a layer has no token"
                else:
                    continue
                raise PydanticCustomError(
                    "shape",
                    "microbatches.{number}.{name}: " + problem,
                    {
                        "number": number,
                        "name": name,
                        "layers": len(self.layers),
                        "length": length,
                    },
                )
        return self

    @property
    def num_experts(self) -> int:
        """Of every layer."""
        return len(self.microbatches[0].tokens[0])


def read_routing(path: Path, flag: str, mixtures: Mapping[str, Any]) -> Routing:
    """Read a routing and check that it is of a model.

    Args:
        flag: what names the file, for messages.
        mixtures: what `mixtures_of` returns of the model.

    Raises:
        ConfigError: the file cannot be read, is not a routing, contradicts itself or is of another
            model.
    """
    remedy = f"Name a file that {SAVE_ROUTING} wrote for this model."
    try:
        routing = Routing.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ConfigError(f"{flag} {path}: {first_problem(error)}. {remedy}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{flag} {path}: cannot be read: {reason}. {remedy}") from error
    experts = {moe.num_experts for moe in mixtures.values()}
    if routing.layers != tuple(mixtures):
        raise ConfigError(
            f"{flag} {path}: layers = {_several(routing.layers)}, and the model has experts in "
            f"{_several(tuple(mixtures))}. {remedy}"
        )
    if experts != {routing.num_experts}:
        raise ConfigError(
            f"{flag} {path}: microbatches.0.tokens: {routing.num_experts} experts a layer, and the "
            f"model has {', '.join(map(str, sorted(experts)))}. {remedy}"
        )
    return routing


def _several(layers: Sequence[str]) -> str:
    if len(layers) < 3:
        return " and ".join(layers) or "none"
    return f"{len(layers)} layers, {layers[0]} to {layers[-1]}"


class RoutingRecorder:
    """Counts the tokens of experts in every microbatch, and writes them on rank 0.

    torchtitan's mixtures add a rank's tokens to a buffer, which a hook before the optimizer's step
    sets to zero. Summed over ranks that is how often each expert was chosen. What a rank's experts
    receive is the sum over its expert-parallel group, for the experts that the rank has.

    Args:
        model: with torchtitan's mixtures of experts.
        dims: the mesh of the run.
        path: the file.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, model: nn.Module, dims: ParallelDims, path: Path) -> None:
        self._model = model
        self._dims = dims
        self._path = path
        self._step = self._microbatch = -1
        self._kept: list[RoutedMicrobatch] = []
        if dist.get_rank() == 0:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f'{SAVE_ROUTING} = "{path}": its folder cannot be made ({error.strerror}). '
                    "Name a file below dump_folder."
                ) from error
            check_outputs({SAVE_ROUTING: path})

    @contextlib.contextmanager
    def microbatch(self, step: int) -> Iterator[None]:
        """While entered: one microbatch of a step. All ranks leave it together."""
        before = self._counts()
        yield
        tokens, received = self._summed(self._counts() - before)
        self._microbatch = self._microbatch + 1 if step == self._step else 0
        self._step = step
        if dist.get_rank() == 0:
            self._keep(tokens, received)

    def _keep(self, tokens: list[list[int]], received: list[list[int]]) -> None:
        self._kept.append(
            RoutedMicrobatch(
                step=self._step, microbatch=self._microbatch, tokens=tokens, received=received
            )
        )
        if len(self._kept) > KEPT:
            self._kept.remove(min(self._kept, key=_unevenness))

    def write(self) -> None:
        """Write what is kept, on rank 0; the file is whole at any time.

        Raises:
            ConfigError: it cannot be written.
        """
        if dist.get_rank() != 0 or not self._kept:
            return
        kept = sorted(self._kept, key=lambda each: (each.step, each.microbatch))
        document = {
            "schema": SCHEMA,
            "world_size": dist.get_world_size(),
            "expert_parallel_degree": self._dims.ep,
            "layers": list(self._buffers()),
            "microbatches": [each.model_dump() for each in kept],
        }
        with published(self._path) as file:
            file.write(json.dumps(document, separators=(",", ":")) + "\n")

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return by layer the buffer to which its mixture adds this rank's tokens."""
        named = self._model.named_buffers()
        return {block_of(name) or name: b for name, b in named if name.endswith(_COUNTER)}

    def _counts(self) -> torch.Tensor:
        """Return this rank's tokens so far, [layer, expert]."""
        buffers = self._buffers().values()
        return torch.stack([b.to_local() if isinstance(b, DTensor) else b for b in buffers]).long()

    def _summed(self, counts: torch.Tensor) -> tuple[list[list[int]], list[list[int]]]:
        """Return the tokens of all ranks by layer and expert, and by layer and rank what a rank's
        experts received, given the tokens of this rank [layer, expert]."""
        dims, (layers, experts) = self._dims, counts.shape
        received = counts
        if dims.ep_enabled:
            mesh = dims.get_mesh("ep")
            group = counts.clone()
            dist.all_reduce(group, group=mesh.get_group())
            # experts are divided in order: the first of them belong to the first rank
            received = group.chunk(dims.ep, dim=1)[mesh.get_local_rank()]
        both = counts.new_zeros(layers, experts + dist.get_world_size())
        both[:, :experts] = counts
        both[:, experts + dist.get_rank()] = received.sum(dim=1)
        dist.all_reduce(both)
        both = both.cpu()
        # without expert parallelism the ranks of tensor parallelism have counted the same tokens
        twice = 1 if dims.ep_enabled else dims.tp
        return (both[:, :experts] // twice).tolist(), both[:, experts:].tolist()


def _unevenness(each: RoutedMicrobatch) -> tuple[int, int]:
    """Return what to compare microbatches by: the most that one rank's experts received in all
    layers, then the most that one expert received in a layer."""
    assert each.received is not None
    most = max(sum(layers) for layers in zip(*each.received, strict=True))
    return most, max(map(max, each.tokens))
