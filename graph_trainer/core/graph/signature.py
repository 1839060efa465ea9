"""What the placeholders and the outputs of a joint graph mean."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from graph_trainer.core.graph.subclasses import Layout


class InputKind(StrEnum):
    """What a placeholder takes."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    BATCH = "batch"
    SAVED = "saved"
    """A value that the forward half of a partitioned graph returned."""
    OUTPUT_GRADIENT = "output_gradient"
    """The gradient of the loss, or of an output of forward."""
    ACCUMULATED = "accumulated"
    """What the microbatches of a pipeline have added up of a gradient that is not reduced yet."""


class OutputKind(StrEnum):
    """What an output of the graph is."""

    LOSS = "loss"
    OUTPUT = "output"
    """A tensor that a model returns, where it was captured without a loss."""
    GRADIENT = "gradient"
    """The gradient of a parameter."""
    INPUT_GRADIENT = "input_gradient"
    """The gradient of a tensor of the batch, which a stage of a pipeline received from another."""
    SAVED = "saved"
    """A value that the forward half of a partitioned graph keeps for the backward half."""

    @property
    def is_gradient(self) -> bool:
        """Whether backward computes it."""
        return self in (OutputKind.GRADIENT, OutputKind.INPUT_GRADIENT)


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor that the step takes: `layout.num_tensors` consecutive placeholders."""

    kind: InputKind
    name: str
    """FQN of the parameter or buffer; the path in (args, kwargs) of a batch value."""
    layout: Layout
    requires_grad: bool = False
    aliases: tuple[str, ...] = ()
    """Other FQNs of a tied parameter."""
    mutated: bool = False
    """Whether the graph writes this tensor in place, as batch norm writes its statistics."""


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor that the step returns: `layout.num_tensors` consecutive values."""

    kind: OutputKind
    name: str
    """FQN of the parameter, or path of the batch value, for a gradient; "loss" for the loss."""
    layout: Layout


_Spec = TypeVar("_Spec", bound=Input | Output)
_V = TypeVar("_V")


@dataclass(frozen=True, slots=True)
class Signature:
    """What the placeholders and outputs of a joint graph mean, in order."""

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    parameters_without_grad: tuple[str, ...] = ()
    """FQNs of parameters that require a gradient and that do not influence the loss. Empty for a
    graph without backward: only backward shows which they are."""
    backward: bool = True
    """Whether the graph computes gradients. If not, it returns the loss and the saved values."""


def with_parts(
    specs: Iterable[_Spec], values: Sequence[_V]
) -> Iterator[tuple[_Spec, tuple[_V, ...]]]:
    """Yield every input (or output) with the values of its plain tensors."""
    start = 0
    for spec in specs:
        stop = start + spec.layout.num_tensors
        yield spec, tuple(values[start:stop])
        start = stop
