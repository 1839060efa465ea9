"""The tokens that routers sent to experts: counted in training, and the file that keeps them."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import torch
import torch.distributed as dist
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from torch import nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from graph_trainer.core.graph.annotations import block_of
from graph_trainer.errors import ConfigError
from graph_trainer.titan.files import check_outputs, published
from graph_trainer.titan.nonfinite_guard import local_tensor
from graph_trainer.titan.strict import Strict

SCHEMA: Final = "graph_trainer.routing/1"
"""Changes with every change of the format."""

SAVE_ROUTING = "metrics.save_routing"

_MOST_MICROBATCHES, _MOST_NUMBERS = 200, 4_000_000
"""How much a file has at most: a microbatch has a number for each layer and expert or rank."""

_COUNTER = "tokens_per_expert_E"

Count = Annotated[int, Field(ge=0, lt=2**53)]


class MetricsWithRouting(MetricsProcessor):
    """torchtitan's metrics, with a key for the tokens of experts. Logs nothing more."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """[metrics]: torchtitan's, with a file of the tokens that experts receive."""

        enable_tensorboard: bool = True
        """Whether to write TensorBoard's files, to save_tb_folder of the dump folder."""

        console: Literal["normal", "quiet", "verbose"] = "normal"
        """
        What a rank shows: "quiet" (or --quiet) leaves steps, warnings and errors; "verbose" (or
        --verbose) is all that torchtitan logs, in its format, which console.log in the dump folder
        has as well.
        """

        save_routing: str | None = None
        """
        A .json file, by a path from dump_folder on, for the tokens that each expert receives, by
        step and layer, which `graph-trainer plan --routing` takes. It has the microbatches in which
        tokens are spread most unevenly, at most 200. Written whenever a step is logged and when
        training ends; a run that is resumed goes on with the file. A microbatch then waits for one
        more all-reduce, with expert parallelism for two.
        """


def mixtures_of(model: Any) -> dict[str, Any]:
    """Return the configs of torchtitan's mixtures of experts in a model, by FQN of their layer."""
    lists = ((name, getattr(model, name, None) or ()) for name in ("layers", "mtp_layers"))
    layers = {f"{name}.{i}": layer for name, several in lists for i, layer in enumerate(several)}
    mixtures = {name: getattr(layer, "moe", None) for name, layer in layers.items()}
    return {name: moe for name, moe in mixtures.items() if hasattr(moe, "routed_experts")}


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
        for number, microbatch in enumerate(self.microbatches):
            for name, rows, length in (
                ("tokens", microbatch.tokens, experts),
                ("received", microbatch.received, self.world_size),
            ):
                if rows is None:
                    continue
                if [len(row) for row in rows] != [length] * len(self.layers):
                    problem = f"it must have {len(self.layers)} layers of {length} numbers"
                elif not all(map(any, rows)):
                    problem = "a layer has no token"
                else:
                    continue
                raise PydanticCustomError("shape", f"microbatches.{number}.{name}: {problem}")
            of_ranks = microbatch.received if self.expert_parallel_degree > 1 else None
            if of_ranks is not None and [*map(sum, microbatch.tokens)] != [*map(sum, of_ranks)]:
                problem = "tokens and received have different sums in a layer"
                raise PydanticCustomError("sums", f"microbatches.{number}: {problem}")
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
    routing = Routing.read(path, flag, remedy)
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

    torchtitan's mixtures add a rank's tokens to a buffer of float32, from which they are counted
    while it begins at zero. Summed over ranks that is how often each expert was chosen. What a
    rank's experts receive is the sum over its expert-parallel group, for the experts that the rank
    has. Rank 0 keeps the most uneven microbatches.

    Args:
        model: with torchtitan's mixtures of experts.
        path: the file.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, model: nn.Module, dims: ParallelDims, path: Path) -> None:
        self._model = model
        self._dims = dims
        self._path = path
        self._step = self._microbatch = -1
        self._kept: list[tuple[tuple[int, int], int, RoutedMicrobatch]] = []
        """A heap: unevenness, a number that tells equal ones apart, what is kept."""
        self._seen = 0
        self._has_news = False
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
        buffers = list(self._buffers().values())
        before = [buffer.clone() for buffer in buffers]
        for buffer in buffers:
            buffer.zero_()
        try:
            yield
        finally:
            counts = torch.stack([*map(local_tensor, buffers)]).long()
            for buffer, earlier in zip(buffers, before, strict=True):
                buffer.add_(earlier)
        both = self._summed(counts)
        is_first = self._step == -1
        self._microbatch = self._microbatch + 1 if step == self._step else 0
        self._step = step
        if dist.get_rank() == 0:
            if is_first and step > 1:
                self._take_over(step)
            experts = counts.shape[1]
            tokens, received = both[:, :experts], both[:, experts:]
            # without expert parallelism the ranks of tensor parallelism count the same tokens
            counted_by = 1 if self._dims.ep_enabled else self._dims.tp
            microbatch = RoutedMicrobatch(
                step=step,
                microbatch=self._microbatch,
                tokens=(tokens // counted_by).tolist(),
                received=received.tolist(),
            )
            self._keep(microbatch)

    def _keep(self, microbatch: RoutedMicrobatch) -> None:
        """Keep a microbatch if it is one of the most uneven: by the most that one rank's experts
        received in all layers, then by the most that one expert received in a layer."""
        tokens, received = torch.tensor(microbatch.tokens), torch.tensor(microbatch.received)
        unevenness = int(received.sum(dim=0).max()), int(tokens.max())
        self._seen += 1
        entry = (unevenness, self._seen, microbatch)
        most = max(1, _MOST_NUMBERS // (tokens.numel() + received.numel()))
        if len(self._kept) < min(_MOST_MICROBATCHES, most):
            heapq.heappush(self._kept, entry)
            self._has_news = True
        elif heapq.heappushpop(self._kept, entry) is not entry:
            self._has_news = True

    def _take_over(self, step: int) -> None:
        """Go on with the file of the run that this one resumes, up to a step."""
        try:
            earlier = Routing.model_validate_json(self._path.read_bytes())
        except (OSError, ValueError):  # there is none, or not one of ours: it is replaced
            return
        shape = (dist.get_world_size(), self._dims.ep, tuple(self._buffers()))
        if (earlier.world_size, earlier.expert_parallel_degree, earlier.layers) != shape:
            return
        for microbatch in earlier.microbatches:
            if microbatch.step < step and microbatch.received is not None:
                self._keep(microbatch)

    def write(self) -> None:
        """Write what is kept, on rank 0, if it is not what the file has, which is whole at any
        time. Where that is impossible the log says so: no training ends for it."""
        if dist.get_rank() != 0 or not self._has_news:
            return
        kept = [microbatch for _, _, microbatch in self._kept]
        kept.sort(key=lambda microbatch: (microbatch.step, microbatch.microbatch))
        routing = Routing.model_construct(
            schema=SCHEMA,
            world_size=dist.get_world_size(),
            expert_parallel_degree=self._dims.ep,
            layers=tuple(self._buffers()),
            microbatches=kept,
        )
        try:
            with published(self._path) as file:
                file.write(routing.model_dump_json(by_alias=True) + "\n")
            self._has_news = False
        except ConfigError as error:
            logger.warning(f"{SAVE_ROUTING}: {error}")

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return by layer the buffer to which its mixture adds this rank's tokens."""
        named = self._model.named_buffers()
        return {block_of(name) or name: b for name, b in named if name.endswith(_COUNTER)}

    def _summed(self, counts: torch.Tensor) -> torch.Tensor:
        """Return by layer the tokens of each expert that all ranks have counted, then what the
        experts of each rank received, given the tokens of this rank [layer, expert].

        [layer, experts + ranks]: on CPU on rank 0, where it is read.
        """
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
        return both.cpu() if dist.get_rank() == 0 else both
