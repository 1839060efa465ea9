"""Layers of a model that are alike: three of them are traced, and the graph is extended.

A stack of layers (a ModuleList, ModuleDict or Sequential) often repeats one layer, or a short
sequence of different ones: a period. The first two periods of a run and the last are traced. While
the model calls those in between, they return aliases of what the second has returned, and compute
nothing. `extend` then inserts into the graph what they would have computed.
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

from graph_trainer.core.capture.alike import (
    ATOMS,
    Alike,
    Attribute,
    Tensors,
    compare,
    is_compared_by_torch,
)
from graph_trainer.core.graph.annotations import Phase
from graph_trainer.core.names import clean_fqn
from graph_trainer.core.torch_private import (
    ambient_state,
    forward_replaced,
    hooks_of,
    pytree,
    reads_seen,
    tensor_hooks,
    without_torch_functions,
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
    layers: list[nn.Module] = field(repr=False)
    period: int
    counterparts: list[Tensors] = field(repr=False)
    """By layer: by id of each tensor of its sample, its own."""
    positions: set[Attribute]
    """Where layers have their numbers, which the step must not read."""

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

    def left_out(self) -> set[int]:
        """Return the ids of the tensors of layers that are not traced."""
        return {
            id(tensor)
            for place, tensors in enumerate(self.counterparts)
            for sample, tensor in tensors.items()
            if id(tensor) != sample and not self.is_traced(place)
        }

    @contextlib.contextmanager
    def skipping(self) -> Iterator[None]:
        """While entered: of the layers, only those that are traced compute anything.

        Raises:
            NotRepeated: in the model's forward or at the end. The model does not call each layer
                once and in order, or it gives a layer something else than its sample.
        """
        calls = _Calls(self)
        modules = {module for layer in self.layers for module in layer.modules()}
        with contextlib.ExitStack() as stack:
            for place, layer in enumerate(self.layers):
                if self.is_traced(place):
                    enter = functools.partial(calls.enter, place)
                    leave = functools.partial(calls.leave, place)
                    # hooks of the layer's own run between these two
                    before = layer.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
                    stack.callback(before.remove)
                    stack.callback(layer.register_forward_hook(leave).remove)
                else:
                    skip = functools.partial(calls.skip, place)
                    stack.enter_context(forward_replaced(layer, skip))
            for kind, name in self.positions:
                stack.enter_context(reads_seen(kind, name, modules, calls.see_position_read))
            yield
        calls.check_complete()


@dataclass(slots=True)
class _Call:
    """What a layer was given, in which modes, and has returned."""

    given: list[Any]
    structure: Any
    ambient: tuple[Any, ...]
    output: list[Any] = field(default_factory=list)
    of_output: Any = None
    """The structure of the output."""


class _Calls:
    """The calls of a repetition's layers in one trace."""

    def __init__(self, repetition: Repetition) -> None:
        self._run = repetition
        self._done: list[_Call] = []
        self._tensors: list[list[int]] = []
        """By layer the ids of its parameters and buffers when forward begins."""
        self._failure = ""

    def enter(self, place: int, layer: nn.Module, args: Any, kwargs: Any) -> None:
        """Note and check a call before it runs."""
        if _in_backward():
            return  # a checkpointed layer that is recomputed
        run, name = self._run, self._run.names[place]
        self._tensors = self._tensors or list(map(_ids_in, run.layers))
        if self._tensors[place] != _ids_in(run.layers[place]):  # by torch.func.functional_call
            self._refuse(f"'{name}' runs with other parameters or buffers than its own")
        if place != len(self._done):
            self._refuse(f"forward does not call '{name}' once and in order")
        call = _Call(*pytree.tree_flatten((args, kwargs)), _ambient(layer))
        for each in call.given:
            if not isinstance(each, torch.Tensor) and not _is_constant(each):
                self._refuse(f"'{name}' is given a {type(each).__name__}, which it may change")
        if place >= 2 * run.period:
            self._check_given(place, call)
        self._done.append(call)

    def leave(self, place: int, layer: nn.Module, args: Any, output: Any) -> None:
        """Note what a layer has returned."""
        if not _in_backward() and place < len(self._done):
            call = self._done[place]
            call.output, call.of_output = pytree.tree_flatten(output)

    def skip(self, place: int, *args: Any, **kwargs: Any) -> Any:
        """Return aliases of what the sample has returned: each layer's results are objects of its
        own, by which the next layer is seen to be given these and no others."""
        if _in_backward():
            self._refuse(f"'{self._run.names[place]}' runs again in backward")
        self.enter(place, self._run.layers[place], args, kwargs)
        call, sample = self._done[place], self._done[self._run.sample(place)]
        for each in sample.output:
            is_tensor = isinstance(each, torch.Tensor)
            call.output.append(torch.ops.aten.alias.default(each) if is_tensor else each)
        call.of_output = sample.of_output
        return pytree.tree_unflatten(call.output, call.of_output)

    def see_position_read(self, module: nn.Module, name: str) -> None:
        """Refuse that a layer's number is read."""
        self._refuse(f"forward reads '{name}' of a {type(module).__name__}, its layer's number")

    def check_complete(self) -> None:
        """Refuse a trace in which a layer was not called, or whose refusal the model caught."""
        run, calls = self._run, len(self._done)
        self._done = []  # holds tensors of the trace
        if not self._failure and calls != len(run.layers):
            self._failure = f"forward does not call '{run.names[calls]}'"
        if self._failure:
            raise NotRepeated(self._failure)

    def _check_given(self, place: int, call: _Call) -> None:
        """Check that a layer is given what its sample is, but for the results of layers: those of
        the period before instead of the first, and those of its own period."""
        run = self._run
        begin, of_sample = place - place % run.period, run.sample(place)
        sample = self._done[of_sample]
        results = [(q, begin - run.period + q) for q in range(run.period)]
        results += [(run.sample(q), q) for q in range(begin, place)]
        carried: dict[int, Any] = {}
        for one, other in results:
            first, second = self._done[one], self._done[other]
            if first.of_output != second.of_output:
                self._refuse(f"'{run.names[other]}' returns something else than '{run.names[one]}'")
            pairs = zip(first.output, second.output, strict=True)
            tensors = [(a, b) for a, b in pairs if isinstance(a, torch.Tensor)]
            carried.update({id(a): b for a, b in tensors})
            if any(_marks(a) != _marks(b) for a, b in tensors):
                self._refuse(
                    f"what '{run.names[other]}' returns has other hooks or attributes than what "
                    f"'{run.names[one]}' does"
                )
        wanted = [carried.get(id(each), each) for each in sample.given]
        name, like = run.names[place], run.names[of_sample]
        if call.structure != sample.structure or not all(map(_is_same, call.given, wanted)):
            self._refuse(f"'{name}' is given something else than '{like}'")
        if call.ambient != sample.ambient:
            self._refuse(f"'{name}' runs in other modes or with other hooks than '{like}'")

    def _refuse(self, why: str) -> None:
        self._failure = self._failure or why
        raise NotRepeated(why)


def repetition_in(model: nn.Module, tensors: Sequence[torch.Tensor]) -> Repetition | None:
    """Find the run of layers that leaves out most of a model, None where nothing repeats.

    Args:
        model: the model. The work is linear in what its modules hold, for each kind of layer.
        tensors: its parameters and buffers, which are inputs of the step.
    """
    inputs = {id(tensor): tensor for tensor in tensors}
    best, most = None, 0
    for fqn, module in model.named_modules():
        is_stack = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        if not is_stack or len(module) <= TRACED_PERIODS:
            continue
        size = sum(1 for _ in module.modules())
        if size <= most:  # it cannot leave out more
            continue
        layers = {clean_fqn(f"{fqn}.{key}".strip(".")): m for key, m in module.named_children()}
        run = _longest_run(layers, inputs)
        if run is not None:
            skipped = [m for place, m in enumerate(run.layers) if not run.is_traced(place)]
            left_out = sum(1 for layer in skipped for _ in layer.modules())
            if left_out > most:
                best, most = run, left_out
    return best


def _longest_run(
    stack: dict[str, nn.Module], inputs: Mapping[int, torch.Tensor]
) -> Repetition | None:
    names, layers = list(stack), list(stack.values())
    # the kind of each layer is the place of the first one that it is like
    kinds: list[int] = []
    of_kind: list[Alike] = []  # from what that first one has
    for place, (name, layer) in enumerate(stack.items()):
        for kind in (*dict.fromkeys(kinds), place):
            alike = compare(layers[kind], layer, (names[kind], name), inputs)
            if alike is not None:
                break
        else:
            return None  # not even like itself
        kinds.append(kind)
        of_kind.append(alike)
    start, period, stop = _most_repeated(kinds)
    if (stop - start) // period <= TRACED_PERIODS:
        return None
    pairs_of_run: list[Tensors] = []
    for place in range(start, stop):
        sample = start + period + (place - start) % period
        own, its = of_kind[place].tensors, of_kind[sample].tensors
        pairs_of_run.append({id(its[key]): own[key] for key in own})
    # a tensor is of one layer or of all: gradients of some would be summed
    owned: set[int] = set()
    for first in range(period):
        like = pairs_of_run[first::period]
        for key in like[0]:
            ids = {id(pairs[key]) for pairs in like}
            if len(ids) > 1 and (len(ids) < len(like) or not owned.isdisjoint(ids)):
                return None
            owned |= ids if len(ids) > 1 else set()
    positions = set().union(*(alike.positions for alike in of_kind[start:stop]))
    return Repetition(names[start:stop], layers[start:stop], period, pairs_of_run, positions)


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


def _ids_in(layer: nn.Module) -> list[int]:
    return [id(tensor) for tensor in (*layer.parameters(), *layer.buffers())]


def _ambient(layer: nn.Module) -> tuple[Any, ...]:
    """Return the modes in which a layer runs, what it is annotated with, and the modes and number
    of hooks of the modules inside, which a step may set for one call."""
    inside = list(layer.modules())[1:]  # the layer itself is called, and so its hooks are seen
    with without_torch_functions():
        hooks = len(hooks_of(inside))
    custom = get_current_meta().get("custom") or {}
    kept = {key: value for key, value in custom.items() if key not in ("phase", "module")}
    return (*ambient_state(), kept, hooks, [module.training for module in inside])


def _is_constant(value: Any) -> bool:
    """Tell whether what a layer is given cannot change: numbers, texts, and objects of torch."""
    return type(value) in ATOMS or type(value).__module__.partition(".")[0] == "torch"


def _is_same(given: Any, wanted: Any) -> bool:
    """Tell whether a layer is given what another one is: one object, or equal constants."""
    if given is wanted or type(given) is not type(wanted):
        return given is wanted
    if type(given) in ATOMS:
        return repr(given) == repr(wanted)  # -0.0 is not 0.0
    is_value = not isinstance(given, torch.Tensor) and is_compared_by_torch(given)
    return is_value and given == wanted


def _marks(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what a model may have set on a tensor: its hooks, and attributes by their names."""
    return (*tensor_hooks(tensor), set(vars(tensor)))
