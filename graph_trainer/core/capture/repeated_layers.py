"""Layers of a model that are alike: three of them are traced, and the graph is extended.

A stack of layers (a ModuleList, ModuleDict or Sequential) often repeats one layer, or a short
sequence of different ones: a period. The first two periods of a run and the last are traced. While
the model calls those in between, they return what the second has returned, and compute nothing.
`extend` then inserts into the graph what they would have computed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx.traceback import get_current_meta

from graph_trainer.core.capture.alike import Tensors, counterparts
from graph_trainer.core.graph.annotations import Phase
from graph_trainer.core.names import clean_fqn
from graph_trainer.core.torch_private import (
    forward_replaced,
    modules_that_look_for_hooks,
    pytree,
)
from graph_trainer.errors import CaptureError

TRACED_PERIODS = 3


class NotRepeated(CaptureError):
    """The layers of a model turn out to differ in what is computed: all of them are traced."""


@dataclass(slots=True)
class Repetition:
    """A run of layers in one stack, the same ones every `period` layers."""

    names: list[str]
    """FQNs, in the order of the stack, in which the model must call them."""
    layers: list[nn.Module]
    period: int
    counterparts: list[Tensors]
    """By layer: by id of each tensor of its sample, its own."""
    _calls: list[_Call] = field(default_factory=list)
    _failure: str = ""

    @property
    def periods(self) -> int:
        """How many times the period is repeated, at least four."""
        return len(self.layers) // self.period

    def sample(self, place: int) -> int:
        """Return the place of the layer in the second period that a layer is like."""
        return self.period + place % self.period

    def is_traced(self, place: int) -> bool:
        """Tell whether a layer is traced: one of the first two periods, or of the last."""
        return place // self.period in (0, 1, self.periods - 1)

    @contextlib.contextmanager
    def skipping(self) -> Iterator[None]:
        """While entered: of the layers, only those that are traced compute anything.

        Raises:
            NotRepeated: in the model's forward or at the end. The model does not call each layer
                once and in order, or it gives a layer something else than its sample.
        """
        self._calls, self._failure = [], ""
        with contextlib.ExitStack() as stack:
            for place, layer in enumerate(self.layers):
                if self.is_traced(place):
                    enter = functools.partial(self._enter, place)
                    leave = functools.partial(self._leave, place)
                    # hooks of the layer's own run between these two
                    before = layer.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
                    stack.callback(before.remove)
                    stack.callback(layer.register_forward_hook(leave).remove)
                else:
                    skip = functools.partial(self._skip, place)
                    stack.enter_context(forward_replaced(layer, skip))
            yield
        calls = len(self._calls)
        self._calls = []  # holds tensors of the trace
        if not self._failure and calls != len(self.layers):
            self._failure = f"forward does not call '{self.names[calls]}'"
        if self._failure:  # the model may have caught the error
            raise NotRepeated(self._failure)

    def _enter(self, place: int, layer: nn.Module, args: Any, kwargs: Any) -> None:
        if _in_backward():
            return  # a checkpointed layer that is recomputed
        given, structure = pytree.tree_flatten((args, kwargs))
        if place != len(self._calls):
            self._refuse(f"forward does not call '{self.names[place]}' once and in order")
        if place >= 2 * self.period:
            self._check_given(place, given, structure)
        self._calls.append(_Call(given, structure))

    def _leave(self, place: int, layer: nn.Module, args: Any, output: Any) -> None:
        if not _in_backward():
            self._calls[place].output = output

    def _skip(self, place: int, *args: Any, **kwargs: Any) -> Any:
        if _in_backward():
            self._refuse(f"'{self.names[place]}' runs again in backward")
        self._enter(place, self.layers[place], args, kwargs)
        self._calls[place].output = self._calls[self.sample(place)].output
        return self._calls[place].output

    def _check_given(self, place: int, given: list[Any], structure: Any) -> None:
        """Check that a layer is given what its sample is, but for the results of the period
        before: those of the second period instead of the first."""
        sample = self._calls[self.sample(place)]
        carried: dict[int, Any] = {}
        for before in range(self.period):
            first, second = (self._calls[each].output for each in (before, before + self.period))
            pairs = zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=False)
            carried.update({id(one): other for one, other in pairs if isinstance(one, torch.Tensor)})
        wanted = [carried.get(id(each), each) for each in sample.given]
        same = structure == sample.structure and all(map(_is_same, given, wanted))
        if not same:
            self._refuse(
                f"'{self.names[place]}' is given something else than "
                f"'{self.names[self.sample(place)]}'"
            )

    def _refuse(self, why: str) -> None:
        self._failure = self._failure or why
        raise NotRepeated(why)


@dataclass(slots=True)
class _Call:
    """What a layer was given and has returned."""

    given: list[Any]
    structure: Any
    output: Any = None


def repetitions_in(model: nn.Module, tensors: Sequence[torch.Tensor]) -> list[Repetition]:
    """Find the runs of layers that are worth to be extended, at most one in a stack.

    Linear in what the model's modules hold, for each kind of layer.

    Args:
        model: the model.
        tensors: its parameters and buffers, which are inputs of the step.
    """
    inputs = {id(tensor): tensor for tensor in tensors}
    unseen = modules_that_look_for_hooks(model)  # traced, a hook of ours would change their kernels
    found: list[Repetition] = []
    inside: set[nn.Module] = set()
    for fqn, module in model.named_modules():
        is_stack = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        if not is_stack or module in inside or len(module._modules) <= TRACED_PERIODS:
            continue
        layers = {clean_fqn(f"{fqn}.{key}".strip(".")): m for key, m in module.named_children()}
        repetition = _longest_run(layers, inputs)
        if repetition is not None and unseen.isdisjoint(repetition.layers):
            found.append(repetition)
            inside.update(module.modules())
    return found


def _longest_run(
    stack: dict[str, nn.Module], inputs: Mapping[int, torch.Tensor]
) -> Repetition | None:
    names, layers = list(stack), list(stack.values())
    if len(layers) <= TRACED_PERIODS:
        return None
    # the kind of each layer is the place of the first one that it is like
    kinds: list[int] = []
    of_kind: list[Tensors] = []  # from the tensors of that first one
    for place, (name, layer) in enumerate(stack.items()):
        for kind in (*dict.fromkeys(kinds), place):
            pairs = counterparts(layers[kind], layer, (names[kind], name), inputs)
            if pairs is not None:
                break
        else:
            return None  # not even like itself
        kinds.append(kind)
        of_kind.append(pairs)
    start, period, stop = _most_repeated(kinds)
    if (stop - start) // period <= TRACED_PERIODS:
        return None
    pairs_of_run = []
    for place in range(start, stop):
        sample = start + period + (place - start) % period
        own, its = of_kind[place], of_kind[sample]
        pairs_of_run.append({id(its[key]): own[key] for key in own})
    return Repetition(names[start:stop], layers[start:stop], period, pairs_of_run)


def _most_repeated(kinds: list[int]) -> tuple[int, int, int]:
    """Return start, period and stop of the run with the most layers to skip. The shortest period
    of equals wins."""
    best = (0, 0, 1, 0)
    for period in range(1, len(kinds) // (TRACED_PERIODS + 1) + 1):
        start = 0
        for place in range(len(kinds)):
            if place - start >= period and kinds[place] != kinds[place - period]:
                start = place - period + 1
            periods = (place + 1 - start) // period
            skipped = (periods - TRACED_PERIODS) * period
            if skipped > best[0]:
                best = (skipped, start, period, start + periods * period)
    return best[1:]


def _in_backward() -> bool:
    return (get_current_meta().get("custom") or {}).get("phase") == Phase.BACKWARD.value


def _is_same(given: Any, wanted: Any) -> bool:
    plain = type(given) in (bool, int, float, str)
    return given is wanted or (plain and type(given) is type(wanted) and given == wanted)
